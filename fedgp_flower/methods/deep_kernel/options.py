"""The table ``deep.*``, in a module that does not import PyTorch."""

from __future__ import annotations

from typing import ClassVar, Literal

from fedgp_flower.config import CoreConfig
from fedgp_flower.errors import ConfigError
from fedgp_flower.options import MethodOptions, Positive, PositiveInt


class DeepKernelOptions(MethodOptions):
    """The table ``deep.*``."""

    table: ClassVar[str] = "deep"
    likelihoods: ClassVar[frozenset[str]] = frozenset({"gaussian", "bernoulli", "categorical"})

    network: Literal["dense", "convolutional"] = "dense"
    """``dense``: two rectified layers; ``convolutional``: inputs are the pixels of a square image row by row."""
    features: ClassVar[int] = 32
    """Learned features; sites send sums of their products."""
    local_steps: PositiveInt = 10
    """Steps of Adam on the evidence of a site's rows in a round."""
    learning_rate: Positive = 0.003
    """Learning rate of Adam."""

    def check(self, core: CoreConfig) -> None:
        """Raise ConfigError for keys that are ignored."""
        if unread := core.optimizer.unread():
            raise ConfigError(
                f"{unread}: deep-kernel takes steps of Adam; see `deep.learning-rate`, `deep.local-steps`"
            )
        core.require_float64_on_cpu()
        core.require_whole_rosters()
