"""What a unit of a finished FedMGP run predicts by the command line is what it predicted in the run."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from faults import FaultyGrid, configured, csv_nodes

from fedgp_flower import server_app
from fedgp_flower.cli import main
from fedgp_flower.errors import RunError
from fedgp_flower.run.in_process import run_in_process
from fedgp_flower.run.predict import Predictor

NOISE = 0.05
ROUGH = {"method": "fedmgp-exact", "model__num_inducing": 12, "num_server_rounds": 4}


def shape(x: np.ndarray) -> np.ndarray:
    """What units share."""
    return np.sin(3 * x) + 0.5 * np.cos(5 * x)


def signals() -> pd.DataFrame:
    """Four units along one input; the first is masked beyond 0.4."""
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
    (finished / "sites" / "1" / "site-state.safetensors").rename(finished / "sites" / "1" / "aside")
    try:
        with pytest.raises(RunError, match="missing or damaged"):
            Predictor.at_site(finished, "b")
    finally:
        (finished / "sites" / "1" / "aside").rename(finished / "sites" / "1" / "site-state.safetensors")


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
    assert new.site is not None
    assert len(new.site.train) == 8
    assert sorted((path, path.stat().st_mtime_ns) for path in finished.rglob("*")) == before
    with pytest.raises(RunError, match="took part"):
        Predictor.joined(finished, "b", tmp_path / "new.csv")


def test_a_real_unit_predicts_from_its_own_files_alone(tmp_path: Path) -> None:
    frames = {unit: part[["x", "y"]] for unit, part in signals().groupby("unit")}
    nodes = [{**node, "state-dir": str(tmp_path / node["site"])} for node in csv_nodes(tmp_path, frames)]
    flat = configured(**ROUGH, output_dir=str(tmp_path), name="run", test_fraction=0.2)
    folder = server_app.execute(FaultyGrid(flat, nodes), flat, lambda row, total: None)
    rows = pd.read_json(folder / "metrics.json", typ="series")["per_site"]
    unit = Predictor.at_site(folder, "b", data=tmp_path / "b.csv", state_dir=tmp_path / "b")
    assert unit.site is not None
    error = unit.predict(unit.site.test)["mean"].to_numpy() - unit.site.test["y"].to_numpy()
    assert np.sqrt(np.mean(error**2)) == pytest.approx(next(row["rmse"] for row in rows if row["site"] == "b"))
    assert not (folder / "sites").exists()
    with pytest.raises(RunError, match="name the unit with `--site`"):
        Predictor.of_all(folder)
    with pytest.raises(RunError, match="missing"):
        Predictor.at_site(folder, "b", data=tmp_path / "b.csv")
