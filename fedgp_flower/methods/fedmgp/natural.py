"""Local steps on natural parameters: q(u) moves towards what the unit's rows say, hyperparameters by Adam.

Of each latent function, q(u_i) = N(λ_i⁻¹h_i, λ_i⁻¹). With G and b of a mini-batch times N_m/|B| and m = λ⁻¹h, a step is

    λ_i ← (1 − ρ) λ_i + ρ (I + G_ii / p_m),    h_i ← (1 − ρ) h_i + ρ (b_i − Σ_{j≠i} G_ij m_j) / p_m,

a natural-gradient step of size ρ on the local risk R_m (Eq. 14). As λ and h enter linearly, their average over units
with weights p_m is a step on the pooled bound: for one latent function and φ_m as they are, its fixed point is the
pooled I + Σ G_m, Σ b_m. Averages of Cholesky factors drift away from it.

Reference: Hoffman, Blei, Wang, Paisley, *Stochastic variational inference*, JMLR 14 (2013), Section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fedgp_flower.errors import NumericsError
from fedgp_flower.gp.optimisers import AdamState
from fedgp_flower.methods.fedmgp.gradient import AMPLITUDES, NOISE, SMOOTHING, GaussianRisk
from fedgp_flower.methods.fedmgp.latents import (
    FACTOR,
    MEAN,
    PRECISION,
    SCALES,
    SHIFT,
    Latents,
    from_natural,
)
from fedgp_flower.methods.fedmgp.unit import UnitData, UnitParameters, statistics
from fedgp_flower.typing import Array, NamedArrays


def natural_steps(
    parameters: Mapping[str, Array],
    unit: tuple[Array, Array, Latents, UnitParameters],
    draw: Callable[[], NDArray[np.int64] | None],
    steps: tuple[int, float, float],
    *,
    weight: float,
) -> tuple[NamedArrays, UnitParameters]:
    """θ and φ_m after local steps.

    Args:
        parameters: θ: log S, λ and h.
        unit: Rows, targets, latents at the start (for W and the jitter), and φ_m.
        draw: Rows of the next mini-batch, None for all.
        steps: Their number, the rate of Adam, and ρ.
        weight: The share p_m.

    Raises:
        NumericsError: a parameter is not finite, so that a diverged step is never sent.
    """
    (x, y, latents, phi), (count, rate, rho) = unit, steps
    whole, risk = (
        UnitData.build(x, y, latents.inducing),
        GaussianRisk(x, y, latents.inducing, weight=weight, jitter=latents.jitter),
    )
    precision, shift = parameters[PRECISION], parameters[SHIFT]
    free: NamedArrays = {SCALES: parameters[SCALES], AMPLITUDES: phi.amplitudes, NOISE: np.log([phi.noise])}
    free |= {SMOOTHING: np.log(phi.smoothing)} if np.any(phi.smoothing > 0) else {}
    moments: AdamState[Array] = AdamState()
    for _ in range(count):
        rows = draw()
        q = from_natural(precision, shift)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # the check below speaks for all of them
            slopes = risk.gradient({**free, MEAN: q[0], FACTOR: q[1]}, rows)[1]
        target = _targets(whole, rows, replace(latents, scales=np.exp(free[SCALES])), _personal(free, phi), q[0])
        precision = (1 - rho) * precision + rho * (np.eye(precision.shape[1]) + target[0] / weight)
        shift = (1 - rho) * shift + rho * target[1] / weight
        moves, moments = moments.update({name: slopes[name] for name in free}, rate)
        free = {name: own - moves[name] for name, own in free.items()}
        if not all(np.isfinite(own).all() for own in (*free.values(), precision, shift)):
            raise NumericsError("local steps diverged: a parameter is not finite. Lower `optimizer.learning-rate`.")
    return {SCALES: free[SCALES], PRECISION: precision, SHIFT: shift}, _personal(free, phi)


def _personal(free: Mapping[str, Array], phi: UnitParameters) -> UnitParameters:
    smoothing = np.exp(free[SMOOTHING]) if SMOOTHING in free else phi.smoothing
    return replace(phi, smoothing=smoothing, amplitudes=free[AMPLITUDES], noise=float(np.exp(free[NOISE][0])))


def _targets(
    whole: UnitData, rows: NDArray[np.int64] | None, latents: Latents, phi: UnitParameters, mean: Array
) -> tuple[Array, Array]:
    """G_ii [I, J, J] and b_i − Σ_{j≠i} G_ij m_j [I, J] of a mini-batch, times N/|B|."""
    data = whole if rows is None else replace(whole, y=whole.y[rows], gaps=whole.gaps[:, rows])
    found, (count, J), scale = statistics(data, latents, phi), mean.shape, len(whole.y) / len(data.y)
    G = scale * found.precision.reshape(count, J, count, J)
    own = np.stack([G[i, :, i] for i in range(count)])
    crossed = np.einsum("iajb,jb->ia", G, mean) - np.einsum("iab,ib->ia", own, mean)
    return own, scale * found.shift.reshape(count, J) - crossed
