"""Attacks on a simulated run: what is to be had from what the server sees, and from the finished posterior.

Membership is told by a score of a row, a *member* that was trained on against a *stranger* that was held out; a figure
is the AUC, .5 at chance. Rows are told from sums W Wᵀ of N rows as directions are from a sum of signals (MUSIC:
Schmidt, *Multiple emitter location and signal parameter estimation*, 1986): x is one of them where a(x) = L⁻¹ k(Z, x)
lies in the range of the sum, which it does everywhere once N reaches M; y is aᵀ (W Wᵀ)⁺ W y there. A figure is the
distance from a row to the nearest one found, over that of as many held-out rows; at chance it is what the sum of all
other sites gives, which knows nothing of these rows: one more draw of the same search. Whether rows found are those of
the site is told without it, by the AUC of the distance to the nearest of them, members against strangers: .5 where both
are of one population and the search knows neither.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from scipy.stats import norm, rankdata

from fedgp_flower.data.sites import SiteData
from fedgp_flower.typing import Array

Predict: TypeAlias = Callable[[Array], tuple[Array, Array]]
"""Mean and standard deviation [N] of observations at standardised inputs [N, D]."""
STARTS, STEPS, APART, RANK = 400, 60, 0.02, 1e-10
"""Of the search for rows: starts, steps of each; least distance of two found rows; eigenvalues that are rounding."""
DRAWS = 20
READER = ""
"""Name of the group of all sites as the posterior holds it."""


@dataclass(frozen=True, slots=True)
class Sums:
    """A sum over rows that is seen: gram W Wᵀ [M, M], projection W y [M], and a(x) [N, M] of any points [N, D]."""

    gram: Array
    projection: Array
    features: Callable[[Array], Array]


@dataclass(frozen=True, slots=True)
class Seen:
    """What one of the sums or factors of a run gives to whoever sees it; empty where there is none."""

    predict: Predict | None = None
    sums: Sums | None = None
    points: Array | None = None
    """Pseudo-observations (x, y) [V, D + 1]."""


@dataclass(frozen=True, slots=True)
class Attack:
    """What an attack reaches; None where it has nothing to work on."""

    name: str
    figure: str
    chance: float
    server: float | None
    reader: float | None
    per_site: Mapping[str, float] = field(default_factory=dict)
    """What the server reaches of each site."""


def auc(members: Array, strangers: Array) -> float:
    """The probability that a member scores higher than a stranger, ties counted half.

    >>> auc(np.array([1.0, 2.0]), np.array([0.0, 1.0]))
    0.875
    """
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


def reconstruction(
    sums: Sums, rows: SiteData, strangers: SiteData, rng: np.random.Generator
) -> tuple[float, float, float]:
    """Median distance from a row's x, and from its (x, y), to what was found, over that of held-out rows; an AUC.

    The AUC is of how near to what was found x is, rows against held-out rows.
    """
    starts = rng.uniform(strangers.x.min(0) - 0.2, strangers.x.max(0) + 0.2, (STARTS, rows.x.shape[1]))
    found = search(sums, len(rows.x), starts)
    y = sums.features(found) @ np.linalg.lstsq(sums.gram, sums.projection, rcond=RANK)[0]
    both, wanted = np.column_stack([found, y]), np.column_stack([rows.x, rows.y])
    others = np.column_stack([strangers.x, strangers.y])
    draws = [others[rng.choice(len(others), min(len(found), len(others)), replace=False)] for _ in range(DRAWS)]
    width = rows.x.shape[1]
    chance = [float(np.mean([_near(wanted[:, :d], own[:, :d]) for own in draws])) for d in (width, width + 1)]
    recognised = auc(-_distance(rows.x, found), -_distance(strangers.x, found))
    return _near(wanted[:, :width], found) / chance[0], _near(wanted, both) / chance[1], recognised


def spread(members: int, strangers: int) -> float:
    """The standard deviation of an AUC at chance, by ranks (Mann and Whitney 1947).

    >>> round(spread(15, 200), 3)
    0.077
    """
    return math.sqrt((members + strangers + 1) / (12 * members * strangers))


def _near(rows: Array, found: Array) -> float:
    return float(np.median(_distance(rows, found)))


def _distance(rows: Array, found: Array) -> Array:
    return np.concatenate(
        [np.sqrt(np.square(part[:, None] - found).sum(2)).min(1) for part in np.array_split(rows, 1 + len(rows) // 500)]
    )


def loss(seen: Seen, x: Array, y: Array) -> Array:
    """Log p(y | x) by what is seen."""
    assert seen.predict is not None
    mean, sd = seen.predict(x)
    density: Array = norm.logpdf(y, mean, sd)
    return density


def nearness(seen: Seen, x: Array, y: Array) -> Array:
    """Minus the distance to the nearest pseudo-observation."""
    assert seen.points is not None
    return -_distance(np.column_stack([x, y]), seen.points)


Score: TypeAlias = Callable[[Seen, Array, Array], Array]


def membership(
    score: Score, seen: Mapping[str, Seen], sites: Mapping[str, SiteData], held_out: SiteData
) -> tuple[float, dict[str, float]]:
    """AUC over the rows of all sites, each scored by what is seen of its site, and of each site.

    All held-out rows are strangers to every site.
    """
    members = {site: score(seen[site], own.x, own.y) for site, own in sites.items()}
    strangers = {site: score(seen[site], held_out.x, held_out.y) for site in sites}
    whole = auc(np.concatenate(list(members.values())), np.concatenate(list(strangers.values())))
    return whole, {site: auc(members[site], strangers[site]) for site in sites}


def attacked(
    server: Mapping[str, Seen], reader: Seen, sites: Mapping[str, SiteData], *, others: Seen = Seen(), seed: int = 0
) -> list[Attack]:
    """Every attack that has something to work on.

    Args:
        server: What the server sees of each site; under masks the same of all.
        reader: What the finished posterior gives.
        sites: Rows; training rows are members, held-out ones strangers.
        others: What all sites but the smallest give.
        seed: Of starts and draws.
    """
    held_out = together(list(sites.values()))
    readers, found = dict.fromkeys(sites, reader), []
    smallest = min(sites, key=lambda site: len(sites[site].x))

    def told(name: str, score: Score, part: str) -> None:
        able = [all(getattr(own, part) is not None for own in seen.values()) for seen in (server, readers)]
        if any(able):
            seen = membership(score, server, sites, held_out) if able[0] else (None, {})
            read = membership(score, readers, sites, held_out)[0] if able[1] else None
            found.append(Attack(f"membership by {name}", "AUC", 0.5, seen[0], read, seen[1]))

    def ratio(seen: Seen, x: Array, y: Array) -> Array:
        return loss(seen, x, y) - loss(reader, x, y)

    told("loss", loss, "predict")
    if reader.predict is not None and all(own.predict not in (None, reader.predict) for own in server.values()):
        whole, each = membership(ratio, server, sites, held_out)
        found.append(Attack("membership by likelihood ratio", "AUC", 0.5, whole, None, each))
    told("nearest pseudo-observation", nearness, "points")
    figures = [
        (None, None, None)
        if own.sums is None
        else reconstruction(own.sums, sites[smallest], held_out, np.random.default_rng([seed, *b"attack"]))
        for own in (server[smallest], reader, others)
    ]
    for name, at in (("x of rows", 0), ("x and y of rows", 1)):
        if figures[0][at] is not None or figures[1][at] is not None:
            words = f"{name} from sums, smallest site ({len(sites[smallest].x)} rows)"
            seen, read, chance = (own[at] for own in figures)
            found.append(
                Attack(words, "distance over that of strangers", 1.0 if chance is None else chance, seen, read)
            )
    if figures[0][2] is not None or figures[1][2] is not None:
        words = f"membership by rows found in sums, smallest site ({len(sites[smallest].x)} rows)"
        found.append(Attack(words, "AUC", 0.5, figures[0][2], figures[1][2]))
    return found


def together(sites: Sequence[SiteData]) -> SiteData:
    """All held-out rows, as rows."""
    x, y = np.concatenate([own.x_test for own in sites]), np.concatenate([own.y_test for own in sites])
    return SiteData(x, y, x[:0], y[:0], 0)
