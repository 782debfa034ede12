"""A site's half of every method: handlers of typed messages, behind Flower's ``NumPyClient``.

A handler has the name of the message that it answers, and its annotations name the classes of request and answer:
``query.statistics`` is answered by ``def statistics(self, request: Parameters) -> Statistics``.
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

from fedgp_flower.clients.state import SiteState
from fedgp_flower.config import RunConfig
from fedgp_flower.count_scores import count_scores
from fedgp_flower.data import standardisation
from fedgp_flower.data.sites import RawSite, SiteData
from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.errors import ProtocolError
from fedgp_flower.follow_up import counted
from fedgp_flower.gp.kernels import build_kernel, wire_name
from fedgp_flower.gp.likelihoods import build_point_likelihood
from fedgp_flower.gp.placement import Placement, limit_threads
from fedgp_flower.gp.sums import input_shape
from fedgp_flower.lazy import Lazy, special
from fedgp_flower.messages import from_parts, is_message, kind_of, to_parts
from fedgp_flower.options import SECOND_COLUMN, MethodOptions
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
from fedgp_flower.shared_messages import (
    BoostedScoreSums,
    Centres,
    Coefficients,
    ColumnSquares,
    ColumnSums,
    ComparedScoreSums,
    Confusion,
    Edges,
    HeldOutRows,
    LifeTableScoreSums,
    LinearPredictor,
    LinearScoreSums,
    LocalScoreSums,
    LogisticSums,
    Moments,
    Nothing,
    Points,
    PooledScoreSums,
    RobustMoments,
    RobustScales,
    ScoreSums,
    Shape,
    Step,
    Stepped,
    TargetMoments,
    TargetPowers,
    TimeCoefficients,
    TimeCounts,
    TimeSums,
    WeightedStep,
    with_ones,
)
from fedgp_flower.transforms import Transform
from fedgp_flower.typing import Array, NamedArrays

if TYPE_CHECKING:
    from fedgp_flower.clients import baselines
else:
    baselines = Lazy("fedgp_flower.clients.baselines")

logger = logging.getLogger("fedgp")

CERTAIN = 30.0
"""Log odds beyond which a linear predictor goes no further: a wrong certainty would have an infinite NLL."""
EVALUATE = "evaluate"
"""The kind of message that :meth:`SiteClient.score` answers."""
KIND, NAMES = "kind", "names-of-arrays"
"""Config keys of a ``fit`` or ``evaluate`` call: the kind of the message, and the names of its arrays, a line each."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The parts of a client: the configuration, the site's rows and state, and the agreement of the sites."""

    config: RunConfig
    site: RawSite
    state: SiteState
    preparation: Preparation | None
    round: int
    constants: NamedArrays = field(default_factory=dict)
    """Arrays that the server sent once."""
    rules: Rules | None = None
    """The site's policy; None where nothing leaves."""


@dataclass(frozen=True, slots=True)
class Handler:
    """What answers a kind of message for a client, and the classes of the request and of the answer."""

    function: Callable[[SiteClient, Any], Any]
    request: Any
    answer: Any


class SiteClient(NumPyClient):
    """Handlers of the messages that every method answers; a method adds more, and :meth:`predict`."""

    options: MethodOptions
    """The table of the method."""

    def __init__(self, setting: Setting) -> None:
        agreed, options = setting.preparation, setting.config.options
        known = options if agreed is None else options.of_classes(len(agreed.target.levels))
        self.setting, self.config = setting, setting.config.model_copy(update={"options": known})
        self.options = known
        self.site, self.state = setting.site, setting.state
        self.placement = Placement.of(setting.config)
        limit_threads(setting.config.threads)

    def fit(self, parameters: NDArrays, config: dict[str, FlowerScalar]) -> tuple[NDArrays, int, dict[str, Any]]:
        """Give named arrays to the handler of the message's kind, and return its answer."""
        answer = self._answered(parameters, config)
        arrays, numbers = to_parts(answer)
        return list(arrays.values()), self.num_examples, {NAMES: "\n".join(arrays), **numbers}

    def evaluate(self, parameters: NDArrays, config: dict[str, FlowerScalar]) -> tuple[float, int, dict[str, Any]]:
        """Score predictions for the site's held-out rows; returns (mean NLL, rows, sums of scores)."""
        scores: Scores = self._answered(parameters, config)
        count = int(scores.sums["count"])
        return scores.sums["nll"] / count if count else 0.0, count, dict(scores.flat())

    def _answered(self, parameters: NDArrays, config: Mapping[str, FlowerScalar]) -> Any:
        kind, names = str(config[KIND]), str(config[NAMES])
        named = dict(zip(names.split("\n") if names else [], parameters, strict=True))
        return self.answer(kind, self.asked(kind, named, config))

    def asked(self, kind: str, arrays: NamedArrays, numbers: Mapping[str, Any]) -> Any:
        """The request in a message of a kind."""
        handler = handlers(type(self)).get(kind)
        if handler is None:
            raise ProtocolError(f"method `{self.config.method}` does not answer `{kind}`")
        if not is_message(handler.request):
            raise ProtocolError(f"method `{self.config.method}` has no prediction of single rows")
        return from_parts(handler.request, arrays, numbers)

    def answer(self, kind: str, request: Any) -> Any:
        """The answer to a request of a kind, as far as the site's policy lets it leave."""
        found, rules = handlers(type(self))[kind].function(self, request), self.setting.rules
        return found if rules is None else rules.answer(found, self.num_examples)

    @property
    def num_examples(self) -> int:
        """Training rows of the site."""
        return self.site.num_examples

    @property
    def least_cell(self) -> int:
        """Fewest rows in a cell that the site's policy allows; 0 without a policy."""
        rules = self.setting.rules
        return rules.policy.least_cell if rules is not None and rules.active else 0

    @property
    def preparation(self) -> Preparation:
        """The columns and scales that the sites agreed on."""
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

    @property
    def units(self) -> TargetUnits:
        """From the standardised target to the units of the data."""
        agreed = self.preparation
        classes = len(agreed.target.levels)
        return TargetUnits(agreed.target_mean, agreed.target_scale, agreed.transform, classes, agreed.follow_up)

    def require_simulated(self, what: str) -> None:
        """Refuse what a real site never does."""
        if not self.site.simulated:
            raise ProtocolError(f"a real site {what}")

    # What a method may replace.

    def start(self, num_inputs: int) -> NamedArrays:
        """Initial hyperparameters under their wire names; the same at every site, from the configuration alone."""
        named = build_kernel(self.config.model, num_inputs).named_parameters()
        arrays: NamedArrays = {f"kernel.{wire_name(name)}": array.detach().numpy() for name, array in named}
        return arrays | {"likelihood.log_noise": np.log([self.config.model.noise])}

    def predict(self, request: Any, inputs: Array) -> Prediction:
        """Predict noisy observations at standardised inputs [N, D] from the request."""
        del request, inputs
        raise ProtocolError(f"method `{self.config.method}` has no prediction of single rows")

    def held_out(self, request: Any) -> Prediction:
        """Predict the held-out rows."""
        return self.predict(request, self.rows.x_test)

    def score(self, request: Any) -> Scores:
        """Scores of the held-out rows."""
        return self.scored(self.held_out(request), self.rows.y_test)

    def scored(self, found: Prediction, target: Array) -> Scores:
        """Scores by the kind of the target: of class probabilities, or of a Gaussian in original units."""
        if found.mean.ndim == 2:
            return class_scores(found.mean, target)
        if self.config.model.likelihood == "bernoulli":
            return bernoulli_scores(found.mean, target)
        return self.units.gaussian_scores(found, target)

    def shown(self, request: Any) -> NamedArrays:
        """Mean and sd, or probability of the second class, target, one or two inputs; nothing of more classes."""
        predicted, agreed, units = self.held_out(request), self.preparation, self.units
        if predicted.mean.ndim > 1:
            return {}
        mean, sd, target = units.original(predicted, split_target(self.rows.y_test)[0])
        arrays: NamedArrays = {"prediction.mean": mean, "prediction.sd": sd, "prediction.target": target}
        if self.config.model.likelihood == "bernoulli":
            del arrays["prediction.sd"]
            arrays["prediction.probability"] = arrays.pop("prediction.mean")
        if agreed.transform is not None:  # mean ± 1.96 sd are no ends of a 95 % interval there
            ends = units.quantiles(predicted.mean, np.sqrt(predicted.variance), (0.025, 0.975))
            arrays["prediction.low"], arrays["prediction.high"] = ends
        if self.rows.x_test.shape[1] <= 2:
            arrays["prediction.input"] = self.rows.x_test * agreed.input_scale + agreed.input_mean
        return arrays

    def all_rows(self) -> SiteData:
        """Simulation only: the rows of all sites."""
        self.require_simulated("does not see the rows of other sites")
        return baselines.all_rows(self.config, self.site.partitions, self.preparation)

    def alone(self, data: SiteData, pooled: int) -> Scores:
        """Scores of a model of these rows; of those of all sites with ``pooled`` inducing points, which is else 0."""
        return baselines.scores(data, self.config, self.units, pooled)


def score_sums(client: SiteClient, request: Any) -> ScoreSums:
    """Scores of the held-out rows as a summand."""
    return ScoreSums.of(client.score(request))


def local_scores(client: SiteClient, request: Nothing) -> LocalScoreSums:
    """Scores of a model of this site's rows."""
    return LocalScoreSums.of(client.alone(client.rows, pooled=0))


def compared_scores(client: SiteClient, request: Any) -> ComparedScoreSums:
    """Scores of a model of this site's rows, and whether they are much better than those of the run."""
    alone, run = (ScoreSums.of(found) for found in (client.alone(client.rows, pooled=0), client.score(request)))
    better = much_better(alone.nll, run.nll, run.rows)
    if better:
        words = "the run does not serve this site: NLL %.4g of its held-out rows, %.4g by a model of its rows alone"
        logger.warning(words, run.nll / run.rows, alone.nll / run.rows)
    return ComparedScoreSums(**vars(alone), sites=np.array([float(run.rows > 0), float(better)]))


def pooled(client: SiteClient, request: Points) -> PooledScoreSums:
    """Simulation only: scores of one model of the rows of all sites."""
    return PooledScoreSums.of(client.alone(client.all_rows(), pooled=request.count or client.config.model.num_inducing))


def boosted(client: SiteClient, request: Nothing) -> BoostedScoreSums:
    """Simulation only: scores of gradient boosting of the rows of all sites."""
    return BoostedScoreSums.of(baselines.boosting(client.all_rows(), client.config, client.units))


def confusion(client: SiteClient, request: Any) -> Confusion:
    """Which class was taken for which, for clients that take it over; only models of several classes are asked."""
    return Confusion.of(client.held_out(request).mean, client.rows.y_test)


def predictions(client: SiteClient, request: Any) -> HeldOutRows:
    """Held-out rows with their predictions; a real site refuses, its rows stay where they are."""
    client.require_simulated("does not send rows")
    return HeldOutRows(client.shown(request))


def weighted(client: SiteClient, request: Step) -> WeightedStep:
    """The local steps of a method of averaging, as the summand of a weighted mean."""
    stepped: Stepped = handlers(type(client))["train"].function(client, request)
    return stepped.weighted(client.num_examples)


def target(client: SiteClient, request: TargetPowers) -> TargetMoments:
    """Sums of the transformed training targets, for each power that it could have."""
    site = client.site
    y = site.train[site.target].to_numpy(dtype=np.float64)
    family = [Transform(client.config.transform.target, float(power)) for power in request.powers]
    moved = np.stack([one.forward(y) for one in family]) - request.centres[:, None]
    slopes = np.array([one.log_slope(y).sum() for one in family])
    return TargetMoments(moved.sum(axis=1), np.square(moved).sum(axis=1), slopes, np.array(float(len(y))))


def robust(client: SiteClient, request: RobustScales) -> RobustMoments:
    """Sums of the training targets for a middle and a spread that outliers do not move."""
    site = client.site
    y = site.train[site.target].to_numpy(dtype=np.float64)
    z = (y - request.centre)[:, None] / request.scales
    weights = 2 / (1 + z**2)
    first, second = (weights * z).sum(axis=0), (weights * z**2).sum(axis=0)
    return RobustMoments(weights.sum(axis=0), first, second, np.array(float(len(y))))


def column_sums(client: SiteClient, request: Nothing) -> ColumnSums:
    """Sums for the means of columns."""
    sums = standardisation.column_sums(client.site.train, client.preparation)
    return ColumnSums(**sums, dropped=np.array(float(client.site.dropped)))


def column_squares(client: SiteClient, request: Centres) -> ColumnSquares:
    """Sums of squares for the spreads of columns."""
    train, preparation = client.site.train, client.preparation
    return ColumnSquares(*standardisation.column_squares(train, preparation, request.centre, request.scale))


def shape(client: SiteClient, request: Nothing) -> Shape:
    """Where the standardised inputs lie, and the initial hyperparameters of the configured model."""
    rows = client.rows
    arrays, start, (y, beside) = input_shape(rows.x), client.start(rows.x.shape[1]), split_target(rows.y)
    sums = np.array(y @ y), np.asarray(beside.sum())
    return Shape(arrays["input.histogram"], arrays["input.products"], *sums, start)


def moments(client: SiteClient, request: Nothing) -> Moments:
    """Sums for linear regression."""
    design, y = with_ones(client.rows.x), client.rows.y
    return Moments(design.T @ design, design.T @ y, np.array(y @ y))


def logistic(client: SiteClient, request: Coefficients) -> LogisticSums:
    """Log likelihood, gradient and information of a logistic regression into two or more classes."""
    design, y = with_ones(client.rows.x), client.rows.y.astype(int)
    logarithm = log_shares(design, request.values)  # [N, C]
    p, observed = np.exp(logarithm[:, 1:]), y[:, None] == np.arange(1, logarithm.shape[1])
    weighted = np.concatenate([share[:, None] * design for share in p.T], axis=1)  # [N, R P]
    information = -weighted.T @ weighted
    blocks = information.reshape(2 * request.values.shape)
    for c, share in enumerate(p.T):
        blocks[c, :, c] += design.T * share @ design
    value = logarithm[np.arange(len(y)), y].sum()
    return LogisticSums(np.array(value), (observed - p).T @ design, information)


def log_shares(design: Array, weights: Array) -> Array:
    """Logarithms of the probabilities of classes [N, C], from X̃ [N, P] and the weights of all but the first."""
    log_odds = np.column_stack([np.zeros(len(design)), design @ weights.T])
    return np.asarray(log_odds - special.logsumexp(log_odds, axis=1, keepdims=True))


def follow_up(client: SiteClient, request: Edges) -> TimeCounts:
    """Training rows by their time, and those whose event was seen."""
    return TimeCounts(counted(*split_target(client.rows.y), request.values))


def life_table(client: SiteClient, request: Nothing) -> LifeTableScoreSums:
    """Scores of what all rows together say of times, whoever the row is, on the held-out rows."""
    known, target = client.preparation.follow_up, client.rows.y_test
    if known is None:
        raise ProtocolError("the sites have not agreed on how long rows were followed")
    time, seen = split_target(target)
    alive = known.survived(time)
    nll = -np.log(alive) - np.where(seen == 1, np.log(known.hazard(time)), 0.0)
    curve = known.survived
    scores = time_scores(0 * time, 1 - alive, nll, target, known, lambda times: curve(times + 0 * time))
    return LifeTableScoreSums.of(scores)


def time_regression(client: SiteClient, request: TimeCoefficients) -> TimeSums:
    """Log likelihood, gradient and information of a linear model of log times.

    At z = τ log t − X̃ᵀv a row that was seen adds log p(z) + log τ − log t, which is concave in (v, τ).
    """
    (time, seen), scale = split_target(client.rows.y), float(request.values[-1])
    design = np.column_stack([-with_ones(client.rows.x), np.log(time)])  # dz
    z = torch.from_numpy(design @ request.values)
    likelihood, zero = build_point_likelihood(client.config.model.likelihood), torch.zeros_like(z)
    at = torch.stack([z.exp(), torch.from_numpy(seen)], dim=1), zero, zero, likelihood.initial
    value, slope, bend, _ = likelihood.slopes(*at)  # of times eᶻ, whose density has 1/eᶻ and by −z these slopes
    whole = float(value) + float((seen * (z.numpy() + math.log(scale) - np.log(time))).sum())
    gradient, information = -design.T @ slope.numpy(), design.T * bend.numpy() @ design
    gradient[-1] += seen.sum() / scale
    information[-1, -1] += seen.sum() / scale**2
    return TimeSums(np.array(whole), gradient, information)


def linear_scores(client: SiteClient, request: LinearPredictor) -> LinearScoreSums:
    """Scores of a linear predictor on the held-out rows."""
    rows, likelihood = client.rows, client.config.model.likelihood
    x, y = rows.x_test - request.centre, rows.y_test
    mean, variance = request.intercept + x @ request.weights, np.full(len(x), request.variance)
    if request.spread is not None:
        variance += np.square(x @ request.spread.T).sum(axis=1)
    if request.classes is not None:
        scores = class_scores(np.exp(log_shares(with_ones(x), request.classes)), y)
    elif likelihood == "bernoulli":
        scores = bernoulli_scores(special.expit(np.clip(mean, -CERTAIN, CERTAIN)), y)
    elif likelihood == "poisson":
        scores = count_scores(mean, variance, y)
    elif SECOND_COLUMN.get(likelihood) == "event":
        hyper = torch.tensor([math.log(request.variance) / 2], dtype=torch.float64)
        scores = build_point_likelihood(likelihood).scores(mean, 0 * mean, y, hyper, client.units)
    else:
        scores = client.units.gaussian_scores(Prediction(mean, variance), y)
    return LinearScoreSums.of(scores)


SCORED = (score_sums, local_scores, compared_scores, pooled, boosted, linear_scores, life_table, predictions)
SUMS = (weighted, target, robust, follow_up, column_sums, column_squares, shape, moments, logistic, time_regression)


@cache
def handlers(client: type[SiteClient]) -> Mapping[str, Handler]:
    """The handlers of a client by the kind of message; :meth:`SiteClient.predict` names the request of scores."""
    predicted = typing.get_type_hints(client.predict)["request"]
    found = {EVALUATE: Handler(client.score, predicted, Scores)}
    named = {function.__name__: function for function in (*SCORED, *SUMS)} | {
        name: getattr(client, name) for name in dir(client)
    }
    for name, function in named.items():
        if name.startswith("_") or "request" not in getattr(function, "__annotations__", {}):
            continue
        hints = typing.get_type_hints(function)
        request, answer = predicted if hints["request"] is Any else hints["request"], hints["return"]
        kind = kind_of(answer) if is_message(answer) else ""
        if is_message(request) and name == (kind.partition(".")[2] or kind):
            found[kind] = Handler(function, request, answer)
    if "train" not in found or found["train"].answer is not Stepped:
        del found["train.weighted"]
    return found
