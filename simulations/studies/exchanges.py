"""Twenty exchanges against the best fit of all rows in one place.

Standard splits of UCI sets, ten sites of rows dealt at random, every key at its default; `capped` has `sgpr.small-
sites=cap`. *Above pooled* is the NLL of held-out rows less that of the pooled fit, in nats per row: mean over the
splits, then the worst. The pooled fit has M = 100 inducing points and all rows in one place; of several L-BFGS fits
from different starts the one with the highest bound counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from simulations.common import Row, averaged, cost, figures, fit, remembered, sites_of

SETS = ("yacht", "boston", "energy", "concrete", "wine", "power", "kin8nm", "naval", "protein")
METHODS = {"capped": {"method": "sgpr", "sgpr.small-sites": "cap"}}
INDUCING, JITTER, NOISE_FLOOR = 100, 1e-8, 1e-6


def bound_and_predict(
    theta: dict[str, Tensor], x: Tensor, y: Tensor
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor]]]:
    """Titsias' collapsed bound of rows x [N, D], y [N], and mean and variance of observations at other inputs."""
    scale, noise = theta["amplitude"].exp(), theta["noise"].exp() + NOISE_FLOOR

    def covariance(a: Tensor, b: Tensor) -> Tensor:
        reach = theta["lengthscale"].exp()
        return (
            scale
            * (-0.5 * torch.cdist(a / reach, b / reach, compute_mode="donot_use_mm_for_euclid_dist").square()).exp()
        )

    z = theta["points"]
    factor = torch.linalg.cholesky(covariance(z, z) + JITTER * scale * torch.eye(len(z)))

    def whitened(a: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(factor, covariance(z, a), upper=False)  # [M, N]

    w = whitened(x)
    inner = torch.linalg.cholesky(torch.eye(len(z)) + w @ w.mT / noise)
    c = torch.linalg.solve_triangular(inner, (w @ y)[:, None] / noise, upper=False)[:, 0]
    value = -0.5 * (len(y) * (math.tau * noise).log() + y @ y / noise - c @ c) - inner.diagonal().log().sum()
    value = value - 0.5 * (len(y) * scale - w.square().sum()) / noise

    def predict(new: Tensor) -> tuple[Tensor, Tensor]:
        v = whitened(new)
        u = torch.linalg.solve_triangular(inner, v, upper=False)
        return u.mT @ c, scale - v.square().sum(0) + u.square().sum(0) + noise

    return value, predict


def pooled(x: Tensor, y: Tensor, start: int) -> tuple[float, Callable[[Tensor], tuple[Tensor, Tensor]]]:
    """Bound per row and predictions at the end of L-BFGS from a start."""
    chosen = np.random.default_rng(start).permutation(len(x))[:INDUCING]
    reach = 0.5 * math.log(x.shape[1]) + 0.3 if start % 2 else 0.0
    shapes = {"lengthscale": torch.full((x.shape[1],), reach), "amplitude": torch.tensor(float(start % 2))}
    theta = {**shapes, "noise": torch.tensor(math.log(0.1)), "points": x[chosen].clone()}
    theta = {name: value.double().requires_grad_() for name, value in theta.items()}

    def load(flat: np.ndarray) -> None:
        with torch.no_grad():
            parts = torch.from_numpy(flat).split([value.numel() for value in theta.values()])
            for value, part in zip(theta.values(), parts, strict=True):
                value.copy_(part.view_as(value))

    def negative(flat: np.ndarray) -> tuple[float, np.ndarray]:
        load(flat)
        value = -bound_and_predict(theta, x, y)[0] / len(y)
        gradient = torch.autograd.grad(value, list(theta.values()))
        return float(value.detach()), torch.cat([part.flatten() for part in gradient]).numpy()

    first = torch.cat([value.detach().flatten() for value in theta.values()]).numpy()
    limits = [(-7.0, 7.0)] * (x.shape[1] + 1) + [(-14.0, 3.0)] + [(None, None)] * theta["points"].numel()
    end = minimize(negative, first, jac=True, method="L-BFGS-B", bounds=limits, options={"maxiter": 300, "maxcor": 20})
    load(end.x)
    return -float(end.fun), bound_and_predict(theta, x, y)[1]


def reference(data: str, split: int, starts: int) -> Row:
    """NLL and RMSE, in units of the target, of the pooled fit with the highest bound."""
    torch.set_default_dtype(torch.float64)
    sites, scale = sites_of({"dataset": f"uci/{data}", "split": split}, 10)
    parts = ([getattr(site, name) for site in sites.values()] for name in ("x", "y", "x_test", "y_test"))
    x, y, x_test, y_test = (torch.from_numpy(np.concatenate(part)) for part in parts)
    bound, predict = max((pooled(x, y, start) for start in range(starts)), key=lambda found: found[0])
    with torch.no_grad():
        mean, variance = predict(x_test)
    error = y_test - mean
    nll = 0.5 * ((math.tau * variance).log() + error.square() / variance).mean() + math.log(scale)
    return {"bound": bound, "NLL": float(nll), "rmse": scale * float(error.square().mean().sqrt())}


def study(
    sets: tuple[str, ...] = SETS,
    splits: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9),
    methods: tuple[str, ...] = ("sgpr", "capped", "pvi", "local-only"),
    starts: int = 4,
) -> Iterator[Row]:
    """A row for each set and method."""
    for data in sets:
        rows = []
        for split in splits:
            best = remembered(
                "exchanges", ["pooled", data, split, starts], lambda d=data, s=split: reference(d, s, starts)
            )
            for method in methods:
                keys = {"dataset": f"uci/{data}", "split": split} | METHODS.get(method, {"method": method})
                run = fit(keys)
                row = {"set": data, "method": method, "pooled": best["NLL"], **figures(run), **cost(run)}
                row["above pooled"] = row["NLL"] - row["pooled"]
                rows.append(row | {"points": run["method_details"].get("num_inducing")})
        yield from averaged(rows, ("set", "method"), worst=("above pooled",))
