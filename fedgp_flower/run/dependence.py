"""What predictions depend on: the outcome along one column at a time, and the lengthscale of each input."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import expit, ndtr, ndtri

from fedgp_flower.agreement import Column
from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.errors import RunError
from fedgp_flower.gp.likelihoods.grades import OrderedGrades, values_of
from fedgp_flower.options import BESIDE
from fedgp_flower.run.artefacts import Run
from fedgp_flower.run.predict import Exportable, Predictor
from fedgp_flower.typing import Array

REACH = 2.0
"""Standard deviations that a number is moved to either side of its mean where the range of the rows is not known."""
STEPS = 41
MOST = 6


@dataclass(frozen=True, slots=True)
class Effect:
    """Median and 95 % interval of the outcome, in its units, along one column."""

    name: str
    levels: tuple[str, ...]
    """Levels of text, or of zeros and ones; empty for other numbers."""
    values: Array  # [n], numbers; 0, 1, … for levels
    median: Array  # [n]
    low: Array  # [n]
    high: Array  # [n]
    dates: bool = False
    """Whether values are days since 1 January 2000."""
    x: Array | None = None  # [n, D]
    """The standardised inputs of all columns."""


@dataclass(frozen=True, slots=True)
class Relevance:
    """Lengthscales of one part of the model, shortest first, in standard deviations of the inputs."""

    part: str
    names: tuple[str, ...]
    value: Array  # [D]
    low: Array  # [D] of the 95 % interval; NaN where none is known
    high: Array  # [D]
    how: str


def relevances(run: Run) -> list[Relevance]:
    """The lengthscales that a method tells, else those of a saved kernel; nothing for a single input."""
    if run.saved is None or len(run.saved.inputs) < 2:
        return []
    names = run.saved.inputs
    told = run.metrics.method_details.get("relevance") or {
        name.removesuffix(".lengthscale"): {"value": np.ravel(array).tolist()}
        for name, array in run.saved.arrays.items()
        if name.startswith("kernel.") and name.endswith(".lengthscale")
    }
    found = []
    for part, entry in told.items():
        value = np.asarray(entry["value"], dtype=float)
        if len(value) == len(names):  # one lengthscale for all inputs compares nothing
            spread = np.full(len(value), np.nan if entry.get("log_sd") is None else entry["log_sd"], dtype=float)
            low, high = (value * np.exp(ndtri(level) * spread) for level in (0.025, 0.975))
            order = np.argsort(value)
            how = str(entry.get("how", ""))
            found.append(Relevance(part, tuple(names[i] for i in order), value[order], low[order], high[order], how))
    return found


def effects(posterior: Predictor, most: int | None = MOST) -> list[Effect]:
    """The columns that move the outcome farthest; none where the posterior is no single Gaussian process.

    At standardised inputs x, zero but for the inputs of the column, f ~ N(m, s²). Shown are h(m) and h(m ± 1.96 s),
    with h the increasing map from f to the outcome without noise: the target in its units, a probability, or a rate.
    """
    if not isinstance(posterior.standardised, Exportable) or not posterior.run.config.get("standardise", True):
        return []
    if posterior.saved.likelihood == "categorical":  # an outcome of several functions
        return []
    try:
        model, likelihood = posterior.to_gpytorch()
    except RunError:  # not a single Gaussian process
        return []
    agreed, found = posterior.preparation, []
    links = {"": posterior.units.values, "exposure": np.exp, "trials": expit, "event": np.exp}
    name = posterior.saved.likelihood
    outcome = ndtr if name == "bernoulli" else links[BESIDE.get(name, "")]
    if isinstance(likelihood, OrderedGrades):
        grades = values_of(agreed.target.levels)
        outcome = lambda f: likelihood(torch.from_numpy(f)).probs.numpy() @ grades  # noqa: E731
    points = model.inducing_points.detach().numpy()
    ends = np.stack([points.min(axis=0).clip(-REACH, 0.0), points.max(axis=0).clip(0.0, REACH)])
    # Standardised values between which about 95 % of the rows lie, where that is known.
    known = {column["name"]: column.get("range") for column in posterior.run.metrics.data.get("columns", ())}
    for name, inputs, column in _columns(agreed):
        low, high = known.get(name) or ends[:, inputs[0]]
        levels, shown, moved = _path(agreed, inputs, column, low, high)
        if len(shown) == 0:
            continue
        x = np.zeros((len(shown), len(agreed.names)))
        x[:, inputs] = moved
        with torch.no_grad():
            f = model(torch.from_numpy(x))
        centre, spread = (part.reshape(-1, len(x))[0].numpy() for part in (f.mean, f.stddev))  # log noise comes second
        quantiles = centre + ndtri([[0.5], [0.025], [0.975]]) * spread
        median, low, high = outcome(quantiles)
        days = re.fullmatch(r"days\((.+)\)", name)
        found.append(Effect(days[1] if days else name, levels, shown, median, low, high, bool(days), x))
    return sorted(found, key=lambda effect: -float(np.ptp(effect.median)))[:most]


def _path(
    agreed: Preparation, inputs: list[int], column: Column, low: float, high: float
) -> tuple[tuple[str, ...], Array, Array]:
    """Levels, the values shown [n] and the standardised inputs [n, d] of a column that is moved."""
    mean, scale = agreed.input_mean[inputs], agreed.input_scale[inputs]
    if column.kind != "numeric":
        is_level = np.array(column.levels)[:, None] == np.array(column.shown)
        return column.levels, np.arange(len(column.levels), dtype=np.float64), (is_level - mean) / scale
    if len(inputs) == 2:  # sine and cosine of the day of the year
        months = np.linspace(1, 13, STEPS)
        turn = (months - 1) * math.pi / 6
        return (), months, (np.stack([np.sin(turn), np.cos(turn)], axis=1) - mean) / scale
    share = float(mean[0])
    if 0 < share < 1 and math.isclose(scale[0] ** 2, share * (1 - share), rel_tol=1e-6):  # zeros and ones alone
        shown = np.array([0.0, 1.0])
        return ("0", "1"), shown, (shown[:, None] - mean) / scale
    values = np.linspace(low, high, STEPS if low < high else 0)  # nearly all rows may have one value
    return (), values * scale + mean, values[:, None]


def _columns(agreed: Preparation) -> Iterator[tuple[str, list[int], Column]]:
    """Name and inputs of each column that is moved; sine and cosine of a date together, as the month."""
    widths = [len(column.names) for column in agreed.columns]
    starts = dict(zip((column.name for column in agreed.columns), np.cumsum([0, *widths]).tolist(), strict=False))
    for column in agreed.columns:
        part = re.fullmatch(r"(sine|cosine)\((.+)\)", column.name)
        pair = [f"{way}({part[2]})" for way in ("sine", "cosine")] if part else []
        if not pair or not set(pair) <= set(starts):
            first = starts[column.name]
            yield column.name, list(range(first, first + max(1, len(column.shown)))), column
        elif part and column.name == pair[0]:
            yield f"{part[2]} (month)", [starts[name] for name in pair], column
