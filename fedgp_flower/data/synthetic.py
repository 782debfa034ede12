"""Synthetic data sets of the papers with standard splits, and random generators derived from names."""

from __future__ import annotations

import hashlib
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedgp_flower.lazy import pd
from fedgp_flower.typing import Array

Made: TypeAlias = "tuple[pd.DataFrame, tuple[NDArray[np.int64], ...]]"
"""A table, and the test rows of each of its standard splits."""


def derived_seed(seed: int, *names: str | int) -> int:
    """Return an integer below 2³² that depends on the run's seed and the names of a purpose."""
    return int.from_bytes(_digest(seed, *names)[:4], "big")


def generator(seed: int, *names: str | int) -> np.random.Generator:
    """Return an independent generator for a purpose, for example ``generator(seed, "held-out", site)``."""
    return np.random.default_rng(list(_digest(seed, *names)))


def _digest(*parts: str | int) -> bytes:
    return hashlib.sha256("/".join(map(str, parts)).encode()).digest()


def sine(seed: int) -> Made:
    """f(x) = 3 sin(2πx/20) on [−10, 10], 500 training, 300 test inputs, noise sd 0.5 (Guo et al. 2022, Eq. 18)."""
    noise = generator(seed, "sine")
    parts = [np.linspace(-10, 10, count) for count in (500, 300)]
    x = np.concatenate(parts)
    y = 3 * np.sin(2 * np.pi * x / 20) + 0.5 * noise.standard_normal(x.size)
    return pd.DataFrame({"x": x, "y": y}), (np.arange(500, 800),)


def plane_wave(seed: int) -> Made:
    """f(x) = 2.5 sin(2π(x₁ + x₂)/90) on [−25, 25]², 70 × 70 and 30 × 30 points, noise sd 0.4 (Guo et al., Eq. 19)."""
    noise = generator(seed, "plane-wave")
    grids = [np.meshgrid(axis, axis, indexing="ij") for axis in (np.linspace(-25, 25, 70), np.linspace(-25, 25, 30))]
    x1, x2 = (np.concatenate([grid[axis].ravel() for grid in grids]) for axis in (0, 1))
    y = 2.5 * np.sin(2 * np.pi * (x1 + x2) / 90) + 0.4 * noise.standard_normal(x1.size)
    return pd.DataFrame({"x1": x1, "x2": x2, "y": y}), (np.arange(4900, 5800),)


def five_blocks(seed: int) -> Made:
    """A draw of a GP, lengthscale 1, variance 1, noise sd 0.1, seen by five sites, each on a different block of x."""
    draw = generator(seed, "five-blocks")
    site = np.repeat(np.arange(5), 60)
    x = 2.4 * (site - 2) + draw.uniform(-0.8, 0.8, site.size)
    y = _gp_draw(x, 1.0, draw) + 0.1 * draw.standard_normal(site.size)
    frame = pd.DataFrame({"x": x, "site": [f"block-{k}" for k in site], "y": y})
    return frame, (np.flatnonzero(np.arange(site.size) % 60 >= 40),)


def convolved_signals(seed: int) -> Made:
    """Five units that see one smooth curve g through different windows (FedMGP, Eq. 19); the first misses (0, 1].

    y_m(x) = δ_m ∫ ψ(x − u; 0, λ_m) g(u) du + ε_m with a Gaussian density ψ of width λ_m ~ U(2, 10) grid steps,
    δ_m ~ U(0.5, 3), ε_m ~ N(0, 0.1²), on 200 points of [−1, 1]. The test rows are those of the first unit above 0.
    """
    from scipy.ndimage import gaussian_filter1d  # noqa: PLC0415  a third of a second, for one data set

    draw = generator(seed, "convolved-signals")
    points, margin, units = 200, 50, 5
    step = 2 / (points - 1)
    grid = -1 + step * np.arange(-margin, points + margin)  # the widest window reaches 5 widths = 50 steps
    curve = _gp_draw(grid, 0.1, draw)
    amplitude, width = draw.uniform(0.5, 3, units), draw.uniform(2, 10, units)
    smooth = [gaussian_filter1d(curve, sigma, truncate=5.0)[margin:-margin] for sigma in width]
    y = amplitude[:, None] * np.stack(smooth) + 0.1 * draw.standard_normal((units, points))
    x = np.tile(np.linspace(-1, 1, points), units)
    unit = np.repeat(np.arange(units), points)
    frame = pd.DataFrame({"x": x, "unit": [f"unit-{m}" for m in unit], "y": y.ravel()})
    return frame, (np.flatnonzero((unit == 0) & (x > 0)),)


def _gp_draw(x: NDArray[np.floating], lengthscale: float, draw: np.random.Generator) -> Array:
    """Draw f ~ N(0, K), K_ij = exp(−(x_i − x_j)²/2ℓ²); the nugget 1e-8 is far below any noise added later."""
    K: Array = np.exp(-0.5 * ((x[:, None] - x) / lengthscale) ** 2)
    return np.linalg.cholesky(K + 1e-8 * np.eye(x.size)) @ draw.standard_normal(x.size)
