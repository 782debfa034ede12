"""Relevance of inputs in a report: lengthscales as a method tells them, sorted, with intervals where it knows any."""

from dataclasses import replace

import numpy as np
import pytest
from synthetic_runs import make_run

from fedgp_flower.run.artefacts import read_run
from fedgp_flower.run.dependence import relevances
from fedgp_flower.run.figures import relevance
from strategies.server.questions import lengthscale_facts

LOGS = {"kernel.log_lengthscale": np.log([[4.0, 0.5, 90.0]]), "kernel.log_outputscale": np.array(0.3)}
SPREAD = {"kernel.log_lengthscale": np.array([[0.1, 0.2, 2.0]])}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of three inputs whose method tells nothing of lengthscales."""
    own = read_run(make_run(tmp_path_factory.mktemp("run"), inputs=3, sites=2, rows=5))
    return replace(own, saved=replace(own.saved, inputs=("age", "dose", "ward")))


def telling(run, facts):
    return replace(run, metrics=replace(run.metrics, method_details={"relevance": facts}))


def test_the_shortest_comes_first_with_a_log_normal_interval(run):
    [own] = relevances(telling(run, lengthscale_facts(LOGS, SPREAD, "a test")))
    assert own.names == ("dose", "age", "ward")
    assert own.value == pytest.approx([0.5, 4, 90])
    assert own.low == pytest.approx([0.5, 4, 90] / np.exp(1.959964 * np.array([0.2, 0.1, 2.0])), rel=1e-6)
    assert own.low * own.high == pytest.approx(own.value**2)
    assert (own.part, own.how) == ("kernel", "a test")


def test_without_intervals_points_are_shown_and_none_is_made_up(run):
    [own] = relevances(telling(run, lengthscale_facts(LOGS, None, "a test")))
    assert np.isnan(own.low).all()
    assert not own.how
    saved = replace(run.saved, arrays={"kernel.lengthscale": np.exp(LOGS["kernel.log_lengthscale"])})
    [same] = relevances(replace(run, saved=saved))
    assert (same.names, same.part, same.how) == (own.names, "kernel", "")
    assert relevances(run) == []


def test_parts_of_a_model_have_panels_of_their_own(run):
    logs = {f"theta.{part}.log_lengthscale": np.zeros((1, 3)) for part in ("trend", "deviation")}
    found = relevances(telling(run, lengthscale_facts(logs, None)))
    figure = relevance(found)
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["trend", "deviation"]
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["age", "dose", "ward"]
