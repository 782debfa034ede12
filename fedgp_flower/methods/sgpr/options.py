"""The keys ``sgpr.*`` of ``sgpr``, ``svgp`` and ``sgpr-private``; ``fsgp`` and ``fgpr`` only have ``averaging.*``."""

from __future__ import annotations

from typing import ClassVar, Literal

from fedgp_flower.config import CoreConfig
from fedgp_flower.errors import ConfigError
from fedgp_flower.options import (
    DEFAULT_KERNEL,
    MULTICLASS,
    POINT_LIKELIHOODS,
    REAL_VALUED,
    SECOND_COLUMN,
    Count,
    MethodOptions,
    PositiveInt,
)

STATIONARY = ("rbf", "matern32", "matern52")
"""Kernels with one amplitude k(x, x), which bounds the sums of a row under differential privacy."""


class SGPROptions(MethodOptions):
    """The table ``sgpr.*``."""

    table: ClassVar[str] = "sgpr"
    likelihoods: ClassVar[frozenset[str]] = frozenset({"gaussian"})
    budgets: ClassVar[frozenset[str]] = frozenset({"exchanges"})
    hyperprior: ClassVar[str] = "weak"
    """The priors matter only for hyperparameters that the data do not determine."""
    default_inducing: ClassVar[int] = 300
    """These methods send more bytes to save exchanges."""
    default_kernel: ClassVar[str] = "warp(rbf + l1)"
    """A smooth and a rough term on learned scales of the inputs; the amplitude of an unneeded term becomes small."""
    default_megabytes: ClassVar[int] = 64
    """Size of sums at 4000 inducing points."""
    where_sites_differ: ClassVar[str] = "`method` = 'hierarchical-gp' learns how each site deviates from the others"

    exchanges: Count = 0
    """Most exchanges with every site in training; 0: up to 60, in ``sgpr`` while a step promises .001 nats a row, in
    ``svgp`` while five gain .0005. A round of ``sgpr`` is two, of ``svgp`` one. Not counted: three that set up
    masks, and three for each number of inducing points after training (``model.max-megabytes``)."""
    small_sites: Literal["warn", "cap", "masks"] = "warn"
    """``sgpr`` in the clear, where a site has fewer than three rows for each inducing point, which nearly reveals them:
    name it; lower M to a third of its rows (``cap``); or refuse (``masks``)."""
    trials: PositiveInt = 1
    """``sgpr-private``: lengthscales tried, by factors of two; they share the budget."""

    def check(self, core: CoreConfig) -> None:
        """Raise ConfigError unless batches are whole."""
        core.require_whole_batches()


class SVGPOptions(SGPROptions):
    """The same table for other likelihoods."""

    likelihoods: ClassVar[frozenset[str]] = POINT_LIKELIHOODS | REAL_VALUED | MULTICLASS | {*SECOND_COLUMN}
    where_sites_differ: ClassVar[str] = ""
    default_kernel: ClassVar[str] = "steps(rbf)"
    takes_steps: ClassVar[bool] = True

    def kernel_for(self, likelihood: str) -> str:
        """Return the default kernel; that for several classes has a linear term and includes multinomial regression."""
        return "rbf + linear" if likelihood in MULTICLASS else self.default_kernel

    def check(self, core: CoreConfig) -> None:
        """Raise ConfigError if the likelihood is Gaussian or batches are not whole."""
        core.require_whole_batches()
        if core.model.likelihood == "gaussian":
            raise ConfigError("`method` = 'svgp' is for every other likelihood; with Gaussian noise take 'sgpr'")


class PrivateSGPROptions(SGPROptions):
    """The same table with a privacy budget."""

    accounted: ClassVar[bool] = True
    where_sites_differ: ClassVar[str] = ""
    default_kernel: ClassVar[str] = DEFAULT_KERNEL
    default_megabytes: ClassVar[int] = 0

    def check(self, core: CoreConfig) -> None:
        """Raise ConfigError without a budget, or without a kernel with the same k(x, x) for all x."""
        core.require_whole_batches()
        if not core.privacy.epsilon:
            raise ConfigError("`method` = 'sgpr-private' needs a budget: set `privacy.epsilon`, or take 'sgpr'")
        if core.model.kernel not in STATIONARY:
            raise ConfigError(
                f"`privacy.epsilon` needs `model.kernel` one of {', '.join(STATIONARY)}: then k(x, x) is the same for"
                " every row and bounds its part of the sums"
            )


class AveragedOptions(MethodOptions):
    """No keys besides ``averaging.*``."""

    likelihoods: ClassVar[frozenset[str]] = SGPROptions.likelihoods

    def check(self, core: CoreConfig) -> None:
        """Raise ConfigError unless batches are whole and masked rounds have all sites."""
        core.require_whole_batches()
        core.require_whole_rosters()
