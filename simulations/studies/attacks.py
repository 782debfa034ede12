"""What attacks reach on what leaves a site: in the clear, under masks, and with differential privacy.

Ten sites of sizes 1 : 10, one run each, of at most so many rows of a table: the smallest site has about 15 rows, the
case that attacks are best at. *Server*: with what the server saw; *reader*: with the finished posterior. Membership is
told by a score of a row, a member that was trained on against a stranger that was held out; AUC, .5 at chance. *Loss*:
by log p(y | x). *Range*: by how far the features of a row lie in the range of the sum W Wᵀ. *Worst site*: the
site that the server tells best by loss; of ten sites of few rows it is by luck alone well above .5.

Rows are told from sums W Wᵀ of N rows as directions are from a sum of signals (MUSIC: Schmidt, 1986): x is one of them
where a(x) = L⁻¹ k(Z, x) lies in the range of the sum, which it does everywhere once N reaches M; y is aᵀ (W Wᵀ)⁺ W y
there. *x*, *x and y*: median distance from a row of the smallest site to the nearest one found, over that of as many
held-out rows; *others*: the same from the sum of all other sites, which has none of these rows. *Found*: AUC of the
distance to what was found, rows of the smallest site against held-out rows. Under masks the server has the total alone.
With ε the sums are drawn anew with the noise of a release.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from scipy.linalg import cho_factor, cho_solve
from scipy.stats import norm, rankdata

from fedgp_flower.messages import add
from simulations.common import ALONE, Array, Row, averaged, data_dir, fit, sampled, sites_of

SETS = ("yacht", "boston", "energy", "concrete", "wine", "kin8nm", "power", "naval", "protein")
STARTS, STEPS, APART, RANK, EDGE, DRAWS = 400, 60, 0.02, 1e-10, 1e-6, 20
"""Starts of a search and steps of each; least distance of two found rows; eigenvalues that are rounding, and those
outside a range, as parts of the largest; draws of held-out rows."""
SGPR: dict[str, Any] = {"method": "sgpr", "sgpr.exchanges": 10, "num-server-rounds": 10, "model.num-inducing": 20}
PRIVATE = SGPR | {"method": "sgpr-private", "privacy.epsilon": 1.0, "model.lengthscale": 2.0}
MASKS = {"privacy.secure-aggregation": True}
ARMS: dict[str, dict[str, Any]] = {
    "sgpr": SGPR,
    "sgpr, masked": SGPR | MASKS,
    "sgpr, ε = 1": PRIVATE,
    "sgpr, masked, ε = 1": PRIVATE | MASKS,
    "pvi": {"method": "pvi", "num-server-rounds": 10, "model.num-inducing": 20},
}


class Rows(NamedTuple):
    """Standardised inputs [N, D] and targets [N]."""

    x: Array
    y: Array


@dataclass(frozen=True)
class Sums:
    """A sum over rows that is seen: gram W Wᵀ [M, M], projection W y [M], a(x) [N, M] of points, and its posterior."""

    gram: Array
    projection: Array
    features: Callable[[Array], Array]
    noise: float
    amplitude: float

    def log_density(self, x: Array, y: Array) -> Array:
        """Log p(y | x) of the exact posterior of the rows of this sum."""
        a = self.features(x)
        factor = cho_factor(np.eye(len(self.gram)) + self.gram / self.noise)  # precision of the whitened u
        mean = a @ cho_solve(factor, self.projection) / self.noise
        variance = self.amplitude - np.square(a).sum(1) + (a * cho_solve(factor, a.T).T).sum(1) + self.noise
        density: Array = norm.logpdf(y, mean, np.sqrt(np.maximum(variance, 1e-12)))
        return density

    def inside(self, x: Array, y: Array) -> Array:
        """The share of a row's features that lies in the range of the sum."""
        del y
        spectrum, vectors = np.linalg.eigh(self.gram)
        a = self.features(x)
        share: Array = np.square(a @ vectors[:, spectrum > EDGE * spectrum[-1]]).sum(1)
        return share / np.maximum(np.square(a).sum(1), 1e-300)


def auc(members: Array, strangers: Array) -> float:
    """The probability that a member scores higher than a stranger, ties counted half."""
    ranks = rankdata(np.concatenate([members, strangers]))
    wins = ranks[: len(members)].sum() - len(members) * (len(members) + 1) / 2
    return float(wins / (len(members) * len(strangers)))


def search(sums: Sums, number: int, starts: Array) -> Array:
    """Up to ``number`` points [≤ N, D] at which a(x) leaves the range of the sum least, by compass search."""
    spectrum, vectors = np.linalg.eigh(sums.gram)
    outside = vectors[:, : max(len(spectrum) - number, int((spectrum < RANK * spectrum[-1]).sum()))]

    def left(points: Array) -> Array:
        found = sums.features(points)
        share: Array = np.square(found @ outside).sum(1) / np.maximum(np.square(found).sum(1), 1e-300)
        return share

    points, values, step = starts.copy(), left(starts), np.full(len(starts), 0.3)
    compass = np.concatenate([np.eye(starts.shape[1]), -np.eye(starts.shape[1])])
    for _ in range(STEPS):
        around = points[:, None] + step[:, None, None] * compass
        tried = left(around.reshape(-1, starts.shape[1])).reshape(len(points), -1)
        best = tried.argmin(1)
        better = tried[np.arange(len(points)), best] < values
        points[better], values[better] = around[better, best[better]], tried[better, best[better]]
        step[~better] /= 2
    kept: list[Array] = []
    for point in points[np.argsort(values)]:
        if len(kept) < number and all(np.linalg.norm(point - own) > APART for own in kept):
            kept.append(point)
    return np.stack(kept)


def distance(rows: Array, found: Array) -> Array:
    """From each row to the nearest found one."""
    parts = np.array_split(rows, 1 + len(rows) // 500)
    return np.concatenate([np.sqrt(np.square(part[:, None] - found).sum(2)).min(1) for part in parts])


def reconstruction(sums: Sums, rows: Any, strangers: Any, seed: int) -> tuple[float, float, float]:
    """Distances from a row's x, and (x, y), to what was found, over those of held-out rows; and the AUC of *found*."""
    rng = np.random.default_rng([seed, *b"attack"])
    starts = rng.uniform(strangers.x.min(0) - 0.2, strangers.x.max(0) + 0.2, (STARTS, rows.x.shape[1]))
    found = search(sums, len(rows.x), starts)
    y = sums.features(found) @ np.linalg.lstsq(sums.gram, sums.projection, rcond=RANK)[0]
    both, wanted = np.column_stack([found, y]), np.column_stack([rows.x, rows.y])
    others = np.column_stack([strangers.x, strangers.y])
    draws = [others[rng.choice(len(others), min(len(found), len(others)), replace=False)] for _ in range(DRAWS)]
    width = rows.x.shape[1]
    far = [float(np.median(distance(wanted[:, :d], both[:, :d]))) for d in (width, width + 1)]
    chance = [np.mean([np.median(distance(wanted[:, :d], own[:, :d])) for own in draws]) for d in (width, width + 1)]
    recognised = auc(-distance(rows.x, found), -distance(strangers.x, found))
    return far[0] / float(chance[0]), far[1] / float(chance[1]), recognised


def sums_of(run: Row, keys: Row, groups: Mapping[str, Sequence[Any]]) -> dict[str, Sums]:
    """Of each group of sites the sum over them at the run's final parameters, as a release of the run has it."""
    from fedgp_flower.gp.sparse import pooled_sums
    from fedgp_flower.gp.sums import scaled
    from fedgp_flower.methods.sgpr.private import EDGE as CLIP
    from fedgp_flower.methods.sgpr.private import Budget, cleaned, disturbed
    from fedgp_flower.methods.sparse_posterior import saved_model
    from fedgp_flower.run.artefacts import read_run
    from fedgp_flower.run.registry import parse_config

    config, posterior = parse_config({**ALONE, **keys}), read_run(run["folder"]).saved
    assert posterior is not None
    model = saved_model(posterior, ()).model
    amplitude, found = float(model.kernel(model.inducing_points[:1], diag=True)), {}

    def features(points: Array) -> Array:
        with torch.no_grad():
            return np.asarray(model.project(torch.from_numpy(points)).mT)

    for name, sites in groups.items():
        clip = CLIP if config.privacy.epsilon else math.inf
        with torch.no_grad():
            parts = [pooled_sums(model, torch.from_numpy(s.x), torch.from_numpy(s.y.clip(-clip, clip))) for s in sites]
            total = add(parts)
        if config.privacy.epsilon:
            noise = Budget.of(config).noise * math.sqrt(1 if config.privacy.secure_aggregation else len(sites))
            rng = np.random.default_rng([config.seed, *b"attack", *name.encode()])
            rows = sum(len(own.x) for own in sites)
            noisy = disturbed(scaled(total, 1 / amplitude), 1.0, noise, rng)  # sites answer at amplitude 1
            total = scaled(cleaned(noisy, rows, noise)[0], amplitude)
        gram, projection = (np.asarray(own) for own in (total.gram, total.projection))
        found[name] = Sums(gram, projection, features, float(model.noise), amplitude)
    return found


def membership(score: str, seen: Mapping[str, Sums], sites: Mapping[str, Any], out: Any) -> tuple[float, float]:
    """AUC over the rows of all sites, each scored by what is seen of its site, and that of the site told best."""
    members = {k: getattr(seen[k], score)(own.x, own.y) for k, own in sites.items()}
    strangers = {k: getattr(seen[k], score)(out.x, out.y) for k in sites}
    whole = auc(np.concatenate(list(members.values())), np.concatenate(list(strangers.values())))
    return whole, max(auc(members[k], strangers[k]) for k in sites)


def attacked(keys: Row, sites: int = 10) -> Row:
    """Every attack on one run."""
    run, rows = fit(keys, sites), sites_of(keys, sites)[0]
    everyone, smallest = list(rows.values()), min(rows, key=lambda site: len(rows[site].x))
    groups = {site: [own] for site, own in rows.items()} | {"total": everyone}
    groups["others"] = [own for site, own in rows.items() if site != smallest]
    seen = sums_of(run, keys, groups)
    x, y = (np.concatenate([getattr(own, name) for own in everyone]) for name in ("x_test", "y_test"))
    out = Rows(x, y)
    total = dict.fromkeys(rows, seen["total"])
    server = total if keys.get("privacy.secure-aggregation") else {site: seen[site] for site in rows}
    row: Row = {"NLL": run["test"]["nll"]}
    for score, name in (("log_density", "loss"), ("inside", "range")):
        row[f"{name}: server"], worst = membership(score, server, rows, out)
        row |= {f"{name}: reader": membership(score, total, rows, out)[0]}
        row |= {"loss: worst site": worst} if name == "loss" else {}
    seed = int(keys.get("seed", 0))
    parts = {"server": server[smallest], "reader": seen["total"], "others": seen["others"]}
    found = {who: reconstruction(own, rows[smallest], out, seed) for who, own in parts.items()}
    for place, name in enumerate(("x", "x and y", "found")):
        row |= {f"{name}: {who}": own[place] for who, own in found.items()}
    return row


def study(
    sets: tuple[str, ...] = SETS, arms: tuple[str, ...] = tuple(ARMS), rows: int = 1000, seeds: tuple[int, ...] = (0,)
) -> Iterator[Row]:
    """A row for each set and arm, means over seeds, which hold out and deal other rows."""
    for name in sets:
        found = []
        for arm in arms:
            keys = {"dataset": sampled(name, rows), "partitioner": "sizes", **ARMS[arm]}
            if "privacy.epsilon" in keys:
                whole = pd.read_csv(data_dir() / "uci" / f"{name}.csv.gz")
                known = {str(n): [math.floor(own.min()), math.ceil(own.max()) + 1] for n, own in whole.items()}
                keys["privacy.ranges"] = str(known).replace("'", '"')
            found += [{"data": name, "run": arm, **attacked({**keys, "seed": seed})} for seed in seeds]
        yield from averaged(found, ("data", "run"))
