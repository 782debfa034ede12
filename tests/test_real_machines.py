"""The page docs/deploy.md to the letter, over a host name and between network namespaces; one kill of each kind."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest
from faults import alike, waves
from test_deploy_commands import HOST, blocks

from fedgp_flower.deploy.processes import free_ports
from fedgp_flower.files import read_arrays
from fedgp_flower.run.in_process import run_in_process
from fedgp_flower.run.user_config import complete_config, parse_assignments

pytestmark = [pytest.mark.long, pytest.mark.deployment, pytest.mark.timeout(3600)]
SITES = ("north", "south")
COORDINATOR, SITE, RUN = blocks()
TINY = ("model.num-inducing=5", "baselines.local-only=false", "baselines.linear=false", "wait-seconds=120")


class Federation:
    """Machines, each with a folder, that type the commands of the page under a name of this machine."""

    def __init__(self, root: Path, host: str, port: int) -> None:
        self.root, self.host, self.port = root, host, port
        self.inside: dict[str, list[str]] = {}
        """The words that run a command in the network of a machine."""
        self.background: list[subprocess.Popen[bytes]] = []
        for machine in ("coordinator", *SITES):
            (root / machine).mkdir()

    def words(self, machine: str, line: str) -> list[str]:
        """A line of the page as this machine types it."""
        line = line.replace(HOST, self.host).replace("north", machine if machine in SITES else "north")
        return [*self.inside.get(machine, []), "bash", "-c", line]

    def asked(self, machine: str, line: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        words, where = self.words(machine, line), self.root / machine
        return subprocess.run(words, cwd=where, capture_output=True, text=True, check=False, timeout=600)

    def typed(self, machine: str, line: str) -> str:
        """What a command prints, which must succeed."""
        done = self.asked(machine, line)
        logs = "".join(path.read_text() for path in self.root.glob("*/*.log") if path.stat().st_size < 50_000)
        assert done.returncode == 0, done.stdout + done.stderr + logs
        return done.stdout

    def begun(self, machine: str, line: str) -> subprocess.Popen[bytes]:
        """Start a command that stays."""
        words, where = self.words(machine, line), self.root / machine
        with (where / f"{len(self.background)}.log").open("wb") as log:
            process = subprocess.Popen(words, cwd=where, stdout=log, stderr=log, start_new_session=True)
        self.background.append(process)
        return process

    def set_up(self, serve: Mapping[str, str]) -> None:
        """All that comes before a run; ``serve``: another line for a machine's server than that of the page."""
        self.typed("coordinator", f"{COORDINATOR[0]} --port {self.port} --control {free_ports(1)[0]}")
        self.begun("coordinator", serve.get("coordinator", COORDINATOR[1]))
        awaited(lambda: "PROBLEM" not in self.asked("coordinator", "fedgp deploy doctor").stdout)
        for site in SITES:
            folder = self.root / site
            waves(40, len(site)).to_csv(folder / f"{site}.csv", index=False)
            shutil.copy(self.root / "coordinator" / "coordinator" / "invitations" / f"{site}.toml", folder)
            self.typed(site, SITE[0])
            shutil.copy(folder / site / f"{site}.pub", self.root / "coordinator")
        self.typed("coordinator", RUN[0])
        for site in SITES:
            self.begun(site, serve.get(site, SITE[1]))

    def processes(self, *words: str) -> list[psutil.Process]:
        """Those of this federation whose command line holds all the words."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                line = " ".join(process.cmdline()) + process.cwd()
                found += [process] * all(word in line for word in (str(self.root), *words))
        return found

    def end(self) -> None:
        """End every process, those whose parents are gone too."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self.background:
                if process.poll() is None:
                    os.killpg(process.pid, number)
            for process in self.processes():
                with contextlib.suppress(psutil.NoSuchProcess):  # its parent ended it in between
                    process.send_signal(number)
            time.sleep(3)
        for process in self.background:
            process.wait()


def awaited(what: Callable[[], object]) -> None:
    """Until something is so; a busy machine takes long."""
    begun = time.monotonic()
    while not what():
        assert time.monotonic() - begun < 600, what
        time.sleep(0.2)


@pytest.fixture
def federation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Federation]:
    """Everything on this machine, under a name that is not localhost."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    name = socket.gethostname()
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        try:
            socket.create_connection((name, port), timeout=2).close()
        except OSError:
            name = "localhost"
    if name == "localhost":
        pytest.skip("this machine has no name that leads to it")
    found = Federation(tmp_path, name, port)
    yield found
    found.end()


@pytest.fixture
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Federation]:
    """The coordinator in one network namespace and the sites in another, which knows it by name."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("making network namespaces needs root and iproute2")
    names = [f"fedgp-{word}-{os.getpid()}" for word in ("coordinator", "sites")]
    hosts = [Path("/etc/netns") / name / "hosts" for name in names]
    for name, path in zip(names, hosts, strict=True):
        path.parent.mkdir(parents=True)
        path.write_text(f"127.0.0.1 localhost\n10.77.0.1 {HOST}\n")
        ip(f"netns add {name}")
    ip(f"link add fedgp0 netns {names[0]} type veth peer name fedgp1 netns {names[1]}")
    for number, name in enumerate(names):
        ip(f"-n {name} address add 10.77.0.{number + 1}/24 dev fedgp{number}")
        for device in ("lo", f"fedgp{number}"):
            ip(f"-n {name} link set {device} up")
    found = Federation(tmp_path, HOST, 8000)
    for machine in ("coordinator", *SITES):
        found.inside[machine] = ["ip", "netns", "exec", names[machine in SITES]]
    yield found
    found.end()
    for name, path in zip(names, hosts, strict=True):
        ip(f"netns del {name}")
        shutil.rmtree(path.parent)


def ip(line: str) -> None:
    """A command of iproute2."""
    subprocess.run(["ip", *line.split()], check=True)


@pytest.mark.parametrize("where", ["federation", "apart"])
def test_the_page_to_the_letter(where: str, request: pytest.FixtureRequest) -> None:
    """A site that is revoked stays out; a SuperNode that is not admitted says why in its last lines."""
    federation: Federation = request.getfixturevalue(where)
    federation.set_up({})
    run = " ".join([RUN[1], "num-server-rounds=1 method=fsgp", *TINY])
    assert "report.html" in federation.typed("coordinator", run)
    status = federation.typed("coordinator", "fedgp deploy status")
    assert re.search(r"north +online", status)
    assert "finished:completed" in status
    federation.typed("south", "fedgp doctor south")
    federation.typed("coordinator", "fedgp deploy revoke south")
    assert "south" not in federation.typed("coordinator", "fedgp deploy status")
    assert federation.begun("south", SITE[1]).wait(600) == 1
    log = federation.root / "south" / f"{len(federation.background) - 1}.log"
    assert "its key is not registered" in log.read_text()  # its SuperExec may end after it


DYING = """
import os, signal, sys
from pathlib import Path
from flwr.supernode import fleet_http_connection as wire
from fedgp_flower.deploy.wrapped import supernode
make = wire.make_push_object_fn_protobuf
def dying(*words, **options):
    if Path("die").exists():
        Path("die").unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return make(*words, **options)
wire.make_push_object_fn_protobuf = dying
sys.argv[0] = "flower-supernode"
supernode()
"""
"""A SuperNode that dies when it has said that it has a reply, and before it has sent it."""
SERVE = """
from pathlib import Path
from fedgp_flower.deploy import machines
words, *rest = machines.SiteFolder.read(Path("south")).command()
machines.become(([words[0], str(Path("dying.py").resolve()), *words[4:]], *rest))
"""
AGAIN = "while true; do {}; sleep 2; done"


def assert_undisturbed(root: Path, keys: Sequence[str], folder: Path) -> None:
    """A run's posterior is that of the same keys in one process; only sites that were killed failed."""
    nodes = [{"data-path": str(root / site / f"{site}.csv"), "site": site} for site in SITES]
    calm = complete_config({**parse_assignments([*keys, "method=fsgp", "target=y"]), "output-dir": str(root)})
    expected = read_arrays(run_in_process(calm, nodes=nodes) / "posterior.safetensors")
    found = read_arrays(folder / "posterior.safetensors")
    assert found.keys() == expected.keys()
    alike(found, expected, rtol=1e-10, atol=1e-10)
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["sites"] == len(SITES)
    failures = {failure["site"]: failure["reason"] for failure in metrics["failures"]}
    assert "south" in failures
    assert "ClientApp stopped responding" in failures.pop("north", "ClientApp stopped responding")
    assert failures.keys() == {"south"}


def test_one_kill_of_each_kind(federation: Federation) -> None:
    """SuperNode in its reply, ClientApp, ServerApp, SuperLink and launcher: the end is that of an undisturbed run."""
    root = federation.root
    for name, content in (("dying.py", DYING), ("serve.py", SERVE)):
        (root / "south" / name).write_text(content)
    south = f"{sys.executable} serve.py"
    serve = {"coordinator": AGAIN.format(COORDINATOR[1]), "north": AGAIN.format(SITE[1]), "south": AGAIN.format(south)}
    federation.set_up(serve)
    keys = ["num-server-rounds=6", "method=fsgp", "evaluate-every=0", *TINY, "name=rough"]
    line = " ".join([RUN[1], *keys, "round.incomplete=repeat"])
    history = root / "coordinator" / "coordinator" / "results" / "rough" / "history.csv"

    def rounds() -> int:
        return len(history.read_text().splitlines()) - 1 if history.exists() else 0

    def round_after(before: int) -> None:
        awaited(lambda: rounds() > before)

    def apps() -> list[psutil.Process]:
        """ClientApps of the north: its SuperNode forks a SuperExec, and that forks them."""
        family = {process.pid: process.ppid() for process in federation.processes("wrapped supernode", "north")}
        return [psutil.Process(app) for app, superexec in family.items() if family.get(superexec) in family]

    def kill(*words: str) -> None:
        awaited(lambda: federation.processes(*words))
        for process in federation.processes(*words):
            process.kill()

    launcher_log = root / "coordinator" / f"{len(federation.background)}.log"
    launcher = federation.begun("coordinator", line)
    awaited(lambda: rounds() >= 1)
    (root / "south" / "south" / "die").touch()
    awaited(lambda: not (root / "south" / "south" / "die").exists())
    awaited(lambda: "is repeated: south missed it" in launcher_log.read_text())
    round_after(rounds())  # it has taken part again
    before = rounds()
    awaited(apps)
    for app in apps():
        app.kill()
    round_after(before)  # the SuperNode has another one started
    kill("flwr-serverapp")
    awaited(lambda: launcher.poll() is not None)
    assert launcher.returncode
    before = rounds()
    launcher = federation.begun("coordinator", f"{line} resume=true")
    round_after(before)
    kill("fedgp_flower.deploy.wrapped superlink")
    awaited(lambda: launcher.poll() is not None)
    awaited(lambda: "PROBLEM" not in federation.asked("coordinator", "fedgp deploy doctor").stdout)
    awaited(lambda: federation.asked("coordinator", "fedgp deploy status").stdout.count(" online ") == len(SITES))
    launcher = federation.begun("coordinator", f"{line} resume=true")
    awaited(lambda: "running" in federation.asked("coordinator", "fedgp deploy status").stdout)
    launcher.kill()
    awaited((history.parent / "posterior.safetensors").exists)
    assert_undisturbed(root, keys, history.parent)
