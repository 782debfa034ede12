"""The hierarchical variational model of a federated sparse GP: q(f, Z, β) = q(Z) q(β) p(f | u) q(u | Z, β).

q(Z) and q(β) are diagonal Gaussians (β in log coordinates) or points; q(u | Z, β) is the product of the sites' factors.
Everything here is a pure function, batched over S samples of (Z, β).

References:
    Federated learning of sparse Gaussian processes, Eqs. 7, 9-12, Section 6.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from fedgp_flower.errors import ConfigError, NumericsError
from fedgp_flower.gp.batched_kernel import BatchedKernel
from fedgp_flower.gp.gaussian import DiagonalGaussian
from fedgp_flower.gp.kernels import build_kernel
from fedgp_flower.gp.likelihoods import GaussianNoise, PointLikelihood, build_point_likelihood
from fedgp_flower.methods.pvi.factors import (
    Factor,
    Geometry,
    Natural,
    PseudoObservations,
    WhitenedGaussian,
    log_noise_evidence,
    product,
    view,
)
from fedgp_flower.options import ModelSection

ROWS_AT_ONCE = 2048
SAMPLES_AT_ONCE = 10
ROUNDING = 1e-9
"""A variance that is zero may come out below it by so much, relative to the prior variance k(x, x)."""


@dataclass(frozen=True, slots=True)
class Data:
    """Standardised rows of one site."""

    inputs: Float[Tensor, "N D"]
    targets: Float[Tensor, " N"]

    def __len__(self) -> int:
        return len(self.targets)

    def subset(self, rows: Tensor) -> Data:
        """The rows at these positions."""
        return Data(self.inputs[rows], self.targets[rows])


@dataclass(frozen=True, slots=True)
class Point:
    """A latent that is known, or learned as a point: no distribution, no KL."""

    value: Float[Tensor, " L"]


Latent = DiagonalGaussian | Point


@dataclass(frozen=True, slots=True)
class Latents:
    """q(Z), flattened row by row [M·D], and q(β) [P]."""

    inducing: Latent
    hyper: Latent


@dataclass(frozen=True, slots=True)
class Draws:
    """S samples of (Z, β)."""

    inducing: Float[Tensor, "S M D"]
    hyper: Float[Tensor, "S P"]


@dataclass(frozen=True, slots=True)
class SparseModel:
    """Kernel and likelihood; β holds the kernel's hyperparameters, then the likelihood's."""

    kernel: BatchedKernel
    likelihood: PointLikelihood
    num_inputs: int
    jitter: float = 1e-8

    @property
    def num_hyper(self) -> int:
        """P."""
        return self.kernel.num_hyper + self.likelihood.initial.numel()

    def initial_hyper(self) -> Float[Tensor, " P"]:
        """β at the initial values of kernel and likelihood."""
        return torch.cat([self.kernel.initial(), self.likelihood.initial])

    def own_hyper(self, draws: Draws) -> Float[Tensor, "S R"]:
        """The likelihood's part of β."""
        return draws.hyper[:, self.kernel.num_hyper :]

    def geometry(self, draws: Draws) -> Geometry:
        """Whitened coordinates at every sample. Tied pseudo-noise has unit σ² without a Gaussian likelihood."""
        gaussian = isinstance(self.likelihood, GaussianNoise)
        noise = (2.0 * draws.hyper[:, -1]).exp() if gaussian else draws.hyper.new_ones(len(draws.hyper))
        hyper = draws.hyper[:, : self.kernel.num_hyper]
        return Geometry.at(self.kernel, draws.inducing, hyper, noise, jitter=self.jitter)


def sparse_model(section: ModelSection, num_inputs: int) -> SparseModel:
    """Kernel and likelihood of the configuration, for ``num_inputs`` encoded inputs."""
    likelihood = build_point_likelihood(section.likelihood, noise=section.noise)
    return SparseModel(BatchedKernel(build_kernel(section, num_inputs)), likelihood, num_inputs, section.jitter)


def location_scale(latent: Latent) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation; a point has none."""
    if isinstance(latent, Point):
        return latent.value, torch.zeros_like(latent.value)
    mean, variance = latent.moments()
    return mean, variance.sqrt()


def standard_normal(num_samples: int, size: int, generator: Generator, *, antithetic: bool = True) -> Tensor:
    """ε [S, size] ~ N(0, I); antithetic: the second half mirrors the first, so odd moments vanish exactly."""
    if not antithetic or num_samples % 2:
        return torch.randn(num_samples, size, generator=generator, dtype=torch.float64)
    half = torch.randn(num_samples // 2, size, generator=generator, dtype=torch.float64)
    return torch.cat([half, -half])


def draw(
    latents: Latents, num_samples: int, num_inputs: int, generator: Generator, *, antithetic: bool = True
) -> Draws:
    """Samples of (Z, β) ~ q(Z) q(β)."""
    parts = []
    for latent in (latents.inducing, latents.hyper):
        mean, scale = location_scale(latent)
        parts.append(mean + scale * standard_normal(num_samples, len(mean), generator, antithetic=antithetic))
    return Draws(parts[0].reshape(num_samples, -1, num_inputs), parts[1])


@dataclass(frozen=True, slots=True)
class Cavity:
    r"""q_\k(v | Z, β) for S samples of (Z, β), and the site's rows as seen from Z."""

    geometry: Geometry
    natural: Natural
    density: WhitenedGaussian
    rows: Float[Tensor, "S M N"]
    """A = L⁻¹ K_ZX."""
    prior_variance: Float[Tensor, "S N"]

    @classmethod
    def at(cls, model: SparseModel, draws: Draws, others: Sequence[Factor], data: Data) -> Cavity:
        """Prior times ``others``, by one triangular solve for all pseudo-inputs and rows."""
        views = view(model.geometry(draws), others, data.inputs)
        assert views.rows is not None
        natural = product(views, others)
        variance = views.geometry.prior_variance(data.inputs)
        return cls(views.geometry, natural, natural.density(), views.rows, variance)

    def times(self, own: Factor) -> WhitenedGaussian:
        """q(v | Z, β) with the site's own factor."""
        return self.natural.times(own, self.geometry).density()

    def free_energy(
        self, model: SparseModel, draws: Draws, own: Factor, data: Data, *, weight: float = 1.0
    ) -> Float[Tensor, " S"]:
        """See :func:`local_free_energy`; ``draws`` and ``data`` are those of :meth:`at`."""
        posterior = self.times(own)
        moments = posterior.predict(self.rows, self.prior_variance)
        fit = model.likelihood.expected(data.targets, *moments, model.own_hyper(draws)).sum(-1)
        return weight * fit - posterior.kl(self.density)


def local_free_energy(
    model: SparseModel, draws: Draws, others: Sequence[Factor], own: Factor, data: Data, *, weight: float = 1.0
) -> Float[Tensor, " S"]:
    r"""Local fit E_q log p(y_k | f) − KL(q(u | Z, β) ‖ q_\k(u | Z, β)) per sample, in nats.

    Federated learning of sparse Gaussian processes, Eq. 7 less its last KL. ``data`` may be a mini-batch, ``weight`` is
    N_k over its rows; the product of ``others`` with the prior is the cavity.
    """
    return Cavity.at(model, draws, others, data).free_energy(model, draws, own, data, weight=weight)


def free_energy_parts(model: SparseModel, draws: Draws, factors: Sequence[Factor], data: Data) -> tuple[float, float]:
    """What this site knows of F = Σ_k E_q log p(y_k | f) − E KL(q(u) ‖ p(u)) − KL(q(Z) ‖ p) − KL(q(β) ‖ p), in nats.

    The first term, which adds over sites, and the second, which is the same wherever the draws are. F equals Σ_k F_k +
    log Z_q at any q = p ∏ t_k (Ashman et al. 2022, Property 2.2a). ``factors`` are those of all sites.
    """
    with torch.no_grad():
        views = view(model.geometry(draws), factors, data.inputs)
        posterior = product(views, factors).density()
        assert views.rows is not None
        moments = posterior.predict(views.rows, views.geometry.prior_variance(data.inputs))
        fit: Float[Tensor, " S"] = model.likelihood.expected(data.targets, *moments, model.own_hyper(draws)).sum(-1)
        divergence = posterior.kl(Natural.prior(views.geometry).density())
    return float(fit.mean()), float(divergence.mean())


def collapsed_evidence(
    model: SparseModel, draws: Draws, factors: Sequence[PseudoObservations], data: Data | None
) -> Float[Tensor, " S"]:
    """Titsias' bound on the evidence of tied pseudo-observations, read as likelihoods of f and σ, and of real rows.

    Pseudo-observation j adds −½ w_j (m_j − f(V_j))²/σ², hence also the trace term −½ w_j (k_jj − a_jᵀa_j)/σ².

    Raises:
        ConfigError: a factor has free or full noise, or the likelihood is not Gaussian: no such reading exists.
    """
    if not (isinstance(model.likelihood, GaussianNoise) and all(f.tied and f.root.ndim == 1 for f in factors)):
        raise ConfigError("replay needs a Gaussian likelihood and tied, diagonal pseudo-noise (`pvi.factor` = 'tied')")
    rows = None if data is None else data.inputs
    views = view(model.geometry(draws), factors, rows)
    geometry = views.geometry
    natural = product(views, factors)
    total = sum((log_noise_evidence(f, geometry.noise) for f in factors), torch.zeros_like(geometry.noise))
    for factor, projection in zip(factors, views.factors, strict=True):
        missing = geometry.prior_variance(factor.inputs) - projection.square().sum(-2)
        total = total - 0.5 * (missing * factor.root.square()).sum(-1) / geometry.noise
    if data is None:
        return total + _potential(natural)
    return total + _log_evidence(natural, geometry, _some(views.rows), data)


@dataclass(frozen=True, slots=True)
class Mixture:
    """Predictive mixture over samples of (Z, β), in standardised units of y."""

    means: Float[Tensor, "S N"]
    """Mean of a noisy observation, per sample."""
    variances: Float[Tensor, "S N"]
    log_densities: Float[Tensor, "S N"] | None
    """log p(y | sample) of given targets."""

    def mean(self) -> Float[Tensor, " N"]:
        """Mixture mean."""
        return self.means.mean(0)

    def variance(self) -> Float[Tensor, " N"]:
        """Mixture variance: mean of variances plus variance of means."""
        return self.variances.mean(0) + self.means.var(0, correction=0)

    def log_density(self) -> Float[Tensor, " N"]:
        """Log of the mixture density, log (1/S) Σ_s p(y | sample s)."""
        return torch.logsumexp(_some(self.log_densities), 0) - math.log(len(self.means))


def predict(
    model: SparseModel, draws: Draws, factors: Sequence[Factor], inputs: Tensor, targets: Tensor | None = None
) -> Mixture:
    """The predictive mixture at ``inputs`` [N, D], a few samples and rows at a time, without a graph.

    Raises:
        NumericsError: a variance of f is negative beyond rounding, which means that a factor is broken.
    """
    with torch.no_grad():
        pieces = [
            _predict_some(model, Draws(z, b), factors, inputs, targets)
            for z, b in zip(draws.inducing.split(SAMPLES_AT_ONCE), draws.hyper.split(SAMPLES_AT_ONCE), strict=True)
        ]
    means, variances, densities = zip(*pieces, strict=True)
    return Mixture(torch.cat(means), torch.cat(variances), None if targets is None else torch.cat(densities))


def _predict_some(
    model: SparseModel, draws: Draws, factors: Sequence[Factor], inputs: Tensor, targets: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    views = view(model.geometry(draws), factors)
    posterior = product(views, factors).density()
    own = model.own_hyper(draws)
    out: list[tuple[Tensor, ...]] = []
    for start in range(0, max(len(inputs), 1), ROWS_AT_ONCE):  # no rows give empty predictions
        rows = slice(start, start + ROWS_AT_ONCE)
        x = inputs[rows]
        prior = views.geometry.prior_variance(x)
        mean, variance = posterior.predict(views.geometry.project(x), prior)
        broken = ~(variance >= -ROUNDING * prior)  # so that NaN is broken, too
        if bool(broken.any()):
            raise NumericsError(f"{int(broken.sum())} of {variance.numel()} variances of f are negative")
        variance = variance.clamp_min(0.0)
        moments = model.likelihood.moments(mean, variance, own)
        y = mean[:1, :0] if targets is None else model.likelihood.log_predictive(targets[rows], mean, variance, own)
        out.append((*moments, y))
    means, variances, densities = (torch.cat(part, -1) for part in zip(*out, strict=True))
    return means, variances, densities


def _log_evidence(natural: Natural, geometry: Geometry, projection: Tensor, data: Data) -> Tensor:
    """½hᵀB⁻¹h − ½log|B| after the rows, and the rows' own constants and trace term."""
    noise = geometry.noise
    scale = noise.rsqrt()[:, None]
    after = natural.with_columns(projection * scale[..., None], data.targets * scale)
    missing = (geometry.prior_variance(data.inputs) - projection.square().sum(-2)).sum(-1)
    constants = len(data) * torch.log(2 * math.pi * noise) + (data.targets.square().sum() + missing) / noise
    return _potential(after) - 0.5 * constants


def _potential(natural: Natural) -> Tensor:
    """½hᵀB⁻¹h − ½log|B|, the log-normaliser of q(v) up to a constant."""
    density = natural.density()
    return 0.5 * (natural.shift * density.mean).sum(-1) - density.half_log_determinant()


def _some(values: Tensor | None) -> Tensor:
    if values is None:
        raise ValueError("needed rows or targets were not given")
    return values
