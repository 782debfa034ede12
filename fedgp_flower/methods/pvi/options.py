"""The table ``pvi.*``: form of the posterior, schedule of visits, and local updates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fedgp_flower.config import CoreConfig
from fedgp_flower.errors import ConfigError
from fedgp_flower.methods.sgpr.options import SGPROptions
from fedgp_flower.options import POINT_LIKELIHOODS, Count, MethodOptions, NonNegative

Form = Literal["tied", "free", "cpo"]
LOCAL_KEYS = ("inducing", "factor", "steps", "learning_rate")
"""Fields that the update ``sums`` does not read."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Schedule of the visits, and rule of the merge."""

    schedule: Literal["sequential", "synchronous", "asynchronous"] = "sequential"
    order: Literal["fixed", "random"] = "fixed"
    damping: float = 0.0
    """ρ; 0 means automatic: 1 when sequential, 1/K of the participating sites otherwise."""
    deletion: bool = True
    split_prior: bool = False
    """The context is p^(N_k/N), without other factors."""
    passes: int = 0
    """Visits of every site; 0 means no limit."""
    gradient: bool = False
    """Every local update is one gradient step from the current q."""
    concurrency: int = 0
    """Sites that work at once in an asynchronous run; 0 means all."""
    seed: int = 0


PRESETS: Mapping[str, Plan] = MappingProxyType(
    {
        "bcm-same": Plan("synchronous", damping=1.0, passes=1),
        "bcm-split": Plan("synchronous", damping=1.0, deletion=False, split_prior=True, passes=1),
        "vcl": Plan("sequential", damping=1.0, passes=1),
        "streaming-vb": Plan("sequential", damping=1.0, deletion=False, passes=1),
        "global-vi": Plan("synchronous", damping=1.0, gradient=True),
    }
)
"""Special cases that are only a choice of schedule (Ashman et al. 2022, Sections 2.4 and 4): Bayesian committee
machines, variational continual learning, streaming VB, and global VI (Property 3.1)."""


class PVIOptions(MethodOptions):
    """The table ``pvi.*``. ``pvi-glm`` and ``pvi-bnn`` read its schedule, ``pvi-bnn`` also steps and learning rate."""

    table: ClassVar[str] = "pvi"
    likelihoods: ClassVar[frozenset[str]] = POINT_LIKELIHOODS
    budgets: ClassVar[frozenset[str]] = frozenset({"exchanges"})

    preset: Literal["none", "bcm-same", "bcm-split", "vcl", "streaming-vb", "global-vi"] = "none"
    """A special case, which sets schedule, damping and deletion. ``global-vi``: every update is a natural gradient step
    of length ``pvi.damping``."""
    schedule: Literal["sequential", "synchronous", "asynchronous"] = "sequential"
    """Visit sites one after another, all at once, or each as soon as it has answered."""
    order: Literal["fixed", "random"] = "fixed"
    """``sequential``: order of the sites in each pass."""
    concurrency: Count = 0
    """``asynchronous``: sites that work at once; 0 is all of them."""
    damping: Annotated[float, Field(ge=0, le=1)] = 0.0
    """ρ of Gaussian factors; 0: 1 when one site works at a time, else 1/K of those that do. Pseudo-observations are
    not damped."""
    deletion: bool = True
    """Remove a site's factor before it is updated; otherwise rows count again at every visit."""
    local_update: Literal["sums", "adam"] = "sums"
    """``sums``: Z and β from sums of all rows, as in ``sgpr`` or ``svgp``, then each site's factor of u, exact with
    Gaussian noise. ``adam``: sites maximise a local bound over factor, Z and β."""
    factor: Form = "tied"
    """``adam``: pseudo-observations with noise tied to σ², or free; ``cpo``: a Gaussian factor of u."""
    inducing: Literal["distribution", "average", "fixed"] = "distribution"
    """``adam``: distributions of Z and β; a point Z that is averaged; or Z and β at their initial values."""
    exchanges: Count = 0
    """``sums``: most exchanges with every site; 0: as many as ``sgpr`` or ``svgp`` would, up to 60."""
    steps: Count = 0
    """Steps of ``adam`` in a visit, twice as many in the first; 0: 150. Most steps of ``pvi-bnn``; 0: 300."""
    learning_rate: NonNegative = 0.0
    """Learning rate of ``adam``; 0: 0.03, ``pvi-bnn`` 0.01."""

    def plan(self, seed: int = 0) -> Plan:
        """Schedule, damping and deletion; a preset overrides their keys."""
        if self.preset != "none":
            chosen = replace(PRESETS[self.preset], order=self.order, seed=seed)
            return replace(chosen, damping=self.damping or 1.0) if chosen.gradient else chosen
        chosen = Plan(self.schedule, self.order, self.damping, self.deletion)
        return replace(chosen, concurrency=self.concurrency, seed=seed)

    @property
    def agrees(self) -> bool:
        """Whether sums over all rows determine Z and β before the visits."""
        return self.local_update == "sums"

    @property
    def default_inducing(self) -> int:
        """The default of ``sgpr`` if Z and β come from sums."""
        return 300 if self.agrees else super().default_inducing

    def kernel_for(self, likelihood: str) -> str:
        """Return the kernel of ``sgpr`` if Z and β come from its sums."""
        return SGPROptions.default_kernel if self.agrees and likelihood == "gaussian" else self.default_kernel

    @property
    def hyperprior(self) -> str:
        """The hyperprior of ``sgpr``, or LN(0, 1) for local updates."""
        return "weak" if self.agrees else "log-normal"

    @property
    def product(self) -> tuple[str, ...]:
        """Those of Z and β that have a prior, if sites refine them."""
        return {"distribution": ("inducing", "hyper"), "average": ("hyper",), "fixed": ()}[self.inducing]

    @property
    def function(self) -> str:
        """The part of an answer that is a site's factor of u, if sites refine Z and β."""
        return "values" if self.factor == "cpo" else "points"

    def check(self, core: CoreConfig) -> None:
        """Raise ConfigError for an unsupported combination of keys."""
        update = f"`pvi.local-update` = {self.local_update!r}"
        (self._check_sums if self.agrees else self._check_local)(core, update)

    def _check_local(self, core: CoreConfig, update: str) -> None:
        plan, points = self.plan(), self.function == "points"
        if points and 0.0 < plan.damping < 1.0 and not self.product:
            raise ConfigError(
                "`pvi.damping`: it has no effect at fixed Z and β, because pseudo-observations are replaced as a whole;"
                " set it to 0 or 1, or `pvi.factor` to 'cpo'"
            )
        if plan.gradient or plan.split_prior:
            raise ConfigError(f"`pvi.preset` = {self.preset!r} is not for {update}; set that to 'sums'")
        if not plan.deletion and points:
            raise ConfigError("without deletion factors multiply: set `pvi.factor` = 'cpo', or fix Z and β")
        if unread := core.optimizer.unread("batch_size"):
            raise ConfigError(
                f"{unread}: pvi reads only `optimizer.batch-size`; steps and rate of a visit are `pvi.steps` and"
                " `pvi.learning-rate`"
            )
        core.require_float64_on_cpu()

    def _check_sums(self, core: CoreConfig, update: str) -> None:
        usual = PVIOptions()
        if names := [name for name in LOCAL_KEYS if getattr(self, name) != getattr(usual, name)]:
            keys = ", ".join(f"`pvi.{name.replace('_', '-')}`" for name in names)
            raise ConfigError(f"{keys}: {update} ignores it; try 'adam'")
        if unread := core.optimizer.unread():
            raise ConfigError(f"{unread}: {update} has no local steps")
        if core.privacy.secure_aggregation:
            raise ConfigError(
                f"`privacy.secure-aggregation`: {update} needs the factor of every site, which masks hide; set it"
                " to false, or take method 'sgpr', which gets the same posterior from totals"
            )
        if core.model.likelihood != "gaussian" and self.plan().schedule == "asynchronous":
            raise ConfigError(f"`pvi.schedule` = 'asynchronous': {update} needs `model.likelihood` = 'gaussian' for it")
