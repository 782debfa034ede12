"""The table ``sgpr.*`` of ``sgpr``, ``svgp`` and ``sgpr-private``; ``fsgp`` and ``fgpr`` read ``averaging.*`` alone."""

from __future__ import annotations

from typing import ClassVar, Literal

from fedgp_flower.config import CoreConfig
from fedgp_flower.errors import ConfigError
from fedgp_flower.options import (
    DEFAULT_KERNEL,
    DEFAULT_LIKELIHOODS,
    MULTICLASS,
    REAL_VALUED,
    SECOND_COLUMN,
    Count,
    MethodOptions,
    PositiveInt,
)

STATIONARY = ("rbf", "matern32", "matern52")
"""Kernels of one amplitude with which differential privacy bounds a row."""


class SGPROptions(MethodOptions):
    """The table ``sgpr.*``."""

    table: ClassVar[str] = "sgpr"
    budgets: ClassVar[frozenset[str]] = frozenset({"exchanges"})
    hyperprior: ClassVar[str] = "weak"
    """Weak priors hold what the data leave open."""
    default_inducing: ClassVar[int] = 300
    """These methods send more bytes to save exchanges."""
    default_kernel: ClassVar[str] = "warp(rbf + l1)"
    """Smooth and rough, on a learned scale of each input; what the data do not need gets a small scale."""
    default_megabytes: ClassVar[int] = 64
    """Of sums at 4000 inducing points."""

    exchanges: Count = 0
    """Most exchanges with every site in training; 0: while a step promises .001 nats a row, up to 60. A round of
    ``sgpr`` is two, of ``svgp`` one. Not counted: three that set up masks, and three for each number of inducing points
    after training (``model.max-megabytes``)."""
    small_sites: Literal["warn", "cap", "masks"] = "warn"
    """``sgpr`` in the clear, where a site has fewer than three rows for each inducing point, which nearly reveals them:
    name it; lower M to a third of its rows (``cap``); or refuse (``masks``)."""
    trials: PositiveInt = 1
    """``sgpr-private``: lengthscales tried, by factors of two; they share the budget."""

    def check(self, core: CoreConfig) -> None:
        """A Gaussian likelihood and whole batches."""
        core.require_whole_batches()
        core.require_gaussian()


class SVGPOptions(SGPROptions):
    """The same table for other likelihoods."""

    likelihoods: ClassVar[frozenset[str]] = DEFAULT_LIKELIHOODS | REAL_VALUED | MULTICLASS | {*SECOND_COLUMN}

    default_kernel: ClassVar[str] = DEFAULT_KERNEL
    default_megabytes: ClassVar[int] = 0

    def kernel_for(self, likelihood: str) -> str:
        """For several classes with a linear part: multinomial regression is a special case."""
        return "rbf + linear" if likelihood in MULTICLASS else self.default_kernel

    def check(self, core: CoreConfig) -> None:
        """Another likelihood than the Gaussian one, and whole batches."""
        core.require_whole_batches()
        if core.model.likelihood == "gaussian":
            raise ConfigError("`method` = 'svgp' is for every other likelihood; with Gaussian noise take 'sgpr'")


class PrivateSGPROptions(SGPROptions):
    """The same table with a privacy budget."""

    accounted: ClassVar[bool] = True
    default_kernel: ClassVar[str] = DEFAULT_KERNEL
    default_megabytes: ClassVar[int] = 0

    def check(self, core: CoreConfig) -> None:
        """A budget, Gaussian noise, and a kernel with the same k(x, x) everywhere."""
        core.require_whole_batches()
        if not core.privacy.epsilon:
            raise ConfigError("`method` = 'sgpr-private' needs a budget: set `privacy.epsilon`, or take 'sgpr'")
        if core.model.likelihood != "gaussian" or core.model.kernel not in STATIONARY:
            raise ConfigError(
                "`privacy.epsilon` needs `model.likelihood` = 'gaussian' and `model.kernel` one of"
                f" {', '.join(STATIONARY)}: k(x, x) is the same for every row then, which bounds what it adds"
            )


class AveragedOptions(MethodOptions):
    """No table beside ``averaging.*``."""

    def check(self, core: CoreConfig) -> None:
        """A Gaussian likelihood, whole batches, and under masks all sites in every round."""
        core.require_whole_batches()
        core.require_gaussian()
        core.require_whole_rosters("averaging.fraction", core.averaging.fraction)
