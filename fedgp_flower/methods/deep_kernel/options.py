"""The table ``deep.*``. Reading a configuration loads no PyTorch, so options stand apart from messages."""

from __future__ import annotations

from typing import ClassVar, Literal

from fedgp_flower.config import CoreConfig
from fedgp_flower.errors import ConfigError
from fedgp_flower.options import Count, MethodOptions, ModelSection, Positive, PositiveInt


class DeepKernelOptions(MethodOptions):
    """The table ``deep.*``."""

    table: ClassVar[str] = "deep"

    network: Literal["dense", "convolutional"] = "dense"
    """``dense``: two rectified layers; ``convolutional``: inputs are the pixels of a square image row by row."""
    features: ClassVar[int] = 32
    """Learned features; sites send sums of their products."""
    classes: Count = 0
    """The target holds the numbers 0 to ``classes`` − 1; 0: it is a number, or two classes by name."""
    local_steps: PositiveInt = 10
    """Steps of Adam on the evidence of a site's rows in a round."""
    learning_rate: Positive = 0.003
    """Learning rate of Adam."""

    def numbers_classes(self, section: ModelSection) -> bool:
        """Whether the target holds the numbers of several classes."""
        return self.classes > 0 and section.likelihood != "bernoulli"

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
        core.require_whole_rosters("averaging.fraction", core.averaging.fraction)
