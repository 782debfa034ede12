"""Exact facts of partitioned variational inference: conjugate models, fixed points, schedules, forgetting."""

import math

import pytest
import torch
from pvi_oracles import collapsed_local_bound, log_normaliser

from fedgp_flower.errors import NumericsError
from fedgp_flower.gp.gaussian import DiagonalGaussian, NaturalGaussian
from fedgp_flower.gp.kernels import build_kernel
from fedgp_flower.gp.likelihoods import canonical_likelihood
from fedgp_flower.methods.pvi.linear import LinearRows, fixed_point, gradient_step
from fedgp_flower.methods.pvi.messages import NaturalParameters
from fedgp_flower.methods.pvi.model import (
    Data,
    Draws,
    PseudoObservations,
    SparseModel,
    expected_fit,
    local_free_energy,
    predict,
)
from fedgp_flower.methods.pvi.options import PRESETS
from fedgp_flower.options import ModelSection
from strategies.pvi import damping_of
from strategies.pvi_state import Contribution, PVIState, cavity, forget, merge, posterior

EXACT = {"rtol": 1e-8, "atol": 1e-8}  # cond(K_zz) is about 1e3
NOISE = 0.04


class Problem:
    """42 rows of a noisy sine in two inputs, 8 inducing points, fixed β; reference formulas without whitening."""

    def __init__(self, num_sites: int = 3, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = 4 * torch.rand(42, 2, generator=generator, dtype=torch.float64)
        self.y = (self.x.sum(-1)).sin() + NOISE**0.5 * torch.randn(42, generator=generator, dtype=torch.float64)
        self.z = 4 * torch.rand(8, 2, generator=generator, dtype=torch.float64)
        section = ModelSection(lengthscale=1.2, outputscale=1.5, noise=NOISE, jitter=0.0)
        self.kernel, self.model = build_kernel(section, 2), SparseModel(section, 2)
        order = torch.randperm(42, generator=generator)
        self.rows = [part.sort().values for part in order.tensor_split(num_sites)]
        self.draws = Draws(self.model, self.z[None], self.model.initial_hyper()[None])

    def k(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.kernel(left, right).to_dense()

    def titsias(self, rows: torch.Tensor | slice = slice(None)) -> tuple[torch.Tensor, torch.Tensor]:
        """Titsias' optimal q(u) from some rows: Σ = K_zz + K_zx K_xz/σ², m = K_zz Σ⁻¹ K_zx y/σ², S = K_zz Σ⁻¹ K_zz."""
        kzz, kzx = self.k(self.z, self.z), self.k(self.z, self.x[rows])
        sigma = kzz + kzx @ kzx.mT / NOISE
        return kzz @ torch.linalg.solve(sigma, kzx @ self.y[rows]) / NOISE, kzz @ torch.linalg.solve(sigma, kzz)

    def bound(self) -> float:
        """log N(y | 0, Q + σ²I) − tr(K − Q)/2σ² with dense matrices."""
        kzx = self.k(self.z, self.x)
        q = kzx.mT @ torch.linalg.solve(self.k(self.z, self.z), kzx)
        normal = torch.distributions.MultivariateNormal(torch.zeros(42).double(), q + NOISE * torch.eye(42).double())
        return float(normal.log_prob(self.y) - (self.k(self.x, self.x) - q).diagonal().sum() / (2 * NOISE))

    def data(self, site: int) -> Data:
        return Data(self.x[self.rows[site]], self.y[self.rows[site]])

    def exact_dpo(self, site: int) -> PseudoObservations:
        data = self.data(site)
        return PseudoObservations(data.inputs, data.targets, torch.ones(len(data)).double())

    def site(self, site: int, likelihood: str = "gaussian") -> LinearRows:
        """The site's rows as linear functions of the whitened inducing values."""
        return self.linear(self.rows[site], likelihood)

    def linear(self, rows: torch.Tensor, likelihood: str) -> LinearRows:
        """Some rows, with the variance that the inducing values do not explain."""
        a = self.draws.project(self.x[rows])[0].mT.detach()
        extra = self.draws.prior_variance(self.x[rows])[0].detach() - a.square().sum(1)
        point = canonical_likelihood(likelihood, NOISE)
        targets = self.y[rows] if likelihood == "gaussian" else (self.y[rows] > 0).double()
        return LinearRows(a, targets, point, point.initial, extra)

    def unwhitened(self, q: NaturalGaussian) -> tuple[torch.Tensor, torch.Tensor]:
        L = torch.linalg.cholesky(self.k(self.z, self.z))
        mean, covariance = q.moments()
        return L @ mean, L @ covariance @ L.mT

    def prior(self) -> dict[str, NaturalParameters]:
        return blocks(function=NaturalGaussian.from_moments(torch.zeros(8).double(), torch.eye(8).double()))


def blocks(**gaussians) -> dict[str, NaturalParameters]:
    return {name: NaturalParameters.of(gaussian) for name, gaussian in gaussians.items()}


def contribution(factor) -> Contribution:
    return Contribution(blocks(function=factor))


def assert_same(left, right, **tolerance) -> None:
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, **(tolerance or EXACT))


def to_fixed_point(problem: Problem, likelihood: str, passes: int) -> PVIState:
    state = PVIState(problem.prior())
    for visit in range(3 * passes):
        name, around = str(visit % 3), cavity(state, str(visit % 3))["function"]
        start = state.sites[name].factors["function"].gaussian if name in state.sites else around.flat()
        factor, _ = fixed_point(problem.site(visit % 3, likelihood), around, start)
        state, _ = merge(state, {name: contribution(factor)}, damping=1.0)
    return state


def test_a_fixed_point_is_stationary_for_global_vi_and_free_energies_add_up():
    """Property 2.2 with Bernoulli rows: F(q) = Σₖ [Fₖ − A(q) + A(q without k)] + A(q) − A(p), and dF/dη = 0."""
    problem = Problem(3)
    state = to_fixed_point(problem, "bernoulli", 40)
    q, prior = posterior(state)["function"], state.prior["function"].gaussian
    pooled = problem.linear(torch.cat(problem.rows), "bernoulli")
    at_q = pooled.expansion(q)[1] * prior
    assert_same((at_q.eta1, at_q.eta2), (q.eta1, q.eta2))
    step = gradient_step(pooled, q, prior, prior.flat(), step=1.0)
    assert float(torch.cat([step.eta1, step.eta2.flatten()]).abs().max()) < 1e-8
    total = float(log_normaliser(q) - log_normaliser(prior))
    for k in range(3):
        around = cavity(state, str(k))["function"]
        local = problem.site(k, "bernoulli").free_energy(q, around)
        total += float(local - log_normaliser(q) + log_normaliser(around))
    assert total == pytest.approx(float(pooled.free_energy(q, prior)), abs=1e-9)


@pytest.mark.parametrize("likelihood", ["gaussian", "bernoulli"])
def test_one_synchronous_gradient_step_is_the_pooled_step(likelihood):
    """Property 3.1, at a posterior that is no fixed point; ``global-vi`` is this with damping 1."""
    problem = Problem(3)
    some = NaturalGaussian(0.1 * torch.ones(8).double(), -0.05 * torch.eye(8).double())
    old = {str(k): some ** (k + 1.0) for k in range(3)}
    state = PVIState(problem.prior(), {name: contribution(factor) for name, factor in old.items()})
    q, prior, replies = posterior(state)["function"], state.prior["function"].gaussian, {}
    for k in range(3):
        around = cavity(state, str(k))["function"]
        replies[str(k)] = contribution(gradient_step(problem.site(k, likelihood), q, around, old[str(k)], step=1e-4))
    found = posterior(merge(state, replies, damping=damping_of(PRESETS["global-vi"], 3))[0])["function"]
    pooled = problem.linear(torch.cat(problem.rows), likelihood)
    expected = q * gradient_step(pooled, q, prior, prior.flat(), step=1e-4)
    assert_same((found.eta1, found.eta2), (expected.eta1, expected.eta2), rtol=1e-11, atol=1e-11)
    assert float((found.eta1 - q.eta1).abs().max()) > 1e-7, "the step must move the posterior"


def test_forgetting_refuses_to_leave_an_improper_posterior():
    prior = blocks(b=DiagonalGaussian.standard(1))
    strong = DiagonalGaussian(torch.zeros(1).double(), torch.full((1,), -2.0).double())
    state = PVIState(prior, {"a": Contribution(blocks(b=strong)), "b": Contribution(blocks(b=strong**-0.5))})
    with pytest.raises(NumericsError, match="improper"):
        forget(state, "a")


def test_dpo_prediction_is_the_sparse_gp_of_the_textbook():
    problem = Problem(3)
    mixture = predict(problem.draws, [problem.exact_dpo(k) for k in range(3)], problem.x, problem.y)
    mean, covariance = problem.titsias()
    b = torch.linalg.solve(problem.k(problem.z, problem.z), problem.k(problem.z, problem.x))  # K_zz⁻¹ K_zx
    explained = ((problem.k(problem.z, problem.z) - covariance) @ b * b).sum(0)
    variance = problem.k(problem.x, problem.x).diagonal() - explained + NOISE
    torch.testing.assert_close(mixture.mean(), b.mT @ mean, **EXACT)
    torch.testing.assert_close(mixture.variance(), variance, **EXACT)
    expected = -0.5 * ((2 * math.pi * variance).log() + (problem.y - b.mT @ mean).square() / variance)
    torch.testing.assert_close(mixture.log_density(), expected, **EXACT)


def test_the_free_energy_of_exact_factors_is_the_pooled_bound():
    problem = Problem(3)
    factors = [problem.exact_dpo(k) for k in range(3)]
    q = problem.draws.product(factors)
    fit = sum(expected_fit(problem.draws, q, problem.data(k)) for k in range(3))
    assert (fit - q.kl(problem.draws.prior())).item() == pytest.approx(problem.bound(), abs=1e-8)


def test_at_the_data_the_local_free_energy_is_stationary_and_equals_the_collapsed_bound():
    problem = Problem(3)
    data, others = problem.data(2), [problem.exact_dpo(0), problem.exact_dpo(1)]
    parts = [data.inputs.clone(), data.targets.clone(), torch.zeros(len(data)).double()]
    inputs, targets, log_root = (p.requires_grad_() for p in parts)
    own = PseudoObservations(inputs, targets, log_root.exp())
    energy = local_free_energy(problem.draws, others, own, data).sum()
    collapsed = collapsed_local_bound(problem.draws, others, data).sum()
    assert energy.item() == pytest.approx(collapsed.item(), abs=1e-9)
    for gradient in torch.autograd.grad(energy, (inputs, targets, log_root)):
        assert float(gradient.abs().max()) < 1e-9
    worse = PseudoObservations(data.inputs, data.targets + 0.1, torch.ones(len(data)).double())
    assert float(local_free_energy(problem.draws, others, worse, data)) < energy.item() - 1e-3


def contribution_of(precision: float) -> Contribution:
    return Contribution(
        blocks(b=DiagonalGaussian(torch.zeros(1).double(), torch.full((1,), -0.5 * precision).double()))
    )
