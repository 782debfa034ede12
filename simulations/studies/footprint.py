"""How far a reader walks through one round.

Files of the application, functions and changes of file in the second round of a run of three sites in one process,
evaluation aside. A function is one with a name: comprehensions and lambdas belong to the function that has them. A
change of file is a call from one file of the application into another, or the return from it.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from types import FrameType

from fedgp_flower.run.in_process import run_in_process
from simulations import common
from simulations.common import ROOT, Row

APPLICATION = tuple(f"{ROOT}/{name}/" for name in ("fedgp_flower", "strategies"))


class Walk:
    """What a round calls."""

    def __init__(self) -> None:
        self.functions: set[str] = set()
        self.edges: Counter[tuple[str, str]] = Counter()
        self.rounds = 0

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """A function is entered."""
        if event == "call" and frame.f_code.co_filename.startswith(APPLICATION):
            if not frame.f_code.co_name.startswith("<"):
                self.functions.add(f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}")
            caller = frame.f_back
            while caller is not None and not caller.f_code.co_filename.startswith(APPLICATION):
                caller = caller.f_back
            if caller is not None and caller.f_code.co_filename != frame.f_code.co_filename:
                self.edges[caller.f_code.co_qualname, frame.f_code.co_qualname] += 2

    def progress(self, *_: object) -> None:
        """A round has ended: the next one is the second, or nothing more is watched."""
        self.rounds += 1
        sys.setprofile(self if self.rounds == 1 else None)


def study(methods: tuple[str, ...] = ("sgpr", "pvi"), most: int = 5) -> Iterator[Row]:
    """One row a method, then the calls that change the file most often."""
    for method in () if common.CHECKING else methods:
        walk = Walk()
        keys = {"method": method, "dataset": "diabetes", "num-server-rounds": 3, "evaluate-every": 0}
        keys |= {"keep-predictions": False, "baselines.local-only": False, "baselines.pooled": False}
        with tempfile.TemporaryDirectory() as folder:
            run_in_process({**keys, "output-dir": folder}, 3, (), walk.progress)
        files = {name.partition(":")[0] for name in walk.functions}
        row: Row = {"method": method, "files": len(files), "functions": len(walk.functions)}
        yield {**row, "changes of file": walk.edges.total()}
        for (caller, called), times in walk.edges.most_common(most):
            yield {"table": f"{method}: most changes", "from": caller, "to": called, "times": times}
