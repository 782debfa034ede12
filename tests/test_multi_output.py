"""The multi-output model against dense algebra, its covariances against convolution, and the pooled fit."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from faults import alike
from numpy.polynomial.hermite_e import hermegauss
from scipy.stats import multivariate_normal

from fedgp_flower.errors import NumericsError
from fedgp_flower.messages import add
from fedgp_flower.methods.fedmgp import latents as latent_gp
from fedgp_flower.methods.fedmgp import unit as one_unit
from fedgp_flower.methods.fedmgp.latents import SCALES, LatentFunctions, LatentPosterior, pooled_bound, posterior
from fedgp_flower.methods.fedmgp.model import ConvolvedKernel, MultiOutputGP, factor_steps, smoothed_covariance
from fedgp_flower.methods.fedmgp.unit import LocalSteps, UnitData, UnitParameters, predict, statistics

SHAPES = [(1, 1), (2, 1), (1, 2), (2, 2)]


def problem(num_latents: int, dims: int, *, convolved: bool = True, num_units: int = 3):
    rng = np.random.default_rng(num_latents + 10 * dims)
    inducing = rng.uniform(-1, 1, (7, dims))
    latents = LatentFunctions(inducing, rng.uniform(0.1, 0.4, (num_latents, dims)), rng.uniform(0.5, 2, num_latents))
    units, phi = [], []
    for _ in range(num_units):
        n = int(rng.integers(5, 9))
        units.append((rng.uniform(-1, 1, (n, dims)), rng.normal(size=n)))
        R = rng.uniform(0.05, 0.3, (num_latents, dims)) if convolved else np.zeros((num_latents, dims))
        phi.append(UnitParameters(R, rng.normal(size=num_latents), float(rng.uniform(0.05, 0.3))))
    return latents, units, phi


def product(latents: LatentFunctions, q: LatentPosterior, phi: UnitParameters) -> MultiOutputGP:
    """The model at the product over latent functions that is nearest to q."""
    return model_at(latents, phi, *latent_gp.from_natural(*latent_gp.to_natural(q, len(latents.scales))))


def joint_model(latents: LatentFunctions, q: LatentPosterior, phi: UnitParameters) -> MultiOutputGP:
    return model_at(latents, phi, q.mean[None], np.linalg.cholesky(q.covariance)[None])


def model_at(latents, phi, mean, factors):
    theta = {SCALES: np.log(latents.scales), latent_gp.MEAN: mean, latent_gp.FACTOR: factors}
    phi = replace(phi, amplitudes=phi.amplitudes * latents.amplitudes)
    return MultiOutputGP(theta, latents.inducing, latents.jitter, phi, "gaussian")


def told(latents, units, phi):
    data = (UnitData.build(x, y, latents.inducing) for x, y in units)
    return [statistics(rows, latents, own) for rows, own in zip(data, phi, strict=True)]


def dense_outputs(latents, units, phi):
    """Covariance of all units' f under the convolution process, every cross block written out."""
    S, a2 = torch.from_numpy(latents.scales), torch.from_numpy(latents.amplitudes**2)
    rows = []
    for (x, _), p in zip(units, phi, strict=True):
        line = []
        for (z, _), o in zip(units, phi, strict=True):
            x1, x2, r1, r2 = map(torch.from_numpy, (x, z, p.smoothing, o.smoothing))
            unit = smoothed_covariance(x1, x2, S, r1, r2)
            line.append((torch.from_numpy(p.amplitudes * o.amplitudes) * a2)[:, None, None] * unit)
        rows.append(torch.cat([block.sum(0) for block in line], 1))
    return torch.cat(rows).numpy()


@pytest.mark.parametrize(("num_latents", "dims"), SHAPES)
def test_pooled_bound_is_the_sum_of_weighted_local_risks(num_latents: int, dims: int) -> None:
    """Σ p_m (−R_m) = pooled ELBO; at the optimal q that is the bound from sums (I = 1, where q is not factorised)."""
    latents, units, phi = problem(num_latents, dims)
    total = add(told(latents, units, phi))
    q = posterior(total)
    shares = np.array([0.5, 0.2, 0.3])
    models, data = [product(latents, q, p) for p in phi], [tuple(map(torch.from_numpy, unit)) for unit in units]
    with torch.no_grad():
        told_of = zip(models, data, shares, strict=True)
        elbo = -sum(w * float(m.local_risk(*own, num_data=len(own[1]), weight=w)) for m, own, w in told_of)
        fit = sum(float(m.expected_log_likelihood(*own).sum()) for m, own in zip(models, data, strict=True))
        assert elbo == pytest.approx(fit - float(models[0].kl()), rel=1e-12)
    if num_latents == 1:
        assert elbo == pytest.approx(pooled_bound(total), rel=1e-9)
    else:
        assert elbo < pooled_bound(total)


@pytest.mark.parametrize("convolved", [True, False])
@pytest.mark.parametrize("num_latents", [1, 2])
def test_bound_is_below_the_evidence_of_the_exact_multi_output_gp(num_latents: int, convolved: bool) -> None:
    latents, units, phi = problem(num_latents, 1, convolved=convolved)
    parts = told(latents, units, phi)
    y = np.concatenate([u[1] for u in units])
    noise = np.concatenate([np.full(len(u[1]), p.noise) for u, p in zip(units, phi, strict=True)])
    evidence = multivariate_normal(cov=dense_outputs(latents, units, phi) + np.diag(noise)).logpdf(y)
    assert pooled_bound(add(parts)) < evidence
    everywhere = np.vstack([u[0] for u in units]) if not convolved else np.linspace(-2.5, 2.5, 80)[:, None]
    dense = LatentFunctions(everywhere, latents.scales, latents.amplitudes, jitter=1e-11)
    tight = pooled_bound(add(told(dense, units, phi)))
    # LMC: W = X makes f a function of g(W). A convolution also needs g between the rows, so W is a fine grid there.
    assert tight == pytest.approx(evidence, abs=1e-5)
    assert tight <= evidence + 1e-7


def test_prediction_is_the_exact_posterior_when_the_bound_is_tight() -> None:
    latents, units, phi = problem(2, 1, convolved=False)
    dense = LatentFunctions(np.vstack([u[0] for u in units]), latents.scales, latents.amplitudes, jitter=1e-11)
    q = posterior(add(told(dense, units, phi)))
    x = np.linspace(-1, 1, 6)[:, None]
    mean, variance = predict(x, dense, q, phi[1])
    joint = dense_outputs(latents, [*units, (x, x[:, 0])], [*phi, phi[1]])
    n = len(joint) - 6
    noise = np.concatenate([np.full(len(u[1]), p.noise) for u, p in zip(units, phi, strict=True)])
    gain = np.linalg.solve(joint[:n, :n] + np.diag(noise), joint[:n, n:])
    np.testing.assert_allclose(mean, gain.T @ np.concatenate([u[1] for u in units]), atol=1e-6)
    np.testing.assert_allclose(variance, np.diag(joint[n:, n:] - gain.T @ joint[:n, n:]), atol=1e-6)
    model = joint_model(dense, q, phi[1]).eval()
    with torch.no_grad():
        jointly = model(torch.from_numpy(x))
    np.testing.assert_allclose(jointly.mean.numpy(), mean, atol=1e-7)
    np.testing.assert_allclose(jointly.covariance_matrix.numpy(), joint[n:, n:] - gain.T @ joint[:n, n:], atol=1e-6)


@pytest.mark.parametrize(("num_latents", "dims"), SHAPES)
def test_the_model_of_gpytorch_predicts_what_the_fast_path_does(num_latents: int, dims: int) -> None:
    """With a joint q(u), in training and in prediction; and the model gives back the unit's parameters."""
    latents, units, phi = problem(num_latents, dims)
    q = posterior(add(told(latents, units, phi)))
    model, x = joint_model(latents, q, phi[0]), torch.from_numpy(units[0][0])
    mean, variance = predict(units[0][0], latents, q, phi[0])
    with torch.no_grad():
        for found in (model.train()(x), model.eval()(x)):
            np.testing.assert_allclose(found.mean.numpy(), mean, rtol=1e-8, atol=1e-10)
            np.testing.assert_allclose(found.variance.numpy(), variance, rtol=1e-7, atol=1e-10)
    same = model.unit_parameters()
    np.testing.assert_allclose(same.amplitudes, phi[0].amplitudes * latents.amplitudes)
    np.testing.assert_allclose(same.smoothing, phi[0].smoothing)
    assert math.exp(2 * same.likelihood[0]) == pytest.approx(phi[0].noise)


def test_joint_q_becomes_the_best_factorised_one() -> None:
    """Of all products over latent functions, the one that keeps the conditional precisions has the highest bound."""
    latents, units, phi = problem(2, 1)
    q = posterior(add(told(latents, units, phi)))
    models = [product(latents, q, p) for p in phi]
    with torch.no_grad():
        for m in models[1:]:
            m.mean, m.factor = models[0].mean, models[0].factor
    data = [map(torch.from_numpy, unit) for unit in units]
    fit = sum(m.expected_log_likelihood(*own).sum() for m, own in zip(models, data, strict=True))
    gradients = torch.autograd.grad(fit - models[0].kl(), [models[0].mean, models[0].factor])
    assert all(g.tril().abs().max() < 1e-7 if g.ndim == 3 else g.abs().max() < 1e-7 for g in gradients)


def local(count: int, rate: float, rows: np.ndarray | None = None) -> LocalSteps:
    return LocalSteps(count, rate, 1.0, 1.0, lambda: rows)


def test_one_site_one_step_is_a_plain_adam_step() -> None:
    """M = 1, p = 1, E = 1: θ and φ are what Adam makes of the negative bound."""
    latents, units, phi = problem(2, 1)
    best = posterior(told(latents, units, phi)[0])
    q = LatentPosterior(best.mean + 0.1, best.covariance + 0.05 * np.eye(14))  # at the best Adam scales up rounding
    x, y = map(torch.from_numpy, units[0])
    federated, plain = (product(latents, q, phi[0]) for _ in range(2))
    after = factor_steps(federated, x, y, local(1, 0.05))
    plain.local_risk(x, y, num_data=len(y), weight=1.0).backward()
    torch.optim.Adam(plain.parameters(), lr=0.05).step()
    alike(after, {name: value.detach() for name, value in plain.shared.items()}, atol=1e-9)
    torch.testing.assert_close([*federated.personal], [*plain.personal], rtol=0, atol=1e-9)


@pytest.mark.parametrize(("num_latents", "dims"), SHAPES)
def test_slopes_of_the_risk_are_those_of_the_model(num_latents: int, dims: int) -> None:
    """The gradient of a mini-batch in the hyperparameters against autograd of the GPyTorch model."""
    latents, units, phi = problem(num_latents, dims)
    latents, rng = replace(latents, amplitudes=np.ones(num_latents)), np.random.default_rng(3)
    factor = 0.3 * rng.normal(size=(latents.size, latents.size))
    q = LatentPosterior(rng.normal(size=latents.size), factor @ factor.T + 0.1 * np.eye(latents.size))
    model = product(latents, q, phi[0])
    x, y = (torch.from_numpy(part) for part in units[0])
    rows = np.array([0, 2, 3])
    model.local_risk(x[rows], y[rows], num_data=len(y), weight=0.3).backward()
    data = UnitData.build(units[0][0][rows], units[0][1][rows], latents.inducing)
    moments = latent_gp.from_natural(*latent_gp.to_natural(q, num_latents))
    inner = one_unit.squared_gaps(latents.inducing, latents.inducing)
    slopes, _ = one_unit.risk_slopes(data, inner, latents, phi[0], moments, len(y) / 3 / 0.3)
    expected = {SCALES: model.kernel.raw_scales.grad, one_unit.AMPLITUDES: model.kernel.amplitudes.grad}
    expected |= {one_unit.NOISE: model.hyper.grad / 2, one_unit.SMOOTHING: model.kernel.raw_smoothing.grad}
    for name, gradient in expected.items():
        np.testing.assert_allclose(slopes[name], gradient.numpy(), rtol=1e-7, atol=1e-8, err_msg=name)


@pytest.mark.parametrize("steps", [local(9, 1e200), local(1, 2000.0)], ids=["not finite", "lengthscale of e^2000"])
def test_local_steps_that_diverge_are_refused(steps: LocalSteps) -> None:
    latents, units, phi = problem(1, 1)
    model = product(latents, LatentPosterior(np.ones(7), np.eye(7)), phi[0])
    with pytest.raises(NumericsError):
        factor_steps(model, *(torch.from_numpy(part) for part in units[0]), steps)


def kernel(num_latents: int, dims: int) -> ConvolvedKernel:
    rng = np.random.default_rng(10 * num_latents + dims)
    scales, smoothing = (torch.from_numpy(rng.uniform(0.2, 1.5, (num_latents, dims))) for _ in range(2))
    return ConvolvedKernel(scales.log(), smoothing.log(), torch.from_numpy(rng.normal(size=num_latents)))


def rows(count: int, dims: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(count, dims)))


def smoothed_by_quadrature(k, x, other, smoothing, smoothing_other):
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
            parts = [smoothed_by_quadrature(s, x[n].numpy(), x[m].numpy(), r, r) for s, r in zip(S, R, strict=True)]
            assert output[n, m] == pytest.approx(v**2 @ parts, rel=1e-8, abs=1e-10)
