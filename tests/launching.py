"""The launcher as a separate process, watched with everything that descends from it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedgp_flower.deploy.processes import ProcessEntry, belonging, snapshot

SMALL = ["num-server-rounds=2", "model.num-inducing=8", "evaluate-every=0", "baselines.pooled=false"]


class Launch:
    """The launcher with ``words`` of the run configuration; ``children`` are all processes that descend from it."""

    def __init__(self, folder: Path, *words: str, small: Sequence[str] = SMALL) -> None:
        self.folder = folder
        command = [
            sys.executable,
            "-m",
            "fedgp_flower.cli",
            "simulate",
            "--sites",
            "2",
            "name=run",
            f"output-dir={folder}",
        ]
        command += [*small, *words]
        with (folder / "out.txt").open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=folder)
        self.children: dict[int, ProcessEntry] = {}

    def watch(self, until: str = "") -> str:
        """Note every descendant until the launcher ends or its output holds ``until``; returns the output."""
        while self.process.poll() is None and not (until and until in self.output):
            table = snapshot("")
            mine = {pid: entry for pid, entry in table.items() if pid == self.process.pid}
            self.children |= {p: e for p, e in belonging(table, self.children | mine).items() if p not in mine}
            time.sleep(0.2)
        return self.output

    @property
    def output(self) -> str:
        return (self.folder / "out.txt").read_text(errors="replace")

    def survivors(self) -> list[int]:
        table = snapshot("")
        return list(belonging(table, self.children))


@contextmanager
def scratch_left_empty(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where Ray keeps its sockets during a run; nothing of it may stay."""
    scratch = Path(os.path.realpath("/tmp")) / f"t{os.getpid()}"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    yield scratch
    left = list(scratch.glob("fedgp-*"))
    subprocess.run(["rm", "-rf", str(scratch)], check=True)
    assert left == []
