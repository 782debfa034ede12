"""Does "converged" mean that the answer is there? A hundred drawn problems whose optimum is known.

Logistic regression of 240 rows on three inputs: Gaussian q by Adam on reparameterised draws, as `sfvi` takes steps, all
problems at once; `strategies/server/course.py` watches. The optimum of the bound is found by quadrature and L-BFGS. A
run says "converged" once every parameter may be .3 units from its limit at most: posterior standard deviations for
means, as `sfvi` has them. z: how far the entry of the mean that is furthest from the optimum is then. Runs that do not
say so in 1600 rounds say how far they may be; "their word" counts those that are no farther.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedgp_flower.gp.optimisers import AdamState
from simulations.common import CHECKING, Array, Row, remembered
from strategies.server.course import NEAR, Course

RUNS, ROWS, SIZE, ROUNDS = 100, 240, 4, 1600
SETTINGS = [
    (structure, rate, draws) for structure in ("diagonal", "full") for rate, draws in ((0.05, 4), (0.05, 1), (0.02, 4))
]
LOWER = torch.tril_indices(SIZE, SIZE, -1)


def problems() -> Tensor:
    """Rows times ±1 by class, [R, N, M], intercept first: σ(rowᵀ z) is the probability of what was seen."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(RUNS, ROWS, SIZE)) * draw.uniform(0.3, 3, (RUNS, 1, SIZE))
    x[:, :, 0], weights = 1.0, draw.normal(size=(RUNS, SIZE))
    seen = draw.random((RUNS, ROWS)) < 1 / (1 + np.exp(-np.einsum("rnm,rm->rn", x, weights)))
    return torch.tensor(x * np.where(seen, 1, -1)[:, :, None])


def factors(q: dict[str, Tensor]) -> Tensor:
    """Of every covariance, diag(σ) L, [R, M, M]."""
    unit = torch.eye(SIZE, dtype=torch.float64).expand(RUNS, -1, -1).clone()
    if "lower" in q:
        unit[:, LOWER[0], LOWER[1]] = q["lower"]
    return q["log_scale"].exp()[:, :, None] * unit


def rest(q: dict[str, Tensor]) -> Tensor:
    """E log N(z; 0, I) − log q(z) of every problem, without constants."""
    return q["log_scale"].sum(1) - 0.5 * (q["mean"].square().sum(1) + factors(q).square().sum((1, 2)))


def begun(structure: str) -> dict[str, Tensor]:
    """Every q is N(0, .1² I)."""
    q = {"mean": torch.zeros(RUNS, SIZE), "log_scale": torch.full((RUNS, SIZE), math.log(0.1))}
    q |= {"lower": torch.zeros(RUNS, len(LOWER[0]))} if structure == "full" else {}
    return {name: value.double().requires_grad_() for name, value in q.items()}


def optimum(rows: Tensor, structure: str) -> dict[str, Tensor]:
    """The best q of every problem."""
    q = begun(structure)
    nodes, weights = (torch.tensor(part) for part in np.polynomial.hermite_e.hermegauss(40))
    search = torch.optim.LBFGS(
        list(q.values()),
        max_iter=2000,
        tolerance_grad=1e-8,
        tolerance_change=0,
        history_size=30,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        search.zero_grad()
        centre, spread = torch.einsum("rnm,rm->rn", rows, q["mean"]), (rows @ factors(q)).norm(dim=2)
        fit = torch.nn.functional.logsigmoid(centre[..., None] + spread[..., None] * nodes) @ weights
        value = -(fit.sum() / math.sqrt(2 * math.pi) + rest(q).sum())
        value.backward()
        return value

    search.step(loss)
    steep = max(float(value.grad.abs().max()) for value in q.values() if value.grad is not None)
    assert steep < 1e-4, f"the optimum was not found: slope {steep}"
    return {name: value.detach() for name, value in q.items()}


def watched(structure: str, rate: float, draws: int) -> Row:
    """What 100 runs say, and how far they are."""
    rows, generator = problems(), torch.Generator().manual_seed(1)
    best = optimum(rows, structure)
    sd = factors(best).norm(dim=2)
    q, adam = begun(structure), AdamState[Tensor]()
    course = Course.begin(sum(value.numel() for value in q.values()))
    said, z, farthest = np.full(RUNS, np.nan), np.full(RUNS, np.nan), np.full(RUNS, np.inf)
    for number in range(1, ROUNDS + 1):
        noise = torch.randn(draws, RUNS, SIZE, 1, dtype=torch.float64, generator=generator)
        drawn = q["mean"] + (factors(q) @ noise)[..., 0]
        fit = torch.nn.functional.logsigmoid(torch.einsum("rnm,drm->drn", rows, drawn)).sum() / draws
        value = fit + rest(q).sum()
        slopes = torch.autograd.grad(value, list(q.values()))
        moves, adam = adam.update(dict(zip(q, slopes, strict=True)), rate)
        q = {name: (value.detach() + moves[name]).requires_grad_() for name, value in q.items()}
        course = course.after(0.0, flat(q))
        units = {"mean": factors(q).norm(dim=2), "log_scale": torch.full((RUNS, SIZE), 0.5**0.5)}
        units |= {"lower": torch.ones(RUNS, len(LOWER[0]))} if structure == "full" else {}
        if course.waiting or (distances := course.distances(flat(units))) is None:
            continue
        farthest = by_run(distances[1:], q).max(1)
        there = np.abs(course.answer[: RUNS * SIZE].reshape(RUNS, SIZE) - best["mean"].numpy()) / sd.numpy()
        new = np.isnan(said) & (farthest <= NEAR)
        said, z = np.where(new, number, said), np.where(np.isnan(said) | new, there.max(1), z)
    rest_of = np.isnan(said)
    return {
        "say converged": int((~rest_of).sum()),
        "of these z ≤ .3": int((z[~rest_of] <= NEAR).sum()),
        "z, 95 % below": float(np.quantile(z[~rest_of], 0.95)),
        "rounds, median": float(np.nanmedian(said)),
        "others": int(rest_of.sum()),
        "their word": int((z[rest_of] <= farthest[rest_of]).sum()),
    }


def flat(parts: dict[str, Tensor]) -> Array:
    """All parameters of all runs, name by name."""
    return np.concatenate([value.detach().double().numpy().ravel() for value in parts.values()])


def by_run(values: Array, like: dict[str, Tensor]) -> Array:
    """The same [R, P]."""
    ends = np.cumsum([value.numel() for value in like.values()])[:-1]
    return np.hstack([part.reshape(RUNS, -1) for part in np.split(values, ends)])


def study() -> Iterator[Row]:
    """A row for each structure of q, learning rate and number of draws; the first ones are the defaults."""
    for structure, rate, draws in SETTINGS:
        found = remembered("arrived", (structure, rate, draws), partial(watched, structure, rate, draws))
        figures = {} if CHECKING else {name: value for name, value in found.items() if name != "seconds"}
        yield {"q": structure, "rate": rate, "draws": draws, "runs": RUNS, **figures}
