"""Processes of a launch, marked by a token in their environment, so that exactly these are stopped.

Some start new sessions and some outlive their parent; all inherit the token.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from fedgp_flower.errors import RunError

MARK = "FEDGP_LAUNCH"
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
"""Escape sequences that Flower prints into files, too."""
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def family(token: str, seen: Collection[psutil.Process] = ()) -> set[psutil.Process]:
    """Return the processes with a token, their children, and those ``seen`` before; some lose their environment."""
    found, parents = set[psutil.Process](), dict[psutil.Process, int]()
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess), process.oneshot():
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            parents[process] = process.ppid()
            with suppress(psutil.AccessDenied, OSError):  # processes of other users
                if process in seen or process.environ().get(MARK) == token:
                    found.add(process)
    new = found
    while new:
        ids = {process.pid for process in new}
        new = {process for process, parent in parents.items() if parent in ids} - found
        found = found | new
    return found


def free_ports(count: int) -> list[int]:
    """Return free ports of the loopback interface."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


def require_free(host: str, port: int) -> None:
    """Raise RunError if a port of this machine cannot be opened."""
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise RunError(f"port {port} cannot be opened ({reason}); if another SuperLink has it, end that") from None


class Processes:
    """A context that stops every process started in it and their descendants, after ``grace`` seconds by force."""

    def __init__(self, environment: Mapping[str, str], logs: Path, grace: float = 10.0) -> None:
        self.token = uuid.uuid4().hex
        self.environment = {**os.environ, **environment, MARK: self.token}
        self.logs = logs
        self._grace = grace
        self._background: dict[str, subprocess.Popen[str]] = {}
        self._seen = set[psutil.Process]()

    def __enter__(self) -> Processes:
        self.logs.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *error: object) -> None:
        with _handled(signal.SIG_IGN):  # a second Ctrl-C must not interrupt the clean-up
            self.end()

    def start(self, name: str, command: Sequence[str], folder: Path, extra: Mapping[str, str] | None = None) -> None:
        """Start a background process in ``folder``, with ``extra`` variables; its output goes to a log file."""
        with (self.logs / f"{name}.log").open("ab") as log:
            output = {"stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True}
            settings = self._settings(folder, env={**self.environment, **(extra or {})}, **output)
            self._background[name] = subprocess.Popen(list(command), **settings)  # noqa: S603

    def call(self, command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
        """Run a command to its end and capture its output."""
        return subprocess.run(list(command), **self._settings(folder, capture_output=True), check=False)  # noqa: S603

    def follow(self, command: Sequence[str], folder: Path, hidden: Sequence[str]) -> None:
        """Run a command to its end and print its lines, except those with ``hidden`` words.

        The processes are noted at each line, because one that has lost its environment can outlive its parent.
        """
        settings = self._settings(folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        with subprocess.Popen(list(command), **settings) as process:  # noqa: S603
            try:
                for line in process.stdout or ():
                    if not any(words in line for words in hidden):
                        print(COLOURS.sub("", line), end="", flush=True)
                    self._seen = family(self.token, self._seen)
            except BaseException:
                process.kill()
                raise

    def _settings(self, folder: Path, **further: Any) -> dict[str, Any]:
        """Return the settings of a process; all commands are fixed and need no shell."""
        always = {"stdin": subprocess.DEVNULL, "text": True, "errors": "replace"}
        return {"cwd": folder, "env": self.environment, **always, **further}

    def require_alive(self) -> None:
        """Raise RunError if a background process has ended."""
        for name, process in self._background.items():
            if process.poll() is not None:
                log = "\n".join((self.logs / f"{name}.log").read_text(errors="replace").splitlines()[-20:])
                raise RunError(f"{name} ended with status {process.returncode}; the end of its log:\n{log}")

    def end(self) -> None:
        """Terminate every process of this launch, then kill those that remain."""
        living = self._seen
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline, asked = time.monotonic() + self._grace, set[psutil.Process]()
            while time.monotonic() < deadline:
                for process in self._background.values():
                    process.poll()  # reaps a child that has ended
                living = family(self.token, living)
                if not living:
                    for process in self._background.values():
                        process.wait()
                    return
                for one in living - asked:
                    with suppress(psutil.NoSuchProcess):  # it ended meanwhile
                        one.send_signal(number)
                asked |= living
                time.sleep(0.1)
        raise RunError(f"could not end processes {sorted(one.pid for one in living)}; end them by hand")


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn terminating signals into SystemExit (status 128 + number), so that ``finally`` and ``with`` run."""

    def leave(number: int, _: FrameType | None) -> None:
        os.write(2, b"interrupted; ending what was started\n")  # the signal may have interrupted print
        raise SystemExit(128 + number)

    with _handled(leave):
        yield


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> Iterator[None]:
    """Set a handler for the terminating signals that are not ignored already, as with ``nohup``."""
    before = {number: signal.getsignal(number) for number in _ENDING}
    heard = {number: old for number, old in before.items() if old is not signal.SIG_IGN}
    for number in heard:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in heard.items():
            signal.signal(number, old)
