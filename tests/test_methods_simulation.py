"""Methods through SuperLink and Ray: what sites are told and answer survives the wire, and nothing depends on Ray."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from launching import SMALL, Launch, scratch_left_empty

from fedgp_flower.run.artefacts import read_posterior
from fedgp_flower.run.in_process import run_in_process
from fedgp_flower.run.user_config import complete_config, parse_assignments

pytestmark = [
    pytest.mark.simulation,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for left-over processes in /proc"),
]
OWN = {
    "pvi": [
        "num-server-rounds=4",
        "pvi.local-update=adam",
        "pvi.steps=10",
    ],
    "fedmgp": ["num-server-rounds=4"],
    "sfvi": ["num-server-rounds=4", "sfvi.site-inducing=8"],
}
"""What makes a run of a method short."""


@pytest.fixture
def scratch_is_empty_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with scratch_left_empty(monkeypatch) as scratch:
        yield scratch


@pytest.mark.long
@pytest.mark.parametrize("method", OWN)
def test_ray_and_one_process_give_the_same_posterior(method: str, tmp_path: Path, scratch_is_empty_again: Path) -> None:
    keys = [*SMALL[1:], f"method={method}", "dataset=diabetes", "baselines.local-only=false", *OWN[method]]
    launch = Launch(tmp_path, small=keys)
    output = launch.watch()
    assert launch.process.returncode == 0, output
    beside = complete_config(parse_assignments([*keys, "name=in-process", f"output-dir={tmp_path}"]), tmp_path)
    folders = [tmp_path / "run", run_in_process(beside, 2)]
    there, here = (json.loads((folder / "metrics.json").read_text()) for folder in folders)
    if method == "pvi":
        assert there["method_details"]["visits"] == {"0": 2, "1": 2}
    assert there["failures"] == []
    assert here["test"] == pytest.approx(there["test"], rel=1e-6)
    there_objective, here_objective = (pd.read_csv(folder / "history.csv")["objective"] for folder in folders)
    np.testing.assert_allclose(here_objective, there_objective, rtol=1e-6)
    arrays = [read_posterior(folder).arrays for folder in folders]
    assert set(arrays[0]) == set(arrays[1])
    for name, array in arrays[0].items():
        np.testing.assert_allclose(arrays[1][name], array, rtol=1e-6, atol=1e-9, err_msg=name)
    assert launch.survivors() == set()
