"""The state of partitioned variational inference as arrays: what a site is told, what it answers, what is kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from fedgp_flower.gaussian import DiagonalGaussian, Gaussian, NaturalGaussian
from fedgp_flower.shapes import Array, NamedArrays
from strategies.pvi_state import Contribution, PVIState
from strategies.wire import ArraySpec, Specs

LIMIT = 1e8
"""Standardised inputs, targets and weights of an honest site are far below this."""
OWN_U = ("values", "whitened")
"""Blocks that are factors of u, or of v = L⁻¹u."""


def under(prefix: str, arrays: Mapping[str, np.ndarray]) -> NamedArrays:
    """The same arrays with ``prefix.`` before their names."""
    return {f"{prefix}.{name}": array for name, array in arrays.items()}


def part(arrays: Mapping[str, np.ndarray], prefix: str) -> NamedArrays:
    """The arrays under ``prefix.``, without it."""
    start = f"{prefix}."
    return {name.removeprefix(start): array for name, array in arrays.items() if name.startswith(start)}


def gaussian_of(arrays: Mapping[str, np.ndarray]) -> Gaussian:
    """A factor, full or diagonal by the shape of its precision."""
    kind = NaturalGaussian if arrays["eta2"].ndim == 2 else DiagonalGaussian
    return kind.from_arrays(arrays)


def standard(size: int, *, full: bool = False) -> Gaussian:
    """The density N(0, I)."""
    precision = np.eye(size) if full else np.ones(size)
    return gaussian_of({"eta1": np.zeros(size), "eta2": -0.5 * precision})


def narrow(mean: Array, scale: float) -> NamedArrays:
    """N(mean, scale²) as natural parameters."""
    return {"eta1": mean / scale**2, "eta2": np.full(len(mean), -0.5 / scale**2)}


def factor_arrays(contributions: Iterable[Contribution]) -> NamedArrays:
    """The product of sites' factors of u in as few arrays as possible.

    Pseudo-observations with diagonal noise are joined into one set, those with full noise stay apart, Gaussian factors
    are multiplied.
    """
    sites = list(contributions)
    points = [site.arrays for site in sites if site.arrays]
    diagonal = [own for own in points if own["root"].ndim == 1]
    sets = [own for own in points if own["root"].ndim == 2]
    if diagonal:
        joined = {name: np.concatenate([own[name] for own in diagonal]) for name in ("inputs", "targets", "root")}
        totals = {name: np.sum([own[name] for own in diagonal]) for name in ("residual", "count")}
        sets.insert(0, {**joined, **totals, "tied": diagonal[0]["tied"]})
    arrays: NamedArrays = {}
    for number, own in enumerate(sets):
        arrays |= under(f"points-{number}", own)
    for block in OWN_U:
        factors = [site.factors[block] for site in sites if block in site.factors]
        if factors:
            product = factors[0]
            for factor in factors[1:]:
                product = product * factor
            arrays |= under(block, product.to_arrays())
    return arrays


def own_arrays(site: Contribution) -> NamedArrays:
    """A site's own factor of u, to start from."""
    return factor_arrays([site])


def reply_specs(blocks: Mapping[str, ArraySpec], *, points: bool, full: bool, num_inputs: int) -> Specs:
    """What a reply to a visit must hold."""
    if not points:
        return blocks
    root: tuple[int | None, ...] = (None, None) if full else (None,)
    shapes: dict[str, tuple[int | None, ...]] = {
        "inputs": (None, num_inputs),
        "targets": (None,),
        "root": root,
        "residual": (),
        "count": (),
    }
    return {**blocks, **{f"points.{name}": ArraySpec(shape) for name, shape in shapes.items()}}


def points_refusal(points: Mapping[str, np.ndarray], rows: int) -> str | None:
    """Why pseudo-observations cannot stand for ``rows`` rows, or None."""
    number = len(points["inputs"])
    if len({number, len(points["targets"]), *points["root"].shape}) != 1 or number == 0:
        return "`points.*`: pseudo-inputs, targets and noise are not of one number"
    if number > rows:
        return f"{number} pseudo-observations of {rows} rows"
    if any(np.abs(array).max() > LIMIT for array in points.values()):
        return f"`points.*`: numbers above {LIMIT:g}, which no standardised rows give"
    if not 0 < points["count"] <= rows or points["residual"] < 0:
        return f"`points.count` lies between 0 and the {rows} rows of the site, `points.residual` is a sum of squares"
    if points["root"].ndim == 1 and not (points["root"] > 0).all():
        return "`points.root` holds deviations and cannot be negative"
    return None


def gaussian_refusal(arrays: Mapping[str, np.ndarray]) -> str | None:
    """Why a Gaussian factor of u or v is none, or None.

    The merge sees whether prior and factors of v are a density together. The prior of u depends on Z and β, so that no
    negative precision of u is safe; an update by optimisation sends none.
    """
    for block in OWN_U:
        if f"{block}.eta2" not in arrays:
            continue
        eta1, eta2 = arrays[f"{block}.eta1"], arrays[f"{block}.eta2"]
        size = float(np.abs(eta2).max())
        if max(size, float(np.abs(eta1).max())) > LIMIT**2:
            return f"`{block}`: numbers above {LIMIT**2:g}, which no standardised rows give"
        if np.abs(eta2 - eta2.T).max() > 1e-8 * size:
            return f"`{block}.eta2` is not symmetric"
        if block == "values" and np.linalg.eigvalsh(eta2)[-1] > 1e-8 * size:
            return f"`{block}.eta2`: its precision has a negative eigenvalue"
    return None


def state_arrays(state: PVIState) -> tuple[NamedArrays, dict[str, Any]]:
    """A state for a checkpoint: arrays, and JSON-able facts about them."""
    arrays: NamedArrays = under("prior", _blocks(state.prior)) | under("shared", state.points)
    for number, site in enumerate(state.sites.values()):
        arrays |= under(f"site-{number}.factor", _blocks(site.factors)) | under(f"site-{number}.points", site.arrays)
    facts = {name: site.num_examples for name, site in state.sites.items()}
    return arrays, {"sites": list(facts), "examples": list(facts.values()), "version": state.version}


def state_of(arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> PVIState:
    """The inverse of :func:`state_arrays`."""
    sites = {}
    for number, (name, rows) in enumerate(zip(facts["sites"], facts["examples"], strict=True)):
        own = part(arrays, f"site-{number}")
        sites[str(name)] = Contribution(_of_blocks(part(own, "factor")), part(own, "points"), int(rows))
    return PVIState(_of_blocks(part(arrays, "prior")), sites, part(arrays, "shared"), int(facts["version"]))


def _blocks(blocks: Mapping[str, Gaussian]) -> NamedArrays:
    arrays: NamedArrays = {}
    for name, block in blocks.items():
        arrays |= under(name, block.to_arrays())
    return arrays


def _of_blocks(arrays: Mapping[str, np.ndarray]) -> dict[str, Gaussian]:
    names = dict.fromkeys(name.partition(".")[0] for name in arrays)
    return {name: gaussian_of(part(arrays, name)) for name in names}
