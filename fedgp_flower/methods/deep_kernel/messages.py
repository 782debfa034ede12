"""The table ``deep.*``, and what server and sites of a deep-kernel GP say to each other besides federated averaging."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from fedgp_flower.config import CoreConfig
from fedgp_flower.errors import ConfigError
from fedgp_flower.messages import leaves, message
from fedgp_flower.options import Count, MethodOptions, Positive, PositiveInt
from fedgp_flower.shared_messages import Described
from fedgp_flower.typing import AnyShape


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


@message()
class HeadRequest:
    """At which weights, and for which shares of personal heads, sums are wanted."""

    values: Mapping[str, AnyShape] = leaves("weights of the network")
    shares: Float[ndarray, " J"] = leaves("ρ, to choose from")


@message("query.heads", summand=True)
class Heads:
    """What a site's rows say of the shared head, its personal one integrated out, for each ρ."""

    precision: Float[ndarray, "J C F F"] = leaves(
        "B = (I + ρ G)⁻¹ G, G = Φᵀ D⁻¹ Φ of the features Φ of its rows", symmetric=True
    )
    shift: Float[ndarray, "J C F"] = leaves("b = (I + ρ G)⁻¹ Φᵀ D⁻¹ t")
    constant: Float[ndarray, " J"] = leaves("log density of the rows where the shared head is zero")

    def num_parameters(self) -> int:
        """Entries of a head."""
        return int(np.prod(self.shift.shape[1:]))

    @np.errstate(over="ignore", invalid="ignore")
    def refusal(self, described: Described) -> str | None:
        """Why these cannot be sums over rows, or None: B is positive semi-definite."""
        del described
        size = max(float(np.abs(self.precision).max()), 1e-300)
        scaled = self.precision / size  # units first: a liar's numbers may be huge
        if np.linalg.eigvalsh(scaled).min() < -1e-6:
            return "`precision` is that of no rows: it is not positive semi-definite"
        return None


@message()
class HeadPosterior:
    """Weights of the network, and the shared head of all rows."""

    values: Mapping[str, AnyShape] = leaves("weights of the network")
    mean: Float[ndarray, "C F"] = leaves("E w_c")
    covariance: Float[ndarray, "C F F"] = leaves("Cov w_c", symmetric=True)
    share: float = leaves("ρ, personal heads' share of the prior variance")
