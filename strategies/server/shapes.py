"""The first inducing points of a sparse model, from histograms and second moments of the inputs.

Sites send counts of each standardised input in fixed bins, and XᵀX. Inducing points are scrambled Sobol points with the
pooled marginal distributions and a Gaussian copula of the pooled correlations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.special import ndtr
from scipy.stats import qmc

from fedgp_flower.gp.sums import INPUT_EDGES
from fedgp_flower.options import ModelSection
from fedgp_flower.shared_messages import Nothing, Shape
from fedgp_flower.typing import Array, Json
from strategies.server.questions import Asking, Roster, Summed, Total


def shape_of_inputs(roster: Roster) -> Asking[Shape]:
    """Return the pooled histograms and moments of inputs."""
    summed: Summed[Shape] = yield Total(Shape, Nothing(), roster.sites, sizes={"B": len(INPUT_EDGES) - 1})
    return summed.required("histograms of its inputs")


def note_ranges(answer: type, reply: Any, columns: Sequence[Json]) -> None:
    """Add the range of each standardised column: ``range`` holds 95 % of the rows, ``reach`` all."""
    if answer is not Shape or reply.total is None:
        return
    counts = reply.total.histogram
    starts = np.cumsum([0, *(column["inputs"] for column in columns)])
    for start, column in zip(starts, columns, strict=False):
        if column["kind"] == "number" and start < len(counts):
            reached = np.cumsum(counts[start]) / counts[start].sum()
            low, high = (int((reached >= level).argmax()) for level in (0.025, 0.975))
            column["range"] = [float(INPUT_EDGES[low + 1]), float(INPUT_EDGES[high])]
            filled = np.flatnonzero(counts[start])
            open_ended = (0, len(INPUT_EDGES) - 1)  # the outer bins are unbounded
            ends = filled[0], filled[-1] + 1
            column["reach"] = [None if end in open_ended else float(INPUT_EDGES[end]) for end in ends]


def initial_locations(shape: Shape, model: ModelSection, seed: int) -> Array:
    """Return the first Z [M, D], drawn from the pooled histograms and moments."""
    return points_like_inputs(shape, model.num_inducing, np.random.default_rng([seed, *b"inducing"]))


def points_like_inputs(shape: Shape, count: int, rng: np.random.Generator) -> Array:
    """Return points [M, D] distributed like the inputs, from their counts in bins [D, B] and XᵀX [D, D]."""
    histogram, products = shape.histogram, shape.products
    rows = float(histogram[0].sum())
    spread = np.sqrt(np.maximum(np.diag(products) / rows, 1e-12))
    correlation = products / rows / np.outer(spread, spread)
    np.fill_diagonal(correlation, 1.0)
    # Constant columns give zero rows, duplicated columns a singular matrix: shrink a little towards independence.
    correlation = 0.99 * correlation + 0.01 * np.eye(len(histogram))
    sobol = qmc.Sobol(len(histogram), rng=rng)
    engine = qmc.MultivariateNormalQMC(np.zeros(len(histogram)), engine=sobol, inv_transform=True)
    normal = engine.random(2 ** int(np.ceil(np.log2(max(count, 1)))))[:count]
    normal = normal @ np.linalg.cholesky(correlation).T
    columns = []
    for column, counts in zip(ndtr(normal).T, histogram, strict=True):  # the quantile function, linear within a bin
        cumulative = np.concatenate([[0.0], np.cumsum(counts) / counts.sum()])
        keep = np.concatenate([[True], np.diff(cumulative) > 0]) | np.concatenate([np.diff(cumulative) > 0, [True]])
        columns.append(np.interp(column, cumulative[keep], INPUT_EDGES[keep]))
    return np.stack(columns, axis=1)
