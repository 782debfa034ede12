"""SFVI with shared variational parameters: the joint bound in one place by torch.distributions, partitions, runs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from faults import configured
from structured_problems import PlainSite, gradient_of, plan_of, roster_of, start_posteriors, state_of
from torch.distributions import Bernoulli, Categorical, Normal, kl_divergence

from fedgp_flower.errors import DataError
from fedgp_flower.methods.family import named, unit_noise
from fedgp_flower.methods.sfvi.amortised import CONCENTRATION, AmortisedModel
from fedgp_flower.methods.sfvi.options import SFVIOptions
from fedgp_flower.options import ModelSection
from fedgp_flower.run.api import load_run
from fedgp_flower.run.in_process import run_in_process
from fedgp_flower.run.predict import Predictor
from strategies.server.questions import drive
from strategies.sfvi import global_noise, one_round

WORDS = "ball,goal,disk,file,say"
V, W, H, C, N = 6, 2, 4, 3, 9
MODELS = ("vae", "prodlda")


def model_and_rows(name: str) -> tuple[AmortisedModel, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    options = SFVIOptions.model_validate({"model": name, "hidden": H, "latents": W, "classes": C})
    model = AmortisedModel.configured(options, ModelSection(), V)
    counts = torch.randint(4, (N, V), generator=generator).double()
    features = counts.clamp(max=1) if name == "vae" else counts
    return model, features, torch.randint(C, (N,), generator=generator).double()


def sites_of(model: AmortisedModel, x: torch.Tensor, y: torch.Tensor, parts: int) -> list[Any]:
    """Rows dealt to sites, whose draws are keyed by their number."""
    return [replace(model.prepare(x[i], y[i]), keys=50 + i) for i in torch.arange(N).chunk(parts)]


def asked(name: str, parts: int) -> tuple[dict[str, np.ndarray], float, dict[str, torch.Tensor], torch.Tensor]:
    """Gradient and value of a round; q(Z_G), and its draws."""
    model, x, y = model_and_rows(name)
    plan = plan_of(model=name, samples=2)
    rows = sites_of(model, x, y, parts)
    q_global, local = start_posteriors(model, rows, torch.Generator().manual_seed(1), whole=False, triangular=False)
    plain = {str(k): PlainSite(model, site, q) for k, (site, q) in enumerate(zip(rows, local, strict=True))}
    state, _ = drive(one_round(state_of(model, q_global), roster_of(plain), *plan), plain)
    assert all(not site.local for site in plain.values())  # nothing is learned at a site alone
    eta = named(q_global)
    assert state.bound is not None
    return gradient_of(state), state.bound, eta, torch.tensor(global_noise(plan[1], 1, 2, model.global_size))


@pytest.mark.parametrize("name", MODELS)
def test_a_round_is_the_gradient_of_the_joint_bound_in_one_place(name: str) -> None:
    """By weights of the decoder, under q(Z_G) whose density is held, and of the encoder."""
    found, value, eta, noise = asked(name, 3)
    model, x, y = model_and_rows(name)
    eta = {key: own.clone().requires_grad_() for key, own in eta.items()}
    theta = model.theta()
    draws = unit_noise(11, 0, 50 + torch.arange(N), (1, 2), W)[0]
    bound = torch.zeros((), dtype=torch.float64)
    for s in range(2):
        z_global = eta["q.mean"] + eta["q.log_scale"].exp() * noise[s]
        held = Normal(eta["q.mean"].detach(), eta["q.log_scale"].detach().exp())
        layer = z_global.reshape(V + C, -1)
        mean, log_scale = model.encoder(
            3 * x.log1p() / x.log1p().norm(dim=1, keepdim=True) if name == "prodlda" else x
        ).chunk(2, -1)
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
    assert value == pytest.approx(float(bound.detach()), rel=1e-12)
    for key, other in zip([*eta, *theta], expected, strict=True):
        torch.testing.assert_close(torch.as_tensor(found[key]), other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_a_round_does_not_depend_on_the_partition(name: str) -> None:
    (one, value, *_), (many, other, *_) = asked(name, 1), asked(name, 4)
    assert value == pytest.approx(other, rel=1e-12)
    for key, array in one.items():
        np.testing.assert_allclose(array, many[key], rtol=1e-9, atol=1e-9)


def test_features_that_are_none_are_refused() -> None:
    for name, word in (("vae", "between 0 and 1"), ("prodlda", "counts")):
        model, _, _ = model_and_rows(name)
        with pytest.raises(DataError, match=word):
            model.prepare(torch.full((2, V), -0.5).double(), torch.zeros(2).double())


def documents(rows: int = 150) -> pd.DataFrame:
    """Documents of two themes, each with words of its own, and common words in all."""
    rng = np.random.default_rng(0)
    theme = np.arange(rows) % 2
    rates = np.where(theme[:, None] == 1, [6, 6, 0.2, 0.2, 9], [0.2, 0.2, 6, 6, 9])
    frame = pd.DataFrame(rng.poisson(rates), columns=WORDS.split(",")).astype(float)
    return frame.assign(theme=theme.astype(float))


def test_a_run_is_scored_saved_and_predicts(tmp_path: Path) -> None:
    path, table = tmp_path / "table.csv", documents()
    table.assign(theme=table["theme"].map({0.0: "disk", 1.0: "game"})).to_csv(path, index=False)
    keys = {"method": "sfvi", "model__likelihood": "bernoulli", "target": "theme", "standardise": False}
    keys |= {"sfvi__model": "prodlda", "sfvi__classes": 2, "sfvi__hidden": 8, "sfvi__samples": 1}
    keys |= {"sfvi__initial_scale": 0.1, "sfvi__learning_rate": 0.1, "dataset": str(path), "features": WORDS}
    keys |= {"num_server_rounds": 45, "name": "run", "output_dir": str(tmp_path)}
    folder = run_in_process(configured(**keys), 3)
    assert load_run(folder).metrics.test["accuracy"] > 0.9
    chance = Predictor.of_run(folder).predict(table)["probability of game"]
    assert ((chance > 0.5) == table["theme"]).mean() > 0.9
    report = (folder / "report.html").read_text()
    assert "Topics" in report
    assert "ball, goal" in report or "goal, ball" in report
