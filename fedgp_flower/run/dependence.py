"""Dependence of predictions on the inputs: the outcome along each column, and the lengthscale of each input."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from scipy.special import expit, ndtr, ndtri

from fedgp_flower.agreement import Column
from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.errors import RunError
from fedgp_flower.gp.likelihoods.grades import values_of
from fedgp_flower.gp.steps import ABSENT, are_steps
from fedgp_flower.options import AUTO, SECOND_COLUMN, kernel_tree
from fedgp_flower.run.artefacts import Run
from fedgp_flower.run.predict import Predictor
from fedgp_flower.typing import Array

REACH = 2.0
"""Range of a number on each side of its mean, in standard deviations, if the range of the rows is unknown."""
STEPS = 41
MOST = 6


@dataclass(frozen=True, slots=True)
class Effect:
    """Median and 95 % interval of the outcome, in its units, along one column."""

    name: str
    levels: tuple[str, ...]
    """Levels of text or of a binary column; empty for other numbers."""
    values: Array  # [n], numbers; 0, 1, … for levels
    median: Array  # [n]
    low: Array  # [n]
    high: Array  # [n]
    dates: bool = False
    """Whether values are days since 1 January 2000."""
    x: Array | None = None  # [n, D]
    """Standardised inputs of all columns."""


def relevances(run: Run) -> dict[str, pd.DataFrame]:
    """Return a table for each part of the model: the lengthscale of each input, in its standard deviations, ascending.

    They are those in the method's details, else of a saved kernel; none for a single input. ``low`` and ``high`` are
    the ends of a 95 % interval, NaN if there is none; ``attrs["how"]`` says how it was computed.
    """
    if run.saved is None or len(run.saved.inputs) < 2:
        return {}
    parts = run.metrics.method_details.get("relevance") or {
        name.removesuffix(".lengthscale").replace("kernels.", ""): {"value": np.ravel(array).tolist()}
        for name, array in run.saved.arrays.items()
        if name.startswith("kernel.") and name.endswith(".lengthscale")
    }
    found = {}
    for part, entry in parts.items():
        if len(entry["value"]) == len(run.saved.inputs):  # not a single lengthscale for all inputs
            value = pd.Series(entry["value"], list(run.saved.inputs), dtype=float)
            factor = np.exp(ndtri(0.975) * np.asarray(entry.get("log_sd") or np.nan, dtype=float))
            table = pd.DataFrame({"value": value, "low": value / factor, "high": value * factor}).sort_values("value")
            found[_titled(part, str(run.saved.model.get("kernel", AUTO)))] = table
            table.attrs["how"] = str(entry.get("how", ""))
    return found


def _titled(part: str, kernel: str) -> str:
    """Return the term of the kernel that a part ``kernel.1`` stands for, as in ``l1 (term 2)``; else the part."""
    if (numbered := re.fullmatch(r"kernel\.(\d+)", part)) is None:
        return part
    node, terms = kernel_tree(kernel), list[str]()
    while isinstance(node, ast.Call):
        [node] = node.args
    kind = type(node.op) if isinstance(node, ast.BinOp) else None
    while isinstance(node, ast.BinOp) and type(node.op) is kind:
        terms.insert(0, ast.unparse(node.right))
        node = node.left
    terms.insert(0, ast.unparse(node))
    return f"{terms[int(numbered[1])]} (term {int(numbered[1]) + 1})"


def walks(run: Run) -> pd.Series[float]:
    """Return the standard deviation of the walk of each input with steps, from its lowest to its highest value."""
    arrays = {} if run.saved is None else run.saved.arrays
    if run.saved is None or "kernel.step" not in arrays:
        return pd.Series(dtype=float)
    points = torch.from_numpy(arrays["inducing.locations"])
    inputs, cuts = torch.unique((points[are_steps(points)] != ABSENT).long().argmax(1), return_counts=True)
    names = [run.saved.inputs[number] for number in inputs]
    return pd.Series(np.sqrt(arrays["kernel.step"] * cuts.numpy()), names).sort_values(ascending=False)


def effects(posterior: Predictor, most: int | None = MOST) -> list[Effect]:
    """Return the columns with the largest effect on the outcome; none unless the posterior is a single GP.

    At standardised inputs x, zero except for the inputs of the column, f ~ N(m, s²). The effect is h(m) and
    h(m ± 1.96 s), with h the increasing map from f to the outcome: the target in its units, a probability or a rate.
    """
    if not hasattr(posterior.standardised, "export") or not posterior.run.config.get("standardise", True):
        return []
    if posterior.saved.likelihood == "categorical":  # several functions
        return []
    try:
        model, likelihood = posterior.to_gpytorch()
    except RunError:  # not a single Gaussian process
        return []
    agreed, found = posterior.preparation, []
    links = {"": posterior.units.values, "exposure": np.exp, "trials": expit, "event": np.exp}
    name = posterior.saved.likelihood
    graded = name == "ordinal"
    outcome = ndtr if name == "bernoulli" else links[SECOND_COLUMN.get(name, "")]
    if graded:
        grades = values_of(agreed.target.levels)
        outcome = lambda f: likelihood(torch.from_numpy(f)).probs.numpy() @ grades  # noqa: E731
    points = model.inducing_points.detach()
    points = points[~are_steps(points)].numpy()
    ends = np.stack([points.min(axis=0).clip(-REACH, 0.0), points.max(axis=0).clip(0.0, REACH)])
    # Standardised range of about 95 % of the rows, if known.
    known = {column["name"]: column.get("range") for column in posterior.run.metrics.data.get("columns", ())}
    for name, inputs, column in _columns(agreed):
        low, high = known.get(name) or ends[:, inputs[0]]
        levels, shown, along_column = _path(agreed, inputs, column, low, high)
        if len(shown) == 0:
            continue
        x = np.zeros((len(shown), len(agreed.names)))
        x[:, inputs] = along_column
        with torch.no_grad():
            f = model(torch.from_numpy(x))
        centre, spread = (part.reshape(-1, len(x))[0].numpy() for part in (f.mean, f.stddev))  # log noise comes second
        quantiles = centre + ndtri([[0.5], [0.025], [0.975]]) * spread
        if graded:  # at the mean of the noise's function
            quantiles = np.stack([quantiles, np.broadcast_to(f.mean[1], quantiles.shape)], 1)
        median, low, high = outcome(quantiles)
        days = re.fullmatch(r"days\((.+)\)", name)
        found.append(Effect(days[1] if days else name, levels, shown, median, low, high, bool(days), x))
    return sorted(found, key=lambda effect: -float(np.ptp(effect.median)))[:most]


def _path(
    agreed: Preparation, inputs: list[int], column: Column, low: float, high: float
) -> tuple[tuple[str, ...], Array, Array]:
    """Return levels, values [n] and standardised inputs [n, d] along a column."""
    mean, scale = agreed.input_mean[inputs], agreed.input_scale[inputs]
    if column.kind != "numeric":
        is_level = np.array(column.levels)[:, None] == np.array(column.shown)
        return column.levels, np.arange(len(column.levels), dtype=np.float64), (is_level - mean) / scale
    if len(inputs) == 2:  # sine and cosine of the day of the year
        months = np.linspace(1, 13, STEPS)
        turn = (months - 1) * math.pi / 6
        return (), months, (np.stack([np.sin(turn), np.cos(turn)], axis=1) - mean) / scale
    share = float(mean[0])
    if 0 < share < 1 and math.isclose(scale[0] ** 2, share * (1 - share), rel_tol=1e-6):  # a binary column
        shown = np.array([0.0, 1.0])
        return ("0", "1"), shown, (shown[:, None] - mean) / scale
    values = np.linspace(low, high, STEPS if low < high else 0)  # none if nearly all rows have one value
    return (), values * scale + mean, values[:, None]


def _columns(agreed: Preparation) -> Iterator[tuple[str, list[int], Column]]:
    """Yield name and inputs of each column; sine and cosine of a date are one column, the month."""
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
