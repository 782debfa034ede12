"""Exactly what a launch started is ended: no more, no less, whatever happens."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fedgp_flower.deploy.processes import TOKEN, Processes, family
from fedgp_flower.errors import RunError

SLEEP = "import time; time.sleep(300)"
# A child in another session, which ignores SIGTERM and whose parent ends at once; another without its environment.
ORPHAN = f"""
import subprocess, sys
sleeper = [sys.executable, "-c", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"]
subprocess.Popen(sleeper, start_new_session=True)
"""
NAMELESS = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", "{SLEEP}"], start_new_session=True, env={{}})
"""


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """Somebody else's launch."""
    process = subprocess.Popen([sys.executable, "-c", SLEEP], env=os.environ | {TOKEN: "0" * 32})
    yield process
    process.kill()
    process.wait()


def wait_for(token: str, count: int) -> set[psutil.Process]:
    deadline = time.monotonic() + 20
    while len(found := family(token)) != count:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def test_ends_orphans_that_ignore_sigterm_and_nobody_else(tmp_path: Path, stranger: subprocess.Popen[bytes]) -> None:
    with Processes({}, tmp_path, grace=1.0) as processes:
        processes.start("sleeper", [sys.executable, "-c", NAMELESS], tmp_path)
        assert processes.call([sys.executable, "-c", ORPHAN], tmp_path, capture=False).returncode == 0
        found = wait_for(processes.token, 3)
    assert family("none", found) == set()
    assert stranger.poll() is None


def test_a_background_process_that_ended_is_reported_with_its_log(tmp_path: Path) -> None:
    show = "import os, sys; print('no such', os.environ['COLOUR'], os.environ['SHAPE']); sys.exit(3)"
    with Processes({"COLOUR": "red", "SHAPE": "round"}, tmp_path) as processes:
        assert processes.call([sys.executable, "-c", show], tmp_path).stdout == "no such red round\n"
        processes.start("server", [sys.executable, "-c", show], tmp_path, {"SHAPE": "square"})
        wait_for(processes.token, 0)
        with pytest.raises(RunError, match=r"server ended with status 3.*\nno such red square"):
            processes.require_alive()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_everything_and_shows_in_the_status(tmp_path: Path, number: signal.Signals) -> None:
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
        assert launcher.stdout is not None
        token = launcher.stdout.readline().decode().strip()
        wait_for(token, 2)
        launcher.send_signal(number)
        assert launcher.wait(timeout=30) == 128 + number
    assert family(token) == set()
