"""The files of a run: what they hold, how they are written while it goes, how they are read afterwards.

A run lives in ``<output-dir>/<run-name>/`` and never overwrites another. Every file is replaced as a whole (see
:mod:`fedgp_flower.files`), so what is there is always complete; the rename of one small file commits a checkpoint.
"""

from __future__ import annotations

import csv
import fcntl
import hashlib
import io
import itertools
import json
import logging
import math
import os
import platform
import secrets
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, asdict, dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tomli_w

from fedgp_flower.config import RunConfig, flatten, nest
from fedgp_flower.errors import DamagedError, RunError
from fedgp_flower.files import plain, read_arrays, read_json, reading, write_arrays, write_bytes, write_json
from fedgp_flower.options import Value
from fedgp_flower.outcome import Snapshot, Summary
from fedgp_flower.typing import NamedArrays

if TYPE_CHECKING:
    import pandas as pd


SEALED = ("config.toml", "history.csv", "metrics.json", "posterior.json", "posterior.safetensors", "predictions.csv")
SEALS, LOCK = "files.json", "lock"
"""Hashes of the files of a finished run; who writes into its folder."""

HISTORY_COLUMNS = ("round", "communications", "seconds", "bytes_up", "bytes_down")
"""Columns every row of the history has: communications so far; seconds and bytes of this round alone."""

ENCODING = (
    "A column of numbers is an input. A column of text has an input for each of its `levels`, in this order (of two for"
    " the second): 1 where the cell is that level, else 0. For a missing cell stands `missing.fill`, a number for"
    " each input of the column; with `missing.indicator` a further input is 1 where the cell is missing, else 0."
    " days(c) are days from 2000-01-01 to the date in column c; sine(c) and cosine(c) those of"
    " 2 pi (day of the year - 1) / 365.2425. Then x is standardised as (input - input.mean) / input.scale, and"
    " y = target.mean + target.scale * standardised y; where the target has a `transform`, that is t instead of y, t a"
    " Gaussian, cut off where `transform.equation` ends: quantiles of y are those of t mapped, and p(y) = p(t) |dt/dy|."
)
"""How a row of a table becomes the inputs of a saved model, in the words of ``posterior.json``."""
Number = int | float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMetrics:
    """The content of ``metrics.json``; fields are its keys. Figures are means over held-out rows."""

    method: str
    dataset: str
    sites: int
    rounds: int
    communications: int
    exchanges: int = 0
    """Questions to any number of sites at once: what a run over a network waits for."""
    seconds: Mapping[str, float]
    """``total``, ``setup``, ``training``, ``evaluation``."""
    bytes: Mapping[str, int]
    """``up`` (sites to server) and ``down``."""
    test: Mapping[str, float | None]
    test_standardised: Mapping[str, float | None]
    per_site: Sequence[Mapping[str, Any]]
    """``site``, ``num_examples`` (held-out rows), figures; ``label`` and ``training_rows`` where known."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Site id → what people call the site, also of sites without held-out rows."""
    mean: Mapping[str, Any] | None = None
    linear: Mapping[str, Any] | None = None
    local_only: Mapping[str, Any] | None = None
    pooled: Mapping[str, Any] | None = None
    """Figures of the baseline and its ``per_site`` rows. ``r2`` and skills compare with ``mean`` on the same rows."""
    converged: bool | None = None
    """Whether training had come to its end by itself; None where the method cannot tell."""
    failures: Sequence[Mapping[str, Any]] = ()
    """``round``, ``site``, ``reason``."""
    repairs: Mapping[str, int] = field(default_factory=dict)
    """Numerical repairs by kind, such as Cholesky factorisations that needed extra jitter."""
    calibration: Mapping[str, Any] = field(default_factory=dict)
    """``pit`` (counts) or ``reliability`` (rows of count, Σp, Σy)."""
    training_target: Mapping[str, float] = field(default_factory=dict)
    """``mean`` and ``sd`` of the target over the training rows, or the ``share`` of rows of the second class."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """The training rows as they were described before training: see :func:`fedgp_flower.agreement.overview_rows`."""
    warnings: Sequence[str] = ()
    """What to know of the data before reading the figures."""
    method_details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def labels(self) -> dict[str, str]:
        """Site id → what people call the site."""
        return {**{str(row["site"]): str(row.get("label") or row["site"]) for row in self.per_site}, **self.names}


@dataclass(frozen=True, slots=True)
class ArrayNote:
    """What an array of the posterior is: its coordinates (``standardised``, ``log``, …) and its meaning."""

    coordinates: str
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Posterior:
    """All that is needed to predict without any site, and the words that say how."""

    arrays: NamedArrays
    notes: Mapping[str, ArrayNote]
    equation: str
    """How the arrays become a prediction."""
    model: Mapping[str, Any]
    """Kernel expression, jitter and what else defines the model."""
    schema: Mapping[str, Any]
    """The agreed columns: ``features`` and ``target``."""
    method: str
    likelihood: str
    inputs: Sequence[str] = ()
    """Names of the D encoded inputs, in order."""
    encoding: str = ENCODING
    """How a row of a table becomes these inputs."""


def saved_posterior(config: RunConfig, summary: Summary) -> Posterior | None:
    """What a finished run predicts with; None for a personal method."""
    found = summary.posterior
    if found is None:
        return None
    notes = {name: ArrayNote(found.coordinates[name], found.meanings[name]) for name in found.arrays}
    notes |= {name: ArrayNote("original units", "standardisation") for name in summary.preparation}
    return Posterior(
        arrays={**found.arrays, **summary.preparation},
        notes=notes,
        equation=found.equation,
        model=found.model,
        schema=json.loads(summary.schema),
        method=config.method,
        likelihood=config.model.likelihood,
        inputs=summary.input_names,
    )


@dataclass(frozen=True, slots=True)
class RunData:
    """A finished run as read back. ``posterior`` and ``predictions`` are None where the run wrote none."""

    path: Path
    config: dict[str, Value]
    history: pd.DataFrame
    metrics: RunMetrics
    posterior: Posterior | None
    predictions: pd.DataFrame | None


class RunFolder:
    """The folder of one run; made by :meth:`open`."""

    def __init__(self, path: Path, digest: str) -> None:
        self.path = path
        self._digest = digest
        self._history: list[dict[str, Number]] = []
        self.held: Held | None = None
        """The lock on the folder, while a run writes into it."""

    @classmethod
    def open(cls, config: RunConfig) -> RunFolder:
        """Make the folder of a new run, or with ``resume`` enter the one named ``name``, and write ``config.toml``.

        Raises:
            RunError: when the folder exists without ``resume``, or ``resume`` finds no run or one configured otherwise.
        """
        parent = Path(config.output_dir)
        try:
            if not config.resume:
                parent.mkdir(parents=True, exist_ok=True)
            path = _resumable(parent, config) if config.resume else _new_folder(parent, config)
            folder = cls(path, config.digest())
            held = Held(path)
            for name in ("metrics.json", SEALS):  # they mark a finished run
                (path / name).unlink(missing_ok=True)
            write_bytes(path / "config.toml", tomli_w.dumps(nest(config.flat())).encode())
            del held
        except OSError as error:
            raise RunError(
                f"no folder for the run in `output-dir` = {str(parent)!r}: {error.strerror}; choose another"
            ) from None
        return folder

    def hold(self) -> None:
        """Keep others from writing into the folder.

        Raises:
            RunError: another process does so.
        """
        self.held = Held(self.path)

    def release(self) -> None:
        """Let others write into the folder."""
        self.held = None

    def give_name_free(self) -> None:
        """Move the folder of a run that failed before its first checkpoint aside: there is nothing to resume."""
        if not (self.path / "checkpoint" / "checkpoint.json").exists():
            name = next(f"{self.path.name}-failed-{n}" for n in itertools.count(1) if not self._beside(n).exists())
            self.path = self.path.rename(self.path.with_name(name))

    def _beside(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}-failed-{number}")

    def seal(self) -> None:
        """Write down the hashes of the files of a finished run; :func:`read_run` compares them."""
        there = [name for name in SEALED if (self.path / name).exists()]
        write_json(self.path / SEALS, {name: _hash(self.path / name) for name in there})

    def append_history(self, row: Mapping[str, Number]) -> None:
        """Add a round to ``history.csv``; columns a row lacks stay empty, new ones are added at the right.

        Raises:
            RunError: when a fixed column is missing or rounds do not increase.
        """
        missing = [name for name in HISTORY_COLUMNS if name not in row]
        if missing:
            raise RunError(f"a row of the history lacks {', '.join(missing)}; expected {', '.join(HISTORY_COLUMNS)}")
        if self._history and row["round"] <= self._history[-1]["round"]:
            raise RunError(f"round {row['round']} of the history follows round {self._history[-1]['round']}")
        self._history.append(dict(row))
        self._write_history()

    def write_metrics(self, metrics: RunMetrics) -> None:
        """Write ``metrics.json``, the mark of a finished run; the history of a run without a round has none."""
        if not self._history:
            self._write_history()
        write_json(self.path / "metrics.json", asdict(metrics))

    def write_posterior(self, posterior: Posterior) -> None:
        """Write ``posterior.safetensors`` and its description ``posterior.json``.

        Raises:
            RunError: when an array has no note or a note no array.
        """
        if unmatched := sorted(posterior.arrays.keys() ^ posterior.notes.keys()):
            raise RunError(f"arrays of the posterior without a note, or notes without an array: {', '.join(unmatched)}")
        arrays = {
            name: {"shape": list(np.shape(posterior.arrays[name])), **asdict(note)}
            for name, note in posterior.notes.items()
        }
        words = {f.name: getattr(posterior, f.name) for f in fields(posterior) if f.name not in {"arrays", "notes"}}
        write_arrays(self.path / "posterior.safetensors", posterior.arrays)
        write_json(self.path / "posterior.json", {"arrays": arrays, **words})

    def write_predictions(self, by_site: Mapping[str, NamedArrays], input_names: Sequence[str] = ()) -> None:
        """Write ``predictions.csv``: a row per held-out row; columns ``site``, the prediction, and ``input.<name>``.

        Args:
            by_site: site → its ``prediction.*`` arrays, as in the evaluation reply; nothing is written for no site.
            input_names: names of the encoded input columns, for ``prediction.input`` [n, D].
        """
        rows = [row for site, arrays in by_site.items() for row in _prediction_rows(site, arrays, input_names)]
        if rows:
            write_bytes(self.path / "predictions.csv", _csv(rows, ()))

    def checkpoint(self, snapshot: Snapshot) -> None:
        """Keep a complete round. Call it after the round's :meth:`append_history`.

        The arrays go to a file of a new name; the rename of ``checkpoint.json``, which names that file, commits; then
        older files go.
        """
        folder = self.path / "checkpoint"
        folder.mkdir(exist_ok=True)
        name = f"round-{snapshot.facts['round']:06d}-{secrets.token_hex(4)}.safetensors"
        write_arrays(folder / name, snapshot.arrays)
        content = {"arrays": name, "hash": _hash(folder / name), "config_digest": self._digest}
        facts = plain(snapshot.facts)
        write_json(folder / "checkpoint.json", {**content, "facts_hash": _hash_of(facts), "state": facts})
        for old in folder.iterdir():
            if old.name not in {name, "checkpoint.json"}:
                old.unlink()

    def restore(self) -> Snapshot | None:
        """The last complete round, with the history cut back to it; None where no round was completed.

        Raises:
            RunError: when the checkpoint is damaged or belongs to another configuration.
        """
        folder = self.path / "checkpoint"
        if not (folder / "checkpoint.json").exists():
            return None
        content = read_json(folder / "checkpoint.json")
        if content.get("config_digest") != self._digest:
            raise RunError(f"{folder} belongs to a run with another configuration; start afresh under another `name`")
        with reading(folder / "checkpoint.json"):
            facts, arrays = content["state"], folder / Path(content["arrays"]).name
            snapshot = Snapshot(read_arrays(arrays), facts)
            if _hash(arrays) != content["hash"] or _hash_of(facts) != content["facts_hash"]:
                raise DamagedError(f"the checkpoint in {folder} was changed since the run wrote it")
        with reading(self.path / "history.csv"):
            rows = _history_rows(self.path / "history.csv")
            self._history = [row for row in rows if row["round"] <= facts["round"]]
        if len(self._history) < len(rows):
            self._write_history()
        return snapshot

    @contextmanager
    def logging_to_file(self, *loggers: str) -> Iterator[Path]:
        """Append what the named loggers say to ``log.txt`` while the context lasts."""
        path = self.path / "log.txt"
        handler = logging.FileHandler(path, encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        chosen = [logging.getLogger(name) for name in loggers]
        for logger in chosen:
            logger.addHandler(handler)
        try:
            yield path
        finally:
            for logger in chosen:
                logger.removeHandler(handler)
            handler.close()

    def _write_history(self) -> None:
        write_bytes(self.path / "history.csv", _csv(self._history, HISTORY_COLUMNS))


def read_run(path: Path) -> RunData:
    """Read a finished run.

    Raises:
        RunError: naming the folder or file that is missing or unreadable.
    """
    if not path.is_dir():
        raise RunError(f"{path} is not the folder of a run")
    if not (path / "metrics.json").exists():
        hint = "the run has not finished; go on with `resume`" if (path / "config.toml").exists() else "is it a run?"
        raise RunError(f"metrics.json is missing from {path}: {hint}")
    with reading(path):
        _require_sealed(path)
        return _read_run(path)


def _read_run(path: Path) -> RunData:
    content = read_json(path / "metrics.json")
    required = {f.name for f in fields(RunMetrics) if f.default is MISSING and f.default_factory is MISSING}
    if unmatched := sorted((content.keys() - {f.name for f in fields(RunMetrics)}) | (required - content.keys())):
        raise DamagedError(f"{path / 'metrics.json'} has missing or unknown keys: {', '.join(unmatched)}")
    predictions = path / "predictions.csv"
    return RunData(
        path=path,
        config=_read_config(path),
        history=_read_history(path / "history.csv"),
        metrics=RunMetrics(**content),
        posterior=read_posterior(path) if (path / "posterior.json").exists() else None,
        predictions=_read_predictions(predictions) if predictions.exists() else None,
    )


def read_checkpoint(path: Path) -> Snapshot:
    """Read the last complete round of a run.

    Raises:
        RunError: when the run has none.
    """
    folder = path / "checkpoint"
    content = read_json(folder / "checkpoint.json")
    return Snapshot(read_arrays(folder / content["arrays"]), content["state"])


def read_posterior(path: Path) -> Posterior:
    """Read the posterior of a run, to predict from.

    Raises:
        RunError: when a file is missing or the two disagree.
    """
    content, arrays = read_json(path / "posterior.json"), read_arrays(path / "posterior.safetensors")
    described = content.pop("arrays", {})
    shapes = {name: tuple(item.get("shape", ())) for name, item in described.items()}
    if shapes != {name: value.shape for name, value in arrays.items()}:
        raise DamagedError(f"posterior.json and posterior.safetensors in {path} describe different arrays")
    odd = sorted(name for name, value in arrays.items() if value.dtype.kind == "f" and not np.isfinite(value).all())
    if odd:
        raise DamagedError(f"{path / 'posterior.safetensors'}: not finite: {', '.join(odd)}")
    scales = [
        name
        for name in ("input.scale", "target.scale", "likelihood.noise", "kernel.lengthscale")
        if (np.asarray(arrays.get(name, 1.0)) <= 0).any()
    ]
    if scales:
        raise DamagedError(f"{path / 'posterior.safetensors'}: not positive: {', '.join(scales)}")
    notes = {name: ArrayNote(item["coordinates"], item["meaning"]) for name, item in described.items()}
    return Posterior(arrays=arrays, notes=notes, **content)


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _hash_of(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _require_sealed(path: Path) -> None:
    """Refuse files that were changed after the run wrote them; a run of before there were hashes has none.

    Raises:
        DamagedError: naming the files.
    """
    if not (path / SEALS).exists():
        return
    hashes = read_json(path / SEALS)
    there = {name: _hash(path / name) for name in SEALED if (path / name).exists()}
    if odd := sorted(name for name in hashes.keys() | there.keys() if hashes.get(name) != there.get(name)):
        raise DamagedError(f"changed since the run wrote them, in {path}: {', '.join(odd)}")


class Held:
    """The lock on the folder of a run; it goes with the process that holds it, however that ends.

    Raises:
        RunError: another process writes into the folder; naming it.
    """

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = os.read(self._handle, 200).decode().strip() or "another process"
            raise RunError(f"{path} is being written by {who}; wait for it, or choose another `name`") from None
        who = f"process {os.getpid()} on {platform.node()} since {datetime.now():%Y-%m-%d %H:%M:%S}"
        os.truncate(self._handle, 0)
        os.write(self._handle, who.encode())

    def __del__(self) -> None:
        os.close(self._handle)


def _new_folder(parent: Path, config: RunConfig) -> Path:
    if config.name:
        path = parent / _checked_name(config.name)
        try:
            path.mkdir()
        except FileExistsError:
            finished = "" if (path / "metrics.json").exists() else ", which did not finish; or delete its folder"
            raise RunError(
                f"{path} exists; choose another `name`, or set `resume` to go on with that run{finished}"
            ) from None
        return path
    dataset = "-".join(part for part in Path(config.dataset).parts[-2:] if part not in {"/", "..", "."})
    stem = f"{config.method}-{dataset}-{datetime.now():%Y%m%d-%H%M%S}".replace("\\", "-")
    for attempt in itertools.count(1):
        path = parent / (stem if attempt == 1 else f"{stem}-{attempt}")
        with suppress(FileExistsError):
            path.mkdir()
            break
    return path


def _resumable(parent: Path, config: RunConfig) -> Path:
    if not config.name:
        raise RunError("`resume` needs `name`, the name of the run to go on with")
    path = parent / _checked_name(config.name)
    if not (path / "config.toml").exists():
        raise RunError(f"nothing to resume: config.toml is missing from {path}; check `output-dir` and `name`")
    before, now = _read_config(path), config.flat()
    differing = [key for key in sorted(before.keys() | now.keys()) if _matters(config, key, before.get(key))]
    if differing:
        changes = "; ".join(f"`{key}` was {before.get(key)!r}, now {now.get(key)!r}" for key in differing)
        raise RunError(f"cannot resume {path} with another configuration: {changes}. Start afresh under another `name`")
    return path


def _matters(config: RunConfig, key: str, before: Value | None) -> bool:
    """Whether the value the key had makes another run of it; keys like ``num-server-rounds`` may change."""
    if config.flat().get(key) == before:
        return False
    name = key.replace("-", "_")
    if before is None or name not in type(config).model_fields:
        return True
    return config.model_copy(update={name: before}).digest() != config.digest()


def _checked_name(name: str) -> str:
    if name in {".", ".."} or "/" in name or "\\" in name:
        raise RunError(f"`name` = {name!r} should be the name of a folder inside `output-dir`, without a path")
    return name


def _read_config(path: Path) -> dict[str, Value]:
    try:
        return flatten(tomllib.loads((path / "config.toml").read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise DamagedError(f"config.toml is missing from {path}") from None
    except ValueError as error:  # of TOML, or of UTF-8
        raise DamagedError(f"{path / 'config.toml'} is not valid TOML: {error}") from None


def _history_rows(path: Path) -> list[dict[str, Number]]:
    """Rows as they were appended: no empty cells, counts as whole numbers."""
    whole = set(HISTORY_COLUMNS) - {"seconds"}
    if not path.exists():
        raise DamagedError(f"{path.name} is missing from {path.parent}")
    rows = csv.DictReader(io.StringIO(path.read_text(encoding="utf-8")))
    return [{name: int(cell) if name in whole else float(cell) for name, cell in row.items() if cell} for row in rows]


def _read_history(path: Path) -> pd.DataFrame:
    import pandas as pd  # noqa: PLC0415  a server that only writes does without

    try:
        return _numbers(pd.read_csv(path), path)
    except FileNotFoundError:
        raise DamagedError(f"{path.name} is missing from {path.parent}") from None


def _read_predictions(path: Path) -> pd.DataFrame:
    import pandas as pd  # noqa: PLC0415  a server that only writes does without

    # A site may be called "NA" or "007".
    return _numbers(pd.read_csv(path, dtype={"site": str}, keep_default_na=False, na_values=[""]), path)


def _numbers(frame: pd.DataFrame, path: Path) -> pd.DataFrame:
    kinds = frame.dtypes.items() if len(frame) else ()
    if odd := [str(name) for name, kind in kinds if name != "site" and kind.kind not in "iuf"]:
        raise DamagedError(f"{path}: not a number in {', '.join(f'`{name}`' for name in odd)}")
    return frame


def _csv(rows: Sequence[Mapping[str, Any]], first: Sequence[str]) -> bytes:
    """A table with the columns ``first``, then others as they occur; cells that a row lacks, and NaN, are empty."""
    columns = list(dict.fromkeys((*first, *(name for row in rows for name in row))))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: "" if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()} for row in rows)
    return text.getvalue().encode()


def _prediction_rows(site: str, arrays: NamedArrays, input_names: Sequence[str]) -> list[dict[str, Any]]:
    names = ("target", "mean", "sd", "low", "high", "probability", "trend", "deviation")
    columns = {name: arrays[f"prediction.{name}"] for name in names if f"prediction.{name}" in arrays}
    if "prediction.input" in arrays:
        inputs = arrays["prediction.input"].T
        if len(inputs) != len(input_names):
            raise RunError(f"site {site} sent predictions at {len(inputs)} inputs, the schema has {len(input_names)}")
        columns |= {f"input.{name}": values for name, values in zip(input_names, inputs, strict=True)}
    if len({len(values) for values in columns.values()}) != 1:
        raise RunError(f"site {site} sent prediction columns of unequal length, or none")
    cells = zip(*(np.asarray(values).tolist() for values in columns.values()), strict=True)
    return [{"site": site, **dict(zip(columns, row, strict=True))} for row in cells]
