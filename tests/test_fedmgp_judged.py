"""Two covariances side by side: each goes as it would alone, and the one that explains the rows better predicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from faults import configured

from fedgp_flower.errors import NumericsError
from fedgp_flower.run.artefacts import RunData, read_run
from fedgp_flower.run.in_process import run_in_process
from fedgp_flower.run.predict import Predictor
from strategies import fedmgp_deviations

KINDS = {"convolved": False, "deviations": True}
"""Whether units walk away from what they share."""


def series(*, walking: bool) -> pd.DataFrame:
    """Five units: one curve times a gain, or one curve plus a random walk; the first is masked beyond the middle."""
    draw, t, frames = np.random.default_rng(3), np.linspace(0, 10, 25)[1:], []
    for unit, gain in zip("abcde", (0.6, -1.0, 1.4, 2.0, -0.5), strict=True):
        curve = np.sin(0.9 * t) + 0.5 * np.cos(1.6 * t)
        walk = 1 + 0.1 * draw.standard_normal() + np.cumsum(0.06 * draw.standard_normal(len(t)))
        y = (np.sin(0.4 * t) + walk if walking else gain * curve) + 0.05 * draw.standard_normal(len(t))
        split = np.where((unit == "a") & (t > 6), "test", "train")
        frames.append(pd.DataFrame({"t": t, "unit": unit, "y": y, "split": split}))
    return pd.concat(frames)


def finished(folder: Path, covariance: str, *, walking: bool, **changes: Any) -> RunData:
    """A run of six rounds."""
    table = folder / f"{walking}.csv"
    series(walking=walking).to_csv(table, index=False)
    own = {"dataset": str(table), "split": 0, "partitioner": "natural", "partition__column": "unit", "target": "y"}
    rough = {"method": "fedmgp", "model__num_inducing": 8, "num_server_rounds": 6, "keep_predictions": True}
    name = "-".join([covariance, str(walking), *changes])
    keys = configured(**rough, **own, **changes, fedmgp__covariance=covariance, output_dir=str(folder), name=name)
    return read_run(run_in_process(keys))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("judged")


@pytest.fixture(scope="module")
def judged(folder: Path) -> dict[str, RunData]:
    """A run of each kind of units, by default."""
    return {kind: finished(folder, "auto", walking=walking) for kind, walking in KINDS.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_better_one_predicts_as_if_it_had_run_alone(folder: Path, judged: dict[str, RunData], kind: str) -> None:
    own = judged[kind]
    alone = finished(folder, kind, walking=KINDS[kind])
    bounds = own.metrics.method_details["bounds_of_covariances"]
    assert max(bounds, key=bounds.get) == own.metrics.method_details["covariance"] == kind
    assert bounds[kind] == pytest.approx(alone.metrics.method_details["bound"], rel=1e-9)
    for name in ("nll", "rmse"):
        assert own.metrics.test[name] == pytest.approx(alone.metrics.test[name], rel=1e-8)
    assert own.predictions is not None
    rows = own.predictions.rename(columns={"input.t": "t"})[["t"]]
    again = Predictor.at_site(own.path, "a").predict(rows)
    np.testing.assert_allclose(again["sd"], own.predictions["sd"], rtol=1e-8)
    assert json.loads((own.path / "posterior.json").read_text())["model"]["family"] == (
        "deviations" if KINDS[kind] else "shared-latents"
    )


def test_under_masks_the_choice_is_the_same(folder: Path, judged: dict[str, RunData]) -> None:
    masked = finished(folder, "auto", walking=True, privacy__secure_aggregation=True)
    found, told = (own.metrics.method_details for own in (masked, judged["deviations"]))
    assert found["covariance"] == told["covariance"] == "deviations"
    assert found["bound"] == pytest.approx(told["bound"], rel=1e-4)


def test_deviations_that_come_to_nothing_do_not_end_a_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def improper(*_: Any, **__: Any) -> Any:
        raise NumericsError("no Cholesky factor")
        yield

    monkeypatch.setattr(fedmgp_deviations, "one_round", improper)
    details = finished(folder, "auto", walking=True, seed=1).metrics.method_details
    assert details["covariance"] == "convolved"
    assert details["bounds_of_covariances"] == {}
