"""Means over a normal f of log Φ(f), log(1 + eᶠ) and their derivatives, each a sum of closed forms at any variance."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
from torch import Tensor

from fedgp_flower.lazy import special
from fedgp_flower.typing import Array

SPACING = 0.3
"""Of the trapezoidal rule in a logarithm: for integrands that end as exp(−eˣ) it is wrong by less than 1e-10."""


def logarithmic_rule(low: float, high: float, trailing: int) -> Tensor:
    """Nodes eˣ with x evenly spaced, [Q] and as many axes of length one as values have."""
    nodes = torch.arange(low, high, SPACING, dtype=torch.float64).exp()
    return nodes.view(-1, *[1] * trailing)


STEP, WIDTH, GROWTH, RIGHT, LEFT = 0.25, 1.5, 0.18, 4.0, 60.0
"""Spacing of centres and width over spacing at the right end, growth of both to the left, and how far they go."""


@cache
def probit_mixture() -> tuple[Array, Array, Array]:
    """Centres c, widths w and weights p [27], by relative least squares on 1 + (log Φ)″ = 1 − h (h + x), h = φ/Φ."""
    size = STEP / GROWTH
    count = math.ceil(math.asinh((LEFT + RIGHT) / size) / GROWTH) + 1
    index = np.arange(count)
    centres, widths = RIGHT - size * np.sinh(GROWTH * index), WIDTH * STEP * np.cosh(GROWTH * index)
    x = RIGHT - size * np.sinh(GROWTH * np.linspace(-2, count - 1, 2000))
    ratio = math.sqrt(2 / math.pi) / special.erfcx(-x / math.sqrt(2))
    wanted = 1 - ratio * (ratio + x)
    exact = 1 / np.maximum(wanted, 1e-3)
    rows = np.vstack([exact[:, None] * special.ndtr((x[:, None] - centres) / widths), np.full(count, 100.0)])  # Σ p = 1
    weights = np.linalg.lstsq(rows, np.append(exact * wanted, 100.0), rcond=1e-13)[0]
    return centres, widths, weights


def expected_log_probit(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """E log Φ(f), f ~ N(m, s), α = ∂/∂m and β = −2 ∂/∂s of each row [N], at any variance.

    1 + (log Φ)″ rises from 0 to 1, so it is a distribution function, which Σ pᵢ Φ((x − cᵢ)/wᵢ) approximates as Monahan
    and Stefanski (1992) do for the logistic. Integrated twice, with tᵢ = √(s + wᵢ²), uᵢ = m − cᵢ and z = uᵢ/tᵢ,

        E log Φ = −½ Σ pᵢ [(uᵢ² + tᵢ²) Φ(−z) − uᵢ tᵢ φ(z)],   α = Σ pᵢ [tᵢ φ(z) − uᵢ Φ(−z)],   β = Σ pᵢ Φ(−z).
    """
    value, alpha, beta = (torch.zeros_like(mean) for _ in range(3))
    for centre, width, weight in zip(*probit_mixture(), strict=True):
        apart, spread = mean - centre, (variance + width**2).sqrt()
        z = apart / spread
        tail, density = torch.special.ndtr(-z), spread * (-0.5 * z.square()).exp() / math.sqrt(2 * math.pi)
        value -= 0.5 * weight * ((apart.square() + spread.square()) * tail - apart * density)
        alpha += weight * (density - apart * tail)
        beta += weight * tail
    return value, alpha, beta


NODES, LEAST, MOST = 14, 0.25, 3.0
"""Of the rule, and the ends of K: σ is wrong by less than 1e-9."""


@cache
def logistic_mixture() -> tuple[Tensor, Tensor]:
    """Widths w = 2K and weights p [NODES], with Σ p = 1 exactly."""
    k = np.exp(np.linspace(math.log(LEAST), math.log(MOST), NODES))
    n = np.arange(1, 30)[:, None]
    right = 8 * k * ((-1.0) ** (n + 1) * n**2 * np.exp(-2 * (n * k) ** 2)).sum(0)
    odd = ((2 * n - 1) * math.pi) ** 2
    left = math.sqrt(2 * math.pi) * ((odd / (4 * k**4) - 1 / k**2) * np.exp(-odd / (8 * k**2))).sum(0)
    weights = k * np.where(k < 1, left, right)  # two series of one density; each converges on its side
    return torch.from_numpy(2 * k), torch.from_numpy(weights / weights.sum())


def expected_softplus(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """E log(1 + eᶠ), E σ(f) and E σ′(f), f ~ N(m, v), of each row [N], at any variance.

    A logistic variable is 2KZ with Z ~ N(0, 1) and K of the Kolmogorov distribution (Andrews & Mallows 1974), so that
    σ(f) = E Φ(f / 2K). The trapezoidal rule over log K gives Σ pᵢ Φ(f / wᵢ), and with tᵢ = √(v + wᵢ²) and z = m/tᵢ

        E log(1 + eᶠ) = Σ pᵢ [m Φ(z) + tᵢ φ(z)],   E σ(f) = Σ pᵢ Φ(z),   E σ′(f) = Σ pᵢ φ(z)/tᵢ.
    """
    m, v, (width, weight) = mean.reshape(-1), variance.reshape(-1), logistic_mixture()
    squares, normal = width.square()[:, None], torch.stack([weight, weight * width.square()]) / math.sqrt(2 * math.pi)
    scale = (v + squares).rsqrt()  # 1 / tᵢ
    z = scale * m
    below = weight @ torch.special.ndtr(z)
    slope, rest = normal @ ((-0.5 * z.square()).exp() * scale)  # of φ(z) / tᵢ, and tᵢ² = v + wᵢ²
    value = m * below + v * slope + rest
    return value.view_as(mean), below.view_as(mean), slope.view_as(mean)


EDGE, LEFT_END, RIGHT_END, FINE = 5.4, 3.0, 16.0, 0.55
"""How far a normal variable goes, in sds, and a Gumbel variable to either side; spacing of both rules."""
STEPS, LIKE, AT_ONCE = 8, 128, 2**14
"""Rows are summed together that need as many nodes, rounded up; so many rows, and values of f at nodes, at once."""


def expected_log_sum_exp(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """E log Σ e^{f_c} [N], π_c = E p_c and E p_c (1 − p_c) [C, N], p = softmax(f), of independent f_c ~ N(m_c, s_c).

    With Gumbel noise G_c the largest f_c + G_c has the mean E log Σ e^{f_c} + γ (γ of Euler) and is that of class c
    with probability π_c (Luce; McFadden 1974). Its distribution function is ∏ F_c(u), F_c(u) = E exp(−e^{f_c − u}), so

        E log Σ e^{f_c} = b − γ − ∫_{−∞}^b ∏ F_c(u) du

    for any b that it does not exceed, π_c = ∂/∂m_c of it, and the last is twice ∂/∂s_c. Trapezoidal rules over u and
    over f are wrong by about e^{−π²/.55}, whatever the number of classes. The nodes of a row follow from it alone.
    """
    value, share, curvature = mean.new_empty(mean.shape[1]), torch.empty_like(mean), torch.empty_like(mean)
    sd = variance.sqrt()
    low, high = (mean - EDGE * sd).amax(0) - LEFT_END, (mean + EDGE * sd).amax(0) + RIGHT_END
    nodes = torch.stack([EDGE * (sd.amax(0) / FINE).clamp(min=1.0), (high - low) / FINE])
    kinds, kind = (STEPS * (nodes / STEPS).ceil()).long().unique(dim=1, return_inverse=True)
    for number, (reach, count) in enumerate(kinds.T.tolist()):
        for rows in torch.nonzero(kind == number)[:, 0].split(LIKE):
            ends, found = (low[rows], high[rows]), (mean[:, rows], sd[:, rows])
            value[rows], share[:, rows], curvature[:, rows] = _of_largest(*found, *ends, reach, count)
    return value, share, curvature


def _of_largest(
    mean: Tensor, sd: Tensor, low: Tensor, high: Tensor, reach: int, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The same of rows with so many steps from 0 to the end of f, and between the ends of u."""
    x = torch.linspace(-EDGE, EDGE, 2 * reach + 1).to(mean)
    weight = (-0.5 * x.square()).exp()
    weight = weight / weight.sum()
    step = (high - low) / count  # [N]
    t = ((mean + sd * x[:, None, None]) - low).exp()  # e^{f − u} at the first u, [Q, C, N]
    value, share, curvature = high - np.euler_gamma, torch.zeros_like(mean), torch.zeros_like(mean)
    for nodes in torch.arange(count + 1).to(mean).split(math.ceil(AT_ONCE / t.numel())):
        fallen = t[..., None] * (-step[:, None] * nodes).exp()  # [Q, C, N, U]
        density = (-fallen).exp()
        reached, density = torch.tensordot(weight, density, 1), density.mul_(fallen)
        slope, bend = torch.tensordot(weight, density, 1), torch.tensordot(weight, density.mul_(fallen - 1), 1)
        every = reached.prod(0)
        others = every / reached
        value, share = value - step * every.sum(-1), share + step * (others * slope).sum(-1)
        curvature = curvature - step * (others * bend).sum(-1)
    return value + step / 2, share, curvature  # ∏ F is 1 at the last u, which counts half
