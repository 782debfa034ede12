"""A site's half of every method: handlers of typed messages, behind Flower's ``NumPyClient``.

A handler has the name of the message that it answers: ``query.statistics`` is answered by ``statistics``, ``train`` by
``train``. Its annotations name the classes of the request and of the answer::

    def statistics(self, request: Parameters) -> Statistics: ...

The kind of a message is Flower's ``message_type`` and nothing else. :meth:`SiteClient.handler` is the only way to a
handler: it knows the complete kind, so that ``train.statistics`` does not reach what answers ``query.statistics``.
"""

from __future__ import annotations

import typing
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from flwr.client import NumPyClient
from flwr.common import NDArrays
from flwr.common.typing import Scalar as FlowerScalar

from fedgp_flower.clients.common import CommonAnswers
from fedgp_flower.clients.state import SiteState
from fedgp_flower.config import RunConfig
from fedgp_flower.data.sites import RawSite, SiteData
from fedgp_flower.data.standardisation import Preparation, bare
from fedgp_flower.errors import ProtocolError
from fedgp_flower.gp.kernels import WiredModel, build_kernel, wire_name
from fedgp_flower.gp.placement import Placement, limit_threads
from fedgp_flower.lazy import Lazy
from fedgp_flower.messages import decode, encode, is_message, join, kind_of, split
from fedgp_flower.privacy.policy import Rules
from fedgp_flower.scores import Prediction as Prediction  # noqa: PLC0414  methods import it from here
from fedgp_flower.scores import (
    Scores,
    gaussian_scores,
    latent_scores,
    mixture_scores,
    transformed_moments,
    transformed_quantiles,
    transformed_scores,
)
from fedgp_flower.shared_messages import Nothing, ScoreSums, Step, Stepped, WeightedStep
from fedgp_flower.typing import Array, NamedArrays

if TYPE_CHECKING:
    from fedgp_flower.clients import baselines
    from fedgp_flower.gp import optimisers
else:
    baselines, optimisers = Lazy("fedgp_flower.clients.baselines"), Lazy("fedgp_flower.gp.optimisers")

KIND, NAMES = "kind", "names-of-arrays"
"""Config keys of a ``fit`` or ``evaluate`` call, set at the site: the kind of the message, and the names of its arrays,
a line each. A reply of ``fit`` names its arrays in the same way."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The parts of a client: the configuration, the site's rows and state, and the agreement of the sites."""

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
    """An answer that is no message: arrays under any names, with numbers and texts or scores beside them."""

    arrays: NamedArrays
    said: Mapping[str, Any] = field(default_factory=dict)
    scores: Scores | None = None

    def coarse(self, least: int) -> Said:
        """The same with histograms in which small cells have joined a neighbour."""
        return self if self.scores is None else replace(self, scores=self.scores.coarse(least))


@dataclass(frozen=True, slots=True)
class Handler:
    """What answers a kind of message."""

    name: str
    request: Any
    """Class of the request."""
    answer: Any
    """Class of the answer; None where that is no message."""
    common: bool
    """Whether it is one of :class:`CommonAnswers`."""


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
        """Give named arrays to the handler of the message's kind, and return its answer."""
        kind = str(config[KIND])
        answer = self.handler(kind)(self.asked(kind, _named(parameters, config), config))
        if isinstance(answer, Said):
            arrays, texts = answer.arrays, {**(answer.scores.flat() if answer.scores else {}), **answer.said}
        else:
            arrays, texts = split(type(answer), encode(answer))
        return list(arrays.values()), self.num_examples, {NAMES: "\n".join(arrays), **texts}

    def evaluate(self, parameters: NDArrays, config: dict[str, FlowerScalar]) -> tuple[float, int, dict[str, Any]]:
        """Score predictions for the site's held-out rows; returns (mean NLL, rows, sums of scores)."""
        scores: Scores = self._admitted(self.score(self._request("predict", _named(parameters, config), config)))
        count = int(scores.sums["count"])
        return scores.sums["nll"] / count if count else 0.0, count, dict(scores.flat())

    def handler(self, kind: str) -> Callable[[Any], Any]:
        """What answers messages of a kind, as far as the site's policy lets it.

        Raises:
            ProtocolError: nothing does.
        """
        found = handlers(type(self)).get(kind)
        if found is None:
            raise ProtocolError(f"method `{self.config.method}` does not answer `{kind}`")
        function = getattr(CommonAnswers(self) if found.common else self, found.name)
        return lambda request: self._admitted(function(request))

    def _admitted(self, answer: Any) -> Any:
        rules = self.setting.rules
        return answer if rules is None else rules.answer(answer, self.num_examples)

    def asked(self, kind: str, arrays: NamedArrays, numbers: Mapping[str, Any]) -> Any:
        """The request in a message of a kind."""
        self.handler(kind)
        return self._request(handlers(type(self))[kind].request, arrays, numbers)

    def _request(self, request: Any, arrays: NamedArrays, numbers: Mapping[str, Any]) -> Any:
        cls = _hints(type(self).predict)["request"] if request == "predict" else request
        if not is_message(cls):
            raise ProtocolError(f"method `{self.config.method}` has no prediction of single rows")
        return decode(cls, join(cls, arrays, numbers))

    # What a method's handlers work with.

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
        """The columns and scales that the sites agreed on.

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

    def start(self, num_inputs: int) -> NamedArrays:
        """Initial hyperparameters under their wire names; the same at every site, from the configuration alone."""
        kernel = build_kernel(self.config.model, num_inputs)
        arrays: NamedArrays = {f"kernel.{wire_name(n)}": p.detach().numpy() for n, p in kernel.named_parameters()}
        return arrays | {"likelihood.log_noise": np.log([self.config.model.noise])}

    def predict(self, request: Any, inputs: Array) -> Prediction:
        """Predict noisy observations at standardised inputs [N, D] from the request.

        Raises:
            ProtocolError: for a method whose clients share nothing that predicts rows.
        """
        del request, inputs
        raise ProtocolError(f"method `{self.config.method}` has no prediction of single rows")

    # Scores, in original units.

    def score(self, request: Any) -> Scores:
        """Scores of the held-out rows."""
        return self.gaussian_scores(self.predict(request, self.rows.x_test), self.rows.y_test)

    def gaussian_scores(self, prediction: Prediction, target: Array) -> Scores:
        """Scores of Gaussian predictions of a standardised target."""
        if self.preparation.transform is None:
            return gaussian_scores(*self.original(prediction, target))
        return self.mixture_scores(prediction.mean[None], prediction.variance[None], target)

    def mixture_scores(self, means: Array, variances: Array, target: Array) -> Scores:
        """Scores of even mixtures of Gaussians [S, N] of a standardised target [N]."""
        goal = target * self.preparation.target_scale + self.preparation.target_mean
        moments, transform = self._unscaled(means, variances), self.preparation.transform
        return mixture_scores(*moments, goal) if transform is None else transformed_scores(*moments, goal, transform)

    def _unscaled(self, mean: Array, variance: Array) -> tuple[Array, Array]:
        """Mean and standard deviation in units of the target, or of the transformed target."""
        scale = self.preparation.target_scale
        return mean * scale + self.preparation.target_mean, np.sqrt(variance) * scale

    def original(self, prediction: Prediction, target: Array) -> tuple[Array, ...]:
        """Mean, standard deviation and target in the units of the data."""
        moments, transform = self._unscaled(prediction.mean, prediction.variance), self.preparation.transform
        goal = target * self.preparation.target_scale + self.preparation.target_mean
        if transform is None:
            return *moments, goal
        return *transformed_moments(*moments, transform), transform.inverse(goal)

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
        return Said(dict(description.arrays), {**counted, "schema": description.schema, "label": self.site.label})

    def score_sums(self, request: Any) -> ScoreSums:
        """Scores of the held-out rows as a summand."""
        return ScoreSums.of(self.score(request))

    def predictions(self, request: Any) -> Said:
        """Held-out rows with their predictions; a real site refuses, its rows stay where they are."""
        self._require_simulated("does not send rows")
        return Said(self.shown(request))

    def shown(self, request: Any) -> NamedArrays:
        """Held-out rows as a simulation keeps them: predictive mean and sd, target, and one or two inputs."""
        predicted, preparation = self.predict(request, self.rows.x_test), self.preparation
        mean, sd, target = self.original(predicted, self.rows.y_test)
        arrays: NamedArrays = {"prediction.mean": mean, "prediction.sd": sd, "prediction.target": target}
        if preparation.transform is not None:  # mean ± 1.96 sd are no ends of a 95 % interval there
            moments = self._unscaled(predicted.mean, predicted.variance)
            low, high = transformed_quantiles(*moments, (0.025, 0.975), preparation.transform)
            arrays |= {"prediction.low": low, "prediction.high": high}
        if self.rows.x_test.shape[1] <= 2:
            arrays["prediction.input"] = self.rows.x_test * preparation.input_scale + preparation.input_mean
        return arrays

    # Comparisons with a model of this site's rows, and with one of all rows.

    def local_only(self, request: Nothing) -> Said:
        """Scores of a GP of this site's rows."""
        del request
        scores, evaluations = self.own_scores()
        return scored(scores, evaluations=evaluations)

    def pooled(self, request: Nothing) -> Said:
        """Simulation only: scores of one sparse GP of the rows of all sites."""
        del request
        self._require_simulated("does not see the rows of other sites")
        return self.compared(baselines.pooled(self.site, self.preparation, self.config))

    def own_scores(self) -> tuple[Scores, int]:
        """Scores of a model of this site's rows, and the evaluations that it took."""
        result = self.local_fit()
        return self._scored(result), result.evaluations

    def local_fit(self) -> baselines.Baseline:
        """A GP of this site's rows, and its predictions of the held-out ones."""
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


class SameModelClient(SiteClient):
    """A client whose comparisons, local-only and pooled, use the method's model on other rows."""

    def local_fit(self) -> baselines.Baseline:
        """The model of this site's rows alone."""
        return self._alone((self.rows.x, self.rows.y, self.rows.x_test, self.rows.y_test))

    def pooled(self, request: Nothing) -> Said:
        """Simulation only: the model of the rows of all sites in one place."""
        del request
        self._require_simulated("does not see the rows of other sites")
        return self.compared(self._alone(baselines.all_rows(self.config, self.site.partitions, self.preparation)))

    @abstractmethod
    def _alone(self, data: tuple[Array, Array, Array, Array]) -> baselines.Baseline:
        """The model of these rows, with its predictions of the held-out ones."""


class AveragingClient(SiteClient):
    """A client whose parameters the server averages: a step, and the same step as the summand of a weighted mean."""

    @abstractmethod
    def train(self, request: Step) -> Stepped:
        """Local steps from the parameters that were sent."""

    def weighted(self, request: Step) -> WeightedStep:
        """The step times this site's rows."""
        return WeightedStep.of(self.train(request), self.num_examples)

    def stepped(self, model: WiredModel, objective: Callable[[], torch.Tensor], request: Step) -> Stepped:
        """Local steps uphill. None where all targets are one number: noise would vanish, and the mean with it."""
        local = self.config.optimizer
        if np.ptp(self.rows.y) == 0:
            value = float(objective().detach())
        else:
            rate, parameters = request.learning_rate, list(model.parameters())
            value = optimisers.ascend(objective, parameters, name=local.name, steps=local.steps, learning_rate=rate)
        return Stepped.of(request, model.to_arrays(), value)


@cache
def handlers(client: type[SiteClient]) -> Mapping[str, Handler]:
    """The handlers of a client by the complete kind of message that each answers.

    Answers are messages that name their kind, or a :class:`Said`, whose kind is ``query.`` and the handler's name.
    Scores and predictions of rows are asked for with the request of :meth:`SiteClient.predict`.
    """
    found: dict[str, Handler] = {}
    for cls, common in ((CommonAnswers, True), (client, False)):
        for name in dir(cls):
            function = getattr(cls, name)
            if name.startswith("_") or "request" not in getattr(function, "__annotations__", {}):
                continue
            hints = _hints(function)
            asked_as_predict = name in ("predictions", "score_sums")
            answer: Any = hints.get("return")
            request = (_hints(client.predict) if asked_as_predict else hints)["request"]
            kind = kind_of(answer) if is_message(answer) else f"query.{name}" if answer is Said else ""
            if is_message(request) and name == (kind.partition(".")[2] or kind):
                found[kind] = Handler(name, request, answer if is_message(answer) else None, common)
    return found


def scored(scores: Scores, **more: float) -> Said:
    """An answer of scores alone."""
    return Said({}, more, scores)


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    return typing.get_type_hints(function)


def _named(parameters: NDArrays, config: Mapping[str, FlowerScalar]) -> NamedArrays:
    names = str(config[NAMES]).split("\n") if config[NAMES] else []
    return dict(zip(names, parameters, strict=True))
