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

import functools
import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeAlias, cast

import numpy as np
import torch
from scipy.stats import norm, rankdata

from fedgp_flower.data.sites import SiteData, load_all_sites
from fedgp_flower.errors import RunError
from fedgp_flower.gp.sparse import SparseGP, pooled_sums
from fedgp_flower.gp.sums import SparseSums, exact_posterior
from fedgp_flower.messages import decode
from fedgp_flower.methods.fedmgp.latents import Latents, spacing
from fedgp_flower.methods.fedmgp.messages import PSEUDO_INPUTS
from fedgp_flower.methods.fedmgp.options import FedMGPOptions
from fedgp_flower.methods.fedmgp.unit import (
    SearchOptions,
    UnitData,
    features,
    squared_gaps,
    starting_parameters,
    statistics,
)
from fedgp_flower.methods.fsgp.private import EDGE, Budget, cleaned, disturbed
from fedgp_flower.methods.pvi.factors import Factor, PseudoObservations
from fedgp_flower.methods.pvi.messages import PseudoPoints
from fedgp_flower.methods.pvi.posterior import SavedFactors
from fedgp_flower.methods.pvi.posterior import saved_model as saved_factors
from fedgp_flower.methods.sparse_posterior import SavedMixture, SavedSparseGP, saved_model
from fedgp_flower.run.artefacts import RunData, read_checkpoint, read_run
from fedgp_flower.run.config import RunConfig
from fedgp_flower.run.files import write_json
from fedgp_flower.run.predict import preparation_of
from fedgp_flower.run.registry import parse_config
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


def seen_of_fsgp(run: RunData, config: RunConfig, groups: Mapping[str, Sequence[SiteData]]) -> dict[str, Seen]:
    """Of each group of sites the sum over them, the posterior from it alone, and the range that rows lie in.

    Raises:
        RunError: the likelihood is not Gaussian.
    """
    assert run.posterior is not None
    saved = saved_model(run.posterior, ())
    saved = saved.components[0] if isinstance(saved, SavedMixture) else saved  # the best point; draws are around it
    if type(saved) is not SavedSparseGP:
        raise RunError(f"{run.path}: attacks on sums are known for `model.likelihood` = 'gaussian'")
    return {name: _of_sites(saved.model, config, sites, name) for name, sites in groups.items()}


@torch.no_grad()
def _of_sites(model: SparseGP, config: RunConfig, sites: Sequence[SiteData], name: str) -> Seen:
    told = _noisy if config.privacy.epsilon else _exact
    sums = told(model, config, sites, name)

    def features(points: Array) -> Array:
        with torch.no_grad():
            return np.asarray(model.whitened_cross(torch.from_numpy(points)).mT)

    posterior = SavedSparseGP(model, exact_posterior(sums, float(model.noise)))
    return Seen(posterior, Sums(sums.gram.numpy(), sums.projection.numpy(), features))


def _exact(model: SparseGP, config: RunConfig, sites: Sequence[SiteData], name: str) -> SparseSums:
    del config, name
    parts = (pooled_sums(model, torch.from_numpy(own.x), torch.from_numpy(own.y)) for own in sites)
    return functools.reduce(operator.add, parts)


def _noisy(model: SparseGP, config: RunConfig, sites: Sequence[SiteData], name: str) -> SparseSums:
    """As a release of the run, with fresh noise."""
    clipped = [SiteData(own.x, own.y.clip(-EDGE, EDGE), own.x_test, own.y_test, 0) for own in sites]
    exact, rng = _exact(model, config, clipped, name), np.random.default_rng([config.seed, *b"attack", *name.encode()])
    parts = 1 if config.privacy.secure_aggregation else len(sites)
    noise, rows = Budget.of(config).noise * math.sqrt(parts), sum(len(own.x) for own in sites)
    amplitude = float(model.kernel(model.inducing_points[:1], diag=True))
    return cleaned(disturbed(exact, amplitude, noise, rng), rows, amplitude, noise)[0]


def seen_of_fedmgp(run: RunData, config: RunConfig, groups: Mapping[str, Sequence[SiteData]]) -> dict[str, Seen]:
    """Of each group of units the sum of first statistics, in units of the root mean square of a single unit's targets.

    A reader of the posterior sees none of them: it is that of the last round, at parameters that stay with the units.
    """
    assert run.posterior is not None
    options, arrays = cast(FedMGPOptions, config.options), run.posterior.arrays
    inducing = arrays["latents.inducing"] if "latents.inducing" in arrays else arrays[PSEUDO_INPUTS]
    scales = np.outer(np.square(options.multiples), spacing(inducing) ** 2)
    latents = Latents(inducing, scales, np.ones(len(scales)), config.model.jitter)
    search = SearchOptions(convolved=options.covariance != "lmc")
    units = {name: [UnitData.build(own.x, own.y, inducing) for own in sites] for name, sites in groups.items()}
    return {name: Seen() if name == READER else _of_units(own, latents, search) for name, own in units.items()}


def _of_units(units: Sequence[UnitData], latents: Latents, search: SearchOptions) -> Seen:
    starts = [starting_parameters(own, latents, search) for own in units]
    told = [statistics(own, latents, start) for own, start in zip(units, starts, strict=True)]
    smoothing, amplitudes, factors = starts[0].smoothing, starts[0].amplitudes, latents.whitening()

    def rows(points: Array) -> Array:
        found = features(squared_gaps(points, latents.inducing), latents, factors, smoothing)
        return np.hstack([s * k for s, k in zip(amplitudes, found, strict=True)])

    noise = starts[0].noise  # 0.09 yᵀy/N, which the evidence, a function of it and of N, gives away
    gram, projection = sum(own.precision for own in told), sum(own.shift for own in told)
    return Seen(sums=Sums(np.asarray(gram * noise), np.asarray(projection * noise), rows))


SITES = "state.sites"
"""Name of the sites' factors in a checkpoint."""


def seen_of_pvi(run: RunData, config: RunConfig, groups: Mapping[str, Sequence[SiteData]]) -> dict[str, Seen]:
    """Of a single site its factor, alone with the prior; of all, the posterior."""
    assert run.posterior is not None
    saved = saved_factors(run.posterior, ())
    if not isinstance(saved, SavedFactors):  # factors by sums are those of the method that asks for sums alone
        return seen_of_fsgp(run, config, groups)
    arrays = read_checkpoint(run.path).arrays
    names = json.loads(np.asarray(arrays[SITES], dtype=np.uint8).tobytes())
    tied = bool(run.posterior.arrays.get("factor.points-0.tied", True))
    found = {}
    for name, sites in groups.items():
        if len(sites) > 1 or name not in names:
            found[name] = Seen(saved, points=_points(saved.factors))
            continue
        prefix = f"{SITES}.{names.index(name)}.points."
        own = {key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)}
        factors: list[Factor] = [decode(PseudoPoints, own).factor(tied=tied)] if own else []
        alone = SavedFactors(saved.model, saved.draws, factors) if factors else None
        found[name] = Seen(alone, points=_points(factors))
    return found


def _points(factors: Sequence[Factor]) -> np.ndarray | None:
    """Pseudo-inputs and targets [V, D + 1]."""
    parts = [
        np.column_stack([own.inputs.numpy(), own.targets.numpy()])
        for own in factors
        if isinstance(own, PseudoObservations)
    ]
    return np.concatenate(parts) if parts else None


SEEN = {"fsgp": seen_of_fsgp, "pvi": seen_of_pvi, "fedmgp": seen_of_fedmgp}
"""From a run, its configuration and groups of sites' rows to what the sum or the factors of each group give."""

FILE = "attacks.json"
TOTAL, OTHERS = "total", "others"


def attack(folder: Path) -> list[Attack]:
    """Attack a run and write what was reached into its folder.

    Under masks the server has the total alone, and attacks every site with that.

    Raises:
        RunError: the run is not simulated, its rows are not there, or nothing is known against its method.
    """
    run = read_run(folder)
    if run.metrics.method not in SEEN or run.posterior is None:
        raise RunError(f"{folder} is a run of {run.metrics.method!r}; attacks are known for {', '.join(SEEN)}")
    config, sites = parse_config(run.config), rows_of(run)
    groups = {site: [own] for site, own in sites.items()}
    seen = SEEN[run.metrics.method]
    everyone, masked = list(sites.values()), "privacy" in run.metrics.method_details
    reader = seen(run, config, {READER: everyone})[READER]
    server = dict.fromkeys(sites, seen(run, config, {TOTAL: everyone})[TOTAL]) if masked else seen(run, config, groups)
    smallest = min(sites.values(), key=lambda own: len(own.x))
    others = seen(run, config, {OTHERS: [own for own in everyone if own is not smallest]})[OTHERS]
    found = attacked(server, reader, sites, others=others, seed=config.seed)
    write_json(folder / FILE, {"masked": masked, "attacks": [asdict(own) for own in found]})
    return found


def rows_of(run: RunData) -> dict[str, SiteData]:
    """The rows of a simulated run's sites, standardised as they agreed.

    Raises:
        RunError: the sites were real, or the rows are others now.
    """
    assert run.posterior is not None
    facts = read_checkpoint(run.path).facts["preparation"]
    if not facts["simulated"]:
        raise RunError(f"{run.path}: its sites are real machines, which keep their rows; only a simulation is attacked")
    raw = {own.site: own for own in load_all_sites(parse_config(run.config), len(facts["rows"]))}
    if {site: len(own.train) for site, own in raw.items()} != facts["rows"]:
        raise RunError(f"{run.path}: the rows of `dataset` are not those that the run had")
    return {site: own.encode(preparation_of(run.posterior)) for site, own in raw.items()}
