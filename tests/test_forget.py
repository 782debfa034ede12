"""Forgetting a site of a finished run: like is compared with like, the record is true, the report shows it."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from faults import FaultyGrid
from test_pvi import SITES, quick

from fedgp_flower import server_app
from fedgp_flower.errors import RunError
from fedgp_flower.methods.pvi import panels as pvi_figures
from fedgp_flower.run import figures, forget
from fedgp_flower.run.artefacts import read_run


def execute(folder: Path, sites: int = SITES, **changes: Any) -> Path:
    known = {"output_dir": str(folder), "name": "run", "num_server_rounds": sites, "keep_predictions": True}
    flat = quick(**{**known, "baselines__pooled": True, "evaluate_every": 1, **changes})
    return server_app.execute(FaultyGrid(flat, sites), flat, lambda row, total: None)


def forgotten(run: Path, site: str, rounds: int = 1) -> tuple[Path, dict[str, Any]]:
    folder = forget.forget(run, site, rounds=rounds, name=f"left-{site}")
    return folder, json.loads((folder / "forgotten.json").read_text())


def over_rows(run: Path, sites: list[str]) -> dict[str, float]:
    """NLL of a Gaussian is not that of a mixture: RMSE and coverage, row by row."""
    rows = pd.read_csv(run / "predictions.csv", dtype={"site": str})
    rows = rows[rows["site"].isin(sites)]
    error = (rows["target"] - rows["mean"]).abs()
    inside = error <= figures.Z95 * rows["sd"]
    return {"rows": len(rows), "rmse": float(np.sqrt((error**2).mean())), "coverage_95": float(inside.mean())}


def test_both_figures_are_over_the_rows_of_the_sites_that_remain(tmp_path: Path) -> None:
    run = execute(tmp_path)
    left, record = forgotten(run, "1")
    assert read_run(run).metrics.pooled is not None
    assert read_run(left).metrics.pooled is None  # it would learn from the forgotten rows
    for when, folder in (("before", run), ("after", left)):
        expected = over_rows(folder, ["0", "2"])
        found = record[f"test_{when}"]
        assert record["test_rows"] == expected["rows"]
        assert found["rmse"] == pytest.approx(expected["rmse"], rel=1e-6)
        assert {"nll", "crps", "mae"} <= found.keys()
    assert record["test_before"]["rmse"] != pytest.approx(read_run(run).metrics.test["rmse"])
    assert (record["sites_before"], record["sites_after"]) == (3, 2)
    rows = {row["site"]: row["training_rows"] for row in read_run(run).metrics.per_site}
    assert record["training_rows_removed"] == rows["1"]
    assert record["predictions"]["rms_shift_in_sd"] > 0
    assert all(value > 0 for value in record["divergence"].values())
    assert record["divergence"].keys() == {"inducing", "hyper"}
    page = (left / "report.html").read_text()
    assert f"the same {record['test_rows']:,} held-out rows" in page
    for when in ("before", "after"):
        assert f"{record[f'test_{when}']['nll']:#.4g}".replace("-", "−") in page


def test_a_conjugate_run_depends_on_the_site_no_more(tmp_path: Path) -> None:
    run = execute(tmp_path, pvi__local_update="sums", pvi__steps=0, pvi__exchanges=4, num_server_rounds=5)
    left, record = forgotten(run, "2", rounds=0)
    moments = []
    for folder in (left, run):
        arrays = read_run(folder).saved.arrays  # type: ignore[union-attr]
        moments.append((arrays["inducing.mean"], arrays["inducing.covariance"]))
    (m1, s1), (m0, s0) = moments
    log_determinants = np.linalg.slogdet(s0)[1] - np.linalg.slogdet(s1)[1]
    away = (m1 - m0) @ np.linalg.solve(s0, m1 - m0)
    kl = 0.5 * (np.trace(np.linalg.solve(s0, s1)) + away - len(m0) + log_determinants)
    assert record["divergence"] == {"whitened": pytest.approx(kl, rel=1e-6)}
    assert len(record["remains"]) == 2  # the standardisation, and the agreed Z and β


def test_the_report_shows_factors_and_free_energy_and_too_few_sites_are_refused(tmp_path: Path) -> None:
    run = execute(tmp_path, sites=2, num_server_rounds=3)
    with pytest.raises(RunError, match="min-sites"):
        forget.forget(run, "1", rounds=0, name="left")
    assert not (tmp_path / "left").exists()
    content = read_run(run)
    panels = {panel.title: panel for panel in pvi_figures.panels(content)}
    details = content.metrics.method_details
    assert "Posterior of the hyperparameters" in panels
    strengths = re.sub(r"<[^>]+>", " ", str(panels["What each factor says"].body))
    for site, own in details["factors"].items():
        row = f"{site} {details['visits'][site]} {own['rows']:.0f} {own['points']:.0f} {own['weight']:#.4g}"
        assert row in re.sub(r"\s+", " ", strengths)
    assert "in rows of noise" in panels["What each factor says"].caption
    parts = details["free_energy"]
    energy = re.sub(r"[\s]+", " ", re.sub(r"<[^>]+>", " ", str(panels["Free energy"].body)))
    assert f"free energy {parts['total']:#.4g}".replace("-", "−") in energy
    assert f"q(β) from its prior {-parts['kl_hyper']:#.4g}".replace("-", "−", 1) in energy


def test_a_round_without_a_visit_stays_where_the_last_one_was() -> None:
    history = pd.DataFrame({"round": [1, 2, 3, 4], "visits": [np.nan, 2, np.nan, 4], "test_nll": [4.0, 3.0, 2.5, 2.0]})
    figure = figures.convergence(history, [], "m")
    assert figure is not None
    np.testing.assert_allclose(figure.axes[0].lines[0].get_xdata(), [0, 2, 2, 4])
