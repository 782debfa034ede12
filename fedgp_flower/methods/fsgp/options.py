"""The table ``fsgp.*``."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fedgp_flower.errors import ConfigError
from fedgp_flower.options import Count, Fraction, MethodOptions, Positive, PositiveInt
from fedgp_flower.run.config import CoreConfig

STATIONARY = ("rbf", "matern32", "matern52")
"""Kernels of one amplitude with which differential privacy bounds a row."""


class FSGPOptions(MethodOptions):
    """The table ``fsgp.*``."""

    table: ClassVar[str] = "fsgp"
    budgets: ClassVar[frozenset[str]] = frozenset({"exchanges"})
    other_clients: ClassVar[tuple[str, ...]] = (
        "fedgp_flower.methods.fsgp.private_client:PrivateClient",
        "fedgp_flower.methods.fsgp.mixture_client:MixtureClient",
    )
    accounted: ClassVar[bool] = True
    mixes: ClassVar[bool] = True

    objective: Literal["profiled", "exact", "average"] = "profiled"
    """``profiled``: the bound of all rows in about twenty exchanges, from where the sites' own fits and their priors
    say instead of ``model.lengthscale``, ``outputscale`` and ``noise``; ``exact``: the same bound,
    one evaluation a round, L-BFGS or Adam at the server; ``average``: the paper's local steps."""
    fraction: Fraction = 1.0
    """Share ρ of the sites that take part in a round of ``average``; at least one does."""
    server_optimizer: Literal["fedavg", "fedadam", "fedyogi", "fedmedian", "fedtrimmedavg"] = "fedavg"
    """``average``: Flower's rule that combines the sites' parameters; the last two withstand a few sites that lie."""
    exact_optimizer: Literal["lbfgs", "adam"] = "lbfgs"
    """``exact``: what the server does with the exact gradient."""
    server_learning_rate: Positive = 0.1
    """Of ``fedadam``, ``fedyogi`` and ``adam``."""
    exchanges: Count = 0
    """``profiled``, and other likelihoods than the Gaussian one: most exchanges with every site in which it trains,
    those before the first round among them; 0 is 20 for the one, whose rounds are two, and 60 for the others, whose
    rounds are one. More go on improving the bound, also when a run is resumed. Under masks keys, means and spreads take
    three more, which do not count here, so that the rounds are the same."""
    intervals: bool = True
    """``profiled``: intervals of lengthscales for the report, by the curvature of the bound at the end: two exchanges
    after training, which do not count above, of sums at D + 1 parameters."""
    small_sites: Literal["warn", "cap", "masks"] = "warn"
    """``profiled``: sums of a site with fewer than three rows for each inducing point are nearly its rows. ``warn``
    names such sites; ``cap`` lowers M to a third of the smallest site's rows; ``masks`` refuses them in the clear.
    Under masks none of it is needed."""
    tolerance: Annotated[float, Field(ge=0)] = 1e-6
    """``exact``, ``profiled``: stop when the bound per row changes less than this, relative to its size."""

    trials: PositiveInt = 1
    """With ``privacy.epsilon``: how many lengthscales are tried, by factors of two around ``model.lengthscale``; they
    share the budget."""

    def client_for(self, core: CoreConfig) -> str:
        """The site's half that adds noise, where there is a budget, or that predicts with several hyperparameters."""
        if core.privacy.epsilon:
            return self.other_clients[0]
        return self.other_clients[1] if self.may_mix(core) and core.model.hyperparameters != "point" else ""

    def may_mix(self, core: CoreConfig) -> bool:
        """Whether predictions can be over several hyperparameters."""
        return self.objective == "profiled" and core.model.likelihood == "gaussian" and not core.privacy.epsilon

    def strategy_for(self, core: CoreConfig) -> str:
        """The Strategy of ``fsgp.objective``; of the dual form where the likelihood is not Gaussian."""
        if core.privacy.epsilon:
            return "strategies.fsgp_private:FSGPPrivate"
        if core.model.likelihood != "gaussian":
            return "strategies.fsgp_duals:FSGPDuals"
        if self.may_mix(core) and core.model.hyperparameters != "point":
            return "strategies.fsgp_laplace:FSGPLaplace"
        strategies = {
            "exact": "strategies.fsgp_exact:FSGPExact",
            "profiled": "strategies.fsgp_profiled:FSGPProfiled",
            "average": "strategies.fsgp:FSGPAveraging",
        }
        return strategies[self.objective]

    @property
    def hyperprior(self) -> str:
        """A penalty holds lengthscales that the data leave open."""
        return "lengthscales" if self.objective == "profiled" else super().hyperprior

    @property
    def usual_inducing(self) -> int:
        """Bytes are spent where exchanges are saved."""
        return 300 if self.objective == "profiled" else super().usual_inducing

    def check(self, core: CoreConfig) -> None:
        """Whole batches, and a Gaussian likelihood for the paper's averages."""
        for key, value in (("objective", self.objective), ("exact-optimizer", self.exact_optimizer)):
            if core.model.likelihood != "gaussian" and value in ("average", "adam"):
                name = core.model.likelihood
                raise ConfigError(f"`model.likelihood` = {name!r}: `fsgp.{key}` = {value!r} needs 'gaussian'")
        if core.optimizer.batch_size:
            raise ConfigError(
                "`optimizer.batch-size`: the collapsed bound of fsgp takes all rows of a site; set it to 0"
            )
        if self.objective == "profiled" and self.exact_optimizer != "lbfgs":
            raise ConfigError(
                f"`fsgp.exact-optimizer` = {self.exact_optimizer!r} is read where `fsgp.objective` is 'exact'; here it"
                " is 'profiled', which has an optimiser of its own"
            )
        if core.model.hyperparameters == "laplace" and not self.may_mix(core):
            raise ConfigError(
                "`model.hyperparameters` = 'laplace' needs `fsgp.objective` = 'profiled', `model.likelihood` ="
                " 'gaussian' and no `privacy.epsilon`; otherwise set it to 'point'"
            )
        core.require_whole_rosters("fsgp.fraction", self.fraction)
        if core.privacy.epsilon and (core.model.likelihood != "gaussian" or core.model.kernel not in STATIONARY):
            raise ConfigError(
                "`privacy.epsilon` needs `model.likelihood` = 'gaussian' and `model.kernel` one of"
                f" {', '.join(STATIONARY)}: k(x, x) is the same for every row then, which bounds what it adds"
            )
