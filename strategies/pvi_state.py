"""The state of partitioned variational inference: a prior and a factor per site, and pure functions between states.

q(θ) ∝ p(θ) ∏ₖ tₖ(θ), θ in named blocks (``inducing`` for Z, ``hyper`` for β, …). A block without a prior is a factor
whose prior depends on other blocks (u given Z): it is multiplied and divided like any other, but only a site can say
whether the result is a density. Pseudo-observations are not multiplied: a site's new ones replace its old ones.

References:
    Ashman et al., Partitioned variational inference (2022), Algorithm 1, Property 2.2, Section 2.4.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from fedgp_flower.errors import NumericsError
from fedgp_flower.gaussian import Gaussian
from fedgp_flower.shapes import Array, NamedArrays

Blocks = Mapping[str, Gaussian]
MOST_HALVINGS = 40
"""Damping below 2⁻⁴⁰ moves nothing in float64 arithmetic: such an update is refused."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one site has in the posterior, or proposes to have."""

    factors: Blocks
    """tₖ by block."""
    arrays: NamedArrays = field(default_factory=dict)
    """Pseudo-observations under names."""
    num_examples: int = 0


@dataclass(frozen=True, slots=True)
class PVIState:
    """The global posterior kept as its parts, q = p ∏ₖ tₖ; a site that is absent has tₖ ≡ 1."""

    prior: Blocks
    sites: Mapping[str, Contribution] = field(default_factory=lambda: MappingProxyType({}))
    points: Mapping[str, Array] = field(default_factory=lambda: MappingProxyType({}))
    """Latents that are points: fixed Z, FedAvg of Z, and what replay shares."""
    version: int = 0
    """Number of merges so far; the clock staleness is measured by."""


@dataclass(frozen=True, slots=True)
class MergeRecord:
    """What a merge did beyond the formula."""

    damping: float
    """The least ρ in the end; 0 where nobody was merged."""
    halvings: int
    """How often a ρ was halved because q or a cavity would have been improper."""
    refused: tuple[str, ...]
    """Sites whose update is improper at any ρ, though nobody else's is merged with it: they were left out."""
    size: Mapping[str, float]
    """Per merged site, Σ over blocks of KL(new q ‖ old q) in nats had that site alone been merged at its ρ."""


def posterior(state: PVIState) -> dict[str, Gaussian]:
    """The global q = p ∏ₖ tₖ by block; a block without a prior is the product of the sites' factors alone."""
    return _product(state.prior, (site.factors for site in state.sites.values()))


def cavity(state: PVIState, site: str) -> dict[str, Gaussian]:
    """The cavity p ∏_{m≠k} t_m, formed as a product, never by division."""
    return _product(state.prior, (other.factors for name, other in state.sites.items() if name != site))


def context(state: PVIState, site: str, *, deletion: bool, prior_share: float | None = None) -> dict[str, Gaussian]:
    """What a site multiplies its likelihood with in a local update.

    Args:
        state: Current state.
        site: The site about to be visited.
        deletion: Take the site's own factor out first (PVI); without, the posterior itself is the context (streaming).
        prior_share: N_k/N to use the prior to that power alone: the Bayesian committee machine that splits the prior.
    """
    if prior_share is not None:
        return {name: block**prior_share for name, block in state.prior.items()}
    return cavity(state, site) if deletion else posterior(state)


def merge(
    state: PVIState, replies: Mapping[str, Contribution], *, damping: float, deletion: bool = True
) -> tuple[PVIState, MergeRecord]:
    """tₖ ← tₖ^(1−ρ) t̂ₖ^ρ for every site that replied, all at once (Algorithm 1, step 3).

    Without deletion t̂ₖ is what the rows add to a posterior that already holds tₖ: tₖ ← tₖ t̂ₖ^ρ. If q or a cavity would
    be improper, ρ is halved for each site that would make it so alone, then for all of them together, until it is not;
    the halvings are counted. A site that is improper alone at any ρ is left out and does not hold up the others.
    Pseudo-observations are replaced undamped: they are proper whatever they are.

    Args:
        state: Current state.
        replies: Per site its proposed contribution t̂ₖ = q_k / context.
        damping: ρ in (0, 1].
        deletion: As in :func:`context`.
    """
    rates, halvings = dict.fromkeys(replies, damping), 0
    refused: tuple[str, ...] = ()
    merged = _merged(state, replies, rates, deletion)
    if not is_proper(merged):
        counts = {site: _halvings(state, replies, site, damping, deletion) for site in replies}
        refused = tuple(site for site, count in counts.items() if count == MOST_HALVINGS)
        rates = {site: damping * 0.5**count for site, count in counts.items() if site not in refused}
        halvings = sum(counts[site] for site in rates)
        merged = _merged(state, replies, rates, deletion)
    while rates and not is_proper(merged):  # ends at 1/K: the mean of K proper states is proper
        rates = {site: 0.5 * rate for site, rate in rates.items()}
        merged, halvings = _merged(state, replies, rates, deletion), halvings + 1
    least = min(rates.values(), default=0.0)
    return merged, MergeRecord(least, halvings, refused, _sizes(state, replies, rates, deletion))


def forget(state: PVIState, site: str) -> PVIState:
    """The state without a site's factor: q/tₖ. Exact, as if it had never been, in a conjugate model at fixed β and Z.

    Raises:
        NumericsError: the site is unknown, or what remains is improper.
    """
    if site not in state.sites:
        known = ", ".join(sorted(state.sites)) or "none"
        raise NumericsError(f"site {site!r} has no factor in this posterior; sites that have one: {known}")
    left = {name: value for name, value in state.sites.items() if name != site}
    without = replace(state, sites=left, version=state.version + 1)
    if not is_proper(without):
        raise NumericsError(
            f"without site {site!r} the posterior is improper: other sites' factors rely on it. "
            "Refine for a few communications with that site's factor damped, or train again without it."
        )
    return without


def is_proper(state: PVIState) -> bool:
    """Whether q and every cavity are densities, in every block that has a prior."""
    candidates = [posterior(state), *(cavity(state, site) for site in state.sites)]
    return all(blocks[name].is_proper() for blocks in candidates for name in state.prior)


def average_points(state: PVIState, points: Mapping[str, Array], share: float) -> PVIState:
    """φ ← (1 − N_k/N) φ + (N_k/N) φ_k for latents that are points (federated sparse GPs, Algorithm 1)."""
    averaged = {name: (1.0 - share) * state.points[name] + share * np.asarray(value) for name, value in points.items()}
    return replace(state, points={**state.points, **averaged})


def _product(start: Blocks, factors: Iterable[Blocks]) -> dict[str, Gaussian]:
    out = dict(start)
    for blocks in factors:
        for name, factor in blocks.items():
            out[name] = out[name] * factor if name in out else factor
    return out


def _halvings(state: PVIState, replies: Mapping[str, Contribution], site: str, damping: float, deletion: bool) -> int:
    """How often ρ must be halved until a site's update alone is proper; ``MOST_HALVINGS`` if that does not help."""
    tries = (_merged(state, replies, {site: damping * 0.5**count}, deletion) for count in range(MOST_HALVINGS))
    return next((count for count, merged in enumerate(tries) if is_proper(merged)), MOST_HALVINGS)


def _merged(
    state: PVIState, replies: Mapping[str, Contribution], rates: Mapping[str, float], deletion: bool
) -> PVIState:
    if not rates:
        return state
    new = dict(state.sites)
    for site, rho in rates.items():
        reply = replies[site]
        old = state.sites[site].factors if site in state.sites else {}
        factors = {}
        for name, factor in reply.factors.items():
            before = old[name] if name in old else factor.flat()
            factors[name] = (before ** (1.0 - rho) if deletion else before) * factor**rho
        new[site] = replace(reply, factors={**old, **factors})
    return replace(state, sites=new, version=state.version + 1)


def _sizes(
    state: PVIState, replies: Mapping[str, Contribution], rates: Mapping[str, float], deletion: bool
) -> dict[str, float]:
    """How far each site alone moves q; infinite where alone it would be improper."""
    before = posterior(state)
    sizes = {}
    for site, rho in rates.items():
        after = posterior(_merged(state, replies, {site: rho}, deletion))
        blocks = [name for name in replies[site].factors if name in state.prior]
        if all(after[name].is_proper() for name in blocks):
            sizes[site] = sum(float(after[name].kl(before[name])) for name in blocks)
        else:
            sizes[site] = math.inf
    return sizes
