"""What a site of SFVI keeps, loses, refuses and makes good."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from faults import FaultyGrid, Recorder, blamed, csv_nodes, run, waves
from test_sfvi import memories, tiny

from fedgp_flower import server_app
from fedgp_flower.data.sites import load_site
from fedgp_flower.errors import RunError
from fedgp_flower.messages import encode
from fedgp_flower.methods.sfvi import panels
from fedgp_flower.methods.sfvi.client import SFVIClient
from fedgp_flower.methods.sfvi.learner import Learner, Slopes
from fedgp_flower.run.artefacts import read_run
from fedgp_flower.run.predict import Predictor
from fedgp_flower.run.registry import parse_config


def offset_sites(folder: Path) -> list[dict[str, str]]:
    """Three sites whose targets differ by constants that no input explains."""
    frames = {name: waves(40, seed) for seed, name in enumerate("abc")}
    for name, offset in (("a", 2.0), ("b", -2.0), ("c", 0.0)):
        frames[name]["y"] += offset
    return csv_nodes(folder, frames)


@pytest.mark.parametrize("method", ["sfvi", "sfvi-avg"])
def test_a_site_that_loses_its_state_in_the_last_round_gets_its_deviation_back(tmp_path: Path, method: str) -> None:
    """Its rate is that of a run from its beginning, however late it is; its offset is many steps away."""
    nodes = offset_sites(tmp_path)
    keys = {"sfvi__learning_rate": 0.1, "sfvi__local_steps": 4}
    flat = tiny(method=method, num_server_rounds=12, **keys)
    calm = run(FaultyGrid(flat, nodes))
    grid, recorder = FaultyGrid(flat, nodes), Recorder()
    recorder.at[11] = lambda: grid.restart("a")
    strategy = run(grid, recorder)
    assert strategy.details()["fresh_starts"] == 1

    def error(own: Any) -> float:
        return next(row["rmse"] for row in own.evaluation["per_site"] if row["site"] == "a")

    assert error(strategy) < error(calm) + 0.1


@pytest.mark.parametrize("method", ["sfvi", "sfvi-avg"])
def test_a_step_that_is_not_finite_is_one_failure_and_not_remembered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, method: str
) -> None:
    """The gradient of one site's own latents breaks in the second round: it goes on in the third."""
    original = SFVIClient.learner
    nodes = csv_nodes(tmp_path, {name: waves(30, seed) for seed, name in enumerate("abc")})

    def learner(self: SFVIClient, values: Any) -> Learner:
        found = original(self, values)
        if self.site.site == "b" and self.setting.round == 2:
            return Broken(found.model, found.site, found.seed, found.key, found.samples, found.importance)
        return found

    monkeypatch.setattr(SFVIClient, "learner", learner)
    grid = FaultyGrid(tiny(method=method, num_server_rounds=6, sfvi__local_steps=2), nodes)
    strategy = run(grid)
    assert [failure.round for failure in strategy.network.failures] == [2]
    assert "not finite" in blamed(strategy)["b"][0]
    assert memories(grid)["b"].round == 6
    for memory in memories(grid).values():
        assert all(np.isfinite(array).all() for array in encode(memory).values())


class Broken(Learner):
    """Its own latents are no numbers after a step; what it would send looks sound."""

    def gradient(self, *told: Any) -> tuple[float, Slopes]:
        """One entry is broken."""
        value, slopes = super().gradient(*told)
        return value, {n: v * (torch.nan if n.startswith("local.") else 1) for n, v in slopes.items()}

    def local_steps(self, *told: Any, **named: Any) -> Any:
        """One entry is broken."""
        end, value = super().local_steps(*told, **named)
        end[1].mean[...] = torch.nan
        return end, value


def test_new_rows_are_predicted_at_a_real_site_from_its_own_files(tmp_path: Path) -> None:
    nodes = [{**node, "state-dir": str(tmp_path / "state" / node["site"])} for node in offset_sites(tmp_path)]
    flat = tiny(num_server_rounds=6, sfvi__learning_rate=0.1, output_dir=str(tmp_path), name="run")
    folder = server_app.execute(FaultyGrid(flat, nodes), flat, lambda row, total: None)
    rows = pd.read_json(folder / "metrics.json", typ="series")["per_site"]
    site = load_site(parse_config(flat), nodes[0])
    own = Predictor.at_site(folder, "a", data=tmp_path / "a.csv", state_dir=tmp_path / "state" / "a")
    error = own.predict(site.test)["mean"].to_numpy() - site.test["y"].to_numpy()
    assert np.sqrt(np.mean(error**2)) == pytest.approx(next(row["rmse"] for row in rows if row["site"] == "a"))
    with pytest.raises(RunError, match="other rows"):
        Predictor.at_site(folder, "a", data=tmp_path / "a.csv", state_dir=tmp_path / "state" / "b")
    with pytest.raises(RunError, match="`--site-data`"):
        Predictor.at_site(folder, "a")


def test_deviations_along_one_input(tmp_path: Path) -> None:
    told = tiny(partitioner="blocks", output_dir=str(tmp_path), name="run", keep_predictions=True)
    folder = server_app.execute(FaultyGrid(told, 3), told, lambda row, total: None)
    finished = read_run(folder)
    shift = finished.predictions["mean"] - Predictor.of_run(folder)(finished.predictions[["input.x"]].to_numpy())[0]
    assert finished.predictions["deviation"].to_numpy() == pytest.approx(shift.to_numpy(), abs=1e-8)
    figure = panels.deviations(finished.predictions, ["input.x"], "y")
    lines = [line for line in figure.axes[0].lines if line.get_label().startswith("site")]
    assert max(np.abs(line.get_ydata()).max() for line in lines) > 1e-3
    assert lines[0].get_linestyle() == "-"
