"""Peak memory of KIN40K with 40 000 rows, M = 512, ten sites: nothing of size N × N is ever made.

    python simulations/benchmarks/memory.py --data-dir DIR

Each part runs in a process of its own and reports the peak of its resident memory. Server and all ten sites share that
process, so its peak bounds that of any worker. "imports" is what Python, torch and Flower take before any work.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

RESULT = Path(__file__).parent.parent / "results" / "memory.md"
LIMIT = 2.0  # GiB


def peak_gib() -> float:
    """Peak resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def imports(data_dir: str) -> float:
    """Nothing but the imports."""
    del data_dir
    import fedgp_flower.cli
    import fedgp_flower.client_app
    import fedgp_flower.server_app  # noqa: F401

    return peak_gib()


def run(data_dir: str, **own: bool | int | float | str) -> float:
    """A short run over all rows."""
    from fedgp_flower.run.in_process import run_in_process

    with tempfile.TemporaryDirectory() as folder:
        keys: dict[str, bool | int | float | str] = {
            "dataset": "kin40k",
            "data-dir": data_dir,
            "test-fraction": 0.0,
            "model.num-inducing": 512,
            "num-server-rounds": 2,
            "evaluate-every": 0,
            "baselines.local-only": False,
            "baselines.pooled": False,
            "baselines.max-evaluations": 2,
            "output-dir": folder,
        }
        run_in_process(keys | own, 10)
    return peak_gib()


def exact(data_dir: str) -> float:
    """Exact mode: sums and shares of the gradient."""
    return run(data_dir)


def average(data_dir: str) -> float:
    """Averaging: local steps, all rows of a site in one batch."""
    return run(data_dir, **{"fsgp.objective": "average"})


def pooled(data_dir: str) -> float:
    """The pooled baseline: all 40 000 rows at one place."""
    return run(data_dir, method="pooled", **{"test-fraction": 0.02})


PARTS = {"imports": imports, "fsgp exact": exact, "fsgp average": average, "pooled baseline": pooled}


def main() -> None:
    """Measure every part, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", default=os.environ.get("FEDGP_DATA", "."))
    chosen = parser.parse_args()
    lines = ["# Peak memory: KIN40K, 40 000 rows, M = 512, ten sites", ""]
    lines += ["Made by `python simulations/benchmarks/memory.py`; server and all sites in one process.", ""]
    lines += ["| part | peak, GiB | of the limit of 2 GiB a worker |", "| --- | --- | --- |"]
    for name, part in PARTS.items():
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            peak = pool.submit(part, chosen.data_dir).result()
        lines += [f"| {name} | {peak:.2f} | {peak / LIMIT:.0%} |"]
        print(lines[-1], flush=True)
    RESULT.write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
