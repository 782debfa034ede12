"""Sums of a sparse GP equal the pooled GPyTorch SGPR, whatever the partition; devices and precision."""

import gpytorch
import numpy as np
import pytest
import torch
from faults import alike
from gpytorch.kernels import InducingPointKernel
from threadpoolctl import threadpool_info

from fedgp_flower.errors import ConfigError, NumericsError
from fedgp_flower.gp import models
from fedgp_flower.gp import sparse as sparse_module
from fedgp_flower.gp.fitc import weighted_gradient, weighted_sums
from fedgp_flower.gp.models import FLOAT32_JITTER, SparseGP, WhitenedPosterior
from fedgp_flower.gp.placement import Placement, limit_threads
from fedgp_flower.gp.sparse import Whitener, inducing_gradient, pooled_bound, pooled_sums, rows_gradient
from fedgp_flower.gp.sums import SparseSums, bound_gradient, collapsed_bound
from fedgp_flower.messages import add
from fedgp_flower.options import ModelSection
from fedgp_flower.run.registry import parse_config

KERNELS = ("rbf", "matern52", "rbf + linear", "matern32 * periodic", "l1", "rbf + l1", "warp(rbf + l1)")


def problem(kernel: str = "rbf", n: int = 60, m: int = 9, jitter: float = 0.0):
    generator = torch.Generator().manual_seed(3)
    inputs = torch.rand(n, 2, generator=generator, dtype=torch.float64) * 4 - 2
    targets = torch.sin(2 * inputs[:, 0]) + 0.3 * torch.randn(n, generator=generator, dtype=torch.float64)
    grid = torch.linspace(-2, 2, 3, dtype=torch.float64)
    locations = torch.cartesian_prod(grid, grid)[:m]  # apart from each other: cond(K_zz) stays below 1e4
    options = {"kernel": kernel, "lengthscale": 0.7, "outputscale": 1.3, "noise": 0.2, "jitter": jitter}
    return SparseGP(ModelSection.model_validate(options), locations), inputs, targets


def plain_bound(sparse: SparseGP, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Log N(y | 0, WᵀW + σ²I) − Σ (k(x, x) − |w|²) / 2σ², differentiable."""
    cross, left = sparse.project(inputs), sparse.kernel(inputs, diag=True).sum()
    covariance = cross.mT @ cross + sparse.noise * torch.eye(len(targets), dtype=torch.float64)
    evidence = torch.distributions.MultivariateNormal(torch.zeros_like(targets), covariance).log_prob(targets)
    return evidence - (left - cross.square().sum()) / (2 * sparse.noise)


class PooledSGPR(gpytorch.models.ExactGP):
    """The centralised reference: GPyTorch's own collapsed sparse GP on all rows."""

    def __init__(self, sparse: SparseGP, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        super().__init__(inputs, targets, sparse.likelihood)
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = InducingPointKernel(sparse.kernel, sparse.inducing_points.detach(), sparse.likelihood)

    def forward(self, x: torch.Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


@pytest.mark.parametrize("kernel", KERNELS)
def test_bound_and_prediction_from_sums_are_those_of_gpytorch(kernel):
    """Rounding times the condition of K_zz limits the agreement of predictions."""
    sparse, inputs, targets = problem(kernel, jitter=1e-10)
    reference, noise = PooledSGPR(sparse, inputs, targets), float(sparse.noise.detach())
    sums = pooled_sums(sparse, inputs, targets)
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(sparse.likelihood, reference.train())
    with gpytorch.settings.fast_computations(False, False, False):
        expected = float(mll(reference(inputs), targets).detach()) * len(targets)
    assert collapsed_bound(sums, noise) == pytest.approx(expected, rel=1e-8)
    reference.eval()
    new = torch.rand(11, 2, dtype=torch.float64) * 4 - 2
    # GPyTorch's diagonal correction would put k − q on the *training* covariance too, which is FITC, not Titsias.
    with torch.no_grad(), gpytorch.settings.sgpr_diagonal_correction(False):
        predicted = sparse.likelihood(reference(new))
        left_out = sparse.kernel(new, diag=True) - reference.covar_module(new).diagonal()
        mean, variance = sparse.predict(new, sums.posterior(noise))
    torch.testing.assert_close(mean, predicted.mean, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(variance, predicted.variance + left_out, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kept", [0, 1, 8])
@pytest.mark.parametrize("kernel", KERNELS)
def test_what_is_kept_of_projected_rows_changes_nothing(kernel, kept, monkeypatch):
    """Chunks of 20 rows; the memory holds as many as it may, and is empty after the gradient."""
    monkeypatch.setattr(sparse_module, "CHUNK", 20)
    sparse, inputs, targets = problem(kernel)
    others = inputs.flip(0)
    expected = pooled_sums(sparse, inputs, targets)
    adjoints = bound_gradient(expected, float(sparse.noise.detach().log()))
    whitener = Whitener(sparse, kept)
    for rows in (inputs, others, inputs):
        found = pooled_sums(sparse, rows, targets, whitener)
        wanted = pooled_sums(sparse, rows, targets)
        np.testing.assert_array_equal(found.projection, wanted.projection)
    assert len(whitener._cache) == min(kept, 6)
    for rows in (inputs, others):
        found = rows_gradient(sparse, rows, targets, adjoints, whitener)
        alike(found, rows_gradient(sparse, rows, targets, adjoints))
    assert not whitener._cache


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("sites", [1, 3, 7])
def test_shares_of_the_gradient_add_up_to_autograd_of_the_pooled_bound(kernel, sites):
    sparse, inputs, targets = problem(kernel)
    names, parameters = zip(*sparse.wire_parameters().items(), strict=True)
    bound = plain_bound(sparse, inputs, targets)
    expected = dict(zip(names, torch.autograd.grad(bound, parameters), strict=True))
    chunks = list(zip(inputs.tensor_split(sites), targets.tensor_split(sites), strict=True))
    pooled = add(pooled_sums(sparse, *chunk) for chunk in chunks)
    server = bound_gradient(pooled, float(sparse.noise.detach().log()))
    shares = [rows_gradient(sparse, *chunk, server) for chunk in chunks]
    shares.append(inducing_gradient(sparse, pooled, server))
    for name, gradient in expected.items():
        total = sum(share[name] for share in shares)
        if name == "likelihood.log_noise":
            assert not total.any()
            total = total + server.log_noise
        np.testing.assert_allclose(total, gradient.numpy(), rtol=1e-9, atol=1e-9 * abs(server.value))


def test_chunked_bound_has_the_value_and_gradient_of_the_plain_one(monkeypatch):
    sparse, inputs, targets = problem("rbf + linear")
    plain = plain_bound(sparse, inputs, targets)
    parameters = list(sparse.wire_parameters().values())
    expected = torch.autograd.grad(plain, parameters)
    monkeypatch.setattr("fedgp_flower.gp.sparse.CHUNK", 7)
    chunked = pooled_bound(sparse, inputs, targets)
    assert float(chunked.detach()) == pytest.approx(float(plain.detach()), rel=1e-12)
    torch.testing.assert_close(torch.autograd.grad(chunked, parameters), expected, rtol=1e-8, atol=1e-8)


def test_broken_sums_are_an_error_with_a_remedy():
    one = np.ones(())
    with pytest.raises(NumericsError, match=r"B = I .* is not positive definite: smallest eigenvalue"):
        collapsed_bound(SparseSums(-100 * np.eye(2), np.zeros(2), one, one, one), 1.0)


def rows(n: int = 80):
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, (n, 2))
    return x, np.sin(2 * x[:, 0]) + 0.1 * rng.standard_normal(n)


def computed(precision: str):
    """Bound, gradient and prediction of the same model in a precision; everything that travels is float64."""
    config = parse_config({"precision": precision, "model.lengthscale": 0.7})
    place, (x, y) = Placement.of(config), rows()
    model = place.module(SparseGP(config.model, torch.from_numpy(x[:15])))
    inputs, targets = place.tensor(x), place.tensor(y)
    assert model.noise.dtype == inputs.dtype == getattr(torch, precision)
    assert (model.jitter == config.model.jitter) == (precision == "float64")
    assert model.jitter in {config.model.jitter, FLOAT32_JITTER}
    sums = pooled_sums(model, inputs, targets)
    noise = float(model.noise.detach())
    gradient = rows_gradient(model, inputs, targets, bound_gradient(sums, np.log(noise)))
    with torch.no_grad():
        mean, _ = model.predict(place.tensor(x[:5] + 0.1), sums.posterior(noise))
    told = *vars(sums).values(), *gradient.values(), *model.to_arrays().values()
    assert {array.dtype for array in told} == {np.dtype("float64")}
    return collapsed_bound(sums, noise), gradient, mean.double().numpy()


def test_float32_agrees_with_float64_to_its_own_precision():
    bound, gradient, mean = computed("float64")
    bound32, gradient32, mean32 = computed("float32")
    assert bound32 == pytest.approx(bound, rel=1e-3)
    np.testing.assert_allclose(mean32, mean, atol=5e-3)
    assert mean32.tolist() != mean.tolist()
    alike(gradient32, gradient, rtol=0.05, atol=0.02 * abs(bound))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_where_there_is_none_is_refused_and_auto_falls_back():
    assert Placement.of(parse_config({"device": "auto"})).device.type == "cpu"
    with pytest.raises(ConfigError, match="no CUDA device"):
        Placement.of(parse_config({"device": "cuda"}))


@pytest.mark.parametrize("kernel", ["rbf + l1", "matern52 + linear"])
def test_sums_and_gradients_are_computed_where_the_rows_are(kernel):
    """Whatever a site makes is on the device of its rows: where it is left to the default, nothing can be computed."""
    x, y = (torch.from_numpy(part) for part in rows())
    model = SparseGP(ModelSection(kernel=kernel), x[:9] + 0.1)

    def found() -> list[np.ndarray]:
        sums = weighted_sums(model, x, y)
        shares = weighted_gradient(model, x, y, q), rows_gradient(model, x, y, bound)
        return [*vars(sums).values(), *(array for share in shares for array in share.values())]

    q, bound = weighted_sums(model, x, y).posterior(), bound_gradient(pooled_sums(model, x, y), -2.0)
    expected = found()
    with torch.device("meta"):
        for own, wanted in zip(found(), expected, strict=True):
            np.testing.assert_array_equal(own, wanted)


def test_threads_are_those_of_numpy_too():
    before = torch.get_num_threads()
    try:
        for count in (2, 1):
            limit_threads(count)
            assert torch.get_num_threads() == count
            blas = [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]
            assert set(blas) == {count}
    finally:
        limit_threads(before)


@pytest.mark.parametrize(("many", "spread"), [(1, 1.0), (1, 3.0), (99, 1.0)])
def test_predictions_in_blocks_are_those_of_the_equation(
    monkeypatch: pytest.MonkeyPatch, many: int, spread: float
) -> None:
    """Some rows at a time, triangular panels, means without variances; for many rows in one product, unless S > I."""
    sparse, inputs, targets = problem()
    q = pooled_sums(sparse, inputs, targets).posterior(float(sparse.noise.detach()))
    q = WhitenedPosterior(q.mean, spread * q.covariance)
    factor, w = sparse.factor(), sparse.project(inputs)
    assert (q.reduction(factor) is None) == (spread > 1)
    monkeypatch.setattr(models, "MANY", many)
    mean = w.mT @ q.mean
    variance = sparse.kernel(inputs, diag=True) - w.square().sum(0) + (w * (q.covariance @ w)).sum(0)
    monkeypatch.setattr(models, "PANEL", 4)
    monkeypatch.setattr(models, "ENTRIES", 7 * 9)
    torch.testing.assert_close(sparse.marginals(inputs, q), (mean, variance), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(sparse.means(inputs, q), mean.detach(), rtol=1e-9, atol=1e-10)
