"""What a simulation compares FedMGP with: the same model fitted where the rows of all units are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedgp_flower.gp.convolved import smoothed_covariance
from fedgp_flower.gp.linalg import cholesky, kernel_cholesky
from fedgp_flower.gp.optimisers import FREE, LOGARITHM
from fedgp_flower.gp.optimisers import maximise as ascend
from fedgp_flower.methods.fedmgp.latents import Latents, Posterior, posterior, spacing
from fedgp_flower.methods.fedmgp.unit import (
    UnitData,
    UnitParameters,
    maximise,
    starting_parameters,
    statistics,
)
from fedgp_flower.typing import Array


def starting_point(
    units: Sequence[tuple[Array, Array]], inducing: Array, multiples: Sequence[float]
) -> tuple[Latents, list[UnitParameters]]:
    """Lengthscales from the spacing of the pseudo-inputs, q(u) of the unit with most rows.

    The other units regress on it, so that their signs fit together.
    """
    latents = Latents(inducing, np.outer(np.square(multiples), spacing(inducing) ** 2), np.ones(len(multiples)))
    data = [UnitData.build(x, y, inducing) for x, y in units]
    first = max(range(len(data)), key=lambda m: data[m].y.size)
    phi = [starting_parameters(unit, latents) for unit in data]
    q = posterior(statistics(data[first], latents, phi[first]))
    for m, unit in enumerate(data):
        if m != first:
            phi[m] = maximise(unit, latents, q, phi[m], coarse=True)
    return latents, phi


def fit_pooled(
    units: Sequence[tuple[Array, Array]], latents: Latents, phi: Sequence[UnitParameters], *, max_evaluations: int = 600
) -> tuple[Latents, Posterior, list[UnitParameters], float]:
    """The multi-output GP with the highest bound by L-BFGS over log S, log R, s and log σ², and that bound."""
    rows = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in units]
    W = torch.from_numpy(latents.inducing)
    log_s = torch.tensor(np.log(latents.scales), requires_grad=True)
    log_r = torch.tensor(np.stack([np.log(p.smoothing) for p in phi]), requires_grad=True)
    amplitudes = torch.tensor(np.stack([p.amplitudes * latents.amplitudes for p in phi]), requires_grad=True)
    log_noise = torch.tensor([math.log(p.noise) for p in phi], dtype=torch.float64, requires_grad=True)

    def sums() -> tuple[Tensor, Tensor, Tensor]:
        """I + Σ AᵀA/σ², Σ Aᵀy/σ², and the rest of the bound, with rows A = [s_i L_i⁻¹c_i]ᵀ."""
        scales, none = log_s.exp(), torch.zeros_like(log_s)
        latent = smoothed_covariance(W, W, scales, none, none)
        L = kernel_cholesky(latent, variance=latent.new_ones(len(latent)), jitter=latents.jitter, of="C_gg")
        P, b, local = torch.eye(latents.size, dtype=W.dtype), W.new_zeros(latents.size), W.new_zeros(())
        for (x, y), R, s, log_variance in zip(rows, log_r.exp(), amplitudes, log_noise, strict=True):
            weight = (-log_variance).exp()
            cross = s[:, None, None] * smoothed_covariance(W, x, scales, none, R)
            A = torch.linalg.solve_triangular(L, cross, upper=False).reshape(latents.size, -1)  # [I·J, n]
            unexplained = len(y) * s.square().sum() - A.square().sum()
            fit = len(y) * (math.log(2 * math.pi) + log_variance) + weight * (y @ y + unexplained)
            P, b, local = P + weight * A @ A.mT, b + weight * A @ y, local - 0.5 * fit
        return P, b, local

    def bound() -> Tensor:
        P, b, local = sums()
        L = cholesky(P, of="precision of q(u)")
        z = torch.linalg.solve_triangular(L, b[:, None], upper=False)
        value: Tensor = local + 0.5 * z.square().sum() - L.diagonal().log().sum()
        return value

    learned, bounds = [log_s, log_r, amplitudes, log_noise], [LOGARITHM, LOGARITHM, FREE, LOGARITHM]
    value = ascend(bound, learned, max_evaluations=max_evaluations, bounds=bounds).value
    with torch.no_grad():
        P, b, _ = sums()
        V = torch.cholesky_inverse(cholesky(P, of="precision of q(u)"))  # the inverse is the answer here
        q = Posterior((V @ b).numpy(), V.numpy())
        fitted = Latents(latents.inducing, log_s.exp().numpy(), np.ones(len(log_s)), latents.jitter)
        parts = zip(log_r.exp().numpy(), amplitudes.detach().numpy(), log_noise.exp().tolist(), strict=True)
        return fitted, q, [UnitParameters(*part) for part in parts], value
