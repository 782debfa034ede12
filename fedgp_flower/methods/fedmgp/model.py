"""The model of one unit in GPyTorch: a sparse multi-output GP with one output observed at the unit.

Units share θ = {S, q(u)}; only the unit knows φ_m = {R_m, s_m, likelihood}. Latents are whitened, g_i = L_i u_i, and
q(u) is a product of B Gaussians of dimension K: one per latent function, or one joint Gaussian.

Every output is f = Σ_i s_i (g_i smoothed by N(0, R_i)), rescaled to the variance of g_i. For two such functions

    cov_i(x, x') = (|2R + S| |2R' + S|)^¼ |R + R' + S|^(−½) exp(−½ (x − x')ᵀ (R + R' + S)⁻¹ (x − x')),

and a latent function has R = 0, so that one formula gives c_ff, c_fg and c_gg. With v = s (|2R + S| / |S|)^¼ the
cross covariance is Eq. 18 of Chung and Al Kontar (2024). R = 0 throughout is the linear model of coregionalisation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel
from gpytorch.models import GP
from linear_operator.operators import DiagLinearOperator
from torch import Tensor
from torch.nn import Parameter

from fedgp_flower.errors import NumericsError
from fedgp_flower.gp.likelihoods import PointLikelihood, build_point_likelihood
from fedgp_flower.gp.linalg import cholesky, kernel_cholesky
from fedgp_flower.gp.models import whitened
from fedgp_flower.gp.optimisers import FREE, LOGARITHM, ascend, maximise
from fedgp_flower.messages import add
from fedgp_flower.methods.fedmgp import latents as shared
from fedgp_flower.methods.fedmgp import unit
from fedgp_flower.methods.fedmgp.latents import FACTOR, MEAN, SCALES, LatentFunctions, LatentPosterior
from fedgp_flower.methods.fedmgp.unit import UnitData, UnitParameters
from fedgp_flower.typing import Array, NamedArrays


def smoothed_covariance(x: Tensor, other: Tensor, scales: Tensor, smoothing: Tensor, smoothing_other: Tensor) -> Tensor:
    """Covariance [I, N, N'] of two unit-variance copies of each g_i from the diagonals of S_i and of two R_i [I, D]."""
    width = smoothing + smoothing_other + scales  # [I, D]
    height = (((2 * smoothing + scales) * (2 * smoothing_other + scales)).pow(0.25) / width.sqrt()).prod(-1)  # [I]
    gaps = (x[:, None, :] - other[None, :, :]).square()  # [N, N', D]
    exponent = torch.einsum("nkd,id->ink", gaps, -0.5 / width)
    return height[:, None, None] * exponent.exp()


class ConvolvedKernel(Kernel):
    """Covariance c_ff of one unit's output, from log S and log R [I, D] and signed amplitudes s [I]."""

    is_stationary = True

    def __init__(self, raw_scales: Tensor, raw_smoothing: Tensor, amplitudes: Tensor) -> None:
        super().__init__()
        self.raw_scales, self.raw_smoothing = Parameter(raw_scales), Parameter(raw_smoothing)
        self.amplitudes = Parameter(amplitudes)

    @property
    def scales(self) -> Tensor:
        """Squared lengthscales S of the latent functions, [I, D]."""
        return self.raw_scales.exp()

    @property
    def smoothing(self) -> Tensor:
        """Squared smoothing widths R of this unit, [I, D]."""
        return self.raw_smoothing.exp()

    def latent(self, inducing: Tensor) -> Tensor:
        """c_gg at the pseudo-inputs [J, D], unit variance: [I, J, J]."""
        zero = torch.zeros_like(self.scales)
        return smoothed_covariance(inducing, inducing, self.scales, zero, zero)

    def cross(self, x: Tensor, inducing: Tensor) -> Tensor:
        """c_fg between rows [N, D] and pseudo-inputs [J, D]: [I, N, J]."""
        zero = torch.zeros_like(self.scales)
        return self.amplitudes[:, None, None] * smoothed_covariance(x, inducing, self.scales, self.smoothing, zero)

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Tensor:
        """c_ff(x, x') = Σ_i s_i² exp(−½ (x − x')ᵀ (2R_i + S_i)⁻¹ (x − x'))."""
        variance = self.amplitudes.square()
        if diag:
            return variance.sum().expand(x1.shape[:-1])
        unit = smoothed_covariance(x1, x2, self.scales, self.smoothing, self.smoothing)
        return (variance[:, None, None] * unit).sum(0)


class MultiOutputGP(GP):
    """A unit's view of the latent functions at θ = {log S, m, T} and φ_m, for any likelihood: ``model(x)`` is q(f)."""

    def __init__(
        self, theta: Mapping[str, Array], inducing: Array, jitter: float, phi: UnitParameters, likelihood: str
    ) -> None:
        super().__init__()
        self.register_buffer("inducing", torch.tensor(inducing))  # a copy: a message may be read-only
        smoothing, amplitudes = torch.from_numpy(phi.smoothing), torch.tensor(phi.amplitudes)
        self.kernel = ConvolvedKernel(torch.tensor(theta[SCALES]), smoothing.log(), amplitudes)
        self.observed, hyper = observed(likelihood, phi)
        self.hyper, self.jitter = torch.nn.Parameter(hyper.clone()), jitter
        self.mean, self.factor = (torch.nn.Parameter(torch.tensor(theta[name])) for name in (MEAN, FACTOR))

    def forward(self, x: Tensor) -> MultivariateNormal:
        """q(f) at rows [N, D]: the joint when predicting, only the marginals when training (Eq. 12)."""
        latent = self.kernel.latent(self.inducing)
        cross, ones = self.kernel.cross(x, self.inducing).mT, latent.new_ones(len(latent))
        rows = whitened(latent, cross, variance=ones, jitter=self.jitter, of="C_gg")  # L⁻¹ C_gf, [I, J, N]
        features = rows.reshape(*self.mean.shape, len(x))  # [B, K, N]
        mean = torch.einsum("bkn,bk->n", features, self.mean)
        spread, flat = (self.factor.tril().mT @ features).flatten(0, 1), features.flatten(0, 1)  # [B·K, N]
        if self.training:
            variance = self.kernel(x, diag=True) - flat.square().sum(0) + spread.square().sum(0)
            return MultivariateNormal(mean, DiagLinearOperator(variance))
        return MultivariateNormal(mean, self.kernel(x).to_dense() - flat.mT @ flat + spread.mT @ spread)

    def expected_log_likelihood(self, x: Tensor, y: Tensor) -> Tensor:
        """E_q log p(y_n | f_n) of each row.  [N]."""
        q = self(x)
        return self.observed.expected(y, q.mean, q.variance, self.hyper)

    def kl(self) -> Tensor:
        """KL(q(g) ‖ p(g)) = ½ Σ_b [‖T_b‖² + ‖m_b‖² − K − log |T_b T_bᵀ|]."""
        T, m = self.factor.tril(), self.mean
        log_det = T.diagonal(dim1=-2, dim2=-1).square().log().sum()
        return torch.as_tensor(0.5 * (T.square().sum() + m.square().sum() - m.numel() - log_det))

    def local_risk(self, x: Tensor, y: Tensor, *, num_data: int, weight: float) -> Tensor:
        """R_m = −(1/p_m) (N_m/|B|) Σ_B E_q log p(y_n | f_n) + Σ_i KL(q(g_i) ‖ p(g_i)) (Eq. 14) on a mini-batch B."""
        return -self.expected_log_likelihood(x, y).sum() * (num_data / len(y) / weight) + self.kl()

    @property
    def shared(self) -> dict[str, Tensor]:
        """θ, which the unit sends."""
        return {SCALES: self.kernel.raw_scales, MEAN: self.mean, FACTOR: self.factor}

    @property
    def personal(self) -> list[Tensor]:
        """φ_m, which never leaves the unit."""
        return [self.kernel.raw_smoothing, self.kernel.amplitudes, self.hyper]

    def unit_parameters(self) -> UnitParameters:
        """φ_m with σ² = 1."""
        smoothing, amplitudes = (p.detach().numpy().copy() for p in (self.kernel.smoothing, self.kernel.amplitudes))
        return UnitParameters(smoothing, amplitudes, 1.0, tuple(self.hyper.tolist()))


def observed(kind: str, parameters: UnitParameters) -> tuple[PointLikelihood, Tensor]:
    """A likelihood and its parameters [R] at a unit; before training these derive from the unit's noise σ²."""
    point = build_point_likelihood(kind, noise=parameters.noise)
    trained = torch.tensor(parameters.likelihood, dtype=torch.float64)
    return point, trained if len(trained) else point.initial


def factor_steps(model: MultiOutputGP, x: Tensor, y: Tensor, steps: unit.LocalSteps) -> NamedArrays:
    """θ = {log S, m, T} after local steps of Adam, for any likelihood; φ_m stays in ``model``."""

    def negative_risk() -> Tensor:
        drawn = steps.draw()
        rows = slice(None) if drawn is None else torch.from_numpy(drawn)
        return -model.local_risk(x[rows], y[rows], num_data=len(y), weight=steps.weight)

    ascend(negative_risk, list(model.parameters()), name="adam", steps=steps.count, learning_rate=steps.rate)
    positive = torch.cat([model.kernel.scales, model.kernel.smoothing])
    if not bool((torch.isfinite(positive) & (positive > 0)).all()):
        raise NumericsError(unit.DIVERGED)
    return {name: p.detach().numpy().copy() for name, p in model.shared.items()}


def fit_personal(
    latents: LatentFunctions, q: LatentPosterior, phi: UnitParameters, likelihood: str, x: Tensor, y: Tensor
) -> UnitParameters:
    """The φ_m that maximises E_q log p(y | f) for fixed θ, from ``phi``."""
    scales, covariance = torch.from_numpy(latents.scales), torch.from_numpy(q.covariance)
    theta = {SCALES: scales.log().numpy(), MEAN: q.mean[None], FACTOR: torch.linalg.cholesky(covariance)[None].numpy()}
    model = MultiOutputGP(theta, latents.inducing, latents.jitter, phi, likelihood)
    maximise(lambda: model.expected_log_likelihood(x, y).sum(), model.personal, max_evaluations=200)
    return model.unit_parameters()


# The pooled baseline of a simulation: the same model fitted to the rows of all units.


def starting_point(
    units: Sequence[tuple[Array, Array]], inducing: Array, multiples: Sequence[float]
) -> tuple[LatentFunctions, list[UnitParameters]]:
    """Initial latent functions, and φ_m fitted to q(u) of the unit with most rows."""
    latents, data = shared.latents_at(inducing, multiples, 1e-8), [UnitData.build(x, y, inducing) for x, y in units]
    phi = [unit.starting_parameters(rows, latents) for rows in data]
    first = max(range(len(data)), key=lambda m: data[m].y.size)
    q = shared.posterior(unit.statistics(data[first], latents, phi[first]))
    others = [unit.maximise(rows, latents, q, start, coarse=True) for rows, start in zip(data, phi, strict=True)]
    return latents, [*others[:first], phi[first], *others[first + 1 :]]


def fit_pooled(
    units: Sequence[tuple[Array, Array]],
    latents: LatentFunctions,
    phi: Sequence[UnitParameters],
    *,
    max_evaluations: int = 600,
) -> tuple[LatentFunctions, LatentPosterior, list[UnitParameters], float]:
    """Maximise the bound by L-BFGS over log S, log R, s and log σ²; return the fit and the bound."""
    rows, W = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in units], torch.from_numpy(latents.inducing)
    start = np.log(latents.scales), np.log([p.smoothing for p in phi]), np.log([p.noise for p in phi])
    gains = np.stack([p.amplitudes * latents.amplitudes for p in phi])
    learned = [torch.tensor(values, requires_grad=True) for values in (*start, gains)]

    def bound() -> Tensor:
        """The collapsed bound, with P = I + Σ AᵀA/σ², b = Σ Aᵀy/σ² and rows A = [s_i L_i⁻¹c_i]ᵀ."""
        log_s, log_r, log_noise, amplitudes = learned
        scales, none = log_s.exp(), torch.zeros_like(log_s)
        latent = smoothed_covariance(W, W, scales, none, none)
        L = kernel_cholesky(latent, variance=latent.new_ones(len(latent)), jitter=latents.jitter, of="C_gg")
        P, b, local = torch.eye(latents.size, dtype=W.dtype), W.new_zeros(latents.size), W.new_zeros(())
        for (x, y), R, s, log_variance in zip(rows, log_r.exp(), amplitudes, log_noise, strict=True):
            weight = (-log_variance).exp()
            cross = s[:, None, None] * smoothed_covariance(W, x, scales, none, R)
            A = torch.linalg.solve_triangular(L, cross, upper=False).reshape(latents.size, -1)  # [I·J, n]
            unexplained = len(y) * s.square().sum() - A.square().sum()
            fit = len(y) * (math.log(2 * math.pi) + log_variance) + weight * (y @ y + unexplained)
            P, b, local = P + weight * A @ A.mT, b + weight * A @ y, local - 0.5 * fit
        factor = cholesky(P, of="precision of q(u)")
        z = torch.linalg.solve_triangular(factor, b[:, None], upper=False)
        return torch.as_tensor(local + 0.5 * z.square().sum() - factor.diagonal().log().sum())

    bounds = [LOGARITHM, LOGARITHM, LOGARITHM, FREE]
    value = maximise(bound, learned, max_evaluations=max_evaluations, bounds=bounds)[-1]
    scales, smoothing, noise = (values.detach().exp().numpy() for values in learned[:3])
    fitted = replace(latents, scales=scales, amplitudes=np.ones(len(scales)))
    parts = zip(smoothing, learned[3].detach().numpy(), noise.tolist(), strict=True)
    data, best = [UnitData.build(x, y, latents.inducing) for x, y in units], [UnitParameters(*part) for part in parts]
    total = add([unit.statistics(part, fitted, p) for part, p in zip(data, best, strict=True)])
    return fitted, shared.posterior(total), best, value
