"""Generalised linear mixed models: the Gaussian one is the closed form, one site is all rows, units stay apart."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from faults import configured
from scipy import stats

from fedgp_flower.errors import DataError
from fedgp_flower.methods.sfvi.mixed import MixedModel
from fedgp_flower.methods.sfvi.options import SFVIOptions
from fedgp_flower.run.api import load_run
from fedgp_flower.run.in_process import run_in_process

BETA, OMEGA, SIGMA = (0.4, -0.8, 0.5), (0.3, 0.9), -0.5
"""Intercept and slopes; log precisions ω of intercept and slope of units; ς."""


def table(units: int = 12, visits: int = 5, seed: int = 0, likelihood: str = "gaussian") -> pd.DataFrame:
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


def columns(frame: pd.DataFrame) -> list[torch.Tensor]:
    return [torch.from_numpy(frame[names].to_numpy().copy()) for names in (["a", "b", "a"], "y", "unit")]


def test_the_gaussian_model_is_the_closed_form_at_any_effects():
    """log p(y, b | Z_G) − log p(b | y, Z_G) is log N(y; Xβ, Z Ω⁻¹ Zᵀ + σ²I) whatever b is (Chib 1995)."""
    frame = table()
    model = MixedModel(2, 1, likelihood="gaussian", prior_scale=2.0)
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
    model = MixedModel(2, 1, likelihood=likelihood)
    site = model.prepare(*columns(frame))
    z_global = torch.tensor([*BETA, *OMEGA], dtype=torch.float64)
    effects = torch.randn(12, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    own = effects.numpy()[frame["unit"]] * np.exp(-np.array(OMEGA))
    f = BETA[0] + BETA[1] * frame["a"] + BETA[2] * frame["b"] + own[:, 0] + own[:, 1] * frame["a"]
    pmf = {
        "bernoulli": stats.bernoulli.logpmf(frame["y"], 1 / (1 + np.exp(-f))),
        "poisson": stats.poisson.logpmf(frame["y"], np.exp(f)),
    }
    expected = pd.Series(pmf[likelihood]).groupby(frame["unit"]).sum() + stats.norm.logpdf(effects.numpy()).sum(1)
    np.testing.assert_allclose(model.log_local(site, z_global, effects), expected, rtol=1e-10)


def keys(path: Path, **changes):
    own = {
        "method": "sfvi",
        "dataset": str(path),
        "features": "unit,a,b",
        "target": "y",
        "partitioner": "natural",
        "partition__column": "site",
        "min_sites": 1,
        "sfvi__model": "glmm",
        "sfvi__unit_column": "unit",
        "sfvi__random_slopes": "a",
        "sfvi__structure": "full",
    }
    return configured(**{**own, **changes})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    table().to_csv(tmp_path / "visits.csv", index=False)
    return tmp_path / "visits.csv"


def test_a_run_is_saved_and_predicts_units_it_knows_and_new_ones(path, tmp_path):
    folder = run_in_process(keys(path, name="run", output_dir=str(tmp_path), num_server_rounds=15), 3)
    read = load_run(folder)
    frame = table().head(4)
    new = read.posterior.predict(frame)
    known = read.posterior.predict(frame, site="north")
    assert len(new) == len(known) == 4
    assert (known["sd"].to_numpy()[frame["site"] == "north"] < new["sd"].to_numpy()[frame["site"] == "north"]).all()
    assert "Effects" in (folder / "report.html").read_text()


def test_a_slope_in_a_column_that_is_not_there_is_named():
    options = SFVIOptions.model_validate({"model": "glmm", "unit-column": "unit", "random-slopes": "a, c"})
    with pytest.raises(DataError, match=r"`sfvi.random-slopes`: 'c' .* there are unit, a, b"):
        options.columns(("unit", "a", "b"))
    assert SFVIOptions.model_validate({"model": "glmm", "unit-column": "unit", "random-slopes": "b"}).columns(
        ("unit", "a", "b")
    ) == [1, 2, 2]
