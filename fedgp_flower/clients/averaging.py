"""The site's half of federated averaging: a step, and the same step as the summand of a weighted mean."""

from __future__ import annotations

from abc import abstractmethod

from fedgp_flower.clients.numpy_client import SiteClient
from fedgp_flower.methods.messages import Step, Stepped, WeightedStep


class AveragingClient(SiteClient):
    """A client whose parameters the server averages."""

    @abstractmethod
    def train(self, request: Step) -> Stepped:
        """Local steps from the parameters that were sent."""

    def weighted(self, request: Step) -> WeightedStep:
        """The step times this site's rows."""
        return WeightedStep.of(self.train(request), self.num_examples)
