"""The table ``pvi.*``: which posterior, who is visited when, and what a site does when it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fedgp_flower.errors import ConfigError
from fedgp_flower.options import Count, Fraction, MethodOptions, NonNegative, Positive, PositiveInt
from fedgp_flower.run.config import CoreConfig

Form = Literal["tied", "free", "full", "cpo"]
SUMS = {"preset", "schedule", "order", "fraction", "concurrency", "damping", "deletion"}
SUMS |= {"local_update", "exchanges", "small_sites"}
"""Fields that ``sums`` reads."""
LINEAR = ("analytic", "natural-gradient", "gradient")
"""Local updates of q(v) alone: Z and β are fixed."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How sites are visited and merged."""

    schedule: Literal["sequential", "synchronous", "asynchronous"] = "sequential"
    """One site after the other, all of a round at once, or each as soon as it has answered."""
    order: Literal["fixed", "random", "residual"] = "fixed"
    fraction: float = 1.0
    """Share of the sites of a synchronous round."""
    damping: float = 0.0
    """ρ; 0 means automatic: 1 when sequential, 1/K of the participating sites otherwise."""
    deletion: bool = True
    split_prior: bool = False
    """The context is p^(N_k/N) alone."""
    passes: int = 0
    """Stop after this many visits of every site; 0 goes on until the rounds are over."""
    local_update: str = ""
    """Local update the special case needs; empty leaves the choice."""
    concurrency: int = 0
    """Sites that work at once in an asynchronous run; 0 is all of them."""
    seed: int = 0
    """Of the order of visits."""


PRESETS: Mapping[str, Plan] = MappingProxyType(
    {
        "bcm-same": Plan("synchronous", damping=1.0, passes=1),
        "bcm-split": Plan("synchronous", damping=1.0, deletion=False, split_prior=True, passes=1),
        "vcl": Plan("sequential", damping=1.0, passes=1),
        "streaming-vb": Plan("sequential", damping=1.0, deletion=False, passes=1),
        "global-vi": Plan("synchronous", damping=1.0, local_update="gradient"),
    }
)
"""Special cases that are only a choice of schedule (Ashman et al. 2022, Sections 2.4 and 4): Bayesian committee
machines, variational continual learning, streaming VB, and global VI (Property 3.1)."""


class VisitOptions(MethodOptions):
    """How sites are visited and merged, whatever their factors are about; each method has its own table of these."""

    preset: Literal["none", "bcm-same", "bcm-split", "vcl", "streaming-vb", "global-vi"] = "none"
    """A special case by name; it sets schedule, damping and deletion (and ``gradient`` for ``global-vi``)."""
    schedule: Literal["sequential", "synchronous", "asynchronous"] = "sequential"
    """Sites one after another, all at once, or each when it is ready."""
    order: Literal["fixed", "random", "residual"] = "fixed"
    """``sequential``: in turn, in turn but shuffled, or the site whose last update was the largest."""
    fraction: Fraction = 1.0
    """``synchronous``: share of the sites in a round."""
    concurrency: Count = 0
    """``asynchronous``: sites that work at once; 0 is all of them."""
    damping: Annotated[float, Field(ge=0, le=1)] = 0.0
    """ρ; 0 chooses 1 when one site is merged at a time and nobody else works, else 1/K of the sites that do. It
    holds for Gaussian factors, of Z and β among them; pseudo-observations are replaced as a whole."""
    deletion: bool = True
    """Take the site's own factor out before it updates; without, rows count again at every visit."""

    def plan(self, seed: int = 0) -> Plan:
        """Schedule, damping and deletion; a preset decides them all."""
        if self.preset != "none":
            return replace(PRESETS[self.preset], order=self.order, seed=seed)
        chosen = Plan(self.schedule, self.order, self.fraction, self.damping, self.deletion)
        return replace(chosen, concurrency=self.concurrency, seed=seed)


class PVIOptions(VisitOptions):
    """The table ``pvi.*``."""

    table: ClassVar[str] = "pvi"
    budgets: ClassVar[frozenset[str]] = frozenset({"exchanges"})
    other_clients: ClassVar[tuple[str, ...]] = (
        "fedgp_flower.methods.sgpr.client:SGPRClient",
        "fedgp_flower.methods.sgpr.client:SVGPClient",
    )

    inducing: Literal["distribution", "fixed", "average"] = "distribution"
    """q(Z); Z fixed at its first draw; or federated averaging of a point Z."""
    hyper: Literal["distribution", "fixed"] = "distribution"
    """Log-normal q(β), or β fixed at its initial values."""
    factor: Form = "tied"
    """Pseudo-observations with noise tied to σ², free diagonal, or full; ``cpo``: a Gaussian factor of u itself."""
    local_update: Literal["sums", "replay", "adam", "lbfgs", "analytic", "natural-gradient", "gradient"] = "sums"
    """``sums``: Z and β agreed from sums of all rows, as by ``sgpr``, then the site's factor of u at them: exact with
    Gaussian noise, else a natural gradient; no pseudo-observations. ``replay``: a refit to the others'
    pseudo-observations. The other ones improve a local bound; the last three at fixed Z and β."""
    exchanges: Count = 0
    """``sums``: most exchanges with every site, its first visit among them; 0 is 20 with Gaussian noise, otherwise 60.
    """
    small_sites: Literal["warn", "cap"] = "warn"
    """``sums`` with Gaussian noise: a factor of fewer than three rows for each inducing point is nearly its rows.
    ``warn`` names such sites; ``cap`` lowers M to a third of the smallest site's rows."""
    alpha: NonNegative = 0.01
    """Weight of KL(q(Z) ‖ cavity)."""
    samples: PositiveInt = 4
    """Antithetic draws of (Z, β) per evaluation."""
    prediction_samples: PositiveInt = 100
    """Draws of (Z, β) that a prediction averages over."""
    points_fraction: Fraction = 0.8
    """Pseudo-observations per row of a site, at most."""
    max_points: PositiveInt = 500
    """Pseudo-observations of a site, at most."""
    min_rows_per_pseudo_point: PositiveInt = 5
    """Rows that each pseudo-observation starts as the average of, at least; 1 keeps them near single rows."""
    steps: PositiveInt = 150
    """``adam``: steps of a later visit."""
    first_steps: PositiveInt = 300
    """``adam``: steps of a first visit."""
    learning_rate: Positive = 0.03
    """Of ``adam``."""
    step: Fraction = 1.0
    """``natural-gradient`` and ``gradient``: length of a step."""
    evaluations: PositiveInt = 400
    """L-BFGS evaluations of ``lbfgs``, and of the distillation of ``replay``."""
    refit_evaluations: PositiveInt = 200
    """``replay``: L-BFGS evaluations of the refit at a point."""
    refit_steps: Count = 20
    """``replay``: Adam steps of the refit over distributions; 0 keeps points Z and β."""

    @property
    def agrees(self) -> bool:
        """Whether sums of all rows settle Z and β before sites are visited."""
        return self.local_update == "sums"

    @property
    def usual_inducing(self) -> int:
        """Sums bear as many as those of ``sgpr``."""
        return 300 if self.agrees else super().usual_inducing

    @property
    def hyperprior(self) -> str:
        """That of :mod:`strategies.sgpr` for sums; LN(0, 1) otherwise."""
        return "lengthscales" if self.agrees else "log-normal"

    @property
    def replays(self) -> bool:
        """Whether q(Z) and q(β) are shared values that a refit replaces."""
        return self.local_update == "replay"

    @property
    def definite(self) -> bool:
        """Whether no honest factor of v has a negative precision; a plain gradient step may overshoot."""
        return self.local_update != "gradient"

    @property
    def linear(self) -> bool:
        """Whether Z and β are fixed and sites share factors of v = L⁻¹u."""
        return self.local_update in LINEAR

    @property
    def tied(self) -> bool:
        """Whether the noise of pseudo-observations scales with σ²."""
        return self.factor == "tied"

    @property
    def product(self) -> tuple[str, ...]:
        """Blocks of the product that have a prior; replay shares q(Z) and q(β) instead."""
        if self.linear:
            return ("whitened",)
        kinds = {"inducing": self.inducing, "hyper": self.hyper}
        return () if self.replays else tuple(name for name, kind in kinds.items() if kind == "distribution")

    @property
    def function(self) -> str:
        """The part of an answer that is a site's factor of u or v."""
        return "whitened" if self.linear else "values" if self.factor == "cpo" else "points"

    def form(self, latent: str) -> str:
        """What an answer says of ``inducing`` or ``hyper``."""
        kind = {"distribution": "a distribution", "average": "a value", "fixed": "absent"}[getattr(self, latent)]
        return "a value" if kind == "a distribution" and self.replays and not self.refit_steps else kind

    def strategy_for(self, core: CoreConfig) -> str:
        """The Strategy of ``pvi.local-update`` and ``pvi.schedule``."""
        schedule = self.plan().schedule
        if self.agrees and core.model.likelihood != "gaussian":
            return "strategies.pvi_duals:DualPVI"
        if self.agrees:
            return f"strategies.pvi_sums:{'Asynchronous' if schedule == 'asynchronous' else ''}SummedPVI"
        if self.replays:
            return f"strategies.replay_pvi:{'ParallelReplayPVI' if schedule == 'synchronous' else 'ReplayPVI'}"
        return "strategies.async_pvi:AsynchronousPVI" if schedule == "asynchronous" else "strategies.pvi:PVI"

    def client_for(self, core: CoreConfig) -> str:
        """The site's half of ``pvi.local-update``, by the likelihood."""
        return self.other_clients[core.model.likelihood != "gaussian"] if self.agrees else ""

    def num_points(self, rows: int) -> int:
        """M_k = min(fraction · N_k, cap); the floor of rows per pseudo-observation is applied when they are formed."""
        return max(1, min(int(self.points_fraction * rows), self.max_points))

    def check(self, core: CoreConfig) -> None:
        """Combinations that have a meaning.

        Raises:
            ConfigError: naming the two keys that do not go together.
        """
        plan, update = self.plan(), f"`pvi.local-update` = {self.local_update!r}"
        if plan.local_update and plan.local_update != self.local_update:
            raise ConfigError(f"`pvi.preset` = {self.preset!r} is made of {plan.local_update!r} steps, not of {update}")
        if self.agrees:
            self._check_sums(core, plan, update)
        else:
            self._check_local(core, plan, update)

    def _check_local(self, core: CoreConfig, plan: Plan, update: str) -> None:
        points = self.factor != "cpo" and not self.linear
        if self.replays:
            self._check_replay(core, plan, update)
        if self.linear and (self.inducing, self.hyper) != ("fixed", "fixed"):
            raise ConfigError(f"{update} needs `pvi.inducing` = 'fixed' and `pvi.hyper` = 'fixed'; try 'adam'")
        if points and not self.replays and 0.0 < plan.damping < 1.0 and not self.product:
            raise ConfigError(
                "`pvi.damping`: with Z and β fixed there is nothing to damp, for pseudo-observations are replaced as a"
                " whole; set it to 0 or 1, or `pvi.factor` to 'cpo'"
            )
        if self.local_update == "analytic" and core.model.likelihood != "gaussian":
            raise ConfigError(f"{update} needs `model.likelihood` = 'gaussian'; try 'natural-gradient'")
        if not plan.deletion and points:
            raise ConfigError("without deletion factors multiply: set `pvi.factor` = 'cpo', or fix Z and β")
        if plan.split_prior and not self.linear:
            raise ConfigError(
                f"`pvi.preset` = {self.preset!r} splits the prior of v: {update} must be 'analytic' or so"
            )
        if core.optimizer.batch_size and self.local_update != "adam":
            raise ConfigError(f"`optimizer.batch-size`: {update} takes all rows of a site; set it to 0")
        if unread := core.optimizer.unread("batch_size"):
            raise ConfigError(
                f"{unread}: of `optimizer` pvi reads `batch-size` alone; steps and rate of a visit are "
                "`pvi.first-steps`, `pvi.steps`, `pvi.evaluations` and `pvi.learning-rate`"
            )
        self._check_placement(core)

    def _check_sums(self, core: CoreConfig, plan: Plan, update: str) -> None:
        usual = PVIOptions()
        names = [n for n in type(self).model_fields if n not in SUMS and getattr(self, n) != getattr(usual, n)]
        if names:
            keys = ", ".join(f"`pvi.{name.replace('_', '-')}`" for name in names)
            raise ConfigError(f"{keys}: {update} does not read it; try 'replay' or 'adam'")
        if unread := core.optimizer.unread():
            raise ConfigError(f"{unread}: {update} takes no local steps")
        if plan.split_prior:
            raise ConfigError(f"`pvi.preset` = {self.preset!r} splits the prior of v: {update} must be 'analytic'")
        if core.privacy.secure_aggregation:
            raise ConfigError(
                f"`privacy.secure-aggregation`: {update} keeps a factor of every site, which masks would hide; set it"
                " to false, or take method 'sgpr', whose posterior is the same and needs totals alone"
            )
        if core.model.likelihood != "gaussian" and plan.schedule == "asynchronous":
            raise ConfigError(f"`pvi.schedule` = 'asynchronous': {update} needs `model.likelihood` = 'gaussian' for it")

    def _check_replay(self, core: CoreConfig, plan: Plan, update: str) -> None:
        if self.factor != "tied" or core.model.likelihood != "gaussian":
            raise ConfigError(f"{update} needs `pvi.factor` = 'tied' and `model.likelihood` = 'gaussian'; try 'adam'")
        if self.inducing == "average":
            raise ConfigError(f"{update} refits Z for all sites: `pvi.inducing` = 'average' needs 'adam' or 'lbfgs'")
        if plan.schedule == "asynchronous":
            raise ConfigError(
                f"{update} shares q(Z), q(β) fitted to all sites, which a late answer would undo: "
                "`pvi.schedule` = 'asynchronous' needs `pvi.local-update` = 'adam' or 'lbfgs'"
            )
        if 0.0 < plan.damping < 1.0:
            raise ConfigError(f"{update} replaces pseudo-observations as a whole: `pvi.damping` should be 0 or 1")
        if self.preset == "bcm-same":
            raise ConfigError(f"`pvi.preset` = 'bcm-same' combines posteriors of the sites, and {update} has none")

    @staticmethod
    def _check_placement(core: CoreConfig) -> None:
        if core.precision != "float64":
            raise ConfigError("`precision`: pvi works in 'float64'")
        if core.device == "cuda":
            raise ConfigError("`device`: pvi works on the 'cpu'")
