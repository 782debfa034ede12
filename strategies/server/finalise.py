"""What a run ends with: what is saved, its figures, and the scores in replies that these are made of."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedgp_flower.methods.messages import HISTOGRAM_SHAPES
from fedgp_flower.run.metrics import CLASSIFICATION_SUMS, REGRESSION_SUMS
from fedgp_flower.typing import NamedArrays
from strategies.server.network import Network
from strategies.server.wire import Answer

PART = re.compile(r"theta\.|kernels\.|\.log_lengthscale$")
"""What of a parameter's name does not say which part of the model it belongs to."""


@dataclass(frozen=True, slots=True)
class Posterior:
    """What predicts without any site: arrays, what each is, and the equation that uses them."""

    arrays: NamedArrays
    meanings: Mapping[str, str]
    coordinates: Mapping[str, str]
    equation: str
    model: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Predicted:
    """What a state predicts with: the value that ``predictive`` returns."""

    request: Any
    """The message with which every site predicts; ``{site: message}`` where each has a different one."""
    posterior: Posterior | None = None
    """What is saved to predict without any site; None for a personal method."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Facts for ``metrics.json``."""


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a finished run and what goes into its folder beside them."""

    metrics: dict[str, Any]
    posterior: Posterior | None
    predictions: Mapping[str, NamedArrays]
    schema: str
    preparation: NamedArrays
    input_names: tuple[str, ...]


def lengthscale_facts(logs: Mapping[str, Any], spread: Mapping[str, Any] | None, how: str = "") -> dict[str, Any]:
    """By part of the model, lengthscales and the standard deviations of their logarithms: the report's relevance.

    Args:
        logs: Parameters by name; those that end in ``lengthscale`` are logarithms.
        spread: Standard deviations under the same names; None where the method knows none.
        how: Where they come from, as the end of a sentence.
    """
    kept = {name: own for name, own in logs.items() if name.endswith("lengthscale")}
    return {
        PART.sub("", name): {
            "value": np.exp(own).ravel().tolist(),
            "log_sd": None if spread is None else np.ravel(spread[name]).tolist(),
            "how": "" if spread is None else how,
        }
        for name, own in kept.items()
    }


def _names_of(own: Answer) -> tuple[str, ...]:
    return CLASSIFICATION_SUMS if "brier" in own.metrics else REGRESSION_SUMS


def sums_of(own: Answer) -> dict[str, float]:
    """The sums of scores in an evaluation reply."""
    return {name: own.number(name) for name in _names_of(own)}


def usable_scores(network: Network, answers: Mapping[str, Answer]) -> dict[str, Answer]:
    """Answers with scores of at least one row; one that cannot be scores is its site's failure."""
    kinds = Counter(_names_of(own) for own in answers.values())
    found: dict[str, Answer] = {}
    for site, own in answers.items():
        reason = scores_refusal(own, kinds.most_common(1)[0][0])
        if reason:
            network.fail(site, reason)
        elif own.number("count") > 0:
            found[site] = own
    return found


def scores_refusal(own: Answer, names: Iterable[str]) -> str | None:
    """Why numbers cannot be the sums ``names`` of scores of some rows, or None."""
    missing = [name for name in names if not isinstance(own.metrics.get(name), float)]
    if missing:
        return f"scores missing: {', '.join(missing)}"
    bounded = [name for name in names if name.startswith("inside-") or name == "correct"]
    if any(own.number(name) < 0 for name in names if name != "nll"):
        return "a score that cannot be negative is"
    if any(own.number(name) > own.number("count") for name in bounded):
        return "scores count more rows than there are"
    for name, shape in HISTOGRAM_SHAPES.items():
        size = math.prod(shape)
        values = own.metrics.get(name, [0.0] * size)
        if not isinstance(values, list) or len(values) != size:
            return f"`{name}`: expected {size} numbers"
    return None


def histograms(own: Answer) -> dict[str, np.ndarray]:
    """The histograms of an evaluation reply; they travel flat, as lists of numbers."""
    found: dict[str, np.ndarray] = {}
    for name, shape in HISTOGRAM_SHAPES.items():
        values = own.metrics.get(name)
        if isinstance(values, list):
            found[name] = np.asarray(values).reshape(shape)
    return found
