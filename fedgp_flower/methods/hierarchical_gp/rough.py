"""Rough deviations of units along one input; all units share the hyperparameters.

With x in [0, 1], u ~ N(0, I) and J pseudo-inputs, unit m has y = Φᵀu + d_m + ε. The trend is Φ = a L⁻¹ k_ℓ(W, x), and
given its roughness b_h the deviation d_m is a GP with covariance

    K_h(x, x') = τ² k_ℓ'(x, x') + c² + λ² x x' + b_h² min(x, x'),

k the Matérn-3/2 correlation and p(h) = π_h over a short grid. θ = (a, ℓ, τ, ℓ', c, λ, σ, π) is shared and learned
from sums. Given q(u) = N(m, V) the weight of roughness h at a unit is r_h ∝ π_h e^{ℓ_h} with Σ_h = K_h + σ²I and

    ℓ_h = log N(y | Φᵀm, Σ_h) − ½ tr(Σ_h⁻¹ Φᵀ V Φ),

A unit sends P = Σ_h r_h Φ Σ_h⁻¹ Φᵀ, p = Σ_h r_h Φ Σ_h⁻¹ y and c = Σ_h r_h (log N(y | 0, Σ_h) + log π_h − log r_h).
From these :mod:`fedgp_flower.methods.hierarchical_gp.newton` computes the bound of all rows and a Newton step on θ.

At each cut c a unit subtracts its sums from the totals and predicts its rows beyond c from the others. Bands beyond c
are max(t, q̂) sd wide: t is the .975 quantile of Student's t with one degree of freedom per unit, q̂ the .95 quantile
of the summed histograms of |y − mean| / sd, in which each unit has weight 1.
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
from fedgp_flower.gp.sums import covering
from fedgp_flower.methods.family import GlobalPosterior
from fedgp_flower.methods.hierarchical_gp.messages import Calibration, ExpansionShare
from fedgp_flower.methods.hierarchical_gp.newton import (
    Expanded,
    Sums,
    mixture,
    posterior,
    second_moment,
    second_order,
    share_of,
)
from fedgp_flower.typing import Array, Square, Targets, Vector

Theta: TypeAlias = Mapping[str, Tensor]
"""θ by name: logarithms, and logits of π."""
START = {
    "amplitude": 1.0,
    "lengthscale": 0.3,
    "level": math.exp(-1),
    "noise": 0.03,
    "slope": math.exp(-1),
    "spread": math.exp(-2),
    "spread_lengthscale": 0.3,
}
"""Initial a, ℓ, c, σ, λ, τ and ℓ', for targets of mean square 1."""
ROUGHNESS = (0.0, 0.005, 0.015, 0.05, 0.15)
"""Grid of b_h."""
COVARIANCE = ("level", "noise", "slope", "spread", "spread_lengthscale")
"""Entries of θ in Σ_h."""
PRIOR_SD = 2.0
"""Prior sd of every entry of θ around its initial value."""
FACTORS = "factors"
"""Name of the factors of bands among the parameters of a posterior."""
CUTS = np.linspace(0.1, 0.9, 9)
"""Cuts as fractions of the range of the inputs."""
EDGES = np.geomspace(0.25, 40.0, 204)
"""Bin edges of the histogram of z; its first and last bin are open."""
LEVEL = 0.95
NORMAL = 1.959963984540054
MIN_ROWS = 3
"""Fewest rows from which a unit is predicted."""
MIN_POINTS = 3
"""Fewest pseudo-inputs."""
ROWS = "covariance of a unit's rows"
"""Name of a matrix in errors."""
EQUATION = (
    "y = aᵀ(x) u + d(x) + noise with u ~ q(u) = N(μ, diag(σ) L Lᵀ diag(σ)), a(x) = e^amplitude L⁻¹ k(W, x), k the "
    "Matérn-3/2 correlation of lengthscale e^lengthscale, L Lᵀ = k(W, W); d belongs to the unit and has covariance "
    "e^(2 spread) k'(x, x') + e^(2 level) + e^(2 slope) x x' + b² min(x, x'), b of five values with softmax("
    "roughness); the noise has sd e^noise. Here x runs from 0 to 1 over the pseudo-inputs."
)
NEEDS_A_UNIT = (
    "the saved posterior is that of the shared trend, and a prediction also needs the rows of a unit: name the unit"
    " with `--site`, or the table of a new unit with `fedgp join`"
)


def first_theta() -> dict[str, Tensor]:
    """Initial θ: the mode of its prior, with equal π."""
    theta = {name: torch.tensor([math.log(value)], dtype=torch.float64) for name, value in START.items()}
    return theta | {"roughness": torch.zeros(len(ROUGHNESS), dtype=torch.float64)}


def theta_of(values: Mapping[str, ndarray]) -> dict[str, Tensor]:
    """θ of a message, by names without their prefix."""
    theta = {name.removeprefix("theta."): array for name, array in values.items() if name.startswith("theta.")}
    return {name: torch.tensor(array) for name, array in theta.items()}


def pseudo_inputs(histogram: Int[ndarray, "D bins"], count: int) -> Array:
    """Even grid [J, 1] that covers the single input; raise RunError if there are several."""
    if len(histogram) > 1:
        reason = f"needs one input, but there are {len(histogram)}: choose one with `features`, or take 'smooth'"
        raise RunError(f"`hierarchical.deviation` = 'rough' {reason}")
    if count < MIN_POINTS:
        raise RunError(f"`model.num-inducing` = {count}: 'rough' deviations need at least {MIN_POINTS} points")
    return covering(histogram[0], count)[:, None]


def rescale(inputs: Array, points: Array) -> Float[Tensor, " N"]:
    """Inputs [N, 1] rescaled to [0, 1] over the range of the pseudo-inputs [J, 1]."""
    return torch.from_numpy((inputs[:, 0] - points.min()) / np.ptp(points))


def matern32(x: Float[Tensor, " N"], other: Float[Tensor, " K"], log_lengthscale: Tensor) -> Float[Tensor, "N K"]:
    """(1 + √3 r) e^{−√3 r} with r = |x − x'| / ℓ."""
    scaled = math.sqrt(3) * (x[:, None] - other).abs() / log_lengthscale.exp()
    correlation: Tensor = (1 + scaled) * (-scaled).exp()
    return correlation


def inducing_factor(inducing: Float[Tensor, " J"], jitter: float, log_lengthscale: Tensor) -> Float[Tensor, "J J"]:
    """L with L Lᵀ = k_ℓ(W, W) + jitter."""
    correlation = matern32(inducing, inducing, log_lengthscale)
    return kernel_cholesky(correlation, variance=correlation.new_ones(()), jitter=jitter, of="k(W, W) of the trend")


@dataclass(frozen=True, slots=True)
class RoughnessSums:
    """The sums of a unit for each roughness, and the weights of these."""

    precision: Float[Tensor, "H J J"]
    shift: Float[Tensor, "H J"]
    constant: Float[Tensor, " H"]
    """Log N(y | 0, Σ_h) + log π_h."""

    def evidence(self, q: GlobalPosterior) -> Float[Tensor, " H"]:
        """Sum log π_h + ℓ_h."""
        return self.constant + self.shift @ q.mean - 0.5 * (self.precision * second_moment(q)).sum((1, 2))

    def sums(self, q: GlobalPosterior) -> Sums:
        """P, p and c at the optimal weights given q(u)."""
        log_r = self.evidence(q).log_softmax(0)
        r = log_r.exp()
        return Sums(torch.einsum("h,hij->ij", r, self.precision), r @ self.shift, r @ (self.constant - log_r))


@dataclass(frozen=True, slots=True)
class RoughDeviation:
    """The rows of one unit at θ."""

    x: Float[Tensor, " N"]
    """Inputs in [0, 1]."""
    y: Targets
    inducing: Float[Tensor, " J"]
    """Pseudo-inputs in [0, 1]."""
    theta: Theta
    jitter: float = 1e-8
    """Jitter of k(W, W)."""

    def roughness_sums(self) -> RoughnessSums:
        """Sums for every roughness."""
        rows, factor = self._rows(), self._factor()
        solved = torch.linalg.solve_triangular(factor, rows.expand(len(factor), -1, -1), upper=False)
        return self._sums(solved.mT @ solved, 2 * factor.diagonal(dim1=1, dim2=2).log().sum(1))

    def derivatives(self, q_global: GlobalPosterior) -> ExpansionShare:
        """Sums, their total derivatives by θ in order of its names, and J″ with J = log Σ_h π_h e^{ℓ_h}."""
        names = sorted(self.theta)
        leaves = [self.theta[name].detach().clone().requires_grad_() for name in names]
        unit = replace(self, theta=dict(zip(names, leaves, strict=True)))
        rows, smooth, entries = unit._rows().mT, unit._smooth_covariance(), [unit.theta[name] for name in COVARIANCE]
        each = [Expanded.whole(smooth + walk, entries, of=ROWS) for walk in _rough(self.x, self.x)]  # Σ_h
        products = torch.stack([covariance.products(rows) for covariance in each])
        expanded = unit._sums(products, torch.stack([covariance.log_det for covariance in each]))
        sums, value = expanded.sums(q_global), expanded.evidence(q_global).logsumexp(0)
        value = value + sum(covariance.bend(value) for covariance in each)
        none = self.y.new_zeros(0)
        return share_of(sums, *second_order(sums, value, leaves), none, none, len(self.y))

    @torch.no_grad()
    def predict(self, x: Float[Tensor, " K"], q: GlobalPosterior) -> tuple[Tensor, Tensor]:
        """Mean and variance of an observation, averaged over the roughness.

        With A = Σ_h⁻¹k_* and w = φ_* − ΦA: mean Aᵀy + wᵀm, variance k_** − k_*ᵀA + wᵀVw + σ².
        """
        r, factor = self.roughness_sums().evidence(q).softmax(0), self._factor()
        cross, joint = (_smooth(self.theta, at, x) + _rough(at, x) for at in (self.x, x))
        prior = joint.diagonal(dim1=1, dim2=2)
        gain = torch.cholesky_solve(cross, factor)  # A [H, N, K]
        weight = self._features(x) - self._features(self.x) @ gain  # w [H, J, K]
        means = torch.einsum("hnk,n->hk", gain, self.y) + torch.einsum("hjk,j->hk", weight, q.mean)
        spread = prior - (cross * gain).sum(1) + (q.factor().mT @ weight).square().sum(1)
        return mixture(r, means, spread + (2 * self.theta["noise"]).exp())

    @torch.no_grad()
    def trend(self, x: Float[Tensor, " K"], q: GlobalPosterior) -> Float[Tensor, " K"]:
        """Mean of the shared trend."""
        return q.mean @ self._features(x)

    def _rows(self) -> Float[Tensor, "N J1"]:
        """The features and the target of every row."""
        return torch.cat([self._features(self.x), self.y[None]]).mT

    def _sums(self, products: Float[Tensor, "H J1 J1"], log_determinant: Float[Tensor, " H"]) -> RoughnessSums:
        """Sums from RᵀΣ_h⁻¹R with R the rows, and log|Σ_h|."""
        fit = products[:, -1, -1] + log_determinant
        prior = self.theta["roughness"].log_softmax(0)
        constant = prior - 0.5 * (fit + len(self.y) * math.log(2 * math.pi))
        return RoughnessSums(products[:, :-1, :-1], products[:, :-1, -1], constant)

    def _features(self, x: Float[Tensor, " N"]) -> Float[Tensor, "J N"]:
        """The features Φ."""
        factor = inducing_factor(self.inducing, self.jitter, self.theta["lengthscale"])
        cross = matern32(self.inducing, x, self.theta["lengthscale"])
        return self.theta["amplitude"].exp() * torch.linalg.solve_triangular(factor, cross, upper=False)

    def _smooth_covariance(self) -> Float[Tensor, "N N"]:
        """Σ_h without its rough part."""
        noise = (2 * self.theta["noise"]).exp()
        return _smooth(self.theta, self.x, self.x) + noise * torch.eye(len(self.x)).to(self.x)

    def _factor(self) -> Float[Tensor, "H N N"]:
        """Cholesky factors of Σ_h."""
        return cholesky(self._smooth_covariance() + _rough(self.x, self.x), of=ROWS)


def _smooth(theta: Theta, x: Tensor, other: Tensor) -> Float[Tensor, "N K"]:
    """K_h without its rough part."""
    smooth: Tensor = (2 * theta["spread"]).exp() * matern32(x, other, theta["spread_lengthscale"])
    return smooth + (2 * theta["level"]).exp() + (2 * theta["slope"]).exp() * x[:, None] * other


def _rough(x: Tensor, other: Tensor) -> Float[Tensor, "H N K"]:
    """b_h² min(x, x')."""
    walk = torch.minimum(x.clamp(min=0)[:, None], other.clamp(min=0))
    return torch.tensor(ROUGHNESS, dtype=x.dtype).square()[:, None, None] * walk


def calibration(unit: RoughDeviation, q: GlobalPosterior, precision: Square, shift: Vector) -> Calibration:
    """Histograms of one unit, with q(u) from all others; ``precision`` and ``shift`` are the total P and p."""
    share = unit.roughness_sums().sums(q)
    precision, shift = precision - share.precision, shift - share.shift
    rows = np.zeros((len(CUTS), len(EDGES) + 1))
    for c, cut in enumerate(CUTS):
        train = unit.x <= float(cut)
        if MIN_ROWS <= int(train.sum()) < len(train):
            part = replace(unit, x=unit.x[train], y=unit.y[train])
            first = part.roughness_sums().sums(posterior(precision, shift)[0])
            updated = posterior(precision + first.precision, shift + first.shift)[0]
            mean, variance = part.predict(unit.x[~train], updated)
            z = ((unit.y[~train] - mean).abs() / variance.sqrt()).numpy()
            rows[c] = np.bincount(np.searchsorted(EDGES, z), minlength=len(EDGES) + 1)
    hidden = rows.sum(axis=1)
    return Calibration(rows / np.maximum(hidden, 1)[:, None], hidden)


def factors(total: Calibration) -> Array:
    """Width of the band over that of a normal one, by cut; 1 if no unit was predicted there."""
    widths = np.ones(len(CUTS))
    for c, shares in enumerate(total.shares):
        units = float(shares.sum())
        if units > 0.5:
            quantile = int(np.searchsorted(np.cumsum(shares), LEVEL * units - 1e-9))
            widths[c] = max(student.ppf(0.975, units), EDGES[min(quantile, len(EDGES) - 1)]) / NORMAL
    return widths


def widened(variance: Array, x: Array, last: float, factors: Array) -> Array:
    """Variances at inputs in [0, 1]; beyond the last row times the squared factor of the nearest cut."""
    factor = float(factors[int(np.abs(CUTS - last).argmin())])
    return np.asarray(np.where(x > last, factor**2, 1.0) * variance)
