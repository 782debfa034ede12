"""Processor time of a local update of logistic regression: a Newton step in closed form against a plain PyTorch loop.

    OMP_NUM_THREADS=1 python simulations/benchmarks/pvi_logistic.py

The loop is what one writes first: mean and log standard deviation as parameters, draws of θ, autograd, Adam, on a batch
or on all rows. Both maximise the same local free energy around the same cavity, in one process, in turns. The page goes
to ``simulations/results/pvi_logistic_benchmark.md``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from fedgp_flower.methods.pvi.weights.glm import Context, expansion, glm_site, optimum
from sfvi_runs import RESULTS, write_table

from fedgp_flower.gp.gaussian import DiagonalGaussian, Gaussian
from fedgp_flower.gp.placement import limit_threads
from fedgp_flower.methods.pvi.linear import LinearSite, local_free_energy
from fedgp_flower.options import ModelSection

SETTINGS = {"1000 rows, batch 128": (1000, 128), "91 rows, all": (91, 91)}
INPUTS, DRAWS, STEPS, RATE = 30, 10, 500, 0.01
REPEATS = 20
CALLS = {"loop": 1, "all": 50, "batch": 50, "update": 3, "few": 10}
"""Calls that are timed together."""


def problem(rows: int) -> tuple[Any, DiagonalGaussian]:
    """A site of logistic regression and a cavity."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, INPUTS))
    y = (rng.uniform(size=rows) < 1 / (1 + np.exp(-x @ rng.standard_normal(INPUTS)))).astype(float)
    return glm_site(ModelSection(likelihood="bernoulli"), x, y), DiagonalGaussian.standard(1 + INPUTS)


def loop(site: Any, cavity: DiagonalGaussian, batch: int, steps: int) -> DiagonalGaussian:
    """Adam on (m, log s) with S draws of θ."""
    generator = torch.Generator().manual_seed(0)
    mean, log_sd = (torch.zeros(cavity.size, dtype=torch.float64, requires_grad=True) for _ in range(2))
    optimiser = torch.optim.Adam([mean, log_sd], RATE)
    rows = len(site.targets)
    for _ in range(steps):
        chosen = torch.randint(rows, (batch,), generator=generator) if batch < rows else slice(None)
        x, y = site.design[chosen], site.targets[chosen]
        draws = torch.randn(DRAWS, cavity.size, generator=generator, dtype=torch.float64)
        logits = (mean + log_sd.exp() * draws) @ x.T
        fit = torch.nn.functional.logsigmoid((2 * y - 1) * logits).sum(1).mean() * (rows / batch)
        loss = DiagonalGaussian(mean * (-2 * log_sd).exp(), -0.5 * (-2 * log_sd).exp()).kl(cavity) - fit
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return DiagonalGaussian.from_moments(mean.detach(), (2 * log_sd).exp().detach())


def seconds(function: Callable[[], object], calls: int) -> float:
    """Processor seconds of a call."""
    start = time.process_time()
    for _ in range(calls):
        function()
    return (time.process_time() - start) / calls


def on_batch(site: LinearSite, q: DiagonalGaussian, context: Context, batch: int) -> Gaussian:
    """A Newton step by rows drawn anew, in place of all of them."""
    chosen = torch.randint(len(site.targets), (batch,))
    drawn = replace(site, design=site.design.mT[:, chosen].mT, targets=site.targets[chosen])
    return expansion(drawn, q, context).step(1.0)


def main() -> None:
    """Steps and whole updates, least of several repeats."""
    limit_threads(1)
    lines: list[tuple[Any, ...]] = []
    for name, (rows, batch) in SETTINGS.items():
        site, cavity = problem(rows)
        around, best = Context.of(cavity), optimum(site, cavity, cavity, steps=100)
        q = loop(site, cavity, batch, STEPS)
        gap = best.free_energy - float(local_free_energy(site, q, cavity))
        ends = (optimum(site, cavity, cavity, steps=k).free_energy for k in range(100))
        few = next(k for k, end in enumerate(ends) if end >= best.free_energy - gap)
        timed: dict[str, Callable[[], object]] = {
            "loop": lambda b=batch, s=site, c=cavity: loop(s, c, b, 50),
            "all": lambda s=site, c=cavity, a=around: expansion(s, c, a).step(1.0),
            "batch": lambda b=batch, s=site, c=cavity, a=around: on_batch(s, c, a, b),
            "update": lambda s=site, c=cavity: optimum(s, c, c, steps=100),
            "few": lambda s=site, c=cavity, k=few: optimum(s, c, c, steps=k),
        }
        times: dict[str, float] = dict.fromkeys(timed, np.inf)
        for _ in range(REPEATS):  # in turns, so that a busy machine slows all
            for what, work in timed.items():
                times[what] = min(times[what], 1e3 * seconds(work, CALLS[what]))
        step = times["loop"] / 50
        lines.append((name, "PyTorch loop", step, 1.0, STEPS, step * STEPS, gap))
        lines.append(("", "Newton, all rows", times["all"], times["all"] / step, best.iterations, times["update"], 0.0))
        short = best.free_energy - optimum(site, cavity, cavity, steps=few).free_energy
        lines.append(("", "the same, as good as the loop", np.nan, np.nan, few, times["few"], short))
        if batch < rows:
            share = times["batch"] / step
            lines.append(("", f"Newton, {batch} rows drawn", times["batch"], share, None, np.nan, np.nan))
    columns = ("site", "update", "ms a step", "of the loop's", "steps", "ms an update", "nats below the optimum")
    words = (
        "Made by `OMP_NUM_THREADS=1 python simulations/benchmarks/pvi_logistic.py`: processor time, least of",
        f"{REPEATS} repeats in turns, one thread; {INPUTS} inputs, mean-field q, the loop with {DRAWS} draws of θ and",
        f"Adam at {RATE}. A Newton step takes all rows and no draws, so that few are needed: *as good as the loop* is",
        "the update that stops where its free energy is that of the loop's end. A step on drawn rows is timed beside",
        "it and not used: noise of the draws would keep an update from its optimum, and sites from global VI.",
    )
    table = pd.DataFrame(lines, columns=list(columns)).astype({"steps": "Int64"})
    page = RESULTS / "pvi_logistic_benchmark.md"
    write_table(page, "A local update of logistic regression", words, table)
    print(page.read_text())


if __name__ == "__main__":
    main()
