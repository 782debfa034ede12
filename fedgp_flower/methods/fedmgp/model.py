"""The model of one unit as a GPyTorch model: a sparse multi-output GP of which the unit sees one output.

The units share θ = {S, q(u)}; the unit alone knows φ_m = {R_m, s_m, likelihood}. q is whitened, g_i = L_i u_i, and
q(u) is a product of B Gaussians of K numbers each: of I latent functions, or one joint Gaussian.

Reference: Chung and Al Kontar, Federated multi-output Gaussian processes, Technometrics 66 (2024), Eqs. 11-16, Alg. 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, TypeAlias

import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.models import GP
from gpytorch.variational import CholeskyVariationalDistribution
from linear_operator.operators import DiagLinearOperator
from torch import Tensor

from fedgp_flower.errors import ProtocolError
from fedgp_flower.gp.convolved import ConvolvedKernel
from fedgp_flower.gp.likelihoods import (
    GaussianNoise,
    LearnedLikelihood,
    PointLikelihood,
    build_point_likelihood,
    gaussian_likelihood,
)
from fedgp_flower.gp.models import whitened
from fedgp_flower.gp.optimisers import maximise
from fedgp_flower.methods.fedmgp.latents import Latents, Posterior
from fedgp_flower.methods.fedmgp.unit import UnitParameters
from fedgp_flower.typing import Array

Kind = Literal["gaussian", "bernoulli", "poisson", "student-t"]
Learned: TypeAlias = GaussianLikelihood | LearnedLikelihood
"""Gaussian noise is GPyTorch's."""
SHARED = ("kernel.raw_scales", "variational.")
"""How names of parameters that travel begin."""


class MultiOutputGP(GP):
    """A unit's view of the shared latent functions: ``model(x)`` is q(f), ``model.likelihood(model(x))`` predicts.

    Args:
        latents: The shared latent functions.
        parameters: What the unit alone knows.
        groups: Number B of independent Gaussians that make up q(u); q is the prior until it is set.
        likelihood: How targets are observed.
    """

    def __init__(
        self, latents: Latents, parameters: UnitParameters, groups: int, *, likelihood: Kind = "gaussian"
    ) -> None:
        super().__init__()
        self.register_buffer("inducing", torch.tensor(latents.inducing))  # a copy: a message may be read-only
        amplitudes = torch.from_numpy(parameters.amplitudes * latents.amplitudes)
        self.kernel = ConvolvedKernel(torch.tensor(latents.scales), torch.tensor(parameters.smoothing), amplitudes)
        self.likelihood, self.jitter = build_likelihood(likelihood, parameters), latents.jitter
        shape = torch.Size([groups])
        size = latents.size // groups
        self.variational = CholeskyVariationalDistribution(size, batch_shape=shape, mean_init_std=0).double()

    @staticmethod
    @torch.no_grad()
    def of(
        latents: Latents, q: Posterior, parameters: UnitParameters, *, likelihood: Kind = "gaussian"
    ) -> MultiOutputGP:
        """The model at a joint q(u)."""
        model = MultiOutputGP(latents, parameters, 1, likelihood=likelihood)
        model.variational.variational_mean.copy_(torch.from_numpy(q.mean)[None])
        model.variational.chol_variational_covar.copy_(torch.linalg.cholesky(torch.from_numpy(q.covariance))[None])
        return model

    def forward(self, x: Tensor) -> MultivariateNormal:
        """q(f) at rows [N, D]: joint where the model predicts, marginals alone where it is trained (Eq. 12)."""
        features = self._features(x)
        mean = torch.einsum("bkn,bk->n", features, self.variational.variational_mean)
        spread = (self._factor().mT @ features).flatten(0, 1)  # [B·K, N]
        flat = features.flatten(0, 1)
        if self.training:
            variance = self.kernel.prior_variance().sum() - flat.square().sum(0) + spread.square().sum(0)
            return MultivariateNormal(mean, DiagLinearOperator(variance))
        return MultivariateNormal(mean, self.kernel(x).to_dense() - flat.mT @ flat + spread.mT @ spread)

    def _features(self, x: Tensor) -> Tensor:
        """L⁻¹ C_gf, [B, K, N]."""
        latent = self.kernel.latent(self.inducing)
        cross, unit = self.kernel.cross(x, self.inducing).mT, latent.new_ones(len(latent))
        rows = whitened(latent, cross, variance=unit, jitter=self.jitter, of="C_gg")  # [I, J, N]
        return rows.reshape(*self.variational.variational_mean.shape, len(x))

    def _factor(self) -> Tensor:
        return self.variational.chol_variational_covar.tril()

    def expected_log_likelihood(self, x: Tensor, y: Tensor) -> Tensor:
        """E_q log p(y_n | f_n) of each row.  [N]."""
        expected: Tensor = self.likelihood.expected_log_prob(y, self(x))
        return expected

    def kl(self) -> Tensor:
        """KL(q(g) ‖ p(g)) = ½ Σ_b [‖T_b‖² + ‖m_b‖² − K − log |T_b T_bᵀ|]."""
        T, m = self._factor(), self.variational.variational_mean
        log_det = T.diagonal(dim1=-2, dim2=-1).square().log().sum()
        divergence: Tensor = 0.5 * (T.square().sum() + m.square().sum() - m.numel() - log_det)
        return divergence

    def local_risk(self, x: Tensor, y: Tensor, *, num_data: int, weight: float) -> Tensor:
        """R_m = −(1/p_m) (N_m/|B|) Σ_B E_q log p(y_n | f_n) + Σ_i KL(q(g_i) ‖ p(g_i)) (Eq. 14) on a mini-batch B.

        Σ_m p_m (−R_m) is the pooled evidence lower bound.
        """
        return -self.expected_log_likelihood(x, y).sum() * (num_data / len(y) / weight) + self.kl()

    @property
    def shared(self) -> dict[str, torch.nn.Parameter]:
        """θ: what travels."""
        return {name: p for name, p in self.named_parameters() if name.startswith(SHARED)}

    @property
    def personal(self) -> list[torch.nn.Parameter]:
        """φ_m: what never leaves the unit."""
        return [p for name, p in self.named_parameters() if not name.startswith(SHARED)]

    @torch.no_grad()
    def load(self, arrays: Mapping[str, Array]) -> None:
        """Overwrite θ.

        Raises:
            ProtocolError: names differ.
        """
        if set(self.shared) != set(arrays):
            raise ProtocolError(f"parameters {sorted(arrays)} received, expected {sorted(self.shared)}")
        for name, p in self.shared.items():
            p.copy_(torch.as_tensor(arrays[name]))

    def unit_parameters(self) -> UnitParameters:
        """φ_m; without Gaussian noise σ² is 1."""
        smoothing, amplitudes = (p.detach().numpy().copy() for p in (self.kernel.smoothing, self.kernel.amplitudes))
        if isinstance(self.likelihood, GaussianLikelihood):
            return UnitParameters(smoothing, amplitudes, float(self.likelihood.noise.detach()))
        return UnitParameters(smoothing, amplitudes, 1.0, tuple(self.likelihood.own.tolist()))


def fit_personal(model: MultiOutputGP, x: Tensor, y: Tensor, *, max_evaluations: int = 200) -> UnitParameters:
    """φ_m that maximises E_q log p(y | f) with θ as it is, for any likelihood."""
    maximise(lambda: model.expected_log_likelihood(x, y).sum(), model.personal, max_evaluations=max_evaluations)
    return model.unit_parameters()


def build_likelihood(kind: Kind, parameters: UnitParameters) -> Learned:
    """The likelihood at a unit's parameters; one that the unit has not trained yet starts from its noise σ²."""
    if kind == "gaussian":
        return gaussian_likelihood(parameters.noise)
    point = build_point_likelihood(kind, noise=parameters.noise)
    return LearnedLikelihood(point, likelihood_parameters(point, parameters))


def likelihood_parameters(point: PointLikelihood, parameters: UnitParameters) -> Tensor:
    """Parameters [R] of a likelihood; those of Gaussian noise are kept as σ²."""
    if isinstance(point, GaussianNoise):
        return torch.tensor([0.5 * math.log(parameters.noise)], dtype=torch.float64)
    return torch.tensor(parameters.likelihood, dtype=torch.float64) if parameters.likelihood else point.initial


def regression_targets(kind: Kind, y: Array) -> Array:
    """Where a regression starts the model: numbers as they are, a class as ±1, a count as log(y + ½)."""
    return np.log(y + 0.5) if kind == "poisson" else 2 * y - 1 if kind == "bernoulli" else y


@torch.no_grad()
def moments(kind: Kind, mean: Array, variance: Array, parameters: UnitParameters) -> tuple[Array, Array]:
    """Mean and variance of an observation where f ~ N(mean, variance), each [N]."""
    point = build_point_likelihood(kind)
    function = torch.from_numpy(mean), torch.from_numpy(variance)
    first, second = point.moments(*function, likelihood_parameters(point, parameters))
    return first.numpy(), second.numpy()
