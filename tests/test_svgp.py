"""SVGP in dual form: exact where there is an exact answer, whatever the partition, a gradient that is one; steps."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from faults import ALONE, Fault, FaultyGrid, Recorder, alike, blamed, configured, lost, run

import fedgp_flower as fg
from fedgp_flower.clients import baselines
from fedgp_flower.gp.models import CONSTANT, LatentGP, SparseGP
from fedgp_flower.gp.optimisers import pack
from fedgp_flower.gp.sparse import pooled_sums
from fedgp_flower.gp.steps import ABSENT, MOST_STEPS, common_values, step_points
from fedgp_flower.gp.sums import at_unit_noise, collapsed_bound
from fedgp_flower.messages import encode
from fedgp_flower.methods.sgpr.duals import Duals, expectations, gradient_at_server, pseudo_sums, transferred
from fedgp_flower.methods.sgpr.messages import PooledPosterior
from fedgp_flower.options import REAL_VALUED, ModelSection
from fedgp_flower.run import dependence
from fedgp_flower.shared_messages import Described
from strategies import svgp
from strategies.pooled_bound import Problem
from strategies.server.questions import Roster, drive
from strategies.svgp import initial_state, natural_step, one_round, rejected, trial

KINDS = ("bernoulli", "poisson", "student-t")
SEVERAL = ("categorical", "heteroscedastic", "ordinal")
"""Of several functions."""
OUTCOMES = ("negative-binomial", "binomial", "time-to-event", "log-logistic", "log-normal")
"""Targets with a column beside them."""
INDUCING = 7


def rows_of(likelihood: str, rows: int = 60) -> tuple[torch.Tensor, torch.Tensor]:
    draw = np.random.default_rng(0)
    x = draw.standard_normal((rows, 2))
    f = np.sin(2 * x[:, 0]) + 0.3 * x[:, 1]
    targets = {
        "gaussian": f + 0.3 * draw.standard_normal(rows),
        "bernoulli": (f + draw.standard_normal(rows) > 0).astype(float),
        "poisson": draw.poisson(np.exp(f + 0.5)).astype(float),
        "student-t": f + 0.2 * draw.standard_t(3, rows),
        "heteroscedastic": f + 0.3 * np.exp(x[:, 1] / 2) * draw.standard_normal(rows),
        "ordinal": np.digitize(f + np.exp(x[:, 1] / 2) * draw.standard_normal(rows), [0.0, 0.8]).astype(float),
        "categorical": (f > 0.4).astype(float) + (x[:, 1] + draw.standard_normal(rows) > 0),
    }
    beside = draw.uniform(0.5, 3, rows), draw.integers(1, 9, rows)
    targets["negative-binomial"] = np.column_stack([draw.negative_binomial(2, 1 / (1 + 0.5 * np.exp(f))), beside[0]])
    targets["binomial"] = np.column_stack([draw.binomial(beside[1], 1 / (1 + np.exp(-f))), beside[1]]).astype(float)
    times = np.column_stack([np.exp(f + 0.5 * draw.standard_normal(rows)), draw.random(rows) < 0.6])
    targets |= dict.fromkeys(("time-to-event", "log-logistic", "log-normal"), times)
    return torch.from_numpy(x), torch.from_numpy(targets[likelihood])


def section(likelihood: str, **keys: Any) -> ModelSection:
    return ModelSection(likelihood=likelihood, **keys)


def latent(likelihood: str, kernel: str = "rbf", **keys: Any) -> LatentGP:
    points = torch.from_numpy(np.random.default_rng(1).standard_normal((INDUCING, 2)))
    if kernel.startswith("steps"):  # two steps of the first input and one of the second
        points[:3] = torch.tensor([[-0.4, ABSENT], [0.5, ABSENT], [ABSENT, 0.1]])
    model = LatentGP(section(likelihood, kernel=kernel, **keys), points)
    return model.begin({"a": 0.3, "b": 0.5, "c": 0.2}, 1.0) if likelihood in SEVERAL else model


def direction(draw: np.random.Generator, array: np.ndarray) -> np.ndarray:
    """A random one, in which steps stay."""
    return draw.standard_normal(array.shape) * (array != ABSENT).all(axis=-1, keepdims=True)


def moved_by(model: LatentGP, size: float) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(2)
    return {name: array + size * direction(draw, array) for name, array in model.to_arrays().items()}


def factor(model: SparseGP) -> torch.Tensor:
    with torch.no_grad():
        return model.factor()


def settled(model: LatentGP, data: tuple[torch.Tensor, torch.Tensor], steps: int, rho: float) -> Duals:
    points = len(model.inducing_points)
    size = *model.constant.shape[:-1], points
    duals = Duals(torch.zeros(*size, points).double(), torch.zeros(size).double(), model.observed.relative)
    for _ in range(steps):
        duals = duals.stepped(expectations(model, *data, duals.posterior()), rho)
    return duals


@pytest.mark.parametrize("kernel", ["rbf", "matern52 + linear"])
def test_one_step_under_gaussian_noise_is_the_posterior_of_titsias(kernel: str) -> None:
    data, model = rows_of("gaussian"), latent("gaussian", kernel=kernel, noise=0.2, jitter=0.0)
    duals = settled(model, data, 1, 1.0)
    exact = SparseGP(section("gaussian", kernel=kernel, noise=0.2, jitter=0.0), model.inducing_points.detach())
    exact.load(model.to_arrays() | {"likelihood.log_noise": np.log([0.2])})
    sums = pooled_sums(exact, *data)
    bound = collapsed_bound(sums, 0.2)
    whitened, q = sums.posterior(0.2), duals.posterior()
    torch.testing.assert_close(q.mean, whitened.mean, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(q.covariance, whitened.covariance, rtol=1e-10, atol=1e-10)
    fit = expectations(model, *data, q).fit
    assert float(fit) - float(duals.divergence()) == pytest.approx(bound, abs=1e-9)
    elsewhere = settled(model, data, 1, 0.5).posterior()
    [seen] = pseudo_sums(expectations(model, *data, elsewhere), elsewhere.mean.numpy())
    np.testing.assert_allclose(seen.gram, sums.gram / 0.2, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(seen.projection, sums.projection / 0.2, rtol=1e-9, atol=1e-9)
    alone = bound + 30 * np.log(0.4 * np.pi) + (sums.target_squares + sums.prior_variance - np.trace(sums.gram)) / 0.4
    assert at_unit_noise(seen)[0] == pytest.approx(float(alone), abs=1e-8)


def test_a_row_left_out_has_the_posterior_of_all_other_rows() -> None:
    """Exactly under Gaussian noise, at few inducing points, which leave some variance that no row informs on."""
    (x, y), model = rows_of("gaussian"), latent("gaussian", noise=0.2)
    mean, variance = model.left_out(x, y, settled(model, (x, y), 1, 1.0).posterior())
    for row in (0, 17, 29):
        others = torch.arange(len(x)) != row
        rest = settled(model, (x[others], y[others]), 1, 1.0).posterior()
        expected = model.latent(x[[row]], rest)
        torch.testing.assert_close((mean[[row]], variance[[row]]), expected, rtol=1e-9, atol=1e-9)
    prior = Duals(torch.zeros(INDUCING, INDUCING).double(), torch.zeros(INDUCING).double(), False).posterior()
    assert model.left_out(x, y, prior).isnan().any(-1).tolist() == [True, True]  # no row has a factor in it


@pytest.mark.parametrize("likelihood", [*KINDS, *OUTCOMES, *SEVERAL])
def test_expectations_are_computed_where_the_rows_are(likelihood: str) -> None:
    """Each new tensor names the device of the rows: on the default one, here without values, nothing is computed."""
    data, model = rows_of(likelihood), latent(likelihood)
    q = settled(model, data, 2, 0.7).posterior()
    expected = encode(expectations(model, *data, q, factor(model)))
    with torch.device("meta"):
        found = encode(expectations(model, *data, q, factor(model)))
    alike(found, expected)


@pytest.mark.parametrize(
    ("likelihood", "kernel"),
    [
        *itertools.product((*KINDS, *SEVERAL), ("rbf", "steps(rbf)")),
        *((name, "matern32 + linear") for name in OUTCOMES),
    ],
)
def test_the_gradient_is_that_of_the_bound_along_the_way_q_moves(likelihood: str, kernel: str) -> None:
    """Central differences of F + log p(w), q carried from an anchor that is neither w nor settled.

    They are along a line on which every array raises it alike, so that an error in one of them is seen.
    """
    data, old = rows_of(likelihood), latent(likelihood, kernel=kernel)
    duals, point = settled(old, data, 2, 0.6), moved_by(old, 0.1)

    def evaluated(values: dict[str, np.ndarray]) -> tuple[float, Any, LatentGP]:
        new = LatentGP.from_arrays(section(likelihood, kernel=kernel), values)
        with torch.no_grad():
            moved = transferred(duals, old, new, factor(new))
        found = expectations(new, *data, moved.posterior())
        return float(found.fit) - float(moved.divergence()) + float(new.log_prior().detach()), found, new

    _, found, new = evaluated(point)
    local, draw, size = gradient_at_server(duals, old, new, found), np.random.default_rng(3), 1e-5
    assert set(local) == set(point)
    along, slopes = {}, []
    for name, array in point.items():
        unit, gradient = direction(draw, array), found.values[name] + local[name]
        slope = (gradient * unit).sum()
        along[name] = unit * np.sign(slope) / max(abs(slope), 0.1)
        slopes.append((gradient * along[name]).sum())
    assert max(slopes) < 1 + 1e-9
    up, down = (evaluated({name: point[name] + end * along[name] for name in point})[0] for end in (size, -size))
    assert sum(slopes) == pytest.approx((up - down) / (2 * size), rel=2e-6, abs=1e-6)


def test_noise_whose_function_does_not_vary_is_constant() -> None:
    """The bound and posterior of f are those of Titsias, those of the noise the prior's."""
    data, model = rows_of("gaussian"), latent("heteroscedastic", jitter=0.0)
    still = {"kernel.noise.log_outputscale": np.asarray(-40.0), CONSTANT: np.log([[1.0], [0.2]])}
    model.load(model.to_arrays() | still)
    exact = SparseGP(section("gaussian", noise=0.2, jitter=0.0), model.inducing_points.detach())
    named = {name: array for name, array in model.to_arrays().items() if name.startswith("kernel.mean.")}
    named = {name.replace(".mean", ""): array for name, array in named.items()}
    exact.load(exact.to_arrays() | named)
    sums, duals = pooled_sums(exact, *data), settled(model, data, 2, 1.0)
    fit, q = expectations(model, *data, duals.posterior()).fit, sums.posterior(0.2)
    assert float(fit) - float(duals.divergence()) == pytest.approx(collapsed_bound(sums, 0.2), abs=1e-7)
    torch.testing.assert_close(duals.posterior().mean, torch.stack([q.mean, 0 * q.mean]), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(duals.posterior().covariance[0], q.covariance, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("kernel", ["rbf", "steps(rbf)"])
def test_information_of_rows_at_the_old_inducing_points_moves_exactly(kernel: str) -> None:
    """Under Gaussian noise (B, b) at Z₀ = X are the rows themselves, whatever Z, kernel and mean come next."""
    old = latent("gaussian", kernel=kernel, jitter=0.0)
    x = old.inducing_points.detach()[3 * (kernel != "rbf") :]
    data = x, rows_of("gaussian", INDUCING)[1][: len(x)]
    old.load(old.to_arrays() | {CONSTANT: np.array([0.4])})
    values = moved_by(old, 0.3) | {"likelihood.log_parameters": old.hyper.detach().numpy()}
    new = LatentGP.from_arrays(section("gaussian", kernel=kernel, jitter=0.0), values)
    with torch.no_grad():
        moved = transferred(settled(old, data, 1, 1.0), old, new, factor(new))
    fresh = settled(new, data, 1, 1.0)
    torch.testing.assert_close(moved.precision, fresh.precision, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(moved.shift, fresh.shift, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("likelihood", ["poisson", "student-t"])
def test_the_bound_is_what_gpytorch_computes_of_the_exported_posterior(likelihood: str) -> None:
    data, model = rows_of(likelihood), latent(likelihood)
    model.load(model.to_arrays() | {CONSTANT: np.array([0.3])})
    duals = settled(model, data, 4, 0.7)
    found = expectations(model, *data, duals.posterior())
    q, normal = duals.posterior(), torch.distributions.MultivariateNormal
    fit = model.likelihood.expected_log_prob(data[1], model.hold(q)(data[0])).sum()
    eye = torch.eye(len(q.mean)).double()
    divergence = torch.distributions.kl_divergence(normal(q.mean, q.covariance), normal(0 * q.mean, eye))
    theirs = float((fit - divergence).detach())
    assert float(found.fit) - float(duals.divergence()) == pytest.approx(theirs, abs=1e-5)


class Site:
    def __init__(self, model: ModelSection, x: torch.Tensor, y: torch.Tensor) -> None:
        self.model, self.rows = model, (x, y)

    def expectations(self, request: PooledPosterior) -> Any:
        return expectations(LatentGP.from_arrays(self.model, request.values), *self.rows, request.whitened())


def dealt(likelihood: str, *sizes: int) -> dict[str, Site]:
    x, y = rows_of(likelihood, sum(sizes))
    parts = zip(x.split(sizes), y.split(sizes), strict=True)
    return {str(k): Site(section(likelihood), *part) for k, part in enumerate(parts)}


def roster(sites: dict[str, Site]) -> Roster:
    return Roster({name: len(site.rows[1]) for name, site in sites.items()}, tuple(sites), (), 1)


def every_round(sites: dict[str, Site], likelihood: str, number: int) -> list[Any]:
    states = [initial_state(latent(likelihood))]
    for _ in range(number):
        problem = Problem(exchanges=60, model=section(likelihood))
        states.append(drive(one_round(problem, states[-1], roster(sites)), sites)[0])
    return states


def rounds(sites: dict[str, Site], likelihood: str, number: int) -> Any:
    return every_round(sites, likelihood, number)[-1]


@pytest.mark.parametrize("likelihood", [*KINDS, *OUTCOMES, *SEVERAL])
def test_a_run_does_not_depend_on_the_partition(likelihood: str) -> None:
    """Steps in (B, b) to rounding; L-BFGS amplifies it."""
    ones = every_round(dealt(likelihood, 60), likelihood, 5)
    manies = every_round(dealt(likelihood, 1, 9, 50), likelihood, 5)
    for number, slack in ((3, 1e-9), (5, 1e-6)):
        one, many = ones[number], manies[number]
        assert many.precision == pytest.approx(one.precision, rel=slack, abs=slack)
        assert many.bound == pytest.approx(one.bound, rel=slack)
        for name, array in one.values.items():
            assert many.values[name] == pytest.approx(array, rel=slack, abs=slack)


def test_the_bound_rises_until_its_slope_is_small() -> None:
    likelihood, sites = "bernoulli", dealt("bernoulli", 60)
    state, bounds = initial_state(latent(likelihood)), []
    for _ in range(40):
        state, figures = drive(one_round(Problem(exchanges=60, model=section(likelihood)), state, roster(sites)), sites)
        bounds.append(figures["objective"])
    assert (np.diff(bounds) >= 0).all()
    assert bounds[-1] > bounds[2] + 0.01
    assert np.abs(state.gradients[-1]).max() < 0.03


def test_a_trial_is_a_step_of_bfgs_from_the_scale_of_the_latest_change() -> None:
    """H ← (I − ρ s yᵀ) H (I − ρ y sᵀ) + ρ s sᵀ from H = (sᵀy/yᵀy) I of the latest pair (Nocedal, Wright, Eq. 6.17)."""
    state, model = rounds(dealt("poisson", 30, 30), "poisson", 5), section("poisson")
    scale, draw = svgp.units(state.values, model), np.random.default_rng(0)
    points = 0.1 * draw.normal(size=(4, len(scale)))
    gradients = -draw.uniform(1, 9, len(scale)) * points  # of a concave function, so that every pair is kept
    steps, changes = np.diff(points, axis=0), -np.diff(gradients, axis=0)
    inverse = np.eye(len(scale)) * (steps[-1] @ changes[-1]) / (changes[-1] @ changes[-1])
    for s, y in zip(steps, changes, strict=True):
        left = np.eye(len(scale)) - np.outer(s, y) / (s @ y)
        inverse = left @ inverse @ left.T + np.outer(s, s) / (s @ y)
    found = trial(replace(state, points=points * scale, gradients=gradients / scale, halvings=0), model)
    moved = (pack(found) - pack(state.values)) / scale
    assert 0 < np.abs(moved).max() < svgp.LARGEST_STEP
    np.testing.assert_allclose(moved, inverse @ gradients[-1], rtol=1e-9, atol=1e-12)


def test_a_trial_that_loses_is_taken_back_with_half_the_steps() -> None:
    likelihood = "poisson"
    sites, state = dealt(likelihood, 30, 30), rounds(dealt(likelihood, 30, 30), likelihood, 5)
    proud = replace(state, objectives=np.append(state.objectives[:-1], 1e9))
    back, figures = drive(one_round(Problem(exchanges=60, model=section(likelihood)), proud, roster(sites)), sites)
    assert figures["objective"] == 1e9
    assert back.halvings == 1
    model = section(likelihood)
    for name, value in state.values.items():
        whole, half = trial(proud, model)[name] - value, trial(back, model)[name] - value
        assert half == pytest.approx(whole / 2, rel=1e-12, abs=1e-15)
    whole, half = (natural_step(own).precision - state.duals.precision for own in (proud, back))
    torch.testing.assert_close(half, whole / 2)
    for _ in range(3):
        back = rejected(back)
    assert len(back.points) == len(back.objectives) == 1  # the memory is cleared
    problem = Problem(exchanges=60, model=section(likelihood))
    for _ in range(4):
        assert not svgp.finished(problem, back)
        back = rejected(back)
    assert svgp.finished(problem, back)
    assert not svgp.converged(problem, back)  # it has hardly begun
    assert svgp.converged(problem, replace(back, evaluations=7))


def test_a_slope_that_dwarfs_the_others_is_refused_unless_its_trial_is_rejected_anyway(monkeypatch: Any) -> None:
    """An honest site with a level of its own has such slopes where a step of the others went too far."""
    sites, state = dealt("poisson", 20, 20, 20), rounds(dealt("poisson", 20, 20, 20), "poisson", 5)
    honest, problem = sites["1"].expectations, Problem(exchanges=60, model=section("poisson"))

    def boast(request: PooledPosterior) -> Any:
        return replace(found := honest(request), slope=1e6 * found.slope)

    monkeypatch.setattr(sites["1"], "expectations", boast)
    proud = replace(state, objectives=np.append(state.objectives[:-1], 1e9))
    assert drive(one_round(problem, proud, roster(sites)), sites)[0].halvings == 1
    with pytest.raises(AssertionError, match=r"site 1 was refused: its slope per row is .* times the median"):
        drive(one_round(problem, state, roster(sites)), sites)


def test_half_a_step_of_a_softmax_raises_the_bound_and_a_whole_one_may_not() -> None:
    """Two functions that mirror each other are stepped at once, so that their difference moves too far."""
    draw = np.random.default_rng(0)
    x = draw.standard_normal((60, 1))
    data = torch.from_numpy(x), torch.from_numpy((x[:, 0] + 0.3 * draw.standard_normal(60) > 0).astype(float))
    model = LatentGP(section("categorical"), torch.linspace(-2, 2, 6).double()[:, None])
    model.constant = torch.nn.Parameter(torch.zeros(2, 1).double())
    bounds: dict[float, list[float]] = {svgp.OF_DIFFERENCES: [], 1.0: []}
    for length, found in bounds.items():
        for steps in range(9):
            duals = settled(model, data, steps, length)
            found.append(float(expectations(model, *data, duals.posterior()).fit) - float(duals.divergence()))
    half, whole = map(np.array, bounds.values())
    assert (np.diff(half) > 0).all()
    assert np.diff(whole).min() < -0.1
    assert half[-1] > whole.max() + 0.01


def test_training_ends_when_five_evaluations_together_gain_less_than_the_minimum() -> None:
    """Without a minimum, only when they gain no more than rounding."""
    none, least = (
        Problem(model=section("bernoulli")),
        Problem(model=section("bernoulli"), minimum_gain=svgp.MINIMUM_GAIN),
    )
    model = LatentGP(section("bernoulli"), torch.zeros(1, 1))
    for gain, ends, rests in ((2.1e-4, False, False), (1.9e-4, True, False), (2e-7, True, True)):
        state = replace(
            svgp.initial_state(model), evaluations=9, objectives=np.r_[0.0, 0.4, 0.4 + gain / 2 * np.arange(6)]
        )
        assert (svgp.converged(least, state), svgp.converged(none, state)) == (ends, rests)
        assert not svgp.converged(least, replace(state, evaluations=6))
        assert not svgp.converged(least, replace(state, objectives=state.objectives[-5:]))


def test_the_precision_stays_definite_where_outliers_bend_the_likelihood() -> None:
    """Directions along which the bound is not concave stay as in the prior; the others are taken whole."""
    state = rounds(dealt("student-t", 60), "student-t", 2)
    before, bent = state.duals.factor(), np.diag(np.r_[-50.0 * np.ones(3), 2.0 * np.ones(INDUCING - 3)])
    after = natural_step(replace(state, found=replace(state.found, curvature=bent))).precision
    assert float(torch.linalg.eigvalsh(after)[0]) > -1e-12
    whitened = torch.linalg.solve(before, torch.linalg.solve(before, torch.from_numpy(bent)).mT)
    wanted = torch.linalg.eigvalsh(whitened).clamp(min=0)
    found = torch.linalg.eigvalsh(torch.linalg.solve(before, torch.linalg.solve(before, after).mT))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


CLASSES = {"method": "svgp", "sgpr__exchanges": 0, "num_server_rounds": 5}
CLASSES |= {"dataset": "breast-cancer", "model__likelihood": "bernoulli"}


def test_single_precision_comes_near() -> None:
    double, single = (run(FaultyGrid(configured(**CLASSES, precision=own), 4)) for own in ("float64", "float32"))
    assert single.outcome.metrics["test"]["nll"] == pytest.approx(double.outcome.metrics["test"]["nll"], abs=2e-3)


def test_a_site_that_stays_silent_is_waited_for_and_then_left_out() -> None:
    recorder = Recorder()
    silent = Fault("1", lost, ("train.expectations",), range(3, 99))
    strategy = run(FaultyGrid(configured(**{**CLASSES, "num_server_rounds": 8}), 3, silent), recorder)
    assert len(blamed(strategy)["1"]) >= 3
    assert ["objective" in row for row in recorder.rows] == [True, True, False, False, False, True, True, True]
    assert strategy.current.sites == ("0", "2")


@pytest.mark.parametrize(("given", "points"), [(0, 24), (60, 60)])
def test_by_default_rows_are_three_for_each_inducing_point(given: int, points: int, tmp_path: Any) -> None:
    keys = ALONE | {"model.likelihood": "bernoulli", "model.num-inducing": given, "sgpr.exchanges": 4}
    found = fg.run(table_of("bernoulli"), target="target", sites=2, options=keys | {"output-dir": str(tmp_path)})
    assert found.metrics.method_details["num_inducing"] == points
    assert any("can reveal whether a row" in words for words in found.metrics.warnings) == (given > 0)


def table_of(likelihood: str) -> pd.DataFrame:
    x, y = (part.numpy() for part in rows_of(likelihood, 90))
    target = np.where(y > 0, "yes", "no") if likelihood == "bernoulli" else y
    return pd.DataFrame({"x1": x[:, 0], "x2": 5 * x[:, 1] + 3, "target": target})


@pytest.mark.parametrize("likelihood", ["bernoulli", "poisson", "heteroscedastic"])
def test_what_is_saved_predicts_what_the_sites_predict(likelihood: str, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(baselines, "CYCLES", 1)
    frame = table_of(likelihood)
    options = {"output-dir": str(tmp_path), "model.likelihood": likelihood, "model.num-inducing": 8}
    options |= {"baselines.max-evaluations": 4, "evaluate-every": 0}
    finished = fg.run(frame, target="target", sites=3, num_rounds=4, options=options)
    assert finished.config["method"] == "svgp"  # for the likelihood
    metrics, posterior = finished.metrics, fg.load_run(finished.path).posterior
    for figures in (metrics.test, metrics.local_only, metrics.pooled):
        assert np.isfinite(figures["nll"])
    table, inputs, f = posterior.predict(frame), posterior.inputs(frame), posterior.distribution(frame)
    model, observed = finished.posterior.to_gpytorch()
    assert posterior.sample(frame, 3).shape == posterior.sample(frame, 3, noise=False).shape == (3, len(frame))
    if likelihood == "bernoulli":
        np.testing.assert_allclose(table["probability of yes"], observed(model(inputs)).mean, rtol=1e-6)
        assert "probability" in pd.read_csv(finished.path / "predictions.csv")
    elif likelihood == "poisson":
        np.testing.assert_allclose(table["mean"], (f.mean + f.variance / 2).exp(), rtol=1e-6)
    else:
        np.testing.assert_allclose(table["mean"], f.mean, rtol=1e-6)


@pytest.mark.parametrize("likelihood", [*KINDS, *SEVERAL])
def test_expectations_that_no_rows_have_are_refused(likelihood: str) -> None:
    """Probabilities are at most 1 and log-concave in f; outliers and the noise of grades know no such limit."""
    model, data = latent(likelihood), rows_of(likelihood)
    standard = settled(model, data, 0, 1.0).posterior()
    honest = expectations(model, *data, standard, factor(model))
    lies = (replace(honest, fit=np.asarray(-honest.fit)), replace(honest, curvature=-honest.curvature))
    for described in (Described(len(data[1])), Described(len(data[1]), added=True)):
        assert honest.refusal(described) is None
        assert [lie.refusal(described) is not None for lie in lies] == [
            likelihood not in {*REAL_VALUED, "ordinal"},
            likelihood not in {"student-t", "ordinal"},
        ]


CUTS = np.array([[-0.5, ABSENT], [0.5, ABSENT], [ABSENT, 0.0]])
LEVELS = np.array([-1.0, 0.0, 1.0])
VARIANCES = np.array([0.7, 0.2])


def stepped(likelihood: str, kernel: str, more: np.ndarray, **keys: Any) -> LatentGP:
    section = ModelSection(likelihood=likelihood, kernel=f"steps({kernel})", jitter=0.0, **keys)
    model = LatentGP(section, torch.from_numpy(np.vstack([CUTS, more])))
    model.load(model.to_arrays() | {"kernel.log_step": np.log(VARIANCES)})
    return model


def walks(x: np.ndarray) -> np.ndarray:
    """Covariances with the three steps."""
    above = np.column_stack([x[:, 0] > -0.5, x[:, 0] > 0.5, x[:, 1] > 0])
    return above * np.sqrt(VARIANCES[[0, 0, 1]])


def test_the_covariance_is_that_of_a_gp_and_random_walks() -> None:
    draw = np.random.default_rng(0)
    x, z = (np.column_stack([draw.choice(LEVELS, 6), draw.standard_normal(6)]) for _ in range(2))
    model = stepped("bernoulli", "rbf", z)
    plain = LatentGP(ModelSection(likelihood="bernoulli"), torch.from_numpy(z))
    with torch.no_grad():
        found = model.kernel(model.inducing_points, torch.from_numpy(x)).to_dense().numpy()
        diagonal = model.kernel(torch.from_numpy(x), diag=True).numpy()
        inner = plain.kernel(plain.inducing_points, torch.from_numpy(x)).to_dense().numpy()
        among = model.inducing_covariance()[0].numpy()
    steps = np.sqrt(VARIANCES[[0, 0, 1]])
    np.testing.assert_allclose(found[:3], steps[:, None] * walks(x).T, rtol=1e-14)
    np.testing.assert_allclose(found[3:], inner + walks(z) @ walks(x).T, rtol=1e-12)
    np.testing.assert_allclose(diagonal, 2.0 + np.square(walks(x)).sum(1), rtol=1e-12)
    np.testing.assert_allclose(among[:3], steps[:, None] * np.hstack([np.diag(steps), walks(z).T]), rtol=1e-14)


def test_all_walks_together_have_a_prior_variance_of_one() -> None:
    section, points = ModelSection(likelihood="bernoulli", kernel="steps(rbf)"), np.vstack([CUTS, np.zeros((1, 2))])
    kernel = LatentGP(section, torch.from_numpy(points)).kernel
    with torch.no_grad():
        below, above = kernel(torch.tensor([[-2.0, -2.0], [2.0, 2.0]], dtype=torch.float64), diag=True)
        assert float(above - below) == pytest.approx(1.0)
        assert float(kernel.log_prior()) == 0.0


def test_without_its_gp_it_is_a_regression_on_the_steps() -> None:
    """Under Gaussian noise, q of the steps is the posterior of the weights of all rows."""
    draw = np.random.default_rng(1)
    x, y = np.column_stack([draw.choice(LEVELS, 40), draw.standard_normal(40)]), draw.standard_normal(40)
    model = stepped("gaussian", "rbf", np.array([[0.1, 0.2]]), noise=0.3)
    model.load(model.to_arrays() | {"kernel.log_outputscale": np.asarray(-40.0)})
    q = settled(model, (torch.from_numpy(x), torch.from_numpy(y)), 1, 1.0).posterior()
    precision = np.eye(3) + walks(x).T @ walks(x) / 0.3
    np.testing.assert_allclose(q.covariance[:3, :3], np.linalg.solve(precision, np.eye(3)), rtol=1e-6)
    np.testing.assert_allclose(q.mean[:3], np.linalg.solve(precision, walks(x).T @ y / 0.3), rtol=1e-6)


def test_cuts_lie_between_the_values_that_rows_of_any_site_share() -> None:
    draw = np.random.default_rng(2)
    x = np.column_stack([draw.integers(0, 5, 300) / 2, draw.standard_normal(300), draw.integers(0, 2, 300)])
    x[:2, 0] = 2.9  # fewer than three rows
    totals = np.sum([common_values(part, 3) for part in np.array_split(x, 3)], axis=0)
    points = step_points(*totals, 300.0)
    np.testing.assert_allclose(points, [[cut, ABSENT, ABSENT] for cut in (0.25, 0.75, 1.25, 1.75)], rtol=1e-12)
    two_values = common_values(x[:, 1:], 3)
    assert len(step_points(*two_values, 300.0)) == 0
    many = np.column_stack([draw.integers(0, 900, 20_000) / 300] * 2)
    assert MOST_STEPS - 2 <= len(step_points(*common_values(many, 3), 20_000.0)) <= MOST_STEPS


def test_a_jump_at_one_value_is_learned_and_saved(tmp_path: Any) -> None:
    draw = np.random.default_rng(3)
    dose, weight = draw.integers(0, 12, 900), draw.standard_normal(900)
    chance = np.where(dose == 7, 0.95, 0.2)
    table = pd.DataFrame({"dose": dose, "weight": weight, "ill": np.where(draw.random(900) < chance, "yes", "no")})
    options = {"output-dir": str(tmp_path), "model.likelihood": "bernoulli", "model.num-inducing": 15}
    finished = fg.run(table, target="ill", sites=3, num_rounds=15, options=options | ALONE | {"evaluate-every": 0})
    assert finished.config["model.kernel"] == "steps(rbf)"
    assert (finished.history["objective"].diff()[1:6] > 0).all()  # the first trials are not in vain
    posterior = fg.load_run(finished.path).posterior
    near = posterior.predict(pd.DataFrame({"dose": [6, 7, 8], "weight": 0.0}))["probability of yes"]
    assert np.abs(near - [0.2, 0.95, 0.2]).max() < 0.2
    assert list(dependence.walks(fg.load_run(finished.path)).index) == ["dose"]
    (model, observed), chance = posterior.to_gpytorch(), posterior.predict(table)["probability of yes"]
    np.testing.assert_allclose(observed(model(posterior.inputs(table))).mean, chance, rtol=1e-6)
