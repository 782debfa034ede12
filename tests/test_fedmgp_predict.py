"""Units of a finished FedMGP run predict by the command line; new ones join, against brute force."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from faults import configured
from scipy.stats import multivariate_normal

from fedgp_flower.cli import main
from fedgp_flower.errors import RunError
from fedgp_flower.methods.fedmgp.joining import AMPLITUDES, DECAY, SPREAD, WIDEST, predict_joining
from fedgp_flower.methods.fedmgp.latents import LatentFunctions, LatentPosterior
from fedgp_flower.methods.fedmgp.unit import UnitParameters, feature, predict, squared_gaps
from fedgp_flower.run.in_process import run_in_process
from fedgp_flower.run.predict import Predictor

NOISE = 0.05
ROUGH = {"method": "fedmgp-exact", "model__num_inducing": 12, "num_server_rounds": 4}


def shape(x: np.ndarray) -> np.ndarray:
    return np.sin(3 * x) + 0.5 * np.cos(5 * x)


def signals() -> pd.DataFrame:
    draw, x = np.random.default_rng(2), np.linspace(-1.7, 1.7, 40)
    frames = []
    for unit, gain in zip("abcd", (0.6, -1.0, 1.4, 2.0), strict=True):
        y = gain * shape(x) + NOISE * draw.standard_normal(len(x))
        split = np.where((unit == "a") & (x > 0.4), "test", "train")
        frames.append(pd.DataFrame({"x": x, "unit": unit, "y": y, "split": split}))
    return pd.concat(frames)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a masked range: the rows that the column ``split`` calls ``test``."""
    folder = tmp_path_factory.mktemp("finished")
    signals().to_csv(folder / "signals.csv", index=False)
    table = {"dataset": str(folder / "signals.csv"), "split": 0, "partitioner": "natural", "partition__column": "unit"}
    kept = {"keep_predictions": True, "output_dir": str(folder), "name": "run"}
    return run_in_process(configured(**ROUGH, **table, **kept))


def test_a_simulated_unit_predicts_new_rows_as_it_did_its_masked_ones(finished: Path) -> None:
    told = pd.read_csv(finished / "predictions.csv")
    assert len(told) == int((signals()["split"] == "test").sum())
    frame = told.rename(columns={"input.x": "x"})[["x"]]
    table = Predictor.at_site(finished, "a").predict(frame)
    for name in ("mean", "sd"):
        np.testing.assert_allclose(table[name], told[name], rtol=1e-9)
    assert np.abs(table["mean"] - 0.6 * shape(frame["x"])).max() < 0.25
    kept = finished / "sites" / "1" / "site-state.safetensors"
    content = kept.read_bytes()
    kept.unlink()
    with pytest.raises(RunError, match="is missing, damaged"):
        Predictor.at_site(finished, "b")
    kept.write_bytes(content)


def test_all_simulated_units_are_written_and_drawn_without_a_name(finished: Path, tmp_path: Path) -> None:
    pd.DataFrame({"x": np.linspace(-1.7, 1.7, 9)}).to_csv(tmp_path / "grid.csv", index=False)
    words = ["--input", str(tmp_path / "grid.csv"), "--output", str(tmp_path / "curves.csv")]
    with pytest.raises(SystemExit) as end:
        main(["predict", str(finished), *words, "--picture", str(tmp_path / "curves.png")])
    assert not end.value.code
    curves = pd.read_csv(tmp_path / "curves.csv")
    assert curves["site"].tolist() == [unit for unit in "abcd" for _ in range(9)]
    assert (curves["q2.5"] < curves["mean"]).all()
    assert (curves["mean"] < curves["q97.5"]).all()
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(SystemExit):
        main(["predict", str(finished), "--site", "c", *words])
    alone = pd.read_csv(tmp_path / "curves.csv")
    np.testing.assert_allclose(alone["mean"], curves.loc[curves["site"] == "c", "mean"])


def test_a_new_unit_joins_from_eight_rows(finished: Path, tmp_path: Path) -> None:
    """It sees the half where g is; the rest comes from the others; the run's folder does not change."""
    x = np.linspace(-1.7, 0.0, 8)
    noisy = -3 * shape(x) + NOISE * np.random.default_rng(5).standard_normal(8)
    pd.DataFrame({"x": x, "y": noisy}).to_csv(tmp_path / "new.csv", index=False)
    before = sorted((path, path.stat().st_mtime_ns) for path in finished.rglob("*"))
    new = Predictor.joined(finished, "new", tmp_path / "new.csv")
    ahead = pd.DataFrame({"x": np.linspace(0.2, 1.6, 20)})
    table = new.predict(ahead)
    assert np.sqrt(np.mean((table["mean"] + 3 * shape(ahead["x"].to_numpy())) ** 2)) < 0.6  # of a signal of sd 2.4
    assert len(new.site.train) == 8
    assert sorted((path, path.stat().st_mtime_ns) for path in finished.rglob("*")) == before
    with pytest.raises(RunError, match="took part"):
        Predictor.joined(finished, "b", tmp_path / "new.csv")


AT = np.array([[-0.9], [0.05], [0.6]])


@pytest.fixture(scope="module")
def shared() -> tuple[LatentFunctions, LatentPosterior]:
    """One latent function, its values known where units saw it, and less at the right."""
    inducing = np.linspace(-1, 1, 8)[:, None]
    draw = np.random.default_rng(1).standard_normal(8)
    sd = np.where(inducing[:, 0] > 0.3, 0.5, 0.1)
    return LatentFunctions(inducing, np.array([[0.09]]), np.array([1.3]), 1e-8), LatentPosterior(draw, np.diag(sd**2))


def rows(count: int, shared: tuple[LatentFunctions, LatentPosterior]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of a unit with s = .8, R = .05 and σ = .1."""
    rng = np.random.default_rng(count)
    x = rng.uniform(-1, 1, (count, 1))
    f, _ = predict(x, *shared, UnitParameters(np.array([[0.05]]), np.array([0.8]), 0.01))
    return x, f + 0.1 * rng.standard_normal(count)


def by_hand(x, y, shared):
    """Mean and variance of f, and the mean of σ², by sums over an even grid of ρ, log σ and s."""
    latents, q = shared
    [factor], [a], scale, n = latents.whitening(), latents.amplitudes, latents.scales[0], len(y)
    power = max(np.mean(y**2), (y @ y + 1) / (n + 1))
    logs, means, seconds, noises = [], [], [], []
    for rho in WIDEST * (np.arange(25) + 0.5) / 25:
        both = np.concatenate([x, AT])
        A = feature(squared_gaps(both, latents.inducing), scale, float(a), factor, scale * (math.exp(rho) - 1) / 2)
        B = A @ q.covariance @ A.T + np.diag(a**2 - (A**2).sum(1))
        for log_sd in 0.5 * math.log(0.09 * power) + np.linspace(-4.5, 4.5, 15):
            for s in np.linspace(-3, 3, 41):
                C = s**2 * B + math.exp(2 * log_sd) * np.diag([1.0] * n + [0.0] * len(AT))
                prior = -0.5 * s**2 * a**2 / (AMPLITUDES * power) - DECAY * rho
                prior -= 0.5 * ((log_sd - 0.5 * math.log(0.09 * power)) / SPREAD) ** 2
                m = s * (A @ q.mean)
                logs.append(multivariate_normal.logpdf(y, m[:n], C[:n, :n]) + prior)
                gain = np.linalg.solve(C[:n, :n], C[:n, n:]).T
                means.append(m[n:] + gain @ (y - m[:n]))
                seconds.append(np.diag(C[n:, n:] - gain @ C[:n, n:]) + means[-1] ** 2)
                noises.append(math.exp(2 * log_sd))
    w = np.exp(np.array(logs) - max(logs))
    mean, second = (w @ np.array(each) / w.sum() for each in (means, seconds))
    return mean, second - mean**2, float(w @ np.array(noises) / w.sum())


def test_it_is_the_posterior_mixture_over_all_parameters(shared) -> None:
    """Three rows: both sums are within a few per cent of the integral, which spans orders of magnitude of σ."""
    x, y = rows(3, shared)
    mean, variance, noise = predict_joining((x, y), AT, *shared)
    expected = by_hand(x, y, shared)
    np.testing.assert_allclose(mean, expected[0], atol=0.04 * np.sqrt(expected[1]).max())
    np.testing.assert_allclose(variance, expected[1], rtol=0.08)
    assert noise == pytest.approx(expected[2], rel=0.1)


def test_with_many_rows_it_is_what_the_true_parameters_predict_and_the_rows_are_used(shared) -> None:
    x, y = rows(150, shared)
    truth = UnitParameters(np.array([[0.05]]), np.array([0.8]), 0.01)
    mean, variance, noise = predict_joining((x, y), AT, *shared)
    told, known = predict(AT, *shared, truth)
    assert noise == pytest.approx(0.01, rel=0.4)
    assert np.all(np.abs(mean - told) < 3 * np.sqrt(variance + known))
    assert np.all(variance < known)  # 150 rows say more of f than q(u) alone
