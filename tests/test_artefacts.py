"""Files of a run: read as written, killed at any step, tampered with."""

import contextlib
import json
import math
import os
import shutil
import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import tomli_w
from faults import TINY, Killed
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fedgp_flower import cli
from fedgp_flower.config import parse
from fedgp_flower.errors import ConfigError, DamagedError, FedGPError, RunError
from fedgp_flower.files import read_arrays, read_json, write_arrays, write_json
from fedgp_flower.options import MethodOptions
from fedgp_flower.outcome import Posterior, Snapshot, silent
from fedgp_flower.run.artefacts import HISTORY_COLUMNS, SEALS, RunFolder, RunMetrics, locked, read_posterior, read_run
from fedgp_flower.run.in_process import run_in_process
from fedgp_flower.run.registry import parse_config
from fedgp_flower.server_app import execute


def config(folder, **keys):
    flat = {"method": "fsgp", "output-dir": str(folder), "name": "a-run"}
    return parse(flat | {k.replace("_", "-"): v for k, v in keys.items()}, {"fsgp": MethodOptions})


def row(number, **more):
    return dict.fromkeys(HISTORY_COLUMNS, 0) | {"round": number, "seconds": 0.1 * number, "bytes_up": 100, **more}


def metrics():
    figures = {"rmse": 1.0, "mae": 0.8, "nll": 1.4, "crps": 0.5, "coverage_95": math.nan}
    core = {"method": "fsgp", "dataset": "d", "sites": 2, "rounds": 1, "communications": 1}
    costs = {"seconds": {"total": 1.0}, "bytes": {"up": 1, "down": 2}}
    return RunMetrics(**core, **costs, test=figures, test_standardised=figures, per_site=[])


def posterior():
    return Posterior(
        arrays={"inducing.mean": np.arange(6.0).reshape(2, 3).T, "likelihood.noise": np.array(0.1)},
        meanings={"inducing.mean": "mean of u", "likelihood.noise": "noise"},
        coordinates={"inducing.mean": "standardised", "likelihood.noise": "natural"},
        equation="mean(x) = k(x, Z) Kzz⁻¹ m",
        model={"kernel": "rbf", "jitter": 1e-8},
        schema={"features": [], "target": {"name": "y", "kind": "numeric"}},
        method="fsgp",
        likelihood="gaussian",
    )


def finished(tmp_path):
    folder = RunFolder.open(config(tmp_path))
    folder.append_history(row(1, rmse=1 / 3))
    folder.write_posterior(posterior())
    folder.write_metrics(metrics())
    return folder


def test_a_run_reads_back_as_it_was_written(tmp_path):
    folder = finished(tmp_path)
    inputs = np.array([[0.1], [1 / 3]])
    arrays = {"prediction.mean": np.array([1.0, 2.0]), "prediction.sd": np.array([0.5, 0.25])}
    arrays |= {"prediction.target": np.array([1.5, math.pi]), "prediction.input": inputs}
    folder.write_predictions({"NA": arrays, "007": arrays}, ["x"])
    run = read_run(folder.path)
    assert run.config == config(tmp_path).flat()
    assert run.history["rmse"].tolist() == [1 / 3]
    assert run.metrics.test["rmse"] == 1.0
    assert run.metrics.test["coverage_95"] is None
    for name, expected in posterior().arrays.items():
        np.testing.assert_array_equal(run.saved.arrays[name], expected)
        assert run.saved.arrays[name].shape == expected.shape
    for name in ("meanings", "coordinates", "equation", "model", "schema", "encoding"):
        assert getattr(run.saved, name) == getattr(posterior(), name)
    assert list(run.predictions.columns) == ["site", "label", "target", "mean", "sd", "input.x"]
    assert run.predictions["site"].tolist() == ["NA", "NA", "007", "007"]
    np.testing.assert_array_equal(run.predictions["input.x"], np.tile(inputs[:, 0], 2))
    assert run.predictions["target"][1] == math.pi


def test_a_run_never_enters_the_folder_of_another(tmp_path):
    finished(tmp_path)
    before = (tmp_path / "a-run" / "config.toml").read_bytes()
    with pytest.raises(RunError, match=r"exists; choose another `name`, or set `resume` to go on with that run$"):
        RunFolder.open(config(tmp_path, seed=9))
    assert (tmp_path / "a-run" / "config.toml").read_bytes() == before


@pytest.mark.parametrize("name", ["../x", "..", "a/b", "/tmp/x", "a\\b"])
def test_a_name_with_a_path_is_an_error(tmp_path, name):
    with pytest.raises(ConfigError, match="without a path"):
        RunFolder.open(config(tmp_path / "out", name=name))


def test_resume_goes_on_from_the_last_complete_round(tmp_path):
    folder = RunFolder.open(config(tmp_path, num_server_rounds=3))
    arrays = {"w": np.array([0.1, 0.2]), "scalar": np.array(np.float32(3)), "counts": np.arange(3)}
    folder.append_history(row(1))
    folder.append_history(row(2, nll=0.25))
    facts = {"round": 2, "communications": 7, "loss": 1 / 3}
    folder.checkpoint(Snapshot(arrays, facts))
    folder.append_history(row(3, nll=9.0))  # killed before the checkpoint of round 3
    again = RunFolder.open(config(tmp_path, num_server_rounds=5, resume=True))
    checkpoint = again.restore()
    assert checkpoint.facts == facts
    for name, expected in arrays.items():
        np.testing.assert_array_equal(checkpoint.arrays[name], expected)
        assert checkpoint.arrays[name].dtype == expected.dtype
    again.append_history(row(3, nll=0.125))
    lines = (again.path / "history.csv").read_text().splitlines()
    assert lines[1:] == ["1,0,0.1,100,0,", "2,0,0.2,100,0,0.25", f"3,0,{0.1 * 3},100,0,0.125"]


def test_a_finished_run_stays_until_its_first_new_round(tmp_path):
    folder = finished(tmp_path)
    folder.checkpoint(Snapshot({}, {"round": 1}))
    folder.seal()
    again = RunFolder.open(config(tmp_path, num_server_rounds=500, resume=True))
    again.restore()
    again.mark_as_failed()
    assert read_run(folder.path).metrics == read_run(finished(tmp_path / "other").path).metrics
    again.append_history(row(2))
    assert "num-server-rounds = 500" in (folder.path / "config.toml").read_text()
    with pytest.raises(RunError, match="the run has not finished"):
        read_run(folder.path)


def test_resume_with_other_keys_names_them_and_only_them(tmp_path):
    folder = RunFolder.open(config(tmp_path, seed=1, num_server_rounds=3))
    folder.checkpoint(Snapshot({}, {"round": 1}))
    other = config(tmp_path, seed=2, num_server_rounds=9, resume=True, **{"model.kernel": "matern52"})
    with pytest.raises(RunError, match="another configuration") as caught:
        RunFolder.open(other)
    assert "`seed` was 1, now 2" in str(caught.value)
    assert "`model.kernel` was 'rbf', now 'matern52'" in str(caught.value)
    assert "num-server-rounds" not in str(caught.value)
    with pytest.raises(RunError, match="belongs to a run with another configuration"):
        RunFolder(folder.path, other.digest()).restore()


@pytest.mark.parametrize("step", range(9))
def test_a_kill_at_any_step_leaves_the_last_complete_checkpoint(tmp_path, monkeypatch, step):
    folder = RunFolder.open(config(tmp_path))
    folder.append_history(row(1))
    folder.checkpoint(Snapshot({"w": np.array([1.0])}, {"round": 1}))
    done = 0

    def dying(operation):
        def call(*arguments, **options):
            nonlocal done
            if done >= step:
                raise Killed
            done += 1
            return operation(*arguments, **options)

        return call

    with monkeypatch.context() as patch, contextlib.ExitStack() as stack:
        for owner, name in ((os, "fsync"), (os, "replace"), (Path, "unlink")):
            patch.setattr(owner, name, dying(getattr(owner, name)))
        if step < 7:  # two files of fsync, rename, fsync of the folder; one old file removed
            stack.enter_context(pytest.raises(Killed))
        folder.checkpoint(Snapshot({"w": np.array([2.0])}, {"round": 2}))
    found = RunFolder.open(config(tmp_path, resume=True)).restore()
    committed = 2 if step >= 5 else 1  # the rename of checkpoint.json is the fifth step
    assert (found.facts["round"], found.arrays["w"].tolist()) == (committed, [float(committed)])


def test_json_is_strict_and_plain(tmp_path):
    path = tmp_path / "x.json"
    content = {"a": math.nan, "b": [np.float64(-math.inf), np.int64(3)], "c": np.array([1.0, math.inf]), "d": (True,)}
    write_json(path, content)
    assert json.loads(path.read_text()) == {"a": None, "b": [None, 3], "c": [1.0, None], "d": [True]}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *((name, None) for name in ("config.toml", "history.csv", "metrics.json", "posterior.safetensors")),
        *(("config.toml", "= 1"), ("metrics.json", "{"), ("posterior.safetensors", "x")),
    ],
)
def test_reading_names_the_file_that_is_missing_or_damaged(tmp_path, name, content):
    with pytest.raises(RunError, match="not the folder of a run"):
        read_run(tmp_path / "nowhere")
    folder = finished(tmp_path)
    if content is None:
        (folder.path / name).unlink()
    else:
        (folder.path / name).write_text(content)
    with pytest.raises(RunError, match=name.replace(".", r"\.") + (" is missing" if content is None else "")):
        read_run(folder.path)


def test_files_of_another_version_or_of_another_posterior_are_refused(tmp_path):
    path = finished(tmp_path).path
    write_json(path / "metrics.json", read_json(path / "metrics.json") | {"surprise": 1})
    with pytest.raises(RunError, match="surprise"):
        read_run(path)
    write_arrays(path / "posterior.safetensors", {"inducing.mean": np.zeros(2), "likelihood.noise": np.zeros(())})
    with pytest.raises(DamagedError, match="different arrays"):
        read_posterior(path)


def test_a_folder_that_cannot_be_made_is_an_error_in_words(tmp_path):
    (tmp_path / "file").write_text("")
    for parent, name in ((tmp_path / "file", "a-run"), (tmp_path, "n" * 300)):
        with pytest.raises(RunError, match="no folder for the run in `output-dir`"):
            RunFolder.open(config(parent, name=name))


def test_a_folder_has_one_writer_who_is_named(tmp_path):
    folder = RunFolder.open(config(tmp_path))
    with locked(folder.path), pytest.raises(RunError, match=rf"is being written by process {os.getpid()} on "):
        RunFolder.open(config(tmp_path, resume=True))
    RunFolder.open(config(tmp_path, resume=True))


def test_only_a_lock_that_is_taken_is_another_writer(tmp_path):
    with pytest.raises(BlockingIOError), locked(tmp_path):
        raise BlockingIOError


def test_a_run_that_failed_before_its_first_checkpoint_gives_its_name_free(tmp_path):
    for number in (1, 2):
        folder = RunFolder.open(config(tmp_path))
        folder.mark_as_failed()
        assert folder.path.name == f"a-run-failed-{number}"
    folder = RunFolder.open(config(tmp_path))
    folder.append_history(row(1))
    folder.checkpoint(Snapshot({}, {"round": 1}))
    folder.mark_as_failed()
    assert folder.path.name == "a-run"  # it can be resumed


def test_ctrl_c_before_the_first_round_gives_the_name_free(tmp_path):
    def interrupted(_folder):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(None, FLAT | {"output-dir": str(tmp_path), "name": "a-run"}, silent, interrupted)
    assert [path.name for path in tmp_path.iterdir()] == ["a-run-failed-1"]


SETTINGS = settings(deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
FLAT = TINY | {"num-server-rounds": 2, "keep-predictions": True}
KINDS = (".json", ".toml", ".safetensors", ".csv")
ODD = (None, True, -1, 0, 10**30, -0.5, 1e308, np.nan, np.inf, "", "x" * 300, "../..", [], {}, [[1]], {"a": {}})


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clean")
    run = run_in_process(FLAT | {"output-dir": str(folder), "name": "run"}, sites=2)
    (folder / "new.csv").write_text("x\n0.5\n-1.0\n")
    return run, asked(run)


def asked(run):
    output = run.parent / "out.csv"
    output.unlink(missing_ok=True)
    words = ["predict", str(run), "--input", str(run.parent / "new.csv"), "--output", str(output)]
    cli.app(words, standalone_mode=False)
    return pd.read_csv(output)


def leaf(content, draw, odd=ODD):
    """JSON or TOML with something somewhere replaced or removed."""
    places = [content]
    for place in places:
        values = place.values() if isinstance(place, dict) else place
        places += [value for value in values if isinstance(value, dict | list) and value]
    place = draw(st.sampled_from(places))
    key = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
    if draw(st.booleans()):
        place[key] = draw(st.sampled_from(odd))
    else:
        del place[key]
    return content


def spoil(path, draw):
    kind = draw(st.sampled_from(["bytes", "cut", "gone", "content", "content", "content"]))
    content = path.read_bytes()
    if kind == "gone":
        path.unlink()
    elif kind == "cut":
        path.write_bytes(content[: draw(st.integers(0, len(content) - 1))])
    elif kind == "bytes":
        place = draw(st.integers(0, len(content) - 1))
        path.write_bytes(content[:place] + draw(st.binary(max_size=8)) + content[place + draw(st.integers(0, 8)) :])
    elif path.suffix == ".json":
        path.write_text(json.dumps(leaf(json.loads(content), draw)))
    elif path.suffix == ".toml":
        path.write_text(tomli_w.dumps(leaf(tomllib.loads(content.decode()), draw, ODD[1:])))  # TOML has no null
    elif path.suffix == ".csv":
        cells = content.decode().split(",")
        cells[draw(st.integers(0, len(cells) - 1))] = str(draw(st.sampled_from(ODD)))
        path.write_text(",".join(cells))
    else:
        arrays = read_arrays(path)
        name = draw(st.sampled_from(sorted(arrays)))
        change = draw(st.sampled_from([np.nan, np.inf, -1.0, 0.0, 1e300]))
        with np.errstate(invalid="ignore"):  # 0 × ∞
            arrays[name] = arrays[name] * change if draw(st.booleans()) else np.full((2, 3), change)
        write_arrays(path, arrays)


def answer(call):
    """What a command returns, or its words."""
    try:
        with np.errstate(all="ignore"):
            return call()
    except FedGPError as error:
        return error


def resume(run):
    flat = FLAT | {"output-dir": str(run.parent), "name": "run", "resume": True}
    return RunFolder.open(parse_config(flat)).restore()


def test_an_untouched_run_is_resumed(clean, tmp_path):
    """Else what is asserted of tampered checkpoints would be of none."""
    shutil.copytree(clean[0], tmp_path / "run")
    assert resume(tmp_path / "run").facts["round"] == 2


@settings(SETTINGS, max_examples=60, derandomize=True)
@given(data=st.data())
def test_a_tampered_run_is_refused_with_words(clean, tmp_path, data, capsys):
    (original, right), folder, draw = clean, tmp_path / "trial", data.draw
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(original.parent, folder)
    run = folder / "run"
    files = [str(path.relative_to(run)) for path in run.rglob("*.*") if path.suffix in KINDS]
    name = draw(st.sampled_from(sorted(files)))
    spoil(run / name, draw)
    sealed = draw(st.booleans()) or name == SEALS
    if not sealed:  # whoever tampers knows of the hashes
        RunFolder(run, parse_config(FLAT).digest()).seal()
    found = answer(lambda: asked(run))
    if isinstance(found, FedGPError):
        damaged = isinstance(found, DamagedError) or not isinstance(found, RunError)  # status 2
        assert damaged or name in {"metrics.json", "config.toml", "posterior.json"}
    else:
        assert np.isfinite(found.to_numpy()).all()
        if sealed:
            pd.testing.assert_frame_equal(found, right)
    if draw(st.integers(0, 5)) == 0:
        answer(lambda: cli.app(["compare", str(run), str(original)], standalone_mode=False))
    if name.startswith("checkpoint") or name in {"history.csv", "config.toml"}:
        resumed = answer(lambda: resume(run))
        assert isinstance(resumed, FedGPError) or resumed is None or resumed.facts["round"] == 2


@pytest.mark.parametrize(("name", "value"), [("inducing.mean", np.nan), ("likelihood.noise", 0)])
def test_a_posterior_that_cannot_be_has_status_2(clean, tmp_path, name, value, fedgp):
    shutil.copytree(clean[0].parent, tmp_path / "run")
    run = tmp_path / "run" / "run"
    arrays = read_arrays(run / "posterior.safetensors")
    write_arrays(run / "posterior.safetensors", arrays | {name: arrays[name] * 0 + value})
    words = ["predict", run, "--input", run.parent / "new.csv", "--output", tmp_path / "out.csv"]
    for reason in ("changed since the run wrote them", f"not {'finite' if np.isnan(value) else 'positive'}: {name}"):
        status, _, err = fedgp(*words)
        assert (status, reason in err) == (2, True)
        (run / SEALS).unlink(missing_ok=True)
    assert not (tmp_path / "out.csv").exists()
