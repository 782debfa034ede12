"""The table ``fedmgp.*``."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fedgp_flower.errors import ConfigError
from fedgp_flower.options import Count, Fraction, MethodOptions, NonNegative, Positive, PositiveInt
from fedgp_flower.run.config import CoreConfig

AGREEMENT = "agreement"
OF_EXACT = ("mean", AGREEMENT, "sum")
"""Rules of exact rounds; those of Algorithm 2 are the table of ``strategies.server.aggregators``."""


OF_TOTALS = ("mean", "sum")
"""Rules that need no more than the sum over units."""


class FedMGPOptions(MethodOptions):
    """How units share latent functions; the number of pseudo-inputs J is ``model.num-inducing``."""

    table: ClassVar[str] = "fedmgp"
    other_clients: ClassVar[tuple[str, ...]] = (
        "fedgp_flower.methods.fedmgp.deviating_client:DeviatingClient",
        "fedgp_flower.methods.fedmgp.either_client:EitherClient",
    )

    update: Literal["auto", "exact", "pseudo-gradient"] = "auto"
    """``exact``: the best q(g) from sums; ``pseudo-gradient``: the paper's Algorithm 2, then ``final-rounds`` exact
    rounds where the likelihood is Gaussian; ``auto``: exact for a Gaussian likelihood and whole batches."""
    covariance: Literal["auto", "convolved", "lmc", "deviations"] = "auto"
    """``convolved``: units are smoothed, scaled views of shared functions; ``lmc``: scaled ones, the linear model of
    coregionalisation; ``deviations``: one shared curve and a deviation of each unit with shared hyperparameters, along
    one input, with bands that are honest where units are no exact mixtures. ``auto``: ``convolved``, and beside it
    ``deviations`` where there is one input, one latent function, exact rounds with all units and ``mean`` or ``sum``,
    and at most 200 rows a unit; the one with the higher bound of all rows predicts."""
    latents: PositiveInt = 1
    """Number I of shared latent functions."""
    start_multiple: Positive = 1.0
    """Lengthscale of the first latent function at the start, in spacings of the pseudo-inputs."""
    start_ratio: Positive = 3.0
    """Lengthscale of every further latent function over the one before, at the start."""
    starts: Count = 0
    """Starts that are tried in exact mode; the one with the best bound goes on. 0: three for several latent functions,
    as far as ``num-server-rounds`` allows, otherwise one."""
    start_rounds: PositiveInt = 20
    """Rounds of each start, where there are several."""
    lmc_rounds: Count = 10
    """First exact rounds of a start in which units do not smooth yet, for several latent functions or inputs: of the
    linear model of coregionalisation, from which smoothing is then released. At most half of the rounds of a start."""
    aggregation: str = "mean"
    """Exact rounds: ``mean``, ``agreement`` (units that share g with most others), or ``sum``, which asks for the sum
    over units alone, so that a unit counts only in rounds it answers; under masks ``mean`` is that too.
    Pseudo-gradients: ``mean``, ``loss-weighted``, ``norm-clipped``, ``median``, ``trimmed-mean``, ``krum``,
    ``multi-krum``, ``staleness-weighted``, and with ``natural`` parameters of one latent function ``agreement``."""
    fraction: Fraction = 1.0
    """Share ρ of the units that take part in a round; at least one does."""
    pseudo_inputs: Literal["auto", "grid", "scattered"] = "auto"
    """A regular grid over the range of the inputs, or points drawn from sums of the inputs; ``auto``: a grid
    where ``model.num-inducing`` gives it three points or more along every input."""
    margin: NonNegative = 0.025
    """How far the grid goes beyond the inputs at each end, as a share of their range."""
    perturbation: NonNegative = 0.0
    """Standard deviation of normal noise on the pseudo-inputs, in standardised units: how much does the grid matter?"""
    learn_inducing: bool = False
    """Pseudo-gradients move the pseudo-inputs too."""
    center_target: bool = False
    """Subtract the mean of all targets. Off by default: units scale g, and a common offset would be scaled with it."""
    weights: Literal["equal", "examples"] = "equal"
    """Weights p_m of Algorithm 2: 1/M, or N_m / Σ N_m."""
    parametrisation: Literal["cholesky", "natural"] = "cholesky"
    """What pseudo-gradients move and the server averages of q(u): ``cholesky``, means and Cholesky factors, as in
    the paper, or ``natural`` parameters (Gaussian likelihood), whose averages do not drift and which no exact rounds
    follow."""
    natural_step: Fraction = 0.03
    """Step ρ of ``natural`` parameters."""
    local_steps: PositiveInt = 20
    """Local steps E of Algorithm 2; optimiser, rate and batch size are ``optimizer.*``."""
    final_rate: Fraction = 0.005
    """Learning rate of the last local steps over that of the first; it falls by the same factor every round."""
    server_optimizer: Literal["fedavg", "fedadam"] = "fedavg"
    """``fedavg``: θ ← θ − ηv with ``server-momentum``; ``fedadam``: Flower's Adam on the merged pseudo-gradient."""
    server_step: Positive = 1.0
    """Step size η of the server; the learning rate of ``fedadam``, which wants about 0.01."""
    server_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Momentum of the server\'s steps."""
    final_rounds: Count = 5
    """Exact rounds at the end of a run of pseudo-gradients, where the likelihood is Gaussian; after a rule other than
    ``mean`` and ``staleness-weighted`` they use ``agreement``."""
    clip_norm: NonNegative = 0.0
    """``norm-clipped``: longest pseudo-gradient; 0 takes the ``clip-quantile`` of this round's norms."""
    clip_quantile: Fraction = 0.5
    """``norm-clipped``: quantile of the norms of a round."""
    trim: Annotated[float, Field(ge=0, lt=0.5)] = 0.2
    """``trimmed-mean``: share cut from each end of every coordinate."""
    malicious: Count = 0
    """``krum`` and ``multi-krum``: number f of bad units to withstand among 2f + 3 or more."""
    select: PositiveInt = 1
    """``multi-krum``: units that are averaged."""
    staleness_decay: NonNegative = 1.0
    """``staleness-weighted``: a unit that did not answer in time is stood in for by the pseudo-gradient it sent t
    rounds ago, which counts (1 + t)^(−decay)."""
    patience: Count = 5
    """``staleness-weighted``: rounds after which a stand-in is forgotten; a reply after ``round-timeout`` is lost."""
    own_deviation: bool = False
    """Predict with a deviation of the unit's own from what it shares and with uncertain amplitudes (Gaussian
    likelihood): wider, more honest bands where units are no exact mixtures of the latent functions."""
    flat_threshold: Fraction = 0.1
    """A unit counts as flat when g explains less than this share of its signal; a run collapsed when most are flat."""

    def exact(self, core: CoreConfig) -> bool:
        """Whether all rounds are exact."""
        whole = core.model.likelihood == "gaussian" and core.optimizer.batch_size == 0
        return self.update == "exact" or (self.update == "auto" and whole)

    def num_starts(self, core: CoreConfig) -> int:
        """How many starts are tried; as many as leave rounds to go on with, where the number is not given."""
        room = (core.num_server_rounds - 1) // self.start_rounds
        return self.starts or (min(3, max(1, room)) if self.latents > 1 else 1)

    def unsmoothed(self, core: CoreConfig, num_inputs: int) -> int:
        """Rounds of a start in which units do not smooth; at most half of them."""
        if self.covariance == "lmc" or self.latents * num_inputs == 1:
            return 0
        each = self.start_rounds if self.num_starts(core) > 1 else core.num_server_rounds
        return min(self.lmc_rounds, each // 2)

    @property
    def multiples(self) -> list[float]:
        """Lengthscales of the latent functions at the start, in spacings of the pseudo-inputs."""
        return [self.start_multiple * self.start_ratio**i for i in range(self.latents)]

    @property
    def deviations(self) -> bool:
        """Whether units deviate from one shared curve."""
        return self.covariance == "deviations"

    def judged(self, core: CoreConfig) -> bool:
        """Whether the bounds of two covariances are compared."""
        plain = self.latents == 1 and self.fraction == 1 and not self.own_deviation and self.num_starts(core) == 1
        return self.covariance == "auto" and self.exact(core) and plain and self.aggregation in OF_TOTALS

    def client_for(self, core: CoreConfig) -> str:
        """That of deviations, of both covariances, or the one of the method's row."""
        if self.judged(core):
            return self.other_clients[1]
        return self.other_clients[0] if self.deviations else ""

    def strategy_for(self, core: CoreConfig) -> str:
        """Exact rounds, pseudo-gradients, or these with exact rounds at their end; or deviations; or both beside."""
        if self.judged(core):
            return "strategies.fedmgp_judged:FedMGPJudged"
        if self.deviations:
            return "strategies.fedmgp_deviations:FedMGPDeviations"
        if self.exact(core):
            return "strategies.fedmgp_exact:FedMGPExact"
        if self.parametrisation == "natural":
            return "strategies.fedmgp_natural:FedMGPNatural"
        ends = self.final_rounds and core.model.likelihood == "gaussian"
        return "strategies.fedmgp_then_exact:FedMGPThenExact" if ends else "strategies.fedmgp:FedMGP"

    def check(self, core: CoreConfig) -> None:
        """A squared-exponential kernel, and a rule that fits the update."""
        self._check_core(core)
        self._check_totals(core)
        if core.model.kernel != "rbf":
            raise ConfigError(f"`model.kernel` = {core.model.kernel!r}: a convolution in closed form needs 'rbf'")
        self._check_deviations(core)
        self._check_natural(core)
        exact = self.exact(core)
        if exact and (core.model.likelihood != "gaussian" or core.optimizer.batch_size):
            raise ConfigError(
                "`fedmgp.update` = 'exact' needs `model.likelihood` = 'gaussian' and `optimizer.batch-size` = 0; "
                "take 'pseudo-gradient'"
            )
        if exact and self.aggregation not in OF_EXACT:
            raise ConfigError(
                f"`fedmgp.aggregation` = {self.aggregation!r} needs `fedmgp.update` = 'pseudo-gradient': statistics of "
                f"units differ in scale and coverage, so exact rounds know only {', '.join(map(repr, OF_EXACT))}"
            )
        readable = self.parametrisation == "natural" and self.latents == 1
        if not exact and self.aggregation in OF_EXACT[1:] and not (readable and self.aggregation == AGREEMENT):
            raise ConfigError(
                f"`fedmgp.aggregation` = {self.aggregation!r} needs exact rounds: it is about statistics. 'agreement' "
                "also takes `fedmgp.parametrisation` = 'natural' with one latent function"
            )
        if exact and self.learn_inducing:
            raise ConfigError("`fedmgp.learn-inducing` needs `fedmgp.update` = 'pseudo-gradient'")
        if not exact and core.optimizer.name == "lbfgs":
            raise ConfigError("`optimizer.name` = 'lbfgs': local steps of fedmgp take 'adam' or 'sgd'")
        if not exact and self.starts > 1:
            raise ConfigError("`fedmgp.starts` > 1 needs exact rounds: starts are compared by their bounds")
        if self.starts > 1 and core.num_server_rounds <= self.starts * self.start_rounds:
            raise ConfigError(
                f"`num-server-rounds` = {core.num_server_rounds} must exceed `fedmgp.starts` × `fedmgp.start-rounds` = "
                f"{self.starts * self.start_rounds}"
            )
        if self.server_optimizer == "fedadam" and self.server_momentum:
            raise ConfigError("`fedmgp.server-momentum` is of 'fedavg'; 'fedadam' has its own")

    def _check_natural(self, core: CoreConfig) -> None:
        if self.parametrisation == "natural" and (
            self.exact(core) or core.model.likelihood != "gaussian" or self.learn_inducing
        ):
            raise ConfigError(
                "`fedmgp.parametrisation` = 'natural' needs `fedmgp.update` = 'pseudo-gradient', `model.likelihood` = "
                "'gaussian' and `fedmgp.learn-inducing` = false"
            )

    def _check_deviations(self, core: CoreConfig) -> None:
        if self.deviations and (not self.exact(core) or self.latents > 1 or self.aggregation not in ("mean", "sum")):
            raise ConfigError(
                "`fedmgp.covariance` = 'deviations' needs one latent function, whole batches of a Gaussian likelihood "
                "and `fedmgp.aggregation` = 'mean' or 'sum', which are the same for it"
            )

    def _check_totals(self, core: CoreConfig) -> None:
        """Under masks there are all units of a roster, and nothing but their sum."""
        core.require_whole_rosters("fedmgp.fraction", self.fraction)
        if core.privacy.secure_aggregation and self.aggregation not in OF_TOTALS:
            raise ConfigError(
                f"`fedmgp.aggregation` = {self.aggregation!r} weighs, compares or remembers single units, and totals"
                " under masks show none; set it to 'mean', or `privacy.secure-aggregation` to false"
            )
        if core.privacy.secure_aggregation and self.parametrisation == "natural":
            raise ConfigError("`fedmgp.parametrisation` = 'natural' is not summed under masks; take 'cholesky'")

    @staticmethod
    def _check_core(core: CoreConfig) -> None:
        """No core key is accepted and then ignored."""
        if core.device == "cuda" or core.precision != "float64":
            raise ConfigError("`device`, `precision`: fedmgp computes on the CPU in float64")
        if not core.model.ard:
            raise ConfigError("`model.ard` = false: every latent function of fedmgp has a lengthscale for each input")
        if not core.standardise:
            raise ConfigError("`standardise` = false: fedmgp places pseudo-inputs where standardised inputs lie")
        if core.model.num_inducing < 2:
            raise ConfigError("`model.num-inducing` = 1: lengthscales start from the distance of pseudo-inputs; take 2")


class ReferenceOptions(FedMGPOptions):
    """The same table, for the methods that FedMGP is compared with."""

    other_clients: ClassVar[tuple[str, ...]] = ()

    def client_for(self, core: CoreConfig) -> str:
        """Each has one."""
        return ""

    def strategy_for(self, core: CoreConfig) -> str:
        """Each has one."""
        return ""
