"""Flower's programs with settings that a federation on real machines needs and Flower has no option for.

A SuperNode forks its SuperExec, which forks its ClientApps: they share the memory of imported modules.
"""
# ruff: noqa: PLC0415

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flwr.supercore.fab import Fab
    from flwr.supercore.run import Run

HEARTBEAT = 10  # seconds instead of 30; a SuperLink needs at least 10
UPLOAD = 30  # seconds instead of 180
POLL = 0.5  # seconds between polls for a message instead of 3
PIN = "FEDGP_APP"
"""Environment variable with the fingerprint of the approved app, or ``any``."""
CONTROL = "FEDGP_CONTROL"
"""Environment variable with the local port for operators."""
REASONS = {
    "Failed to activate": "its key is not registered (the coordinator: fedgp deploy register NAME.pub), or another"
    " SuperNode with the same key is running, or was killed less than half a minute ago: start it again then",
    "certificate has expired": "the SuperLink's certificate has expired (the coordinator: fedgp deploy rotate, then"
    " start the SuperLink again)",
    "certificate verify failed": "the SuperLink's certificate is not of the authority in the invitation, or is for"
    " another host name; ask the coordinator for a new invitation",
}
LIBRARIES = ("flwr.clientapp", "flwr.supernode.cli", "flwr.supernode.runtime.run_clientapp", "gpytorch")
OURS = ("fedgp_flower", "strategies")


def superlink() -> None:
    """Run ``flower-superlink`` on the loopback interface; its public address only answers authenticated SuperNodes."""
    import uvicorn
    from flwr.supercore.corestate import sql_corestate

    flower_superlink = importlib.import_module("flwr.superlink.cli.flower_superlink")
    words = dict(itertools.pairwise(sys.argv))
    public = words["--host"], int(words["--port"])
    private = "127.0.0.1", int(os.environ[CONTROL])
    sys.argv[sys.argv.index("--host") + 1], sys.argv[sys.argv.index("--port") + 1] = private[0], str(private[1])

    def run(app: Any, host: str, port: int, reload: bool, workers: int, **options: Any) -> None:
        server = uvicorn.Server(uvicorn.Config(for_sites(app, public[1]), host, port, **options))
        bound = [uvicorn.Config(app, *address).bind_socket() for address in ((host, port), public)]
        server.run(sockets=bound)

    vars(flower_superlink)["uvicorn"] = SimpleNamespace(run=run)
    vars(sql_corestate)["OBJECT_PUSH_SESSION_TTL_SECONDS"] = UPLOAD
    flower_superlink.flower_superlink()


def for_sites(app: Callable[..., Any], port: int) -> Callable[..., Any]:
    """Return an application that answers only requests of SuperNodes on this port."""

    async def served(scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        public = scope["type"] == "http" and scope["server"][1] == port
        if public and not re.fullmatch("/v1/fleet/[a-z-]+|/health", str(scope["path"])):
            await send({"type": "http.response.start", "status": 404, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        else:
            await app(scope, receive, send)

    return served


def supernode() -> None:
    """Run Flower's ``flower-supernode`` for one app; if it stops by itself, its last line says why."""
    from flwr.supercore import heartbeat
    from flwr.supercore.retry import http_retry
    from flwr.supernode import fleet_http_connection, start_client_internal
    from flwr.supernode.cli import flower_supernode

    start_superexec = forked(superexec)
    for module in (heartbeat, fleet_http_connection):
        vars(module)["HEARTBEAT_DEFAULT_INTERVAL"] = HEARTBEAT
    vars(start_client_internal).update(
        _pull_and_store_message=approving(vars(start_client_internal)["_pull_and_store_message"], os.environ[PIN]),
        _verify_fab=lambda fab, trusted: True,  # approving() verifies it
        subprocess=SimpleNamespace(Popen=start_superexec),
        time=SimpleNamespace(sleep=lambda seconds: time.sleep(min(seconds, POLL))),
    )
    reasons = explained(fleet_http_connection, http_retry)
    try:
        flower_supernode()
    finally:
        for reason in reasons:
            print(f"this SuperNode has stopped: {reason}", flush=True)


def explained(connection: ModuleType, retry: ModuleType) -> list[str]:
    """Make the modules of a SuperNode's connection and its retries note in a list why they end the SuperNode."""
    leave, reasons = connection.flwr_exit, list[str]()

    def leaving(code: int, message: str, **rest: Any) -> None:
        reasons.append(reason_of(message))
        leave(code, message, **rest)

    def refused(process: int, number: int) -> None:
        reasons[:] = ["the coordinator has revoked its key"]
        os.kill(process, number)

    vars(connection)["flwr_exit"] = leaving
    for module in (connection, retry):
        vars(module)["os"] = SimpleNamespace(getpid=os.getpid, kill=refused)
    return reasons


def reason_of(message: str) -> str:
    """Return the reason and the remedy for a SuperNode's missing connection, from Flower's message."""
    return next((words for shown, words in REASONS.items() if shown in message), message.splitlines()[-1])


def approving(pull: Callable[..., int | None], pin: str) -> Callable[..., int | None]:
    """Wrap Flower's ``pull`` of a message so that it accepts only the approved app, and only as a ClientApp."""
    from flwr.supercore.constant import TaskType

    def pulled(*, get_run: Callable[[int], Run], get_fab: Callable[[str, int], Fab], **rest: Any) -> int | None:
        foreign: set[int] = set()

        def run_of(run_id: int) -> Run:
            run = get_run(run_id)
            if run.primary_task_type not in ("", TaskType.SERVER_APP, TaskType.CLIENT_APP):
                foreign.add(run_id)
            return run

        def fab_of(fab_hash: str, run_id: int) -> Fab:
            fab = get_fab(fab_hash, run_id)
            found = hashlib.sha256(fab.content).hexdigest()
            approved = pin in ("any", found) and run_id not in foreign
            if not approved:
                print(
                    f"refused: this site runs the app {pin[:16]}… and received {found[:16]}…; if its owner approves the"
                    " new one: fedgp site approve",
                    flush=True,
                )
            return replace(fab, verifications={"valid_license": "approved by its owner"} if approved else {})

        return pull(get_run=run_of, get_fab=fab_of, **{**rest, "trusted_entities": {"owner": pin}})

    return pulled


def forked(program: Callable[[], None]) -> Callable[[list[str]], None]:
    """Fork a process now, while there are no threads. It waits for its arguments, then runs a program."""
    hears, tells = os.pipe()
    if not os.fork():
        os.close(tells)
        with os.fdopen(hears) as file:
            words = file.read()
        if words:
            sys.argv = json.loads(words)
            program()
        sys.exit()
    os.close(hears)

    def start(words: list[str]) -> None:
        with os.fdopen(tells, "w") as file:
            json.dump(words, file)

    return start


def superexec() -> None:
    """Run Flower's ``flower-superexec``, which starts ClientApps by forking."""
    from flwr.supercore.cli.flower_superexec import flower_superexec
    from flwr.supercore.constant import TaskType
    from flwr.supercore.superexec import run_superexec
    from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor
    from flwr.supercore.superexec.executor.types import LaunchResult
    from flwr.supercore.superexec.plugin.base_exec_plugin import AutoExecPlugin

    def launch(spec: Any) -> LaunchResult:
        if not os.fork():
            become_clientapp(spec)
        return LaunchResult.accepted()

    for name in LIBRARIES:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    AutoExecPlugin.supported_task_types = frozenset({TaskType.CLIENT_APP})
    executor = SubprocessExecutor()
    vars(executor)["launch"] = launch
    vars(run_superexec)["get_executor"] = lambda *_, **__: executor
    flower_superexec()


def become_clientapp(spec: Any) -> None:
    """Run Flower's ``flwr-clientapp`` in this fork of the SuperExec, and exit."""
    from flwr.supernode.cli import flwr_clientapp

    status = 1
    try:
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
            del sys.modules[name]  # the app imports the code of its bundle, not the installed one
        words = ["--runtime-api-address", spec.runtime_api_address, "--token", spec.token]
        words += ["--insecure"] if spec.insecure else ["--root-certificates", spec.root_certificates_path]
        sys.argv = ["flwr-clientapp", *words, "--parent-pid", str(os.getppid())]
        flwr_clientapp()
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    finally:
        sys.stdout.flush()
        os._exit(status)


PROGRAMS = {"superlink": superlink, "supernode": supernode}

if __name__ == "__main__":
    program = PROGRAMS[sys.argv[1]]
    sys.argv[:2] = [f"flower-{sys.argv[1]}"]
    program()
