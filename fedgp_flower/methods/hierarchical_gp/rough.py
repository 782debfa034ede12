"""A rough deviation of a unit along one input; all units share the hyperparameters.

With x in [0, 1], u ~ N(0, I) and J pseudo-inputs, unit m has y = Φᵀu + d_m + ε. The trend is Φ = a L⁻¹ k_ℓ(W, x), and
given its roughness b_h the deviation d_m is a Gaussian process with covariance

    K_h(x, x') = τ² k_ℓ'(x, x') + c² + λ² x x' + b_h² min(x, x'),

k the Matérn-3/2 correlation and p(h) = π_h over a short grid. All of θ = (a, ℓ, τ, ℓ', c, λ, σ, π) is shared and
learned from sums. Given q(u) = N(m, V) a unit weighs roughness h by r_h ∝ π_h e^{ℓ_h} with Σ_h = K_h + σ²I and

    ℓ_h = log N(y | Φᵀm, Σ_h) − ½ tr(Σ_h⁻¹ Φᵀ V Φ),

and adds P = Σ_h r_h Φ Σ_h⁻¹ Φᵀ, p = Σ_h r_h Φ Σ_h⁻¹ y and c = Σ_h r_h (log N(y | 0, Σ_h) + log π_h − log r_h), from
which :mod:`fedgp_flower.methods.hierarchical_gp.newton` has the bound of all rows, and a Newton step on θ.

At each cut c a unit takes what it added out of the totals, hides its rows beyond c and predicts these. Bands beyond c
are max(t, q̂) sd wide, t the .975 point of Student's t with as many degrees of freedom as units, q̂ the .95 point of the
summed histograms of |y − mean| / sd, in which a unit weighs 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy import ndarray
from scipy.stats import t as student
from torch import Tensor

from fedgp_flower.errors import RunError
from fedgp_flower.gp.linalg import cholesky, kernel_cholesky
from fedgp_flower.gp.sums import INPUT_EDGES
from fedgp_flower.methods.family import GlobalPosterior
from fedgp_flower.methods.hierarchical_gp.messages import Calibration, ExpansionShare
from fedgp_flower.methods.hierarchical_gp.newton import (
    Sums,
    averaged,
    jacobian,
    posterior,
    second_moment,
    second_order,
    share_of,
)
from fedgp_flower.typing import Array, Square, Targets, Vector

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
NOISY = ("level", "noise", "slope", "spread", "spread_lengthscale")
"""What Σ_h depends on."""
PRIOR_SD = 2.0
"""Of every entry of θ, around the start."""
CUTS = np.linspace(0.1, 0.9, 9)
"""Shares of the inputs' range."""
EDGES = np.geomspace(0.25, 40.0, 204)
"""Of the histogram of z; its first and last bin are open."""
LEVEL = 0.95
NORMAL = 1.959963984540054
LEAST_SEEN = 3
"""Rows from which a unit can be predicted."""
LEAST_POINTS, MARGIN = 3, 0.025
"""Fewest pseudo-inputs of units, and how far the grid goes beyond the inputs at each end, as a share of their range."""
EQUATION = (
    "y = aᵀ(x) u + d(x) + noise with u ~ q(u) = N(μ, diag(σ) L Lᵀ diag(σ)), a(x) = e^amplitude L⁻¹ k(W, x), k the "
    "Matérn-3/2 correlation of lengthscale e^lengthscale, L Lᵀ = k(W, W); d belongs to the unit and has covariance "
    "e^(2 spread) k'(x, x') + e^(2 level) + e^(2 slope) x x' + b² min(x, x'), b of five values with softmax("
    "roughness); the noise has sd e^noise. Here x runs from 0 to 1 over the pseudo-inputs."
)
NEEDS_A_UNIT = (
    "what is saved is shared by all units; a prediction also takes the rows of a unit: name the unit with `--site`, or "
    "a new one's table with `fedgp join`"
)


def first_theta() -> dict[str, Tensor]:
    """θ at the start: the mode of its prior; every roughness is as likely."""
    theta = {name: torch.tensor([math.log(value)], dtype=torch.float64) for name, value in START.items()}
    return theta | {"roughness": torch.zeros(len(ROUGHNESS), dtype=torch.float64)}


def theta_of(values: Mapping[str, ndarray]) -> dict[str, Tensor]:
    """θ of a message, without its prefix."""
    theta = {name.removeprefix("theta."): array for name, array in values.items() if name.startswith("theta.")}
    return {name: torch.tensor(array) for name, array in theta.items()}


def pseudo_inputs(histogram: Int[ndarray, "D bins"], count: int) -> Array:
    """An even grid [J, 1] over the bins of the one input that hold rows, and beyond by the margin."""
    if len(histogram) > 1:
        here = f"needs one input, here are {len(histogram)}: pick one with `features`, or take 'smooth'"
        raise RunError(f"`hierarchical.deviation` = 'rough' {here}")
    if count < LEAST_POINTS:
        raise RunError(f"`model.num-inducing` = {count}: 'rough' deviations need {LEAST_POINTS} points or more")
    filled = np.flatnonzero(histogram[0])
    low, high = INPUT_EDGES[filled[0]], INPUT_EDGES[filled[-1] + 1]
    beyond = MARGIN * (high - low)
    return np.linspace(low - beyond, high + beyond, count)[:, None]


def placed(inputs: Array, points: Array) -> Float[Tensor, " N"]:
    """Inputs [N, 1] as shares of the range of the pseudo-inputs [J, 1]."""
    return torch.from_numpy((inputs[:, 0] - points.min()) / np.ptp(points))


def matern32(x: Float[Tensor, " N"], other: Float[Tensor, " K"], log_lengthscale: Tensor) -> Float[Tensor, "N K"]:
    """(1 + √3 r) e^{−√3 r} with r = |x − x'| / ℓ."""
    scaled = math.sqrt(3) * (x[:, None] - other).abs() / log_lengthscale.exp()
    correlation: Tensor = (1 + scaled) * (-scaled).exp()
    return correlation


def inducing_factor(inducing: Float[Tensor, " J"], jitter: float, log_lengthscale: Tensor) -> Float[Tensor, "J J"]:
    """L with L Lᵀ = k_ℓ(W, W), and jitter."""
    correlation = matern32(inducing, inducing, log_lengthscale)
    return kernel_cholesky(correlation, variance=correlation.new_ones(()), jitter=jitter, of="k(W, W) of the trend")


@dataclass(frozen=True, slots=True)
class Weighing:
    """The sums of a unit for each roughness, and the weights of these."""

    precision: Float[Tensor, "H J J"]
    shift: Float[Tensor, "H J"]
    constant: Float[Tensor, " H"]
    """Log N(y | 0, Σ_h) + log π_h."""

    def evidence(self, q: GlobalPosterior) -> Float[Tensor, " H"]:
        """The sum log π_h + ℓ_h."""
        return self.constant + self.shift @ q.mean - 0.5 * (self.precision * second_moment(q)).sum((1, 2))

    def sums(self, q: GlobalPosterior) -> Sums:
        """P, p and c at the best weights for a q(u)."""
        log_r = self.evidence(q).log_softmax(0)
        r = log_r.exp()
        return Sums(torch.einsum("h,hij->ij", r, self.precision), r @ self.shift, r @ (self.constant - log_r))


@dataclass(frozen=True, slots=True)
class RoughDeviation:
    """The rows of one unit at a θ."""

    x: Float[Tensor, " N"]
    """Inputs in [0, 1]."""
    y: Targets
    inducing: Float[Tensor, " J"]
    """Pseudo-inputs in [0, 1]."""
    theta: Theta
    jitter: float = 1e-8
    """On the diagonal of k(W, W)."""

    def weighing(self) -> Weighing:
        """Sums for every roughness."""
        rows, factor = self._rows(), self._factor()
        solved = torch.linalg.solve_triangular(factor, rows.expand(len(factor), -1, -1), upper=False)
        return self._weighed(solved.mT @ solved, 2 * factor.diagonal(dim1=1, dim2=2).log().sum(1))

    def expanded(self) -> Weighing:
        """As :meth:`weighing`, with its first and second derivatives at this θ; none goes through a factor of Σ_h.

        With S = Σ_h⁻¹ here and E = Σ_i δ_i ∂_iΣ + … the change of Σ_h to second order

            Σ_h⁻¹ = S − S E S + S E S E S,    log|Σ_h| = log|S⁻¹| + tr(S E) − ½ Σ_ij δ_i δ_j tr(S ∂_iΣ S ∂_jΣ).
        """
        entries = [self.theta[name] for name in NOISY]
        here = [value.detach().requires_grad_() for value in entries]
        still = self._still(dict(zip(NOISY, here, strict=True)))
        parts = jacobian(still.flatten(), here).unflatten(1, still.shape)  # ∂_iΣ [T, N, N]
        with torch.no_grad():
            factor = self._factor()
            inverse = torch.cholesky_inverse(factor)  # for traces alone
            scaled = inverse[:, None] @ parts
            curvature = torch.einsum("hinm,hjmn->hij", scaled, scaled)
        change = self._still(self.theta) - still.detach()
        step = torch.cat(entries) - torch.cat(here).detach()
        rows = self._rows()
        solved = torch.cholesky_solve(rows.expand(len(factor), -1, -1), factor)
        moved = change @ solved  # E S R
        products = rows.mT @ solved - solved.mT @ moved + moved.mT @ torch.cholesky_solve(moved, factor)
        log_determinant = 2 * factor.diagonal(dim1=1, dim2=2).log().sum(1)
        rise = (inverse * change).sum((1, 2)) - 0.5 * torch.einsum("i,hij,j->h", step, curvature, step)
        return self._weighed(products, log_determinant + rise)

    def derivatives(self, q_global: GlobalPosterior) -> ExpansionShare:
        """Sums, their total derivatives by θ in the order of its names, and J″ with J = log Σ_h π_h e^{ℓ_h}."""
        names = sorted(self.theta)
        leaves = [self.theta[name].detach().clone().requires_grad_() for name in names]
        weighing = replace(self, theta=dict(zip(names, leaves, strict=True))).expanded()
        sums, value = weighing.sums(q_global), weighing.evidence(q_global).logsumexp(0)
        none = self.y.new_zeros(0)
        return share_of(sums, *second_order(sums, value, leaves), none, none, len(self.y))

    @torch.no_grad()
    def predict(self, x: Float[Tensor, " K"], q: GlobalPosterior) -> tuple[Tensor, Tensor]:
        """Mean and variance of an observation, mixed over the roughness.

        With A = Σ_h⁻¹k_* and w = φ_* − ΦA: mean Aᵀy + wᵀm, variance k_** − k_*ᵀA + wᵀVw + σ².
        """
        r, factor = self.weighing().evidence(q).softmax(0), self._factor()
        across, whole = (_smooth(self.theta, at, x) + _rough(at, x) for at in (self.x, x))
        prior = whole.diagonal(dim1=1, dim2=2)
        gain = torch.cholesky_solve(across, factor)  # A [H, N, K]
        left = self._features(x) - self._features(self.x) @ gain  # w [H, J, K]
        means = torch.einsum("hnk,n->hk", gain, self.y) + torch.einsum("hjk,j->hk", left, q.mean)
        spread = prior - (across * gain).sum(1) + (q.factor().mT @ left).square().sum(1)
        return averaged(r, means, spread + (2 * self.theta["noise"]).exp())

    @torch.no_grad()
    def trend(self, x: Float[Tensor, " K"], q: GlobalPosterior) -> Float[Tensor, " K"]:
        """Mean of the shared curve."""
        return q.mean @ self._features(x)

    def _rows(self) -> Float[Tensor, "N J1"]:
        """The features and the target of every row."""
        return torch.cat([self._features(self.x), self.y[None]]).mT

    def _weighed(self, products: Float[Tensor, "H J1 J1"], log_determinant: Float[Tensor, " H"]) -> Weighing:
        """From RᵀΣ_h⁻¹R with R the rows, and log|Σ_h|."""
        fit = products[:, -1, -1] + log_determinant
        prior = self.theta["roughness"].log_softmax(0)
        constant = prior - 0.5 * (fit + len(self.y) * math.log(2 * math.pi))
        return Weighing(products[:, :-1, :-1], products[:, :-1, -1], constant)

    def _features(self, x: Float[Tensor, " N"]) -> Float[Tensor, "J N"]:
        """The features Φ."""
        factor = inducing_factor(self.inducing, self.jitter, self.theta["lengthscale"])
        cross = matern32(self.inducing, x, self.theta["lengthscale"])
        return self.theta["amplitude"].exp() * torch.linalg.solve_triangular(factor, cross, upper=False)

    def _still(self, theta: Theta) -> Float[Tensor, "N N"]:
        """Σ_h without its roughness."""
        return _smooth(theta, self.x, self.x) + (2 * theta["noise"]).exp() * torch.eye(len(self.x)).to(self.x)

    def _factor(self) -> Float[Tensor, "H N N"]:
        """Cholesky factors of Σ_h."""
        return cholesky(self._still(self.theta) + _rough(self.x, self.x), of="covariance of a unit's rows")


def _smooth(theta: Theta, x: Tensor, other: Tensor) -> Float[Tensor, "N K"]:
    """K_h without its roughness."""
    smooth: Tensor = (2 * theta["spread"]).exp() * matern32(x, other, theta["spread_lengthscale"])
    return smooth + (2 * theta["level"]).exp() + (2 * theta["slope"]).exp() * x[:, None] * other


def _rough(x: Tensor, other: Tensor) -> Float[Tensor, "H N K"]:
    """b_h² min(x, x')."""
    walk = torch.minimum(x.clamp(min=0)[:, None], other.clamp(min=0))
    return torch.tensor(ROUGHNESS, dtype=x.dtype).square()[:, None, None] * walk


def calibration(unit: RoughDeviation, q: GlobalPosterior, precision: Square, shift: Vector) -> Calibration:
    """The histograms of one unit, with q(u) from all the others; ``precision`` and ``shift`` are the total P and p."""
    share = unit.weighing().sums(q)
    precision, shift = precision - share.precision, shift - share.shift
    rows = np.zeros((len(CUTS), len(EDGES) + 1))
    for c, cut in enumerate(CUTS):
        seen = unit.x <= float(cut)
        if LEAST_SEEN <= int(seen.sum()) < len(seen):
            part = replace(unit, x=unit.x[seen], y=unit.y[seen])
            first = part.weighing().sums(posterior(precision, shift)[0])
            both = posterior(precision + first.precision, shift + first.shift)[0]
            mean, variance = part.predict(unit.x[~seen], both)
            z = ((unit.y[~seen] - mean).abs() / variance.sqrt()).numpy()
            rows[c] = np.bincount(np.searchsorted(EDGES, z), minlength=len(EDGES) + 1)
    hidden = rows.sum(axis=1)
    return Calibration(rows / np.maximum(hidden, 1)[:, None], hidden)


def factors(total: Calibration) -> Array:
    """By cut, the width of the band over that of a normal one; 1 where no unit could be asked."""
    found = np.ones(len(CUTS))
    for c, shares in enumerate(total.shares):
        units = float(shares.sum())
        if units > 0.5:
            reached = int(np.searchsorted(np.cumsum(shares), LEVEL * units - 1e-9))
            found[c] = max(student.ppf(0.975, units), EDGES[min(reached, len(EDGES) - 1)]) / NORMAL
    return found


def widened(variance: Array, x: Array, last: float, by: Array) -> Array:
    """Variances beyond the last row, at inputs in [0, 1], times the square of the factor of the nearest cut."""
    factor = float(by[int(np.abs(CUTS - last).argmin())])
    wide: Array = np.where(x > last, factor**2, 1.0) * variance
    return wide
