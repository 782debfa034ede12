"""Every study can be listed, described and asked for; cheap ones run."""

import inspect
import os
from pathlib import Path

import pytest

from simulations import common, run

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("name", run.names())
def test_a_study_has_a_title_arguments_and_a_text(name):
    module = run.load(name)
    assert run.title(module)
    assert vars(run.parser_of(name, module).parse_args([])).keys() >= inspect.signature(module.study).parameters.keys()
    assert inspect.isgeneratorfunction(module.study)


def test_pages_say_which_study_made_them():
    for page in (ROOT / "simulations" / "results").glob("*.md"):
        head = page.read_text(encoding="utf-8")[:600]
        commands = [line for line in head.splitlines() if "python " in line]
        assert commands, page.name
        named = commands[0].partition("python -m simulations.run ")[2].split()
        assert "examples/" in commands[0] or named[0].strip("`.,") in run.names(), page.name


@pytest.fixture
def _scratch(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "RUNS", tmp_path)
    monkeypatch.setattr(common, "version", lambda: "here")


@pytest.mark.usefixtures("_scratch")
def test_a_study_makes_its_runs_once(monkeypatch):
    first = run.run("defaults", {"sets": ("diabetes",), "methods": ("local-only",)})
    assert first[0]["NLL"] == first[0]["local_only"] > first[0]["linear"]
    assert first[0]["above"] == "mean, linear"

    def twice(*arguments):
        raise AssertionError("a run that is there was made again")

    monkeypatch.setattr("fedgp_flower.run.in_process.run_in_process", twice)
    assert run.run("defaults", {"sets": ("diabetes",), "methods": ("local-only",)}) == first


@pytest.mark.usefixtures("_scratch")
def test_results_are_remembered_and_means_are_over_runs():
    found = [common.remembered("study", [1], lambda v=value: {"a": v}) for value in (1.0, 2.0)]
    assert [row["a"] for row in found] == [1.0, 1.0]
    rows = [{"set": "s", "a": 1.0}, {"set": "s", "a": 3.0}, {"set": "t", "a": None}]
    assert common.averaged(rows, ("set",), worst=("a",))[0] == {"set": "s", "runs": 2, "a": 2.0, "a, worst": 3.0}


MEASURING = {"cells", "evaluation", "faults", "footprint", "heartbeats", "load", "masks", "memory", "overhead"}
MEASURING |= {"leaves", "policy", "scale", "trip"}
"""Studies that do not go through ``fit``."""
FEW = {"private": {"splits": (0,), "epsilons": (1.0,)}}
"""Arguments that leave the kinds of runs and make fewer of them."""


@pytest.mark.data
@pytest.mark.skipif("FEDGP_DATA" not in os.environ, reason="no data sets")
@pytest.mark.usefixtures("_scratch")
@pytest.mark.parametrize("name", sorted(set(run.names()) - MEASURING))
def test_the_keys_of_every_run_are_known(name, monkeypatch):
    module = run.load(name)
    monkeypatch.setattr(common, "CHECKING", True)
    monkeypatch.setattr(module, "attacked", common.fit, raising=False)
    if name == "amortised":
        monkeypatch.setattr(module, "scores", lambda *of: {"bound": 1.0})
    rows = list(module.study(**FEW.get(name, {})))
    assert rows
    refused = [row["refused"] for row in rows if "refused" in row]
    assert len(refused) == 3 * (name == "defaults"), refused  # three methods take no classes
