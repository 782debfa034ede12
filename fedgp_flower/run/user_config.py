"""The run configuration as a user gives it: a TOML file, ``KEY=VALUE`` words, paths from where the user stands."""

from __future__ import annotations

import os
import shlex
import tomllib
from collections.abc import Sequence
from pathlib import Path

from fedgp_flower.config import assignments, defaults, flatten
from fedgp_flower.errors import ConfigError
from fedgp_flower.options import FlatConfig, Value
from fedgp_flower.run.registry import default_config, option_classes, parse_config


def read_config(path: Path) -> dict[str, Value]:
    """The flat keys of a TOML file, whose tables may be nested."""
    try:
        return flatten(tomllib.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def parse_assignments(words: Sequence[str]) -> dict[str, Value]:
    """``KEY=VALUE`` words with the types their keys have; see :func:`fedgp_flower.config.assignments`."""
    return assignments(words, defaults(option_classes().values()))


def complete_config(given: FlatConfig, folder: Path, source: str = "") -> dict[str, Value]:
    """Validate keys and fill in what only the caller's shell knows: absolute paths, and a name for the run's folder.

    The ServerApp and the sites run elsewhere than ``folder``, so a relative path would mean another place to them.
    ``source`` is part of that name; otherwise the data set is.
    """
    config = parse_config(given)
    out = dict(given) | {"output-dir": str(folder / config.output_dir)}
    if data := config.data_dir or os.environ.get("FEDGP_DATA", ""):
        out["data-dir"] = str((folder / data).resolve())
    table = folder / config.dataset
    if table.is_file():
        out["dataset"] = str(table.resolve())
    stem = table.name.partition(".")[0] if table.is_file() else ""
    out["name"] = config.run_name(source or stem)
    return out


def for_flower(config: FlatConfig) -> dict[str, Value]:
    """The keys as Flower takes them: those that ``pyproject.toml`` does not list travel in ``extra``."""
    listed = default_config()
    further = {key: value for key, value in config.items() if key not in listed}
    if not further:
        return dict(config)
    words = [
        shlex.quote(f"{key}={str(value).lower() if isinstance(value, bool) else value}")
        for key, value in further.items()
    ]
    kept = {key: value for key, value in config.items() if key in listed}
    return kept | {"extra": " ".join(filter(None, [str(config.get("extra", "")), *words]))}


def run_folder(config: FlatConfig) -> Path:
    """Where a run with this completed configuration writes its files."""
    return Path(str(config["output-dir"])) / str(config["name"])
