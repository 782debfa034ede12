"""Totals under masks end to end: figures are those of plain totals, and the server sees no array of a site."""

import contextlib
from dataclasses import replace
from functools import partial
from pathlib import Path

import faults as kit
import numpy as np
import pytest
from faults import Fault, FaultyGrid, Recorder, alike, arrays, blamed, configured, csv_nodes, lost, run, waves
from schedules import METHODS as FORMS
from scipy.stats import chi2

from fedgp_flower.errors import ConfigError, NumericsError, RunError
from fedgp_flower.messages import ECHOED
from fedgp_flower.methods.sgpr.client import SGPRClient, SparseClient
from fedgp_flower.privacy.keys import Trust
from fedgp_flower.records import numpy_arrays

MISSING = "missing in round 2: no reply within 5 s"
MASKED = {"privacy__secure_aggregation": True}
METHODS = {name: FORMS[name] | {"evaluate_every": 2} for name in ("sgpr", "fsgp")}
METHODS |= {name: FORMS[name] for name in ("fgpr", "sfvi", "hierarchical-gp", "fedmgp exact", "sfvi-avg")}
METHODS |= {
    "deep-kernel": {"method": "deep-kernel", "deep__local_steps": 2},
    "fedmgp": {"method": "fedmgp", "fedmgp__local_steps": 2, "optimizer__batch_size": 8},
    "adam of averages": {"method": "fsgp", "averaging__server_optimizer": "fedadam"},
    "student-t": {"method": "svgp", "model__likelihood": "student-t", "evaluate_every": 2},
    "local-only": {"method": "local-only"},
    "sfvi of classes": FORMS["svgp"] | {"method": "sfvi"},
    "sfvi after averages": {"method": "sfvi", "sfvi__warm_start_rounds": 2},
}
GATE = {"sgpr", "fsgp", "fedmgp", "fedmgp exact", "hierarchical-gp", "student-t"}
COMPARED = {"sgpr", "student-t", "local-only"}
"""With a model of each site beside."""
OF_TOTALS = {"fedmgp", "fedmgp-exact", "sfvi-avg", "sfvi", "hierarchical-gp"}
"""Methods that ask for totals only where there is nothing else."""


def words_of(reply):
    return reply.content.array_records["arrays"]["masked"].numpy()


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=() if name in GATE else pytest.mark.long) for name in METHODS]
)
def pair(request):
    """A run with plain totals and the same one under masks."""
    keys = METHODS[request.param] | {"baselines__local_only": request.param in COMPARED, "num_server_rounds": 2}
    found = []
    for more in ({}, MASKED):
        grid, recorder = FaultyGrid(configured(**keys, **more), 3), Recorder()
        alone = not more and keys.get("method") in OF_TOTALS
        with kit.totals_only() if alone else contextlib.nullcontext():
            found.append((run(grid, recorder), recorder, grid))
    return found


def test_figures_are_those_of_plain_totals(pair):
    """To rounding: sums do not depend on the order of the summands, and scales are rounded to fewer digits."""
    close = partial(pytest.approx, rel=1e-12)  # totals are equal; averages without masks are Flower's
    (plain, plain_rows, _), (masked, masked_rows, _) = pair
    for first, second in zip(plain_rows.rows, masked_rows.rows, strict=True):
        for name in first.keys() & {"bound", "objective", "noise", "test_nll", "test_rmse"}:
            assert second[name] == close(first[name]), name
    before, after = plain.outcome.metrics, masked.outcome.metrics
    for name in ("test", "test_standardised"):
        assert after[name] == close(before[name])
    assert after["calibration"].keys() == before["calibration"].keys()
    alike(after["calibration"], before["calibration"], rtol=1e-12)
    assert after["per_site"] == []
    if before["local_only"]:
        assert after["local_only"].pop("per_site") == []
        assert after["local_only"] == {name: close(before["local_only"][name]) for name in after["local_only"]}
    assert after["method_details"]["privacy"]["left_out"] == {}


def test_the_server_sees_no_array_of_a_site(pair):
    _, (_, _, grid) = pair
    kinds = {kind for _, kind, _ in grid.replies}
    assert kinds >= {"query.describe", "query.keys"}
    assert kinds & {"query.compared_scores", "query.local_scores", "query.score_sums"}
    require_words(grid)
    # ones among the bits of each message within six standard deviations, and χ² of the bytes of all at 1e-6
    sent = [words_of(own).tobytes() for _, _, own in grid.replies if "masked" in own.content.array_records["arrays"]]
    for own in map(np.frombuffer, sent, [np.uint8] * len(sent)):
        bits = np.unpackbits(own)
        assert abs(bits.sum() - bits.size / 2) < 3 * np.sqrt(bits.size)
    cells = np.bincount(np.frombuffer(b"".join(sent), np.uint8), minlength=256)
    statistic = ((cells - cells.mean()) ** 2).sum() / cells.mean()
    assert chi2.ppf(1e-6, 255) < statistic < chi2.ppf(1 - 1e-6, 255)


def require_words(grid):
    """Of a total: words of 128 bits, no row count, no time. By itself a site says its description and its key."""
    for _, kind, reply in grid.replies:
        arrays = numpy_arrays(reply.content.array_records["arrays"])
        if kind in {"query.keys", "query.describe"}:
            assert len(arrays) == 0
        else:
            assert list(arrays) == ["masked"]
            assert arrays["masked"].dtype == np.uint64
            assert dict(reply.content.metric_records["metrics"]) == {"num-examples": 0}
            known = {"schema-version", "site", "answers", "layout", *ECHOED}
            assert set(reply.content.config_records["config"]) <= known


def test_the_same_request_gets_the_same_bytes():
    """Asked again in a run, a site repeats itself; asked in another run, it does not."""
    flat = configured(**MASKED, num_server_rounds=1)
    first = []
    fault = Fault("0", first.append, ("query.trials",), times=1)  # it gets lost
    again, other = FaultyGrid(flat, 3, fault), FaultyGrid(flat, 3)
    for grid, equal in ((again, True), (other, False)):
        run(grid)
        assert np.array_equal(words_of(first[0]), words_of(grid.of("query.trials", "0")[0])) == equal


def test_a_third_of_the_sites_silent_in_a_round():
    """They are asked again, then the others without them; the report names them and what that may show."""
    faults = [Fault(site, lost, ("train.weighted",), range(2, 3)) for site in "14"]
    grid = FaultyGrid(configured(**MASKED, method="fsgp"), 6, *faults)
    strategy = run(grid)
    metrics = strategy.outcome.metrics
    assert metrics["method_details"]["privacy"]["left_out"] == dict.fromkeys("14", MISSING)
    assert sum("late reply" in line for line in metrics["warnings"]) == 2
    later = [visit.site for visit in grid.visits if visit.phase == "train.weighted" and visit.round == 3]
    assert later == ["0", "2", "3", "5"]
    gone = [Fault(site, lost, ("train",), range(2, 9)) for site in "14"]
    others = run(FaultyGrid(configured(method="fsgp"), 6, *gone))
    alike(kit.parameters(strategy), kit.parameters(others), rtol=1e-8, atol=1e-10)


def test_a_site_that_dies_for_good_ends_a_run_of_three_alone():
    """Of four sites the rest is asked again, and the end is that of the plain run in which the fourth died."""
    fault = Fault("2", lost, rounds=range(2, 99))
    strategy = run(FaultyGrid(configured(**MASKED, **METHODS["sgpr"]), 4, fault))
    assert strategy.outcome.metrics["method_details"]["privacy"]["left_out"] == {"2": MISSING}
    plain = run(FaultyGrid(configured(**METHODS["sgpr"]), 4, fault))
    alike(kit.parameters(strategy), kit.parameters(plain), rtol=1e-6, atol=1e-6)
    with pytest.raises(RunError, match=r"2 site\(s\) can take part in a total .*Left out: 2: missing in round 2"):
        run(FaultyGrid(configured(**MASKED, **METHODS["sgpr"]), 3, fault))


def misbehaving(monkeypatch, site, change, client=SparseClient, name="whitened"):
    plain = getattr(client, name)

    def changed(self, values):
        found = plain(self, values)
        return change(found) if self.site.site == site else found

    monkeypatch.setattr(client, name, changed)


def test_who_cannot_answer_is_counted_and_not_named(monkeypatch):
    def fails(own):
        raise NumericsError("not positive definite")

    misbehaving(monkeypatch, "2", fails)
    strategy = run(FaultyGrid(configured(**MASKED, method="fsgp", num_server_rounds=1), 4))
    assert blamed(strategy) == {}
    assert strategy.details()["privacy"]["empty_summands"] == 2  # of the statistics, and of the scores
    assert any("were empty. Masks hide from which sites" in line for line in strategy.outcome.metrics["warnings"])


def test_a_total_that_no_rows_have_ends_the_run(monkeypatch):
    lowered = lambda sums: replace(sums, gram=sums.gram - 1e6 * np.eye(len(sums.gram)))  # noqa: E731
    misbehaving(monkeypatch, "2", lowered, SGPRClient, "evidence_sums")
    with pytest.raises(RunError, match=r"not a Gram matrix\. Under masks the site at fault cannot be identified"):
        run(FaultyGrid(configured(**MASKED), 4))


class Aside(FaultyGrid):
    """Tells one site alone of other rows, beside a question that all are asked."""

    def arrival(self, message):
        told = message.content.config_records["config"]
        if message.metadata.message_type == "query.trials" and message.metadata.dst_node_id == self.node_of("1"):
            told.update(configuration='{"method": "sgpr", "test-fraction": 0.9}')
        return super().arrival(message)


def test_what_is_said_beside_a_question_never_takes_a_site_out_of_a_total():
    """The masks are bound to the context: words beside it could make one site add nothing, or something else."""
    grid = Aside(configured(**MASKED, num_server_rounds=2, sgpr__exchanges=6), 5)
    strategy = run(grid)
    assert any("that all sites share; this one carries a configuration" in own for own in blamed(strategy)["1"])
    assert strategy.details()["privacy"]["empty_summands"] == 0
    assert "this one carries a configuration" in strategy.details()["privacy"]["left_out"]["1"]
    assert strategy.current.rows == sum(n for site, n in strategy.preparation.rows.items() if site != "1")
    assert not any("masked" in own.content.array_records.get("arrays", {}) for own in grid.of("query.trials", "1"))


def test_words_that_do_not_cancel_end_the_run():
    noise = np.random.default_rng(0)
    change = arrays(lambda own: {n: noise.integers(0, 2**63, a.shape).astype(np.uint64) for n, a in own.items()})
    with pytest.raises(RunError, match="did not cancel"):
        run(FaultyGrid(configured(**MASKED), 4, Fault("1", change, ("query.trials",))))


@pytest.mark.parametrize("method", ["pvi", "pooled"])
def test_methods_of_more_than_totals_are_refused_by_name(method):
    grid = FaultyGrid(configured(**MASKED, method=method, pvi__local_update="adam"), 3)
    with pytest.raises(ConfigError, match=f"{method}.*not only their sum|'{method}' sees the rows"):
        run(grid)
    agreed = {f"query.{what}" for what in ("describe", "keys", "column_sums", "column_squares", "shape")}
    assert {kind for _, kind, _ in grid.replies} <= agreed


def test_a_resumed_run_asks_no_question_again_under_an_old_number():
    flat, recorder = configured(**MASKED), Recorder()

    def killed(reply):
        raise KeyboardInterrupt

    grid = FaultyGrid(flat, 4, Fault("3", killed, ("train.gradients",), range(2, 5), 1))
    with pytest.raises(KeyboardInterrupt):
        run(grid, recorder)
    resumed = run(grid, Recorder(), recorder.snapshots[-1])
    assert blamed(resumed) == {}
    assert resumed.details()["evidence"] == pytest.approx(run(FaultyGrid(flat, 4)).details()["evidence"], rel=1e-9)


@pytest.fixture
def real_nodes(tmp_path):
    nodes = csv_nodes(tmp_path, {site: waves(40, seed) for seed, site in enumerate(("east", "north", "west"))})
    kit.keyed(nodes, tmp_path)
    return nodes


def test_masks_are_the_default_where_every_site_has_a_trust_file(real_nodes, caplog):
    """Nothing leaves in the clear then, whatever the key says; the run says so once, before it asks."""
    caplog.set_level("INFO", logger="fedgp")
    grid = FaultyGrid(configured(num_server_rounds=1), real_nodes)
    strategy = run(grid)
    assert strategy.details()["privacy"]["totals"] > 0
    clear = {kind for _, kind, own in grid.replies if "masked" not in own.content.array_records["arrays"]}
    assert clear == {"query.describe", "query.keys"}
    assert "simulated" not in strategy.session.masking.what_the_server_sees()
    lines = [record.message for record in caplog.records if record.message.startswith("totals under masks")]
    assert len(lines) == 1
    with pytest.raises(ConfigError, match="masks hide"):
        run(FaultyGrid(configured(method="pvi"), real_nodes))


def mixed(rows, seed):
    rng = np.random.default_rng(seed)
    frame = waves(rows, seed).assign(far=1e9 + rng.standard_normal(rows), small=1e-6 * rng.standard_normal(rows))
    frame["ward"] = rng.choice(["a", "b", "c"], rows)
    frame.loc[frame.index[:3], ["small"]] = np.nan
    frame.loc[frame.index[2:5], ["ward"]] = None
    return frame


def test_what_sites_agree_on_is_that_of_plain_descriptions(tmp_path):
    """Columns, levels, means, scales and missing cells from totals, where no site says anything of its own."""
    nodes = csv_nodes(tmp_path, {site: mixed(60, seed) for seed, site in enumerate("abc")})
    nodes = [{**node, "partition-id": number, "num-partitions": 3} for number, node in enumerate(nodes)]
    found = []
    for more in ({}, MASKED):
        keys = {"method": "fsgp", "num_server_rounds": 1, "missing": "indicator", "target": "y", "min_sites": 3}
        flat = configured(**keys, **more)
        grid = FaultyGrid(flat, nodes)
        found.append(run(grid).preparation)
    require_words(grid)
    plain, masked = found
    assert masked.names == plain.names
    alike(masked.arrays, plain.arrays, rtol=1e-8, atol=1e-12)
    assert [own["missing"] for own in masked.columns] == [own["missing"] for own in plain.columns]
    assert masked.training_target == pytest.approx(plain.training_target, rel=1e-9)


@pytest.mark.parametrize("trusts_nobody", [True, False])
def test_a_site_with_a_trust_file_answers_under_masks_alone(real_nodes, tmp_path, trusts_nobody):
    """Where another site has none, the run does not mask by itself, and goes on without those that refuse."""
    del real_nodes[0]["site-key"], real_nodes[0]["trust"]
    if trusts_nobody:
        real_nodes[0] |= {"site-key": str(tmp_path / "east.key"), "trust": str(tmp_path / "nobody.toml")}
        Trust({}).write(tmp_path / "nobody.toml")
    told = blamed(run(FaultyGrid(configured(min_sites=1, num_server_rounds=1), real_nodes)))
    for site in ("north", "west"):
        assert told[site]
        assert all("only under masks" in line for line in told[site])


def test_sites_that_trust_too_few_are_told_so_once_and_not_that_their_numbers_are_too_large(real_nodes):
    Trust({"north": "ab" * 32}).write(Path(real_nodes[0]["trust"]))
    with pytest.raises(RunError, match="lacks a site: it did not answer") as found:
        run(FaultyGrid(configured(**MASKED), real_nodes))
    assert str(found.value).count("is not in this site's trust file") == 1


@pytest.mark.parametrize(("size", "most"), [(1.0, False), (-1.0, True)])
def test_under_masks_sites_count_where_the_total_does_not_serve_them(size, most, caplog):
    """Nobody can be named: the site of the false sums is one of many, and each site's log has what it found."""
    keys = configured(**MASKED, num_server_rounds=2, baselines__local_only=True, model__num_inducing=12)
    with kit.false_projections("1", size):
        end = run(FaultyGrid(keys, 3))
    much = "3 of 3 sites predict held-out rows much better"
    said = [text for text in end.outcome.metrics["warnings"] if much in text]
    assert len(said) == most
    causes = "The model may suit no site, the sums of some site may be false, or"
    assert all(causes in text and "each half of the sites" in text for text in said)
    assert all("no common relation: `method` = 'hierarchical-gp' learns how each site deviates" in s for s in said)
    assert sum("the run does not serve this site" in text for text in caplog.messages) == 3 * most
    assert not end.session.doubted
