"""The site's half of federated averaging: a step, and the same step as the summand of a weighted mean."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from fedgp_flower.clients.numpy_client import SiteClient
from fedgp_flower.gp.kernels import WiredModel
from fedgp_flower.lazy import Lazy
from fedgp_flower.methods.messages import Step, Stepped, WeightedStep

if TYPE_CHECKING:
    from fedgp_flower.gp import optimisers
else:
    optimisers = Lazy("fedgp_flower.gp.optimisers")


class AveragingClient(SiteClient):
    """A client whose parameters the server averages."""

    @abstractmethod
    def train(self, request: Step) -> Stepped:
        """Local steps from the parameters that were sent."""

    def weighted(self, request: Step) -> WeightedStep:
        """The step times this site's rows."""
        return WeightedStep.of(self.train(request), self.num_examples)

    def stepped(self, model: WiredModel, objective: Callable[[], Tensor], request: Step) -> Stepped:
        """Local steps uphill; none where all targets are one number, whose noise would vanish, and the mean with it."""
        local = self.config.optimizer
        if np.ptp(self.rows.y) == 0:
            value = float(objective().detach())
        else:
            rate, parameters = request.learning_rate, list(model.parameters())
            value = optimisers.ascend(objective, parameters, name=local.name, steps=local.steps, learning_rate=rate)
        return Stepped.of(request, model.to_arrays(), value)
