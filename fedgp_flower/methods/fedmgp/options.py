"""The table ``fedmgp.*``."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fedgp_flower.config import CoreConfig
from fedgp_flower.errors import ConfigError
from fedgp_flower.options import Count, Fraction, MethodOptions, Positive, PositiveInt

OF_EXACT = ("mean", "agreement", "sum")
"""Rules of exact rounds; those of Algorithm 2 are in ``strategies.server.aggregators``."""
OF_TOTALS = ("mean", "sum")
"""Rules that need no more than the sum over units."""
START_RATIO = 3.0
"""Lengthscale of every further latent function over the one before, at the start: alike, they would stay so."""
UNSMOOTHED_ROUNDS = 10
"""First exact rounds of a start in which units do not smooth yet, for several latent functions or inputs."""


class FedMGPOptions(MethodOptions):
    """How units share latent functions; the number of pseudo-inputs J is ``model.num-inducing``."""

    table: ClassVar[str] = "fedmgp"

    covariance: Literal["convolved", "lmc"] = "convolved"
    """``convolved``: units are smoothed, scaled views of shared functions; ``lmc``: scaled views, the linear model of
    coregionalisation."""
    latents: PositiveInt = 1
    """Number I of shared latent functions."""
    start_multiple: Positive = 1.0
    """Lengthscale of the first latent function at the start, in spacings of the pseudo-inputs."""
    aggregation: str = "mean"
    """``fedmgp``: ``mean``, ``loss-weighted``, ``norm-clipped``, ``median``, ``trimmed-mean``, ``krum``,
    ``multi-krum``, ``staleness-weighted``, and ``agreement`` (units that share g with most others) for Gaussian noise
    and one latent function. ``fedmgp-exact``: ``mean``, ``agreement``, or ``sum``, which asks for the sum over units
    alone, so that a unit counts only in rounds it answers; under masks ``mean`` does the same."""
    fraction: Fraction = 1.0
    """Share ρ of the units that take part in a round; at least one does."""
    starts: Count = 0
    """``fedmgp-exact``: starts that are tried; the one with the best bound goes on. 0: three for several latent
    functions, as far as ``num-server-rounds`` allows, otherwise one."""
    start_rounds: PositiveInt = 20
    """Rounds of each start, where there are several."""
    local_steps: PositiveInt = 20
    """``fedmgp``: local steps E of Algorithm 2; rate and batch size are ``optimizer.*``."""
    natural_step: Fraction = 0.03
    """``fedmgp``: step size ρ of local steps on q(u), for Gaussian noise."""
    trim: Annotated[float, Field(ge=0, lt=0.5)] = 0.2
    """``trimmed-mean``: share cut from each end of every coordinate."""
    malicious: Count = 0
    """``krum`` and ``multi-krum``: number f of bad units to withstand among 2f + 3 or more."""
    select: PositiveInt = 1
    """``multi-krum``: units that are averaged."""

    @property
    def multiples(self) -> list[float]:
        """Lengthscales of the latent functions at the start, in spacings of the pseudo-inputs."""
        return [self.start_multiple * START_RATIO**i for i in range(self.latents)]

    def check(self, core: CoreConfig) -> None:
        """Refuse what Algorithm 2 cannot do; the Strategy checks the name of the rule."""
        self._check_core(core)
        if self.aggregation == "sum":
            raise ConfigError("`fedmgp.aggregation` = 'sum' is a rule of exact rounds: set `method` = 'fedmgp-exact'")
        if self.aggregation == "agreement" and (core.model.likelihood != "gaussian" or self.latents > 1):
            raise ConfigError(
                "`fedmgp.aggregation` = 'agreement' needs `model.likelihood` = 'gaussian' and one latent function"
            )
        if core.optimizer.name != "adam":
            raise ConfigError(f"`optimizer.name` = {core.optimizer.name!r}: local steps of fedmgp take 'adam'")
        if self.starts > 1:
            raise ConfigError(
                "`fedmgp.starts` > 1 needs `method` = 'fedmgp-exact': starts are compared by their bounds"
            )

    def _check_core(self, core: CoreConfig) -> None:
        if core.model.kernel != "rbf":
            raise ConfigError(f"`model.kernel` = {core.model.kernel!r}: a convolution in closed form needs 'rbf'")
        if core.device == "cuda" or core.precision != "float64":
            raise ConfigError("`device`, `precision`: fedmgp computes on the CPU in float64")
        if not core.model.ard:
            raise ConfigError("`model.ard` = false: every latent function of fedmgp has a lengthscale for each input")
        if not core.standardise:
            raise ConfigError("`standardise` = false: fedmgp places pseudo-inputs where standardised inputs lie")
        if core.model.num_inducing < 2:
            raise ConfigError("`model.num-inducing` = 1: lengthscales start from the distance of pseudo-inputs; take 2")
        core.require_whole_rosters("fedmgp.fraction", self.fraction)
        if core.privacy.secure_aggregation and self.aggregation not in OF_TOTALS:
            raise ConfigError(
                f"`fedmgp.aggregation` = {self.aggregation!r} weighs, compares or remembers single units, and totals"
                " under masks show none; set it to 'mean', or `privacy.secure-aggregation` to false"
            )


class FedMGPExactOptions(FedMGPOptions):
    """The same table, for exact rounds."""

    def num_starts(self, core: CoreConfig) -> int:
        """How many starts are tried; where the number is not given, as many as leave rounds to go on with."""
        room = (core.num_server_rounds - 1) // self.start_rounds
        return self.starts or (min(3, max(1, room)) if self.latents > 1 else 1)

    def unsmoothed(self, core: CoreConfig, num_inputs: int) -> int:
        """Rounds of a start in which units do not smooth; at most half of them."""
        if self.covariance == "lmc" or self.latents * num_inputs == 1:
            return 0
        each = self.start_rounds if self.num_starts(core) > 1 else core.num_server_rounds
        return min(UNSMOOTHED_ROUNDS, each // 2)

    def check(self, core: CoreConfig) -> None:
        """Refuse what exact rounds cannot do."""
        self._check_core(core)
        if core.model.likelihood != "gaussian" or core.optimizer.batch_size:
            raise ConfigError(
                "`method` = 'fedmgp-exact' needs `model.likelihood` = 'gaussian' and `optimizer.batch-size` = 0; take"
                " 'fedmgp'"
            )
        if self.aggregation not in OF_EXACT:
            raise ConfigError(
                f"`fedmgp.aggregation` = {self.aggregation!r} needs `method` = 'fedmgp': statistics of units differ in"
                f" scale and coverage, so exact rounds know only {', '.join(map(repr, OF_EXACT))}"
            )
        if self.starts > 1 and core.num_server_rounds <= self.starts * self.start_rounds:
            raise ConfigError(
                f"`num-server-rounds` = {core.num_server_rounds} must exceed `fedmgp.starts` × `fedmgp.start-rounds` = "
                f"{self.starts * self.start_rounds}"
            )
