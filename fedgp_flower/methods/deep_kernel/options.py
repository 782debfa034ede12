"""The table ``deep.*``: a Gaussian process on learned features."""

from __future__ import annotations

from typing import ClassVar, Literal

from fedgp_flower.errors import ConfigError
from fedgp_flower.options import Count, Fraction, MethodOptions, Positive, PositiveInt
from fedgp_flower.run.config import CoreConfig

SHARES = (0.0, 0.05, 0.2, 0.4, 0.6, 0.8, 0.95)
"""ρ, shares of the prior variance that personal heads may have: the evidence of all rows chooses."""


class DeepKernelOptions(MethodOptions):
    """The table ``deep.*``."""

    table: ClassVar[str] = "deep"

    network: Literal["dense", "convolutional"] = "dense"
    """``dense``: two rectified layers; ``convolutional``: inputs are the pixels of a square image row by row."""
    hidden: PositiveInt = 50
    """Units of the first layer of ``dense``."""
    features: PositiveInt = 32
    """Learned features; sites send sums of their products."""
    classes: Count = 0
    """The target holds the numbers 0 to ``classes`` − 1; 0: it is a number, or two classes by name."""
    concentration: Positive = 0.01
    """α of a class that a row is not of (Milios et al. 2018): smaller values trust labels more."""
    heads: Literal["personal", "shared"] = "personal"
    """``personal``: each site's head deviates from the shared one, as far as the evidence of all rows says."""

    local_steps: PositiveInt = 10
    """Steps of Adam on the evidence of a site's rows in a round."""
    learning_rate: Positive = 0.003
    """Of Adam."""
    fraction: Fraction = 1.0
    """Share of the sites that take part in a round; at least one does."""
    server_optimizer: Literal["fedavg", "fedadam", "fedyogi", "fedmedian", "fedtrimmedavg"] = "fedavg"
    """Flower's rule that combines the sites' networks; the last two withstand a few sites that lie."""
    server_learning_rate: Positive = 0.003
    """Of ``fedadam`` and ``fedyogi``."""
    prediction_draws: PositiveInt = 200
    """Draws in a prediction of classes."""

    @property
    def shares(self) -> tuple[float, ...]:
        """What ρ may be."""
        return SHARES if self.heads == "personal" else (0.0,)

    def check(self, core: CoreConfig) -> None:
        """Class numbers as they are, and no key that is not read."""
        likelihood, several = core.model.likelihood, self.classes > 0
        if likelihood not in ("gaussian", "bernoulli"):
            raise ConfigError(f"`model.likelihood` = {likelihood!r}: deep-kernel needs 'gaussian' or 'bernoulli'")
        if self.classes == 1 or (likelihood == "bernoulli" and self.classes not in (0, 2)):
            raise ConfigError(f"`deep.classes` = {self.classes}: one class is none, and 'bernoulli' are two")
        if likelihood == "gaussian" and several and core.standardise:
            raise ConfigError("`deep.classes` are numbers that the target holds: set `standardise` false")
        if unread := core.optimizer.unread():
            raise ConfigError(
                f"{unread}: deep-kernel takes steps of Adam; see `deep.learning-rate`, `deep.local-steps`"
            )
        if core.device == "cuda" or core.precision != "float64":
            raise ConfigError("`device`, `precision`: deep-kernel works on the 'cpu' in 'float64'")
        core.require_whole_rosters("deep.fraction", self.fraction)
