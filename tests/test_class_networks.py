"""Networks for classes as a federation runs them: scored, reported, saved, and predicting at a site."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from faults import configured

from fedgp_flower.errors import RunError
from fedgp_flower.run.api import load_run
from fedgp_flower.run.in_process import run_in_process
from fedgp_flower.run.predict import Predictor
from fedgp_flower.run.registry import METHODS

SFVI = {"sfvi__hidden": 8, "sfvi__initial_scale": 0.1, "sfvi__samples": 2}
RUNS: dict[str, dict[str, Any]] = {
    "sfvi": SFVI | {"sfvi__model": "fedpop", "num_server_rounds": 40},
    "sfvi-avg": SFVI | {"sfvi__model": "hierarchical-bnn", "sfvi__local_steps": 5, "num_server_rounds": 8},
    "pvi-bnn": {"bnn__hidden": 6, "pvi__steps": 60, "pvi__learning_rate": 0.03, "num_server_rounds": 3},
    "deep-kernel": {"model__likelihood": "categorical", "deep__learning_rate": 0.02, "num_server_rounds": 8},
}
SHOWN = {"pvi-bnn": "Pruned weights", "deep-kernel": "Personal heads"}
"""What only this method's report has."""


def one_class_each(rows: int = 60) -> pd.DataFrame:
    """Three sites, each with one class for 80 % of its rows."""
    rng = np.random.default_rng(0)
    site = np.repeat(np.arange(3), rows)
    label = np.where(np.arange(3 * rows) % 5 == 0, (site + 1 + np.arange(3 * rows) // 5 % 2) % 3, site)
    x = np.array([[1.5, 0.0], [-1.0, 1.2], [-1.0, -1.2]])[label] + 0.4 * rng.standard_normal((len(site), 2))
    return pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "label": [f"kind {name}" for name in label], "silo": site})


@pytest.mark.parametrize("method", RUNS)
def test_a_run_is_scored_saved_and_predicts(tmp_path: Path, method: str) -> None:
    table = one_class_each()
    table.to_csv(tmp_path / "classes.csv", index=False)
    keys = {"method": method, "target": "label", "features": "a,b", "dataset": str(tmp_path / "classes.csv")}
    keys |= {"partitioner": "natural", "partition__column": "silo", "name": "run", "output_dir": str(tmp_path)}
    folder = run_in_process(configured(**keys, **RUNS[method]), 3)
    read, page = load_run(folder), (folder / "report.html").read_text()
    assert read.metrics.test["accuracy"] > 0.85
    confusion = np.array(read.metrics.method_details["confusion"])
    assert confusion.sum() == 36
    assert np.trace(confusion) == pytest.approx(36 * read.metrics.test["accuracy"])
    assert "that of the most probable class" in page
    assert SHOWN.get(method, "") in page
    assert {"calibration.png", "confusion-of-classes.png"} <= {path.name for path in (folder / "plots").iterdir()}
    personal = RUNS[method].get("sfvi__model")  # of the heads of new sites nothing is known
    if personal:
        assert read.posterior is None
        with pytest.raises(RunError, match="keeps its own last layer"):
            Predictor.of_run(folder)
        assert len(Predictor.of_all(folder)) == 3
    site = table[table["silo"] == 1]
    predictors = [] if personal else [read.posterior]
    predictors += [Predictor.at_site(folder, "1")] if METHODS[method].at_site else []
    for predictor in predictors:
        chance = predictor.predict(site)
        assert list(chance) == [f"probability of kind {number}" for number in range(3)]
        np.testing.assert_allclose(chance.sum(axis=1), 1.0)
        assert (chance.to_numpy().argmax(axis=1) == site["label"].str[-1].astype(int)).mean() > 0.85
