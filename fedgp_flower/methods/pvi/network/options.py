"""The table ``bnn.*``: PVI over the weights of a neural network."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from fedgp_flower.errors import ConfigError
from fedgp_flower.methods.pvi.weights.options import WeightsOptions
from fedgp_flower.options import Count, Positive, PositiveInt
from fedgp_flower.run.config import CoreConfig


class NetworkOptions(WeightsOptions):
    """The table ``bnn.*``."""

    table: ClassVar[str] = "bnn"

    hidden: PositiveInt = 50
    """Units of the one hidden layer, rectified."""
    classes: Annotated[int, Field(ge=2)] = 10
    """The target holds the numbers 0 to ``classes`` − 1."""
    steps: PositiveInt = 300
    """Steps of Adam in a visit, at most."""
    batch_size: Count = 128
    """Rows of a step; 0 takes all rows."""
    learning_rate: Positive = 0.01
    """Of Adam."""
    start_scale: Positive = 0.05
    """Standard deviation of a weight that a visit starts from, at most: a tight start lets it stop early."""
    early_stopping: bool = True
    """Stop a visit where the expected log likelihood rises no more; otherwise all steps are taken."""
    prediction_draws: PositiveInt = 30
    """Draws in a prediction."""

    def num_weights(self, num_inputs: int) -> int:
        """Two layers with their biases."""
        return self.hidden * (num_inputs + 1) + self.classes * (self.hidden + 1)

    def check(self, core: CoreConfig) -> None:
        """Class numbers, and no update that only a linear model has."""
        super().check(core)
        binary = core.model.likelihood == "bernoulli"
        if binary and self.classes != 2:
            raise ConfigError("`model.likelihood` = 'bernoulli' is two classes: set `bnn.classes` to 2")
        if not binary and (core.standardise or core.model.likelihood != "gaussian"):
            raise ConfigError(
                "pvi-bnn reads two classes off the target with `model.likelihood` = 'bernoulli', class numbers with"
                " `standardise` false and `model.likelihood` left at 'gaussian'"
            )
        if self.plan().local_update:
            raise ConfigError(f"`bnn.preset` = {self.preset!r} needs exact gradients of q, which only pvi-glm has")
