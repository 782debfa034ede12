"""Three laboratories look for the best conditions of one process together, and no measurement leaves a laboratory.

Each has measured a corner of the domain. In every round an acquisition function of BoTorch is optimised on the
federated posterior and proposes an experiment to each laboratory; beside it, the same with one GP of all measurements
(pooled), and with each laboratory's own measurements (alone). What counts is regret: how far the process at the
conditions that the model would recommend, the highest posterior mean, is from its optimum.

    python examples/three_labs.py --output simulations/results/three_labs.png

Needs ``fedgp-flower[botorch]``. An upper confidence bound needs no measurement, only the posterior.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from botorch.acquisition import qUpperConfidenceBound
from botorch.models.model import Model
from botorch.optim import optimize_acqf
from botorch.test_functions import Branin
from matplotlib.figure import Figure

from fedgp_flower import FederatedGPRegressor

PROCESS = Branin(negate=True).double()
LOW, HIGH = PROCESS.bounds.numpy()
CORNERS = np.array([[0.0, 0.0], [0.5, 0.0], [0.25, 0.5]])
"""Of the half-sized box, in shares of the domain, that each laboratory has measured so far."""
NOISE = 1.0
FLOOR = 0.02
"""Of the picture: what the grid of recommendations leaves of the regret."""
GRID = torch.cartesian_prod(*(torch.linspace(a, b, 60) for a, b in PROCESS.bounds.T.double())).double()
Figures: TypeAlias = dict[str, tuple[np.ndarray, np.ndarray]]
"""Mean and standard deviation over seeds, by round."""
OPTIONS = {"model.kernel": "matern52", "model.num-inducing": 40}


def measured(x: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Noisy measurements [N] at conditions [N, 2]."""
    return PROCESS(torch.from_numpy(x)).numpy() + NOISE * random.normal(size=len(x))


def fitted(x: np.ndarray, y: np.ndarray, labs: np.ndarray) -> Model:
    """The federated posterior of all laboratories as a model of BoTorch; of one laboratory, its own."""
    estimator = FederatedGPRegressor(method="fsgp", num_rounds=10, options=OPTIONS)
    return estimator.fit(x, y, groups=labs).posterior_.to_botorch()


def proposals(model: Model, count: int) -> np.ndarray:
    """Conditions [count, 2] of the next experiments."""
    bound = qUpperConfidenceBound(model, beta=4.0)
    found, _ = optimize_acqf(bound, PROCESS.bounds, q=count, num_restarts=3, raw_samples=64, options={"maxiter": 40})
    return found.numpy()


def regret(model: Model) -> float:
    """How far the process at the recommended conditions is from its optimum."""
    with torch.no_grad():
        best = GRID[model.posterior(GRID[:, None]).mean.flatten().argmax()]
    return PROCESS.optimal_value - float(PROCESS(best[None]))


def search(way: str, seed: int, rounds: int) -> list[float]:
    """Regret before the first round and after each one; alone, the mean over laboratories."""
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    labs = np.repeat(np.arange(3), 4)
    x = LOW + (HIGH - LOW) * (CORNERS[labs] + 0.5 * random.uniform(size=(12, 2)))
    y = measured(x, random)
    curve = []
    for _ in range(rounds + 1):
        rows = [labs == lab for lab in range(3)] if way == "alone" else [labs >= 0]
        sites = labs if way == "federated" else np.zeros_like(labs)
        models = [fitted(x[own], y[own], sites[own]) for own in rows]
        curve.append(float(np.mean([regret(model) for model in models])))
        new = np.concatenate([proposals(model, 3 // len(models)) for model in models])
        x, y = np.concatenate([x, new]), np.concatenate([y, measured(new, random)])
        labs = np.append(labs, np.arange(3))
    return curve


def main() -> None:
    """Search with every seed; after each one write the picture, and a page with the table beside it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--output", type=Path, default=Path("three_labs.png"))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=6)
    words = parser.parse_args()
    warnings.filterwarnings("ignore")
    curves: dict[str, list[list[float]]] = {way: [] for way in STYLES}
    for seed in range(words.repeats):
        for way, found in curves.items():
            found.append(search(way, seed, words.rounds))
            print(f"seed {seed} {way:10} {' '.join(f'{value:7.3f}' for value in found[-1])}", flush=True)
        if seed:
            figures = {way: (np.mean(own, axis=0), np.std(own, axis=0, ddof=1)) for way, own in curves.items()}
            draw(figures, seed + 1, words.output)
            words.output.with_suffix(".md").write_text(page(figures, seed + 1, words.output.name))


STYLES = {"federated": ("#1f5f99", "o-"), "pooled": ("#3d3d3d", "s:"), "alone": ("#c8691c", "^--")}


def draw(figures: Figures, seeds: int, path: Path) -> None:
    """Regret by round, with a standard error of the mean over seeds."""
    figure = Figure(figsize=(5.6, 3.6), dpi=160, layout="constrained")
    ax = figure.subplots()
    for way, (mean, sd) in figures.items():
        (colour, style), error = STYLES[way], sd / np.sqrt(seeds)
        ax.plot(mean, style, color=colour, ms=4, label=way)
        ax.fill_between(range(len(mean)), (mean - error).clip(FLOOR), mean + error, color=colour, alpha=0.15, lw=0)
    ax.set(xlabel="rounds, an experiment at each laboratory", ylabel="regret of the recommendation", yscale="log")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=9)
    figure.savefig(path)


def page(figures: Figures, seeds: int, picture: str) -> str:
    """The same as a table: mean and standard error over seeds."""
    rounds = len(figures["pooled"][0])
    rows = [["round", *map(str, range(rounds))], ["---"] * (rounds + 1)]
    for way, (mean, sd) in figures.items():
        rows.append([way, *(f"{m:.3f} ± {s / np.sqrt(seeds):.3f}" for m, s in zip(mean, sd, strict=True))])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    words = f"""Made by `python examples/three_labs.py --output simulations/results/{picture}`, {seeds} seeds.
The process is Branin's function with noise of standard deviation {NOISE:g}. Each laboratory starts with four
measurements in a corner of its own and adds one a round. Regret is how far the process at the recommended conditions
is from its optimum: mean over seeds ± its standard error, as the bands. *Alone* is the mean over the laboratories."""
    alt = "Regret by round of the federated, the pooled and each laboratory's own model"
    return f"# An optimum of three laboratories\n\n{words}\n\n![{alt}]({picture})\n\n{table}\n"


if __name__ == "__main__":
    main()
