"""Tables of convolved signals (FedMGP paper, Eq. 19) of any number of units and rows, some units spoilt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter1d

Array = NDArray[np.float64]
MARGIN = 60


def curve(points: int, rng: np.random.Generator) -> Array:
    """A GP draw of lengthscale 0.1 on an even grid over [−1, 1] and ``MARGIN`` steps beyond."""
    x = -1 + 2 / (points - 1) * np.arange(-MARGIN, points + MARGIN)
    K = np.exp(-0.5 * ((x[:, None] - x) / 0.1) ** 2)
    return np.linalg.cholesky(K + 1e-8 * np.eye(x.size)) @ rng.standard_normal(x.size)


def view(g: Array, width: float, gain: float) -> Array:
    """The curve through a Gaussian window of ``width`` grid steps, scaled."""
    smooth: Array = gain * gaussian_filter1d(g, width, truncate=5.0)[MARGIN:-MARGIN]
    return smooth


SPOILT: Mapping[str, Callable[[Array, Array, np.random.Generator], Array]] = {
    "another process": lambda f, other, rng: other,
    "shifted": lambda f, other, rng: np.roll(f, len(f) // 4),
    "pure noise": lambda f, other, rng: rng.standard_normal(f.size) * f.std(),
}
"""What a bad unit observes instead of its signal."""


def signals(
    path: Path,
    *,
    units: int,
    rows: int,
    seed: int,
    widths: tuple[float, float],
    held_out: int = 60,
    points: int = 500,
    bad: int = 0,
    spoilt: str = "",
) -> Path:
    """Write a table ``x, unit, y, split``; the first ``bad`` units are spoilt. Returns the path.

    What the other units observe does not depend on which are spoilt, or how.
    """
    if path.exists():
        return path
    rng = np.random.default_rng([seed, units, rows])
    g, other = curve(points, rng), curve(points, rng)
    x, frames = np.linspace(-1, 1, points), []
    for m in range(units):
        width, gain = rng.uniform(*widths), rng.uniform(0.5, 3)
        f = view(g, width, gain)
        if m < bad and spoilt:
            f = SPOILT[spoilt](f, view(other, width, gain), np.random.default_rng([seed, units, rows, m]))
        y = f + 0.1 * rng.standard_normal(points)
        chosen = rng.permutation(points)
        for split, part in (("train", chosen[:rows]), ("test", chosen[rows : rows + held_out])):
            at = np.sort(part)
            frames.append(pd.DataFrame({"x": x[at], "unit": f"unit-{m:03d}", "y": y[at], "split": split}))
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".tmp")
    pd.concat(frames, ignore_index=True).to_parquet(scratch)
    scratch.replace(path)
    return path
