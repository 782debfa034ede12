"""Units that are one shared curve and a deviation of their own, whose hyperparameters all units share.

With x in [0, 1], u ~ N(0, I) and J pseudo-inputs, unit m has y = Φᵀu + d_m + ε. The trend is Φ = a L⁻¹ k_ℓ(W, x), and
given its roughness b_h the deviation d_m is a Gaussian process with covariance

    K_h(x, x') = τ² k_ℓ'(x, x') + c² + λ² x x' + b_h² min(x, x'),

k the Matérn-3/2 correlation and p(h) = π_h over a short grid. All of θ = (a, ℓ, τ, ℓ', c, λ, σ, π) is shared and
learned from sums. Given q(u) = N(m, V) a unit weighs roughness h by r_h ∝ π_h e^{ℓ_h} with Σ_h = K_h + σ²I and

    ℓ_h = log N(y | Φᵀm, Σ_h) − ½ tr(Σ_h⁻¹ Φᵀ V Φ),

and adds P = Σ_h r_h Φ Σ_h⁻¹ Φᵀ, p = Σ_h r_h Φ Σ_h⁻¹ y and c = Σ_h r_h (log N(y | 0, Σ_h) + log π_h − log r_h), from
which :mod:`fedgp_flower.methods.closed_form` has the bound of all rows, and a Newton step on θ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from fedgp_flower.gp.linalg import cholesky, kernel_cholesky
from fedgp_flower.methods.closed_form import Derivatives, Sums, Width, flattened, jacobian, rows_of_jacobian
from fedgp_flower.methods.family import GlobalPosterior
from fedgp_flower.typing import Scalar, Targets

Theta: TypeAlias = Mapping[str, Tensor]
"""θ by name: logarithms, and of π logits."""
START = {
    "amplitude": 1.0,
    "lengthscale": 0.3,
    "level": math.exp(-1),
    "noise": 0.03,
    "slope": math.exp(-1),
    "spread": math.exp(-2),
    "spread_lengthscale": 0.3,
}
"""a, ℓ, c, σ, λ, τ and ℓ' at the start, where targets have mean square 1."""
ROUGHNESS = (0.0, 0.005, 0.015, 0.05, 0.15)
"""b_h."""
PRIOR_SD = 2.0
"""Of every entry of θ, around the start."""


def beginning() -> dict[str, Tensor]:
    """θ at the start: the mode of its prior; every roughness is as likely."""
    theta = {name: torch.tensor([math.log(value)], dtype=torch.float64) for name, value in START.items()}
    return theta | {"roughness": torch.zeros(len(ROUGHNESS), dtype=torch.float64)}


def matern32(x: Float[Tensor, " N"], other: Float[Tensor, " K"], log_lengthscale: Tensor) -> Float[Tensor, "N K"]:
    """(1 + √3 r) e^{−√3 r} with r = |x − x'| / ℓ."""
    scaled = math.sqrt(3) * (x[:, None] - other).abs() / log_lengthscale.exp()
    correlation: Tensor = (1 + scaled) * (-scaled).exp()
    return correlation


def inducing_factor(theta: Theta, inducing: Float[Tensor, " J"], jitter: float) -> Float[Tensor, "J J"]:
    """L with L Lᵀ = k_ℓ(W, W), and jitter."""
    correlation = matern32(inducing, inducing, theta["lengthscale"])
    return kernel_cholesky(correlation, variance=correlation.new_ones(()), jitter=jitter, of="k(W, W) of the trend")


@dataclass(frozen=True, slots=True)
class Weighing:
    """What a unit thinks of each roughness, and what it adds for it."""

    precision: Float[Tensor, "H J J"]
    shift: Float[Tensor, "H J"]
    constant: Float[Tensor, " H"]
    """Log N(y | 0, Σ_h) + log π_h."""

    def responsibilities(self, q: GlobalPosterior) -> Float[Tensor, " H"]:
        """The weights r_h."""
        return self.evidence(q).softmax(0)

    def evidence(self, q: GlobalPosterior) -> Float[Tensor, " H"]:
        """The sum log π_h + ℓ_h."""
        factor = q.factor()
        second = factor @ factor.mT + torch.outer(q.mean, q.mean)
        return self.constant + self.shift @ q.mean - 0.5 * (self.precision * second).sum((1, 2))

    def sums(self, q: GlobalPosterior) -> Sums:
        """P, p and c at the best weights for a q(u)."""
        log_r = self.evidence(q).log_softmax(0)
        r = log_r.exp()
        return Sums(torch.einsum("h,hij->ij", r, self.precision), r @ self.shift, r @ (self.constant - log_r))


class DeviatingUnit:
    """The rows of one unit.

    Args:
        x: Inputs in [0, 1].
        y: Targets.
        inducing: Pseudo-inputs in [0, 1].
        jitter: On the diagonal of k(W, W).
    """

    def __init__(
        self, x: Float[Tensor, " N"], y: Targets, inducing: Float[Tensor, " J"], *, jitter: float = 1e-8
    ) -> None:
        self.x, self.y, self.inducing, self.jitter = x, y, inducing, jitter

    def weighing(self, theta: Theta) -> Weighing:
        """Sums for every roughness."""
        rows = torch.cat([self._trend(theta, self.x), self.y[None]])
        factor = self._factor(theta)
        solved = torch.linalg.solve_triangular(factor, rows.mT.expand(len(factor), -1, -1), upper=False)
        products = solved.mT @ solved
        fit = products[:, -1, -1] + 2 * factor.diagonal(dim1=1, dim2=2).log().sum(1)
        prior = theta["roughness"].log_softmax(0)
        constant = prior - 0.5 * (fit + len(self.y) * math.log(2 * math.pi))
        return Weighing(products[:, :-1, :-1], products[:, :-1, -1], constant)

    def derivatives(self, theta: Theta, q: GlobalPosterior) -> Derivatives:
        """Sums, their total derivatives by θ in the order of its names, and J″ with J = log Σ_h π_h e^{ℓ_h}."""
        leaves = [theta[name].detach().clone().requires_grad_() for name in sorted(theta)]
        weighing = self.weighing(dict(zip(sorted(theta), leaves, strict=True)))
        sums = weighing.sums(q)
        slopes = jacobian(sums.flat(), leaves)
        gradient = flattened(torch.autograd.grad(weighing.evidence(q).logsumexp(0), leaves, create_graph=True))
        curvature = rows_of_jacobian(gradient, leaves)
        no_shape = Width(torch.zeros(0), torch.zeros(0))
        return Derivatives(Sums(*(own.detach() for own in sums.parts())), slopes.detach(), curvature.detach(), no_shape)

    @torch.no_grad()
    def predict(self, x: Float[Tensor, " K"], theta: Theta, q: GlobalPosterior) -> tuple[Tensor, Tensor]:
        """Mean and variance of an observation, mixed over the roughness.

        With A = Σ_h⁻¹k_* and w = φ_* − ΦA: mean Aᵀy + wᵀm, variance k_** − k_*ᵀA + wᵀVw + σ².
        """
        r, factor = self.weighing(theta).responsibilities(q), self._factor(theta)
        across, prior = self._covariances(theta, self.x, x), self._covariances(theta, x, x).diagonal(dim1=1, dim2=2)
        gain = torch.cholesky_solve(across, factor)  # A [H, N, K]
        left = self._trend(theta, x) - self._trend(theta, self.x) @ gain  # w [H, J, K]
        means = torch.einsum("hnk,n->hk", gain, self.y) + torch.einsum("hjk,j->hk", left, q.mean)
        own = prior - (across * gain).sum(1) + (q.factor().mT @ left).square().sum(1)
        mean = r @ means
        variance = r @ (own + (means - mean).square()) + (2 * theta["noise"]).exp()
        return mean, variance

    def _trend(self, theta: Theta, x: Float[Tensor, " N"]) -> Float[Tensor, "J N"]:
        """The features Φ."""
        factor = inducing_factor(theta, self.inducing, self.jitter)
        cross = matern32(self.inducing, x, theta["lengthscale"])
        return theta["amplitude"].exp() * torch.linalg.solve_triangular(factor, cross, upper=False)

    def _covariances(self, theta: Theta, x: Tensor, other: Tensor) -> Float[Tensor, "H N K"]:
        """K_h between inputs."""
        smooth = (2 * theta["spread"]).exp() * matern32(x, other, theta["spread_lengthscale"])
        straight = (2 * theta["level"]).exp() + (2 * theta["slope"]).exp() * x[:, None] * other
        rough = torch.tensor(ROUGHNESS, dtype=x.dtype).square()[:, None, None]
        return smooth + straight + rough * torch.minimum(x.clamp(min=0)[:, None], other.clamp(min=0))

    def _factor(self, theta: Theta) -> Float[Tensor, "H N N"]:
        """Cholesky factors of Σ_h."""
        noise = (2 * theta["noise"]).exp() * torch.eye(len(self.x)).to(self.x)
        return cholesky(self._covariances(theta, self.x, self.x) + noise, of="covariance of a unit's rows")


def bound(total: Sums) -> Scalar:
    """F = c − ½ log|I + P| + ½ pᵀ(I + P)⁻¹p."""
    factor = cholesky(torch.eye(len(total.shift)).to(total.shift) + total.precision, of="precision of q(u)")
    half = torch.linalg.solve_triangular(factor, total.shift[:, None], upper=False)
    value: Tensor = total.constant - factor.diagonal().log().sum() + 0.5 * half.square().sum()
    return value
