"""Pieces of a launch that need no SuperLink; exactly what a launch started is ended."""

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
from flwr.app import Context, RecordDict

from fedgp_flower import client_app, server_app
from fedgp_flower.deploy import demo, machines
from fedgp_flower.deploy.demo import join_sites
from fedgp_flower.deploy.machines import Coordinator
from fedgp_flower.deploy.processes import MARK, Processes, family, free_ports
from fedgp_flower.deploy.submission import PROFILES, Flower, installed_home
from fedgp_flower.errors import ConfigError, DataError, RunError
from fedgp_flower.run.in_process import InProcessGrid
from fedgp_flower.run.user_config import complete_config, run_folder


def test_paths_become_absolute(tmp_path, monkeypatch):
    (tmp_path / "table.csv").write_text("x,y\n1,2\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDGP_DATA", str(tmp_path / "elsewhere"))
    config = complete_config({"dataset": "table.csv", "output-dir": "out"})
    assert config["dataset"] == str((tmp_path / "table.csv").resolve())
    assert config["data-dir"] == str((tmp_path / "elsewhere").resolve())
    assert run_folder(config).parent == tmp_path / "out"
    assert run_folder(complete_config({"dataset": "uci/energy"})).name.startswith("sgpr-uci-energy-")
    assert run_folder(complete_config({"name": "mine"})).name == "mine"
    assert run_folder(config).name.startswith("sgpr-table-")
    assert complete_config({"data-dir": "mine"})["data-dir"] == str((tmp_path / "mine").resolve())


def test_a_demonstration_with_tables_is_not_named_after_the_default_data_set(tmp_path, monkeypatch):
    names = []
    flower = SimpleNamespace(run=lambda config: names.append(config["name"]))
    monkeypatch.setattr(demo, "federation", lambda *_, **__: contextlib.nullcontext(flower))
    demo.run_demo({"name": "", "target": "y"}, [Path("a.csv"), Path("b.csv")], 0, tmp_path)
    assert names[0].startswith("sgpr-sites-")


def test_the_profiles_in_code_are_those_that_people_read():
    assert tomllib.loads((Path(__file__).parents[1] / "pyproject.flwr.toml").read_text()) == PROFILES


def test_profiles_are_installed_and_connections_added_by_hand_stay(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    assert installed_home() == tmp_path
    target = tmp_path / "config.toml"
    target.write_text(target.read_text() + '[superlink.hospital]\naddress = "example.org:8000"\n')
    installed_home()
    superlinks = tomllib.loads(target.read_text())["superlink"]
    assert superlinks["hospital"] == {"address": "example.org:8000"}
    assert superlinks[superlinks["default"]] == {"address": ":local-in-memory:"}


def test_flower_reports_a_superlink_that_does_not_answer(tmp_path):
    with Processes({}, tmp_path) as processes, pytest.raises(RunError, match="did not answer"):
        Flower(processes, tmp_path, "gone").wait_until_ready(f"http://127.0.0.1:{free_ports(1)[0]}", seconds=0.5)


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("[code: 23] Public key already in use.", "`fedgp site join` and another `--folder`"),
        ("Connection to the SuperLink is unavailable. Please check", "when it runs again (fedgp deploy serve)"),
        ("[code: 24] Node ID not found", "Node ID not found"),
    ],
)
def test_what_flower_says_comes_with_the_command_of_this_project(said, remedy, tmp_path):
    processes = SimpleNamespace(call=lambda *_: subprocess.CompletedProcess([], 1, said, ""))
    with pytest.raises(RunError, match=re.escape(remedy)):
        Flower(processes, tmp_path, "deployment").json("supernode", "register")


def test_an_expected_end_of_a_run_has_no_traceback(monkeypatch):
    flower = logging.getLogger("flwr")
    monkeypatch.setattr(flower, "filters", [])
    with pytest.raises(ConfigError) as end:
        server_app.app(InProcessGrid(client_app.app, {}, []), Context(1, 1, {}, RecordDict(), {"method": "none"}))
    for error, shown in ((end.value, False), (ValueError(), True)):
        said = flower.makeRecord("", logging.ERROR, "", 0, "", (), (type(error), error, None))
        assert bool(flower.filter(said)) == shown


@pytest.fixture
def coordinator(tmp_path, monkeypatch):
    monkeypatch.setattr(machines, "app_fingerprint", lambda: "ab" * 32)
    return Coordinator.create(tmp_path / "coordinator", "localhost", 8000, 8001)


def test_a_site_is_named_after_its_file_and_knows_only_its_files(tmp_path, coordinator):
    files = [tmp_path / "north.csv", tmp_path / "south.csv"]
    with pytest.raises(DataError, match=r"no such file: .*south\.csv"):
        join_sites(coordinator, tmp_path / "sites", files)
    for file in (*files, tmp_path / "north.test.csv"):
        file.write_text("x,y\n1,2\n")
    north, south = join_sites(coordinator, tmp_path / "sites", files)
    tables = {"data-path": str(files[0]), "test-path": str(tmp_path / "north.test.csv")}
    own = {"state-dir": "state", "site-key": "site-key", "trust": "trust.toml"}
    place = tmp_path / "sites" / "north"
    assert north.node_config == {"site": "north", **tables, **{key: str(place / name) for key, name in own.items()}}
    assert south.node_config.keys() == {"site", "data-path", *own}
    same = join_sites(coordinator, tmp_path / "twice", [files[0], files[0]])
    assert [site.name for site in same] == ["site1", "site2"]
    packed = tmp_path / "east.csv.gz"
    packed.touch()
    assert [site.name for site in join_sites(coordinator, tmp_path / "packed", [packed])] == ["east"]


def test_a_signal_to_the_launcher_ends_the_run_that_it_submitted(tmp_path):
    class Interrupted(Flower):
        ended: ClassVar[list[str]] = []

        def submit(self, *_):
            return "7"

        def stop(self, run):
            self.ended.append(run)

    with pytest.raises(SystemExit):
        Interrupted(SimpleNamespace(follow=lambda *_, **__: sys.exit(143)), tmp_path, "nowhere").run({})
    assert Interrupted.ended == ["7"]


SLEEP = "import time; time.sleep(300)"
# A child in another session, which ignores SIGTERM and whose parent ends at once; another without its environment.
ORPHAN = f"""
import subprocess, sys
sleeper = [sys.executable, "-c", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"]
subprocess.Popen(sleeper, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
"""
NAMELESS = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", "{SLEEP}"], start_new_session=True, env={{}})
"""


@pytest.fixture
def stranger():
    process = subprocess.Popen([sys.executable, "-c", SLEEP], env=os.environ | {MARK: "0" * 32})
    yield process
    process.kill()
    process.wait()


def wait_for(token, count):
    deadline = time.monotonic() + 20
    while len(found := family(token)) != count:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def require_alive_for(processes, seconds):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        processes.require_alive()
        time.sleep(0.05)


def test_ends_orphans_that_ignore_sigterm_and_nobody_else(tmp_path, stranger):
    with Processes({}, tmp_path, grace=1.0) as processes:
        processes.start("sleeper", [sys.executable, "-c", NAMELESS], tmp_path)
        assert processes.call([sys.executable, "-c", ORPHAN], tmp_path).returncode == 0
        found = wait_for(processes.token, 3)
    assert family("none", found) == set()
    assert stranger.poll() is None


def test_ends_a_process_without_its_environment_whose_parent_ended_before(tmp_path, capfd):
    script = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', '{SLEEP}'], env={{}}, "
    script += "stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL); "
    script += "print('\\x1b[92mstarted\\x1b[0m', flush=True); time.sleep(1)"
    with Processes({}, tmp_path, grace=1.0) as processes:
        processes.follow([sys.executable, "-c", script], tmp_path, hidden=())
        (orphan,) = processes._seen & family("none", processes._seen)
    assert family("none", {orphan}) == set()
    assert capfd.readouterr().out == "started\n"  # without Flower's colours, which garble files


def test_a_background_process_that_ended_is_reported_with_its_log(tmp_path):
    show = "import os, sys; print('no such', os.environ['COLOUR'], os.environ['SHAPE']); sys.exit(3)"
    with Processes({"COLOUR": "red", "SHAPE": "round"}, tmp_path) as processes:
        assert processes.call([sys.executable, "-c", show], tmp_path).stdout == "no such red round\n"
        processes.start("server", [sys.executable, "-c", show], tmp_path, {"SHAPE": "square"})
        with pytest.raises(RunError, match=r"server ended with status 3.*\nno such red square"):
            require_alive_for(processes, 20)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_everything_and_shows_in_the_status(tmp_path, number):
    script = f"""
import signal, sys
from pathlib import Path
from fedgp_flower.deploy.processes import Processes, interruptible
signal.signal({int(number)}, signal.SIG_DFL)  # whoever runs the tests in the background may have told us to ignore it
with interruptible(), Processes({{}}, Path({str(tmp_path)!r})) as processes:
    processes.start("sleeper", [sys.executable, "-c", "{SLEEP}"], Path("/"))
    print(processes.token, flush=True)
    processes.call([sys.executable, "-c", "{SLEEP}"], Path("/"))
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as launcher:
        token = launcher.stdout.readline().decode().strip()
        wait_for(token, 2)
        launcher.send_signal(number)
        assert launcher.wait(timeout=30) == 128 + number
    assert family(token) == set()
