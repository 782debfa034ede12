"""What predictions depend on: the posterior of f along one column at a time, all others at their means."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import ndtr, ndtri

from fedgp_flower.data.standardisation import Column, Preparation
from fedgp_flower.errors import RunError
from fedgp_flower.gp.to_gpytorch import MixturePosterior, mixture
from fedgp_flower.run.artefacts import RunData
from fedgp_flower.run.predict import Exportable, Predictor
from fedgp_flower.typing import Array

REACH = 2.0
"""Standard deviations to both sides of its mean that a number is moved, but not beyond the inducing points, where no
histogram told between which values rows lie."""
STEPS = 41
MOST = 6


@dataclass(frozen=True, slots=True)
class Effect:
    """Median and 95 % interval of the outcome, in its units, along one column."""

    name: str
    levels: tuple[str, ...]
    """Of text, or of zeros and ones; empty for other numbers."""
    values: Array  # [n], of numbers; 0, 1, … for levels
    median: Array  # [n]
    low: Array  # [n]
    high: Array  # [n]

    dates: bool = False
    """Whether values are days since 1 January 2000."""

    @property
    def spread(self) -> float:
        """How far the median moves."""
        return float(np.ptp(self.median))


def effects(posterior: Predictor) -> list[Effect]:
    """The columns that move the outcome farthest; none where what predicts is no single Gaussian process.

    At standardised inputs x, zero but for the inputs of the column, f ~ N(m, s²); what is shown is h(m) and
    h(m ± 1.96 s), with h the increasing map from f to the outcome (of a row without its noise): units of the target,
    its transformation back, a probability, or a rate.
    """
    if not isinstance(posterior.standardised, Exportable) or not posterior.run.config.get("standardise", True):
        return []
    found = sorted(_along(posterior), key=lambda effect: -effect.spread)
    return found[:MOST]


def ranges_of(run: RunData) -> dict[str, tuple[float, float]]:
    """By column of numbers, between which standardised values about 95 % of the rows lie, where it is known."""
    told = run.metrics.data.get("columns", ())
    return {own["name"]: (own["range"][0], own["range"][1]) for own in told if "range" in own}


def _along(posterior: Predictor) -> Iterator[Effect]:
    try:
        model = mixture(posterior.draws())
    except RunError:  # no Gaussian process at all
        return
    if isinstance(model, MixturePosterior):
        return
    agreed = posterior.preparation
    points = model.variational_strategy.inducing_points.detach().numpy()
    ranges = ranges_of(posterior.run)
    lowest, highest = points.min(axis=0).clip(-REACH, 0.0), points.max(axis=0).clip(0.0, REACH)
    for name, inputs, column in _moved(agreed):
        mean, scale = agreed.input_mean[inputs], agreed.input_scale[inputs]
        levels, days = column.levels, re.fullmatch(r"days\((.+)\)", name)
        if len(inputs) == 2 and column.kind == "numeric":
            shown = np.linspace(1, 13, STEPS)
            turn = (shown - 1) * math.pi / 6
            moved = (np.stack([np.sin(turn), np.cos(turn)], axis=1) - mean) / scale
        elif column.kind == "numeric" and _yes_or_no(float(mean[0]), float(scale[0])):
            levels, shown = ("0", "1"), np.array([0.0, 1.0])
            moved = (shown[:, None] - mean) / scale
        elif column.kind == "numeric":
            ends = ranges.get(name, (lowest[inputs[0]], highest[inputs[0]]))
            if ends[0] >= ends[1]:  # nearly all rows have about one value
                continue
            values = np.linspace(ends[0], ends[1], STEPS)
            moved, shown = values[:, None], values * scale + mean
        else:
            shown = np.arange(len(column.levels), dtype=np.float64)
            moved = ((np.array(column.levels)[:, None] == np.array(column.shown)) - mean) / scale
        x = np.zeros((len(shown), len(agreed.names)))
        x[:, inputs] = moved
        with torch.no_grad():
            f = model(torch.from_numpy(x))
        ends = f.mean.numpy() + ndtri([[0.5], [0.025], [0.975]]) * f.stddev.numpy()
        median, low, high = _outcome(posterior, ends)
        yield Effect(days[1] if days else name, levels, shown, median, low, high, dates=bool(days))


def _moved(agreed: Preparation) -> Iterator[tuple[str, list[int], Column]]:
    """What is moved at a time: a column with its inputs; sine and cosine of a date together, as the month."""
    starts, start = {}, 0
    for column in agreed.columns:
        starts[column.name] = start
        start += len(column.names)
    for column in agreed.columns:
        part = re.fullmatch(r"(sine|cosine)\((.+)\)", column.name)
        own = [f"{way}({part[2]})" for way in ("sine", "cosine")] if part else []
        if not own or not set(own) <= set(starts):
            first = starts[column.name]
            yield column.name, list(range(first, first + max(1, len(column.shown)))), column
        elif column.name == own[0] and part:
            yield f"{part[2]} (month)", [starts[name] for name in own], column


def _yes_or_no(mean: float, sd: float) -> bool:
    """Whether a column is of zeros and ones, as its mean and standard deviation tell: s² = m(1 − m)."""
    return 0 < mean < 1 and math.isclose(sd**2, mean * (1 - mean), rel_tol=1e-6)


def _outcome(posterior: Predictor, f: Array) -> Array:
    """What values of f say of the target, elementwise."""
    agreed = posterior.preparation
    if posterior.saved.likelihood == "bernoulli":
        return ndtr(f)
    if posterior.saved.likelihood == "poisson":
        return np.exp(f)
    own = f * agreed.target_scale + agreed.target_mean
    return own if agreed.transform is None else agreed.transform.inverse(own)
