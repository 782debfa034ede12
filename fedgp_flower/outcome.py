"""Results of a run: rounds and checkpoints during training, figures and posterior at the end."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TypeAlias, TypeVar

import numpy as np

from fedgp_flower.errors import ProtocolError
from fedgp_flower.typing import Facts, Json, NamedArrays

V = TypeVar("V")
ENCODING = (
    "A column of numbers is one input. A column of text has one input for each of its `levels`, in this order (of two"
    " levels, for the second only): 1 if the cell is that level, else 0. A missing cell is replaced by `missing.fill`,"
    " a number for each input of the column; with `missing.indicator`, one more input is 1 if the cell is missing, else"
    " 0. Then C_mo solve(C_oo, u_o) is added to the standardised inputs m of the missing cells of a row, where"
    " C = input.covariance of all inputs except such indicators, o are the inputs of the row's other cells, and u_o"
    " their differences from the standardised `missing.fill`. A level that is not listed counts as a missing cell;"
    " without `missing.fill`, its standardised inputs are 0."
    " days(c) are days from 2000-01-01 to the date in column c; sine(c) and cosine(c) are those of"
    " 2 pi (day of the year - 1) / 365.2425. Inputs are standardised as x = (input - input.mean) / input.scale, and"
    " y = target.mean + target.scale * standardised y. If the target has a `transform`, this is t instead of y: a"
    " Gaussian, truncated where `transform.equation` ends; quantiles of y are those of t mapped, p(y) = p(t) |dt/dy|."
)
"""Explanation of the encoding of a row in ``posterior.json``."""
AT_SITE = "site."
"""Start of the names of arrays that hold only at sites with rows."""
COLLAPSE = "the model collapsed"
"""Start of the warning of a run that is of no use; it is the first sentence of the result."""


@dataclass(frozen=True, slots=True)
class Posterior:
    """Everything needed to predict without any site; a method sets the fields without a default."""

    arrays: NamedArrays
    meanings: Mapping[str, str]
    coordinates: Mapping[str, str]
    """Coordinates of each array: ``standardised``, ``log``, …"""
    equation: str
    """Equation of a prediction in terms of the arrays."""
    model: Facts
    """Kernel expression, jitter and other properties of the model."""
    schema: Facts = field(default_factory=dict)
    """The agreed columns: ``features`` and ``target``."""
    method: str = ""
    likelihood: str = ""
    inputs: Sequence[str] = ()
    """Names of the D encoded inputs, in order."""
    encoding: str = ENCODING

    def __post_init__(self) -> None:
        """Raise ProtocolError for an array that cannot be saved or has no description."""
        for name, array in self.arrays.items():
            if np.asarray(array).dtype.hasobject:
                raise ProtocolError(f"Posterior.arrays: `{name}` is no array of numbers but {type(array).__name__}")
            if name not in self.meanings or name not in self.coordinates:
                raise ProtocolError(f"Posterior.arrays: `{name}` needs an entry in `meanings` and in `coordinates`")

    def at_site(self) -> Posterior:
        """Return the posterior at a site with rows, where arrays ``site.NAME`` are ``NAME``."""

        def plain(named: Mapping[str, V]) -> dict[str, V]:
            return {name.removeprefix(AT_SITE): value for name, value in named.items()}

        meanings, coordinates = plain(self.meanings), plain(self.coordinates)
        return replace(self, arrays=plain(self.arrays), meanings=meanings, coordinates=coordinates)


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures, posterior and predictions of a finished run."""

    metrics: Json
    posterior: Posterior | None
    predictions: Mapping[str, NamedArrays]
    schema: str
    preparation: NamedArrays
    input_names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State for resuming a run: arrays, and JSON facts including the ``round``."""

    arrays: NamedArrays
    facts: Json


Progress: TypeAlias = Callable[[Mapping[str, float], int], None]
"""Function of a row of the history and the largest number of rounds."""


def silent(row: Mapping[str, float], total: int) -> None:
    """Show no progress."""


def time_left(row: Facts) -> str:
    """Return the upper bound of the remaining training time, in words."""
    return f"at most {timedelta(seconds=math.ceil(row['seconds_to_come']))} left"


def round_of(row: Facts, total: int) -> str:
    """Return a line on a round."""
    return f"round {row['round']:.0f} of at most {total}  {time_left(row)}  {figures_of(row)}"


def figures_of(row: Facts) -> str:
    """Return the main figures of a round, in words."""
    shown = ("objective", "site_estimate", "test_nll", "test_rmse", "test_accuracy")
    trips = [f"{row['exchanges']:.0f} exchanges"] if "exchanges" in row else []
    named = {"objective": "objective (higher is better)"}
    return "  ".join(trips + [f"{named.get(name, name)} {row[name]:.4f}" for name in shown if name in row])


@dataclass(frozen=True, slots=True)
class Observer:
    """Callbacks of a run; by default they do nothing."""

    on_round: Progress = silent
    on_checkpoint: Callable[[Snapshot], None] = lambda snapshot: None
    """Save the snapshot in place of the last one."""
