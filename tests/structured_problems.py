"""Small problems for SFVI whose answers are known, and the exact answers written without the code under test."""

import math

import numpy as np
import torch

from fedgp_flower.gp.kernels import build_kernel
from fedgp_flower.gp.optimisers import AdamState
from fedgp_flower.methods.family import GlobalPosterior, LocalPosterior, initial_global, named, on_the_wire, with_named
from fedgp_flower.methods.sfvi.gp import HierarchicalModel
from fedgp_flower.methods.sfvi.learner import Learner, step_local
from fedgp_flower.methods.sfvi.messages import GradientShare
from fedgp_flower.methods.sfvi.mixed import GroupedModel
from fedgp_flower.methods.sfvi.options import SFVIOptions
from fedgp_flower.methods.sfvi.structured import SampledModel
from fedgp_flower.options import ModelSection
from strategies.server.questions import Roster
from strategies.sfvi import Prior, SFVIState


def randomised(posterior, generator, spread=0.3):
    """The posterior with every parameter moved, so that nothing is tested at zero alone."""
    draw = lambda value: torch.randn(value.shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return with_named(posterior, {name: value + spread * draw(value) for name, value in named(posterior).items()})


def children(generator, *, units=21, visits=3):
    """Rows of a logistic mixed model: features [N, 2], targets, and the unit of every row."""
    groups = torch.arange(units).repeat_interleave(visits) + 100
    features = torch.randn(units * visits, 2, generator=generator, dtype=torch.float64)
    targets = (torch.rand(units * visits, generator=generator, dtype=torch.float64) < 0.4).double()
    return features, targets, groups


def mixed_model():
    return GroupedModel(2, prior_scale=2.0)


class DrawnGP(HierarchicalModel, SampledModel):
    """The hierarchical GP given draws of its latents: what its closed forms are the averages of."""

    def log_local(self, site, z_global, z_local):
        """Σ_n E[log p(y_n | f_n, ζ)] + log N(Z_L | 0, I), over what the inducing values leave open of f_n.  [*S, 1]."""
        own = z_local[..., 0, :]
        mean, left_over, noise = self._given(site, z_global, z_local)
        rows = self.observed.expected_with(site.targets, mean, left_over, noise)
        prior = -0.5 * own.square().sum(-1) - 0.5 * own.shape[-1] * math.log(2 * math.pi)
        return (rows.sum(-1) + prior)[..., None]

    def observation(self, site, z_global, z_local):
        return self.observed.moments_with(*self._given(site, z_global, z_local))

    def function(self, site, z_global, z_local):
        return self._given(site, z_global, z_local)[0]

    def _given(self, site, z_global, z_local):
        """Mean and variance of f, and the noise; what is open of f is what the inducing values leave open."""
        (shared, local, left_over), own = self._basis(site), z_local[..., 0, :]
        offset, zero = (own[..., -1:] if self.offsets else own.new_zeros(1)), own.new_zeros(())
        return z_global @ shared + own @ local, left_over, self._noise(offset, zero, zero)


def shaped_gp(*, inputs, widths=(0.5, 0.4, 0.3), jitter=1e-8):
    return two_kernels(HierarchicalModel(section(jitter), inputs, widths=widths))


def sparse_gp(*, inputs, likelihood="gaussian", noise_spread=0.0, jitter=1e-8):
    """A hierarchical GP in one input with different kernels for trend and deviation."""
    return two_kernels(DrawnGP(section(jitter, likelihood), inputs, noise_spread))


def section(jitter, likelihood="gaussian"):
    return ModelSection(kernel="rbf", noise=0.2, likelihood=likelihood).model_copy(update={"jitter": jitter})


def two_kernels(model):
    model.deviation = build_kernel(ModelSection(kernel="matern52", lengthscale=0.5, outputscale=0.4), 1)
    return model


def gp_sites(model, generator, *, sizes=(6, 5, 7), num_inducing=3, binary=False):
    model.site_inducing = num_inducing
    sites = []
    for key, size in enumerate(sizes):
        x = torch.linspace(-2, 2, size, dtype=torch.float64)[:, None] + 0.1 * key
        y = torch.sin(2 * x[:, 0]) + 0.3 * key + 0.3 * torch.randn(size, generator=generator, dtype=torch.float64)
        sites.append(model.prepare(x, (y > 0).double() if binary else y, key=key))
    return sites


def prior_of(model):
    return Prior(model.fixed_log_scale.numpy(), model.block.numpy())


def as_global(mean, covariance):
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
        parts = left.mean, left.log_scale, torch.tensor(coupling), left.lower
        local.append(LocalPosterior(*(part[None] for part in parts)))
    return as_global(mean[:size], shared), local, evidence


def start_posteriors(model, sites, generator, *, triangular=True, whole=True):
    """Randomly moved q(Z_G) and q(Z_Lk | Z_G)."""
    q_global = randomised(initial_global(model.global_size, scale=0.5, triangular=triangular), generator)
    local = [model.initial_local(site, scale=0.7, whole=whole) for site in sites]
    return q_global, [randomised(q, generator) for q in local]


class PlainSite:
    """A site without Flower: a model, rows, and a local posterior that takes a step of Adam a round."""

    def __init__(self, model, rows, q_local, *, draws=1, rate=0.05):
        self.learner = Learner(model, rows, 11, 0, 1, draws)
        self.q_local, self.moments, self.rate, self.step = q_local, AdamState(), rate, 0

    def gradient(self, request):
        """The share of a round; what stays at the site is in ``local``."""
        noise = None if request.noise is None else torch.tensor(request.noise)
        value, slopes = self.learner.gradient(GlobalPosterior.of(request.values), self.q_local, noise, self.step)
        self.q_local, self.moments = step_local(self.q_local, slopes, self.moments, self.rate)
        self.step += 1
        sent, self.local = dealt(slopes)
        return GradientShare(sent, value, 0)


def dealt(slopes):
    """The part of a gradient that is sent, and the part that stays at a site."""
    local = {name: slope for name, slope in slopes.items() if name.startswith("local.")}
    return on_the_wire({name: slope for name, slope in slopes.items() if name not in local}), local


def roster_of(sites, server_round=1):
    """Everybody is there, with as many rows as they have."""
    rows = {name: len(site.learner.site.targets) for name, site in sites.items()}
    return Roster(rows, tuple(rows), (), server_round)


def state_of(model, q_global):
    """The server's state before the first round."""
    return SFVIState(on_the_wire(model.theta() | named(q_global)), prior_of(model), {})


def plan_of(**options):
    """How a round goes: options, seed, rate."""
    return SFVIOptions.model_validate({name.replace("_", "-"): value for name, value in options.items()}), 5, 0.05


def gradient_of(state):
    """The gradient behind the first step of Adam, whose first moment is 1 − β₁ of it."""
    assert state.steps == 1
    return {name: value / (1 - 0.9) for name, value in state.first.items()}
