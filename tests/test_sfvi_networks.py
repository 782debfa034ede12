"""SFVI of networks with personal parts: the joint bound written in one place by torch.distributions, runs, panels."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from faults import configured
from scipy import stats
from structured_problems import PlainSite, gradient_of, plan_of, roster_of, start_posteriors, state_of
from torch.distributions import Categorical, Normal

from fedgp_flower.methods.family import named, unit_noise
from fedgp_flower.methods.sfvi.classes import PersonalNetwork, half_normal
from fedgp_flower.run.api import load_run
from fedgp_flower.run.in_process import run_in_process
from fedgp_flower.run.predict import Predictor
from fedgp_flower.shared_messages import Confusion, Described
from strategies.server.questions import drive
from strategies.sfvi import global_noise, one_round

D, H, C = 3, 4, 3
MODELS = ("hierarchical-bnn", "fedpop")


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(5)


def weights(name: str, z_global: torch.Tensor, z_local: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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
    rows = [
        model.prepare(
            torch.randn(6, D, generator=generator, dtype=torch.float64),
            torch.randint(C, (6,), generator=generator).double(),
            key=7 + k,
        )
        for k in range(sites)
    ]
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
    state, _ = drive(one_round(state_of(model, q_global), roster_of(plain), *plan), plain)
    assert state.bound == pytest.approx(float(bound.detach()), rel=1e-12)
    found = [gradient_of(state)[name] for name in leaves[0]]
    found += [site.local[name] for site in plain.values() for name in leaves[1]]
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.as_tensor(mine), other, rtol=1e-10, atol=1e-10)


def test_confusion_counts_rows_and_leaves_small_cells_out():
    probability = np.array([[0.7, 0.3], [0.2, 0.8], [0.6, 0.4], [0.1, 0.9]])
    found = Confusion.of(probability, np.array([0.0, 1.0, 1.0, 1.0]))
    np.testing.assert_array_equal(found.counts, [[1, 0], [1, 2]])
    np.testing.assert_array_equal(found.coarse(2).counts, [[0, 0], [0, 2]])
    assert found.refusal(Described(4)) is None
    assert Confusion(-found.counts).refusal(Described(4))


def one_class_each(rows: int = 60) -> pd.DataFrame:
    """Three sites, each with one class for 80 % of its rows."""
    rng = np.random.default_rng(0)
    site = np.repeat(np.arange(3), rows)
    label = np.where(np.arange(3 * rows) % 5 == 0, (site + 1 + np.arange(3 * rows) // 5 % 2) % 3, site)
    centres = np.array([[1.5, 0.0], [-1.0, 1.2], [-1.0, -1.2]])
    x = centres[label] + 0.4 * rng.standard_normal((len(site), 2))
    return pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "label": label.astype(float), "silo": site})


@pytest.mark.parametrize(("method", "name"), [("sfvi", "fedpop"), ("sfvi-avg", "hierarchical-bnn")])
def test_a_run_is_scored_saved_and_predicts_at_a_site(tmp_path: Path, method: str, name: str):
    path = tmp_path / "classes.csv"
    one_class_each().to_csv(path, index=False)
    own: dict[str, Any] = {"sfvi__local_steps": 5, "num_server_rounds": 8} if method == "sfvi-avg" else {}
    keys = {"method": method, "target": "label", "standardise": False, "partitioner": "natural"}
    keys |= {"partition__column": "silo", "sfvi__model": name, "sfvi__classes": 3, "sfvi__hidden": 8}
    keys |= {"sfvi__initial_scale": 0.1}
    keys |= {"num_server_rounds": 40, "sfvi__samples": 2, "name": "run", "output_dir": str(tmp_path)}
    flat = configured(**keys | own, dataset=str(path), features="a,b")
    folder = run_in_process(flat, 3)
    read = load_run(folder)
    assert read.metrics.test["accuracy"] > 0.85
    confusion = np.array(read.metrics.method_details["confusion"])
    assert confusion.sum() == 36
    assert np.trace(confusion) == pytest.approx(36 * read.metrics.test["accuracy"])
    assert "that of the likeliest class" in (folder / "report.html").read_text()
    assert {"calibration.png", "confusion-of-classes.png"} <= {path.name for path in (folder / "plots").iterdir()}
    table = one_class_each()[lambda frame: frame["silo"] == 1]
    chance = Predictor.at_site(folder, "1").predict(table).to_numpy()
    assert (chance.argmax(1) == table["label"]).mean() > 0.85
