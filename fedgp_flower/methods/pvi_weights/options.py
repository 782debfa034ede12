"""The tables ``glm.*`` and ``bnn.*``: models whose weights PVI infers. Schedules are in the table ``pvi.*``."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Literal

from fedgp_flower.config import CoreConfig
from fedgp_flower.errors import ConfigError
from fedgp_flower.methods.pvi.options import PVIOptions
from fedgp_flower.options import POINT_LIKELIHOODS, MethodOptions, PositiveInt

LIKELIHOODS = ("gaussian", "bernoulli", "poisson")
"""Log-concave likelihoods: factors have non-negative precision, so that every product is a density."""
WEIGHTS = "weights"
"""The only block of the product."""


class WeightsOptions(MethodOptions):
    """Options of models of weights, without inducing points."""

    shared: ClassVar[type[MethodOptions] | None] = PVIOptions
    likelihoods: ClassVar[frozenset[str]] = POINT_LIKELIHOODS

    @abstractmethod
    def num_weights(self, num_inputs: int) -> int:
        """The length of θ."""

    @property
    def full(self) -> bool:
        """Whether q has a full covariance."""
        return False

    def check(self, core: CoreConfig) -> None:
        """Raise ConfigError for a key that only Gaussian processes read."""
        if unread := core.optimizer.unread():
            raise ConfigError(f"{unread}: `method` = {core.method!r} does not read it; see `{self.table}.*`")
        core.require_float64_on_cpu()


class GLMOptions(WeightsOptions):
    """The table ``glm.*``."""

    table: ClassVar[str] = "glm"
    fewer_parameters: ClassVar[str] = "fewer `features`"

    covariance: Literal["full", "diagonal"] = "full"
    """Covariance of q(θ); ``diagonal`` is the paper's mean-field form."""

    def num_weights(self, num_inputs: int) -> int:
        """Number of slopes and the intercept."""
        return 1 + num_inputs

    @property
    def full(self) -> bool:
        """Whether q has a full covariance."""
        return self.covariance == "full"

    def check(self, core: CoreConfig) -> None:
        """Raise ConfigError for a likelihood that is not log-concave."""
        super().check(core)
        if core.model.likelihood not in LIKELIHOODS:
            raise ConfigError(
                f"`model.likelihood` = {core.model.likelihood!r}: pvi-glm needs one of " + ", ".join(LIKELIHOODS)
            )


class BNNOptions(WeightsOptions):
    """The table ``bnn.*``."""

    table: ClassVar[str] = "bnn"
    fewer_parameters: ClassVar[str] = "fewer `bnn.hidden`"

    hidden: PositiveInt = 50
    """Rectified units of the hidden layer."""
    likelihoods: ClassVar[frozenset[str]] = frozenset({"bernoulli", "categorical"})
    default_likelihood: ClassVar[str] = "categorical"

    def num_weights(self, num_inputs: int) -> int:
        """Number of weights and biases of two layers."""
        return self.hidden * (num_inputs + 1) + self.classes * (self.hidden + 1)

    def check_shared(self, shared: MethodOptions) -> None:
        """Raise ConfigError for an update that only a linear model has."""
        assert isinstance(shared, PVIOptions)
        if shared.plan().gradient:
            raise ConfigError(f"`pvi.preset` = {shared.preset!r} needs exact gradients, which pvi-bnn does not have")
