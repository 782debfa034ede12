"""Small problems for SFVI whose answers are known, and the exact answers written without the code under test."""

from __future__ import annotations

import numpy as np
import torch

from fedgp_flower.config import ModelSection
from fedgp_flower.models.kernels import build_kernel
from fedgp_flower.models.logistic_mixed import LogisticMixed
from fedgp_flower.models.structured_family import GlobalPosterior, LocalPosterior, initial_global, named, with_named
from fedgp_flower.models.structured_gp import GPOptions, HierarchicalGP
from strategies.sfvi_state import Prior


def randomised(posterior, generator, spread=0.3):
    """The posterior with every parameter moved, so that nothing is tested at zero alone."""
    moved = {
        name: value + spread * torch.randn(value.shape, generator=generator, dtype=torch.float64)
        for name, value in named(posterior).items()
    }
    return with_named(posterior, moved)


def children(generator, *, units=21, visits=3):
    """Rows of a logistic mixed model: features [N, 2], targets, and the unit of every row."""
    groups = torch.arange(units).repeat_interleave(visits) + 100
    features = torch.randn(units * visits, 2, generator=generator, dtype=torch.float64)
    targets = (torch.rand(units * visits, generator=generator, dtype=torch.float64) < 0.4).double()
    return features, targets, groups


def mixed_model(*, centred=False):
    return LogisticMixed(2, prior_scale=2.0, centred=centred)


def sparse_gp(*, inputs, likelihood="gaussian", noise_spread=0.0, jitter=1e-8, learn_inputs=False, deviates=True):
    """A hierarchical GP in one input with different kernels for trend and deviation."""
    trend = build_kernel(ModelSection(kernel="rbf", lengthscale=1.0), inputs.shape[1])
    deviation = build_kernel(ModelSection(kernel="matern52", lengthscale=0.5, outputscale=0.4), inputs.shape[1])
    options = GPOptions(
        likelihood=likelihood,
        deviates=deviates,
        noise=0.2,
        noise_spread=noise_spread,
        jitter=jitter,
        learn_inputs=learn_inputs,
    )
    return HierarchicalGP(trend, deviation, inputs, options)


def gp_sites(model, generator, *, sizes=(6, 5, 7), num_inducing=3, binary=False):
    """Sites of one-dimensional data."""
    sites = []
    for key, size in enumerate(sizes):
        x = torch.linspace(-2, 2, size, dtype=torch.float64)[:, None] + 0.1 * key
        y = torch.sin(2 * x[:, 0]) + 0.3 * key + 0.3 * torch.randn(size, generator=generator, dtype=torch.float64)
        sites.append(model.prepare(x, (y > 0).double() if binary else y, key=key, num_inducing=num_inducing))
    return sites


def prior_of(model):
    """The arrays a server needs of a model."""
    return Prior(model.fixed_log_scale.numpy(), model.block.numpy())


def wire(theta, eta):
    """Arrays under the names the server uses."""
    named_arrays = {f"theta.{name}": value for name, value in theta.items()}
    named_arrays |= {f"q.{name}": value for name, value in eta.items()}
    return {name: value.detach().numpy().copy() for name, value in named_arrays.items()}


def as_global(mean, covariance):
    """N(mean, covariance) in the family's coordinates."""
    factor = np.linalg.cholesky(covariance)
    scale = np.diag(factor)
    lower = (factor / scale[:, None])[np.tril_indices(len(mean), -1)]
    return GlobalPosterior(torch.tensor(mean), torch.tensor(np.log(scale)), torch.tensor(lower))


def linear_gaussian_posterior(designs, targets, noise):
    """Posterior of y_k = A_kᵀ Z_G + B_kᵀ Z_Lk + ε, all latents N(0, I), by one dense solve.

    Args:
        designs: (A_k [M, N_k], B_k [W_k, N_k]) of every site.
        targets: y_k of every site.
        noise: Variance of ε.

    Returns:
        q(Z_G), the q(Z_Lk | Z_G), and log p(y).
    """
    widths = [len(b) for _, b in designs]
    size = len(designs[0][0])
    starts = size + np.concatenate([[0], np.cumsum(widths)])
    rows = []
    for (a, b), start in zip(designs, starts[:-1], strict=True):
        row = np.zeros((a.shape[1], starts[-1]))
        row[:, :size], row[:, start : start + len(b)] = a.T, b.T
        rows.append(row)
    design, y = np.concatenate(rows), np.concatenate(targets)
    precision = np.eye(starts[-1]) + design.T @ design / noise
    covariance, mean = np.linalg.solve(precision, np.eye(starts[-1])), np.linalg.solve(precision, design.T @ y / noise)
    marginal = design @ design.T + noise * np.eye(len(y))
    _, log_det = np.linalg.slogdet(2 * np.pi * marginal)
    evidence = -0.5 * (log_det + y @ np.linalg.solve(marginal, y))
    shared = covariance[:size, :size]
    local = []
    for start, width in zip(starts[:-1], widths, strict=True):
        own = slice(start, start + width)
        coupling = np.linalg.solve(shared, covariance[:size, own]).T
        left = as_global(mean[own], covariance[own, own] - coupling @ covariance[:size, own])
        local.append(
            LocalPosterior(left.mean[None], left.log_scale[None], torch.tensor(coupling)[None], left.lower[None])
        )
    return as_global(mean[:size], shared), local, evidence


def start_posteriors(model, sites, generator, *, coupled=True, triangular=True):
    """Randomly moved q(Z_G) and q(Z_Lk | Z_G)."""
    q_global = randomised(initial_global(model.global_size, scale=0.5, triangular=triangular), generator)
    local = [model.initial_local(site, scale=0.7, coupled=coupled, triangular=triangular) for site in sites]
    return q_global, [randomised(q, generator) for q in local]
