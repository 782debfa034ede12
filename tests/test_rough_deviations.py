"""One shared curve and deviations: bound, derivatives and predictions are those of the dense Gaussian written out."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from faults import configured
from scipy.special import logsumexp
from scipy.stats import multivariate_normal
from test_hierarchical_gp import bound
from test_hierarchical_gp import total as together

from fedgp_flower.errors import RunError
from fedgp_flower.methods.family import initial_global
from fedgp_flower.methods.hierarchical_gp.messages import Calibration
from fedgp_flower.methods.hierarchical_gp.newton import posterior
from fedgp_flower.methods.hierarchical_gp.rough import (
    CUTS,
    EDGES,
    ROUGHNESS,
    RoughDeviation,
    calibration,
    factors,
    first_theta,
    widened,
)
from fedgp_flower.run.artefacts import read_run
from fedgp_flower.run.in_process import run_in_process
from fedgp_flower.run.predict import Predictor

INDUCING = torch.linspace(0, 1, 6, dtype=torch.float64)
SURE = 500.0
"""A logit that leaves no other choice."""


def theta(*, sure=3):
    """Hyperparameters of no particular kind; ``sure``: the one roughness."""
    draw = torch.Generator().manual_seed(1)
    own = {n: v + 0.3 * torch.randn(v.shape, generator=draw, dtype=torch.float64) for n, v in first_theta().items()}
    own["noise"] = torch.tensor([math.log(0.1)], dtype=torch.float64)
    if sure is not None:
        own["roughness"] = torch.zeros(len(ROUGHNESS), dtype=torch.float64)
        own["roughness"][sure] = SURE
    return own


def units():
    draw, found = np.random.default_rng(4), []
    for rows, gain in ((7, 1.0), (5, 1.3), (6, 0.8)):
        x = np.sort(draw.uniform(0.02, 0.98, rows))
        y = gain * np.sin(4 * x) + 0.1 * draw.standard_normal(rows)
        found.append(RoughDeviation(torch.from_numpy(x), torch.from_numpy(y), INDUCING, {}))
    return found


def settled(every, own, sweeps=60):
    """The fixed point of q(u) and the weights of roughness at a θ."""
    q = initial_global(len(INDUCING), scale=1.0, triangular=True)
    for _ in range(sweeps):
        total = together([replace(unit, theta=own).roughness_sums().sums(q) for unit in every])
        q = posterior(total.precision, total.shift)[0]
    return total, q


def matern(a, b, lengthscale):
    r = np.sqrt(3) * np.abs(a[:, None] - b) / lengthscale
    return (1 + r) * np.exp(-r)


def dense(every, own, chosen, more=None):
    """Covariance of all rows, and of more rows of the first unit, without one line of the code under test."""
    h = {name: np.exp(float(value[0])) for name, value in own.items() if name != "roughness"}
    xs = [unit.x.numpy() for unit in every] + ([] if more is None else [more])
    owner = np.repeat([*range(len(every)), 0][: len(xs)], [len(x) for x in xs])
    x, z = np.concatenate(xs), INDUCING.numpy()
    across = h["amplitude"] * matern(x, z, h["lengthscale"])
    trend = across @ np.linalg.solve(matern(z, z, h["lengthscale"]) + 1e-8 * np.eye(len(z)), across.T)
    rough = np.array([ROUGHNESS[k] for k in chosen])[owner] ** 2
    smooth = h["spread"] ** 2 * matern(x, x, h["spread_lengthscale"])
    deviation = smooth + h["level"] ** 2 + h["slope"] ** 2 * np.outer(x, x) + rough * np.minimum(x[:, None], x)
    return trend + deviation * (owner[:, None] == owner) + h["noise"] ** 2 * np.eye(len(x))


def test_with_one_roughness_the_bound_is_the_dense_evidence():
    every, own = units(), theta()
    total, _ = settled(every, own, sweeps=2)
    y = np.concatenate([unit.y.numpy() for unit in every])
    evidence = multivariate_normal(cov=dense(every, own, (3, 3, 3))).logpdf(y)
    assert float(bound(total)) == pytest.approx(evidence, abs=1e-8)


def test_with_several_the_bound_is_below_the_evidence_and_near_it():
    """The evidence sums over all choices of all units; q(u) ∏ q(h_m) leaves out how they depend on one another."""
    every, own = units(), theta(sure=None)
    total, _ = settled(every, own)
    y, log_prior = np.concatenate([unit.y.numpy() for unit in every]), own["roughness"].log_softmax(0).numpy()
    choices = itertools.product(range(len(ROUGHNESS)), repeat=len(every))
    terms = [multivariate_normal(cov=dense(every, own, k)).logpdf(y) + log_prior[list(k)].sum() for k in choices]
    evidence = logsumexp(terms)
    assert evidence - 0.1 < float(bound(total)) < evidence


def test_derivatives_for_one_factorisation_are_those_through_the_factor():
    unit, own, q = units()[0], theta(sure=None), initial_global(len(INDUCING), scale=1.0, triangular=True)
    names = sorted(own)
    at = torch.cat([own[name] for name in names])

    def by_roughness(flat):
        parts = flat.split([len(own[name]) for name in names])
        return replace(unit, theta=dict(zip(names, parts, strict=True))).roughness_sums()

    found = replace(unit, theta=own).derivatives(q)
    slopes = torch.autograd.functional.jacobian(lambda flat: by_roughness(flat).sums(q).flat(), at)
    curvature = torch.autograd.functional.hessian(lambda flat: by_roughness(flat).evidence(q).logsumexp(0), at)
    sums = by_roughness(at).sums(q)
    for name in ("precision", "shift", "constant"):
        np.testing.assert_allclose(getattr(found, name), getattr(sums, name), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found.slopes, slopes.mT, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(found.curvature, curvature, rtol=1e-9, atol=1e-9)


def test_derivatives_are_finite_where_a_roughness_is_out_of_the_question():
    start = initial_global(len(INDUCING), scale=1.0, triangular=True)
    sure = replace(units()[0], theta=theta()).derivatives(start)
    impossible = {**theta(), "roughness": torch.tensor([0.0, 0, 0, 0, -2000], dtype=torch.float64)}
    found = replace(units()[0], theta=impossible).derivatives(start)
    assert all(np.isfinite(own.slopes).all() for own in (sure, found))


def test_prediction_is_the_conditional_of_the_joint():
    every, own, new = units(), theta(), np.array([0.3, 0.7, 0.99])
    mean, variance = replace(every[0], theta=own).predict(torch.from_numpy(new), settled(every, own, sweeps=2)[1])
    joint, y = dense(every, own, (3, 3, 3), new), np.concatenate([unit.y.numpy() for unit in every])
    gain = np.linalg.solve(joint[: len(y), : len(y)], joint[: len(y), len(y) :]).T
    np.testing.assert_allclose(mean, gain @ y, rtol=1e-7)
    expected = np.diag(joint)[len(y) :] - np.sum(gain * joint[len(y) :, : len(y)], axis=1)
    np.testing.assert_allclose(variance, expected, rtol=1e-7)


def test_a_unit_is_judged_by_its_first_rows_and_the_others_alone():
    """At each cut the histogram is that of the dense conditional on the other units and the rows before the cut."""
    every, own = units(), theta()
    total, q = settled(every, own, sweeps=2)
    found = calibration(replace(every[0], theta=own), q, total.precision, total.shift)
    y, x = np.concatenate([unit.y.numpy() for unit in every]), every[0].x.numpy()
    joint = dense(every, own, (3, 3, 3))
    for c, cut in enumerate(CUTS):
        hidden = np.flatnonzero(x > cut)
        if len(hidden) == 0 or len(x) - len(hidden) < 3:
            assert not found.shares[c].any()
            continue
        seen = np.setdiff1d(np.arange(len(y)), hidden)
        gain = np.linalg.solve(joint[np.ix_(seen, seen)], joint[np.ix_(seen, hidden)]).T
        sd = np.sqrt(np.diag(joint)[hidden] - np.sum(gain * joint[np.ix_(hidden, seen)], axis=1))
        z = np.abs(y[hidden] - gain @ y[seen]) / sd
        expected = np.histogram(z, [-1.0, *EDGES, np.inf])[0] / len(hidden)
        np.testing.assert_allclose(found.shares[c], expected, atol=1e-12)


def test_bands_are_widened_by_the_quantile_of_units():
    """Ten thousand units of which .95 are within 3 sd: three over 1.96. Few units: Student's t, and nobody: 1."""
    shares = np.zeros((len(CUTS), len(EDGES) + 1))
    shares[0, np.searchsorted(EDGES, [1.0, 3.0, 9.0])] = 5000, 4600, 400
    shares[1, 0] = 4.0
    by = factors(Calibration(shares, np.ones(len(CUTS))))
    assert by[0] == pytest.approx(3 / 1.96, rel=0.03)
    assert by[1] == pytest.approx(2.776 / 1.96, rel=1e-3)
    assert (by[2:] == 1).all()
    x = np.array([0.1, 0.19, 0.21, 0.9])
    np.testing.assert_allclose(widened(np.ones(4), x, 0.2, by) ** 0.5, [1, 1, by[1], by[1]])


def series(seed=0):
    """Six units, one curve, a random walk and a level of their own; the first is masked beyond the middle."""
    draw, t = np.random.default_rng(seed), np.linspace(0, 10, 25)[1:]
    frames = []
    for unit in "abcdef":
        own = 0.1 * draw.standard_normal() + np.cumsum(0.04 * draw.standard_normal(len(t)))
        y = 1 + np.sin(0.4 * t) + own + 0.02 * draw.standard_normal(len(t))
        split = np.where((unit == "a") & (t > 5), "test", "train")
        frames.append(pd.DataFrame({"t": t, "unit": unit, "y": y, "split": split}))
    return pd.concat(frames)


ROUGH = {"method": "hierarchical-gp", "hierarchical__deviation": "rough", "round_timeout": 60.0}
ROUGH |= {"model__num_inducing": 6, "num_server_rounds": 5}


def finished(folder, frame, name):
    frame.to_csv(folder / f"{name}.csv", index=False)
    own = {"dataset": str(folder / f"{name}.csv"), "split": 0, "partitioner": "natural", "partition__column": "unit"}
    kept = {"keep_predictions": True, "output_dir": str(folder), "name": name}
    return run_in_process(configured(**ROUGH, **own, **kept, target="y"))


def test_a_run_covers_what_it_hid_and_a_new_unit_joins(tmp_path):
    frame = series()
    folder = finished(tmp_path, frame, "run")
    told = pd.read_csv(folder / "predictions.csv")
    assert (np.abs(told["mean"] - told["target"]) < 1.96 * told["sd"]).mean() > 0.8
    assert np.sqrt(np.mean((told["mean"] - told["target"]) ** 2)) < 0.3
    details = pd.read_json(folder / "metrics.json", typ="series")["method_details"]
    assert max(details["widened"].values()) > 1
    again = Predictor.at_site(folder, "a").predict(told.rename(columns={"input.t": "t"}))
    np.testing.assert_allclose(again["sd"], told["sd"], rtol=1e-9)
    (new := frame[frame["unit"] == "c"].iloc[:9][["t", "y"]]).to_csv(tmp_path / "new.csv", index=False)
    joined = Predictor.joined(folder, "new", tmp_path / "new.csv").predict(frame[frame["unit"] == "c"])
    assert len(new) == 9
    assert np.abs(joined["mean"].to_numpy() - frame.loc[frame["unit"] == "c", "y"].to_numpy()).max() < 0.6


def test_what_rough_deviations_cannot_do_is_refused(tmp_path):
    with pytest.raises(RunError, match="needs one input, but there are 2"):
        finished(tmp_path, series().assign(more=lambda own: own["y"] + np.arange(len(own)) % 7), "wide")


ROWS = (1, 2, 3, 5, 30, 30, 15, 40)


def table(folder):
    draw, x = np.random.default_rng(0), np.linspace(0, 1, 40)
    frames = []
    for number, rows in enumerate(ROWS):
        y = (1 + 0.1 * number) * np.sin(4 * x) + 0.05 * draw.standard_normal(len(x))
        split = np.where(np.arange(len(x)) < rows, "train", "test")
        frames.append(pd.DataFrame({"t": x, "unit": f"u{number}", "y": y, "split": split}))
    pd.concat(frames).to_csv(folder / "units.csv", index=False)
    return str(folder / "units.csv")


@pytest.mark.parametrize(
    "keys",
    [
        {"method": "hierarchical-gp", "hierarchical__deviation": "rough"},
        {"method": "fedmgp-exact"},
        {"method": "fedmgp", "num_server_rounds": 4},
    ],
    ids=lambda keys: str(keys["method"]),
)
def test_units_of_any_size_take_part(keys, tmp_path):
    """Noise that a unit fits to one row is none: its held-out rows then had a negative log density of 80 000."""
    natural = {"dataset": table(tmp_path), "target": "y", "partitioner": "natural", "partition__column": "unit"}
    common = {"split": 0, "model__num_inducing": 8, "num_server_rounds": 8, "output_dir": str(tmp_path), "name": "run"}
    found = read_run(run_in_process(configured(**{**natural, **common, **keys}), 0)).metrics
    assert len(found.per_site) == sum(rows < 40 for rows in ROWS)
    assert found.data["sites"] == len(ROWS)
    assert max(site["nll"] for site in found.per_site) < 4.0
