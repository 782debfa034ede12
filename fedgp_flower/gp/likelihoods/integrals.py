"""Expectations over Gaussian f of log Φ(f), log(1 + eᶠ) and log Σ e^{f_c}, and their derivatives, at any variance."""

from __future__ import annotations

import math
from functools import cache
from itertools import product

import numpy as np
import torch
from torch import Tensor

from fedgp_flower.lazy import special
from fedgp_flower.typing import Array

SPACING = 0.3
"""Spacing of the trapezoidal rule over x = log t; the error is below 1e-10 if integrands decay as exp(−eˣ)."""


def logarithmic_rule(low: float, high: float, like: Tensor) -> Tensor:
    """Nodes eˣ with equally spaced x from ``low`` to ``high``, [Q, 1, …] to be broadcast with ``like``."""
    nodes = torch.arange(low, high, SPACING, dtype=torch.float64, device=like.device).exp()
    return nodes.view(-1, *[1] * like.ndim)


def hermite_rule(count: int, size: int) -> tuple[Tensor, Tensor]:
    """Nodes [count^size, size] and log weights of the product Gauss–Hermite rule for N(0, I) in ``size`` dimensions."""
    x, w = np.polynomial.hermite_e.hermegauss(count)
    nodes = torch.tensor(list(product(x, repeat=size)))
    weights = torch.tensor(list(product(np.log(w / math.sqrt(2 * math.pi)), repeat=size)))
    return nodes, weights.sum(1)


STEP, WIDTH, GROWTH, RIGHT, LEFT = 0.25, 1.5, 0.18, 4.0, 60.0
"""Spacing of centres and ratio of width to spacing at the right end, their growth to the left, and the two ends."""


@cache
def probit_mixture() -> tuple[Array, Array, Array]:
    """Centres c, widths w and weights p [27] of Σ p Φ((x − c)/w) ≈ 1 + (log Φ)″ = 1 − h (h + x), h = φ/Φ.

    The weights minimise the sum of squared relative errors.
    """
    size = STEP / GROWTH
    count = math.ceil(math.asinh((LEFT + RIGHT) / size) / GROWTH) + 1
    index = np.arange(count)
    centres, widths = RIGHT - size * np.sinh(GROWTH * index), WIDTH * STEP * np.cosh(GROWTH * index)
    x = RIGHT - size * np.sinh(GROWTH * np.linspace(-2, count - 1, 2000))
    ratio = math.sqrt(2 / math.pi) / special.erfcx(-x / math.sqrt(2))
    curve = 1 - ratio * (ratio + x)
    scale = 1 / np.maximum(curve, 1e-3)
    rows = np.vstack([scale[:, None] * special.ndtr((x[:, None] - centres) / widths), np.full(count, 100.0)])  # Σ p = 1
    weights = np.linalg.lstsq(rows, np.append(scale * curve, 100.0), rcond=1e-13)[0]
    return centres, widths, weights


def expected_log_probit(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """E log Φ(f) for f ~ N(m, s), α = ∂/∂m and β = −2 ∂/∂s of each row [N].

    1 + (log Φ)″ rises from 0 to 1, so it is a distribution function. Σ pᵢ Φ((x − cᵢ)/wᵢ) approximates it as Monahan
    and Stefanski (1992) approximate the logistic one. Integrated twice, with tᵢ = √(s + wᵢ²), uᵢ = m − cᵢ, z = uᵢ/tᵢ,

        E log Φ = −½ Σ pᵢ [(uᵢ² + tᵢ²) Φ(−z) − uᵢ tᵢ φ(z)],   α = Σ pᵢ [tᵢ φ(z) − uᵢ Φ(−z)],   β = Σ pᵢ Φ(−z).
    """
    value, alpha, beta = (torch.zeros_like(mean) for _ in range(3))
    for centre, width, weight in zip(*probit_mixture(), strict=True):
        u, t = mean - centre, (variance + width**2).sqrt()
        z = u / t
        tail, density = torch.special.ndtr(-z), t * (-0.5 * z.square()).exp() / math.sqrt(2 * math.pi)
        value -= 0.5 * weight * ((u.square() + t.square()) * tail - u * density)
        alpha += weight * (density - u * tail)
        beta += weight * tail
    return value, alpha, beta


NODES, LEAST, MOST = 14, 0.25, 3.0
"""Number of nodes of :func:`logistic_mixture`, and the range of K; the error of σ is below 1e-9."""


@cache
def logistic_mixture() -> tuple[Tensor, Tensor]:
    """Widths w = 2K and weights p [NODES] of σ(f) ≈ Σ p Φ(f / w), with Σ p = 1."""
    k = np.exp(np.linspace(math.log(LEAST), math.log(MOST), NODES))
    n = np.arange(1, 30)[:, None]
    for_large = 8 * k * ((-1.0) ** (n + 1) * n**2 * np.exp(-2 * (n * k) ** 2)).sum(0)
    odd = ((2 * n - 1) * math.pi) ** 2
    for_small = math.sqrt(2 * math.pi) * ((odd / (4 * k**4) - 1 / k**2) * np.exp(-odd / (8 * k**2))).sum(0)
    weights = k * np.where(k < 1, for_small, for_large)  # two series of the density of K
    return torch.from_numpy(2 * k), torch.from_numpy(weights / weights.sum())


def expected_softplus(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """E log(1 + eᶠ), E σ(f) and E σ′(f) for f ~ N(m, v) of each row [N].

    A logistic variable is 2KZ, Z ~ N(0, 1), where K has the Kolmogorov distribution (Andrews & Mallows 1974). So
    σ(f) = E Φ(f / 2K). The trapezoidal rule over log K gives Σ pᵢ Φ(f / wᵢ), and with tᵢ = √(v + wᵢ²) and z = m/tᵢ

        E log(1 + eᶠ) = Σ pᵢ [m Φ(z) + tᵢ φ(z)],   E σ(f) = Σ pᵢ Φ(z),   E σ′(f) = Σ pᵢ φ(z)/tᵢ.
    """
    m, v, (width, weight) = mean.reshape(-1), variance.reshape(-1), logistic_mixture()
    squares, normal = width.square()[:, None], torch.stack([weight, weight * width.square()]) / math.sqrt(2 * math.pi)
    scale = (v + squares).rsqrt()  # 1 / tᵢ
    z = scale * m
    tail = weight @ torch.special.ndtr(torch.where(m > 0, -z, z))  # at most ½: no probability is above 1 by rounding
    probability = torch.where(m > 0, 1 - tail, tail)
    slope, rest = normal @ ((-0.5 * z.square()).exp() * scale)  # of φ(z) / tᵢ, and tᵢ² = v + wᵢ²
    value = m * probability + v * slope + rest
    return value.view_as(mean), probability.view_as(mean), slope.view_as(mean)


EDGE, LEFT_END, RIGHT_END, FINE = 5.4, 3.0, 16.0, 0.55
"""Range of a normal variable in standard deviations, of a Gumbel variable to the left and right; node spacing."""
STEPS, LIKE, AT_ONCE = 8, 128, 2**14
"""Numbers of nodes are multiples of STEPS; a batch has at most LIKE rows, and AT_ONCE values of f at nodes."""


def expected_log_sum_exp(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """E log Σ e^{f_c} [N], π_c = E p_c and E p_c (1 − p_c) [C, N] for p = softmax(f), independent f_c ~ N(m_c, s_c).

    With Gumbel noise G_c, max_c f_c + G_c has mean E log Σ e^{f_c} + γ (Euler's γ), and class c attains it with
    probability π_c (Luce; McFadden 1974). Its distribution function is ∏ F_c(u), F_c(u) = E exp(−e^{f_c − u}), so

        E log Σ e^{f_c} = b − γ − ∫_{−∞}^b ∏ F_c(u) du

    for any b above the maximum. π_c is the derivative by m_c, and E p_c (1 − p_c) twice the derivative by s_c. The
    trapezoidal rules over u and f have an error of about e^{−π²/.55} for any number of classes. The nodes of a row
    depend on that row alone.
    """
    value, probability, curvature = mean.new_empty(mean.shape[1]), torch.empty_like(mean), torch.empty_like(mean)
    sd = variance.sqrt()
    low, high = (mean - EDGE * sd).amax(0) - LEFT_END, (mean + EDGE * sd).amax(0) + RIGHT_END
    nodes = torch.stack([EDGE * (sd.amax(0) / FINE).clamp(min=1.0), (high - low) / FINE])
    sizes, size = (STEPS * (nodes / STEPS).ceil()).long().unique(dim=1, return_inverse=True)
    for number, (reach, count) in enumerate(sizes.T.tolist()):
        for rows in torch.nonzero(size == number)[:, 0].split(LIKE):
            batch = mean[:, rows], sd[:, rows], low[rows], high[rows]
            value[rows], probability[:, rows], curvature[:, rows] = _integrate_maximum(*batch, reach, count)
    return value, probability, curvature


def _integrate_maximum(
    mean: Tensor, sd: Tensor, low: Tensor, high: Tensor, reach: int, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`expected_log_sum_exp` with ``reach`` steps from 0 to the end of f, and ``count`` from low to high."""
    x = torch.linspace(-EDGE, EDGE, 2 * reach + 1, dtype=mean.dtype, device=mean.device)
    weight = (-0.5 * x.square()).exp()
    weight = weight / weight.sum()
    step = (high - low) / count  # [N]
    t = ((mean + sd * x[:, None, None]) - low).exp()  # e^{f − u} at the first u, [Q, C, N]
    value, probability, curvature = high - np.euler_gamma, torch.zeros_like(mean), torch.zeros_like(mean)
    for nodes in torch.arange(count + 1, device=mean.device).split(math.ceil(AT_ONCE / t.numel())):
        rate = t[..., None] * (-step[:, None] * nodes).exp()  # [Q, C, N, U]
        density = (-rate).exp()
        cdf, density = torch.tensordot(weight, density, 1), density.mul_(rate)
        slope, bend = torch.tensordot(weight, density, 1), torch.tensordot(weight, density.mul_(rate - 1), 1)
        product = cdf.prod(0)
        others = product / cdf
        value, probability = value - step * product.sum(-1), probability + step * (others * slope).sum(-1)
        curvature = curvature - step * (others * bend).sum(-1)
    return value + step / 2, probability, curvature  # ∏ F = 1 at the last u, which has weight ½
