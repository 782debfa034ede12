"""The evaluation of a run and its baselines: what sites are asked, and the figures of what they answer."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import Message

from fedgp_flower.scores import CLASSIFICATION_SUMS, REGRESSION_SUMS, Scores
from fedgp_flower.shared_messages import (
    HISTOGRAM_SHAPES,
    LinearPredictor,
    LinearScoreSums,
    LocalScoreSums,
    Nothing,
    ScoreSums,
)
from fedgp_flower.typing import NamedArrays
from strategies.server import linear
from strategies.server.evaluation import Evaluation, as_baseline, combine, of_all
from strategies.server.finalise import Predicted
from strategies.server.network import Expected, Network
from strategies.server.questions import Each, Summed, Total
from strategies.server.session import Asked, Session
from strategies.server.wire import Answer, ArraySpec, answers

logger = logging.getLogger("fedgp")

CLASS_ARRAYS = ("prediction.probability", "prediction.target")
PREDICTION_ARRAYS = ("prediction.mean", "prediction.sd", "prediction.target")
POOLED = "query.pooled"
"""Simulation only: the first site fits the rows of all."""
ALONE = "query.local_only"


@dataclass(frozen=True, slots=True)
class ScoresAsked:
    """A question for scores as messages, and what the replies must be."""

    messages: list[Message]
    expected: Expected
    asked: Asked | None = None
    """Under masks, the total that is asked for."""


class Scoring:
    """The scores of one run; sites score their held-out rows themselves."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.predicted = Predicted(Nothing())
        """What sites predicted with in the latest evaluation."""
        self.evaluation: Evaluation | None = None
        self.calibrated: Sequence[NamedArrays] = ()
        """Histograms of the latest evaluation."""
        self.scored: dict[str, Answer] = {}
        """Scores of the latest evaluation by site; none under masks."""
        self.local_only: Mapping[str, Any] | None = None

    def ask(self, kind: str, total: type[ScoreSums], predicted: Predicted) -> ScoresAsked:
        """The question for the scores of one prediction, or of a fit that a site makes by itself."""
        session, network = self.session, self.session.network
        if session.masking is not None and kind != POOLED:
            if isinstance(predicted.request, Mapping):
                session.require_clear(type(next(iter(predicted.request.values()))))
            asked = session.put(Total(total, predicted.request, session.roster().everyone))
            return ScoresAsked(asked.messages, asked.contract, asked)
        sites = network.healthy()[:1] if kind == POOLED else network.sites()
        messages = [session.message(site, kind, predicted.at(site)) for site in sites]
        return ScoresAsked(messages, {} if kind == "evaluate" else None)  # a fit's reply may hold histograms

    def take(self, asked: ScoresAsked, replies: Iterable[Message]) -> Evaluation | None:
        """The figures of the replies to an evaluation; None if nobody has scored a row."""
        scores, self.scored = self._scores(asked, replies)
        if scores is not None:
            self.calibrated = [scores.arrays]
        elif self.scored:
            self.calibrated = [histograms(answer) for answer in self.scored.values()]
        found = self._figures(scores, self.scored)
        if found is not None or scores is not None:
            self.evaluation = found
        return found

    def baseline(self, kind: str) -> dict[str, Any] | None:
        """The scores of a Gaussian process of every site alone, or of all rows; None if no site has any."""
        logger.info("comparison: %s", kind.removeprefix("query.").replace("_", "-"))
        asked = self.ask(kind, LocalScoreSums, Predicted(Nothing()))
        replies = self.session.network.exchange(asked.messages, asked.expected, retries=1)
        found = self._figures(*self._scores(asked, replies))
        return None if found is None else as_baseline(found)

    def _scores(self, asked: ScoresAsked, replies: Iterable[Message]) -> tuple[Scores | None, dict[str, Answer]]:
        """What replies hold: the sum of all scores under masks, else those of every site."""
        if asked.asked is None:
            return None, usable_scores(self.session.network, answers(replies))
        summed: Summed[ScoreSums] = self.session.read(asked.asked, replies)
        return (None if summed.total is None else summed.total.scores()), {}

    def _figures(self, total: Scores | None, scored: Mapping[str, Answer]) -> Evaluation | None:
        """The figures of a total, or of sites; None if no row is scored."""
        scale = self.session.preparation.target_scale
        if total is not None:
            return of_all(total, scale)
        sums = {site: sums_of(answer) for site, answer in scored.items()}
        return combine(sums, scale, map(histograms, scored.values())) if sums else None

    def simple_baselines(self) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """The scores of the mean of the target, and of linear or logistic regression.

        None where the method scores another kind of task than they.
        """
        logger.info("comparison: mean and linear model")
        session, preparation = self.session, self.session.preparation
        likelihood = session.config.model.likelihood
        if self.evaluation is None or ("brier" in self.evaluation["test"]) != (likelihood == "bernoulli"):
            return None, None
        everyone, inputs = session.roster().everyone, preparation.num_inputs
        rows = sum(preparation.rows.values())
        mean = linear.constant(preparation.modelled_target, rows, inputs, likelihood, preparation.standardisation)
        line = session.run(linear.linear_fit(everyone, likelihood, inputs))
        return self._linear_scores(mean), None if line is None else self._linear_scores(line)

    def predictions(self, predicts: bool, more: Sequence[str]) -> dict[str, NamedArrays]:
        """Held-out rows of simulated sites with their predictions, where the configuration wants to keep them."""
        session, preparation = self.session, self.session.preparation
        clear = preparation.simulated and session.masking is None
        if not (predicts and clear and session.config.keep_predictions):
            return {}
        names = CLASS_ARRAYS if session.config.model.likelihood == "bernoulli" else PREDICTION_ARRAYS
        ends = ("prediction.low", "prediction.high") if preparation.transformed else ()
        specs = {name: ArraySpec((None,)) for name in (*names, *ends, *more)}
        if preparation.num_inputs <= 2:
            specs["prediction.input"] = ArraySpec((None, preparation.num_inputs))
        messages = [session.message(site, "query.predictions", self.predicted.at(site)) for site in self.scored]
        replies = session.network.exchange(messages, specs, retries=1)
        return {site: answer.arrays for site, answer in answers(replies).items()}

    def _linear_scores(self, predictor: LinearPredictor) -> dict[str, Any] | None:
        """The scores of one prediction, site by site where totals are plain; None if no site has any."""
        session, everyone = self.session, self.session.roster().everyone
        if session.masking is not None:
            total: ScoreSums | None = session.ask(Total(LinearScoreSums, predictor, everyone)).total
            found = self._figures(None if total is None else total.scores(), {})
        else:
            requests = dict.fromkeys(everyone, predictor)
            sums: dict[str, ScoreSums] = session.ask(Each(LinearScoreSums, requests, retries=1))
            flat = {site: Answer(site, {}, scores.scores().flat(), {}) for site, scores in sums.items()}
            some = {site: answer for site, answer in flat.items() if answer.number("count")}
            found = self._figures(None, usable_scores(session.network, some))
        return None if found is None else as_baseline(found)


def _names_of(answer: Answer) -> tuple[str, ...]:
    return CLASSIFICATION_SUMS if "brier" in answer.metrics else REGRESSION_SUMS


def sums_of(answer: Answer) -> dict[str, float]:
    """The sums of scores in an evaluation reply."""
    return {name: answer.number(name) for name in _names_of(answer)}


def usable_scores(network: Network, found: Mapping[str, Answer]) -> dict[str, Answer]:
    """Answers with scores of at least one row; one that cannot be scores is its site's failure."""
    kinds = Counter(_names_of(answer) for answer in found.values())
    usable: dict[str, Answer] = {}
    for site, answer in found.items():
        reason = scores_refusal(answer, kinds.most_common(1)[0][0])
        if reason:
            network.fail(site, reason)
        elif answer.number("count") > 0:
            usable[site] = answer
    return usable


def scores_refusal(answer: Answer, names: Iterable[str]) -> str | None:
    """Why numbers cannot be the sums ``names`` of scores of some rows, or None."""
    missing = [name for name in names if not isinstance(answer.metrics.get(name), float)]
    if missing:
        return f"scores missing: {', '.join(missing)}"
    bounded = [name for name in names if name.startswith("inside-") or name == "correct"]
    if any(answer.number(name) < 0 for name in names if name != "nll"):
        return "a score that cannot be negative is"
    if any(answer.number(name) > answer.number("count") for name in bounded):
        return "scores count more rows than there are"
    for name, shape in HISTOGRAM_SHAPES.items():
        size = math.prod(shape)
        values = answer.metrics.get(name, [0.0] * size)
        if not isinstance(values, list) or len(values) != size:
            return f"`{name}`: expected {size} numbers"
    return None


def histograms(answer: Answer) -> dict[str, np.ndarray]:
    """The histograms of an evaluation reply; they travel flat, as lists of numbers."""
    sent = {name: answer.metrics.get(name) for name in HISTOGRAM_SHAPES}
    return {
        name: np.asarray(values).reshape(HISTOGRAM_SHAPES[name])
        for name, values in sent.items()
        if isinstance(values, list)
    }
