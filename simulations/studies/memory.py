"""Peak memory: KIN40K, 40 000 rows, M = 512, ten sites.

Each part runs in a process of its own and reports the peak of its resident memory. Server and all ten sites share that
process, so its peak bounds that of any worker. Imports are what Python, torch and Flower take before any work.
"""

from __future__ import annotations

import resource
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from simulations.common import ALONE, Row, data_dir

LIMIT = 2.0
"""GiB that a worker may take."""
PARTS: Mapping[str, dict[str, Any]] = {
    "imports": {},
    "sgpr": {"method": "sgpr"},
    "fsgp": {"method": "fsgp"},
    "pooled": {"method": "pooled", "test-fraction": 0.02, "baselines.max-evaluations": 2},
}


def peak(keys: dict[str, Any], folder: str, data: str) -> float:
    """GiB after a short run over all rows, or after the imports alone where there are no keys."""
    import fedgp_flower.cli
    import fedgp_flower.client_app  # noqa: F401
    from fedgp_flower.run.in_process import run_in_process

    flat = {"dataset": "kin40k", "data-dir": data, "test-fraction": 0.0, "model.num-inducing": 512, **ALONE}
    flat |= {"num-server-rounds": 2, "evaluate-every": 0, "output-dir": folder}
    if keys:
        run_in_process(flat | keys, 10)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def study(parts: tuple[str, ...] = tuple(PARTS)) -> Iterator[Row]:
    """A row for each part."""
    for name in parts:
        with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            found = pool.submit(peak, PARTS[name], folder, str(data_dir())).result()
        yield {"part": name, "peak, GiB": found, "of the limit of 2 GiB": f"{found / LIMIT:.0%}"}
