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

from fedgp_flower.errors import ConfigError, RunError
from fedgp_flower.methods.linear import LinearPredictor, LinearScoreSums
from fedgp_flower.methods.messages import HISTOGRAM_SHAPES, LocalScoreSums, Nothing, ScoreSums
from fedgp_flower.run.metrics import CLASSIFICATION_SUMS, REGRESSION_SUMS
from fedgp_flower.typing import NamedArrays
from strategies import linear
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
        """The question for the scores of one prediction, or of a fit that a site makes by itself.

        Raises:
            ConfigError: under masks nobody may see the rows of all sites.
            RunError: real sites do not give their rows away.
        """
        session, network = self.session, self.session.network
        if session.masking is not None:
            if kind == POOLED:
                raise ConfigError(
                    "`method` = 'pooled' sees the rows of all sites; set `privacy.secure-aggregation` to false"
                )
            if isinstance(predicted.request, Mapping):
                session.require_clear(type(next(iter(predicted.request.values()))))
            asked = session.put(Total(total, predicted.request, session.roster().everyone))
            return ScoresAsked(asked.messages, asked.contract, asked)
        if kind == POOLED and not session.preparation.simulated:
            raise RunError("`method` = 'pooled' needs simulated sites: real sites do not give their rows away")
        sites = network.healthy()[:1] if kind == POOLED else network.sites()
        messages = [session.message(site, kind, predicted.at(site)) for site in sites]
        return ScoresAsked(messages, {} if kind == "evaluate" else None)  # a fit's reply may hold histograms

    def take(self, asked: ScoresAsked, replies: Iterable[Message]) -> Evaluation | None:
        """The figures of the replies to an evaluation; None if nobody has scored a row."""
        scale = self.session.preparation.target_scale
        if asked.asked is not None:
            summed: Summed[ScoreSums] = self.session.read(asked.asked, replies)
            if summed.total is None:
                return None
            scores = summed.total.scores()
            self.evaluation, self.calibrated = of_all(scores, scale), [scores.arrays]
            return self.evaluation
        self.scored = usable_scores(self.session.network, answers(replies))
        if not self.scored:
            return None
        self.calibrated = [histograms(answer) for answer in self.scored.values()]
        self.evaluation = self._combined(self.scored)
        return self.evaluation

    def baseline(self, kind: str) -> dict[str, Any] | None:
        """The scores of a Gaussian process of every site alone, or of all rows; None if no site has any."""
        session = self.session
        logger.info("comparison: %s", kind.removeprefix("query.").replace("_", "-"))
        asked = self.ask(kind, LocalScoreSums, Predicted(Nothing()))
        replies = session.network.exchange(asked.messages, asked.expected, retries=1)
        if asked.asked is not None:
            summed: Summed[ScoreSums] = session.read(asked.asked, replies)
            total = summed.total
            found = None if total is None else of_all(total.scores(), session.preparation.target_scale)
        else:
            usable = usable_scores(session.network, answers(replies))
            found = self._combined(usable) if usable else None
        return None if found is None else as_baseline(found)

    def simple_baselines(self) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """The scores of the mean of the target, and of linear or logistic regression; see :mod:`strategies.linear`.

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
        found: Evaluation | None = None
        if session.masking is not None:
            total: ScoreSums | None = session.ask(Total(LinearScoreSums, predictor, everyone)).total
            found = None if total is None else of_all(total.scores(), session.preparation.target_scale)
        else:
            sums: dict[str, ScoreSums] = session.ask(
                Each(LinearScoreSums, dict.fromkeys(everyone, predictor), retries=1)
            )
            flat = {site: scores.scores().flat() for site, scores in sums.items()}
            usable = usable_scores(session.network, {s: Answer(s, {}, f, {}) for s, f in flat.items() if f["count"]})
            found = self._combined(usable) if usable else None
        return found and as_baseline(found)

    def _combined(self, usable: Mapping[str, Answer]) -> Evaluation:
        sums = {site: sums_of(answer) for site, answer in usable.items()}
        return combine(sums, self.session.preparation.target_scale, map(histograms, usable.values()))


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
