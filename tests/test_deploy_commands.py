"""A federation set up by the commands of docs/deploy.md, as they stand there."""

import contextlib
import hashlib
import json
import re
import shlex
import shutil
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509
from faults import waves
from flwr.common.config import parse_config_args

from fedgp_flower import cli
from fedgp_flower.deploy import doctor, machines, processes
from fedgp_flower.deploy.machines import Coordinator, SiteFolder
from fedgp_flower.deploy.submission import Flower
from fedgp_flower.errors import ConfigError, RunError
from fedgp_flower.privacy import audit
from fedgp_flower.privacy.keys import Trust

HOST, APP = "superlink.example.org", "ab" * 32
PAGE = Path(__file__).parents[1] / "docs" / "deploy.md"


def blocks() -> list[list[str]]:
    """The commands of the page, block by block: the coordinator's, a site's, a run's."""
    found = re.findall(r"```sh\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return [block.strip().splitlines() for block in found]


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
    words, folder, variables = coordinator.command()
    assert words[2:8] == ["fedgp_flower.deploy.wrapped", "superlink", "--host", "0.0.0.0", "--port", "8000"]
    assert "--enable-supernode-auth" in words
    certificate = x509.load_pem_x509_certificate((folder / "server.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", HOST]
    assert variables["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    words, folder, variables = site.command()
    assert words[words.index("--superlink") + 1] == f"{HOST}:8000"
    assert variables["FEDGP_APP"] == APP
    assert (folder / "ca.crt").read_bytes() == (coordinator.folder / "ca.crt").read_bytes()
    for secret in (tmp_path / "coordinator-authority" / "ca.key", site.secret, folder / "site-key"):
        assert secret.stat().st_mode & 0o777 == 0o600
    for machine, name in ((coordinator.folder, "superlink"), (folder, "site-north")):
        assert "Restart=always" in (machine / f"fedgp-{name}.service").read_text()
        [(service, content)] = yaml.safe_load((machine / "compose.yaml").read_text())["services"].items()
        assert service == name
        assert f"{machine}:{machine}" in content["volumes"]
        copied = re.findall(r"/fedgp/([\w.]+)", (machine / "Dockerfile").read_text())
        assert all((Path(content["build"]["context"]) / file).is_file() for file in ("pyproject.toml", *copied))
        assert Path(content["build"]["dockerfile"]) == machine / "Dockerfile"  # the project has none
    said = capsys.readouterr().out
    authority = re.findall(r"certificate of the authority (\S+),\nand runs only the app (\w+)", said)[0]
    doctor.of_coordinator(coordinator)
    assert "sites trust the authority {} and run the app {}\n".format(*authority) in capsys.readouterr().out
    assert f"ok      table: {tmp_path / 'north.csv'}: 40 rows, 3 columns" in said
    assert f"PROBLEM SuperLink: {HOST}:8000 cannot be reached" in said
    for again in (["deploy", "init", "--host", HOST], ["site", "join", "north.toml", "--data", "north.csv"]):
        with pytest.raises(ConfigError, match="exists; choose another folder"):
            cli.app(again, standalone_mode=False)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--host", "https://x.org"], "`superlink` = 'https://x.org:8000' does not look like"),
        (["--host", "krankenhäuser.org"], "`superlink` = 'krankenhäuser.org:8000' does not look like"),
        (["--host", HOST, "--invite", "north", "--invite", "a b"], "`site` = 'a b' does not look like"),
        (["--host", HOST, "--port", "8001"], "`--port` and `--control` are both 8001"),
    ],
)
def test_what_no_site_could_use_is_refused_before_anything_is_made(words, why, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(why)):
        cli.app(["deploy", "init", *words], standalone_mode=False)
    assert not list(tmp_path.iterdir())


def test_a_coordinator_without_sites_or_superlink_is_told_so(both: tuple[Coordinator, SiteFolder]) -> None:
    with pytest.raises(RunError, match="no site is registered; a site sends"):
        cli.app(["deploy", "run", "target=y"], standalone_mode=False)
    with pytest.raises(RunError, match="failed: the SuperLink does not answer; when it runs again"):
        cli.app(["deploy", "register", "north/north.pub"], standalone_mode=False)


def test_a_service_can_write_the_second_log(both: tuple[Coordinator, SiteFolder], tmp_path: Path) -> None:
    site = SiteFolder.join(both[0].invite("n"), None, {"data": Path("north.csv")}, "my copy.jsonl")
    copy = tmp_path / "my copy.jsonl"
    assert site.node_config["audit-copy"] == str(copy)
    assert copy.stat().st_mode & 0o777 == 0o600
    unit = (site.folder / "fedgp-site-n.service").read_text()
    assert f"\nBindPaths={site.folder} {tmp_path}/my\\x20copy.jsonl\n" in unit
    assert f'"{copy}:{copy}"' in (site.folder / "compose.yaml").read_text()
    with pytest.raises(ConfigError, match=r"`--audit-copy`: .*gone/copy.jsonl cannot be written \(No such file"):
        SiteFolder.join(both[0].invite("m"), None, {"data": Path("north.csv")}, "gone/copy.jsonl")
    assert not Path("m").exists()


@pytest.mark.parametrize("taken", ["port", "control"])
def test_a_port_that_is_taken_is_named_before_the_superlink_starts(taken: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        ports = dict(zip(("port", "control"), processes.free_ports(2), strict=True)) | {taken: other.getsockname()[1]}
        Coordinator.create(tmp_path / "coordinator", HOST, **ports)
        with pytest.raises(
            RunError, match=f"port {ports[taken]} cannot be opened .Address already in use.; if another SuperLink"
        ):
            cli.app(["deploy", "serve", "--folder", str(tmp_path / "coordinator")], standalone_mode=False)


@pytest.mark.parametrize("words", [["flower-superexec", "--a b"], []])
def test_a_forked_program_is_told_its_words_or_ends_with_who_forked_it(words: list[str]) -> None:
    code = "import sys; from fedgp_flower.deploy.wrapped import forked; start = forked(lambda: print(sys.argv))"
    code += f"; start({words})" if words else ""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == (str(words) if words else "")


def test_a_service_file_is_valid_in_a_folder_with_a_space(tmp_path: Path) -> None:
    """By systemd's checks, where they are installed; it runs as a user that the file beside it makes."""
    folder = tmp_path / "my 100% lab"
    folder.mkdir()
    machines.write_units(folder, "superlink", ["deploy", "serve", "--folder", str(folder)])
    [line] = re.findall(r"ExecStart=(.*)", (folder / "fedgp-superlink.service").read_text())
    assert shlex.split(line)[-1].replace("%%", "%") == str(folder)
    if shutil.which("systemd-analyze"):
        words = ["systemd-analyze", "verify", str(folder / "fedgp-superlink.service")]
        found = subprocess.run(words, capture_output=True, text=True, check=False)
        assert (found.returncode, found.stdout + found.stderr) == (0, "")
    assert "\nUser=fedgp-superlink\n" in (folder / "fedgp-superlink.service").read_text()
    if shutil.which("systemd-sysusers"):
        (tmp_path / "etc").mkdir()
        words = ["systemd-sysusers", f"--root={tmp_path}", str(folder / "fedgp-superlink.conf")]
        subprocess.run(words, check=True, capture_output=True)
        assert "fedgp-superlink:" in (tmp_path / "etc" / "passwd").read_text()


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> str | None:
    """A TLS handshake in memory; the version both agreed on."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    there = server.wrap_bio(to_server, to_client, server_side=True)
    here = client.wrap_bio(to_client, to_server, server_hostname=name)
    for side in (here, there, here, there):
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()
    return here.version()


def test_a_new_certificate_is_trusted_through_the_old_invitation(both: tuple[Coordinator, SiteFolder]) -> None:
    coordinator, site = both
    pair = [coordinator.folder / "server" / f"server.{kind}" for kind in ("pem", "key")]
    before = pair[0].read_bytes()
    cli.app(["deploy", "rotate"], standalone_mode=False)
    assert pair[0].read_bytes() != before
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(*pair)
    for name in (HOST, "localhost", "127.0.0.1"):
        assert handshake(server, ssl.create_default_context(cafile=site.folder / "ca.crt"), name) == "TLSv1.3"
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(server, ssl.create_default_context(cafile=site.folder / "ca.crt"), "other.example.org")


def test_status_and_revocation(both, monkeypatch, capsys) -> None:
    coordinator, _ = both
    coordinator.save_sites({"north": 7, "south": 8})
    (coordinator.folder / "results" / "first").mkdir(parents=True)
    (coordinator.folder / "results" / "first" / "history.csv").write_text("round,failures\n1,0\n2,1\n")
    node = {"node-id": "7", "status": "online", "online-at": "noon"}
    answers = {"supernode ls": {"nodes": [node]}, "supernode unregister": {}}
    answers["ls"] = {"runs": [{"run-id": "5", "status": "running"}]}
    asked: list[str] = []

    def answer(self: Flower, *words: str) -> dict[str, Any]:
        asked.append(" ".join(words))
        return next(reply for begin, reply in answers.items() if asked[-1].startswith(begin))

    monkeypatch.setattr(Flower, "json", answer)
    capsys.readouterr()
    cli.app(["deploy", "status"], standalone_mode=False)
    said = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    sites = ["north online since noon", "south not registered any more since never"]
    assert said == [*sites, "run 5: running", "first: round 2, 1 failures"]
    cli.app(["deploy", "revoke", "north"], standalone_mode=False)
    assert asked[-1] == "supernode unregister 7 deployment"
    assert coordinator.sites == {"south": 8}
    coordinator.save_sites({"north": 7, "south": 8})
    cli.app(["deploy", "revoke", "south"], standalone_mode=False)
    assert asked[-1] == "supernode ls deployment"  # the SuperLink does not know it any more
    with pytest.raises(ConfigError, match="'south' is not registered; registered are north"):
        cli.app(["deploy", "revoke", "south"], standalone_mode=False)


def test_keys_of_masks_are_exchanged_beside_the_server(both: tuple[Coordinator, SiteFolder], capsys: Any) -> None:
    _, site = both
    capsys.readouterr()
    printed = {}
    for name, file in (("north", "north/site-key"), ("south", "south-key"), ("west", "west-key")):
        cli.app(["site", "key", file], standalone_mode=False)
        printed[name] = re.findall(r"public key +(\S+)\nfingerprint +(.+)", capsys.readouterr().out)[0]
    started_with = site.node_config
    assert not Trust.of(started_with).keys
    for name, (public, _) in printed.items():
        doctor.of_site(site)
        cli.app(["site", "trust", "north/trust.toml", name, public], standalone_mode=False)
    told = capsys.readouterr().out
    assert "trust.toml names 2 sites, and a total needs 3, so this site answers nothing; add at least 1 more" in told
    assert told.splitlines()[-3:] == [f"{said}  {name}" for name, (_, said) in printed.items()]
    assert site.node_config == started_with  # so a SuperNode that runs already answers under masks too
    assert Trust.of(started_with).keys == {name: public for name, (public, _) in printed.items()}
    doctor.of_site(site)
    said = capsys.readouterr().out
    assert "ok      policy: the default policy" in said
    assert "ok      masks: answers leave only under masks, with south, west" in said


def test_the_doctor_names_a_hidden_column_that_is_not_there(both: tuple[Coordinator, SiteFolder], fedgp: Any) -> None:
    """A name that is misspelt hides nothing."""
    Path("hides.toml").write_text('hidden-columns = ["x2", "X1", "y"]')
    facts = {**both[1].facts, "policy": str(Path("hides.toml").resolve())}
    machines._write(both[1].folder / "site.toml", facts)
    out = fedgp("doctor", "north")[1]
    assert "PROBLEM policy: `hidden-columns` in hides.toml names X1, and north.csv has no such column\n" in out


def test_printed_commands_quote_folders_with_spaces(both: tuple[Coordinator, SiteFolder], capsys: Any) -> None:
    words = ["site", "join", str(both[0].invite("n")), "--data", "north.csv", "--folder", "a b"]
    assert cli.app(words, standalone_mode=False) == 1  # no SuperLink runs
    folder = Path("a b").resolve()
    said = capsys.readouterr().out
    assert f"fedgp site serve '{folder}'\n" in said
    assert f"enable --now '{folder}/fedgp-site-n.service'\n" in said


@pytest.mark.parametrize("name", ["site.toml", "state", "flower", "site-key", "node-key", "ca.crt"])
def test_a_site_may_have_any_name(both: tuple[Coordinator, SiteFolder], name: str) -> None:
    """None is that of another file in its folder. In a folder of an earlier version the node's key has the site's."""
    site = SiteFolder.join(both[0].invite(name), Path("new"), {"data": Path("north.csv")})
    words, folder, _ = SiteFolder.read(site.folder).command()
    assert "PRIVATE KEY" in (folder / words[words.index("--auth-supernode-private-key") + 1]).read_text()
    assert site.public.read_text().startswith("ecdsa-sha2")
    site.secret.rename(both[1].folder / "old")
    assert site.secret == site.folder / name


def test_what_a_site_adds_to_its_file_reaches_its_node_or_is_refused(both: tuple[Coordinator, SiteFolder]) -> None:
    _, site = both
    file = site.folder / "site.toml"
    joined = file.read_text()
    file.write_text(f'{joined}min-sites = 4\nmax-roster-changes = 0\naudit = "/logs/a.jsonl"\n')
    words, _, _ = SiteFolder.read(site.folder).command()
    given = parse_config_args([words[words.index("--node-config") + 1]])
    assert given == site.node_config | {"min-sites": 4, "max-roster-changes": 0, "audit": "/logs/a.jsonl"}
    for line in ("min-site = 4", 'min-sites = "4"', "trust = 'trust.toml'"):
        file.write_text(f"{joined}{line}\n")
        wrong = rf"site\.toml: .* wrong: {line.split()[0]}; allowed: site, .*min-sites \(wh"
        with pytest.raises(ConfigError, match=wrong):
            SiteFolder.read(site.folder)


def test_a_table_that_needs_keys_of_a_run_is_no_problem_of_its_site(both: object, fedgp: Any) -> None:
    Path("north.csv").write_text("id,admitted,age,died\n" + "".join(f"P{k},2024-01-{k},,no\n" for k in range(10, 20)))
    assert "ok      table: " in fedgp("doctor", "north")[1]


def test_the_doctor_names_what_is_wrong(both: tuple[Coordinator, SiteFolder], fedgp: Any) -> None:
    _, site = both
    (site.folder / "site-key").chmod(0o644)
    Path("north.csv").write_text("x1,y\n")
    line = {"line": 1, "refused": "`methods` forbids it", "time": "9999-01-01", "before": audit.BEGINNING}
    text = json.dumps(line)
    digest = hashlib.sha256(text.encode()).hexdigest()
    (site.folder / "state" / "audit.jsonl").write_text(f'{text[:-1]}, "hash": "{digest}"}}\n')
    Path("bad.toml").write_text("least_rows = 5")
    (site.folder / "trust.toml").write_text(f'[sites]\nnorth = "{APP}"\n')
    facts = {**site.facts, "app": "cd" * 32, "policy": str(Path("bad.toml").resolve())}
    machines._write(site.folder / "site.toml", facts)
    status, out, _ = fedgp("doctor", "north")
    assert status == 2
    found = dict(re.findall(r"PROBLEM (\w+): (.*)", out))
    assert found.keys() == {"keys", "table", "app", "SuperLink", "log", "policy", "masks"}
    similar = "did you mean `least-rows` or `least-cell`?"
    assert found["policy"] == f"bad.toml: unknown configuration key `least_rows`; {similar}"
    assert "trust.toml does not hold the key of this site; remove its line" in found["masks"]
    assert "chmod 600" in found["keys"]
    assert "north.csv" in found["table"]
    assert "fedgp site approve" in found["app"]
    assert "1 messages of the last 7 days were refused, the latest because `methods` forbids it" in found["log"]
