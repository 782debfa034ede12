"""Three laboratories look for the best conditions of one process together, and no measurement leaves a laboratory.

Each has measured a corner of the domain. In every round an acquisition function of BoTorch is optimised on the
federated posterior and proposes an experiment to each laboratory; beside it, the same with one GP of all measurements
(pooled), and with each laboratory's own measurements (alone). What counts is regret: how far the process at the
conditions that the model would recommend, the highest posterior mean, is from its optimum.

    python examples/three_labs.py --output examples/three_labs.png

Needs ``fedgp-flower[botorch]``. An upper confidence bound needs no measurement, only the posterior.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

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
GRID = torch.cartesian_prod(*(torch.linspace(a, b, 60) for a, b in PROCESS.bounds.T.double())).double()
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
    """Print the curves and draw them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--output", type=Path, default=Path("three_labs.png"))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=4)
    words = parser.parse_args()
    warnings.filterwarnings("ignore")
    figure = Figure(figsize=(5.6, 3.6), dpi=160, layout="constrained")
    ax = figure.subplots()
    styles = {"federated": ("#1f5f99", "o-"), "pooled": ("#3d3d3d", "s:"), "alone": ("#c8691c", "^--")}
    for way, (colour, style) in styles.items():
        curves = np.array([search(way, seed, words.rounds) for seed in range(words.repeats)])
        mean, error = curves.mean(axis=0), curves.std(axis=0, ddof=1) / np.sqrt(words.repeats)
        print(f"{way:10} {' '.join(f'{value:7.3f}' for value in mean)}", flush=True)
        steps = np.arange(words.rounds + 1)
        ax.plot(steps, mean, style, color=colour, ms=4, label=way)
        ax.fill_between(steps, mean - error, mean + error, color=colour, alpha=0.15, lw=0)
    ax.set(xlabel="rounds, an experiment at each laboratory", ylabel="regret of the recommendation", ylim=(0, None))
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=9)
    figure.savefig(words.output)


if __name__ == "__main__":
    main()
