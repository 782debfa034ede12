"""The files of a run: their content, writing and reading."""

from __future__ import annotations

import fcntl
import hashlib
import io
import itertools
import json
import logging
import os
import platform
import secrets
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import tomli_w
from pydantic import ConfigDict, TypeAdapter

from fedgp_flower.config import RunConfig, flatten, nest
from fedgp_flower.errors import DamagedError, RunError
from fedgp_flower.files import plain, read_arrays, read_bytes, read_json, reading, write_arrays, write_bytes, write_json
from fedgp_flower.lazy import Lazy, pd
from fedgp_flower.options import FlatConfig, Value
from fedgp_flower.outcome import Posterior, Snapshot, Summary
from fedgp_flower.run.registry import Method, methods
from fedgp_flower.typing import Facts, NamedArrays

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fedgp_flower.run import notebook
    from fedgp_flower.run.predict import Predictor
else:
    notebook = Lazy("fedgp_flower.run.notebook")

HASHED_FILES = (
    "config.toml",
    "effects.csv",
    "history.csv",
    "metrics.json",
    "posterior.json",
    "posterior.safetensors",
    "predictions.csv",
)
SEALS, LOCK = "files.json", "lock"
"""Files with the hashes of a finished run, and with the process that writes into its folder."""

HISTORY_COLUMNS = ("round", "communications", "seconds", "bytes_up", "bytes_down")
"""Columns of every history: cumulative communications; seconds and bytes of the round."""

PREDICTION_COLUMNS = ("target", "mean", "sd", "low", "high", "probability", "trend", "deviation")
"""Possible columns of ``predictions.csv``."""

PYTHON_AT_SITE = "`fedgp_flower.run.predict.Predictor.at_site(run.path, site)`"
"""How to predict at a site from Python."""

POSITIVE = ("input.scale", "target.scale", "likelihood.noise", "kernel.lengthscale")
"""Arrays of a posterior that must be positive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMetrics:
    """Content of ``metrics.json``; the fields are its keys. Figures are means over held-out rows."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    method: str
    dataset: str
    sites: int
    rounds: int
    communications: int
    exchanges: int = 0
    """Number of questions, each to any number of sites at once."""
    nodes: int = 0
    """Nodes that were asked, including those whose site took no part."""
    seconds: Mapping[str, float]
    """``total``, ``setup``, ``training``, ``evaluation``."""
    bytes: Mapping[str, int]
    """``up`` (sites to server) and ``down``."""
    test: Mapping[str, float | None]
    test_standardised: Mapping[str, float | None]
    per_site: Sequence[Facts]
    """``site``, ``num_examples`` (held-out rows), figures; ``label`` and ``training_rows`` where known."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Site id → name of the site, including sites without held-out rows."""
    mean: Facts | None = None
    linear: Facts | None = None
    local_only: Facts | None = None
    pooled: Facts | None = None
    boosting: Facts | None = None
    """Figures of the baseline and its ``per_site`` rows. ``r2`` and skills compare with ``mean`` on the same rows."""
    converged: bool | None = None
    """Whether training converged; None if the method cannot tell."""
    failures: Sequence[Facts] = ()
    """``round``, ``site``, ``reason``."""
    repairs: Mapping[str, int] = field(default_factory=dict)
    """Numerical repairs by kind, such as Cholesky factorisations that needed extra jitter."""
    calibration: Facts = field(default_factory=dict)
    """``pit`` (counts) or ``reliability`` (rows of count, Σp, Σy)."""
    training_target: Mapping[str, float] = field(default_factory=dict)
    """``mean`` and ``sd`` of the target over the training rows, or the ``share`` of rows of the second class."""
    data: Facts = field(default_factory=dict)
    """Summary of the training rows: see :func:`fedgp_flower.agreement.overview_rows`."""
    warnings: Sequence[str] = ()
    """Warnings on the data."""
    method_details: Facts = field(default_factory=dict)

    @property
    def labels(self) -> dict[str, str]:
        """Site id → name of the site."""
        return {**{str(row["site"]): str(row.get("label") or row["site"]) for row in self.per_site}, **self.names}


def site_named(labels: Mapping[str, str], name: str) -> str | None:
    """Return the id of the site with a label, or else with an id; None if there is none.

    Labels come first: ids of simulated sites count from 0, and labels may be numbers of units.
    """
    ids = {label: site for site, label in labels.items()}
    return ids.get(name, name if name in labels else None)


def saved_posterior(config: RunConfig, summary: Summary) -> Posterior | None:
    """Return the posterior of a finished run with its standardisation; None for a personal method."""
    found, agreed = summary.posterior, summary.preparation
    return found and replace(
        found,
        arrays={**found.arrays, **agreed},
        meanings={**found.meanings, **dict.fromkeys(agreed, "standardisation")},
        coordinates={**found.coordinates, **dict.fromkeys(agreed, "original units")},
        schema=json.loads(summary.schema),
        method=config.method,
        likelihood=config.model.likelihood,
        inputs=summary.input_names,
    )


@dataclass(frozen=True)
class Run:
    """A finished run; ``saved`` and ``predictions`` are None if it wrote none."""

    path: Path
    config: dict[str, Value]
    history: pd.DataFrame
    metrics: RunMetrics
    saved: Posterior | None
    """Arrays of the posterior."""
    predictions: pd.DataFrame | None

    def __repr__(self) -> str:
        return f"<Run {self.path}: {self.metrics.method}>"

    def _repr_html_(self) -> str:
        return notebook.html_of_run(self)

    def plot(self) -> Sequence[Axes]:
        """Plot observed against predicted values with 95 % intervals, and residuals. Return the axes of matplotlib."""
        return notebook.plot_run(self)

    @property
    def report_path(self) -> Path:
        """Path of the HTML report."""
        return self.path / "report.html"

    @property
    def method(self) -> Method:
        """The method's row of the registry. Raise RunError if the method is not installed."""
        name = self.metrics.method
        if name not in methods():
            raise RunError(f"{self.path} is a run of {name!r}, which is not installed; install the package it is from")
        return methods()[name]

    @property
    def why_no_posterior(self) -> str:
        """Why :attr:`posterior` is None; empty if it is not."""
        reason = self.method.why_no_posterior or "this run saved none"
        if self.method.posterior and self.saved is not None:
            if "why_no_posterior" not in self.saved.model:
                return ""
            reason = str(self.saved.model["why_no_posterior"])
        at_site = f"; in Python, {PYTHON_AT_SITE}" if self.method.at_site else ""
        return f"with `method` = {self.metrics.method!r} {reason}{at_site}"

    def summary(self) -> pd.DataFrame:
        """Return the fixed, random and site effects with intervals, in units of the data."""
        facts = self.metrics.method_details
        if "effects" not in facts:
            raise RunError(f"a run of {self.metrics.method!r} has no table of effects; run a `formula`")
        return effects_table(facts)

    @cached_property
    def posterior(self) -> Predictor | None:
        """Predictor of new rows without any site; None if the method saves none."""
        from fedgp_flower.run.predict import Predictor  # noqa: PLC0415  loads PyTorch

        return None if self.why_no_posterior else Predictor.of(self)


class RunFolder:
    """The folder of a run; :meth:`open` creates it."""

    def __init__(self, path: Path, digest: str, config: bytes = b"") -> None:
        self.path = path
        self._digest = digest
        self._config = config  # not yet written
        self._history = pd.DataFrame()

    @classmethod
    def open(cls, config: RunConfig) -> RunFolder:
        """Create the folder of a new run, or with ``resume`` open the one named ``name``.

        A resumed run stays as it is until its first new round or result.
        """
        path = Path(config.output_dir) / config.run_name()
        folder = cls(path, config.digest(), tomli_w.dumps(nest(config.flat())).encode())
        try:
            if not config.resume and path.exists():
                finished = "" if (path / "metrics.json").exists() else ", which did not finish; or delete its folder"
                raise RunError(
                    f"{path} exists; choose another `name`, or set `resume` to go on with that run{finished}"
                )
            if not config.resume:
                path.mkdir(parents=True)
            elif not (path / "config.toml").exists():
                raise RunError(f"nothing to resume: config.toml is missing from {path}; check `output-dir` and `name`")
            else:
                _require_same(path, _read_config(path), config)
            with locked(path):
                if not config.resume:
                    folder._begin()
        except OSError as error:
            raise RunError(
                f"no folder for the run in `output-dir` = {config.output_dir!r}: {error.strerror}; choose another"
            ) from None
        return folder

    def _begin(self) -> None:
        """Write ``config.toml``, unless it is written, after the marks of a finished run are removed."""
        if self._config:
            for name in ("metrics.json", SEALS):
                (self.path / name).unlink(missing_ok=True)
            write_bytes(self.path / "config.toml", self._config)
            self._config = b""

    def mark_as_failed(self) -> None:
        """Rename the folder of a run that failed before its first checkpoint, so that its name is free again."""
        if not (self.path / "checkpoint" / "checkpoint.json").exists():
            others = (self.path.with_name(f"{self.path.name}-failed-{n}") for n in itertools.count(1))
            self.path = self.path.rename(next(path for path in others if not path.exists()))

    def seal(self) -> None:
        """Write the hashes of a finished run's files, which :func:`read_run` compares."""
        write_json(self.path / SEALS, _hashes(self.path))

    def append_history(self, row: Mapping[str, float]) -> None:
        """Append a round to ``history.csv``. Missing columns stay empty; new columns are added at the right."""
        self.set_history(pd.concat([self._history, pd.DataFrame([row], dtype=object)]))

    def set_history(self, history: pd.DataFrame) -> None:
        """Write these rounds to ``history.csv``, the columns of every history first."""
        self._begin()
        self._history = history
        columns = list(dict.fromkeys((*HISTORY_COLUMNS, *history)))
        write_bytes(self.path / "history.csv", history.reindex(columns=columns).to_csv(index=False).encode())

    def write_metrics(self, metrics: RunMetrics) -> None:
        """Write ``metrics.json``, which marks a finished run, and ``effects.csv`` if the method has effects."""
        self.set_history(self._history)
        if "effects" in metrics.method_details:
            write_bytes(self.path / "effects.csv", effects_table(metrics.method_details).to_csv(index=False).encode())
        write_json(self.path / "metrics.json", asdict(metrics))

    def write_posterior(self, posterior: Posterior) -> None:
        """Write ``posterior.safetensors`` and its description ``posterior.json``."""
        self._begin()
        content = asdict(replace(posterior, arrays={}))
        coordinates, meanings = content.pop("coordinates"), content.pop("meanings")
        for name, array in posterior.arrays.items():
            described = {"shape": list(np.shape(array)), "coordinates": coordinates[name], "meaning": meanings[name]}
            content["arrays"][name] = described
        write_arrays(self.path / "posterior.safetensors", posterior.arrays)
        write_json(self.path / "posterior.json", content)

    def write_predictions(
        self,
        by_site: Mapping[str, NamedArrays],
        input_names: Sequence[str] = (),
        labels: Mapping[str, str] | None = None,
        levels: Sequence[str] = (),
    ) -> None:
        """Write ``predictions.csv``, a row for each held-out row, from the sites' ``prediction.*`` arrays.

        ``labels`` are the names of the sites, by id, ``levels`` those of the two classes.
        """
        tables = []
        for site, arrays in by_site.items():
            given = {name.removeprefix("prediction."): array for name, array in arrays.items()}
            columns = {name: given[name] for name in PREDICTION_COLUMNS if name in given}
            columns |= {"class": np.array(levels)[given["target"].astype(int)]} if levels else {}
            if "input" in given:
                columns |= zip((f"input.{name}" for name in input_names), given["input"].T, strict=True)
            tables.append(pd.DataFrame({"site": site, "label": (labels or {}).get(site, site), **columns}))
        if tables:
            self._begin()
            write_bytes(self.path / "predictions.csv", pd.concat(tables).to_csv(index=False).encode())

    def checkpoint(self, snapshot: Snapshot) -> None:
        """Save a complete round: write a new file of arrays, then ``checkpoint.json``, which names it."""
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
        """Return the last complete round, and go on from its history; None if no round was completed."""
        folder = self.path / "checkpoint"
        if not (folder / "checkpoint.json").exists():
            return None
        content = read_json(folder / "checkpoint.json")
        if content.get("config_digest") != self._digest:
            raise RunError(f"{folder} belongs to a run with another configuration; start a new run with another `name`")
        with reading(folder / "checkpoint.json"):
            facts, arrays = content["state"], folder / Path(content["arrays"]).name
            snapshot = Snapshot(read_arrays(arrays), facts)
            if _hash(arrays) != content["hash"] or _hash_of(facts) != content["facts_hash"]:
                raise DamagedError(f"the checkpoint in {folder} was changed since the run wrote it")
        with reading(self.path / "history.csv"):
            history = _read_table(self.path / "history.csv")
            self._history = history[history["round"] <= facts["round"]]
        return snapshot

    @contextmanager
    def logging_to_file(self) -> Iterator[None]:
        """Append the run's log to ``log.txt`` inside the context."""
        handler = logging.FileHandler(self.path / "log.txt", encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.getLogger("fedgp").addHandler(handler)
        try:
            yield
        finally:
            logging.getLogger("fedgp").removeHandler(handler)
            handler.close()


def effects_table(facts: Facts) -> pd.DataFrame:
    """Return the table of effects in a method's details."""
    fixed = [{"group": "", "kind": "fixed", **row} for row in facts["effects"]]
    return pd.DataFrame([*fixed, *facts["random"], *facts.get("sites", [])])


def read_run(path: Path) -> Run:
    """Read a finished run. Raise RunError if the folder has none, DamagedError if its files were changed."""
    if not path.is_dir():
        raise RunError(f"{path} is not the folder of a run")
    if not (path / "metrics.json").exists():
        hint = "the run has not finished; go on with `resume`" if (path / "config.toml").exists() else "is it a run?"
        raise RunError(f"metrics.json is missing from {path}: {hint}")
    posterior, predictions = path / "posterior.json", path / "predictions.csv"
    with reading(path):
        hashes = read_json(path / SEALS) if (path / SEALS).exists() else {}  # older runs have no hashes
        present = _hashes(path) if hashes else {}
        if odd := sorted(name for name in hashes.keys() | present.keys() if hashes.get(name) != present.get(name)):
            raise DamagedError(f"changed since the run wrote them, in {path}: {', '.join(odd)}")
        return Run(
            path=path,
            config=_read_config(path),
            history=_read_table(path / "history.csv"),
            metrics=TypeAdapter(RunMetrics).validate_python(read_json(path / "metrics.json")),
            saved=read_posterior(path) if posterior.exists() else None,
            predictions=_read_table(predictions) if predictions.exists() else None,
        )


def read_posterior(path: Path) -> Posterior:
    """Read the posterior of a run. Raise DamagedError if its arrays are inconsistent, not finite or not positive."""
    content, arrays = read_json(path / "posterior.json"), read_arrays(path / "posterior.safetensors")
    described = content.pop("arrays", {})
    shapes = {name: tuple(item.get("shape", ())) for name, item in described.items()}
    if shapes != {name: value.shape for name, value in arrays.items()}:
        raise DamagedError(f"posterior.json and posterior.safetensors in {path} describe different arrays")
    odd = {
        "not finite": [name for name, a in arrays.items() if a.dtype.kind == "f" and not np.isfinite(a).all()],
        "not positive": [name for name in POSITIVE if (np.asarray(arrays.get(name, 1.0)) <= 0).any()],
    }
    for reason, names in odd.items():
        if names:
            raise DamagedError(f"{path / 'posterior.safetensors'}: {reason}: {', '.join(sorted(names))}")
    return Posterior(
        arrays={name: arrays[name] for name in described},
        coordinates={name: item["coordinates"] for name, item in described.items()},
        meanings={name: item["meaning"] for name, item in described.items()},
        **content,
    )


def _hashes(folder: Path) -> dict[str, str]:
    return {name: _hash(folder / name) for name in HASHED_FILES if (folder / name).exists()}


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash_of(facts: Facts) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock the folder of a run against other writers. The operating system releases the lock of a dead process."""
    handle = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = os.read(handle, 200).decode().strip() or "another process"
            raise RunError(f"{path} is being written by {who}; wait for it, or choose another `name`") from None
        os.truncate(handle, 0)
        who = f"process {os.getpid()} on {platform.node()} since {datetime.now():%Y-%m-%d %H:%M:%S}"
        os.write(handle, who.encode())
        yield
    finally:
        os.close(handle)


def _require_same(path: Path, before: FlatConfig, config: RunConfig) -> None:
    """Raise RunError if a run would be resumed with another configuration."""
    now = config.flat()
    keys = sorted((before.keys() | now.keys()) - config.resumable_keys)
    if differing := [key for key in keys if before.get(key) != now.get(key)]:
        changes = "; ".join(f"`{key}` was {before.get(key)!r}, now {now.get(key)!r}" for key in differing)
        raise RunError(
            f"cannot resume {path} with another configuration: {changes}. Start a new run with another `name`"
        )


def _read_config(path: Path) -> dict[str, Value]:
    content = read_bytes(path / "config.toml")
    try:
        return flatten(tomllib.loads(content.decode()))
    except ValueError as error:  # invalid TOML or UTF-8
        raise DamagedError(f"{path / 'config.toml'} is not valid TOML: {error}") from None


def _read_table(path: Path) -> pd.DataFrame:
    """Read a CSV of numbers with columns of names, which may look like "NA" or "007"."""
    named = dict.fromkeys(("site", "label", "class"), str)
    frame = pd.read_csv(io.BytesIO(read_bytes(path)), dtype=named, keep_default_na=False, na_values=[""])
    kinds = frame.dtypes.items() if len(frame) else ()
    if odd := [str(name) for name, kind in kinds if name not in named and kind.kind not in "iuf"]:
        raise DamagedError(f"{path}: not a number in {', '.join(f'`{name}`' for name in odd)}")
    return frame
