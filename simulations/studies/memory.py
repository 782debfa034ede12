"""Peak memory: KIN40K, 40 000 rows, M = 512, ten sites; and a saved posterior of 4000 points.

Each part runs in a process of its own and reports the peak of its resident memory. Server and all ten sites share that
process, so its peak bounds that of any worker. Imports are what Python, torch and Flower take before any work.
`predict`: the posterior of 8000 generated rows of eight inputs at M = 4000 is loaded and predicts 100 000 rows.
"""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from simulations.common import ALONE, Row, data_dir

POINTS, INPUTS = 4000, 8
LIMIT = 2.0
"""GiB that a worker may take."""
PARTS: Mapping[str, dict[str, Any]] = {
    "imports": {},
    "sgpr": {"method": "sgpr"},
    "fsgp": {"method": "fsgp"},
    "pooled": {"method": "pooled", "test-fraction": 0.02, "baselines.max-evaluations": 2},
}


def alone(work: Callable[..., Any], *of: Any) -> Any:
    """What a function returns in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *of).result()


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


def saved_run(folder: str) -> Path:
    """The folder of a small run, with a posterior of many points in the place of its posterior."""
    import torch

    import fedgp_flower as fg
    from fedgp_flower.gp.models import SparseGP
    from fedgp_flower.gp.sparse import pooled_sums
    from fedgp_flower.options import ModelSection
    from fedgp_flower.run.artefacts import SEALS, RunFolder, read_run
    from strategies.pooled_bound import posterior_at, saved

    draw = np.random.default_rng(0)
    frame = pd.DataFrame(draw.standard_normal((200, INPUTS + 1)), columns=[*(f"x{n}" for n in range(INPUTS)), "y"])
    options = {"method": "sgpr", "model.num-inducing": 8, "output-dir": folder, **ALONE}
    path = fg.run(frame, target="y", sites=2, num_rounds=1, options=options).path
    x = torch.from_numpy(draw.standard_normal((2 * POINTS, INPUTS)))
    section = ModelSection(lengthscale=2.0)
    model = SparseGP(section, x[:POINTS])
    sums = pooled_sums(model, x, torch.sin(2 * x[:, 0]) * x[:, 1])
    found, before = saved(posterior_at(model.to_arrays(), sums), section), read_run(path).saved
    assert before is not None
    RunFolder(path, "").write_posterior(replace(before, arrays={**before.arrays, **found.arrays}))
    (path / SEALS).unlink()
    return path


def predicting(path: Path, means: bool) -> Row:
    """Seconds and the peak, from the folder of a run to predictions of a table."""
    import fedgp_flower as fg

    begun = time.perf_counter()
    table = np.random.default_rng(1).standard_normal((100_000, INPUTS))
    frame = pd.DataFrame(table, columns=[f"x{n}" for n in range(INPUTS)])
    posterior = fg.load_run(path).posterior
    if means:
        posterior.mean(frame)
    else:
        posterior.predict(frame)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"seconds": time.perf_counter() - begun, "peak, GiB": peak}


def study(parts: tuple[str, ...] = (*PARTS, "predict")) -> Iterator[Row]:
    """A row for each part."""
    if "predict" in parts:
        with tempfile.TemporaryDirectory() as folder:
            path = alone(saved_run, folder)
            for means in (True, False):
                words = f"100 000 {'means' if means else 'predictions'} at M = {POINTS}"
                yield {"table": "saved posterior", "part": words, **alone(predicting, path, means)}
    for name in (part for part in parts if part in PARTS):
        with tempfile.TemporaryDirectory() as folder:
            found = alone(peak, PARTS[name], folder, str(data_dir()))
        yield {"part": name, "peak, GiB": found, "of the limit of 2 GiB": f"{found / LIMIT:.0%}"}
