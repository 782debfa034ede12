"""The posterior of PVI as a product, q(θ) ∝ p(θ) ∏ₖ tₖ(θ), with its cavities and merges.

θ has named blocks (``inducing`` for Z, ``hyper`` for β, ``whitened`` for v = L⁻¹u, ``weights``). The prior of a block
without ``prior`` depends on other blocks (u given Z): factors multiply and divide as usual, but only a site can check
that the result is a density. Pseudo-observations are not multiplied: new ones replace a site's old ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from itertools import accumulate, chain
from typing import TypeVar

import numpy as np

from fedgp_flower.errors import NumericsError
from fedgp_flower.gp.gaussian import Gaussian
from fedgp_flower.messages import encode, leaves, message
from fedgp_flower.methods.pvi.messages import (
    POINTS,
    SAVED_LATENTS,
    Factors,
    LatentFactor,
    Marginals,
    NaturalParameters,
    PseudoPoints,
)
from fedgp_flower.methods.pvi.options import Plan
from fedgp_flower.typing import AnyShape, Facts, NamedArrays
from strategies.sgpr import SGPRState
from strategies.svgp import SVGPState

MOST_HALVINGS = 40
"""An update with damping below 2⁻⁴⁰ has no effect in float64 and is refused."""
EQUATION = (
    "For draws (Z, β) ~ q(Z) q(β), L Lᵀ = k(Z, Z) + jitter · k(z, z) · I, A = L⁻¹k(Z, V), B = I + A S⁻¹ Aᵀ, "
    "h = A S⁻¹ m (factor.values adds LᵀΛL and Lᵀη), a = L⁻¹k(Z, x): f(x) ~ N(aᵀB⁻¹h, "
    "k(x, x) − aᵀa + aᵀB⁻¹a). Predict with the mixture over draws of p(y | f). x and y are standardised by input.mean, "
    "input.scale, target.mean, target.scale; β are logarithms of standard deviations and lengthscales."
)
MEANINGS = {
    "inputs": "V, pseudo-inputs of all sites",
    "targets": "m, pseudo-targets",
    "root": "R, S⁻¹ = R², over σ² where tied",
    "eta1": "first natural parameter of the product of factors",
    "eta2": "second natural parameter of the product of factors",
}

V = TypeVar("V")
Blocks = dict[str, Gaussian]


@message()
class Contribution:
    """A site's part of the posterior, or its proposal for it."""

    factors: Mapping[str, NaturalParameters] = leaves("tₖ by block")
    points: PseudoPoints | None = leaves("pseudo-observations", default=None)


@message()
class Record:
    """Counts of the run so far."""

    visits: Mapping[str, int] = field(default_factory=dict)
    """Merged updates by site."""
    attempts: Mapping[str, int] = field(default_factory=dict)
    """Started visits by site, including failed ones."""
    sizes: Mapping[str, float] = field(default_factory=dict)
    """Change of q by each site's last update, in nats."""
    staleness: Mapping[str, int] = field(default_factory=dict)
    """Merges between the start and the merge of each site's last update."""
    halvings: int = 0
    refused: int = 0
    """Updates refused because no damping made them proper."""
    forgotten: tuple[str, ...] = ()
    forgotten_visits: int = 0


@message()
class PVIState:
    """The global posterior by its parts, q = p ∏ₖ tₖ; a site that is missing has tₖ ≡ 1."""

    prior: Mapping[str, NaturalParameters] = field(default_factory=dict)
    sites: Mapping[str, Contribution] = field(default_factory=dict)
    shared: Mapping[str, LatentFactor] = field(default_factory=dict)
    """Fixed or averaged points Z or β, outside the product."""
    first: Mapping[str, AnyShape] = field(default_factory=dict)
    """Z and β before training."""
    rows: Mapping[str, int] = field(default_factory=dict)
    """Training rows of all sites so far."""
    version: int = 0
    """Number of merges so far, from which staleness is computed."""
    sent: Mapping[str, int] = field(default_factory=dict)
    """Asynchronous: the version that each working site received."""
    record: Record = field(default_factory=Record)
    noise: float | None = None
    """Noise variance of numbers, for models of weights."""
    values: Mapping[str, AnyShape] = field(default_factory=dict)
    """Agreed Z and β; empty before the agreement, or if each site refines them."""
    sgpr: SGPRState | None = None
    svgp: SVGPState | None = None


def posterior(state: PVIState) -> Blocks:
    """Return the global q = p ∏ₖ tₖ by block; a block without a prior is the product of the sites' factors."""
    return _product(state.prior, state.sites.values())


def cavity(state: PVIState, site: str) -> Blocks:
    """Return the cavity p ∏_{m≠k} t_m, computed as a product without division."""
    return _product(state.prior, without(state.sites, site).values())


def cavities(state: PVIState) -> Iterator[Blocks]:
    """Yield the cavity of each site in order; 3K products of the factors before and after it."""
    factors = [_gaussians(each.factors) for each in state.sites.values()]
    empty: Blocks = {}
    after = [*accumulate(reversed(factors), _times, initial=empty)][-2::-1]
    before = accumulate(factors, _times, initial=_gaussians(state.prior))
    return map(_times, before, after)


def of_function(contributions: Iterable[Contribution]) -> Factors:
    """Return the product of sites' factors of u, with all pseudo-observations in one set."""
    sites = list(contributions)
    points = [site.points for site in sites if site.points is not None]
    joined = [np.concatenate(arrays) for arrays in zip(*(vars(each).values() for each in points), strict=True)]
    values = _product({}, sites).get("values")
    return Factors(PseudoPoints(*joined) if points else None, NaturalParameters.of(values) if values else None)


def _product(prior: Mapping[str, NaturalParameters], sites: Iterable[Contribution]) -> Blocks:
    return reduce(_times, (_gaussians(site.factors) for site in sites), _gaussians(prior))


def _gaussians(blocks: Mapping[str, NaturalParameters]) -> Blocks:
    return {name: factor.gaussian for name, factor in blocks.items()}


def _times(left: Blocks, right: Blocks) -> Blocks:
    return left | {name: left[name] * factor if name in left else factor for name, factor in right.items()}


def is_proper(state: PVIState) -> bool:
    """Whether q and all cavities are densities, in all blocks with a prior."""
    candidates = chain([posterior(state)], cavities(state))
    return all(blocks[name].is_proper() for blocks in candidates for name in state.prior)


# ---- The merge ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MergeRecord:
    """The damping and the refusals of a merge."""

    damping: float
    """The smallest ρ used; 0 if no site was merged."""
    halvings: int
    """Number of halvings of ρ because q or a cavity would have been improper."""
    refused: tuple[str, ...]
    """Sites that were left out because their update, merged alone, is improper at any ρ."""
    size: Mapping[str, float]
    """By merged site, Σ over blocks of KL(new q ‖ old q) in nats if only this site were merged at its ρ."""


def merge(
    state: PVIState, replies: Mapping[str, Contribution], *, damping: float, deletion: bool = True
) -> tuple[PVIState, MergeRecord]:
    """tₖ ← tₖ^(1−ρ) t̂ₖ^ρ for all sites that replied (Algorithm 1, step 3); without deletion tₖ ← tₖ t̂ₖ^ρ.

    If q or a cavity would be improper, ρ is halved for each site whose update alone makes it improper, then for all
    sites together. A site whose update alone is improper at any ρ is left out. Pseudo-observations are replaced.
    """
    rates, halvings = dict.fromkeys(replies, damping), 0
    refused: tuple[str, ...] = ()
    merged = _merged(state, replies, rates, deletion)
    proper = is_proper(merged)
    if not proper:
        tried = [damping * 0.5**count for count in range(MOST_HALVINGS)]
        counts = dict.fromkeys(replies, MOST_HALVINGS)
        for site, reply in replies.items():
            states = (_merged(state, {site: reply}, {site: rate}, deletion) for rate in tried)
            counts[site] = next((count for count, one in enumerate(states) if is_proper(one)), MOST_HALVINGS)
        refused = tuple(site for site, count in counts.items() if count == MOST_HALVINGS)
        rates = {site: damping * 0.5**count for site, count in counts.items() if site not in refused}
        halvings = sum(counts[site] for site in rates)
        merged = _merged(state, replies, rates, deletion)
        proper = not rates or is_proper(merged)
    while not proper:  # at the latest until 1/K: the mean of K proper states is proper
        rates = {site: 0.5 * rate for site, rate in rates.items()}
        merged, halvings = _merged(state, replies, rates, deletion), halvings + 1
        proper = is_proper(merged)
    least = min(rates.values(), default=0.0)
    return merged, MergeRecord(least, halvings, refused, _sizes(state, replies, rates, deletion))


def _merged(
    state: PVIState, replies: Mapping[str, Contribution], rates: Mapping[str, float], deletion: bool
) -> PVIState:
    if not rates:
        return state
    new = dict(state.sites)
    for site, rho in rates.items():
        old = state.sites[site].factors if site in state.sites else {}
        factors = dict(old)
        for name, proposed in replies[site].factors.items():
            factor = proposed.gaussian
            before = old[name].gaussian if name in old else factor**0.0
            factors[name] = NaturalParameters.of((before ** (1.0 - rho) if deletion else before) * factor**rho)
        new[site] = replace(replies[site], factors=factors)
    return replace(state, sites=new, version=state.version + 1)


def _sizes(
    state: PVIState, replies: Mapping[str, Contribution], rates: Mapping[str, float], deletion: bool
) -> dict[str, float]:
    """Return the change of q by each site alone; infinite if improper, or if none of its blocks has a prior."""
    before = posterior(state)
    sizes = {}
    for site, rho in rates.items():
        after = posterior(_merged(state, replies, {site: rho}, deletion))
        blocks = [name for name in replies[site].factors if name in state.prior]
        proper = bool(state.prior) and all(after[name].is_proper() for name in blocks)
        sizes[site] = sum(float(after[name].kl(before[name])) for name in blocks) if proper else math.inf
    return sizes


def forget(state: PVIState, site: str, labels: Mapping[str, str]) -> PVIState:
    """Return the state without a site's factor, q/tₖ, which is exact in a conjugate model at fixed β and Z.

    Raises NumericsError if the site has no factor or the only one, or if the rest is improper.
    """
    if site not in state.sites:
        names = {one: labels.get(one, one) for one in sorted(state.sites)}
        known = ", ".join(one if name == one else f"{one} ({name})" for one, name in names.items()) or "none"
        raise NumericsError(f"site {site!r} has no factor in this posterior; sites that have one: {known}")
    if len(state.sites) == 1:
        raise NumericsError(f"site {site!r} has the only factor: without it nothing is left")
    record = state.record
    record = replace(
        record,
        visits=without(record.visits, site),
        attempts=without(record.attempts, site),
        sizes=without(record.sizes, site),
        staleness=without(record.staleness, site),
        forgotten=(*record.forgotten, site),
        forgotten_visits=record.forgotten_visits + record.visits.get(site, 0),
    )
    sites, rows = without(state.sites, site), without(state.rows, site)
    left = replace(state, sites=sites, rows=rows, version=state.version + 1, record=record)
    if not is_proper(left):
        raise NumericsError(
            f"without site {site!r} the posterior is improper: other sites' factors depend on it. "
            "Train a few more rounds with more damping, or train again without this site."
        )
    return left


def facts_of(state: PVIState, plan: Plan) -> Facts:
    """Return the facts of visits, factors and merges for ``metrics.json``."""
    most = max(state.record.visits.values(), default=0)
    again = f"`pvi.deletion` = false: rows count again at every visit, up to {most} times; intervals are too narrow"
    notes = [again] if most > 1 and not plan.deletion else []
    return asdict(state.record) | {"factors": factor_strengths(state), "notes": notes}


def factor_strengths(state: PVIState) -> dict[str, dict[str, float]]:
    """By site: ``points`` M_k, ``weight`` tr S_k⁻¹, ``directions`` tr Λ_k(I + Λ_k)⁻¹ of v, else mean precisions."""
    strengths: dict[str, dict[str, float]] = {}
    for site, part in state.sites.items():
        found = {"rows": float(state.rows[site])}
        if part.points is not None:
            found |= {"points": float(part.points.size), "weight": float(np.square(part.points.root).sum())}
        for name, factor in part.factors.items():
            precision = factor.gaussian.precision.numpy()
            if name == "whitened":
                found["directions"] = float(np.trace(np.linalg.solve(np.eye(len(precision)) + precision, precision)))
            else:
                found[name] = float((precision if precision.ndim == 1 else precision.diagonal()).mean())
        strengths[site] = found
    return strengths


def without(by_site: Mapping[str, V], site: str) -> dict[str, V]:
    """Return the entries of all other sites."""
    return {key: value for key, value in by_site.items() if key != site}


# ---- The saved posterior --------------------------------------------------------------------------------------------


def lengthscales_of(hyper: LatentFactor, names: Sequence[str]) -> tuple[NamedArrays, NamedArrays | None]:
    """Return means and sds (None for a point) of log lengthscales under q(β), by part of the kernel."""
    parts: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        part, found, _ = name.partition("lengthscale")
        if found:
            parts.setdefault(f"kernel.{part.replace(' ', '.')}log_lengthscale", []).append(index)
    mean, variance = (each.numpy() for each in hyper.moments())
    scale = None if hyper.value is not None else {part: np.sqrt(variance[at]) for part, at in parts.items()}
    return {part: mean[at] for part, at in parts.items()}, scale


def saved_arrays(
    q: Marginals, factors: Factors, num_inputs: int, names: Sequence[str], *, tied: bool
) -> tuple[NamedArrays, dict[str, str]]:
    """Return the arrays of the saved posterior and their meanings; ``names`` are those of β."""
    arrays: NamedArrays = {}
    meanings: dict[str, str] = {}
    words = ("Z, inducing inputs", f"β, log hyperparameters: {', '.join(names)}")
    shapes = ((-1, num_inputs), (-1,))
    for name, marginal, word, shape in zip(SAVED_LATENTS.values(), (q.inducing, q.hyper), words, shapes, strict=True):
        mean, variance = (part.numpy().reshape(shape) for part in marginal.moments())
        arrays[f"{name}.mean"], meanings[f"{name}.mean"] = mean, f"mean of q of {word}"
        if marginal.value is None:
            arrays[f"{name}.scale"], meanings[f"{name}.scale"] = np.sqrt(variance), f"sd of q of {word}"
    for name, array in encode(factors).items():
        key = f"factor.{name}".replace("factor.points.", POINTS)
        arrays[key], meanings[key] = array, MEANINGS[name.rpartition(".")[2]]
    if factors.points is not None:
        arrays[f"{POINTS}tied"] = np.array(tied)
        meanings[f"{POINTS}tied"] = "whether pseudo-noise scales with σ²"
    return arrays, meanings
