"""Files, functions and changes of file that one default round of three sites touches: how far a reader has to walk.

    python simulations/footprint.py [method=sgpr …]

A change of file is a call from one file of the project into another. Rounds before the second one warm up.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

from fedgp_flower.run.in_process import run_in_process

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tuple(f"{ROOT}/{name}/" for name in ("fedgp_flower", "strategies"))


class Walk:
    """Counts calls while it is on."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.functions: set[Any] = set()
        self.changes = 0
        self.rounds = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """A function of the project is entered."""
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PROJECT):
            return
        self.files.add(code.co_filename)
        self.functions.add(code)
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(PROJECT):
            caller = caller.f_back
        self.changes += caller is not None and caller.f_code.co_filename != code.co_filename

    def progress(self, *_: object) -> None:
        """The second round is watched."""
        self.rounds += 1
        sys.setprofile(self if self.rounds == 1 else None)


def main() -> None:
    """Run and print."""
    keys: dict[str, Any] = {
        "dataset": "diabetes",
        "evaluate-every": 0,
        "num-server-rounds": 3,
        "keep-predictions": False,
    }
    keys |= dict(word.split("=", 1) for word in sys.argv[1:])
    walk = Walk()
    with tempfile.TemporaryDirectory() as folder:
        run_in_process(
            {**keys, "output-dir": folder, "baselines.local-only": False, "baselines.pooled": False},
            3,
            (),
            walk.progress,
        )
    print(f"{len(walk.files)} files, {len(walk.functions)} functions, {walk.changes} changes of file")
    for name in sorted(walk.files):
        print("  ", Path(name).relative_to(ROOT))


if __name__ == "__main__":
    main()
