"""A federation set up by the commands of docs/deploy.md, as they stand there."""

from __future__ import annotations

import hashlib
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from faults import waves
from test_launch import handshake

from fedgp_flower import cli
from fedgp_flower.deploy import doctor, machines
from fedgp_flower.deploy.machines import Coordinator, SiteFolder
from fedgp_flower.deploy.pinned import guarded
from fedgp_flower.errors import ConfigError, PolicyError

HOST, APP = "superlink.example.org", "ab" * 32
PAGE = Path(__file__).parents[1] / "docs" / "deploy.md"


def blocks() -> list[list[str]]:
    """The commands of the page, block by block: the coordinator's, a site's, a run's."""
    found = re.findall(r"```sh\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return [block.strip().splitlines() for block in found]


def test_three_commands_at_a_site_and_four_at_the_coordinator_are_enough() -> None:
    coordinator, site, run = blocks()
    assert len(site) <= 3
    assert len(coordinator + run) <= 4


@pytest.fixture
def both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> tuple[Coordinator, SiteFolder]:
    """A coordinator and a site, made by the page's first commands."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machines, "app_fingerprint", lambda: APP)
    monkeypatch.setattr(doctor, "app_fingerprint", lambda: APP)
    waves(40, 0).to_csv("north.csv", index=False)
    coordinator, site, _ = blocks()
    cli.app(shlex.split(coordinator[0])[1:], standalone_mode=False)
    shutil.copy("coordinator/invitations/north.toml", ".")
    cli.app(shlex.split(site[0])[1:], standalone_mode=False)
    return Coordinator.read(Path("coordinator")), SiteFolder.read(Path("north"))


def test_what_init_and_join_make(both: tuple[Coordinator, SiteFolder], tmp_path: Path, capsys: Any) -> None:
    coordinator, site = both
    words, variables, folder = coordinator.command()
    assert words[1:10] == [
        "-m",
        "fedgp_flower.deploy.patience",
        "superlink",
        "--host",
        "0.0.0.0",
        "--port",
        "8000",
        "--database",
        "superlink.db",
    ]
    assert "--enable-supernode-auth" in words
    certificate = x509.load_pem_x509_certificate((folder / "server.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", HOST]
    assert variables["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    words, variables, folder = site.command()
    assert words[words.index("--superlink") + 1] == f"{HOST}:8000"
    assert variables["FEDGP_APP"] == APP
    assert variables["PATH"].startswith(str(folder / "bin"))
    assert (folder / "ca.crt").read_bytes() == (coordinator.folder / "ca.crt").read_bytes()
    for secret in (coordinator.folder / "ca.key", folder / "north", folder / "site-key"):
        assert secret.stat().st_mode & 0o777 == 0o600
    for unit in (coordinator.folder / "fedgp-superlink.service", folder / "fedgp-site-north.service"):
        assert "Restart=always" in unit.read_text()
    said = capsys.readouterr().out
    assert f"ok      table: {tmp_path / 'north.csv'}: 40 rows, 2 inputs" in said
    assert f"PROBLEM SuperLink: {HOST}:8000 cannot be reached" in said
    for again in (["deploy", "init", "--host", HOST], ["site", "join", "north.toml", "--data", "north.csv"]):
        with pytest.raises(ConfigError, match="exists; choose another folder"):
            cli.app(again, standalone_mode=False)


def test_a_new_certificate_is_trusted_through_the_old_invitation(both: tuple[Coordinator, SiteFolder]) -> None:
    import ssl

    coordinator, site = both
    before = (coordinator.folder / "server" / "server.pem").read_bytes()
    coordinator.rotate()
    assert (coordinator.folder / "server" / "server.pem").read_bytes() != before
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(coordinator.folder / "server" / "server.pem", coordinator.folder / "server" / "server.key")
    client = ssl.create_default_context(cafile=site.folder / "ca.crt")
    assert handshake(server, client, HOST) == "TLSv1.3"
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(server, client, "other.example.org")


def test_the_doctor_names_what_is_wrong(both: tuple[Coordinator, SiteFolder]) -> None:
    _, site = both
    (site.folder / "site-key").chmod(0o644)
    Path("north.csv").write_text("x1,y\n1,\n")
    found = {own.what: own for own in doctor.of_site(site.approve("cd" * 32))}
    assert "chmod 600" in found["keys"].said
    assert "north.csv" in found["table"].said
    assert "fedgp site approve" in found["app"].said
    assert not any(found[what].good for what in ("keys", "table", "app", "SuperLink"))
    with pytest.raises(SystemExit) as end:
        cli.main(["doctor", "north"])
    assert end.value.code == 2


def test_a_site_unpacks_no_other_app() -> None:
    unpacked: list[bytes] = []
    pinned = guarded(lambda content, **options: unpacked.append(content), hashlib.sha256(b"app").hexdigest())
    pinned(b"app", skip_prompt=True)
    with pytest.raises(PolicyError, match="fedgp site approve"):
        pinned(b"other", skip_prompt=True)
    assert unpacked == [b"app"]
