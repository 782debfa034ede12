"""What FedMGP is compared with: the pooled model, modules, and federated polynomials."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_multi_output import problem, signals

from fedgp_flower.methods.fedmgp.exact_q import pooled_bound
from fedgp_flower.methods.fedmgp.references import fit_modular, fit_polynomial, fit_pooled, starting_point
from fedgp_flower.methods.fedmgp.unit import UnitData, predict, statistics


def test_baselines_recover_a_shared_sine() -> None:
    units, gains = signals()
    grid = np.linspace(-1.1, 1.1, 12)[:, None]
    missing = [(units[0][0][:20], units[0][1][:20]), *units[1:]]
    truth = gains[0] * np.sin(6 * units[0][0][20:, 0])
    start = starting_point(missing, grid)
    pooled = fit_pooled(missing, [start])
    parts = [
        statistics(UnitData.build(x, y, grid), pooled.latents, p)
        for (x, y), p in zip(missing, pooled.units, strict=True)
    ]
    assert pooled.bound == pytest.approx(pooled_bound(sum(parts[1:], parts[0])), rel=1e-8)
    assert (
        np.mean((predict(units[0][0][20:], pooled.latents, pooled.posterior, pooled.units[0])[0] - truth) ** 2) < 0.02
    )
    modular = fit_modular(missing, grid, start)
    error = np.mean((predict(units[0][0][20:], modular.latents, modular.posterior, modular.units[0])[0] - truth) ** 2)
    assert error < 0.2 * np.mean(truth**2)


def test_modules_that_see_everything_reproduce_the_pooled_bound_up_to_a_constant() -> None:
    """With Z ⊇ X a module loses nothing, so its posterior of g is the pooled one at the same parameters."""
    from fedgp_flower.methods.fedmgp.references import _Site, _sums

    latents, units, phi = problem(1, 1)
    (x, y), p = units[0], phi[0]
    S, R, s = (
        torch.from_numpy(latents.scales),
        torch.from_numpy(p.smoothing)[None],
        torch.from_numpy(p.amplitudes)[None],
    )
    weight = torch.full((len(y),), 1 / p.noise, dtype=torch.float64)
    common = {"points": torch.from_numpy(x), "shift": weight * torch.from_numpy(y), "constant": torch.zeros(())}
    W = torch.from_numpy(latents.inducing)
    flat = _sums([_Site(precision=weight, **common)], W, S, R, s, 1e-8)
    full = _sums([_Site(precision=torch.diag(weight), **common)], W, S, R, s, 1e-8)
    for a, b in zip(flat, full, strict=True):
        torch.testing.assert_close(a, b)


def test_federated_polynomial_chooses_the_degree_and_personalises() -> None:
    rng = np.random.default_rng(1)
    x = np.linspace(-2, 2, 60)[:, None]
    units = [(x, a + x[:, 0] ** 3 - x[:, 0] + 0.05 * rng.normal(size=60)) for a in (-0.3, 0.0, 0.3)]
    fit = fit_polynomial(units, np.array([-2.0]), np.array([2.0]))
    assert fit.degree == 3
    pooled = np.polynomial.polynomial.polyfit(np.tile(x[:, 0], 3), np.concatenate([y for _, y in units]), 3)
    at = np.array([[1.3]])
    shared = fit.coefficients @ np.polynomial.legendre.legvander(at[:, 0] / 2, 3).T
    assert shared == pytest.approx(np.polynomial.polynomial.polyval(1.3, pooled), rel=1e-9)
    assert fit.predict(0, at) < shared < fit.predict(2, at)
