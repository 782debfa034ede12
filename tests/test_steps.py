"""Steps at common values: a random walk over them beside the GP, with the steps as inducing variables."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from faults import ALONE

import fedgp_flower as fg
from fedgp_flower.errors import ConfigError
from fedgp_flower.gp.models import LatentGP
from fedgp_flower.gp.steps import ABSENT, MOST_STEPS, common_values, step_points
from fedgp_flower.methods.sgpr.duals import Duals, expectations, transferred
from fedgp_flower.options import ModelSection
from fedgp_flower.run import dependence
from fedgp_flower.run.registry import parse_config

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


def test_without_its_gp_it_is_a_regression_on_the_steps() -> None:
    """Under Gaussian noise, q of the steps is the posterior of the weights of all rows."""
    draw = np.random.default_rng(1)
    x, y = np.column_stack([draw.choice(LEVELS, 40), draw.standard_normal(40)]), draw.standard_normal(40)
    model = stepped("gaussian", "rbf", np.array([[0.1, 0.2]]), noise=0.3)
    model.load(model.to_arrays() | {"kernel.log_outputscale": np.asarray(-40.0)})
    duals = Duals(torch.zeros(4, 4).double(), torch.zeros(4).double())
    q = duals.stepped(expectations(model, torch.from_numpy(x), torch.from_numpy(y), duals.posterior()), 1.0).posterior()
    precision = np.eye(3) + walks(x).T @ walks(x) / 0.3
    np.testing.assert_allclose(q.covariance[:3, :3], np.linalg.solve(precision, np.eye(3)), rtol=1e-6)
    np.testing.assert_allclose(q.mean[:3], np.linalg.solve(precision, walks(x).T @ y / 0.3), rtol=1e-6)


def test_what_rows_tell_of_the_steps_does_not_change_with_their_variance() -> None:
    draw = np.random.default_rng(4)
    x, y = np.column_stack([draw.choice(LEVELS, 40), draw.standard_normal(40)]), draw.standard_normal(40)
    old, new = (stepped("gaussian", "rbf", np.array([[0.1, 0.2]]), noise=0.3) for _ in range(2))
    for model, factor in ((old, 1.0), (new, 7.0)):
        variances = {"kernel.log_step": np.log(factor * VARIANCES), "kernel.log_outputscale": np.asarray(-40.0)}
        model.load(model.to_arrays() | variances)
    none = Duals(torch.zeros(4, 4).double(), torch.zeros(4).double())

    def told(model: LatentGP) -> Duals:
        return none.stepped(expectations(model, torch.from_numpy(x), torch.from_numpy(y), none.posterior()), 1.0)

    with torch.no_grad():
        moved, wanted = transferred(told(old), old, new, new.factor()), told(new)
    torch.testing.assert_close(moved.precision[:3, :3], wanted.precision[:3, :3], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(moved.shift[:3], wanted.shift[:3], rtol=1e-5, atol=1e-5)


def test_cuts_lie_between_the_values_that_rows_of_any_site_share() -> None:
    draw = np.random.default_rng(2)
    x = np.column_stack([draw.integers(0, 5, 300) / 2, draw.standard_normal(300), draw.integers(0, 2, 300)])
    x[:2, 0] = 2.9  # fewer than three rows
    totals = np.sum([common_values(part, 3) for part in np.array_split(x, 3)], axis=0)
    points = step_points(*totals, 300.0)
    assert points.shape == (5, 3)
    np.testing.assert_allclose(points[:4], [[cut, ABSENT, ABSENT] for cut in (0.25, 0.75, 1.25, 1.75)], rtol=1e-12)
    np.testing.assert_allclose(points[4], [ABSENT, ABSENT, 0.5], rtol=1e-12)
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
    posterior = fg.load_run(finished.path).posterior
    near = posterior.predict(pd.DataFrame({"dose": [6, 7, 8], "weight": 0.0}))["probability of yes"]
    assert np.abs(near - [0.2, 0.95, 0.2]).max() < 0.2
    assert list(dependence.walks(fg.load_run(finished.path)).index) == ["dose"]
    model, observed = posterior.to_gpytorch()
    np.testing.assert_allclose(
        observed(model(posterior.inputs(table))).mean, posterior.predict(table)["probability of yes"], rtol=1e-6
    )


def test_other_methods_refuse_steps() -> None:
    with pytest.raises(ConfigError, match=r"`model.kernel` = 'steps\(rbf\)'.*svgp"):
        parse_config({"dataset": "diabetes", "model.kernel": "steps(rbf)"})
