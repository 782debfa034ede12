"""Latent functions g_i = L_i u_i that units of FedMGP share, the posterior q(u), and its sufficient statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from scipy.linalg import block_diag, cho_factor, cho_solve, solve_triangular
from scipy.optimize import minimize

from fedgp_flower.errors import NumericsError
from fedgp_flower.gp.linalg import kernel_cholesky
from fedgp_flower.messages import leaves, message
from fedgp_flower.typing import Array

Hold = Literal["gain", "width"]
SCALES, MEAN, FACTOR = "kernel.raw_scales", "variational.variational_mean", "variational.chol_variational_covar"
"""Names of the shared parameters θ of Algorithm 2: log S, mean and lower factor of each q(u_i)."""
PRECISION, SHIFT = "natural.precision", "natural.shift"
"""Names of λ and h, for q(u_i) = N(λ_i⁻¹h_i, λ_i⁻¹)."""


@message()
class LatentFunctions:
    """I independent functions g_i ~ GP(0, a_i² exp(−½ (w − w')ᵀ S_i⁻¹ (w − w'))) with J pseudo-inputs W (Eq. 17)."""

    inducing: Float[ndarray, "J D"] = leaves("W, pseudo-inputs")
    scales: Float[ndarray, "I D"] = leaves("diagonals of S_i, squared lengthscales")
    amplitudes: Float[ndarray, " I"] = leaves("a_i")
    jitter: float = leaves("added to the diagonal of the correlation of g_i at W", default=1e-8)

    @property
    def size(self) -> int:
        """Length I·J of the stacked u."""
        return len(self.scales) * len(self.inducing)

    def whitening(self) -> Array:
        """Lower factors L_i of the correlation of g_i at W; C_gg = a_i² L_i L_iᵀ.  [I, J, J]."""
        gaps = np.square(self.inducing[:, None, :] - self.inducing[None, :, :])  # [J, J, D]
        correlation = np.exp(np.moveaxis(gaps @ (-0.5 / self.scales.T), 2, 0))
        variance = torch.ones(len(correlation), dtype=torch.float64)
        factors = kernel_cholesky(torch.from_numpy(correlation), variance=variance, jitter=self.jitter, of="C_gg")
        return np.asarray(factors)


def spacing(inducing: Array) -> Array:
    """Typical distance of neighbouring pseudo-inputs along each dimension, extent / (J^(1/D) − 1).  [D]."""
    count, dims = inducing.shape
    return np.asarray(np.ptp(inducing, axis=0) / (count ** (1.0 / dims) - 1.0))


def latents_at(inducing: Array, multiples: Sequence[float], jitter: float) -> LatentFunctions:
    """Initial latent functions; each lengthscale is a multiple of the spacing of the pseudo-inputs."""
    scales = np.outer(np.square(multiples), spacing(inducing) ** 2)
    return LatentFunctions(inducing, scales, np.ones(len(multiples)), jitter)


@message()
class LatentPosterior:
    """q(u) = N(m, V) of the stacked whitened latents, L = I·J numbers."""

    mean: Float[ndarray, " L"] = leaves("m")
    covariance: Float[ndarray, "L L"] = leaves("V")

    def second_moment(self) -> Array:
        """E uuᵀ = V + m mᵀ."""
        return np.asarray(self.covariance + np.outer(self.mean, self.mean))

    def of_latents(self, latents: LatentFunctions) -> tuple[Array, Array]:
        """Mean [I·J] and covariance [I·J, I·J] of the values g(W), unwhitened."""
        scale = block_diag(*(latents.amplitudes[:, None, None] * latents.whitening()))
        return scale @ self.mean, scale @ self.covariance @ scale.T


@message()
class Move:
    """A trial change of the shared lengthscales together with the parameters of the units.

    With ``stretch`` = 1 a unit takes its improved parameters, above 1 it extrapolates. When S_i changes it keeps either
    the ``gain`` of its convolution, v = s (|2R + S| / |S|)^¼, or the ``width`` of its output, 2R + S.
    """

    offset: Float[ndarray, "I D"] = leaves("change of log S")
    stretch: float = leaves("1: the improved parameters; more: beyond them", default=1.0)
    hold: Hold = leaves("what a unit keeps when S changes", default="gain")


@message()
class UnitStatistics:
    """Sufficient statistics of a unit: E log p(y_m | f_m) given u = evidence + Σ_i slack_i + bᵀu − ½ uᵀGu.

    The slack −½ tr(Ω_m)/σ² accounts for the variance that the pseudo-inputs do not explain.
    """

    precision: Float[ndarray, "L L"] = leaves("G = Σ_n k_n k_nᵀ / σ²", symmetric=True)
    shift: Float[ndarray, " L"] = leaves("b = Σ_n k_n y_n / σ²")
    evidence: float = leaves("−½ N log 2πσ² − ½ yᵀy / σ²")
    slack: Float[ndarray, " I"] = leaves("−½ tr(Ω_m) / σ², by latent function")

    def expected(self, q: LatentPosterior) -> float:
        """E_q log p(y_m | f_m)."""
        fit = self.shift @ q.mean - 0.5 * np.vdot(self.precision, q.second_moment())
        return float(self.evidence + self.slack.sum() + fit)

    def rescaled(self, factors: Array) -> UnitStatistics:
        """The statistics after latent function i is multiplied by ``factors[i]``."""
        wide = np.repeat(factors, self.shift.size // factors.size)
        precision = wide[:, None] * self.precision * wide
        return UnitStatistics(precision, wide * self.shift, self.evidence, factors**2 * self.slack)

    def rotated(self, old: Array, new: Array) -> UnitStatistics:
        """The statistics in new whitened coordinates, u_old = T u_new with T = L_old⁻¹ L_new for each i."""
        T = block_diag(*(solve_triangular(L, L_new, lower=True) for L, L_new in zip(old, new, strict=True)))
        return UnitStatistics(T.T @ self.precision @ T, T.T @ self.shift, self.evidence, self.slack)


# q(u) as parameters θ of Algorithm 2.


def to_natural(q: LatentPosterior, count: int) -> tuple[Array, Array]:
    """λ [I, J, J] and h [I, J] of the product over latent functions that minimises KL(product ‖ q)."""
    mean, eye = q.mean.reshape(count, -1), np.eye(len(q.mean))
    joint = cho_solve(cho_factor(q.covariance, lower=True), eye).reshape(*mean.shape, *mean.shape)
    precision = np.einsum("iaib->iab", joint)
    return precision, np.einsum("iab,ib->ia", precision, mean)


def from_parameters(
    parameters: Mapping[str, Array], inducing: Array, jitter: float
) -> tuple[LatentFunctions, LatentPosterior]:
    """Latent functions and q(u) at θ = {log S, λ, h} or {log S, mean, factor}."""
    scales = np.exp(parameters[SCALES])
    latents = LatentFunctions(inducing, scales, np.ones(len(scales)), jitter)
    if PRECISION in parameters:
        mean, factors = from_natural(parameters[PRECISION], parameters[SHIFT])
    else:
        mean, factors = parameters[MEAN], np.tril(parameters[FACTOR])
    return latents, LatentPosterior(mean.ravel(), block_diag(*(factor @ factor.T for factor in factors)))


def from_natural(precision: Array, shift: Array) -> tuple[Array, Array]:
    """Means [I, J] and lower factors [I, J, J] of the covariances of N(λ_i⁻¹h_i, λ_i⁻¹), from λ and h."""
    try:
        reversed_factors = np.linalg.cholesky(precision[:, ::-1, ::-1])
    except np.linalg.LinAlgError:
        raise NumericsError(
            f"a precision of q(u) is not positive definite, shape {precision.shape}: set `fedmgp.aggregation` to a rule"
            " that bounds every unit"
        ) from None
    eye = np.eye(shift.shape[1])
    factors = np.stack([solve_triangular(factor, eye, lower=True).T[::-1, ::-1] for factor in reversed_factors])
    return np.einsum("iab,icb,ic->ia", factors, factors, shift), factors


# The best q(u) from sums over units.


def posterior(total: UnitStatistics) -> LatentPosterior:
    """Optimal q(u): V = (I + ΣG)⁻¹, m = V Σb."""
    factor = _factor(total)
    return LatentPosterior(cho_solve(factor, total.shift), cho_solve(factor, np.eye(total.shift.size)))


def shared_evidence(total: UnitStatistics) -> float:
    """½ bᵀP⁻¹b − ½ log|P| with P = I + G, the part of the log evidence that depends on u."""
    lower, _ = _factor(total)
    z = solve_triangular(lower, total.shift, lower=True)
    return float(0.5 * z @ z - np.log(np.diag(lower)).sum())


def pooled_bound(total: UnitStatistics) -> float:
    """The collapsed evidence lower bound, exact at the optimal q(u)."""
    return total.evidence + float(total.slack.sum()) + shared_evidence(total)


def _factor(total: UnitStatistics) -> tuple[Array, bool]:
    try:
        return cho_factor(total.precision + np.eye(total.shift.size), lower=True)
    except (np.linalg.LinAlgError, ValueError) as error:  # ValueError: the sum is not finite
        raise NumericsError(
            f"precision of q(u) is not positive definite, shape {total.precision.shape}: a unit sent statistics that "
            "no data can produce. Use `fedmgp.aggregation = 'agreement'`."
        ) from error


def best_scales(total: UnitStatistics, num_latents: int) -> tuple[float, Array]:
    """Highest bound and its amplitudes a [I]; the slope in log a_i is 2 a_i² slack_i + Σ_{j in i} (m_j² + V_jj) − J."""

    def negative(log_a: Array) -> tuple[float, Array]:
        trial = total.rescaled(np.exp(log_a))
        q = posterior(trial)
        moments = (q.mean**2 + np.diag(q.covariance)).reshape(num_latents, -1)
        return -pooled_bound(trial), moments.shape[1] - 2 * trial.slack - moments.sum(axis=1)

    start, bounds = np.zeros(num_latents), [(-2.0, 2.0)] * num_latents  # largest change of log a in one step
    limits = {"maxiter": 50, "ftol": 1e-12, "gtol": 1e-7}
    best = minimize(negative, start, jac=True, method="L-BFGS-B", bounds=bounds, options=limits)
    value = negative(start)[0]
    return (-float(best.fun), np.exp(best.x)) if best.fun < value else (-value, np.ones(num_latents))
