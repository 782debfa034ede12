"""Convolved covariances against numerical convolution and Eq. 18."""

import math

import numpy as np
import pytest
import torch
from numpy.polynomial.hermite_e import hermegauss

from fedgp_flower.gp.convolved import ConvolvedKernel


def kernel(num_latents: int, dims: int) -> ConvolvedKernel:
    rng = np.random.default_rng(10 * num_latents + dims)
    scales, smoothing = (torch.from_numpy(rng.uniform(0.2, 1.5, (num_latents, dims))) for _ in range(2))
    return ConvolvedKernel(scales, smoothing, torch.from_numpy(rng.normal(size=num_latents)))


def rows(count: int, dims: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(count, dims)))


def smoothed_by_quadrature(k, x, other, smoothing, smoothing_other):  # type: ignore[no-untyped-def]
    """E k(x − √R e, x' − √R' e') over standard normal e, e': convolution of both arguments, by Gauss-Hermite."""
    nodes, weights = hermegauss(100)
    weights = weights / weights.sum()
    value = 1.0
    for d in range(x.size):  # S and R are diagonal, so the integral is a product over inputs
        a = x[d] - math.sqrt(smoothing[d]) * nodes
        b = other[d] - math.sqrt(smoothing_other[d]) * nodes
        value *= weights @ np.exp(-0.5 * (a[:, None] - b[None, :]) ** 2 / k[d]) @ weights
    return value


@pytest.mark.parametrize(("num_latents", "dims"), [(1, 1), (2, 2)])
def test_output_and_cross_covariance_are_convolutions(num_latents: int, dims: int) -> None:
    """f = Σ_i v_i ∫ N(x − u; 0, R_i) g_i(u) du with v = s (|2R + S| / |S|)^¼."""
    k = kernel(num_latents, dims)
    x, w = rows(4, dims, 1), rows(3, dims, 2)
    S, R, s = k.scales.detach().numpy(), k.smoothing.detach().numpy(), k.amplitudes.detach().numpy()
    v = s * (np.prod(2 * R + S, 1) / np.prod(S, 1)) ** 0.25
    cross, output = k.cross(x, w).detach().numpy(), k(x, x).to_dense().detach().numpy()
    torch.testing.assert_close(k(x, x, diag=True), k(x, x).to_dense().diagonal())
    none = np.zeros(dims)
    for n in range(4):
        for j in range(3):
            for i in range(num_latents):
                expected = v[i] * smoothed_by_quadrature(S[i], x[n].numpy(), w[j].numpy(), R[i], none)
                assert cross[i, n, j] == pytest.approx(expected, rel=1e-8, abs=1e-10)
        for m in range(4):
            parts = [
                v[i] ** 2 * smoothed_by_quadrature(S[i], x[n].numpy(), x[m].numpy(), R[i], R[i])
                for i in range(num_latents)
            ]
            assert output[n, m] == pytest.approx(sum(parts), rel=1e-8, abs=1e-10)
