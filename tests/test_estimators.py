"""The same posterior in the words of scikit-learn, BoTorch and GPyTorch."""

from copy import deepcopy

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.utils.estimator_checks import check_estimator

import fedgp_flower as fg
from fedgp_flower.errors import ConfigError

FEW = {"model.num-inducing": 8, "sgpr.exchanges": 6}


def rows(count=60):
    rng = np.random.default_rng(2)
    x = rng.uniform(-2, 2, (count, 2))
    return x, 50 + 10 * np.sin(1.5 * x[:, 0]) + 3 * x[:, 1] + rng.normal(size=count)


@pytest.fixture(scope="module")
def fitted():
    x, y = rows()
    return fg.FederatedGPRegressor(num_rounds=4, options=FEW).fit(x, y, groups=np.arange(60) % 3)


def test_it_predicts_in_units_of_the_target_whatever_the_sites(fitted):
    x, y = rows()
    exact = clone(fitted).set_params(options={"model.num-inducing": 60, "method": "sgpr"})
    three, one = (clone(exact).fit(x, y, groups=groups) for groups in (np.arange(60) % 3, np.zeros(60)))
    np.testing.assert_allclose(one.predict(x), three.predict(x), rtol=1e-2)  # inducing points lie elsewhere
    mean, sd = fitted.predict(x, return_std=True)
    assert fitted.score(x, y) > 0.9
    assert np.mean(np.abs(y - mean) < 2 * sd) > 0.85
    assert sd.min() > 0.5


def test_classes_keep_their_names():
    x, y = rows()
    names = np.where(y > 50, "sick", "healthy")
    model = fg.FederatedGPClassifier(sites=2, num_rounds=3, options=FEW).fit(x, names)
    assert list(model.classes_) == ["healthy", "sick"]
    shares = model.predict_proba(x)
    np.testing.assert_allclose(shares.sum(axis=1), 1)
    assert np.mean(model.predict(x) == names) > 0.85
    thirds = np.array(["low", "middle", "high"])[np.digitize(y, (46, 54))]
    model.fit(x, thirds)
    assert list(model.classes_) == ["high", "low", "middle"]
    assert model.predict_proba(x).shape == (60, 3)
    assert np.mean(model.predict(x) == thirds) > 0.8


def test_a_wrong_key_is_a_value_error_with_the_projects_own_as_its_cause():
    x, y = rows()
    with pytest.raises(ValueError, match=r"unknown configuration key `model.kernal`") as error:
        fg.FederatedGPRegressor(options={"model.kernal": "rbf"}).fit(x, y)
    assert isinstance(error.value.__cause__, ConfigError)


@pytest.mark.filterwarnings("ignore")  # BoTorch's own, at import
def test_acquisition_functions_are_optimised_on_a_federated_posterior(fitted):
    acquisition = pytest.importorskip("botorch.acquisition")
    from botorch.optim import optimize_acqf

    model, points = fitted.posterior_.to_botorch(), torch.tensor([[0.3, -1.0], [1.0, 0.5]], dtype=torch.float64)
    table, found = pd.DataFrame(points.numpy(), columns=["x0", "x1"]), model.posterior(points)
    exact, noisy = (fitted.posterior_.distribution(table, noise=noise) for noise in (False, True))
    torch.testing.assert_close(found.mean[:, 0], exact.mean)
    torch.testing.assert_close(found.distribution.covariance_matrix, exact.covariance_matrix)
    torch.testing.assert_close(model.posterior(points, observation_noise=True).variance[:, 0], noisy.variance)
    assert torch.autograd.gradcheck(lambda x: model.posterior(x).mean, points.clone().requires_grad_())
    bound = acquisition.qUpperConfidenceBound(model, beta=1.0)
    box = torch.tensor([[-2.0, -2.0], [2.0, 2.0]], dtype=torch.float64)
    best, value = optimize_acqf(bound, box, q=1, num_restarts=2, raw_samples=16)
    grid = torch.cartesian_prod(*[torch.linspace(-2, 2, 15).double()] * 2)
    with torch.no_grad():
        assert value >= bound(grid[:, None]).max() - 0.2  # of a spread of 20
    assert best[0, 1] > 1  # the target rises with the second input
    assert model.subset_output([0]) is model
    for look in (
        lambda: acquisition.qKnowledgeGradient(model, num_fantasies=2)(points[None].repeat(1, 2, 1)),
        lambda: acquisition.qNegIntegratedPosteriorVariance(model, mc_points=points)(points[None]),
    ):
        with pytest.raises(NotImplementedError, match=r"has no training rows.*qUpperConfidenceBound"):
            look()
    with pytest.raises(NotImplementedError, match="Conditioning on 2 rows needs a new run"):
        model.condition_on_observations(points, points[:, :1])


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [fg.FederatedGPRegressor, fg.FederatedGPClassifier])
def test_scikit_learns_own_checks_pass(kind):
    check_estimator(kind(num_rounds=3, sites=2, options={"model.num-inducing": 5, "sgpr.exchanges": 4}))


def test_an_export_is_a_copy_that_learns_nothing_and_is_differentiable_by_its_inputs(fitted):
    saved = deepcopy(fitted.posterior_.standardised)
    [(exported, likelihood)] = saved.export()
    assert not any(p.requires_grad for p in (*exported.parameters(), *likelihood.parameters()))
    assert not exported.training
    assert not likelihood.training
    assert all(p.requires_grad for p in saved.model.parameters())
    x = torch.tensor([[0.3, -1.0], [1.0, 0.5]], dtype=torch.float64).requires_grad_()
    before = exported(x).mean
    before.sum().backward()
    assert bool((x.grad != 0).any())
    for parameter in saved.model.parameters():
        parameter.data.fill_(0.3)
    torch.testing.assert_close(exported(x).mean, before)
