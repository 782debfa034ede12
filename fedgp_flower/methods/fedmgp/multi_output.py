"""One unit's view of the federated multi-output GP: shared q(g), own smoothing, amplitudes and likelihood.

Shared θ = {S, q(u), W if learned} travels; personal φ_m = {R_m, s_m, likelihood} does not. q is whitened,
g_i = L_i u_i with q(u_i) = N(m_i, T_i T_iᵀ), and only the diagonal of C_ff is ever formed.

Reference: Chung and Al Kontar, Federated multi-output Gaussian processes, Technometrics 66 (2024), Eqs. 11-16, Alg. 2.
"""

from __future__ import annotations

from collections.abc import Mapping

import gpytorch
import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.variational import CholeskyVariationalDistribution
from linear_operator.operators import DiagLinearOperator
from torch import Tensor

from fedgp_flower.errors import ProtocolError
from fedgp_flower.gp.convolved import ConvolvedKernel, CoregionalKernel
from fedgp_flower.gp.likelihoods import LearnedLikelihood
from fedgp_flower.gp.projections import whitened
from fedgp_flower.methods.fedmgp.latents import Latents, Posterior, product_factors
from fedgp_flower.methods.fedmgp.likelihoods import Kind, build_likelihood, own_parameters
from fedgp_flower.methods.fedmgp.unit import UnitParameters
from fedgp_flower.typing import Array

_SHARED = ("inducing", "kernel.raw_scales", "variational.")


class MultiOutputModel(gpytorch.Module):
    """A unit's sparse multi-output GP: E_q log p(y | f), KL(q(g) ‖ p(g)) and personalised prediction."""

    def __init__(
        self,
        inducing: Tensor,
        kernel: ConvolvedKernel,
        likelihood: Likelihood | LearnedLikelihood,
        *,
        learn_inducing: bool = False,
        jitter: float = 1e-8,
    ) -> None:
        super().__init__()
        if learn_inducing:
            self.inducing = torch.nn.Parameter(inducing.clone())
        else:
            self.register_buffer("inducing", inducing)
        self.kernel, self.likelihood, self.jitter = kernel, likelihood, jitter
        shape = torch.Size([kernel.scales.shape[0]])
        self.variational = CholeskyVariationalDistribution(len(inducing), batch_shape=shape, mean_init_std=0).double()

    def marginal(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of q(f) at each row of ``x`` [N, D] (diagonal of Eq. 12).  [N], [N]."""
        latent = self.kernel.latent(self.inducing)
        cross, unit = self.kernel.cross(x, self.inducing).mT, latent.new_ones(len(latent))
        A = whitened(latent, cross, variance=unit, jitter=self.jitter, of="C_gg")  # L⁻¹ C_gf  [I, J, N]
        T = self.variational.chol_variational_covar.tril()
        mean = torch.einsum("ijn,ij->n", A, self.variational.variational_mean)
        unexplained = self.kernel.prior_variance()[:, None] - A.square().sum(-2)  # Ω_nn by latent function, [I, N]
        return mean, (unexplained + (T.mT @ A).square().sum(-2)).sum(0)

    def expected_log_likelihood(self, x: Tensor, y: Tensor) -> Tensor:
        """E_q log p(y_n | f_n) of each row, closed form or quadrature as the likelihood has it.  [N]."""
        mean, variance = self.marginal(x)
        q = MultivariateNormal(mean, DiagLinearOperator(variance))
        expected: Tensor = self.likelihood.expected_log_prob(y, q)
        return expected

    def kl(self) -> Tensor:
        """Σ_i KL(q(g_i) ‖ p(g_i)) = ½ Σ_i [‖T_i‖² + ‖m_i‖² − J − log |T_i T_iᵀ|]."""
        T, m = self.variational.chol_variational_covar.tril(), self.variational.variational_mean
        log_det = T.diagonal(dim1=-2, dim2=-1).square().log().sum()
        divergence: Tensor = 0.5 * (T.square().sum() + m.square().sum() - m.numel() - log_det)
        return divergence

    def local_risk(self, x: Tensor, y: Tensor, *, num_data: int, weight: float) -> Tensor:
        """R_m = −(1/p_m) (N_m/|B|) Σ_B E_q log p(y_n | f_n) + Σ_i KL(q(g_i) ‖ p(g_i)) (Eq. 14) on a mini-batch B.

        Σ_m p_m (−R_m) is the pooled evidence lower bound.
        """
        return -self.expected_log_likelihood(x, y).sum() * (num_data / len(y) / weight) + self.kl()


def shared_parameters(model: MultiOutputModel) -> dict[str, torch.nn.Parameter]:
    """θ: what travels."""
    return {name: p for name, p in model.named_parameters() if name.startswith(_SHARED)}


def personal_parameters(model: MultiOutputModel) -> dict[str, torch.nn.Parameter]:
    """φ_m: what never leaves the unit."""
    return {name: p for name, p in model.named_parameters() if not name.startswith(_SHARED)}


def to_arrays(parameters: Mapping[str, Tensor]) -> dict[str, Array]:
    """Copies of parameters under their names."""
    return {name: p.detach().cpu().numpy().copy() for name, p in parameters.items()}


def load(parameters: Mapping[str, Tensor], arrays: Mapping[str, Array]) -> None:
    """Overwrite parameters with arrays of the same names.

    Raises:
        ProtocolError: where names differ.
    """
    if set(parameters) != set(arrays):
        raise ProtocolError(f"parameters {sorted(arrays)} received, expected {sorted(parameters)}")
    with torch.no_grad():
        for name, p in parameters.items():
            p.copy_(torch.as_tensor(arrays[name]))


def unit_model(
    latents: Latents,
    parameters: UnitParameters,
    *,
    likelihood: Kind = "gaussian",
    learn_inducing: bool = False,
) -> MultiOutputModel:
    """The model of a unit with q = prior."""
    scales, amplitudes = torch.tensor(latents.scales), torch.from_numpy(parameters.amplitudes * latents.amplitudes)
    if np.any(parameters.smoothing > 0):
        kernel = ConvolvedKernel(scales, torch.tensor(parameters.smoothing), amplitudes)
    else:
        kernel = CoregionalKernel(scales, amplitudes)
    noisy = build_likelihood(likelihood, parameters)
    W = torch.tensor(latents.inducing)  # a copy: what a message carries may be read-only
    return MultiOutputModel(W, kernel, noisy, learn_inducing=learn_inducing, jitter=latents.jitter)


@torch.no_grad()
def from_exact(
    latents: Latents,
    q: Posterior,
    parameters: UnitParameters,
    *,
    likelihood: Kind = "gaussian",
    learn_inducing: bool = False,
) -> MultiOutputModel:
    """The model of a unit in exact mode, to go on with pseudo-gradients.

    A joint q(u) becomes the product over latent functions that is closest to it.
    """
    count, J = latents.scales.shape[0], latents.inducing.shape[0]
    model = unit_model(latents, parameters, likelihood=likelihood, learn_inducing=learn_inducing)
    model.variational.variational_mean.copy_(torch.from_numpy(q.mean).reshape(count, J))
    model.variational.chol_variational_covar.copy_(torch.from_numpy(product_factors(q, count)))
    return model


def to_exact(model: MultiOutputModel) -> tuple[Latents, UnitParameters]:
    """Shared latents and a unit's own parameters, to end with exact rounds; without Gaussian noise it is set to 1."""
    kernel, likelihood = model.kernel, model.likelihood

    def array(value: Tensor) -> Array:
        return np.array(value.detach().cpu().numpy(), dtype=np.float64)

    latents = Latents(array(model.inducing), array(kernel.scales), np.ones(len(kernel.scales)), model.jitter)
    return latents, UnitParameters(array(kernel.smoothing), array(kernel.amplitudes), *own_parameters(likelihood))
