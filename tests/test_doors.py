"""Attacks on the machines of a federation: each is walked through here, and none passes."""

import asyncio
import contextlib
import hashlib
import ipaddress
import socket
import ssl
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli_w
from cryptography import x509
from faults import waves
from flwr.common.config import parse_config_args
from flwr.supercore.constant import TaskType
from flwr.supercore.fab import Fab

from fedgp_flower.deploy import doctor, machines
from fedgp_flower.deploy.credentials import certify, create_authority
from fedgp_flower.deploy.machines import Coordinator, SiteFolder
from fedgp_flower.deploy.wrapped import approving, explained, for_sites, reason_of
from fedgp_flower.errors import ConfigError, RunError

APP = "ab" * 32


@pytest.fixture
def invitation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a coordinator sends to the site `north`."""
    monkeypatch.chdir(tmp_path)
    for module in (machines, doctor):
        monkeypatch.setattr(module, "app_fingerprint", lambda: APP)
    waves(40, 0).to_csv("north.csv", index=False)
    return Coordinator.create(Path("coordinator"), "superlink.example.org", 8000, 8001).invite("north")


def asked(path: str, port: int) -> tuple[bool, list[int]]:
    """Whether a request reaches the application behind the public port 8000, and the status it is refused with."""
    reached, statuses = [], []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["path"])

    async def send(event: dict[str, Any]) -> None:
        statuses.extend([event["status"]] if "status" in event else [])

    scope = {"type": "http", "path": path, "server": ("10.0.0.1", port)}
    asyncio.run(for_sites(app, 8000)(scope, None, send))
    return bool(reached), statuses


def test_a_stranger_finds_no_door_but_that_of_supernodes() -> None:
    """With the certificate of the authority, which is not secret, anyone could start a run or take its task."""
    for path in ("/v1/control/start-run", "/v1/runtime/acquire-task", "/docs", "/v1/fleet/../control/x"):
        assert asked(path, 8000) == (False, [404])
        assert asked(path, 8001) == (True, [])
    for path in ("/v1/fleet/pull-messages", "/health"):
        assert asked(path, 8000) == (True, [])


def accepted(content: bytes, task: str, pin: str) -> bool:
    """Whether a SuperNode takes the bundle of a run, as Flower judges what our guard hands on."""
    handed: list[Fab] = []

    def pull(get_run: Any, get_fab: Any, trusted_entities: Any) -> int:
        assert trusted_entities
        get_run(1)
        handed.append(get_fab("hash", 1))
        return 1

    signed = lambda fab_hash, run_id: Fab(fab_hash, content, {"valid_license": "of the SuperLink"})  # noqa: E731
    asked_for = lambda run_id: SimpleNamespace(primary_task_type=task)  # noqa: E731
    approving(pull, pin)(get_run=asked_for, get_fab=signed, trusted_entities=None)
    return bool(handed[0].verifications.get("valid_license"))


def test_a_supernode_takes_the_approved_app_alone_and_only_as_a_client_app(capsys: Any) -> None:
    pin = hashlib.sha256(b"app").hexdigest()
    assert accepted(b"app", TaskType.SERVER_APP, pin)
    assert not accepted(b"another", TaskType.SERVER_APP, pin)
    assert "fedgp site approve" in capsys.readouterr().out
    for task in (TaskType.AGENT_APP, TaskType.MODEL, TaskType.CONNECTOR):
        assert not accepted(b"app", task, pin)
        assert not accepted(b"app", task, "any")
    assert accepted(b"another", TaskType.SERVER_APP, "any")


INJECTED = {
    'site = north" partition-id="0': {"site": 'north" partition-id="0'},
    "a line of a unit": {"site": "north\nExecStartPre=/bin/sh"},
    "another folder": {"site": "../north"},
    "a dot": {"site": ".."},
    "an option": {"superlink": "--insecure"},
    "any app": {"app": "any"},
    "a policy": {"policy": "/tmp/policy.toml"},
    "a number": {"site": 7},
    "no certificate": {"root-certificate": "trust me"},
}


@pytest.mark.parametrize("case", INJECTED)
def test_an_invitation_injects_nothing(case: str, invitation: Path) -> None:
    content = tomllib.loads(invitation.read_text()) | INJECTED[case]
    invitation.write_text(tomli_w.dumps(content))
    before = set(Path.cwd().rglob("*"))
    with pytest.raises(ConfigError, match=str(next(iter(INJECTED[case])))):
        SiteFolder.join(invitation, None, {"data": Path("north.csv")})
    assert set(Path.cwd().rglob("*")) == before


@pytest.mark.parametrize("name", ["../../escaped", "", "a b", "x" * 65, "north\n"])
def test_a_coordinator_invites_names_alone(name: str, invitation: Path) -> None:
    before = set(invitation.parents[2].rglob("*"))
    with pytest.raises(ConfigError, match="`site`"):
        Coordinator.read(Path("coordinator")).invite(name)
    assert set(invitation.parents[2].rglob("*")) == before


@pytest.mark.parametrize("name", ['my "rows".csv', "a' b.csv", "c\nd.csv", "e\\f.csv"])
def test_a_path_ends_no_value_of_the_node_configuration(name: str, invitation: Path) -> None:
    with pytest.raises(ConfigError, match="rename it"):
        SiteFolder.join(invitation, None, {"data": Path(name)})


def test_a_service_reads_its_files_alone(invitation: Path, tmp_path: Path) -> None:
    data = tmp_path / "100% of my rows.csv"
    data.write_bytes(Path("north.csv").read_bytes())
    site = SiteFolder.join(invitation, None, {"data": data})
    words, _, variables = site.command(9000)
    assert parse_config_args([words[words.index("--node-config") + 1]])["data-path"] == str(data)
    assert variables["FEDGP_APP"] == APP
    unit = (site.folder / "fedgp-site-north.service").read_text()
    assert "ProtectSystem=strict" in unit
    assert "ProtectHome=tmpfs" in unit
    [readable] = [line for line in unit.splitlines() if line.startswith("BindReadOnlyPaths=")]
    assert str(data).replace(" ", "\\x20").replace("%", "%%") in readable


def test_the_authority_lies_beside_the_superlink_not_in_it(invitation: Path) -> None:
    keys = [path.relative_to(Path.cwd()).as_posix() for path in Path.cwd().rglob("ca.key")]
    assert keys == ["coordinator-authority/ca.key"]
    assert Path("coordinator-authority").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("another", "days", "words"),
    [(False, -1, "fedgp deploy rotate"), (True, 9, "is not of the authority"), (False, 9, "")],
)
def test_a_certificate_that_is_no_good_ends_a_supernode_with_what_to_do(another, days, words, tmp_path) -> None:
    """The reason in the last line of a SuperNode, and what its doctor says."""
    server, authority = tmp_path / "server", tmp_path / ("another" if another else "")
    server.mkdir()
    authority.mkdir(exist_ok=True)
    for folder in {tmp_path, authority}:
        create_authority(folder, 10)
    certify(authority, server, "localhost", days)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server / "server.pem", server / "server.key")
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as pool:
        served = pool.submit(lambda: context.wrap_socket(listening.accept()[0], server_side=True).close())
        with pytest.raises(RunError, match=words) if words else contextlib.nullcontext():
            found = doctor._reachable(f"localhost:{listening.getsockname()[1]}", tmp_path / "ca.crt")
            assert "a certificate of the authority" in found
        served.exception()


def test_an_address_of_ipv6_is_certified_and_reached_without_its_brackets(tmp_path, monkeypatch) -> None:
    create_authority(tmp_path, 9)
    certify(tmp_path, tmp_path, "[2001:db8::1]", 9)
    certificate = x509.load_pem_x509_certificate((tmp_path / "server.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert ipaddress.ip_address("2001:db8::1") in names.get_values_for_type(x509.IPAddress)
    assert names.get_values_for_type(x509.DNSName) == ["localhost"]
    asked_for: list[object] = []

    def refuse(address: object, timeout: float) -> None:
        asked_for.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", refuse)
    with pytest.raises(RunError, match=r"\[2001:db8::1\]:8000 cannot be reached"):
        doctor._reachable("[2001:db8::1]:8000", tmp_path / "ca.crt")
    assert asked_for == [("2001:db8::1", 8000)]


def test_a_supernode_that_is_not_admitted_says_what_to_do() -> None:
    assert "fedgp deploy register" in reason_of("no connection\n[code: 2004] Failed to activate SuperNode.")
    assert reason_of("no connection\nConnection refused") == "Connection refused"


def test_a_running_supernode_says_that_it_was_revoked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower sends itself SIGINT then, as if somebody had stopped it."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr("os.kill", lambda *words: sent.append(words))
    connection, retry = SimpleNamespace(flwr_exit=lambda *_, **__: None), SimpleNamespace()
    reasons = explained(connection, retry)
    connection.flwr_exit(305, "no connection\nConnection refused")
    assert reasons == ["Connection refused"]
    for module in (connection, retry):
        module.os.kill(module.os.getpid(), 2)
        assert reasons == ["the coordinator has revoked its key"]
    assert sent == 2 * [(connection.os.getpid(), 2)]
