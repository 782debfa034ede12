"""The first inducing points of a sparse model, from histograms and second moments of the inputs.

Sites send counts of each standardised input in fixed bins, and XᵀX. Inducing points are scrambled Sobol points with the
pooled marginal distributions and a Gaussian copula of the pooled correlations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.special import ndtr
from scipy.stats import qmc

from fedgp_flower.errors import RunError
from fedgp_flower.gp.sums import INPUT_EDGES
from fedgp_flower.messages import add, encode
from fedgp_flower.options import ModelSection
from fedgp_flower.shared_messages import Nothing, Shape
from fedgp_flower.typing import Array, Json
from strategies.server.questions import Asking, Each, Refuse, Roster, Summed, Total


def shape_of_inputs(roster: Roster) -> Asking[Shape]:
    """Return the pooled histograms and moments of inputs, and the median of the sites' initial hyperparameters."""
    if roster.totals_only:
        summed: Summed[Shape] = yield Total(Shape, Nothing())
        total, count = summed.required("histograms of its inputs"), len(summed.sites) - summed.silent
        return replace(total, start={name: np.asarray(array / count) for name, array in total.start.items()})
    answers: dict[str, Shape] = yield Each(Shape, {site: Nothing() for site in roster.sites}, retries=1)
    layouts = {site: frozenset((n, a.shape) for n, a in encode(answer).items()) for site, answer in answers.items()}
    most_common = Counter(layouts.values()).most_common(1)
    for site in [site for site, found in layouts.items() if found != most_common[0][0]]:
        yield Refuse(site, "its arrays are not those that most sites send")
        del answers[site]
    if not answers:
        raise RunError("no site sent histograms of its inputs; see the failures above")
    starts = [shape.start for shape in answers.values()]
    start = {name: np.asarray(np.median([known[name] for known in starts], axis=0)) for name in starts[0]}
    return replace(add(answers.values()), start=start)


def note_ranges(answer: type, reply: Any, columns: Sequence[Json]) -> None:
    """Add the range of each standardised column: ``range`` holds 95 % of the rows, ``reach`` all."""
    if answer is not Shape:
        return
    shapes = [reply.total] if isinstance(reply, Summed) else reply.values()
    sent = [shape.histogram for shape in shapes if shape and shape.histogram.shape[1] == len(INPUT_EDGES) - 1]
    counts = np.sum(sent, axis=0) if sent else np.empty((0, 0))
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
