"""What the files of a run hold, as frozen records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from fedgp_flower.config import Value
from fedgp_flower.shapes import NamedArrays


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMetrics:
    """The content of ``metrics.json``; fields are its keys. Figures are means over held-out rows."""

    method: str
    dataset: str
    sites: int
    rounds: int
    communications: int
    seconds: Mapping[str, float]
    """``total``, ``setup``, ``training``, ``evaluation``."""
    bytes: Mapping[str, int]
    """``up`` (sites to server) and ``down``."""
    test: Mapping[str, float | None]
    test_standardised: Mapping[str, float | None]
    per_site: Sequence[Mapping[str, Any]]
    """``site``, ``num_examples`` (held-out rows), figures; ``label`` and ``training_rows`` where known."""
    pooled: Mapping[str, Any] | None = None
    local_only: Mapping[str, Any] | None = None
    """Figures of the baseline and its ``per_site`` rows."""
    failures: Sequence[Mapping[str, Any]] = ()
    """``round``, ``site``, ``reason``."""
    repairs: Mapping[str, int] = field(default_factory=dict)
    """Numerical repairs by kind, such as Cholesky factorisations that needed extra jitter."""
    calibration: Mapping[str, Any] = field(default_factory=dict)
    """``pit`` (counts) or ``reliability`` (rows of count, Σp, Σy)."""
    method_details: Mapping[str, Any] = field(default_factory=dict)


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


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The last complete round: arrays bit for bit, and a state of JSON's types."""

    round: int
    arrays: NamedArrays
    state: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RunData:
    """A finished run as read back. ``posterior`` and ``predictions`` are None where the run wrote none."""

    path: Path
    config: dict[str, Value]
    history: pd.DataFrame
    metrics: RunMetrics
    posterior: Posterior | None
    predictions: pd.DataFrame | None
