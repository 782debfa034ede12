"""Several classes from sums: the integrals, their limits, and runs with every kind of target that names a class."""

from dataclasses import replace

import gpytorch
import numpy as np
import pandas as pd
import pytest
import test_svgp
import torch
from scipy import stats
from scipy.special import logsumexp, softmax
from sklearn.linear_model import LogisticRegression

import fedgp_flower as fg
from fedgp_flower.clients import baselines
from fedgp_flower.errors import DataError
from fedgp_flower.gp.likelihoods import Logit, build_point_likelihood
from fedgp_flower.gp.likelihoods.classes import TEMPERATURES, best_temperature, tempered
from fedgp_flower.gp.likelihoods.integrals import expected_log_sum_exp, expected_softplus
from fedgp_flower.gp.models import LatentGP
from fedgp_flower.methods.sgpr.duals import Duals, expectations
from fedgp_flower.methods.sparse_posterior import SavedLatentGP
from fedgp_flower.options import ModelSection

NONE = torch.zeros(0).double()


@pytest.mark.parametrize("variance", [1e-4, 0.1, 1.0, 25.0])
def test_of_two_classes_the_difference_is_a_logit(variance):
    """Log Σ e^f = f_0 + log(1 + e^d), d = f_1 − f_0 ~ N(m_1 − m_0, s_0 + s_1): another closed form has that."""
    mean = torch.linspace(-6, 6, 14).double().view(2, 7) * torch.tensor([[1.0], [-0.4]])
    spread = variance * torch.tensor([[1.0], [0.7]]).double().expand(2, 7)
    value, share, curvature = expected_log_sum_exp(mean, spread)
    softplus, logistic, density = expected_softplus(mean[1] - mean[0], spread.sum(0))
    torch.testing.assert_close(value, mean[0] + softplus, rtol=0, atol=2e-6)
    torch.testing.assert_close(share, torch.stack([1 - logistic, logistic]), rtol=0, atol=2e-6)
    torch.testing.assert_close(curvature, density.expand(2, -1), rtol=0, atol=2e-6 / min(1.0, variance**0.5 * 3))


def test_of_three_classes_they_are_what_quadrature_finds():
    """By fine trapezia over the plane; f_2 is certain."""
    m, s = np.array([0.3, -0.8, 0.5]), np.array([2.0, 0.5, 1e-12])
    found = [part[..., 0] for part in expected_log_sum_exp(torch.from_numpy(m)[:, None], torch.from_numpy(s)[:, None])]
    z = np.linspace(-9, 9, 721)
    weights = np.multiply.outer(stats.norm.pdf(z), stats.norm.pdf(z)) * (z[1] - z[0]) ** 2
    plane = np.stack(np.broadcast_arrays(m[0] + s[0] ** 0.5 * z[:, None], m[1] + s[1] ** 0.5 * z, m[2]))

    def mean_of(values):
        return (weights * values).sum()

    every = softmax(plane, axis=0)
    assert float(found[0]) == pytest.approx(mean_of(logsumexp(plane, axis=0)), abs=1e-6)
    for c in range(3):
        assert float(found[1][c]) == pytest.approx(mean_of(every[c]), abs=1e-6)
        assert float(found[2][c]) == pytest.approx(mean_of(every[c] * (1 - every[c])), abs=5e-6)


def test_the_log_of_a_tiny_probability_is_right():
    likelihood = build_point_likelihood("categorical")
    far, narrow = torch.tensor([[0.0], [30.0]]).double(), torch.full((2, 1), 1e-6).double()
    assert float(likelihood.log_predictive(torch.zeros(1), far, narrow, NONE)) == pytest.approx(-30, abs=1e-3)


def classified(rows, classes):
    draw = np.random.default_rng(1)
    x = draw.normal(size=(rows, 1))
    y = np.digitize(x[:, 0] + draw.normal(size=rows), np.linspace(-0.7, 0.7, classes - 1))
    return torch.from_numpy(x), torch.from_numpy(y.astype(float))


def settled(likelihood, data, classes, steps=60, **keys):
    """A model of so many functions, the best q, and the bound there."""
    model = LatentGP(ModelSection(**keys), torch.linspace(-2, 2, 6).double()[:, None])
    model.observed = likelihood
    model.constant = torch.nn.Parameter(torch.zeros(*[classes] * likelihood.relative, 1).double())
    duals = test_svgp.settled(model, data, steps, 0.7)
    return model, duals, float(expectations(model, *data, duals.posterior()).fit) - float(duals.divergence())


def test_of_two_classes_bound_and_posterior_are_those_of_one_logit():
    """The difference of two functions has twice their variance."""
    data = classified(40, 2)
    model, duals, bound = settled(build_point_likelihood("categorical"), data, 2, outputscale=3.0, lengthscale=0.8)
    logit, one, exact = settled(Logit(), data, 1, outputscale=6.0, lengthscale=0.8)
    assert bound == pytest.approx(exact, abs=1e-5)
    (mean, spread), (centre, width) = model.latent(data[0], duals.posterior()), logit.latent(data[0], one.posterior())
    torch.testing.assert_close((mean[1] - mean[0], spread.sum(0)), (centre, width), rtol=1e-05, atol=1e-05)
    share = model.observed.moments(mean, spread, NONE)[0][:, 1]
    torch.testing.assert_close(share, Logit().moments(centre, width, NONE)[0], rtol=0, atol=2e-6)


def test_the_divergence_of_differences_is_that_of_their_laws():
    """Of A f, A an orthonormal basis of differences, under q and under the prior."""
    draw = torch.Generator().manual_seed(0)
    roots, size = torch.randn(3, 4, 4, generator=draw).double(), (3, 4)
    duals = Duals(roots @ roots.mT, torch.randn(*size, generator=draw).double(), True)
    q, basis = duals.posterior(), torch.linalg.svd(torch.ones(1, 3).double())[2][1:].contiguous()
    wide = torch.kron(basis, torch.eye(4).double())
    law = torch.distributions.MultivariateNormal(wide @ q.mean.ravel(), wide @ torch.block_diag(*q.covariance) @ wide.T)
    prior = torch.distributions.MultivariateNormal(torch.zeros(8).double(), torch.eye(8).double())
    torch.testing.assert_close(duals.divergence(), torch.distributions.kl_divergence(law, prior))


def test_no_other_posterior_of_differences_has_a_higher_bound():
    """Steps end where the slope by every S_c is zero: random moves of (B, b) from there lower the bound."""
    data, draw = classified(60, 3), torch.Generator().manual_seed(1)
    model, duals, bound = settled(build_point_likelihood("categorical"), data, 3)
    for _ in range(5):
        moves = torch.randn(3, 6, 6, generator=draw).double(), torch.randn(3, 6, generator=draw).double()
        changes = []
        for sign in (1, -1):
            near = replace(duals, precision=duals.precision + sign * 0.01 * (moves[0] + moves[0].mT))
            near = replace(near, shift=near.shift + sign * 0.01 * moves[1])
            changes.append(float(expectations(model, *data, near.posterior()).fit) - float(near.divergence()) - bound)
        assert max(changes) < 1e-7
        assert abs(changes[0] - changes[1]) < 0.2 * abs(sum(changes))  # a top, and no slope


def flowers(rows=160):
    """Three species in a plane, one of which grows nowhere in the south; numbers name the same classes."""
    draw = np.random.default_rng(2)
    x = draw.normal(size=(rows, 2))
    species = np.where(x[:, 0] ** 2 + 0.3 * draw.normal(size=rows) > 1, "sage", np.where(x[:, 1] > 0, "rue", "thyme"))
    place = np.where((x[:, 1] > -0.6) & (species == "rue"), "north", draw.choice(["north", "south", "west"], rows))
    return pd.DataFrame({"x0": x[:, 0], "x1": x[:, 1], "place": place, "species": species})


QUICK = {"model.likelihood": "categorical", "model.num-inducing": 12, "sgpr.exchanges": 8}
QUICK |= {"baselines.max-evaluations": 5, "evaluate-every": 0}
ALONE = {"baselines.local-only": False, "baselines.pooled": False}


def test_the_temperature_is_the_most_probable_of_rows_left_out():
    """p^{1/T}, normalised; sharper than the functions say where their classes come more surely."""
    draw, likelihood = np.random.default_rng(0), build_point_likelihood("categorical")
    mean, spread = torch.from_numpy(draw.normal(size=(3, 400))), torch.full((3, 400), 0.5).double()
    plain = likelihood.probability(mean, spread, NONE)
    sharp = likelihood.probability(mean, spread, torch.tensor([np.log(0.5)]))
    torch.testing.assert_close(sharp, plain**2 / (plain**2).sum(-1, keepdim=True))
    targets = torch.multinomial(sharp, 1, generator=torch.Generator().manual_seed(0))[:, 0].double()
    spread[1, 7] = torch.nan  # a row of which nothing is known counts for none
    scores = tempered(likelihood, targets, mean, spread).numpy()
    drawn = torch.gather(sharp, 1, targets.long()[:, None]).log()[torch.arange(400) != 7].sum()
    assert scores[TEMPERATURES == 0.5] == pytest.approx(float(drawn))
    assert np.exp(best_temperature(scores)) == pytest.approx(0.5, rel=0.2)
    assert best_temperature(np.zeros(len(TEMPERATURES))) == pytest.approx(0.0)  # the prior alone
    assert best_temperature(-2 * np.log(TEMPERATURES)) == pytest.approx(-2 * 0.7**2, abs=0.05)


def test_classes_are_learned_from_sums(tmp_path, monkeypatch):
    monkeypatch.setattr(baselines, "CYCLES", 1)
    frame = flowers()
    options = QUICK | {"output-dir": str(tmp_path), "features": "x0,x1", "partitioner": "natural"}
    options |= {"partition.column": "place", "name": "text"}
    found = fg.run(frame, target="species", sites=3, options=options)
    metrics = found.metrics
    assert metrics.test["accuracy"] > 0.75
    assert metrics.test["nll"] < metrics.linear["nll"] - 0.1 < metrics.mean["nll"] - 0.1
    assert all(np.isfinite(arm["nll"]) for arm in (metrics.local_only, metrics.pooled, metrics.boosting))
    assert found.saved.arrays["likelihood.parameters"] in TEMPERATURES
    table = fg.load_run(found.path).posterior.predict(frame)
    assert list(table) == [f"probability of {name}" for name in ("rue", "sage", "thyme")]
    np.testing.assert_allclose(table.sum(axis=1), 1.0)
    assert "rue" in (found.path / "report.html").read_text()
    assert np.sum(metrics.method_details["confusion"]) == sum(row["num_examples"] for row in metrics.per_site)
    numbers = frame.assign(species=frame["species"].map({"rue": 0, "sage": 1, "thyme": 2}))
    same = fg.run(numbers, target="species", sites=3, options=options | {"name": "numbers"} | ALONE)
    assert same.metrics.test == metrics.test


def test_the_exported_model_predicts_the_same():
    """By draws of the functions: within five standard errors of a share."""
    draw = np.random.default_rng(3)
    x, y = torch.from_numpy(draw.normal(size=(60, 2))), torch.from_numpy(draw.integers(0, 3, 60).astype(float))
    model = LatentGP(ModelSection(likelihood="categorical"), x[:8]).begin({"a": 0.2, "b": 0.5, "c": 0.3}, 1.0)
    q = test_svgp.settled(model, (x, y), 1, 1.0).posterior()
    exported, likelihood = SavedLatentGP(model, q).export()[0]
    shares = model.predict(x, q)[0]
    assert exported(x).mean.shape == (3, 60)
    torch.testing.assert_close(exported(x).mean, model.latent(x, q)[0])
    with gpytorch.settings.num_likelihood_samples(2000), torch.no_grad():
        torch.manual_seed(0)
        drawn = likelihood(exported(x)).probs.mean(0)
    torch.testing.assert_close(drawn, shares, rtol=0, atol=5 * 0.5 / 2000**0.5)


def test_the_multinomial_regression_beside_it_is_that_of_all_rows(tmp_path):
    """Scikit-learn penalises ½ ‖w‖² / C, here it is Σ ‖w_c − w̄‖²; rows and columns are standardised as in the run."""
    frame = flowers().drop(columns="place")
    options = QUICK | ALONE | {"output-dir": str(tmp_path), "test-fraction": 0.0, "sgpr.exchanges": 5}
    held_out = frame.assign(split=np.where(np.arange(len(frame)) % 4 == 0, "test", "train"))
    path = tmp_path / "table.csv"
    held_out.to_csv(path, index=False)
    found = fg.run(str(path), target="species", sites=5, options=options | {"split": 0})
    train, test = (held_out[held_out["split"] == part] for part in ("train", "test"))
    middle, spread = (train[["x0", "x1"]].agg(way) for way in ("mean", lambda x: x.std(ddof=0)))
    inputs = [(part[["x0", "x1"]] - middle) / spread for part in (train, test)]
    theirs = LogisticRegression(C=0.5, tol=1e-8).fit(inputs[0], train["species"])
    shares = theirs.predict_proba(inputs[1])
    nll = -np.log(shares[np.arange(len(test)), np.searchsorted(theirs.classes_, test["species"])]).mean()
    assert found.metrics.linear["nll"] == pytest.approx(nll, rel=1e-4)
    predicted = found.posterior.predict(test)
    chosen = [predicted.loc[row, f"probability of {name}"] for row, name in test["species"].items()]
    assert found.metrics.test["nll"] == pytest.approx(-np.log(chosen).mean(), rel=1e-9)  # at the same temperature
    assert found.saved.arrays["likelihood.parameters"] != 1.0


def test_what_names_no_class_is_refused(tmp_path):
    frame = flowers(60)
    options = {"output-dir": str(tmp_path), "features": "x0,x1"}
    with pytest.raises(DataError, match=r"3 levels; .*set `model.likelihood` to 'categorical', for grades to"):
        fg.run(frame, target="species", options=options)
    with pytest.raises(DataError, match="'bernoulli' takes at most 2 classes: correct one that is misspelt, set"):
        fg.run(frame, target="species", options=options | {"model.likelihood": "bernoulli"})
    with pytest.raises(DataError, match="like an identifier"):
        fg.run(frame, target="x0", options=options | {"features": "x1", "model.likelihood": "categorical"})
