"""One unit's view of the federated multi-output GP: shared q(g), own smoothing, amplitudes and likelihood.

Shared θ = {S, q(u), W if learned} travels; personal φ_m = {R_m, s_m, likelihood} does not. q is whitened,
g_i = L_i u_i with q(u_i) = N(m_i, T_i T_iᵀ), and only the diagonal of C_ff is ever formed.

Reference: Chung and Al Kontar, Federated multi-output Gaussian processes, Technometrics 66 (2024), Eqs. 11-16, Alg. 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import gpytorch
import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from gpytorch.variational import CholeskyVariationalDistribution
from linear_operator.operators import DiagLinearOperator
from torch import Tensor

from fedgp_flower.errors import NumericsError, ProtocolError
from fedgp_flower.latent import Latents, Posterior, product_factors
from fedgp_flower.linalg import kernel_cholesky
from fedgp_flower.models.convolved import ConvolvedKernel, CoregionalKernel
from fedgp_flower.models.exact_q import UnitParameters
from fedgp_flower.models.fitting import maximise
from fedgp_flower.models.multi_output_gradient import GaussianRisk, descend
from fedgp_flower.models.multi_output_likelihoods import Kind, Pointwise, build_likelihood, own_parameters
from fedgp_flower.shapes import Array, NamedArrays

_SHARED = ("inducing", "kernel.raw_scales", "variational.")


class MultiOutputModel(gpytorch.Module):
    """A unit's sparse multi-output GP: E_q log p(y | f), KL(q(g) ‖ p(g)) and personalised prediction."""

    def __init__(
        self,
        inducing: Tensor,
        kernel: ConvolvedKernel,
        likelihood: Likelihood | Pointwise,
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
        L = kernel_cholesky(latent, variance=latent.new_ones(len(latent)), jitter=self.jitter, of="C_gg")
        A = torch.linalg.solve_triangular(L, self.kernel.cross(x, self.inducing).mT, upper=False)  # L⁻¹ C_gf  [I, J, N]
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


@dataclass(frozen=True, slots=True)
class LocalSteps:
    """A unit's local optimisation in one round of Algorithm 2."""

    steps: int = 20
    learning_rate: float = 0.1
    optimizer: Literal["adam", "sgd"] = "adam"
    batch_size: int = 0
    """Rows of a mini-batch, drawn without replacement at each step; 0 takes all rows."""


def local_update(
    model: MultiOutputModel, x: Tensor, y: Tensor, options: LocalSteps, *, weight: float, generator: torch.Generator
) -> dict[str, Array]:
    """client_update of Algorithm 2: E local steps on (θ, φ_m), then the pseudo-gradient Δ_m = θ − θ_m.

    The optimiser starts afresh, φ_m stays in ``model``, and so does the unit's own θ_m until the next broadcast.

    Raises:
        NumericsError: a parameter is not finite, so that a diverged step is neither sent nor kept.
    """
    before = to_arrays(shared_parameters(model))
    whole = options.batch_size == 0 or options.batch_size >= len(y)

    def rows() -> Tensor | None:
        return None if whole else torch.randperm(len(y), generator=generator)[: options.batch_size]

    if isinstance(model.likelihood, GaussianLikelihood) and "inducing" not in before:
        _in_closed_form(model, x, y, rows, options, weight)
    else:
        _by_autograd(model, x, y, rows, options, weight)
    _refuse_diverged(model)
    after = to_arrays(shared_parameters(model))
    return {name: before[name] - after[name] for name in before}


Draw = Callable[[], Tensor | None]
"""Rows of the next mini-batch; None for all."""


def _in_closed_form(
    model: MultiOutputModel, x: Tensor, y: Tensor, draw: Draw, options: LocalSteps, weight: float
) -> None:
    """Local steps with the gradient of :class:`GaussianRisk`, a tenth of the time that autograd takes."""
    risk = GaussianRisk(x.numpy(), y.numpy(), model.inducing.numpy(), weight=weight, jitter=model.jitter)

    def slopes(parameters: NamedArrays) -> NamedArrays:
        rows = draw()
        return risk.gradient(parameters, None if rows is None else rows.numpy())[1]

    parameters = dict(model.named_parameters())
    start, adam = to_arrays(parameters), options.optimizer == "adam"
    load(parameters, descend(slopes, start, steps=options.steps, rate=options.learning_rate, adam=adam))


def _by_autograd(model: MultiOutputModel, x: Tensor, y: Tensor, draw: Draw, options: LocalSteps, weight: float) -> None:
    """Local steps for any likelihood, and where pseudo-inputs move."""
    kind = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[options.optimizer]
    optimizer = kind(model.parameters(), lr=options.learning_rate)
    for _ in range(options.steps):
        drawn = draw()
        rows = slice(None) if drawn is None else drawn
        optimizer.zero_grad()
        model.local_risk(x[rows], y[rows], num_data=len(y), weight=weight).backward()
        optimizer.step()


def _refuse_diverged(model: MultiOutputModel) -> None:
    """Parameters are finite, and those that are logarithms in the model are positive numbers too."""
    latents, phi = to_exact(model)
    positive = np.concatenate([latents.scales.ravel(), phi.smoothing[phi.smoothing != 0], [phi.noise]])
    if not (np.isfinite(positive).all() and (positive > 0).all()) or not all(
        bool(torch.isfinite(p).all()) for p in model.parameters()
    ):
        raise NumericsError("local steps diverged: a parameter is not finite. Lower `optimizer.learning-rate`.")


def unit_model(
    latents: Latents,
    parameters: UnitParameters,
    *,
    likelihood: Kind = "gaussian",
    learn_inducing: bool = False,
) -> MultiOutputModel:
    """The model of a unit with q = prior."""
    scales, amplitudes = torch.from_numpy(latents.scales), torch.from_numpy(parameters.amplitudes * latents.amplitudes)
    if np.any(parameters.smoothing > 0):
        kernel = ConvolvedKernel(scales, torch.from_numpy(parameters.smoothing), amplitudes)
    else:
        kernel = CoregionalKernel(scales, amplitudes)
    noisy = build_likelihood(likelihood, parameters)
    W = torch.from_numpy(latents.inducing)
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


def fit_personal(model: MultiOutputModel, x: Tensor, y: Tensor, *, max_evaluations: int = 200) -> UnitParameters:
    """φ_m that maximises E_q log p(y | f) with everything shared held as it is: a unit that joins late."""
    own = list(personal_parameters(model).values())
    maximise(lambda: model.expected_log_likelihood(x, y).sum(), own, max_evaluations=max_evaluations)
    return to_exact(model)[1]
