"""A saved posterior of 4000 points: time and peak memory of 100 000 predictions.

The posterior of 8000 generated rows of eight inputs is loaded and predicts a table of 100 000 rows, means alone and
with intervals, each in a process of its own. The peak is that of the resident memory.
"""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from simulations.common import ALONE, Row

POINTS, INPUTS = 4000, 8


def alone(work: Callable[..., Any], *of: Any) -> Any:
    """What a function returns in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *of).result()


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
    options = {"method": "sgpr", "model.kernel": "rbf", "model.num-inducing": 8, "output-dir": folder, **ALONE}
    path = fg.run(frame, target="y", sites=2, num_rounds=1, options=options).path
    x = torch.from_numpy(draw.standard_normal((2 * POINTS, INPUTS)))
    section = ModelSection(kernel="rbf", lengthscale=2.0)
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


def study() -> Iterator[Row]:
    """A row for means alone, and for predictions with intervals."""
    with tempfile.TemporaryDirectory() as folder:
        path = alone(saved_run, folder)
        for means in (True, False):
            yield {"part": "means" if means else "predictions", **alone(predicting, path, means)}
