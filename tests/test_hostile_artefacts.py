"""Files of a run that were tampered with: words and status 2, or the right answer; never a traceback, never NaN."""

import json
import shutil
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tomli_w
from faults import TINY
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fedgp_flower import cli
from fedgp_flower.errors import DamagedError, FedGPError, RunError
from fedgp_flower.files import read_arrays, write_arrays
from fedgp_flower.run.artefacts import SEALS, RunFolder
from fedgp_flower.run.in_process import run_in_process
from fedgp_flower.run.registry import parse_config

SETTINGS = settings(deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
FLAT = TINY | {"num-server-rounds": 2, "keep-predictions": True}
KINDS = (".json", ".toml", ".safetensors", ".csv")
ODD = (None, True, -1, 0, 10**30, -0.5, 1e308, np.nan, np.inf, "", "x" * 300, "../..", [], {}, [[1]], {"a": {}})


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, pd.DataFrame]:
    folder = tmp_path_factory.mktemp("clean")
    run = run_in_process(FLAT | {"output-dir": str(folder), "name": "run"}, sites=2)
    (folder / "new.csv").write_text("x\n0.5\n-1.0\n")
    return run, asked(run)


def asked(run: Path) -> pd.DataFrame:
    output = run.parent / "out.csv"
    output.unlink(missing_ok=True)
    words = ["predict", str(run), "--input", str(run.parent / "new.csv"), "--output", str(output)]
    cli.app(words, standalone_mode=False)
    return pd.read_csv(output)


def leaf(content: Any, draw: Callable[[Any], Any], odd: Sequence[Any] = ODD) -> None:
    """Replace or remove something somewhere in JSON or TOML."""
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


def spoil(path: Path, draw: Callable[[Any], Any]) -> None:
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
        found = json.loads(content)
        leaf(found, draw)
        path.write_text(json.dumps(found))
    elif path.suffix == ".toml":
        found = tomllib.loads(content.decode())
        leaf(found, draw, tuple(odd for odd in ODD if odd is not None))
        path.write_text(tomli_w.dumps(found))
    elif path.suffix == ".csv":
        cells = content.decode().split(",")
        cells[draw(st.integers(0, len(cells) - 1))] = str(draw(st.sampled_from(ODD)))
        path.write_text(",".join(cells))
    else:
        arrays = read_arrays(path)
        name = draw(st.sampled_from(sorted(arrays)))
        change = draw(st.sampled_from([np.nan, np.inf, -1.0, 0.0, 1e300]))
        arrays[name] = arrays[name] * change if draw(st.booleans()) else np.full((2, 3), change)
        write_arrays(path, arrays)


def trial(clean: tuple[Path, pd.DataFrame], folder: Path, draw: Callable[[Any], Any]) -> None:
    original, right = clean
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


def answer(call: Callable[[], Any]) -> Any:
    """What a command returns, or its words."""
    try:
        with np.errstate(all="ignore"):
            return call()
    except FedGPError as error:
        return error


def resume(run: Path) -> Any:
    flat = FLAT | {"output-dir": str(run.parent), "name": "run", "resume": True}
    return RunFolder.open(parse_config(flat)).restore()


def test_an_untouched_run_is_resumed(clean: tuple[Path, pd.DataFrame], tmp_path: Path) -> None:
    """Else what is asserted of tampered checkpoints would be of none."""
    shutil.copytree(clean[0], tmp_path / "run")
    assert resume(tmp_path / "run").facts["round"] == 2


@settings(SETTINGS, max_examples=60, derandomize=True)
@given(data=st.data())
def test_a_tampered_run_is_refused_with_words(
    clean: tuple[Path, pd.DataFrame], tmp_path: Path, data: Any, capsys: Any
) -> None:
    trial(clean, tmp_path / "trial", data.draw)


@pytest.mark.parametrize(("name", "value"), [("inducing.mean", np.nan), ("likelihood.noise", 0)])
def test_a_posterior_that_cannot_be_has_status_2(
    clean: tuple[Path, pd.DataFrame], tmp_path: Path, name: str, value: float, monkeypatch: Any, capsys: Any
) -> None:
    shutil.copytree(clean[0].parent, tmp_path / "run")
    run = tmp_path / "run" / "run"
    arrays = read_arrays(run / "posterior.safetensors")
    write_arrays(run / "posterior.safetensors", arrays | {name: arrays[name] * 0 + value})
    words = ["predict", str(run), "--input", str(run.parent / "new.csv"), "--output", str(tmp_path / "out.csv")]
    for reason in ("changed since the run wrote them", f"not {'finite' if np.isnan(value) else 'positive'}: {name}"):
        with pytest.raises(SystemExit) as end:
            cli.main(words)
        assert end.value.code == 2
        assert reason in capsys.readouterr().err
        (run / SEALS).unlink(missing_ok=True)
    assert not (tmp_path / "out.csv").exists()
