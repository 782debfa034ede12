"""The table ``fedmgp.*``."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fedgp_flower.config import CoreConfig
from fedgp_flower.errors import ConfigError
from fedgp_flower.options import POINT_LIKELIHOODS, Count, MethodOptions, PositiveInt

START_RATIO = 3.0
"""Initial ratio of successive lengthscales; equal ones would stay equal."""
NATURAL_STEP = 0.03
"""Step size ρ of the local steps of ``fedmgp`` on q(u), for Gaussian noise."""


class FedMGPOptions(MethodOptions):
    """The shared latent functions; the number of pseudo-inputs J is ``model.num-inducing``."""

    table: ClassVar[str] = "fedmgp"
    likelihoods: ClassVar[frozenset[str]] = POINT_LIKELIHOODS

    latents: PositiveInt = 1
    """Number I of shared latent functions."""
    aggregation: Literal["mean", "agreement", "norm-clipped", "median", "trimmed-mean", "krum"] = "mean"
    """``agreement`` uses only units that agree with most others (Gaussian noise, one latent function). The other rules
    are for ``fedmgp``."""
    local_steps: PositiveInt = 20
    """``fedmgp``: local steps E of Algorithm 2; rate and batch size are ``optimizer.*``."""
    trim: Annotated[float, Field(ge=0, lt=0.5)] = 0.2
    """``trimmed-mean``: fraction cut from each end of every coordinate."""
    malicious: Count = 0
    """``krum``: number f of malicious units among at least 2f + 3."""
    select: PositiveInt = 1
    """``krum``: number of units in the average."""

    @property
    def multiples(self) -> list[float]:
        """Initial lengthscales of the latent functions, in spacings of the pseudo-inputs."""
        return [START_RATIO**i for i in range(self.latents)]

    def check(self, core: CoreConfig) -> None:
        """Raise ConfigError for keys that Algorithm 2 does not support."""
        self._check_core(core)
        if self.aggregation == "agreement" and (core.model.likelihood != "gaussian" or self.latents > 1):
            raise ConfigError(
                "`fedmgp.aggregation` = 'agreement' needs `model.likelihood` = 'gaussian' and one latent function"
            )
        if core.optimizer.name != "adam":
            raise ConfigError(f"`optimizer.name` = {core.optimizer.name!r}: local steps of fedmgp take 'adam'")

    def _check_core(self, core: CoreConfig) -> None:
        if core.model.kernel != "rbf":
            raise ConfigError(f"`model.kernel` = {core.model.kernel!r}: a convolution in closed form needs 'rbf'")
        core.require_float64_on_cpu()
        if not core.model.ard:
            raise ConfigError("`model.ard` = false: every latent function of fedmgp has a lengthscale for each input")
        if not core.standardise:
            raise ConfigError("`standardise` = false: fedmgp places pseudo-inputs where standardised inputs lie")
        if core.model.num_inducing < 2:
            raise ConfigError("`model.num-inducing` = 1: lengthscales start from the distance of pseudo-inputs; take 2")
        core.require_whole_rosters()
        if core.privacy.secure_aggregation and self.aggregation != "mean":
            raise ConfigError(
                f"`fedmgp.aggregation` = {self.aggregation!r} uses updates of single units, but masks show only"
                " totals; set it to 'mean', or `privacy.secure-aggregation` to false"
            )


class FedMGPExactOptions(FedMGPOptions):
    """The table ``fedmgp.*`` for exact rounds."""

    def check(self, core: CoreConfig) -> None:
        """Raise ConfigError for keys that exact rounds do not support."""
        self._check_core(core)
        if core.model.likelihood != "gaussian" or core.optimizer.batch_size:
            raise ConfigError(
                "`method` = 'fedmgp-exact' needs `model.likelihood` = 'gaussian' and `optimizer.batch-size` = 0; take"
                " 'fedmgp'"
            )
        if self.aggregation not in ("mean", "agreement"):
            raise ConfigError(
                f"`fedmgp.aggregation` = {self.aggregation!r} needs `method` = 'fedmgp': statistics of units differ in"
                " scale and coverage, so exact rounds support only 'mean' and 'agreement'"
            )
