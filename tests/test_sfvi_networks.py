"""Models of SFVI: networks with personal parts, amortised latents, mixed models; joint bounds in one place, runs."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from faults import configured
from scipy import stats
from structured_problems import PlainSite, gradient_of, plan_of, roster_of, start_posteriors, state_of
from test_sfvi import mixed
from torch.distributions import Bernoulli, Categorical, Normal, kl_divergence

from fedgp_flower.errors import DataError, RunError
from fedgp_flower.methods.family import initial_global, named, unit_noise
from fedgp_flower.methods.sfvi.classes import CONCENTRATION, AmortisedModel, PersonalNetwork, half_normal
from fedgp_flower.methods.sfvi.mixed import GroupedModel
from fedgp_flower.methods.sfvi.options import SFVIOptions
from fedgp_flower.methods.sfvi.structured import ModelInputs
from fedgp_flower.options import ModelSection
from fedgp_flower.run.api import load_run
from fedgp_flower.run.artefacts import read_run
from fedgp_flower.run.in_process import run_in_process
from fedgp_flower.run.predict import Predictor
from fedgp_flower.run.registry import load, methods
from fedgp_flower.shared_messages import Confusion, Described
from strategies.server.questions import drive
from strategies.sfvi import global_noise, gradient_round

D, H, C = 3, 4, 3
MODELS = ("hierarchical-bnn", "fedpop")


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(5)


def weights(name, z_global, z_local):
    """Both layers of a site, as the paper has them."""
    head = z_local[-C * H :].reshape(C, H)
    if name == "fedpop":
        return z_global.reshape(H, D), head
    sigma = half_normal(z_global[-1])
    return z_global[:-1].reshape(H, D) + sigma * z_local[: H * D].reshape(H, D), head


def test_the_scale_is_half_normal():
    z = torch.linspace(-6, 6, 25, dtype=torch.float64, requires_grad=True)
    sigma = half_normal(z)
    np.testing.assert_allclose(stats.halfnorm.cdf(sigma.detach()), stats.norm.cdf(z.detach()), rtol=1e-9, atol=1e-15)
    [slope] = torch.autograd.grad(sigma.sum(), z)
    density = stats.norm.pdf(z.detach()) / stats.halfnorm.pdf(sigma.detach())  # dσ/dz = φ(z) / f(σ)
    np.testing.assert_allclose(slope, density, rtol=1e-7)


@pytest.mark.parametrize("sites", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_a_round_is_the_gradient_of_the_joint_bound_in_one_place(generator, name, sites):
    """With one site it is plain VI. Densities inside q are held: sticking the landing."""
    plan = plan_of(model=name, samples=2, hidden=H, classes=C)
    model = PersonalNetwork(D, plan[0])
    x = torch.randn(sites, 6, D, generator=generator, dtype=torch.float64)
    y = torch.randint(C, (sites, 6), generator=generator).double()
    rows = [model.prepare(x[k], y[k], key=7 + k) for k in range(sites)]
    q_global, local = start_posteriors(model, rows, generator, whole=False, triangular=False)
    noise = torch.tensor(global_noise(plan[1], 1, 2, model.global_size))
    leaves = [{n: v.clone().requires_grad_() for n, v in named(q).items()} for q in (q_global, *local)]
    bound = torch.zeros((), dtype=torch.float64)
    for s in range(2):
        eta, *own = leaves
        z = eta["q.mean"] + eta["q.log_scale"].exp() * noise[s]
        held = Normal(eta["q.mean"].detach(), eta["q.log_scale"].detach().exp())
        bound = bound + (Normal(0.0, 1.0).log_prob(z) - held.log_prob(z)).sum() / 2
        for site, q in zip(rows, own, strict=True):
            draws = unit_noise(11, 0, site.keys, (1, 2), model.local_width(site))[0, s, 0]
            mean, scale = q["local.mean"][0], q["local.log_scale"][0].exp()
            z_local, held = mean + scale * draws, Normal(mean.detach(), scale.detach())
            first, second = weights(name, z, z_local)
            likelihood = Categorical(logits=torch.relu(site.features @ first.T) @ second.T).log_prob(site.targets)
            prior = Normal(0.0, 1.0).log_prob(z_local) - held.log_prob(z_local)
            bound = bound + (likelihood.sum() + prior.sum()) / 2
    expected = torch.autograd.grad(bound, [value for group in leaves for value in group.values()])
    plain = {str(k): PlainSite(model, site, q) for k, (site, q) in enumerate(zip(rows, local, strict=True))}
    state, _ = drive(gradient_round(state_of(model, q_global), roster_of(plain), *plan), plain)
    assert state.bound == pytest.approx(float(bound.detach()), rel=1e-12)
    found = [gradient_of(state)[name] for name in leaves[0]]
    found += [site.local[name] for site in plain.values() for name in leaves[1]]
    torch.testing.assert_close([*map(torch.as_tensor, found)], [*expected], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["multinomial", *MODELS, "vae", "prodlda"])
def test_a_site_without_held_out_rows_has_a_confusion_matrix_of_zeros(name):
    options = SFVIOptions.model_validate({"model": name, "hidden": H, "classes": C})
    model = load(options.row.model).configured(options, ModelSection(), D)
    x, q = torch.zeros(2, D).double(), initial_global(model.global_size, scale=0.1, triangular=False)
    none = ModelInputs(x[:0], torch.zeros(0, dtype=torch.int64))
    mean, _ = model.moments(model.prepare(x, x[:, 0]), q, None, none, link=False)
    assert Confusion.of(mean.numpy(), np.empty(0)).counts.tolist() == np.zeros((C, C)).tolist()


def test_confusion_counts_rows_and_leaves_small_cells_out():
    probability = np.array([[0.7, 0.3], [0.2, 0.8], [0.6, 0.4], [0.1, 0.9]])
    found = Confusion.of(probability, np.array([0.0, 1.0, 1.0, 1.0]))
    np.testing.assert_array_equal(found.counts, [[1, 0], [1, 2]])
    np.testing.assert_array_equal(found.coarse(2).counts, [[0, 0], [0, 2]])
    assert found.refusal(Described(4)) is None
    assert Confusion(-found.counts).refusal(Described(4))


WORDS = "ball,goal,disk,file,say"
V, W, N = 6, 2, 9


def model_and_rows(name):
    generator = torch.Generator().manual_seed(5)
    options = SFVIOptions.model_validate({"model": name, "hidden": H, "latents": W, "classes": C})
    model = AmortisedModel.configured(options, ModelSection(), V)
    counts = torch.randint(4, (N, V), generator=generator).double()
    features = counts.clamp(max=1) if name == "vae" else counts
    return model, features, torch.randint(C, (N,), generator=generator).double()


@pytest.mark.parametrize("name", ["vae", "prodlda"])
def test_a_round_of_amortised_latents_is_the_gradient_of_the_joint_bound(name):
    """By weights of the decoder, under q(Z_G) whose density is held, and of the encoder."""
    (model, x, y), plan = model_and_rows(name), plan_of(model=name, samples=2)
    rows = [replace(model.prepare(x[i], y[i]), keys=50 + i) for i in torch.arange(N).chunk(3)]  # draws are by number
    q_global, local = start_posteriors(model, rows, torch.Generator().manual_seed(1), whole=False, triangular=False)
    plain = {str(k): PlainSite(model, site, q) for k, (site, q) in enumerate(zip(rows, local, strict=True))}
    state, _ = drive(gradient_round(state_of(model, q_global), roster_of(plain), *plan), plain)
    assert all(not site.local for site in plain.values())  # nothing is learned at a site alone
    noise = torch.tensor(global_noise(plan[1], 1, 2, model.global_size))
    eta = {key: own.clone().requires_grad_() for key, own in named(q_global).items()}
    theta = model.theta()
    draws = unit_noise(11, 0, 50 + torch.arange(N), (1, 2), W)[0]
    bound = torch.zeros((), dtype=torch.float64)
    for s in range(2):
        z_global = eta["q.mean"] + eta["q.log_scale"].exp() * noise[s]
        held = Normal(eta["q.mean"].detach(), eta["q.log_scale"].detach().exp())
        layer = z_global.reshape(V + C, -1)
        seen = 3 * x.log1p() / x.log1p().norm(dim=1, keepdim=True) if name == "prodlda" else x
        mean, log_scale = model.encoder(seen).chunk(2, -1)
        q = Normal(mean, log_scale.exp())
        z = mean + log_scale.exp() * draws[s]
        if name == "vae":
            prior, code = Normal(0.0, 1.0), torch.relu(model.get_submodule("decoder")(z))
        else:
            wide = torch.tensor(0.5 / CONCENTRATION, dtype=torch.float64).sqrt()  # τ² = (1 − 1/W)/α
            prior, code = Normal(torch.zeros_like(wide), wide), z.softmax(-1)
        outputs = torch.cat([code, torch.ones(N, 1).double()], 1) @ layer.T
        if name == "vae":
            fit = Bernoulli(logits=outputs[:, :V]).log_prob(x).sum()
        else:
            fit = (x * Categorical(logits=outputs[:, :V]).logits).sum()
        fit = fit + Categorical(logits=outputs[:, V:]).log_prob(y).sum() - kl_divergence(q, prior).sum()
        bound = bound + (fit + (Normal(0.0, 1.0).log_prob(z_global) - held.log_prob(z_global)).sum()) / 2
    expected = torch.autograd.grad(bound, [*eta.values(), *theta.values()])
    assert state.bound == pytest.approx(float(bound.detach()), rel=1e-12)
    found = [torch.as_tensor(gradient_of(state)[key]) for key in (*eta, *theta)]
    torch.testing.assert_close(found, [*expected], rtol=1e-9, atol=1e-9)


def test_features_that_are_none_are_refused():
    for name, word in (("vae", "between 0 and 1"), ("prodlda", "counts")):
        model, _, _ = model_and_rows(name)
        with pytest.raises(DataError, match=word):
            model.prepare(torch.full((2, V), -0.5).double(), torch.zeros(2).double())


def documents(rows=150):
    """Documents of two themes, each with words of its own, and common words in all."""
    rng = np.random.default_rng(0)
    theme = np.arange(rows) % 2
    rates = np.where(theme[:, None] == 1, [6, 6, 0.2, 0.2, 9], [0.2, 0.2, 6, 6, 9])
    frame = pd.DataFrame(rng.poisson(rates), columns=WORDS.split(",")).astype(float)
    return frame.assign(theme=theme.astype(float))


def test_a_topic_model_is_scored_saved_and_predicts(tmp_path):
    path, table = tmp_path / "table.csv", documents()
    table.assign(theme=table["theme"].map({0.0: "disk", 1.0: "game"})).to_csv(path, index=False)
    keys = {"method": "sfvi", "model__likelihood": "bernoulli", "target": "theme"}
    keys |= {"sfvi__model": "prodlda", "sfvi__hidden": 8, "sfvi__samples": 1}
    keys |= {"sfvi__initial_scale": 0.1, "sfvi__learning_rate": 0.1, "dataset": str(path), "features": WORDS}
    keys |= {"num_server_rounds": 30, "name": "run", "output_dir": str(tmp_path)}
    folder = run_in_process(configured(**keys), 3)
    assert load_run(folder).metrics.test["accuracy"] > 0.9
    chance = Predictor.of(read_run(folder)).predict(table)["probability of game"]
    assert ((chance > 0.5) == table["theme"]).mean() > 0.9
    report = (folder / "report.html").read_text()
    assert "Topics" in report
    assert "ball, goal" in report or "goal, ball" in report


BETA, OMEGA, SIGMA = (0.4, -0.8, 0.5), (0.3, 0.9), -0.5
"""Intercept and slopes; log precisions ω of intercept and slope of units; ς."""


def table(units=12, visits=5, seed=0, likelihood="gaussian"):
    rng = np.random.default_rng(seed)
    unit = np.repeat(np.arange(units), visits)
    a, b = rng.standard_normal((2, len(unit)))
    own = rng.standard_normal((units, 2)) * np.exp(-np.array(OMEGA))
    f = BETA[0] + BETA[1] * a + BETA[2] * b + own[unit, 0] + own[unit, 1] * a
    draws = {
        "gaussian": f + math.exp(-SIGMA) * rng.standard_normal(len(f)),
        "bernoulli": (rng.uniform(size=len(f)) < 1 / (1 + np.exp(-f))).astype(float),
        "poisson": rng.poisson(np.exp(0.5 * f)).astype(float),
    }
    site = np.array(["north", "south", "west"])[unit % 3]
    return pd.DataFrame({"site": site, "all": "one", "unit": unit, "a": a, "b": b, "y": draws[likelihood]})


def columns(frame):
    return [torch.from_numpy(frame[names].to_numpy().copy()) for names in (["a", "b", "a"], "y", "unit")]


def test_the_gaussian_model_is_the_closed_form_at_any_effects():
    """log p(y, b | Z_G) − log p(b | y, Z_G) is log N(y; Xβ, Z Ω⁻¹ Zᵀ + σ²I) whatever b is (Chib 1995)."""
    frame = table()
    model = GroupedModel(2, 1, likelihood="gaussian", prior_scale=2.0)
    site = model.prepare(*columns(frame))
    z_global = torch.tensor([*BETA, *OMEGA, SIGMA], dtype=torch.float64)
    effects = torch.randn(12, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = model.log_local(site, z_global, effects).numpy()
    scale = np.exp(-np.array(OMEGA))
    for unit, own in frame.groupby("unit"):
        design = np.stack([np.ones(len(own)), own["a"]], 1)
        mean = BETA[0] + BETA[1] * own["a"] + BETA[2] * own["b"]
        prior, noise = np.diag(scale**2), math.exp(-2 * SIGMA)
        precision = np.diag(scale**-2) + design.T @ design / noise
        centre = np.linalg.solve(precision, design.T @ (own["y"] - mean) / noise)
        b = effects[unit].numpy() * scale
        posterior = stats.multivariate_normal.logpdf(b, centre, np.linalg.solve(precision, np.eye(2)))
        jacobian = np.log(scale).sum()
        covariance = design @ prior @ design.T + noise * np.eye(len(own))
        evidence = stats.multivariate_normal.logpdf(own["y"], mean, covariance)
        assert found[unit] - posterior - jacobian == pytest.approx(evidence, rel=1e-10)


@pytest.mark.parametrize("likelihood", ["bernoulli", "poisson"])
def test_other_densities_are_scipy_s(likelihood):
    frame = table(likelihood=likelihood)
    model = GroupedModel(2, 1, likelihood=likelihood)
    site = model.prepare(*columns(frame))
    z_global = torch.tensor([*BETA, *OMEGA], dtype=torch.float64)
    effects = torch.randn(12, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    own = effects.numpy()[frame["unit"]] * np.exp(-np.array(OMEGA))
    f = BETA[0] + BETA[1] * frame["a"] + BETA[2] * frame["b"] + own[:, 0] + own[:, 1] * frame["a"]
    law = stats.poisson(np.exp(f)) if likelihood == "poisson" else stats.bernoulli(1 / (1 + np.exp(-f)))
    rows = pd.Series(law.logpmf(frame["y"])).groupby(frame["unit"]).sum()
    expected = rows + stats.norm.logpdf(effects.numpy()).sum(1)
    np.testing.assert_allclose(model.log_local(site, z_global, effects), expected, rtol=1e-10)


def test_a_run_is_saved_and_predicts_units_it_knows_and_new_ones(tmp_path):
    table().to_csv(tmp_path / "visits.csv", index=False)
    keys = {"model__likelihood": "gaussian", "sfvi__random_slopes": "a", "num_server_rounds": 15, "name": "run"}
    keys |= {"standardise": True, "test_fraction": 0.2, "sfvi__samples": 4, "output_dir": str(tmp_path)}
    folder = run_in_process(mixed(tmp_path / "visits.csv", "site", **keys), 3)
    read = load_run(folder)
    frame = table().head(4)
    new = read.posterior.predict(frame)
    known = read.posterior.predict(frame, site="north")
    assert len(new) == len(known) == 4
    assert (known["sd"].to_numpy()[frame["site"] == "north"] < new["sd"].to_numpy()[frame["site"] == "north"]).all()
    assert "Effects" in (folder / "report.html").read_text()


def test_a_slope_in_a_column_that_is_not_there_is_named():
    wrong, right = (plan_of(model="glmm", unit_column="unit", random_slopes=own)[0] for own in ("a, c", "b"))
    with pytest.raises(DataError, match=r"`sfvi.random-slopes`: 'c' .* there are unit, a, b"):
        wrong.columns(("unit", "a", "b"))
    assert right.columns(("unit", "a", "b")) == [1, 2, 2]


SFVI = {"sfvi__hidden": 8, "sfvi__initial_scale": 0.1, "sfvi__samples": 2}
RUNS = {
    "sfvi": SFVI | {"sfvi__model": "fedpop", "num_server_rounds": 30},
    "sfvi-avg": SFVI | {"sfvi__model": "hierarchical-bnn", "sfvi__local_steps": 5, "num_server_rounds": 8},
    "pvi-bnn": {"bnn__hidden": 6, "pvi__steps": 60, "pvi__learning_rate": 0.03, "num_server_rounds": 3},
    "deep-kernel": {"model__likelihood": "categorical", "deep__learning_rate": 0.02, "num_server_rounds": 8},
}
SHOWN = {"pvi-bnn": "Pruned weights", "deep-kernel": "Personal heads"}
"""What only this method's report has."""


@pytest.mark.parametrize("method", RUNS)
def test_a_run_is_scored_saved_and_predicts(tmp_path, method):
    site, row = np.repeat(np.arange(3), 60), np.arange(180)  # each with one class for 80 % of its rows
    label = np.where(row % 5 == 0, (site + 1 + row // 5 % 2) % 3, site)
    noise = 0.4 * np.random.default_rng(0).standard_normal((180, 2))
    x = np.array([[1.5, 0.0], [-1.0, 1.2], [-1.0, -1.2]])[label] + noise
    table = pd.DataFrame(x, columns=["a", "b"]).assign(label=[f"kind {name}" for name in label], silo=site)
    table.to_csv(tmp_path / "classes.csv", index=False)
    keys = {"method": method, "target": "label", "features": "a,b", "dataset": str(tmp_path / "classes.csv")}
    keys |= {"partitioner": "natural", "partition__column": "silo", "name": "run", "output_dir": str(tmp_path)}
    folder = run_in_process(configured(**keys, **RUNS[method]), 3)
    read, page = load_run(folder), (folder / "report.html").read_text()
    assert read.metrics.test["accuracy"] > 0.85
    confusion = np.array(read.metrics.method_details["confusion"])
    assert confusion.sum() == 36
    assert np.trace(confusion) == pytest.approx(36 * read.metrics.test["accuracy"])
    assert "that of the most probable class" in page
    assert SHOWN.get(method, "") in page
    assert {"calibration.png", "confusion-of-classes.png"} <= {path.name for path in (folder / "plots").iterdir()}
    personal = RUNS[method].get("sfvi__model")  # of the heads of new sites nothing is known
    if personal:
        assert read.posterior is None
        with pytest.raises(RunError, match="keeps its own last layer"):
            Predictor.of(read_run(folder))
        assert len(Predictor.of_all(folder)) == 3
    site = table[table["silo"] == 1]
    predictors = [] if personal else [read.posterior]
    predictors += [Predictor.at_site(folder, "1")] if methods()[method].at_site else []
    for predictor in predictors:
        chance = predictor.predict(site)
        assert list(chance) == [f"probability of kind {number}" for number in range(3)]
        np.testing.assert_allclose(chance.sum(axis=1), 1.0)
        assert (chance.to_numpy().argmax(axis=1) == site["label"].str[-1].astype(int)).mean() > 0.85
