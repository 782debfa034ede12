"""The client of a site: handlers of typed messages, behind Flower's ``NumPyClient``.

A handler has the name of its message type, and its annotations give the classes of request and answer:
``def statistics(self, request: Parameters) -> Statistics`` answers ``query.statistics``.
"""

from __future__ import annotations

import logging
import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from flwr.client import NumPyClient
from flwr.common import NDArrays
from flwr.common.typing import Scalar as FlowerScalar

from fedgp_flower import shared_messages as wire
from fedgp_flower.clients.state import SiteState
from fedgp_flower.config import RunConfig
from fedgp_flower.data import standardisation
from fedgp_flower.data.sites import RawSite, SiteData
from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.errors import ProtocolError
from fedgp_flower.follow_up import counted, multiples
from fedgp_flower.gp.likelihoods import build_point_likelihood
from fedgp_flower.gp.placement import Placement, limit_threads
from fedgp_flower.gp.sums import input_shape
from fedgp_flower.lazy import Lazy, special
from fedgp_flower.messages import from_parts, is_message, kind_of, to_parts
from fedgp_flower.options import REAL_VALUED, SECOND_COLUMN, MethodOptions
from fedgp_flower.privacy.policy import Rules
from fedgp_flower.scores import (
    Prediction,
    Scores,
    TargetUnits,
    bernoulli_scores,
    class_scores,
    much_better,
    split_target,
    time_scores,
)
from fedgp_flower.transforms import Transform
from fedgp_flower.typing import Array, NamedArrays

if TYPE_CHECKING:
    from fedgp_flower.clients import baselines
else:
    baselines = Lazy("fedgp_flower.clients.baselines")

logger = logging.getLogger("fedgp")

CERTAIN = 30.0
"""Largest absolute log odds of a linear predictor, so that the NLL of a wrong class is finite."""
EVALUATE = "evaluate"
"""The message type that :meth:`SiteClient.score` answers."""
REGRESSION_OF = {"poisson": "poisson", "negative-binomial": "poisson", "binomial": "binomial"}
"""The likelihood of a count's regression; its weights hold for overdispersed counts, too."""
KIND, NAMES = "kind", "names-of-arrays"
"""Config keys of a ``fit`` or ``evaluate`` call: the message type, and the names of its arrays, one per line."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Configuration, rows, state and agreed preparation of a client."""

    config: RunConfig
    site: RawSite
    state: SiteState
    preparation: Preparation | None
    round: int
    constants: NamedArrays = field(default_factory=dict)
    """Arrays that the server sends once in a run, among them those of the preparation."""
    rules: Rules = field(default_factory=lambda: Rules("", active=False))
    """The policy of the site; inactive if no answer leaves the process."""
    summands: int = 1
    """Number of sites in the total that hides an answer; 1 without masks."""


@dataclass(frozen=True, slots=True)
class Handler:
    """The function that answers a message type, and the classes of request and answer."""

    function: Callable[[SiteClient, Any], Any]
    request: Any
    answer: Any


class SiteClient(NumPyClient):
    """The handlers of all methods. A method adds handlers and :meth:`predict` in a subclass."""

    options: MethodOptions
    """The table of the method in the configuration."""

    def __init__(self, setting: Setting) -> None:
        agreed, options = setting.preparation, setting.config.options
        self.options = options if agreed is None else options.of_classes(len(agreed.target.levels))
        self.setting, self.config = setting, setting.config.model_copy(update={"options": self.options})
        self.site, self.state = setting.site, setting.state
        self.placement = Placement.of(setting.config)
        limit_threads(setting.config.threads)

    def fit(self, parameters: NDArrays, config: dict[str, FlowerScalar]) -> tuple[NDArrays, int, dict[str, Any]]:
        """Flower's interface of the handlers: (arrays of the answer, training rows, numbers and names of arrays)."""
        answer = self._answered(parameters, config)
        arrays, numbers = to_parts(answer)
        return list(arrays.values()), self.num_examples, {NAMES: "\n".join(arrays), **numbers}

    def evaluate(self, parameters: NDArrays, config: dict[str, FlowerScalar]) -> tuple[float, int, dict[str, Any]]:
        """Flower's interface of :meth:`score`: (mean NLL, held-out rows, sums of scores)."""
        scores: Scores = self._answered(parameters, config)
        count = int(scores.sums["count"])
        return scores.sums["nll"] / count if count else 0.0, count, dict(scores.flat())

    def _answered(self, parameters: NDArrays, config: Mapping[str, FlowerScalar]) -> Any:
        """The answer to the request in the arguments of Flower's methods."""
        kind, names = str(config[KIND]), str(config[NAMES])
        named = dict(zip(names.split("\n") if names else [], parameters, strict=True))
        return self.answer(kind, self.request_of(kind, named, config))

    def request_of(self, kind: str, arrays: NamedArrays, numbers: Mapping[str, Any]) -> Any:
        """The request in a message; ProtocolError if the method has no handler of this message type."""
        handler = handlers(type(self)).get(kind)
        if handler is None:
            wanted = f"`{type(self).__name__}` has no handler `{kind.partition('.')[2] or kind}` with annotations"
            raise ProtocolError(f"method `{self.config.method}` does not answer `{kind}`: {wanted}")
        if not is_message(handler.request):
            raise ProtocolError(f"method `{self.config.method}` has no prediction of single rows")
        return from_parts(handler.request, arrays, numbers)

    def answer(self, kind: str, request: Any) -> Any:
        """The answer of the handler, after the rules of the site's policy."""
        answer = handlers(type(self))[kind].function(self, request)
        if kind != EVALUATE and not is_message(type(answer)):
            name = kind.rpartition(".")[2]
            raise ProtocolError(f"`{type(self).__name__}.{name}` returned {type(answer).__name__}, which is no message")
        return self.setting.rules.answer(answer, self.num_examples)

    @property
    def num_examples(self) -> int:
        """The number of training rows."""
        return self.site.num_examples

    @property
    def least_cell(self) -> int:
        """The smallest number of rows in a cell that the policy allows; 0 without a policy."""
        return self.setting.rules.policy.least_cell if self.setting.rules.active else 0

    @property
    def preparation(self) -> Preparation:
        """The columns and scales that the sites agreed on; ProtocolError before the agreement."""
        if self.setting.preparation is None:
            raise ProtocolError("the message names no agreed columns and scales")
        return self.setting.preparation

    @cached_property
    def rows(self) -> SiteData:
        """The rows of the site, encoded and standardised."""
        return self.site.encode(self.preparation)

    @cached_property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Standardised training inputs [N, D] and targets [N], with the configured device and precision."""
        return self.placement.tensor(self.rows.x), self.placement.tensor(self.rows.y)

    @property
    def units(self) -> TargetUnits:
        """The map from the standardised target to the units of the table."""
        agreed = self.preparation
        classes = len(agreed.target.levels)
        return TargetUnits(agreed.target_mean, agreed.target_scale, agreed.transform, classes, agreed.follow_up)

    def require_simulated(self, what: str) -> None:
        """Raise ProtocolError with the text "a real site ``what``" unless the site is simulated."""
        if not self.site.simulated:
            raise ProtocolError(f"a real site {what}")

    # A method may override the methods below.

    def predict(self, request: Any, inputs: Array) -> Prediction:
        """Predictions at standardised inputs [N, D]; ProtocolError unless the method overrides this."""
        raise ProtocolError(f"method `{self.config.method}` has no prediction of single rows")

    def held_out(self, request: Any) -> Prediction:
        """Predictions of the held-out rows."""
        return self.predict(request, self.rows.x_test)

    def score(self, request: Any) -> Scores:
        """Scores of the held-out rows."""
        return self.scores_of(self.held_out(request), self.rows.y_test)

    def scores_of(self, prediction: Prediction, target: Array) -> Scores:
        """Scores of class probabilities, or of Gaussian predictions in original units."""
        if type(prediction) is not Prediction:
            found = f"{type(prediction).__name__}, expected Prediction"
            raise ProtocolError(f"`{type(self).__name__}.predict` returned {found}")
        if self.config.model.likelihood in REAL_VALUED and prediction.mean.shape != (len(target),):
            found = f"a mean of shape {prediction.mean.shape}, expected {(len(target),)}"
            raise ProtocolError(f"`{type(self).__name__}.predict` returned {found}")
        if prediction.mean.ndim == 2:
            return class_scores(prediction.mean, target)
        if self.config.model.likelihood == "bernoulli":
            return bernoulli_scores(prediction.mean, target)
        return self.units.gaussian_scores(prediction, target)

    def held_out_rows(self, request: Any) -> NamedArrays:
        """Predictions, targets and up to two inputs of the held-out rows, in original units; empty if multiclass."""
        predicted, agreed, units = self.held_out(request), self.preparation, self.units
        if predicted.mean.ndim > 1:
            return {}
        mean, sd, target = units.original(predicted, split_target(self.rows.y_test)[0])
        arrays: NamedArrays = {"prediction.mean": mean, "prediction.sd": sd, "prediction.target": target}
        if self.config.model.likelihood == "bernoulli":
            del arrays["prediction.sd"]
            arrays["prediction.probability"] = arrays.pop("prediction.mean")
        if agreed.transform is not None or predicted.tails is not None:  # mean ± 1.96 sd is no 95 % interval
            ends = units.quantiles(predicted.mean, np.sqrt(predicted.variance), (0.025, 0.975), predicted.tails)
            arrays["prediction.low"], arrays["prediction.high"] = ends
        if self.rows.x_test.shape[1] <= 2:
            arrays["prediction.input"] = self.rows.x_test * agreed.input_scale + agreed.input_mean
        return arrays

    def all_rows(self) -> SiteData:
        """The rows of all sites; ProtocolError unless the site is simulated."""
        self.require_simulated("does not see the rows of other sites")
        return baselines.all_rows(self.config, self.site.partitions, self.preparation)

    def baseline_scores(self, data: SiteData, pooled: int) -> Scores:
        """Scores of a GP of one site's rows; if ``pooled`` > 0, of all rows with ``pooled`` inducing points."""
        return baselines.scores(data, self.config, self.units, pooled)


def score_sums(client: SiteClient, request: Any) -> wire.ScoreSums:
    """Scores of the held-out rows as a summand."""
    return wire.ScoreSums.of(client.score(request))


def local_scores(client: SiteClient, request: wire.Nothing) -> wire.LocalScoreSums:
    """Scores of a GP of this site's rows alone."""
    return wire.LocalScoreSums.of(client.baseline_scores(client.rows, pooled=0))


def compared_scores(client: SiteClient, request: Any) -> wire.ComparedScoreSums:
    """Scores of a GP of this site's rows alone, and whether they are much better than the scores of the run."""
    alone, run = wire.ScoreSums.of(client.baseline_scores(client.rows, 0)), wire.ScoreSums.of(client.score(request))
    better = much_better(alone.nll, run.nll, run.rows)
    if better:
        words = "the run does not serve this site: its held-out rows have NLL %.4g, and %.4g by a GP of its rows alone"
        logger.warning(words, run.nll / run.rows, alone.nll / run.rows)
    return wire.ComparedScoreSums(**vars(alone), sites=np.array([float(run.rows > 0), float(better)]))


def pooled(client: SiteClient, request: wire.Points) -> wire.PooledScoreSums:
    """Scores of one GP of the rows of all sites, in a simulation."""
    count = request.count or client.config.model.num_inducing
    return wire.PooledScoreSums.of(client.baseline_scores(client.all_rows(), pooled=count))


def boosted(client: SiteClient, request: wire.Nothing) -> wire.BoostedScoreSums:
    """Scores of gradient boosting of the rows of all sites, in a simulation."""
    return wire.BoostedScoreSums.of(baselines.boosting(client.all_rows(), client.config, client.units))


def confusion(client: SiteClient, request: Any) -> wire.Confusion:
    """The confusion matrix of the held-out rows; clients of models with several classes include this handler."""
    return wire.Confusion.of(client.held_out(request).mean, client.rows.y_test)


def predictions(client: SiteClient, request: Any) -> wire.HeldOutRows:
    """Held-out rows with their predictions; ProtocolError unless the site is simulated."""
    client.require_simulated("does not send rows")
    return wire.HeldOutRows(client.held_out_rows(request))


def weighted(client: SiteClient, request: wire.Step) -> wire.WeightedStep:
    """The local steps of an averaging method, as a summand of the weighted mean."""
    stepped: wire.Stepped = handlers(type(client))["train"].function(client, request)
    return stepped.weighted(client.num_examples)


def target(client: SiteClient, request: wire.TargetTrials) -> wire.TargetMoments:
    """Sums of the transformed training targets, for each trial power of the transform."""
    y = client.site.train[client.site.target].to_numpy(dtype=np.float64)
    transforms = [Transform(client.config.transform.target, float(power)) for power in request.tried]
    centred = np.stack([transform.forward(y) for transform in transforms]) - request.centres[:, None]
    slopes = np.array([transform.log_slope(y).sum() for transform in transforms])
    return wire.TargetMoments(centred.sum(axis=1), np.square(centred).sum(axis=1), slopes, np.array(float(len(y))))


def robust(client: SiteClient, request: wire.TargetTrials) -> wire.RobustMoments:
    """Sums of the training targets for a robust location and scale."""
    y = client.site.train[client.site.target].to_numpy(dtype=np.float64)
    z = (y[:, None] - request.centres) / request.tried
    weights = 2 / (1 + z**2)
    first, second = (weights * z).sum(axis=0), (weights * z**2).sum(axis=0)
    return wire.RobustMoments(weights.sum(axis=0), first, second, np.array(float(len(y))))


def column_sums(client: SiteClient, request: wire.Nothing) -> wire.ColumnSums:
    """Sums for the means of the columns."""
    sums = standardisation.column_sums(client.site.train, client.preparation)
    return wire.ColumnSums(**sums, dropped=np.array(float(client.site.dropped)))


def column_squares(client: SiteClient, request: wire.Centres) -> wire.ColumnSquares:
    """Sums of squares for the scales of the columns."""
    train, preparation = client.site.train, client.preparation
    return wire.ColumnSquares(*standardisation.column_squares(train, preparation, request.centre, request.scale))


def cell_products(client: SiteClient, request: wire.Nothing) -> wire.CellProducts:
    """Products of the inputs, over the rows that have both cells."""
    return wire.CellProducts(*standardisation.cell_products(client.site.train, client.preparation))


def shape(client: SiteClient, request: wire.Nothing) -> wire.Shape:
    """Histogram and cross-products of the standardised inputs."""
    histogram, products = input_shape(client.rows.x)
    return wire.Shape(histogram, products, np.asarray(split_target(client.rows.y)[1].sum()))


def moments(client: SiteClient, request: wire.Nothing) -> wire.Moments:
    """Sums for linear regression."""
    design, y = wire.with_ones(client.rows.x), client.rows.y
    return wire.Moments(design.T @ design, design.T @ y, np.array(y @ y))


def logistic(client: SiteClient, request: wire.OneArray) -> wire.LogisticSums:
    """Log likelihood, gradient and information of a logistic regression with two or more classes."""
    design, y = wire.with_ones(client.rows.x), client.rows.y.astype(int)
    log_p = log_probabilities(design, request.values)  # [N, C]
    p, observed = np.exp(log_p[:, 1:]), y[:, None] == np.arange(1, log_p.shape[1])
    weighted = np.concatenate([p_c[:, None] * design for p_c in p.T], axis=1)  # [N, R P]
    information = -weighted.T @ weighted
    blocks = information.reshape(2 * request.values.shape)
    for c, p_c in enumerate(p.T):
        blocks[c, :, c] += design.T * p_c @ design
    value = log_p[np.arange(len(y)), y].sum()
    return wire.LogisticSums(np.array(value), (observed - p).T @ design, information)


def log_probabilities(design: Array, weights: Array) -> Array:
    """Log class probabilities [N, C] from X̃ [N, P] and the weights [C − 1, P] of the classes after the first."""
    return np.asarray(special.log_softmax(np.column_stack([np.zeros(len(design)), design @ weights.T]), axis=1))


def follow_up(client: SiteClient, request: wire.OneArray) -> wire.TimeCounts:
    """Training rows and observed events in each interval of time, and the units of rounded times."""
    time, seen = split_target(client.rows.y)
    return wire.TimeCounts(counted(time, seen, request.values), multiples(time))


def life_table(client: SiteClient, request: wire.Nothing) -> wire.LifeTableScoreSums:
    """Scores of the pooled life table on the held-out rows; ProtocolError before the agreement on follow-up."""
    table, target = client.preparation.follow_up, client.rows.y_test
    if table is None:
        raise ProtocolError("the sites have not agreed on the follow-up of the rows")
    time, event = split_target(target)
    smooth = table.smooth()
    survival = smooth.survived(time)
    nll = -np.log(survival) - np.where(event == 1, np.log(smooth.hazard(time)), 0.0)
    curve = table.survived
    scores = time_scores(0 * time, 1 - survival, nll, target, table, lambda times: curve(times + 0 * time))
    return wire.LifeTableScoreSums.of(scores)


def time_regression(client: SiteClient, request: wire.OneArray) -> wire.TimeSums:
    """Log likelihood, gradient and information of a linear accelerated failure time model.

    With z = τ log t − X̃ᵀv, an observed event adds log p(z) + log τ − log t, which is concave in (v, τ), and a censored
    time adds log S(z).
    """
    (time, event), scale = split_target(client.rows.y), float(request.values[-1])
    design = np.column_stack([-wire.with_ones(client.rows.x), np.log(time)])  # dz
    z = torch.from_numpy(design @ request.values)
    likelihood, zero = build_point_likelihood(client.config.model.likelihood), torch.zeros_like(z)
    at = torch.stack([z.exp(), torch.from_numpy(event)], dim=1), zero, zero, likelihood.initial
    value, slope, curvature, _ = likelihood.slopes(
        *at
    )  # of times eᶻ, with density p(z) e⁻ᶻ; the derivative by z is −slope
    total = float(value) + float((event * (z.numpy() + math.log(scale) - np.log(time))).sum())
    gradient, information = -design.T @ slope.numpy(), design.T * curvature.numpy() @ design
    gradient[-1] += event.sum() / scale
    information[-1, -1] += event.sum() / scale**2
    return wire.TimeSums(np.array(total), gradient, information)


def count_regression(client: SiteClient, request: wire.OneArray) -> wire.CountSums:
    """Log likelihood and derivatives of Poisson or binomial regression on the first Q columns of X̃."""
    design = wire.with_ones(client.rows.x)[:, : len(request.values)]
    f, target = torch.from_numpy(design @ request.values), torch.from_numpy(client.rows.y)
    likelihood, zero = build_point_likelihood(REGRESSION_OF[client.config.model.likelihood]), torch.zeros_like(f)
    value, slope, curvature, _ = likelihood.slopes(target, f, zero, likelihood.initial)
    rate = likelihood.observed(target, f, zero, likelihood.initial)[0].numpy()
    count = split_target(client.rows.y)[0]
    excess = np.array([(np.square(count - rate) - rate).sum(), np.square(rate).sum()])
    information = design.T * curvature.numpy() @ design
    return wire.CountSums(value.numpy(), design.T @ slope.numpy(), information, excess)


def linear_scores(client: SiteClient, request: wire.LinearPredictor) -> wire.LinearScoreSums:
    """Scores of a linear predictor on the held-out rows."""
    rows, likelihood = client.rows, client.config.model.likelihood
    x, y = rows.x_test - request.centre, rows.y_test
    mean, variance = request.intercept + x @ request.weights, np.full(len(x), request.variance)
    if request.spread is not None:
        variance += np.square(x @ request.spread.T).sum(axis=1)
    if request.classes is not None:
        scores = class_scores(np.exp(log_probabilities(wire.with_ones(x), request.classes)), y)
    elif likelihood == "bernoulli":
        scores = bernoulli_scores(special.expit(np.clip(mean, -CERTAIN, CERTAIN)), y)
    elif likelihood in SECOND_COLUMN:
        point, spread = build_point_likelihood(likelihood), variance
        hyper = point.initial
        if len(hyper):  # log σ of times, the log dispersion of counts
            half = 0.5 if SECOND_COLUMN[likelihood] == "event" else 1.0
            hyper, spread = torch.full_like(hyper, half * math.log(request.variance)), 0 * mean
        scores = point.scores(mean, spread, y, hyper, client.units)
    else:
        scores = client.units.gaussian_scores(Prediction(mean, variance), y)
    return wire.LinearScoreSums.of(scores)


SCORED = (score_sums, local_scores, compared_scores, pooled, boosted, linear_scores, life_table, predictions)
REGRESSIONS = moments, logistic, time_regression, count_regression
SUMS = (weighted, target, robust, follow_up, column_sums, column_squares, cell_products, shape, *REGRESSIONS)


def _annotation(client: type[SiteClient], function: Callable[..., object], name: str) -> type:
    """The class of a handler's ``request`` or of what it returns (``return``); ProtocolError without annotation."""
    hints = typing.get_type_hints(function)
    if name not in hints:
        what = "what it returns" if name == "return" else f"`{name}`"
        raise ProtocolError(f"`{client.__name__}.{function.__name__}`: annotate {what} with the class of the message")
    found: type = hints[name]
    return found


@cache
def handlers(client: type[SiteClient]) -> Mapping[str, Handler]:
    """The handlers of a client by message type. :meth:`SiteClient.predict` declares the request of scores."""
    predicted = _annotation(client, client.predict, "request")
    table = {EVALUATE: Handler(client.score, predicted, Scores)}
    named = {function.__name__: function for function in (*SCORED, *SUMS)}
    if taken := [name for name in named if hasattr(client, name)]:
        raise ProtocolError(f"`{client.__name__}.{taken[0]}`: a handler of every method has that name; choose another")
    named |= {name: getattr(client, name) for name in dir(client)}
    for name, function in named.items():
        if name.startswith("_") or "request" not in getattr(function, "__annotations__", {}):
            continue
        request, answer = (_annotation(client, function, part) for part in ("request", "return"))
        request = predicted if request is Any else request
        kind = kind_of(answer) if is_message(answer) else ""
        if is_message(request) and name == (kind.partition(".")[2] or kind):
            table[kind] = Handler(function, request, answer)
    if "train" not in table or table["train"].answer is not wire.Stepped:
        del table["train.weighted"]
    return table
