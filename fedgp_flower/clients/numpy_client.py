"""A site's half of every method: handlers of typed messages, behind Flower's ``NumPyClient``.

A handler has the name of the message that it answers: ``query.statistics`` is answered by ``statistics``, ``train`` by
``train``. Its annotations name the classes of the request and of the answer::

    def statistics(self, request: Parameters) -> Statistics: ...

The kind of a message is Flower's ``message_type`` and nothing else. :meth:`SiteClient.answer` is the only way to a
handler: it knows the complete kind, so that ``train.statistics`` does not reach what answers ``query.statistics``.
"""

from __future__ import annotations

import typing
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.errors import ProtocolError
from fedgp_flower.gp.kernels import build_kernel, wire_name
from fedgp_flower.gp.models import WiredModel
from fedgp_flower.gp.placement import Placement, limit_threads
from fedgp_flower.lazy import Lazy
from fedgp_flower.messages import from_parts, is_message, kind_of, to_parts
from fedgp_flower.privacy.policy import Rules
from fedgp_flower.scores import Prediction, Scores, TargetUnits
from fedgp_flower.shared_messages import (
    HeldOutRows,
    LocalScoreSums,
    Nothing,
    PooledScoreSums,
    ScoreSums,
    Step,
    Stepped,
    WeightedStep,
)
from fedgp_flower.typing import Array, NamedArrays

if TYPE_CHECKING:
    from fedgp_flower.clients import baselines
    from fedgp_flower.gp import optimisers
else:
    baselines, optimisers = Lazy("fedgp_flower.clients.baselines"), Lazy("fedgp_flower.gp.optimisers")

EVALUATE = "evaluate"
"""The kind of message that :meth:`SiteClient.score` answers."""
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
    constants: NamedArrays = field(default_factory=dict)
    """Arrays that the server sent once."""
    rules: Rules | None = None
    """The site's policy; None where nothing leaves."""


@dataclass(frozen=True, slots=True)
class Handler:
    """What answers a kind of message, and the classes of the request and of the answer."""

    name: str
    request: Any
    answer: Any
    common: bool = False
    """Whether it is one of :class:`CommonAnswers`."""


class SiteClient(NumPyClient):
    """Handlers of the messages that every method answers; a method adds more, and :meth:`predict`."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.config = setting, setting.config
        self.site, self.state = setting.site, setting.state
        self.placement = Placement.of(setting.config)
        limit_threads(setting.config.threads)

    # The pairing with Flower.

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
        handler, rules = handlers(type(self))[kind], self.setting.rules
        found = getattr(CommonAnswers(self) if handler.common else self, handler.name)(request)
        return found if rules is None else rules.answer(found, self.num_examples)

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
        return TargetUnits(agreed.target_mean, agreed.target_scale, agreed.transform)

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

    def score(self, request: Any) -> Scores:
        """Scores of the held-out rows, in original units."""
        return self.units.gaussian_scores(self.predict(request, self.rows.x_test), self.rows.y_test)

    def shown(self, request: Any) -> NamedArrays:
        """Held-out rows as a simulation keeps them: predictive mean and sd, target, and one or two inputs.

        Of two classes the probability of the second one stands in place of mean and sd; of more there is nothing.
        """
        predicted, agreed, units = self.predict(request, self.rows.x_test), self.preparation, self.units
        if predicted.mean.ndim > 1:
            return {}
        mean, sd, target = units.original(predicted, self.rows.y_test)
        arrays: NamedArrays = {"prediction.mean": mean, "prediction.sd": sd, "prediction.target": target}
        if self.config.model.likelihood == "bernoulli":
            del arrays["prediction.sd"]
            arrays["prediction.probability"] = arrays.pop("prediction.mean")
        if agreed.transform is not None:  # mean ± 1.96 sd are no ends of a 95 % interval there
            arrays["prediction.low"], arrays["prediction.high"] = units.quantiles(predicted, (0.025, 0.975))
        if self.rows.x_test.shape[1] <= 2:
            arrays["prediction.input"] = self.rows.x_test * agreed.input_scale + agreed.input_mean
        return arrays

    def alone(self, data: SiteData, pooled: bool) -> Scores:
        """Scores of a model of these rows alone: those of this site, or in a simulation those of all sites."""
        result = baselines.fitted(data, self.config, pooled)
        return baselines.scored(result, data.y_test, self.units)

    # Handlers.

    def score_sums(self, request: Any) -> ScoreSums:
        """Scores of the held-out rows as a summand."""
        return ScoreSums.of(self.score(request))

    def local_scores(self, request: Nothing) -> LocalScoreSums:
        """Scores of a model of this site's rows."""
        del request
        return LocalScoreSums.of(self.alone(self.rows, pooled=False))

    def pooled(self, request: Nothing) -> PooledScoreSums:
        """Simulation only: scores of one model of the rows of all sites."""
        del request
        self.require_simulated("does not see the rows of other sites")
        rows = baselines.all_rows(self.config, self.site.partitions, self.preparation)
        return PooledScoreSums.of(self.alone(rows, pooled=True))

    def predictions(self, request: Any) -> HeldOutRows:
        """Held-out rows with their predictions; a real site refuses, its rows stay where they are."""
        self.require_simulated("does not send rows")
        return HeldOutRows(self.shown(request))


class AveragingClient(SiteClient):
    """A client whose parameters the server averages: a step, and the same step as the summand of a weighted mean."""

    @abstractmethod
    def train(self, request: Step) -> Stepped:
        """Local steps from the parameters that were sent."""

    def weighted(self, request: Step) -> WeightedStep:
        """The step times this site's rows."""
        return self.train(request).weighted(self.num_examples)

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
    """The handlers of a client by the complete kind of message that each answers, which the answer's class names.

    Scores and predictions of rows are asked for with the request of :meth:`SiteClient.predict`.
    """
    predicted = typing.get_type_hints(client.predict)["request"]
    found = {EVALUATE: Handler("score", predicted, Scores)}
    for cls, common in ((CommonAnswers, True), (client, False)):
        for name in dir(cls):
            function = getattr(cls, name)
            if name.startswith("_") or "request" not in getattr(function, "__annotations__", {}):
                continue
            hints = typing.get_type_hints(function)
            request, answer = predicted if name in ("predictions", "score_sums") else hints["request"], hints["return"]
            kind = kind_of(answer) if is_message(answer) else ""
            if is_message(request) and name == (kind.partition(".")[2] or kind):
                found[kind] = Handler(name, request, answer, common)
    return found
