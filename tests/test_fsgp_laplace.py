"""Predictions that mix over hyperparameters: the Hessian from totals, draws, the mixture, and whole runs."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from faults import Fault, FaultyGrid, Recorder, blamed, configured, csv_nodes, lost, run, waves
from test_fsgp_profiled import D, P, federation, roster, rows, starting, unit_sums

from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.errors import ConfigError
from fedgp_flower.gp.laplace import IMPLAUSIBLE, amplitude_and_noise, bounded, drawn, plausible
from fedgp_flower.gp.profiled import PENALTY, profiled, scaled
from fedgp_flower.gp.sparse import SparseGP
from fedgp_flower.gp.sums import collapsed_bound_value
from fedgp_flower.gp.to_gpytorch import together
from fedgp_flower.methods.fsgp.messages import MixedPosterior
from fedgp_flower.methods.sparse_posterior import SavedMixture, saved_model
from fedgp_flower.outcome import Observer
from fedgp_flower.run.registry import parse_config
from strategies import fsgp_laplace
from strategies.fsgp_laplace import FSGPLaplace
from strategies.fsgp_profiled import FSGPProfiled, ProfiledState
from strategies.profiled_bound import LOCATIONS
from strategies.server.questions import drive

PROFILED = {"fsgp__objective": "profiled", "model__num_inducing": 12}
LAPLACE = {"model__hyperparameters": "laplace", "num_server_rounds": 20, **PROFILED}


@cache
def ended(*parts: int) -> tuple[FSGPLaplace, dict[str, Any], ProfiledState]:
    """Sites of so many rows, and the state when the ascent has ended."""
    own = FSGPLaplace(num_inducing=P)
    own.preparation = SimpleNamespace(num_inputs=D)
    sites, state = federation(own, list(parts)), starting()
    while not FSGPProfiled.finished(own, state):
        state, _ = drive(own.one_round(state, roster(sites)), sites)
    return own, sites, state


# ---- the Gaussian ---------------------------------------------------------------------------------------------------


def test_no_direction_is_flatter_than_the_widest_prior():
    turned = np.linalg.qr(np.random.default_rng(0).standard_normal((3, 3)))[0]
    found = bounded(turned @ np.diag([-5.0, 0.1, 3.0]) @ turned.T)
    assert found == pytest.approx(turned @ np.diag([0.25, 0.25, 3.0]) @ turned.T)


@pytest.mark.parametrize("parts", [[60], [1, 9, 15, 35]])
def test_the_precision_from_totals_is_the_profiled_bounds_own(parts):
    """By autograd of the textbook bound in (log ℓ, log a, log σ²): H_ℓℓ − H_ℓφ H_φφ⁻¹ H_φℓ, φ what the server finds."""
    own, sites, state = ended(*parts)
    kernel, values = own.kernel_of(state.best.values), own._folded(state.best)[0]
    assert list(kernel) == ["kernel.log_lengthscale"]
    mode, found = kernel["kernel.log_lengthscale"].ravel(), drive(own._precision(state, kernel), sites)

    def negative(theta: torch.Tensor) -> torch.Tensor:
        z, (x, y), noise = torch.from_numpy(values[LOCATIONS]), rows(), theta[-1].exp()
        k = lambda a, b: theta[-2].exp() * (-0.5 * (((a[:, None] - b) / theta[:D].exp()) ** 2).sum(-1)).exp()  # noqa: E731
        kzx, kzz = k(z, x), k(z, z)
        kzz = kzz + own.config.model.jitter * theta[-2].exp() * torch.eye(len(z))
        explained = kzx.mT @ torch.linalg.solve(kzz, kzx)
        normal = torch.distributions.MultivariateNormal(torch.zeros_like(y), explained + noise * torch.eye(len(y)))
        trace = len(y) * theta[-2].exp() - explained.diagonal().sum()
        return -normal.log_prob(y) + trace / (2 * noise) + PENALTY * (theta[:D] - 1).square().sum()

    amplitude, noise = values["kernel.log_outputscale"], values["likelihood.log_noise"][0]
    whole = torch.autograd.functional.hessian(negative, torch.from_numpy(np.array([*mode, amplitude, noise]))).numpy()
    expected = whole[:D, :D] - whole[:D, D:] @ np.linalg.solve(whole[D:, D:], whole[D:, :D])
    assert np.linalg.eigvalsh(expected)[0] > 0.25  # no bound acts
    assert found == pytest.approx(expected, abs=3e-3 * np.abs(expected).max())  # forward differences by 1e-3


def test_draws_have_the_precision_and_their_own_density():
    precision, mode = np.array([[4.0, 1.0], [1.0, 0.5]]), np.array([1.0, -2.0])
    places, heights = drawn(mode, precision, 20_000, np.random.default_rng(0))
    assert places.mean(0) == pytest.approx(mode, abs=0.06)
    assert np.cov(places.T) @ precision == pytest.approx(np.eye(2), abs=0.1)
    away = places - mode
    assert heights == pytest.approx(-0.5 * np.einsum("si,ij,sj->s", away, precision, away), abs=1e-9)


def test_amplitude_and_noise_have_the_curvature_of_the_bound():
    """Against second differences of the textbook bound at the same sums."""
    sums = unit_sums()
    best, step = profiled(sums), 1e-3
    mode, found = amplitude_and_noise(sums)
    assert mode == pytest.approx(np.log([best.amplitude, best.noise]))

    def bound(move: np.ndarray) -> float:
        amplitude, noise = np.exp(mode + move)
        return collapsed_bound_value(scaled(sums, amplitude), noise)

    eye = step * np.eye(2)
    corners = [[bound(s * a + t * b) * s * t for s in (1, -1) for t in (1, -1)] for a in eye for b in eye]
    precision = -np.array([sum(own) for own in corners]).reshape(2, 2) / (4 * step**2)
    assert found == pytest.approx(precision, abs=1e-5 * precision.max())


def test_all_draws_of_a_gaussian_are_plausible_and_those_of_a_cliff_are_not():
    _, expected = drawn(np.zeros(9), np.eye(9), 200, np.random.default_rng(0))
    assert plausible(expected, expected).all()
    assert not plausible(expected - IMPLAUSIBLE - 1e-6, expected).any()


# ---- the mixture ----------------------------------------------------------------------------------------------------


@cache
def mixed(*parts: int) -> tuple[FSGPLaplace, ProfiledState, MixedPosterior]:
    """After the draws."""
    own, sites, state = ended(*parts)
    before = state.exchanges
    state, _ = drive(own.one_round(state, roster(sites)), sites)
    assert (state.exchanges, own.finished(state)) == (before + 3, True)
    return own, state, drive(own.predictive(state, roster(sites)), sites)


def test_one_site_is_many_sites():
    (_, one, first), (_, many, second) = mixed(60), mixed(1, 9, 15, 35)
    assert one.exchanges == many.exchanges <= 20
    assert len(one.mixture) > 2
    assert second.means == pytest.approx(first.means, abs=1e-6)
    for name, array in first.values.items():
        assert second.values[name] == pytest.approx(array, abs=1e-6)


def test_every_component_is_the_posterior_of_all_rows_at_its_own_hyperparameters():
    """Its totals are those that rows give there: the optimum's bound is the textbook one."""
    own, state, predicting = mixed(60)
    noises = set()
    for component in predicting.each():
        model, (x, y) = SparseGP.from_arrays(own.config.model, component.values).requires_grad_(False), rows()
        w, noise = model.whitened_cross(x), float(model.noise)
        precision = torch.eye(P, dtype=torch.float64) + w @ w.mT / noise
        assert component.covariance @ precision.numpy() == pytest.approx(np.eye(P), abs=1e-6)
        assert component.mean == pytest.approx(torch.linalg.solve(precision, w @ y / noise).numpy(), abs=1e-7)
        noises.add(noise)
    assert len(noises) == len(state.mixture)


def test_saved_exported_and_at_a_site_the_mixture_is_the_same():
    own, state, predicting = mixed(60)
    written = own.posterior_of(state)
    saved = saved_model(replace(written, arrays={**written.arrays, "target.mean": np.array(1.0)}), ())
    assert isinstance(saved, SavedMixture)
    x = torch.from_numpy(np.random.default_rng(5).uniform(-2, 2, (30, D)))
    each = [SparseGP.from_arrays(own.config.model, c.values).predict(x, c.whitened()) for c in predicting.each()]
    means, variances = (torch.stack(part).detach().numpy() for part in zip(*each, strict=True))
    mean, sd = saved(x.numpy())
    assert mean == pytest.approx(means.mean(0), abs=1e-10)
    assert sd**2 == pytest.approx((variances + means**2).mean(0) - means.mean(0) ** 2, abs=1e-9)
    model, likelihood = together(saved.export())
    observed = likelihood(model(x))
    assert observed.mean.detach().numpy() == pytest.approx(mean, abs=1e-8)
    assert observed.variance.detach().numpy() == pytest.approx(sd**2, abs=1e-8)
    details = own.details_of(state)
    assert details["components"] == len(means) == own.posterior_of(state).model["components"]


# ---- runs -----------------------------------------------------------------------------------------------------------


def test_a_run_mixes_within_twenty_exchanges_and_is_scored_by_the_mixture():
    whole = Recorder()
    keys = LAPLACE | {"model__hyperparameters": "auto"}
    flat = configured(**keys, fsgp__tolerance=0.0, fsgp__intervals=False, keep_predictions=True)
    end = run(FaultyGrid(flat, 3), whole)
    details, test = end.details(), end.outcome.metrics["test"]
    assert details["exchanges"] <= 20
    assert 2 < details["components"] <= 11
    keys = PROFILED | {"model__hyperparameters": "point"}
    point = run(FaultyGrid(configured(**keys, fsgp__tolerance=0.0, fsgp__intervals=False), 3))
    assert test["nll"] < point.outcome.metrics["test"]["nll"] + 0.05
    saved = saved_model(end.posterior_of(end.current), ())
    log_densities, agreed = [], Preparation.from_wire(end.preparation.arrays, end.preparation.schema)
    for own in end.outcome.predictions.values():
        inputs = (own["prediction.input"] - agreed.input_mean) / agreed.input_scale
        goal = (own["prediction.target"] - agreed.target_mean) / agreed.target_scale
        each = [component(inputs) for component in saved.components]
        normals = [-0.5 * ((goal - m) / s) ** 2 - np.log(s) for m, s in each]
        log_densities.append(np.logaddexp.reduce(normals) - math.log(len(each)))
    scale = math.log(agreed.target_scale) + 0.5 * math.log(math.tau)
    assert test["nll"] == pytest.approx(scale - np.concatenate(log_densities).mean(), abs=1e-9)
    again = run(FaultyGrid(flat, 3), Recorder(), whole.snapshots[-1])
    assert again.outcome.metrics["test"]["nll"] == test["nll"]
    longer = parse_config(flat | {"fsgp.exchanges": 26}).flat()
    more = run(FaultyGrid(longer, 3), Recorder(), whole.snapshots[-1])
    assert more.details()["bound"] > details["bound"]
    assert more.details()["components"] > 2


@pytest.mark.parametrize(
    ("wanted", "rows", "exchanges", "mixes"),
    [
        ("auto", 1999, 0, True),
        ("auto", 2000, 0, False),
        ("auto", 1999, 18, False),
        ("laplace", 2000, 19, True),
    ],
)
def test_draws_are_the_default_where_rows_are_few_and_exchanges_enough(wanted, rows, exchanges, mixes):
    flat = configured(**PROFILED, model__hyperparameters=wanted, fsgp__exchanges=exchanges)
    own = FSGPLaplace.from_config(parse_config(flat), Observer())
    own.session = SimpleNamespace(preparation=SimpleNamespace(rows={"a": 999, "b": rows - 999}))
    assert own.mixes == mixes


def test_without_draws_a_run_is_that_of_the_best_point(monkeypatch):
    monkeypatch.setattr(fsgp_laplace, "FEW_ROWS", 0)
    quick = {**PROFILED, "fsgp__tolerance": 0.0, "fsgp__intervals": False, "num_server_rounds": 3}
    auto, point = (run(FaultyGrid(configured(**quick, model__hyperparameters=own), 3)) for own in ("auto", "point"))
    assert type(auto) is FSGPLaplace
    assert type(point) is FSGPProfiled
    assert auto.details()["components"] == 1
    assert auto.outcome.metrics["test"] == pytest.approx(point.outcome.metrics["test"], rel=1e-9)
    saved, expected = (own.posterior_of(own.current) for own in (auto, point))
    assert saved.model == expected.model
    for name, array in expected.arrays.items():
        assert np.array_equal(saved.arrays[name], array), name


def test_draws_are_made_without_a_site_that_was_lost_meanwhile(tmp_path):
    nodes = csv_nodes(tmp_path, {name: waves(40, seed) for seed, name in enumerate("abc")})
    keys = LAPLACE | {"fsgp__exchanges": 9, "fsgp__intervals": False}
    end = run(FaultyGrid(configured(**keys), nodes, Fault("b", lost, ("query.trials",), range(2, 9))))
    assert set(blamed(end)) == {"b"}
    assert end.current.sites == ("a", "c")
    assert end.details()["components"] > 2


def test_a_kernel_that_is_an_amplitude_alone_mixes_over_that_and_noise():
    end = run(FaultyGrid(configured(**LAPLACE, model__kernel="linear"), 3))
    assert end.details()["components"] == 11


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"method": "sfvi"}, "`method` = 'sfvi' has none"),
        ({"method": "pvi", "pvi.local-update": "replay"}, "needs `pvi.local-update` = 'sums'"),
        ({"fsgp.objective": "exact"}, "needs `fsgp.objective` = 'profiled'"),
        ({"model.likelihood": "poisson"}, "`model.likelihood` = 'gaussian'"),
    ],
)
def test_where_there_are_no_draws_it_is_said(keys, named):
    with pytest.raises(ConfigError, match=named):
        parse_config({"method": "fsgp", "model.hyperparameters": "laplace"} | keys)
