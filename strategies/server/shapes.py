"""The first parameters of a sparse model: Z from sums of where inputs lie, hyperparameters as configured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from fedgp_flower.errors import RunError
from fedgp_flower.gp.sums import INPUT_EDGES
from fedgp_flower.messages import add, encode
from fedgp_flower.options import ModelSection
from fedgp_flower.shared_messages import Nothing, Shape
from fedgp_flower.typing import Array, NamedArrays
from strategies.server.inducing import initial_inducing_points
from strategies.server.questions import Asking, Each, Question, Refuse, Roster, Summed, Total

A = TypeVar("A")


def shapes_of_inputs(roster: Roster) -> Asking[Mapping[str, Shape]]:
    """What sites say of where their inputs lie, with the initial hyperparameters of the configured model.

    Where there are totals only, it is one answer of all sites together.

    Raises:
        RunError: if no site answers.
    """
    if roster.totals_only:
        return {"all": (yield from _of_all())}
    answers: dict[str, Shape] = yield Each(Shape, {site: Nothing() for site in roster.sites}, retries=1)
    answers = yield from usual_answers(answers, "its arrays are not those that most sites send")
    if not answers:
        raise RunError("no site answered where its inputs lie; see the failures above")
    return answers


def note_ranges(question: Question, reply: Any, columns: Sequence[dict[str, Any]]) -> None:
    """Where a question was for shapes, note ``range`` of each column of numbers, standardised, from its answer."""
    if not isinstance(question, Each | Total) or question.answer is not Shape:
        return
    shapes = [reply.total] if isinstance(reply, Summed) else reply.values()
    sent = [shape.histogram for shape in shapes if shape and shape.histogram.shape[1] == len(INPUT_EDGES) - 1]
    counts = np.sum(sent, axis=0) if sent else np.empty((0, 0))
    starts = np.cumsum([0, *(column["inputs"] for column in columns)])
    for start, column in zip(starts, columns, strict=False):
        if column["kind"] == "number" and start < len(counts):
            column["range"] = middle(counts[start])


def middle(counts: Array) -> list[float]:
    """Where about 95 % of rows lie by their counts in bins [B], with rows at both ends or beyond them.

    From the upper edge of the bin with the 2.5 % quantile to the lower edge of that with the 97.5 % quantile.
    """
    reached = np.cumsum(counts) / counts.sum()
    low, high = (int((reached >= level).argmax()) for level in (0.025, 0.975))
    return [float(INPUT_EDGES[low + 1]), float(INPUT_EDGES[high])]


def usual_answers(answers: Mapping[str, A], reason: str) -> Asking[dict[str, A]]:
    """Answers with the names and shapes that most sites send; the others are refused, for the reason given."""
    layouts = {site: frozenset((n, a.shape) for n, a in encode(answer).items()) for site, answer in answers.items()}
    usual = Counter(layouts.values()).most_common(1)
    odd = [site for site, layout in layouts.items() if layout != usual[0][0]]
    for site in odd:
        yield Refuse(site, reason)
    return {site: answer for site, answer in answers.items() if site not in odd}


def _of_all() -> Asking[Shape]:
    """The histograms and products of all sites, and the mean of what every honest site says alike."""
    summed: Summed[Shape] = yield Total(Shape, Nothing())
    if summed.total is None:
        raise RunError("no total of where inputs lie; see the failures above")
    count = len(summed.sites) - summed.silent
    start = {name: np.asarray(array / count) for name, array in summed.total.start.items()}
    return replace(summed.total, start=start)


def initial_hyperparameters(answers: Mapping[str, Shape]) -> NamedArrays:
    """Every honest site sends the same, so the median is theirs."""
    names = next(iter(answers.values())).start
    return {name: np.asarray(np.median([shape.start[name] for shape in answers.values()], axis=0)) for name in names}


def initial_locations(answers: Mapping[str, Shape], model: ModelSection, seed: int) -> Array:
    """The first Z [M, D], drawn from the sums of what sites say of their inputs."""
    return points_like_inputs(answers, "copula", model.num_inducing, np.random.default_rng([seed, *b"inducing"]))


def points_like_inputs(answers: Mapping[str, Shape], kind: str, count: int, rng: np.random.Generator) -> Array:
    """Points [M, D] of a kind of :func:`initial_inducing_points`, from the sums of what sites say of their inputs."""
    total = add(answers.values())
    histogram, rows = total.histogram.astype(np.float64), float(total.histogram[0].sum())
    return initial_inducing_points(kind, count, histogram, total.products, rows, rng)
