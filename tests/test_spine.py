"""The spine: an algorithm asks, one Strategy drives it, and a Flower user takes it away."""

import contextlib
import inspect
import runpy
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from faults import Fault, FaultyGrid, Recorder, alike, arrays, configured, no_waiting
from flwr.app import ConfigRecord, Context, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import strategy as flower
from schedules import METHODS, keys_of

import strategies
from fedgp_flower.client_app import make_client_app
from fedgp_flower.errors import ConfigError, ProtocolError, RunError
from fedgp_flower.records import numpy_arrays
from fedgp_flower.run.in_process import InProcessGrid, simulated_nodes
from fedgp_flower.run.registry import parse_config, strategy_class
from fedgp_flower.shared_messages import Parameters, Stepped
from strategies.fsgp import FSGP
from strategies.private_sgpr import PrivateSGPR
from strategies.server.checkpoint import seconds_to_come
from strategies.server.fedavg import AveragingState
from strategies.server.questions import Total
from strategies.sgpr import SGPR


def rows_of(site, count=40):
    draw = np.random.default_rng(site)
    x = draw.uniform(-2, 2, (count, 2))
    return x, np.sin(x[:, 0]) + 0.3 * x[:, 1] + 0.1 * draw.standard_normal(count)


def load_rows(context):
    return rows_of(int(context.node_config["partition-id"]))


KEYWORDS = {"num_inducing": 5, "sites": 3, "round_timeout": 5.0, "steps": 1, "learning_rate": 0.05}


def own_grid(app=None, sites=3):
    return InProcessGrid(app or make_client_app("fsgp", load_rows), {}, simulated_nodes(sites))


@pytest.mark.parametrize("name", ["PVIGLM", "DeepKernelGP", "SFVI", "FedMGPExact"])
def test_a_strategy_exported_by_name_runs_at_its_defaults(name):
    strategy = getattr(strategies, name)()
    result = strategy.start(own_grid(make_client_app(strategy.method, load_rows)), num_rounds=1)
    assert all(np.isfinite(array.numpy()).all() for array in result.arrays.values())


def watched(grid):
    seen = []
    original = grid.push_messages

    def push(messages):
        kept = list(messages)
        seen.extend(kept)
        return original(kept)

    grid.push_messages = push
    return seen


def test_start_returns_arrays_and_the_metrics_of_every_round():
    seen = []

    def at_server(number, record):
        seen.append((number, record))
        return MetricRecord({"norm": float(sum(np.square(a.numpy()).sum() for a in record.values()))})

    strategy = FSGP(**KEYWORDS)
    result = strategy.start(own_grid(), num_rounds=3, evaluate_fn=at_server)
    assert isinstance(result, flower.Result)
    assert set(result.train_metrics_clientapp) == {1, 2, 3}
    assert {"objective", "noise"} <= set(result.train_metrics_clientapp[3])
    assert set(result.evaluate_metrics_clientapp) == {1, 2, 3}
    assert result.evaluate_metrics_clientapp[3]["test_rmse"] == strategy.outcome.metrics["test"]["rmse"]
    assert set(result.evaluate_metrics_serverapp) == {0, 1, 2, 3}
    assert [number for number, _ in seen] == [0, 1, 2, 3]
    final = numpy_arrays(result.arrays)
    assert all(np.array_equal(array, final[name]) for name, array in numpy_arrays(seen[-1][1]).items())
    assert final["values.inducing.locations"].shape == (5, 2)
    assert strategy.outcome.posterior.arrays["inducing.mean"].shape == (5,)


def test_a_second_start_continues_the_run_and_says_if_no_round_is_left(caplog):
    strategy, grid = FSGP(**KEYWORDS), own_grid()
    found = [set(strategy.start(grid, num_rounds=rounds).train_metrics_clientapp) for rounds in (1, 2, 2)]
    assert found == [{1}, {2}, set()]
    assert [r.getMessage() for r in caplog.records if "done before" in r.getMessage()] == [
        "all 2 rounds were done before: nothing is trained"
    ]


def test_start_goes_on_from_the_arrays_it_is_given():
    half = FSGP(**KEYWORDS).start(own_grid(), num_rounds=2).arrays
    whole = FSGP(**KEYWORDS).start(own_grid(), num_rounds=3).arrays
    rest = FSGP(**KEYWORDS).start(own_grid(), initial_arrays=half, num_rounds=1).arrays
    alike(numpy_arrays(rest), numpy_arrays(whole), rtol=1e-12, atol=1e-12)
    with pytest.raises(ProtocolError, match=r"expected `values.inducing.locations` \(6, 2\)"):
        FSGP(**(KEYWORDS | {"num_inducing": 6})).start(own_grid(), initial_arrays=half, num_rounds=1)


def test_the_timeout_of_the_strategy_holds_unless_start_has_one():
    strategy, grid = FSGP(**KEYWORDS), own_grid()
    strategy.start(grid, num_rounds=0)
    assert strategy.network.timeout == KEYWORDS["round_timeout"]
    strategy.start(grid, num_rounds=0, timeout=7.0)
    with pytest.raises(RunError, match="holds a run on another Grid: make a new strategy"):
        strategy.start(own_grid(), num_rounds=1)
    assert strategy.network.timeout == 7.0


def test_the_forecast_is_of_the_rounds_given_to_start():
    recorder = Recorder()
    strategy = FSGP.from_config(parse_config(configured(method="fsgp", num_server_rounds=1)), recorder)
    strategy.start(own_grid(), num_rounds=3)
    assert recorder.totals == [3, 3, 3]


def test_the_configurations_of_training_and_evaluation_reach_the_sites():
    grid = own_grid()
    seen = watched(grid)
    configs = ConfigRecord({"colour": "red", "round": 77, "run": "other"}), ConfigRecord({"colour": "blue"})
    FSGP(**KEYWORDS).start(grid, num_rounds=1, train_config=configs[0], evaluate_config=configs[1])
    colours = {own.metadata.message_type: own.content.config_records["config"].get("colour") for own in seen}
    assert (colours["train"], colours["evaluate"], colours["query.statistics"]) == ("red", "blue", None)
    assert {own.content.config_records["config"]["round"] for own in seen} == {0, 1}  # nobody poses as the run


def test_a_total_of_what_is_no_summand_is_refused():
    class Wrong(FSGP):
        def one_round(self, state, roster):
            yield Total(Stepped, Parameters(state.parameters))
            return state, {}

    with pytest.raises(ProtocolError, match="`Total` of Stepped, which is not a summand"):
        Wrong(**KEYWORDS).start(own_grid(), num_rounds=1)


def test_an_unknown_keyword_is_an_error_with_a_suggestion():
    with pytest.raises(TypeError, match=r"unexpected keyword argument .num_inducin.; did you mean .*num_inducing"):
        FSGP(num_inducin=3)
    for fixed in ("num_server_rounds", "output_dir"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{fixed}'"):
            FSGP(**{fixed: 1})


def test_keywords_may_be_numpy_s_or_a_dict_and_wrong_arguments_are_refused_at_once():
    ranges = {"x0": [-3, 3], "y": [-1.0, 2.5]}
    strategy = PrivateSGPR(num_inducing=np.int64(8), epsilon=np.float64(1), ranges=ranges)
    assert (strategy.config.model.num_inducing, strategy.config.privacy.epsilon) == (8, 1.0)
    assert strategy.config.privacy.bounds == {"x0": (-3.0, 3.0), "y": (-1.0, 2.5)}
    for rounds in (-1, 1.5):
        with pytest.raises(ConfigError, match=f"`num_rounds` = {rounds}: expected a whole number"):
            FSGP().start(own_grid(), num_rounds=rounds)
    with pytest.raises(ConfigError, match=r"`method` = 'fsgpp' is not a method; allowed: .*fsgp"):
        make_client_app("fsgpp", load_rows)


def test_help_shows_every_keyword_with_its_default_and_meaning():
    shown, doc = inspect.signature(FSGP).parameters, str(inspect.getdoc(FSGP))
    assert {"fraction", "kernel", "seed", "learning_rate"} <= set(shown)
    assert all(f"\n    {name}: " in doc for name in shown)
    assert "    fraction: Share of the sites that take part in a round" in doc
    assert f"default {shown['fraction'].default!r}" in doc
    strategy = FSGP(**{name: own.default for name, own in shown.items()})
    assert strategy.config == FSGP().config
    assert strategy.config.flat().keys() == parse_config({"method": FSGP.method}).flat().keys()


def distance(one, other):
    mine, others = numpy_arrays(one), numpy_arrays(other)
    return float(np.sqrt(sum(np.square(mine[name] - others[name]).sum() for name in mine)))


def server_side(noise, norm, rounds):
    """Arrays before and after each round, every message, and the result."""
    seen = []
    strategy, grid = FSGP(**KEYWORDS | {"steps": 20}), own_grid()
    messages = watched(grid)
    wrapped = flower.DifferentialPrivacyServerSideFixedClipping(strategy, noise, norm, num_sampled_clients=3)
    start, watch = strategy.initial_arrays(grid), lambda number, record: seen.append(record)
    return seen, messages, wrapped.start(grid, initial_arrays=start, num_rounds=rounds, evaluate_fn=watch)


def test_flower_clips_every_array_and_the_noised_ones_are_those_that_sites_train_and_predict_with():
    np.random.seed(0)  # noqa: NPY002  what Flower draws from
    seen, messages, result = server_side(2.0, 0.1, 2)
    (start, clipped), _, _ = server_side(0.0, 0.01, 1)
    # every site moves by 0.01 at most, and so does their mean: no array escapes the clipping
    assert 0.003 < distance(start, clipped) <= 0.01 * (1 + 1e-9)
    assert distance(seen[1], seen[2]) > 0.1  # far more than clipping lets an update be
    trained = [own for own in messages if own.metadata.message_type == "train"]
    assert len(trained) == 6
    for own in trained:
        expected = seen[int(own.content.config_records["config"]["round"]) - 1]
        assert distance(own.content.array_records["arrays"], expected) == 0
    scored = [own for own in messages if own.metadata.message_type == "evaluate"]
    for own in scored:
        sent = numpy_arrays(own.content.array_records["arrays"])
        expected = numpy_arrays(seen[int(own.content.config_records["config"]["round"])])
        assert all(np.array_equal(sent[name], array) for name, array in expected.items())
    assert distance(result.arrays, seen[2]) == 0


WRAPPED = {"sgpr", "fsgp", "pvi", "sfvi-avg"}


CLIPPING = [
    (flower.DifferentialPrivacyServerSideFixedClipping, (0.0, 1.0)),
    (flower.DifferentialPrivacyServerSideAdaptiveClipping, (0.2,)),
]


@pytest.mark.parametrize(("wrapper", "sizes"), CLIPPING)
@pytest.mark.parametrize("form", [pytest.param(m, marks=[] if m in WRAPPED else pytest.mark.long) for m in METHODS])
def test_a_wrapper_runs_around_averages_and_is_refused_in_words_elsewhere(form, wrapper, sizes):
    flat = keys_of(form, num_server_rounds=1)
    kind, grid = strategy_class(parse_config(flat)), FaultyGrid(flat, 3)
    strategy = kind.from_config(parse_config(flat), Recorder())
    averages = kind.state_class is AveragingState
    with no_waiting(), contextlib.nullcontext() if averages else contextlib.suppress(ConfigError):
        start = strategy.initial_arrays(grid)
        wrapped = wrapper(strategy, *sizes, num_sampled_clients=3)
        result = wrapped.start(grid, initial_arrays=start, num_rounds=1)
    if averages:
        assert strategy.network.failures == []
        assert result.train_metrics_clientapp[1]
        assert result.evaluate_metrics_clientapp[1]
        assert all(np.isfinite(array).all() for array in numpy_arrays(result.arrays).values())


def test_a_site_that_lies_under_flowers_own_loop_is_left_out_by_name():
    flat = configured(method="fsgp")
    grid = FaultyGrid(flat, 3, Fault("1", arrays(lambda own: {n: a * np.nan for n, a in own.items()}), ("train",)))
    strategy = FSGP(num_inducing=5, round_timeout=5.0)
    wrapped = flower.DifferentialPrivacyServerSideFixedClipping(strategy, 0.0, 1.0, num_sampled_clients=3)
    with no_waiting():
        result = wrapped.start(grid, initial_arrays=strategy.initial_arrays(grid), num_rounds=1)
    assert [(own.round, own.site) for own in strategy.network.failures] == [(1, "1")]
    assert all(np.isfinite(array).all() for array in numpy_arrays(result.arrays).values())


def test_mods_see_every_message_and_train_mods_those_of_training():
    seen = {"every": [], "train": []}

    def mod(name):
        def note(message, context, call_next):
            seen[name].append(message.metadata.message_type)
            return call_next(message, context)

        return note

    app = make_client_app("fsgp", load_rows, mods=[mod("every")], train_mods=[mod("train")])
    FSGP(**KEYWORDS).start(own_grid(app), num_rounds=2)
    assert set(seen["train"]) == {"train"}
    assert {"query.describe", "query.shape", "query.statistics", "train", "evaluate"} == set(seen["every"])


def test_rows_held_apart_are_those_that_are_scored():
    def load(context):
        site = int(context.node_config["partition-id"])
        return (*rows_of(site), *rows_of(site + 10, 7 + site))

    strategy = FSGP(**KEYWORDS)
    strategy.start(own_grid(make_client_app("fsgp", load)), num_rounds=1)
    assert [row["num_examples"] for row in strategy.outcome.metrics["per_site"]] == [7, 8, 9]
    assert strategy.preparation.rows == dict.fromkeys("012", 40)


def test_a_data_frame_with_text_is_encoded_and_the_site_has_its_name():
    import pandas as pd

    def load(context):
        x, y = rows_of(int(context.node_config["seed"]))
        return pd.DataFrame({"age": x[:, 0], "ward": np.where(x[:, 1] > 0, "north", "south"), "stay": y}), "stay"

    nodes = [{"site": name, "label": name.title(), "seed": seed} for seed, name in enumerate(("ada", "bo"))]
    grid = InProcessGrid(make_client_app("fsgp", load), {}, nodes)
    strategy = FSGP(num_inducing=5, sites=2)
    strategy.start(grid, num_rounds=1)
    assert [row["label"] for row in strategy.outcome.metrics["per_site"]] == ["Ada", "Bo"]
    assert strategy.preparation.names == ("age", "ward=south")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ((np.zeros(3), np.zeros(3)), r"shapes \(3,\), \(3,\); expected \[N, D\] and \[N\]"),
        ((np.full((9, 1), np.nan), np.arange(9.0)), "load_data.*NaN"),
        (None, r"load_data returned None; expected \(X, y\)"),
        ((np.zeros((3, 1)),) * 3, r"load_data returned 3 values; expected \(X, y\)"),
    ],
)
def test_what_a_loader_returns_is_checked(data, words):
    strategy = FSGP(num_inducing=5, sites=2, wait_seconds=0.5)
    with pytest.raises(RunError, match=words), no_waiting():
        strategy.start(own_grid(make_client_app("fsgp", lambda context: data), 2), num_rounds=1)


APP = Path(__file__).resolve().parents[1] / "examples" / "own_flower_app"


@pytest.mark.parametrize(
    ("name", "array"),
    [("FSGP", "values.inducing.locations (50, 2)"), ("SGPR", "inducing.locations"), ("PVI", ""), ("FGPR", "")],
)
def test_its_strategies_are_swapped_by_one_word(name, array, tmp_path, monkeypatch, capsys):
    """It prints a figure after each round, and the arrays of the result."""
    monkeypatch.chdir(tmp_path)
    grid = InProcessGrid(runpy.run_path(f"{APP}/client_app.py")["app"], {}, simulated_nodes(2))
    config = {"strategy": name, "num-rounds": 2, "sites": 2}
    runpy.run_path(f"{APP}/server_app.py")["main"](grid, Context(1, 1, {}, RecordDict(), config))
    printed = capsys.readouterr().out
    assert "round 2: RMSE" in [line for line in printed.splitlines() if "RMSE" in line][-1]
    assert "trained: " in printed
    assert array in printed
    assert list(tmp_path.iterdir()) == []


def test_an_app_of_another_kind_is_told_what_to_use():
    """A ClientApp that registers `train` alone, as Flower's quickstart has it."""
    quickstart = ClientApp()
    quickstart.train()(lambda message, context: message)
    with pytest.raises(RunError, match=r"create it with `fedgp_flower\.make_client_app`"), no_waiting():
        FSGP(sites=2, wait_seconds=0.5).start(own_grid(quickstart, 2), num_rounds=1)


POWER = (
    "2 300 .5,2 300 .4,2 300 .4,2 300 .5,2 300 .4,2 300 .4,1 300 .3,1 1000 1.2,2 1000 3,1 2000 5.7,1 2000 8.8,"
    "1 4000 30,2 4000 87,1 4096 35,2 4096 119"
)
"""Exchanges, points and seconds of rounds of `sgpr` on the power plant, ten sites in a process."""
DEMO = "2 300 11,2 300 12.5,2 300 14.2,1 1000 8.2,2 1000 17.5,1 2000 13.5,2 2000 24.2,1 4000 35.1,2 4000 74.3"
"""And on 5 000 rows at three SuperNodes, whose polls make an exchange wait for 5 s."""


@pytest.mark.parametrize(
    ("waiting", "rounds"),
    [(0, POWER), (5, DEMO), (0, ",".join("1 300 2,1 300 3" for _ in range(9)))],
    ids=["more and more points", "real machines", "equal rounds"],
)
def test_the_time_left_is_right_within_a_factor_of_two(waiting, rounds):
    """A replay: after each round of the second half, as after almost all before."""
    recorded = [tuple(map(float, line.split())) for line in rounds.split(",")]
    sizes = [(points if points > 300 else 0, {"inducing.locations": range(int(points))}) for _, points, _ in recorded]
    states = [SimpleNamespace(asked=asked, values=values) for asked, values in sizes]
    works = [SGPR.work(None, *pair) for pair in pairwise([states[0], *states])]
    spent = [(seconds, int(count), count * work) for (count, _, seconds), work in zip(recorded, works, strict=True)]
    for done in range(1, len(spent)):
        seconds, exchanges, work = (sum(part) for part in zip(*spent[done:], strict=True))
        forecast = seconds_to_come(spent[:done], waiting, exchanges, work)
        if seconds < sum(time for time, _, _ in spent) / 2 or waiting == 0:
            assert 0.5 < forecast / seconds < 2
