"""PVI: a posterior kept as a product of one factor per site, each refined in turn against all the others.

Ashman et al., *Partitioned variational inference* (2022), Algorithm 1; for sparse GPs with distributions over inducing
inputs and hyperparameters, *Federated learning of sparse Gaussian processes*. q(θ) ∝ p(θ) ∏ₖ tₖ(θ), θ in named blocks
(``inducing`` for Z, ``hyper`` for β, …). A block without a prior is a factor whose prior depends on other blocks (u
given Z): it is multiplied and divided like any other, but only a site can say whether the result is a density.
Pseudo-observations are not multiplied: a site's new ones replace its old ones.

Bayesian committee machines, variational continual learning, streaming VB and global VI are only a choice of
:data:`~fedgp_flower.methods.pvi.options.PRESETS`. Replay and the asynchronous schedule are
:mod:`strategies.replay_pvi` and :mod:`strategies.async_pvi`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from itertools import accumulate, chain
from typing import Any, ClassVar, cast

import numpy as np

from fedgp_flower.errors import NumericsError
from fedgp_flower.gp.gaussian import DiagonalGaussian, Gaussian
from fedgp_flower.messages import decode, encode, leaves, message
from fedgp_flower.methods.pvi.messages import (
    LATENTS,
    Factors,
    FreeEnergyShare,
    Marginal,
    Marginals,
    NaturalParameters,
    Predictive,
    PseudoPoints,
    Refined,
    Visit,
)
from fedgp_flower.methods.pvi.options import Plan, PVIOptions
from fedgp_flower.methods.pvi.saved import EQUATION, lengthscales_of, names_of, saved_arrays
from fedgp_flower.outcome import Snapshot
from fedgp_flower.typing import AnyShape, NamedArrays
from strategies.server.checkpoint import STATE
from strategies.server.finalise import Posterior, lengthscale_facts
from strategies.server.questions import Asking, Each, Figures, Refuse, Roster
from strategies.server.shapes import initial_hyperparameters, initial_locations, shapes_of_inputs
from strategies.server.strategy import FederatedStrategy

FUNCTION = ("points", "values", "whitened")
"""Parts of an answer that may be a site's factor of u or v."""
FIRST_SCALE = 0.1
"""Standard deviation of q(Z) and q(β) that the first visits start from: wide draws of Z would hide their means."""
HEAVY = 4.0
"""Weight of pseudo-observations for each row beyond which no site believes what it sends; honest ones have about 1."""
VISITS = "visits"
"""Field of a state that holds a :class:`PVIState` among other things."""
MOST_HALVINGS = 40
"""Damping below 2⁻⁴⁰ moves nothing in float64 arithmetic: such an update is refused."""


# ---- The state ------------------------------------------------------------------------------------------------------


@message()
class Contribution:
    """What one site has in the posterior, or proposes to have."""

    factors: Mapping[str, NaturalParameters] = leaves("tₖ by block")
    points: PseudoPoints | None = leaves("pseudo-observations", default=None)
    rows: int = leaves("training rows of the site", default=0)

    @property
    def function(self) -> Factors:
        """The factor of u, or of v = L⁻¹u."""
        points = () if self.points is None else (self.points,)
        return Factors(points, self.factors.get("values"), self.factors.get("whitened"))


@message()
class Record:
    """What happened so far, besides the factors."""

    visits: Mapping[str, int] = field(default_factory=dict)
    """Updates merged, per site."""
    attempts: Mapping[str, int] = field(default_factory=dict)
    """Visits begun, per site: a site that fails does not hold up the others."""
    sizes: Mapping[str, float] = field(default_factory=dict)
    """How far each site's last update moved q, in nats."""
    staleness: Mapping[str, int] = field(default_factory=dict)
    """Merges that a site's last update had not seen."""
    leakage: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Each site's own report of how near its pseudo-observations are to its rows."""
    halvings: int = 0
    refused: int = 0
    """Updates left out because no damping made them proper."""
    local: Mapping[str, int] = field(default_factory=dict)
    """What optimisers at the sites had to do: ``rejected`` trial points, ``halvings`` of a fixed point's steps."""
    forgotten: tuple[str, ...] = ()
    forgotten_visits: int = 0
    refit_due: bool = False
    """Shared q(Z), q(β) still hold what a forgotten site had said."""

    @property
    def communications(self) -> int:
        """Updates merged so far, those of forgotten sites among them: the abscissa of a history."""
        return sum(self.visits.values()) + self.forgotten_visits


@message()
class PVIState:
    """The global posterior kept as its parts, q = p ∏ₖ tₖ; a site that is absent has tₖ ≡ 1."""

    prior: Mapping[str, NaturalParameters]
    sites: Mapping[str, Contribution] = field(default_factory=dict)
    shared: Mapping[str, Marginal] = field(default_factory=dict)
    """Z or β outside the product: fixed or averaged points, and what replay shares."""
    first: Mapping[str, AnyShape] = field(default_factory=dict)
    """Z and β before training."""
    rows: Mapping[str, int] = field(default_factory=dict)
    """Training rows of every site that was ever there."""
    version: int = 0
    """Number of merges so far; the clock staleness is measured by."""
    sent: Mapping[str, int] = field(default_factory=dict)
    """Asynchronous: the version that each site which is working was given."""
    record: Record = field(default_factory=Record)


def begin(first: Mapping[str, AnyShape], options: PVIOptions, rows: Mapping[str, int]) -> PVIState:
    """Before the first round: N(0, I) of every block in the product; Z and β outside of it begin as points."""
    size = len(first["inducing"])
    priors = {name: NaturalParameters.of(DiagonalGaussian.standard(first[name].size)) for name in LATENTS}
    priors["whitened"] = NaturalParameters(np.zeros(size), -0.5 * np.eye(size))
    points = {name: Marginal(value=first[name].ravel()) for name in LATENTS if name not in options.product}
    return PVIState({name: priors[name] for name in options.product}, {}, points, first, rows)


def posterior(state: PVIState) -> dict[str, Gaussian]:
    """The global q = p ∏ₖ tₖ by block; a block without a prior is the product of the sites' factors alone."""
    return _product(state, state.sites)


def cavity(state: PVIState, site: str) -> dict[str, Gaussian]:
    """The cavity p ∏_{m≠k} t_m, formed as a product, never by division."""
    return _product(state, [name for name in state.sites if name != site])


def cavities(state: PVIState) -> Iterator[dict[str, Gaussian]]:
    """Every site's cavity in turn, in 3K products of those before it and those behind it."""
    factors = [_gaussians(own.factors) for own in state.sites.values()]
    nothing: dict[str, Gaussian] = {}
    behind = [*accumulate(reversed(factors), _times, initial=nothing)][-2::-1]
    before = accumulate(factors, _times, initial=_gaussians(state.prior))
    return map(_times, before, behind)


def _product(state: PVIState, sites: Iterable[str]) -> dict[str, Gaussian]:
    return reduce(_times, (_gaussians(state.sites[site].factors) for site in sites), _gaussians(state.prior))


def _gaussians(blocks: Mapping[str, NaturalParameters]) -> dict[str, Gaussian]:
    return {name: own.gaussian for name, own in blocks.items()}


def _times(left: dict[str, Gaussian], right: dict[str, Gaussian]) -> dict[str, Gaussian]:
    return left | {name: left[name] * own if name in left else own for name, own in right.items()}


def context(state: PVIState, site: str, plan: Plan) -> dict[str, Gaussian]:
    """What a site multiplies its likelihood with in a local update.

    With deletion it is the cavity; without, the posterior itself (streaming). The Bayesian committee machine that
    splits the prior uses p^(N_k/N) alone.
    """
    if plan.split_prior:
        share = state.rows[site] / sum(state.rows.values())
        return {name: block.gaussian**share for name, block in state.prior.items()}
    return cavity(state, site) if plan.deletion else posterior(state)


def is_proper(state: PVIState) -> bool:
    """Whether q and every cavity are densities, in every block that has a prior."""
    candidates = chain([posterior(state)], cavities(state))
    return all(blocks[name].is_proper() for blocks in candidates for name in state.prior)


def marginals(state: PVIState) -> Marginals:
    """q(Z) and q(β); before the first merge they are narrow around where they begin."""
    if state.version:
        return marginals_of(state, posterior(state))
    return Marginals(
        *(state.shared.get(name) or Marginal.narrow(state.first[name].ravel(), FIRST_SCALE) for name in LATENTS)
    )


def marginals_of(state: PVIState, blocks: Mapping[str, Any]) -> Marginals:
    """Z and β of a product; a latent outside of it is what all sites share."""
    return Marginals(*(state.shared.get(name) or Marginal.of(blocks[name]) for name in LATENTS))


def predictive(state: PVIState) -> Predictive:
    """q(Z), q(β) and the factors of all sites."""
    return Predictive(marginals(state), Factors.product(own.function for own in state.sites.values()))


# ---- Step 1: who is visited -----------------------------------------------------------------------------------------


def due(plan: Plan, sites: Sequence[str], visits: Mapping[str, int]) -> list[str]:
    """Sites that the plan may still visit."""
    return [site for site in sites if not plan.passes or visits.get(site, 0) < plan.passes]


def next_sites(
    plan: Plan,
    sites: Sequence[str],
    attempts: Mapping[str, int],
    sizes: Mapping[str, float],
    generator: np.random.Generator,
) -> list[str]:
    """The sites of the next round, sorted by name; a sequential round has one.

    The residual order is that of Elidan et al. (2012).

    Args:
        plan: Schedule and order.
        sites: Sites that may be visited.
        attempts: How often a visit of each was begun.
        sizes: Size of each one's last update, for ``residual``; unknown counts as the largest, and of equal ones the
            site visited least is next.
        generator: Source of the choice; derive it from (seed, purpose, round).
    """
    allowed = sorted(sites)
    if not allowed:
        return []
    if plan.schedule == "synchronous":
        number = max(1, math.floor(plan.fraction * len(allowed)))
        return sorted(generator.choice(allowed, size=number, replace=False).tolist())
    fewest = min(attempts.get(s, 0) for s in allowed)
    if plan.order == "residual" and fewest:
        return [min(allowed, key=lambda s: (-sizes.get(s, math.inf), attempts[s], s))]
    least = [s for s in allowed if attempts.get(s, 0) == fewest]
    return [least[0] if plan.order != "random" else str(generator.choice(least))]


def order_of(plan: Plan, server_round: int) -> np.random.Generator:
    """Randomness for the order of visits in a round."""
    return np.random.default_rng([plan.seed, server_round, *b"order"])


def damping_of(plan: Plan, num_participants: int) -> float:
    """ρ of a merge of ``num_participants`` sites (asynchronous: of all sites that are being visited at once)."""
    if plan.damping > 0:
        return plan.damping
    return 1.0 if plan.schedule == "sequential" else 1.0 / num_participants


def begun(state: PVIState, sites: Iterable[str]) -> PVIState:
    """The state with visits of some sites begun."""
    attempts = Counter(state.record.attempts)
    attempts.update(sites)
    return replace(state, record=replace(state.record, attempts=dict(attempts)))


# ---- Step 2: what a site is asked, and what it answers --------------------------------------------------------------


class Refinement:
    """What a site is asked on a visit, and its answer as an update."""

    answer: type = Refined

    def request(self, state: PVIState, site: str, plan: Plan) -> Any:
        """What the others know, and the site's own factor to start from."""
        return visit(state, site, plan)

    def read(self, answer: Any, rows: int) -> Refined:
        """The update of a site with so many rows."""
        del rows
        return cast(Refined, answer)


REFINED = Refinement()


def visit(state: PVIState, site: str, plan: Plan) -> Visit:
    """What the others know, and the site's own factor to start from."""
    q, around = posterior(state), context(state, site, plan)
    known = sum(state.rows[name] for name in {*state.sites, site}) / sum(state.rows.values())
    others = [own for name, own in state.sites.items() if name != site or not plan.deletion]
    return Visit(
        q=marginals(state),
        posterior={name: NaturalParameters.of(q[name]) for name in state.prior if name not in LATENTS},
        context={name: NaturalParameters.of(around[name]) for name in state.prior},
        others=Factors.product(own.function for own in others),
        known=known,
        own=state.sites[site].function if plan.deletion and site in state.sites else None,
    )


def misfit(state: PVIState, answer: Refined, options: PVIOptions) -> str | None:
    """Why an answer does not hold what the configuration makes of it, or None."""
    reasons = (_latent_misfit(state, answer, name, options) for name in LATENTS)
    return _function_misfit(state, answer, options) or next((reason for reason in reasons if reason), None)


def too_heavy(answer: Refined, rows: int) -> str | None:
    """Why pseudo-observations weigh more than the rows they stand for, or None: tr S⁻¹σ² is about their number."""
    weight = 0.0 if answer.points is None else float(np.square(answer.points.root).sum())
    if weight <= HEAVY * rows:
        return None
    return f"`points.root`: its pseudo-observations weigh as much as {weight:.3g} rows, and the site has {rows}"


def _function_misfit(state: PVIState, answer: Refined, options: PVIOptions) -> str | None:
    for name in FUNCTION:
        wanted = "function" in answer.holds and name == options.function
        if (getattr(answer, name) is not None) != wanted:
            return f"`{name}` is {'absent' if wanted else 'present, expected none'}"
    gaussian, size = answer.values or answer.whitened, len(state.first["inducing"])
    if gaussian is not None and len(gaussian.eta1) != size:
        return f"`{options.function}`: {len(gaussian.eta1)} entries, expected {size}"
    if answer.whitened is not None and options.definite:
        reason = answer.whitened.refusal("whitened", negative=False)
        if reason:
            return reason
    dimensions = 2 if options.factor == "full" else 1
    if answer.points is not None and answer.points.root.ndim != dimensions:
        return f"`points.root`: expected {dimensions} dimension(s) for `pvi.factor` = {options.factor!r}"
    return None


def _latent_misfit(state: PVIState, answer: Refined, name: str, options: PVIOptions) -> str | None:
    own: Marginal | None = getattr(answer, name)
    kind = "absent" if own is None else "a value" if own.is_point else "a distribution"
    expected = options.form(name) if "latents" in answer.holds else "absent"
    if kind != expected:
        return f"`{name}` is {kind}, expected {expected}"
    if own is not None and own.size != state.first[name].size:
        return f"`{name}`: {own.size} entries, expected {state.first[name].size}"
    return None if own is None or name in state.prior else own.improper(name)


def proposal(state: PVIState, answer: Refined, rows: int) -> Contribution:
    """The factors t̂ₖ of an answer; latents outside the product have none."""
    parts = {name: own.natural() for name in LATENTS if name in state.prior and (own := getattr(answer, name))}
    gaussians = {name: own for name in ("values", "whitened") if (own := getattr(answer, name)) is not None}
    return Contribution(parts | gaussians, answer.points, rows)


def shared(state: PVIState, answer: Refined, options: PVIOptions, share: float = 1.0) -> PVIState:
    """Latents outside the product as an answer has them.

    A point Z that is averaged becomes (1 − N_k/N) φ + (N_k/N) φ_k, ``share`` being N_k/N (federated sparse GPs,
    Algorithm 1); q(Z) and q(β) of a refit replace those before.
    """
    new = {name: own for name in LATENTS if name not in state.prior and (own := getattr(answer, name)) is not None}
    moved, before = new.get("inducing"), state.shared.get("inducing")
    if options.inducing == "average" and moved is not None and before is not None:
        assert moved.value is not None
        assert before.value is not None
        new["inducing"] = Marginal(value=(1.0 - share) * before.value + share * moved.value)
    return replace(state, shared={**state.shared, **new})


# ---- Step 3: the merge ----------------------------------------------------------------------------------------------


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


def merge(
    state: PVIState, replies: Mapping[str, Contribution], *, damping: float, deletion: bool = True
) -> tuple[PVIState, MergeRecord]:
    """tₖ ← tₖ^(1−ρ) t̂ₖ^ρ for every site that replied, all at once (Algorithm 1, step 3).

    Without deletion t̂ₖ is what the rows add to a posterior that already holds tₖ: tₖ ← tₖ t̂ₖ^ρ. If q or a cavity would
    be improper, ρ is halved for each site that would make it so alone, then for all of them together, until it is not;
    the halvings are counted. A site that is improper alone at any ρ is left out and does not hold up the others.
    Pseudo-observations are replaced undamped: they are proper whatever they are.
    """
    rates, halvings = dict.fromkeys(replies, damping), 0
    refused: tuple[str, ...] = ()
    merged = _merged(state, replies, rates, deletion)
    proper = is_proper(merged)
    if not proper:
        counts = {site: _halvings(state, replies, site, damping, deletion) for site in replies}
        refused = tuple(site for site, count in counts.items() if count == MOST_HALVINGS)
        rates = {site: damping * 0.5**count for site, count in counts.items() if site not in refused}
        halvings = sum(counts[site] for site in rates)
        merged = _merged(state, replies, rates, deletion)
        proper = not rates or is_proper(merged)
    while not proper:  # ends at 1/K: the mean of K proper states is proper
        rates = {site: 0.5 * rate for site, rate in rates.items()}
        merged, halvings = _merged(state, replies, rates, deletion), halvings + 1
        proper = is_proper(merged)
    least = min(rates.values(), default=0.0)
    return merged, MergeRecord(least, halvings, refused, _sizes(state, replies, rates, deletion))


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
        old = state.sites[site].factors if site in state.sites else {}
        factors = dict(old)
        for name, proposed in replies[site].factors.items():
            factor = proposed.gaussian
            before = old[name].gaussian if name in old else factor.flat()
            factors[name] = NaturalParameters.of((before ** (1.0 - rho) if deletion else before) * factor**rho)
        new[site] = replace(replies[site], factors=factors)
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
        proper = all(after[name].is_proper() for name in blocks)
        sizes[site] = sum(float(after[name].kl(before[name])) for name in blocks) if proper else math.inf
    return sizes


def fold(
    state: PVIState, answers: Mapping[str, Refined], damping: float, plan: Plan, options: PVIOptions
) -> Asking[tuple[PVIState, Figures]]:
    """Merge the answers that can be used; the others are their sites' failures. No figures where there is none."""
    usable = dict(answers)
    for site, own in answers.items():
        reason = misfit(state, own, options) or (too_heavy(own, state.rows[site]) if options.factor == "tied" else None)
        if reason:
            yield Refuse(site, reason)
            del usable[site]
    proposed = {site: proposal(state, own, state.rows[site]) for site, own in usable.items()}
    state, merged = merge(state, proposed, damping=damping, deletion=plan.deletion)
    for site in merged.refused:
        yield Refuse(site, "no damping makes its update proper")
        del usable[site]
    for site, own in usable.items():
        state = shared(state, own, options, state.rows[site] / sum(state.rows.values()))
    state = replace(state, record=_noted(state, usable, merged))
    if not usable:
        return state, {}
    weights = [state.rows[site] for site in usable]
    objective = float(np.average([own.objective for own in usable.values()], weights=weights))
    moved = {"damping": merged.damping, "halvings": merged.halvings, "refused": len(merged.refused)}
    return state, {"objective": objective, "visits": state.record.communications, **moved}


def _noted(state: PVIState, answers: Mapping[str, Refined], merged: MergeRecord) -> Record:
    """The record with a merge, and what the merged sites said."""
    record = state.record
    visits, sizes, leakage = Counter(record.visits), dict(record.sizes), dict(record.leakage)
    local = Counter(record.local)
    visits.update(list(answers))
    for site, own in answers.items():
        moved = merged.size[site] if state.prior else own.moved or None  # where all is shared, only the site knows
        if moved is not None and math.isfinite(moved):  # else unknown: it counts as the largest
            sizes[site] = moved
        local["rejected"] += own.rejected
        local["halvings"] += own.halvings
        report = {} if own.leakage is None else vars(own.leakage)
        leakage[site] = {name: value for name, value in report.items() if value is not None}
    return replace(
        record,
        visits=dict(visits),
        sizes=sizes,
        leakage=leakage,
        local=dict(local),
        halvings=record.halvings + merged.halvings,
        refused=record.refused + len(merged.refused),
    )


# ---- The algorithm --------------------------------------------------------------------------------------------------


def one_round(
    state: PVIState, roster: Roster, plan: Plan, options: PVIOptions, asked: Refinement = REFINED
) -> Asking[tuple[PVIState, Figures]]:
    """One iteration of Algorithm 1."""
    state = replace(state, rows={**state.rows, **roster.rows})
    # 1. b_i ← index set of the next factors to refine
    waiting = due(plan, roster.sites, state.record.visits)
    chosen = next_sites(plan, waiting, state.record.attempts, state.record.sizes, order_of(plan, roster.round))
    state = begun(state, chosen)
    # 2. each site k ∈ b_i maximises its local free energy in the context of the others; t̂ₖ comes back
    replies = yield Each(asked.answer, {site: asked.request(state, site, plan) for site in chosen})
    answers = {site: asked.read(own, state.rows[site]) for site, own in replies.items()}
    # 3. tₖ ← tₖ^(1−ρ) t̂ₖ^ρ,  q ∝ p ∏ₖ tₖ
    return (yield from fold(state, answers, damping_of(plan, max(len(answers), 1)), plan, options))


def forget(state: PVIState, site: str) -> PVIState:
    """The state without a site's factor: q/tₖ. Exact, as if it had never been, in a conjugate model at fixed β and Z.

    Raises:
        NumericsError: the site is unknown, it is the only one, or what remains is improper.
    """
    if site not in state.sites:
        known = ", ".join(sorted(state.sites)) or "none"
        raise NumericsError(f"site {site!r} has no factor in this posterior; sites that have one: {known}")
    if len(state.sites) == 1:
        raise NumericsError(f"site {site!r} is the only one with a factor: without it nothing is left")
    record = state.record
    record = replace(
        record,
        visits=_without(record.visits, site),
        attempts=_without(record.attempts, site),
        sizes=_without(record.sizes, site),
        staleness=_without(record.staleness, site),
        leakage=_without(record.leakage, site),
        forgotten=(*record.forgotten, site),
        forgotten_visits=record.forgotten_visits + record.visits.get(site, 0),
        refit_due=True,
    )
    sites, rows = _without(state.sites, site), _without(state.rows, site)
    without = replace(state, sites=sites, rows=rows, version=state.version + 1, record=record)
    if not is_proper(without):
        raise NumericsError(
            f"without site {site!r} the posterior is improper: other sites' factors rely on it. "
            "Refine for a few communications with that site's factor damped, or train again without it."
        )
    return without


def _without(by_site: Mapping[str, Any], site: str) -> dict[str, Any]:
    return {key: value for key, value in by_site.items() if key != site}


def root_of(snapshot: Snapshot) -> str:
    """What names of the state in a checkpoint begin with: a run that first agrees on Z and β keeps that beside it."""
    nested = f"{STATE}{VISITS}."
    return nested if any(name.startswith(nested) for name in snapshot.arrays) else STATE


def state_of(snapshot: Snapshot) -> PVIState:
    """The state in a checkpoint."""
    root = root_of(snapshot)
    return decode(PVIState, {n.removeprefix(root): a for n, a in snapshot.arrays.items() if n.startswith(root)})


def forget_site(snapshot: Snapshot, site: str) -> Snapshot:
    """A checkpoint from which a site's factor, its rows and the records of its visits are gone.

    Its label stays, since simulated rows go on being dealt to as many sites as there were, and so do its failures.

    Raises:
        NumericsError: the site has no factor, or what remains is no density.
    """
    root = root_of(snapshot)
    state = forget(state_of(snapshot), site)
    arrays = {name: array for name, array in snapshot.arrays.items() if not name.startswith(root)}
    preparation = dict(snapshot.facts["preparation"])
    preparation["rows"] = _without(preparation["rows"], site)
    own = {f"{root}{name}": array for name, array in encode(state).items()}
    return Snapshot(arrays | own, {**snapshot.facts, "preparation": preparation})


# ---- What a run says of it ------------------------------------------------------------------------------------------


def free_energy(state: PVIState, answers: Mapping[str, FreeEnergyShare], alpha: float) -> dict[str, float] | None:
    """F = Σ_k E_q log p(y_k | f) − E KL(q(u)) − α KL(q(Z)) − KL(q(β)); None unless all sites with a factor answered."""
    if set(state.sites) - set(answers):
        return None
    fit = sum(answers[site].fit for site in sorted(state.sites))
    divergence = float(np.median([own.divergence for own in answers.values()]))
    q = marginals_of(state, posterior(state))
    kl = {name: divergence_of(getattr(q, name)) for name in LATENTS}
    total = fit - divergence - alpha * kl["inducing"] - kl["hyper"]
    return {"total": total, "fit": fit, "kl_function": divergence, **{f"kl_{name}": kl[name] for name in LATENTS}}


def divergence_of(marginal: Marginal) -> float:
    """KL in nats of q(Z) or q(β) from its prior N(0, I); 0 for a point."""
    latent = marginal.latent()
    return float(latent.kl(DiagonalGaussian.standard(latent.size))) if isinstance(latent, DiagonalGaussian) else 0.0


def factor_strengths(state: PVIState) -> dict[str, dict[str, float]]:
    """How much each site's factor says, by site and in units that compare sites.

    ``points``: M_k. ``weight``: tr S_k⁻¹, which for tied noise is in units of 1/σ², that is, in rows. ``inducing``,
    ``hyper``: mean precision of the factors of Z and β, where the prior has 1. ``directions``: tr Λ_k(I + Λ_k)⁻¹, how
    many of the M directions of v the factor alone would determine. ``values``: mean precision of u.
    """
    strengths: dict[str, dict[str, float]] = {}
    for site, own in state.sites.items():
        says = {"rows": float(own.rows)}
        if own.points is not None:
            says |= {"points": float(len(own.points.targets)), "weight": float(np.square(own.points.root).sum())}
        for name, factor in own.factors.items():
            precision = -2.0 * factor.eta2
            if name == "whitened":
                says["directions"] = float(np.trace(np.linalg.solve(np.eye(len(precision)) + precision, precision)))
            else:
                says[name] = float((precision if precision.ndim == 1 else precision.diagonal()).mean())
        strengths[site] = says
    return strengths


class PVI(FederatedStrategy[PVIState]):
    """Sequential and synchronous visits; sites optimise their factors of u, Z and β."""

    method = "pvi"
    options_class = PVIOptions
    state_class = PVIState
    implied: ClassVar[Mapping[str, Any]] = {"local_update": "adam"}
    options: PVIOptions

    @property
    def plan(self) -> Plan:
        """How sites are visited and merged."""
        return self.options.plan(self.config.seed)

    def initialise(self, roster: Roster) -> Asking[PVIState]:
        """Draw the first Z from federated statistics, the same for all sites; nothing is known of the function yet."""
        answers = yield from shapes_of_inputs(roster)
        locations = initial_locations(answers, self.config.model, self.config.seed)
        first = {"inducing": locations, "hyper": initial_hyperparameters(answers)["hyper"]}
        return begin(first, self.options, roster.rows)

    def resumed(self, state: PVIState, roster: Roster) -> Asking[PVIState]:
        """After a site was forgotten nothing is left of it but what other factors owe to it."""
        del roster
        yield from ()
        return replace(state, record=replace(state.record, refit_due=False))

    def one_round(self, state: PVIState, roster: Roster) -> Asking[tuple[PVIState, Figures]]:
        """Algorithm 1 of Ashman et al. (2022)."""
        return (yield from one_round(state, roster, self.plan, self.options))

    def finished(self, state: PVIState) -> bool:
        """Whether a one-pass special case has visited every site."""
        return not due(self.plan, self.roster().sites, state.record.visits)

    def predictive(self, state: PVIState, roster: Roster) -> Asking[Predictive]:
        """q(Z), q(β) and the factors of all sites."""
        del roster
        yield from ()
        return predictive(state)

    def public(self, state: PVIState) -> NamedArrays:
        """All that predicts."""
        return encode(predictive(state))

    def posterior_of(self, state: PVIState) -> Posterior:
        """The saved posterior: it predicts without any site."""
        section, first = self.config.model, state.first["inducing"]
        names = names_of(section, first.shape[1])
        arrays, meanings = saved_arrays(predictive(state), first, names, tied=self.options.tied)
        model = {"family": "pvi", "kernel": section.kernel, "ard": section.ard, "jitter": section.jitter}
        model |= {"likelihood": section.likelihood, "samples": self.options.prediction_samples}
        model |= {"seed": self.config.seed}
        return Posterior(arrays, meanings, dict.fromkeys(arrays, "standardised"), EQUATION, model)

    def details_of(self, state: PVIState) -> dict[str, Any]:
        """Counts, and what sites said of how near their pseudo-observations are to rows."""
        facts: dict[str, Any] = {"version": state.version, "damping": self.options.plan().damping}
        names = names_of(self.config.model, state.first["inducing"].shape[1])
        known = lengthscales_of(predictive(state).q.hyper, names)
        facts["relevance"] = lengthscale_facts(*known, "q(β), which all sites have refined")
        return asdict(state.record) | facts | {"factors": factor_strengths(state)}

    def final(self, state: PVIState, roster: Roster) -> Asking[dict[str, Any]]:
        """The free energy, of the terms that sites compute."""
        request = predictive(state)
        answers = yield Each(FreeEnergyShare, dict.fromkeys(roster.everyone, request), retries=1)
        return {"free_energy": free_energy(state, answers, self.options.alpha)}
