"""Gaussians and factors: textbook formulas, DPO and CPO in whitened coordinates, batched kernels."""

import math

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.kernels import MaternKernel
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import yeojohnson
from torch.distributions import MultivariateNormal, kl_divergence

from fedgp_flower.errors import NumericsError
from fedgp_flower.gp.gaussian import Gaussian
from fedgp_flower.gp.kernels import BatchedKernel, build_kernel, warped
from fedgp_flower.methods.pvi import model as mathematics
from fedgp_flower.methods.pvi.model import Draws, GaussianFactor, PseudoObservations, SparseModel, predict
from fedgp_flower.options import ModelSection

SAMPLES, INDUCING, ROWS = 3, 5, 9
EXACT = {"rtol": 1e-9, "atol": 1e-9}


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_draws(seed: int = 0, kernel: str = "rbf", likelihood: str = "gaussian") -> Draws:
    section = ModelSection(kernel=kernel, lengthscale=1.5, noise=0.2, likelihood=likelihood, jitter=1e-10)
    model = SparseModel(section, 2)
    start = model.initial_hyper()
    hyper = start + 0.2 * rand(SAMPLES, len(start), seed=seed)
    return Draws(model, 2 * rand(SAMPLES, INDUCING, 2, seed=seed + 1), hyper)


def dpo(seed: int, size: int = 4, *, tied: bool = True) -> PseudoObservations:
    targets, root = rand(size, seed=seed + 1), rand(size, seed=seed + 2).exp()
    return PseudoObservations(rand(size, 2, seed=seed), targets, root, tied)


@pytest.mark.parametrize("smooth", ["rbf", "matern52"])
def test_a_linear_part_adds_to_a_singular_matrix_without_a_root_of_it(smooth):
    """200 points on a line: GPyTorch's low-rank part of a sum asks for a factor of the other, and repairs or fails."""
    points = torch.linspace(-1, 1, 200, dtype=torch.float64)[:, None]
    kernels = (build_kernel(ModelSection(kernel=name, lengthscale=3.0), 1) for name in (f"{smooth} + linear", smooth))
    both, alone = (kernel(points).to_dense().detach() for kernel in kernels)
    torch.testing.assert_close(both - alone, points @ points.mT, rtol=0.0, atol=1e-14)


def test_l1_is_the_product_of_matern_half_over_inputs():
    """Against GPyTorch's Matérn of each input alone, also where it is traced."""
    kernel, left, right = build_kernel(ModelSection(kernel="l1"), 2).base_kernel, rand(6, 2), rand(4, 2, seed=1)
    kernel.lengthscale = lengths = torch.tensor([[0.7, 2.0]]).double()
    expected = torch.ones(6, 4).double()
    for d in range(2):
        one = MaternKernel(nu=0.5).double()
        one.lengthscale = lengths[0, d]
        expected = expected * one(left[:, d], right[:, d]).to_dense()
    torch.testing.assert_close(kernel(left, right).to_dense(), expected, rtol=1e-7, atol=1e-7)
    with gpytorch.settings.trace_mode():
        torch.testing.assert_close(kernel(left, right).to_dense(), expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("power", [-1.0, 0.0, 5e-4, 0.5, 1.0, 1.9995, 2.0, 3.5])
def test_warped_inputs_are_those_of_yeo_and_johnson(power):
    """SciPy's transformation at this power, with its slopes; at 1 the inputs, and at e − 1 the slope that is saved."""
    log_slopes = torch.full((1, 1), power - 1, dtype=torch.float64).requires_grad_()
    inputs = torch.tensor([-3.0, -0.2, 0.0, 0.5, 7.0, math.e - 1], dtype=torch.float64)[:, None].requires_grad_()
    found = warped(inputs, log_slopes)
    np.testing.assert_allclose(found.detach()[:, 0], yeojohnson(inputs.detach().numpy()[:, 0], power), rtol=1e-10)
    [slopes] = torch.autograd.grad(found.sum(), inputs, retain_graph=True)
    assert float(slopes[-1]) == pytest.approx(math.exp(power - 1))
    assert float(slopes[2]) == 1.0
    torch.autograd.gradcheck(lambda by: warped(inputs.detach(), by), log_slopes, atol=1e-6)


@pytest.mark.parametrize("expression", ["matern32", "rbf * matern52", "(rbf + linear) * periodic", "warp(rbf + l1)"])
def test_batched_kernel_is_the_gpytorch_kernel_of_every_sample(expression):
    kernel = build_kernel(ModelSection(kernel=expression), 2)
    batched = BatchedKernel(kernel)
    hyper = 0.3 * rand(SAMPLES, batched.num_hyper)
    left, right = rand(SAMPLES, INDUCING, 2, seed=1), rand(ROWS, 2, seed=2)
    cross, diagonal = batched(hyper, left, right), batched(hyper, right, right, diag=True)
    own = batched(hyper, left, left)
    for s in range(SAMPLES):
        raw = {name.removeprefix("kernel."): value[s] for name, value in batched.raw(hyper).items()}
        kernel.load_state_dict(raw, strict=False)
        with torch.no_grad():
            torch.testing.assert_close(cross[s], kernel(left[s], right).to_dense(), **EXACT)
            torch.testing.assert_close(own[s], kernel(left[s]).to_dense(), **EXACT)
            torch.testing.assert_close(diagonal[s], kernel(right, diag=True), **EXACT)


def test_hyperparameters_are_logarithms_of_standard_deviations():
    kernel = BatchedKernel(build_kernel(ModelSection(lengthscale=2.0, outputscale=9.0), 1))
    hyper = kernel.initial()[None]
    torch.testing.assert_close(hyper[0].exp().sort().values, torch.tensor([2.0, 3.0]).double())
    x = torch.tensor([[[0.0], [1.0]]]).double()
    assert float(kernel(hyper, x, x)[0, 0, 1]) == pytest.approx(9 * math.exp(-0.5 / 4))
    assert float(SparseModel(ModelSection(noise=0.25), 1).initial_hyper()[-1].exp()) == pytest.approx(0.5)


def test_product_is_the_posterior_of_a_linear_gaussian_model():
    """q(u) ∝ N(0, K_zz) ∏ N(K_vz K_zz⁻¹ u; m, S) exp(ηᵀu − ½ uᵀΛu) written with dense inverses, at every sample."""
    draws, factors, root = make_draws(), [dpo(10), dpo(20, 6, tied=False)], rand(INDUCING, 2, seed=3)
    own = Gaussian(rand(INDUCING, seed=4), -0.5 * root @ root.mT)
    natural = draws.product([*factors, GaussianFactor(own)])
    for s in range(SAMPLES):
        beta, z = draws.kernel_hyper[s : s + 1], draws.inducing[s : s + 1]
        kzz = (draws.chol @ draws.chol.mT)[s]
        precision, shift = kzz.inverse() + root @ root.mT, own.eta1
        for factor in factors:
            b = draws.model.kernel(beta, z, factor.inputs)[0].mT @ kzz.inverse()
            noise = 1 / factor.root.square() * (draws.noise[s] if factor.tied else 1.0)
            precision = precision + b.mT @ (b / noise[:, None])
            shift = shift + b.mT @ (factor.targets / noise)
        L = draws.chol[s]
        torch.testing.assert_close(natural.precision[s], L.mT @ precision @ L, rtol=1e-7, atol=1e-7)
        torch.testing.assert_close(natural.eta1[s], L.mT @ shift, rtol=1e-7, atol=1e-7)


def test_a_function_that_is_known_to_be_zero_somewhere_is_predicted_there():
    """A linear kernel vanishes at the origin: so do k(x, x) and the variance of f, and σ² is all that is left."""
    draws = make_draws(kernel="linear")
    origin, y = torch.zeros(1, 2).double(), torch.zeros(1).double()
    mixture = predict(draws, [dpo(1)], origin, y)
    noise = (2 * draws.hyper[:, -1]).exp()
    torch.testing.assert_close(mixture.variances[:, 0], noise, **EXACT)
    density = torch.distributions.Normal(0.0, noise.sqrt()).log_prob(torch.zeros(3).double())
    torch.testing.assert_close(mixture.log_densities[:, 0], density, **EXACT)


@pytest.mark.parametrize(("variance", "broken"), [(-1e-12, False), (-1e-3, True), (math.nan, True)])
def test_a_variance_may_be_negative_by_rounding_only(variance, broken, monkeypatch):
    """It is zero then: quadrature over N(0, 0) gives counts of rate 1."""
    draws, x = make_draws(likelihood="poisson"), rand(1, 2)

    def rounded(_, projection, prior_variance):
        return torch.zeros_like(prior_variance), torch.full_like(prior_variance, variance)

    monkeypatch.setattr(mathematics, "moments_at", rounded)
    if broken:
        with pytest.raises(NumericsError, match="3 of 3"):
            predict(draws, [dpo(1)], x)
    else:
        found = predict(draws, [dpo(1)], x)
        torch.testing.assert_close(found.variances[:, 0], torch.ones(SAMPLES).double(), **EXACT)


def test_mixture_prediction_is_the_average_density():
    draws, x, y = make_draws(), rand(ROWS, 2, seed=40), rand(ROWS, seed=41)
    mixture = predict(draws, [dpo(1)], x, y)
    apart = (Draws(draws.model, draws.inducing[s : s + 1], draws.hyper[s : s + 1]) for s in range(3))
    singles = [predict(one, [dpo(1)], x, y) for one in apart]
    densities = torch.stack([m.log_density().exp() for m in singles]).mean(0)
    torch.testing.assert_close(mixture.log_density(), densities.log(), **EXACT)
    second = torch.stack([m.variance() + m.mean().square() for m in singles]).mean(0)
    torch.testing.assert_close(mixture.variance(), second - mixture.mean().square(), **EXACT)
    assert np.all(mixture.variance().numpy() > 0)


TIGHT = {"rtol": 1e-10, "atol": 1e-10}  # conditions stay below 1e3 here


def random_moments(seed: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(size, size, generator=generator, dtype=torch.float64)
    mean = torch.randn(size, generator=generator, dtype=torch.float64)
    return mean, root @ root.mT / size + 0.3 * torch.eye(size, dtype=torch.float64)


def full(seed: int, size: int = 4) -> Gaussian:
    return Gaussian.from_moments(*random_moments(seed, size))


def diagonal(seed: int, size: int = 4) -> Gaussian:
    mean, covariance = random_moments(seed, size)
    return Gaussian.from_moments(mean, covariance.diagonal())


def torch_normal(q: Gaussian) -> MultivariateNormal:
    mean, covariance = q.moments()
    return MultivariateNormal(mean, covariance if covariance.ndim == 2 else covariance.diag())


@pytest.mark.parametrize("make", [full, diagonal])
def test_moments_are_those_that_were_put_in_and_kl_is_that_of_torch(make):
    mean, covariance = random_moments(3, 4)
    found_mean, found = make(3).moments()
    torch.testing.assert_close(found_mean, mean, **TIGHT)
    torch.testing.assert_close(found, covariance if make is full else covariance.diagonal(), **TIGHT)
    q, p = make(1), make(2)
    torch.testing.assert_close(q.kl(p), kl_divergence(torch_normal(q), torch_normal(p)), **TIGHT)
    assert float(q.kl(q)) == pytest.approx(0.0, abs=1e-12)


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.integers(1, 6), st.floats(0.01, 1.0), st.sampled_from([full, diagonal]))
def test_factor_algebra(seed, size, rho, make):
    a, b = make(seed, size), make(seed + 1, size)
    for left, right in [
        ((a * b) / b, a),
        (a * b, b * a),
        (a**rho * a ** (1 - rho), a),
        ((a * b) ** rho, a**rho * b**rho),
        (a * a**0.0, a),
    ]:
        torch.testing.assert_close((left.eta1, left.eta2), (right.eta1, right.eta2), rtol=1e-09, atol=1e-09)
    assert (a * b).is_proper()
    assert float((a * b).kl(a)) >= 0.0


@pytest.mark.parametrize("make", [full, diagonal])
def test_an_improper_factor_is_allowed_until_moments_are_asked(make):
    factor = make(1) / make(1) ** 2.0
    assert not factor.is_proper()
    assert (factor * make(1) ** 2.0).is_proper()
    for ask in (factor.moments, factor.described, factor.mean):
        with pytest.raises(NumericsError, match=r"a .*Gaussian.* Lower the learning rate or the damping factor"):
            ask()
    assert not (make(1) ** 0.0).is_proper()
    assert not type(factor)(make(1).eta1 * float("nan"), make(1).eta2).is_proper()
