"""What a site of SFVI keeps, loses, makes good and sends: the numbers of the method, and nothing of its rows."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from faults import Fault, FaultyGrid, Recorder, arrays, blamed, configured, csv_nodes, parameters, run, texts, waves
from flwr.app import RecordDict
from test_sfvi import memories, mixed, tiny, visits_csv

from fedgp_flower import server_app
from fedgp_flower.clients.numpy_client import handlers
from fedgp_flower.clients.state import ARRAYS
from fedgp_flower.data.sites import load_all_sites, load_site
from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.errors import RunError
from fedgp_flower.messages import decode, encode
from fedgp_flower.methods.sfvi.client import SFVIClient
from fedgp_flower.methods.sfvi.learner import Learner, SiteMemory
from fedgp_flower.methods.sfvi.messages import GradientRequest, GradientShare
from fedgp_flower.records import numpy_arrays
from fedgp_flower.run.predict import Predictor
from fedgp_flower.run.registry import parse_config
from strategies.server.network import LACKS, SharedContext


def offset_sites(folder):
    """Three sites whose targets differ by constants that no input explains."""
    frames = {name: waves(40, seed) for seed, name in enumerate("abc")}
    for name, offset in (("a", 2.0), ("b", -2.0), ("c", 0.0)):
        frames[name]["y"] += offset
    return csv_nodes(folder, frames)


def test_a_site_that_loses_its_state_in_the_last_round_gets_its_deviation_back(tmp_path, monkeypatch):
    """Its rate is that of a run from its beginning, however late it is; its offset is many steps away."""
    monkeypatch.setattr("fedgp_flower.methods.sfvi.client.CATCH_UP_STEPS", 60)
    nodes = offset_sites(tmp_path)
    flat = tiny(method="sfvi-avg", num_server_rounds=8, sfvi__learning_rate=0.1, sfvi__local_steps=4)
    calm, grid = run(FaultyGrid(flat, nodes)), FaultyGrid(flat, nodes)
    strategy = run(grid, Recorder(at={7: lambda: grid.restart("a")}))
    assert strategy.details()["fresh_starts"] == 1

    def error(own):
        return next(row["rmse"] for row in own.evaluation["per_site"] if row["site"] == "a")

    assert error(strategy) < error(calm) + 0.1


@pytest.mark.parametrize("method", ["sfvi", "sfvi-avg"])
def test_a_step_that_is_not_finite_is_one_failure_and_not_remembered(monkeypatch, tmp_path, method):
    """The gradient of one site's own latents breaks in the second round: it goes on in the third."""
    original = SFVIClient.learner
    nodes = csv_nodes(tmp_path, {name: waves(30, seed) for seed, name in enumerate("abc")})

    def learner(self, values):
        found = original(self, values)
        if self.site.site == "b" and self.setting.round == 2:
            return Broken(found.model, found.site, found.seed, found.key, found.samples, found.importance)
        return found

    monkeypatch.setattr(SFVIClient, "learner", learner)
    grid = FaultyGrid(tiny(method=method, num_server_rounds=4, sfvi__local_steps=2), nodes)
    strategy = run(grid)
    assert [failure.round for failure in strategy.network.failures] == [2]
    assert "not finite" in blamed(strategy)["b"][0]
    assert memories(grid)["b"].round == 4
    assert all(np.isfinite(array).all() for array in encode(memories(grid)["b"]).values())


class Broken(Learner):
    """Its own latents are no numbers after a step; what it would send looks sound."""

    def gradient(self, *told):
        value, slopes = super().gradient(*told)
        return value, {n: v * (torch.nan if n.startswith("local.") else 1) for n, v in slopes.items()}

    def local_steps(self, *told, **named):
        end, value = super().local_steps(*told, **named)
        end[1].mean[...] = torch.nan
        return end, value


def test_new_rows_are_predicted_at_a_real_site_from_its_own_files(tmp_path):
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


class Watched(FaultyGrid):
    """Keeps the kinds of messages that carry the context."""

    def __init__(self, *told):
        super().__init__(*told)
        self.with_context = []

    def answer(self, message):
        self.with_context += [message.metadata.message_type] * ("context" in message.content)
        return super().answer(message)


def multinomial(folder, **changes):
    """Three classes, a hundred inputs of which one tells them apart."""
    draw = np.random.default_rng(2)
    label, x = draw.integers(0, 3, 120), draw.standard_normal((120, 100))
    x[:, 0] += label
    pd.DataFrame(x).add_prefix("x").assign(y=label).to_csv(folder / "classes.csv", index=False)
    own = {"method": "sfvi", "dataset": str(folder / "classes.csv"), "target": "y", "standardise": False}
    own |= {"sfvi__model": "multinomial", "sfvi__samples": 2, "sfvi__learning_rate": 0.1}
    return configured(**{**own, **changes})


def test_bytes_of_a_round_keep_to_the_bound(tmp_path):
    """1.1 · (2 |η_G| + 2 |θ| + S |ε|) · 8 for a site, everything included that crosses the wire."""
    grid = Watched(multinomial(tmp_path), 3)
    strategy = run(grid)
    numbers = sum(array.size for array in parameters(strategy).values())
    draws = 2 * len(parameters(strategy)["q.mean"])
    visits = [visit for visit in grid.visits if visit.phase == "train.gradient"]
    later = [visit.down + visit.up for visit in visits if visit.round > 1]
    assert len(later) == 9
    assert max(later) <= 1.1 * (2 * numbers + draws) * 8
    assert grid.with_context == ["train.gradient"] * 3  # the first message that needs it


def test_a_site_that_forgot_is_sent_it_again_and_nothing_changes(tmp_path):
    flat = multinomial(tmp_path, num_server_rounds=3)
    calm, grid = run(FaultyGrid(flat, 3)), FaultyGrid(flat, 3)

    def forget():
        grid.contexts[grid.node_of("1")].state = RecordDict()

    strategy = run(grid, Recorder(at={2: forget}))
    assert not blamed(strategy)
    for name, array in parameters(calm).items():
        assert np.array_equal(parameters(strategy)[name], array), name
    assert strategy.evaluation["test"] == calm.evaluation["test"]
    asked = [(visit.round, visit.site) for visit in grid.visits if visit.phase == "train.gradient"]
    assert {key for key in asked if asked.count(key) > 1} == {(3, "1")}


def test_a_site_that_claims_to_forget_for_ever_fails(tmp_path):
    empty, lacking = arrays(lambda own: {}), texts(**{LACKS: True})
    fault = Fault("1", lambda reply: lacking(empty(reply)), ("train.gradient",))
    [(site, reasons)] = blamed(run(FaultyGrid(multinomial(tmp_path, num_server_rounds=2), 3, fault))).items()
    assert (site, len(reasons)) == ("1", 2)
    assert all("sent again" in reason for reason in reasons)


def test_a_context_is_named_by_what_it_holds():
    """A message that names another digest is not read with what a site keeps."""

    def context(mean=3.0, schema="a", **constants):
        return SharedContext.of({"schema": schema}, {"input.mean": np.array([2.0, mean]), **constants})

    ones = np.ones((2, 3))
    others = context(3.5, points=ones), context(schema="b", points=ones), context(points=ones.T), context(point=ones)
    assert len({own.digest for own in (context(points=ones), context(), *others)}) == 6
    assert context(points=ones).digest == context(points=ones).digest
    assert numpy_arrays(context(points=ones).arrays)["points"].shape == (2, 3)


class Listening(FaultyGrid):
    """Keeps all bytes that leave a site, and what the site knew when they left."""

    def __init__(self, *told):
        super().__init__(*told)
        self.sent = []
        self.secrets = {}

    def answer(self, message):
        reply = super().answer(message)
        context = self.contexts[message.metadata.dst_node_id]
        site = str(context.node_config["partition-id"])
        own = {name: array.numpy() for name, array in (context.state.array_records.get(ARRAYS) or {}).items()}
        memory = decode(SiteMemory, own).latest
        for values in () if memory is None else (memory.local, memory.first, memory.second):
            for value in values.values():
                self.secrets.setdefault(site, set()).update(words(value))
        self.sent.append((site, content(reply)))
        return reply


def words(array):
    """The bytes of every number but whole ones: a count of rows, which a site sends, may equal an input such as 10."""
    flat = np.asarray(array, dtype=np.float64).ravel()
    return {value.tobytes() for value in flat if math.isfinite(value) and value != np.rint(value)}


def content(message):
    values = [value for record in message.content.values() for value in record.values()]
    numbers = [np.float64(value).tobytes() for value in values if isinstance(value, int | float)]
    return b"|".join([*numbers, *(value.data if hasattr(value, "data") else repr(value).encode() for value in values)])


def leaks(flat):
    """How many private numbers of each of three sites are among the bytes it sent."""
    grid = Listening(flat, 3)
    strategy = run(grid)
    preparation, found = Preparation.from_wire(strategy.preparation.arrays, strategy.preparation.schema), {}
    for site in load_all_sites(strategy.config, 3):
        data = site.encode(preparation)
        private = grid.secrets[site.site] | words(data.x) | words(data.y) | words(site.train.select_dtypes("number"))
        heard = b"".join(sent for sender, sent in grid.sent if sender == site.site)
        assert len(private) > 100
        assert len(heard) > 1000
        found[site.site] = sum(word in heard for word in private)
    return found


def test_nothing_about_local_latents_leaves_a_site(tmp_path):
    """No number of q(Z_Lk | Z_G), of its optimiser, or of a row is among the bytes of any message of any site."""
    warm = {"sfvi__warm_start_rounds": 2, "sfvi__local_steps": 2}
    average = {"method": "sfvi-avg", "sfvi__local_steps": 2, "sfvi__structure": "full"}
    units = mixed(visits_csv(tmp_path), "three", sfvi__warm_start_rounds=2, sfvi__local_steps=2)
    for flat in (tiny(evaluate_every=2, **warm), tiny(evaluate_every=2, **average), units):
        assert not any(leaks(flat).values())


def test_the_listener_hears_a_leak(monkeypatch):
    """One number of one site's latents among the figures of its replies is enough."""
    original = SFVIClient.gradient

    def gradient(self: SFVIClient, request: GradientRequest) -> GradientShare:
        share = original(self, request)
        latents = next(iter(decode(SiteMemory, self.state.arrays).latest.local.values()))
        return replace(share, objective=float(latents.ravel()[0])) if self.site.site == "1" else share

    monkeypatch.setattr(SFVIClient, "gradient", gradient)
    handlers.cache_clear()
    heard = leaks(tiny())
    handlers.cache_clear()
    assert {site for site, found in heard.items() if found} == {"1"}
