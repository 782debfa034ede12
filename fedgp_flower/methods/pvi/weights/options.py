"""The table ``glm.*``: PVI over the weights of a generalised linear model."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Literal

from fedgp_flower.errors import ConfigError
from fedgp_flower.methods.pvi.options import VisitOptions
from fedgp_flower.options import Positive, PositiveInt
from fedgp_flower.run.config import CoreConfig

LIKELIHOODS = ("gaussian", "bernoulli", "poisson")
"""Log-concave ones: every factor then has a precision that is not negative, and every product is a density."""


class WeightsOptions(VisitOptions):
    """What methods that share weights, and nothing about inducing points, have in common."""

    prior_scale: Positive = 1.0
    """Standard deviation of every weight a priori, the intercept's too."""

    @abstractmethod
    def num_weights(self, num_inputs: int) -> int:
        """The length of θ."""

    @property
    def full(self) -> bool:
        """Whether q has a full covariance."""
        return False

    def check(self, core: CoreConfig) -> None:
        """No key that a method without a Gaussian process does not read."""
        if unread := core.optimizer.unread():
            raise ConfigError(f"{unread}: `method` = {core.method!r} does not read it; see `{self.table}.*`")
        if core.device == "cuda" or core.precision != "float64":
            raise ConfigError(f"`device`, `precision`: {core.method!r} works on the 'cpu' in 'float64'")


class GLMOptions(WeightsOptions):
    """The table ``glm.*``."""

    table: ClassVar[str] = "glm"

    covariance: Literal["full", "diagonal"] = "full"
    """Of q(θ); ``diagonal`` is the paper's mean-field form."""
    local_update: Literal["optimum", "gradient"] = "optimum"
    """``optimum``: Newton steps to the optimum of the local free energy; ``gradient``: the natural gradient at the
    posterior that was sent, with which synchronous rounds are steps of global VI, of length ``glm.damping``."""
    steps: PositiveInt = 100
    """``optimum``: Newton steps at most."""

    def num_weights(self, num_inputs: int) -> int:
        """Intercept and slopes."""
        return 1 + num_inputs

    @property
    def full(self) -> bool:
        """Whether q has a full covariance."""
        return self.covariance == "full"

    def check(self, core: CoreConfig) -> None:
        """A log-concave likelihood, and updates that go with the preset."""
        super().check(core)
        if core.model.likelihood not in LIKELIHOODS:
            raise ConfigError(
                f"`model.likelihood` = {core.model.likelihood!r}: pvi-glm needs a log-concave one: "
                + ", ".join(LIKELIHOODS)
            )
        wanted = self.plan().local_update
        if wanted and wanted != self.local_update:
            raise ConfigError(f"`glm.preset` = {self.preset!r} needs `glm.local-update` = {wanted!r}")
        if self.local_update == "gradient" and not self.deletion:
            raise ConfigError("`glm.local-update` = 'gradient' is a step of global VI, which needs `glm.deletion`")
