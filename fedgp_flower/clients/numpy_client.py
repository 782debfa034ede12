"""A site's half of every method: handlers with typed messages, behind Flower's ``NumPyClient``.

The handler of a kind of message has its name: ``query.statistics`` is answered by ``statistics``, ``train`` by
``train``. Its annotation says what the request is, and what it returns says what the answer is::

    def statistics(self, request: Parameters) -> Statistics: ...
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from flwr.client import NumPyClient
from flwr.common import NDArrays
from flwr.common.typing import Scalar as FlowerScalar
from numpy.typing import NDArray

from fedgp_flower.clients.counts import count_scores
from fedgp_flower.clients.latent_scores import latent_scores
from fedgp_flower.clients.state import SiteState
from fedgp_flower.clients.transformed import transformed_moments, transformed_quantiles, transformed_scores
from fedgp_flower.data.sites import RawSite, SiteData
from fedgp_flower.data.standardisation import Preparation, bare, column_squares, column_sums
from fedgp_flower.errors import ProtocolError
from fedgp_flower.gp.kernels import build_kernel, wire_name
from fedgp_flower.gp.placement import Placement, limit_threads
from fedgp_flower.gp.sums import input_shape
from fedgp_flower.lazy import Lazy, special
from fedgp_flower.messages import decode, encode, is_message, is_public, join, split
from fedgp_flower.methods.linear import (
    Coefficients,
    LinearPredictor,
    LinearScoreSums,
    LogisticSums,
    Moments,
    with_ones,
)
from fedgp_flower.methods.messages import (
    Centres,
    ColumnSquares,
    ColumnSums,
    LocalScoreSums,
    Nothing,
    ScoreSums,
    Shape,
    TargetMoments,
    TargetPowers,
)
from fedgp_flower.privacy.policy import Rules
from fedgp_flower.run.config import RunConfig
from fedgp_flower.run.metrics import Scores, bernoulli_scores, gaussian_scores, mixture_scores
from fedgp_flower.transforms import TRANSFORMS, Transform
from fedgp_flower.typing import NamedArrays

if TYPE_CHECKING:
    from fedgp_flower.clients import baselines
else:
    baselines = Lazy("fedgp_flower.clients.baselines")

CERTAIN = 30.0
"""Log odds beyond which a linear predictor goes no further: a wrong certainty would have an infinite NLL."""
NAMES = "names-of-arrays"
"""Config key (request) and metric key (reply) that names the arrays of a ``fit`` call, a line each."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a client is made of: the configuration, the site's rows and state, and what the sites agreed on."""

    config: RunConfig
    site: RawSite
    state: SiteState
    preparation: Preparation | None
    round: int
    communication: int
    constants: NamedArrays = field(default_factory=dict)
    """Arrays that the server sent once."""
    rules: Rules | None = None
    """The site's policy; None where nothing leaves."""
    bare: bool = False
    """Whether a description says nothing of the rows but their number: the rest is asked for under masks."""


@dataclass(frozen=True, slots=True)
class Said:
    """An answer that is no message: arrays under names of their own, and numbers and texts beside them."""

    arrays: NamedArrays
    said: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predictive mean and variance of noisy observations, standardised, each [N]."""

    mean: NDArray[np.float64]
    variance: NDArray[np.float64]


class SiteClient(NumPyClient):
    """Handlers of the messages that every method answers; a method adds its own, and :meth:`predict`."""

    def __init__(self, setting: Setting) -> None:
        self.config = setting.config
        self.site = setting.site
        self.state = setting.state
        self.setting = setting
        self.placement = Placement.of(setting.config)
        limit_threads(setting.config.threads)

    # The pairing with Flower.

    def fit(self, parameters: NDArrays, config: dict[str, FlowerScalar]) -> tuple[NDArrays, int, dict[str, Any]]:
        """Carry named arrays to the handler of the message's kind, and its answer back."""
        arrays, texts = self.answer(str(config["phase"]), dict(zip(_names(config), parameters, strict=True)), config)
        return list(arrays.values()), self.num_examples, {NAMES: "\n".join(arrays), **texts}

    def evaluate(self, parameters: NDArrays, config: dict[str, FlowerScalar]) -> tuple[float, int, dict[str, Any]]:
        """Score predictions for the site's held-out rows; returns (mean NLL, rows, sums of scores)."""
        scores = self.score(self._request("predict", dict(zip(_names(config), parameters, strict=True)), config))
        count = int(scores.sums["count"])
        said = scores.flat() if self.setting.rules is None else self.setting.rules.numbers(scores.flat())
        return scores.sums["nll"] / count if count else 0.0, count, said

    def answer(self, kind: str, arrays: NamedArrays, numbers: Mapping[str, Any]) -> tuple[NamedArrays, dict[str, Any]]:
        """Arrays of the answer, and what else it says.

        Raises:
            ProtocolError: if this method has no handler for the kind, or the arrays are not its request.
        """
        answer = self.handler(kind)(self.asked(kind, arrays, numbers))
        if isinstance(answer, Said):
            return answer.arrays, dict(answer.said)
        return split(type(answer), encode(answer))

    def handler(self, kind: str) -> Callable[[Any], Any]:
        """What answers messages of a kind, as far as the site's policy lets it.

        Raises:
            ProtocolError: nothing does.
        """
        name = kind.partition(".")[2] or kind
        if not is_answered(type(self), name):
            raise ProtocolError(f"method `{self.config.method}` does not answer `{kind}`")
        return lambda request: self._admitted(getattr(self, name)(request))

    def _admitted(self, answer: Any) -> Any:
        rules = self.setting.rules
        if rules is None:
            return answer
        if isinstance(answer, Said):
            return replace(answer, said=rules.numbers(answer.said))
        return rules.answer(answer, self.num_examples)

    def asked(self, kind: str, arrays: NamedArrays, numbers: Mapping[str, Any]) -> Any:
        """The request in a message of a kind."""
        self.handler(kind)
        return self._request(kind.partition(".")[2] or kind, arrays, numbers)

    def answers_publicly(self, kind: str) -> bool:
        """Whether an answer of a kind says nothing of the rows."""
        answer = answer_class(type(self), kind.partition(".")[2] or kind)
        return answer is not None and is_public(answer)

    def _request(self, handler: str, arrays: NamedArrays, numbers: Mapping[str, Any]) -> Any:
        request = request_class(type(self), handler)
        return decode(request, join(request, arrays, numbers))

    # What a method's handlers work with.

    @property
    def num_examples(self) -> int:
        """Training rows of the site."""
        return self.site.num_examples

    @property
    def least_cell(self) -> int:
        """Rows that its policy wants in a cell; 0 where there is none."""
        rules = self.setting.rules
        return rules.policy.least_cell if rules is not None and rules.active else 0

    @property
    def preparation(self) -> Preparation:
        """What the sites agreed on.

        Raises:
            ProtocolError: the message carries no agreement.
        """
        if self.setting.preparation is None:
            raise ProtocolError("the message names no agreed columns and scales")
        return self.setting.preparation

    @cached_property
    def rows(self) -> SiteData:
        """The site's rows, standardised as the sites agreed."""
        return self.site.encode(self.preparation)

    @cached_property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Standardised training inputs [N, D] and targets [N], where and as precisely as the configuration says."""
        return self.placement.tensor(self.rows.x), self.placement.tensor(self.rows.y)

    def predict(self, request: Any, inputs: NDArray[np.float64]) -> Prediction:
        """Predict noisy observations at standardised inputs [N, D] with what the request carries.

        Raises:
            ProtocolError: for a method whose clients share nothing that predicts rows.
        """
        del request, inputs
        raise ProtocolError(f"method `{self.config.method}` has no prediction of single rows")

    def score(self, request: Any) -> Scores:
        """Scores of the held-out rows in original units."""
        return self.gaussian_scores(self.predict(request, self.rows.x_test), self.rows.y_test)

    def gaussian_scores(self, prediction: Prediction, target: NDArray[np.float64]) -> Scores:
        """Scores of Gaussian predictions, in original units."""
        if self.preparation.transform is None:
            return gaussian_scores(*self.original(prediction, target))
        return self.mixture_scores(prediction.mean[None], prediction.variance[None], target)

    def mixture_scores(
        self, means: NDArray[np.float64], variances: NDArray[np.float64], target: NDArray[np.float64]
    ) -> Scores:
        """Scores of even mixtures of Gaussians [S, N], standardised, in original units."""
        mean, scale = self.preparation.target_mean, self.preparation.target_scale
        moments = means * scale + mean, np.sqrt(variances) * scale, target * scale + mean
        if self.preparation.transform is None:
            return mixture_scores(*moments)
        return transformed_scores(*moments, self.preparation.transform)

    def original(self, prediction: Prediction, target: NDArray[np.float64]) -> tuple[NDArray[np.float64], ...]:
        """Mean, standard deviation and target in the units of the data."""
        mean, scale = self.preparation.target_mean, self.preparation.target_scale
        own = prediction.mean * scale + mean, np.sqrt(prediction.variance) * scale
        goal, transform = target * scale + mean, self.preparation.transform
        if transform is None:
            return *own, goal
        return *transformed_moments(*own, transform), transform.inverse(goal)

    def start(self, num_inputs: int) -> NamedArrays:
        """Initial hyperparameters under their wire names; the same at every site, from the configuration alone."""
        kernel = build_kernel(self.config.model, num_inputs)
        arrays: NamedArrays = {f"kernel.{wire_name(n)}": p.detach().numpy() for n, p in kernel.named_parameters()}
        return arrays | {"likelihood.log_noise": np.log([self.config.model.noise])}

    # Handlers.

    def describe(self, request: Nothing) -> Said:
        """Counts, sums and sums of squares of the training rows, and the schema of the site's table."""
        del request
        description = self.site.describe(self.config.privacy.bounds)
        counted: dict[str, int | str] = {"partitions": self.site.partitions, "dropped": self.site.dropped}
        if self.setting.bare:
            description, counted = bare(description), {**counted, "dropped": 0, "bare": 1}
        elif self.site.suspected and not self.config.privacy.bounds:
            counted["warning"] = self.site.suspected
        said = {**counted, "schema": description.schema, "label": self.site.label}
        return Said(dict(description.arrays), said)

    def target(self, request: TargetPowers) -> TargetMoments:
        """Sums of the transformed training targets, for each power that it could have."""
        y = self.site.train[self.site.target].to_numpy(dtype=np.float64)
        family = TRANSFORMS[self.config.transform.target]
        moved = np.stack([family(power).forward(y) for power in request.powers]) - request.centres[:, None]
        slopes = np.array([family(power).log_slope(y).sum() for power in request.powers])
        return TargetMoments(moved.sum(axis=1), np.square(moved).sum(axis=1), slopes, np.array(float(len(y))))

    def column_sums(self, request: Nothing) -> ColumnSums:
        """What means are made of."""
        del request
        sums = column_sums(self.site.train, self.preparation)
        return ColumnSums(**sums, dropped=np.array(float(self.site.dropped)))

    def column_squares(self, request: Centres) -> ColumnSquares:
        """What spreads are made of."""
        return ColumnSquares(*column_squares(self.site.train, self.preparation, request.centre, request.scale))

    def shape(self, request: Nothing) -> Shape:
        """Where the standardised inputs lie, and the initial hyperparameters of the configured model."""
        del request
        arrays = input_shape(self.rows.x)
        square, start = np.array(self.rows.y @ self.rows.y), self.start(self.rows.x.shape[1])
        return Shape(arrays["input.histogram"], arrays["input.products"], square, start)

    def score_sums(self, request: Any) -> ScoreSums:
        """Scores of the held-out rows as a summand."""
        return ScoreSums.of(self.score(request))

    def predictions(self, request: Any) -> Said:
        """Held-out rows with their predictions; a real site refuses, its rows stay where they are."""
        self._require_simulated("does not send rows")
        return Said(self.shown(request))

    def shown(self, request: Any) -> NamedArrays:
        """Held-out rows as a simulation keeps them: predictive mean and sd, target, and one or two inputs."""
        predicted = self.predict(request, self.rows.x_test)
        mean, sd, target = self.original(predicted, self.rows.y_test)
        arrays: NamedArrays = {"prediction.mean": mean, "prediction.sd": sd, "prediction.target": target}
        if self.preparation.transform is not None:
            arrays |= self._shown_ends(predicted, self.preparation.transform)
        return arrays | self.shown_inputs()

    def _shown_ends(self, predicted: Prediction, transform: Transform) -> NamedArrays:
        """Ends of the 95 % intervals of a transformed target: mean ± 1.96 sd are none."""
        mean, scale = self.preparation.target_mean, self.preparation.target_scale
        own = predicted.mean * scale + mean, np.sqrt(predicted.variance) * scale
        low, high = transformed_quantiles(*own, (0.025, 0.975), transform)
        return {"prediction.low": low, "prediction.high": high}

    def shown_inputs(self) -> NamedArrays:
        """Held-out inputs in original units, where a plot can show them."""
        if self.rows.x_test.shape[1] > 2:
            return {}
        return {"prediction.input": self.rows.x_test * self.preparation.input_scale + self.preparation.input_mean}

    def local_only(self, request: Nothing) -> Said:
        """The comparison a site can make by itself: a GP of its rows alone."""
        del request
        scores, evaluations = self.own_scores()
        return scored(scores, evaluations=evaluations)

    def local_scores(self, request: Nothing) -> LocalScoreSums:
        """The same as a summand."""
        del request
        return LocalScoreSums(**vars(ScoreSums.of(self.own_scores()[0])))

    def moments(self, request: Nothing) -> Moments:
        """Sums for linear regression."""
        del request
        design, y = with_ones(self.rows.x), self.rows.y
        return Moments(design.T @ design, design.T @ y, np.array(y @ y))

    def logistic(self, request: Coefficients) -> LogisticSums:
        """Log likelihood, gradient and information of a logistic regression."""
        design, y = with_ones(self.rows.x), self.rows.y
        log_odds = design @ request.values
        p = special.expit(log_odds)
        value = -np.logaddexp(0, (1 - 2 * y) * log_odds).sum()
        return LogisticSums(np.array(value), design.T @ (y - p), design.T * (p * (1 - p)) @ design)

    def linear_scores(self, request: LinearPredictor) -> LinearScoreSums:
        """Scores of a linear predictor on the held-out rows."""
        return LinearScoreSums(**vars(ScoreSums.of(self._scored_linear(request))))

    def _scored_linear(self, request: LinearPredictor) -> Scores:
        x, y, likelihood = self.rows.x_test - request.centre, self.rows.y_test, self.config.model.likelihood
        mean, variance = request.intercept + x @ request.weights, np.full(len(x), request.variance)
        if likelihood == "bernoulli":
            return bernoulli_scores(special.expit(np.clip(mean, -CERTAIN, CERTAIN)), y)
        if likelihood == "poisson":
            return count_scores(mean, variance, y)
        if request.spread is not None:
            variance += np.square(x @ request.spread.T).sum(axis=1)
        return self.gaussian_scores(Prediction(mean, variance), y)

    def pooled(self, request: Nothing) -> Said:
        """The comparison only a simulation can make: one sparse GP of the rows of all sites."""
        del request
        self._require_simulated("does not see the rows of other sites")
        return self.compared(baselines.pooled(self.site, self.preparation, self.config))

    def own_scores(self) -> tuple[Scores, int]:
        """Scores of a model of this site's rows alone, and the evaluations that it took."""
        result = self.local_fit()
        return self._scored(result), result.evaluations

    def local_fit(self) -> baselines.Baseline:
        """A GP of this site's rows, and what it predicts of the held-out ones."""
        rows = self.rows
        return baselines.local_only((rows.x, rows.y, rows.x_test, rows.y_test), self.config)

    def compared(self, result: baselines.Baseline) -> Said:
        """The answer that carries a baseline's scores."""
        return scored(self._scored(result), evaluations=result.evaluations)

    def _scored(self, result: baselines.Baseline) -> Scores:
        if result.latent is not None:
            scale = self.preparation.target_scale
            return latent_scores(result.latent, result.mean, result.variance, result.target, scale)
        return self.gaussian_scores(Prediction(result.mean, result.variance), result.target)

    def _require_simulated(self, what: str) -> None:
        if not self.site.simulated:
            raise ProtocolError(f"a real site {what}")


def is_answered(client: type[SiteClient], handler: str) -> bool:
    """Whether a method of this name is a handler: its annotation names a request."""
    return handler.isidentifier() and request_class(client, handler) is not None


@cache
def request_class(client: type[SiteClient], handler: str) -> Any:
    """The class of a handler's request; None where the name is no handler. Scores are asked as ``predict`` is."""
    function = getattr(client, "predict" if handler in {"predictions", "score_sums"} else handler, None)
    hints = typing.get_type_hints(function) if callable(function) else {}
    hint = hints.get("request")
    return hint if is_message(hint) else None


@cache
def answer_class(client: type[SiteClient], handler: str) -> Any:
    """The class of a handler's answer; None where that is no message, or the name no handler."""
    if not is_answered(client, handler):
        return None
    answer = typing.get_type_hints(getattr(client, handler)).get("return")
    return answer if is_message(answer) else None


def scored(scores: Scores, **more: float) -> Said:
    """An answer of scores alone."""
    return Said({}, {**scores.flat(), **more})


def _names(config: Mapping[str, FlowerScalar]) -> list[str]:
    return str(config[NAMES]).split("\n") if config[NAMES] else []
