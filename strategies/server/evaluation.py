"""The server's half of evaluation: sums of scores from the sites become the figures of a run.

Sites send sums over their held-out rows in original units (see :mod:`fedgp_flower.scores`); adding them weighs
every row alike. If the target is y = location + scale · t, densities obey p(y) = p(t) / scale, so in standardised units

    −log p(t) = −log p(y) − log(scale),

while RMSE, MAE and CRPS, which carry the units of y, are divided by ``scale``; coverage is the same in both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from fedgp_flower.errors import ProtocolError
from fedgp_flower.scores import CLASSIFICATION_SUMS, RANK_BINS, RANK_REACH, REGRESSION_SUMS, Scores

HISTOGRAMS = {"evaluation.pit": "pit", "evaluation.reliability": "reliability", "evaluation.ranks": "ranks"}
"""Array of an evaluation reply → key of ``calibration`` in ``metrics.json``."""

Sums = Mapping[str, float]
Figures = dict[str, float]


class Evaluation(TypedDict):
    """Figures over all held-out rows, the same in standardised units, and a row per site in natural order."""

    test: Figures
    test_standardised: Figures
    per_site: list[dict[str, Any]]


def combine(
    sums: Mapping[str, Sums], target_scale: float, arrays: Iterable[Mapping[str, NDArray[Any]]] = ()
) -> Evaluation:
    """Figures of one evaluation; a figure over no rows is NaN.

    Args:
        sums: site id → the metrics of its evaluation reply; keys besides the sums are ignored.
        target_scale: standard deviation the target was divided by; 1 for classification.
        arrays: the histograms of these replies; figures of ranks come from their sum and exist for all sites alone.

    Raises:
        ProtocolError: when a site lacks a sum, sites disagree about the kind of task, or nobody replied.
    """
    if not sums:
        raise ProtocolError("no site replied to the evaluation, so there is nothing to combine")
    if not (math.isfinite(target_scale) and target_scale > 0):
        raise ProtocolError("the scale of the target must be finite and positive")
    kinds = {site: _kind(site, values) for site, values in sums.items()}
    if len(set(kinds.values())) > 1:
        listing = ", ".join(f"{site}: {'classification' if 'brier' in kinds[site] else 'regression'}" for site in kinds)
        raise ProtocolError(f"sites evaluate different kinds of task: {listing}")
    sites = sorted(sums, key=natural_order)
    names = next(iter(kinds.values()))
    total = {name: math.fsum(float(sums[site][name]) for site in sites) for name in names}
    test = _figures(total) | ranked(combine_histograms(arrays).get("ranks"))
    return Evaluation(
        test=test,
        test_standardised=standardised(test, target_scale),
        per_site=[{"site": site, "num_examples": int(sums[site]["count"]), **_figures(sums[site])} for site in sites],
    )


def of_all(scores: Scores, target_scale: float) -> Evaluation | None:
    """Figures of the scores of all sites together, without a row for each; None where there are no rows."""
    if scores.sums["count"] == 0:
        return None
    found = combine({"all": scores.sums}, target_scale, [scores.arrays])
    return Evaluation(test=found["test"], test_standardised=found["test_standardised"], per_site=[])


def standardised(test: Mapping[str, float], target_scale: float) -> Figures:
    """The same figures for the standardised target; class probabilities have no units and stay as they are."""
    if "rmse" not in test:
        return dict(test)
    out = dict(test)
    for name in ("rmse", "mae", "crps"):
        out[name] = test[name] / target_scale
    out["nll"] = test["nll"] - math.log(target_scale)
    return out


def as_baseline(evaluation: Evaluation) -> dict[str, Any]:
    """The entry of ``pooled`` or ``local_only`` in ``metrics.json``: the test figures and a row per site."""
    return {**evaluation["test"], "per_site": evaluation["per_site"]}


def combine_histograms(arrays: Iterable[Mapping[str, NDArray[Any]]]) -> dict[str, list[Any]]:
    """Histograms of the sites' evaluation replies, added: the entry ``calibration`` of ``metrics.json``.

    Raises:
        ProtocolError: when two sites send histograms of different shapes.
    """
    totals: dict[str, NDArray[Any]] = {}
    for reply in arrays:
        for name, key in HISTOGRAMS.items():
            if name not in reply:
                continue
            if key in totals and totals[key].shape != reply[name].shape:
                raise ProtocolError(
                    f"`{name}` has shape {reply[name].shape} at one site, {totals[key].shape} at another"
                )
            totals[key] = np.add(totals[key], reply[name]) if key in totals else np.asarray(reply[name])
    return {key: value.tolist() for key, value in totals.items()}


def ranked(counts: Sequence[Sequence[float]] | None) -> Figures:
    """Figures of ranks, from rows of each class by predicted log odds, [bins, 2] summed over all sites.

    ``auc`` is P(a row of class 1 has higher odds than one of class 0), ties counting half. ``calibration_slope`` is the
    b of logit P(y = 1) = a + b · log odds, at the middles of the bins, with its standard error; below 1, predictions
    are too extreme. ``base_rate`` is the share of class 1. NaN where a class is missing.
    """
    if counts is None:
        return {}
    zeros, ones = np.asarray(counts, dtype=np.float64).T
    others, cases = float(zeros.sum()), float(ones.sum())
    both = others > 0 and cases > 0
    slope, error = _slope(zeros, ones) if both else (math.nan, math.nan)
    return {
        "auc": float(ones @ (np.cumsum(zeros) - zeros / 2)) / (others * cases) if both else math.nan,
        "calibration_slope": slope,
        "calibration_slope_se": error,
        "base_rate": cases / (others + cases) if others + cases else math.nan,
    }


def _slope(zeros: NDArray[np.float64], ones: NDArray[np.float64]) -> tuple[float, float]:
    """Slope of a logistic regression and its standard error; NaN where it has none, as with separated classes."""
    width = 2 * RANK_REACH / RANK_BINS
    design = np.column_stack([np.ones(RANK_BINS), (np.arange(RANK_BINS) + 0.5) * width - RANK_REACH])
    weights = np.array([0.0, 1.0])
    for _ in range(50):
        p = 1 / (1 + np.exp(-design @ weights))
        information = design.T * ((zeros + ones) * p * (1 - p)) @ design
        if np.linalg.cond(information) > 1e10:
            break
        step = np.linalg.solve(information, design.T @ (ones - (zeros + ones) * p))
        weights = weights + step / max(1.0, float(np.abs(step).max()))
        if np.abs(step).max() < 1e-9:
            return float(weights[1]), math.sqrt(np.linalg.solve(information, [0.0, 1.0])[1])
    return math.nan, math.nan


def with_skill(figures: Figures, mean: Mapping[str, Any]) -> Figures:
    """Figures and what they gain over predicting the mean: 1 − S / S_mean for squared error, CRPS and Brier score.

    ``r2`` thus compares with the training mean on the same held-out rows, and can be below zero.
    """
    powers = {"r2": ("rmse", 2), "crps_skill": ("crps", 1), "brier_skill": ("brier", 1)}
    gains = {
        name: 1 - (figures[score] / mean[score]) ** power if mean[score] else math.nan
        for name, (score, power) in powers.items()
        if score in figures and score in mean
    }
    return figures | gains


def natural_order(site: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key that puts site 2 before site 10."""
    parts = (part for part in re.split(r"([0-9]+)", site) if part)
    return tuple((0, int(part), part) if part.isdecimal() else (1, 0, part) for part in parts)


def _kind(site: str, values: Sums) -> tuple[str, ...]:
    names = CLASSIFICATION_SUMS if "brier" in values else REGRESSION_SUMS
    missing = [name for name in names if name not in values]
    if missing:
        raise ProtocolError(f"the evaluation of site {site} lacks {', '.join(missing)}; expected {', '.join(names)}")
    return names


def _figures(total: Sums) -> Figures:
    n = float(total["count"])

    def mean(name: str) -> float:
        return float(total[name]) / n if n else math.nan

    if "brier" in total:
        return {"accuracy": mean("correct"), "nll": mean("nll"), "brier": mean("brier")}
    coverage = {f"coverage_{level}": mean(f"inside-{level}") for level in (50, 90, 95)}
    return {
        "rmse": math.sqrt(mean("squared-error")),
        "mae": mean("absolute-error"),
        "nll": mean("nll"),
        "crps": mean("crps"),
        **coverage,
    }
