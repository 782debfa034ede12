"""The one way to run a study: ``python -m simulations.run NAME [arguments]``, from the root of the project.

    python -m simulations.run list                     every study with its title
    python -m simulations.run classes --help           the arguments of one
    python -m simulations.run classes --sets bank --write     print its tables and write its page

A study is a module of ``simulations/studies`` with a function ``study``. Its parameters are the arguments of the
command line, it yields rows, and its module's docstring is the title and the text of its page. A row that has a cell
named ``table`` belongs to the table of that name. Runs and results that were made before are read from ``results/``,
so that a long study can be stopped and started again. ``--write`` puts the page into ``simulations/results/NAME.md``.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import logging
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from simulations import common
from simulations.common import RESULTS, Row, markdown, versions

STUDIES = Path(__file__).parent / "studies"


def names() -> list[str]:
    """Every study."""
    return sorted(path.stem for path in STUDIES.glob("*.py") if path.stem != "__init__")


def load(name: str) -> ModuleType:
    """The module of a study."""
    return importlib.import_module(f"simulations.studies.{name}")


def title(module: ModuleType) -> str:
    """The first line of a study's docstring."""
    return inspect.cleandoc(module.__doc__ or "").partition("\n")[0].rstrip(".")


def parser_of(name: str, module: ModuleType) -> argparse.ArgumentParser:
    """Options for the parameters of a study; a tuple takes several values of the type of its first."""
    parser = argparse.ArgumentParser(
        f"python -m simulations.run {name}", None, module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for parameter in inspect.signature(module.study).parameters.values():
        flag, default = "--" + parameter.name.replace("_", "-"), parameter.default
        if isinstance(default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=default)
        elif isinstance(default, tuple):
            parser.add_argument(flag, nargs="*", type=type(default[0]), default=default)
        else:
            parser.add_argument(flag, type=type(default), default=default)
    parser.add_argument("--check", action="store_true", help="check the keys of every run, and make none")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}/{name}.md")
    return parser


def page(name: str, words: Sequence[str], module: ModuleType, rows: Iterable[Row]) -> str:
    """Title, command, text, and a table for each name that rows have."""
    _, _, text = inspect.cleandoc(module.__doc__ or "").partition("\n")
    command = " ".join(["python -m simulations.run", name, *words])
    tables: dict[str, list[Row]] = {}
    for row in rows:
        tables.setdefault(str(row.get("table", "")), []).append({k: v for k, v in row.items() if k != "table"})
    parts = [f"# {title(module)}", f"`{command}`", text.strip()]
    for heading, lines in tables.items():
        parts += [f"## {heading}"] * bool(heading) + [markdown(lines)]
    return "\n\n".join(part for part in [*parts, versions()] if part) + "\n"


def run(name: str, arguments: Mapping[str, Any]) -> list[Row]:
    """The rows of a study, shown as they are found."""
    rows = []
    for row in load(name).study(**arguments):
        print(
            "  ".join(
                f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
            )
        )
        sys.stdout.flush()
        rows.append(row)
    return rows


def main(words: Sequence[str]) -> None:
    """List the studies, or run one and show its page."""
    if not words or words[0] in {"list", "-h", "--help"}:
        print(__doc__, *(f"{name:16} {title(load(name))}" for name in names()), sep="\n")
        return
    name, *rest = words
    if name not in names():
        raise SystemExit(f"no study {name!r}; there are {', '.join(names())}")
    module = load(name)
    given = vars(parser_of(name, module).parse_args(rest))
    write, common.CHECKING = given.pop("write"), given.pop("check")
    logging.getLogger("flwr").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    text = page(name, [word for word in rest if word != "--write"], module, run(name, given))
    print(text)
    if write and not common.CHECKING:
        (RESULTS / f"{name}.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
