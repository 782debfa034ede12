"""Interface of a model in SFVI: log p_θ(Z_G), log p_θ(y_k, Z_Lk | Z_G), their shapes and predictions.

A model is one file with one subclass, and a row with its keys (:mod:`fedgp_flower.methods.sfvi.rows`). Its parameters
(``nn.Parameter``) are the shared θ. Data of a site are in :class:`SiteRows` and stay there.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from fedgp_flower.gp.kernels import wire_name
from fedgp_flower.gp.likelihoods import PointLikelihood
from fedgp_flower.gp.models import set_parameters
from fedgp_flower.methods.family import GlobalPosterior, LocalPosterior, held, unit_noise
from fedgp_flower.options import ModelSection
from fedgp_flower.run.registry import load
from fedgp_flower.typing import Rows, Scalar, Targets

if TYPE_CHECKING:  # a model in one file with its row is imported by the options
    from fedgp_flower.methods.sfvi.options import SFVIOptions

IndexVector: TypeAlias = Int64[Tensor, " N"]
Shared: TypeAlias = Float[Tensor, "*S M"]
"""Draws of Z_G."""
Units: TypeAlias = Float[Tensor, "*S U W"]
"""Draws of the latents of units."""
Draws: TypeAlias = tuple[Float[Tensor, "S M"], Float[Tensor, "*R U W"]]
"""Standard normal noise of Z_G, and of the latents of units given each draw."""
PREDICTION_DRAWS, PREDICTION_SEED = 200, 20
"""Draws in a prediction, with a Monte Carlo error of 7 % of the predictive sd. Their fixed seed makes a prediction a
function of the posterior."""


@dataclass(frozen=True, slots=True)
class SiteRows:
    """The rows of one site, in units whose local latents are independent given Z_G."""

    features: Rows
    targets: Targets
    unit: IndexVector
    """Unit of every row, 0 … U−1."""
    keys: Int64[Tensor, " U"]
    """Keys of the random draws of units; unique over all sites."""
    anchors: Float[Tensor, "A D"]
    """Inputs that the site's latents refer to; empty for most models."""

    def at(self, features: Rows) -> SiteRows:
        """The same site with new rows for prediction, of unit 0."""
        count = len(features)
        return replace(self, features=features, targets=features.new_zeros(count), unit=self.unit.new_zeros(count))


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """Inputs without the column that names units, and those names."""

    features: Rows
    groups: IndexVector


Placed: TypeAlias = tuple[SiteRows, LocalPosterior | None]
"""New rows in units of a model, and the posterior of these units; None if they have their prior."""


class ReportTable(NamedTuple):
    """A table that a model adds to a report."""

    title: str
    head: tuple[str, ...]
    rows: list[tuple[str | float, ...]]
    caption: str


class StructuredModel(nn.Module, ABC):
    """Latents Z_G [M] with p_θ(Z_G) = N(0, diag s²), units Z_Lu [W] and data y_u independent given Z_G.

    If scales are learned, log s = ``fixed_log_scale`` + ``prior_log_scales``[``block``]; the server needs only
    these arrays for its gradient. For any other prior a model transforms Z_G inside the likelihood.
    """

    fixed_log_scale: Tensor
    block: Tensor

    def __init__(self, fixed_log_scale: Float[Tensor, " M"], block: Int64[Tensor, " M"] | None = None) -> None:
        super().__init__()
        self.register_buffer("fixed_log_scale", fixed_log_scale)
        self.register_buffer("block", torch.zeros(0, dtype=torch.int64) if block is None else block)
        if block is not None:
            self.prior_log_scales = nn.Parameter(torch.zeros(int(block.max()) + 1, dtype=torch.float64))

    @classmethod
    def configured(
        cls, options: SFVIOptions, section: ModelSection, num_inputs: int, inputs: Rows | None = None
    ) -> StructuredModel:
        """The model at its initial θ; without the shared inducing ``inputs`` only its shapes are right."""
        model: Callable[..., StructuredModel] = cls
        return model(num_inputs, options, binary=section.likelihood == "bernoulli")

    @property
    def global_size(self) -> int:
        """M, the length of Z_G."""
        return len(self.fixed_log_scale)

    def prior_log_scale(self) -> Float[Tensor, " M"]:
        """The vector log s, by entry of Z_G."""
        if len(self.block) == 0:
            return self.fixed_log_scale
        return self.fixed_log_scale + self.prior_log_scales[self.block]

    def prepare(self, features: Rows, targets: Targets, groups: IndexVector | None = None, *, key: int = 0) -> SiteRows:
        """Rows of a site, assigned to units by ``groups``; by default the site is one unit with this ``key``."""
        unit = torch.zeros(len(features), dtype=torch.int64)
        return SiteRows(features, targets, unit, torch.tensor([key]), features[:0])

    @abstractmethod
    def local_width(self, site: SiteRows) -> int:
        """W, the number of latents of a unit, which may differ between sites."""

    def initial_local(self, site: SiteRows, *, scale: float, whole: bool) -> LocalPosterior:
        """N(0, scale² I) over the latents of a site; only if ``whole`` it is coupled to Z_G and has a full L."""
        units, width = len(site.keys), self.local_width(site)
        zero = torch.zeros(units, width, dtype=torch.float64)
        coupling = zero.new_zeros(units, width, self.global_size) if whole else None
        lower = zero.new_zeros(units, width * (width - 1) // 2) if whole else None
        return LocalPosterior(zero, zero + math.log(scale), coupling, lower)

    @abstractmethod
    def site_term(
        self, site: SiteRows, q_global: GlobalPosterior, q_local: LocalPosterior, noise: Draws | None
    ) -> Scalar:
        """E log p_θ(y_k, Z_Lk | Z_G) − E log q(Z_Lk | Z_G); ``noise`` is for Monte Carlo expectations."""

    @abstractmethod
    def moments(
        self, site: SiteRows, q_global: GlobalPosterior, q_local: LocalPosterior | None, rows: ModelInputs, link: bool
    ) -> tuple[Tensor, Tensor]:
        """Mean and variance of an observation, [N], or of indicators of classes, [N, C], at rows of a site.

        Without ``q_local`` the site is new. With ``link`` they are on the scale where trend and deviation add.
        """

    def sections(self, q_global: GlobalPosterior, names: Sequence[str]) -> list[ReportTable]:
        """Report tables about Z_G, given the model's columns; none by default."""
        return []

    def theta(self) -> dict[str, Tensor]:
        """The learned parameters by their names in messages."""
        return {f"theta.{wire_name(name)}": value for name, value in self.named_parameters() if value.requires_grad}

    def load_theta(self, values: Mapping[str, Tensor | np.ndarray]) -> None:
        """Set θ from the arrays of a message."""
        set_parameters(self.theta(), {name: value for name, value in values.items() if name.startswith("theta.")})


def configured(
    options: SFVIOptions, section: ModelSection, num_inputs: int, inputs: Tensor | None = None
) -> StructuredModel:
    """The model at its initial θ."""
    model: type[StructuredModel] = load(options.row.model)
    return model.configured(options, section, num_inputs, inputs)


class SoftmaxClasses:
    """Observations are classes 0 … C−1: P(y = c) ∝ exp(f_c). For two classes the prediction is that of the second."""

    def __init__(self, binary: bool) -> None:
        self.binary = binary

    def log_density(self, targets: Targets, logits: Float[Tensor, "*S N C"], hyper: Tensor) -> Float[Tensor, "*S N"]:
        """The log probability of every target's class."""
        log_class = logits.log_softmax(-1)
        return log_class.gather(-1, targets.long().expand(log_class.shape[:-1])[..., None])[..., 0]

    def moments(self, logits: Float[Tensor, "*S N C"], variance: Tensor, hyper: Tensor) -> tuple[Tensor, Tensor]:
        """Class probabilities p, and p (1 − p)."""
        every = logits.softmax(-1)
        probability = every[..., 1] if self.binary else every
        return probability, probability * (1 - probability)


class SampledModel(StructuredModel):
    """A model with Monte Carlo expectations and rows that are independent given all latents."""

    observed: PointLikelihood | SoftmaxClasses
    """The density of a row given :meth:`function`."""
    binary = False
    """Whether the target has two classes."""

    @abstractmethod
    def function(self, site: SiteRows, z_global: Shared, z_local: Units) -> Tensor:
        """Linear predictor of every row [*S, N], or logits of classes [*S, N, C]."""

    def hyper(self, z_global: Shared) -> Float[Tensor, "*S R"]:
        """Parameters of ``observed``."""
        return z_global[..., :0]

    def log_likelihood(self, site: SiteRows, z_global: Shared, z_local: Units) -> Float[Tensor, "*S U"]:
        """Σ_i log p(y_i | Z_G, Z_L), by unit."""
        function = self.function(site, z_global, z_local)
        rows = self.observed.log_density(site.targets, function, self.hyper(z_global))
        return rows.new_zeros(*rows.shape[:-1], len(site.keys)).index_add(-1, site.unit, rows)

    def log_local(self, site: SiteRows, z_global: Shared, z_local: Units) -> Float[Tensor, "*S U"]:
        """The log density log p_θ(y_u, Z_Lu | Z_G) of every unit, with Z_L ~ N(0, I)."""
        prior = -0.5 * z_local.square().sum(-1) - 0.5 * z_local.shape[-1] * math.log(2 * math.pi)
        return self.log_likelihood(site, z_global, z_local) + prior

    def observation(self, site: SiteRows, z_global: Shared, z_local: Units) -> tuple[Tensor, Tensor]:
        """Mean and variance of an observation at every row given the latents, [S, N] or [S, N, C]."""
        function = self.function(site, z_global, z_local)
        return self.observed.moments(function, torch.zeros_like(function), self.hyper(z_global))

    def site_term(
        self, site: SiteRows, q_global: GlobalPosterior, q_local: LocalPosterior, noise: Draws | None
    ) -> Scalar:
        """Σ_u log 1/R Σ_r p(y_u, Z_Lu | Z_G) / q(Z_Lu | Z_G), averaged over S draws of Z_G with R of Z_L for each.

        With R = 1 the parameters inside log q are held constant (sticking the landing, Roeder et al. 2017).
        """
        assert noise is not None
        draws, z_global = len(noise[1]), q_global.transform(noise[0])
        z_local = q_local.transform(z_global, q_global.mean, noise[1])
        inside, centre = (held(q_local), q_global.mean.detach()) if draws == 1 else (q_local, q_global.mean)
        log_p = self.log_local(site, z_global.expand(draws, *z_global.shape), z_local)
        log_weight = log_p - inside.log_density(z_local, z_global, centre)  # [R, S, U]
        return (log_weight.logsumexp(0) - math.log(draws)).sum(-1).mean()

    def placed(self, site: SiteRows, rows: ModelInputs, q_local: LocalPosterior | None) -> Placed:
        """Return the rows for a prediction, by default of the site itself."""
        return site.at(rows.features), q_local

    def moments(
        self, site: SiteRows, q_global: GlobalPosterior, q_local: LocalPosterior | None, rows: ModelInputs, link: bool
    ) -> tuple[Tensor, Tensor]:
        """Monte Carlo moments; latents of a unit without rows at the site have their prior."""
        draw, (data, q_units) = np.random.default_rng(PREDICTION_SEED), self.placed(site, rows, q_local)
        noise = torch.from_numpy(draw.standard_normal((PREDICTION_DRAWS, self.global_size)))
        of_units = unit_noise(PREDICTION_SEED, 0, data.keys, (PREDICTION_DRAWS,), self.local_width(data))
        return self.mixture(data, q_global, q_units, (noise, of_units), link)

    @torch.no_grad()
    def mixture(
        self,
        site: SiteRows,
        q_global: GlobalPosterior,
        q_local: LocalPosterior | None,
        noise: Draws,
        link: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Mean, and variance E var + var E, over standard normal draws; without ``q_local`` latents are N(0, I)."""
        z_global, z_local = q_global.transform(noise[0]), noise[1]
        if q_local is not None:
            z_local = q_local.transform(z_global, q_global.mean, z_local)
        if link:
            values = self.function(site, z_global, z_local)
            values = values[..., 1] - values[..., 0] if self.binary else values  # the log odds of the second class
            return values.mean(0), (values - values.mean(0)).square().mean(0)  # `var` warns without rows
        mean, variance = self.observation(site, z_global, z_local)
        return mean.mean(0), variance.mean(0) + (mean - mean.mean(0)).square().mean(0)
