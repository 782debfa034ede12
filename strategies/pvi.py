"""PVI: a posterior as the product of one factor per site; each factor is refined given the others.

Ashman et al., *Partitioned variational inference* (2022), Algorithm 1; for sparse GPs with distributions over inducing
inputs and hyperparameters, *Federated learning of sparse Gaussian processes*. q(θ) ∝ p(θ) ∏ₖ tₖ(θ); products, cavities
and the merge are in :mod:`strategies.pvi_state`, local updates in :mod:`strategies.pvi_updates`.

Asynchronous visits follow Section 4 of the paper: an answer is merged when it arrives, and that site then receives the
newest posterior. The staleness of an answer is the number of merges since its site received a posterior.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fedgp_flower.errors import ProtocolError, RunError
from fedgp_flower.gp.gaussian import Gaussian
from fedgp_flower.gp.models import LOCATIONS
from fedgp_flower.messages import decode, encode
from fedgp_flower.methods.pvi.messages import (
    LATENTS,
    Factors,
    LatentFactor,
    LogLikelihood,
    Marginals,
    NaturalParameters,
    Predictive,
)
from fedgp_flower.methods.pvi.model import ALPHA, PREDICTION_DRAWS, SparseModel, factors_of, prediction_draws
from fedgp_flower.methods.pvi.options import Plan, PVIOptions
from fedgp_flower.outcome import Posterior, Snapshot
from fedgp_flower.typing import NamedArrays
from strategies import pvi_state, pvi_updates, sgpr, svgp
from strategies.pooled_bound import ROWS_PER_POINT, Problem, disclosure_by_total, saved
from strategies.pvi_state import PVIState
from strategies.pvi_updates import AgreedParameters, Proposal, Update
from strategies.server.checkpoint import STATE, arrays_of
from strategies.server.questions import (
    Asking,
    Each,
    Figures,
    First,
    Predicted,
    Refuse,
    Roster,
    Total,
    lengthscale_facts,
)
from strategies.server.shapes import initial_locations, shape_of_inputs
from strategies.server.strategy import FederatedStrategy

SETTLED_EXACT, SETTLED = 1e-6, 1e-3
"""PVI has converged if each site's latest update moved q by fewer nats; :data:`SETTLED` for natural gradients."""

# ---- Algorithm 1 ----------------------------------------------------------------------------------------------------


def one_round(state: PVIState, roster: Roster, plan: Plan, update: Update) -> Asking[tuple[PVIState, Figures]]:
    """One iteration of Algorithm 1; an asynchronous one merges the first answer that arrives."""
    state = replace(state, rows={**state.rows, **roster.rows})
    # 1. b_i ← index set of the next factors to refine
    chosen = next_visits(state, roster, plan)
    attempts = Counter(state.record.attempts) + Counter(chosen)
    state = replace(state, record=replace(state.record, attempts=dict(attempts)))
    # 2. each site k ∈ b_i maximises its local free energy in the context of the others; t̂ₖ comes back
    requests = {site: update.request(state, site, plan) for site in chosen}
    if plan.schedule != "asynchronous":
        replies = yield Each(update.answer, requests, sizes=update.sizes)
        # 3. tₖ ← tₖ^(1−ρ) t̂ₖ^ρ,  q ∝ p ∏ₖ tₖ
        return (yield from fold(state, replies, damping_of(plan, max(len(replies), 1)), plan, update))
    working = {site: state.sent.get(site, state.version) for site in (*roster.pending, *chosen)}
    working |= dict.fromkeys(chosen, state.version)
    site, answer = yield First(update.answer, requests, sizes=update.sizes)
    damping, stale = damping_of(plan, len(working)), state.version - working.pop(site)
    state = replace(state, sent=working)
    state, figures = yield from fold(state, {} if answer is None else {site: answer}, damping, plan, update)
    if answer is not None:
        record = state.record
        state = replace(state, record=replace(record, staleness={**record.staleness, site: stale}))
    return state, figures and {**figures, "staleness": stale}


def fold(
    state: PVIState, replies: Mapping[str, Any], damping: float, plan: Plan, update: Update
) -> Asking[tuple[PVIState, Figures]]:
    """Merge the usable answers and refuse the others; return no figures if none is usable."""
    usable: dict[str, Proposal] = {}
    for site, answer in replies.items():
        try:
            usable[site] = update.read(state, site, answer)
        except ProtocolError as error:
            yield Refuse(site, str(error))
    proposed = {site: contribution for site, (contribution, _, _) in usable.items()}
    state, merged = pvi_state.merge(state, proposed, damping=damping, deletion=plan.deletion)
    for site in merged.refused:
        yield Refuse(site, "no damping makes its update proper")
        del usable[site]
    for site, (_, _, shared) in usable.items():
        state = pvi_updates.averaged(state, shared, state.rows[site] / sum(state.rows.values()))
    known = {site: merged.size[site] for site in usable if math.isfinite(merged.size[site])}
    record = replace(
        state.record,
        visits=dict(Counter(state.record.visits) + Counter(list(usable))),
        sizes={**state.record.sizes, **known},
        halvings=state.record.halvings + merged.halvings,
        refused=state.record.refused + len(merged.refused),
    )
    state = replace(state, record=record)
    if not usable:
        return state, {}
    weights = [state.rows[site] for site in usable]
    figures = {"objective": float(np.average([objective for _, objective, _ in usable.values()], weights=weights))}
    visits = sum(record.visits.values()) + record.forgotten_visits
    figures |= {"visits": visits, "damping": merged.damping, "halvings": merged.halvings}
    moved = max(merged.size.values())
    return state, figures | {"refused": len(merged.refused)} | ({"moved": moved} if math.isfinite(moved) else {})


# ---- Step 1: which sites are visited --------------------------------------------------------------------------------


def next_visits(state: PVIState, roster: Roster, plan: Plan) -> list[str]:
    """Return the next sites by the plan's schedule: one, all, or idle sites up to the concurrency."""
    record, generator = state.record, np.random.default_rng([plan.seed, roster.round, *b"order"])
    if plan.schedule == "synchronous":
        return sorted(due(plan, roster.sites, record.visits))
    if plan.schedule == "sequential":
        return in_turn(plan, due(plan, roster.sites, record.visits), record.attempts, 1, generator)
    room = (plan.concurrency or len(roster.sites)) - len(roster.pending)
    return in_turn(plan, set(roster.sites) - set(roster.pending), record.attempts, room, generator)


def due(plan: Plan, sites: Collection[str], visits: Mapping[str, int]) -> list[str]:
    """Return the sites that have not had all their passes."""
    return [site for site in sites if not plan.passes or visits.get(site, 0) < plan.passes]


def in_turn(
    plan: Plan, sites: Collection[str], attempts: Mapping[str, int], number: int, generator: np.random.Generator
) -> list[str]:
    """Return ``number`` sites, those with the fewest attempts first; ties are broken by name or at random."""
    left, chosen = sorted(sites), list[str]()
    while left and len(chosen) < number:
        fewest = min(attempts.get(site, 0) for site in left)
        least = [site for site in left if attempts.get(site, 0) == fewest]
        chosen.append(str(generator.choice(least)) if plan.order == "random" else least[0])
        left.remove(chosen[-1])
    return chosen


def damping_of(plan: Plan, num_participants: int) -> float:
    """Return ρ of a merge of ``num_participants`` sites (asynchronous: of all sites visited at the same time)."""
    return plan.damping or (1.0 if plan.schedule == "sequential" else 1.0 / num_participants)


# ---- Forgetting a site ----------------------------------------------------------------------------------------------


def state_of(snapshot: Snapshot) -> PVIState:
    """Return the state of a checkpoint."""
    return decode(PVIState, arrays_of(snapshot, STATE))


def forget_site(snapshot: Snapshot, site: str) -> Snapshot:
    """Return a checkpoint without a site's factor, rows and visits; its label stays, which keeps the partition."""
    state = encode(pvi_state.forget(state_of(snapshot), site, snapshot.facts["preparation"]["labels"]))
    arrays = {name: array for name, array in snapshot.arrays.items() if not name.startswith(STATE)}
    preparation = dict(snapshot.facts["preparation"])
    preparation["rows"] = pvi_state.without(preparation["rows"], site)
    arrays |= {f"{STATE}{name}": array for name, array in state.items()}
    return Snapshot(arrays, {**snapshot.facts, "preparation": preparation})


# ---- The posterior --------------------------------------------------------------------------------------------------


def free_energy(state: PVIState, request: object, divergences: Mapping[str, float]) -> Asking[dict[str, Any]]:
    """Return F = Σ_k E_q log p(y_k | f) − Σ KL(q ‖ p), with weight α for q(Z); nothing unless all sites answer."""
    summed = yield Total(LogLikelihood, request, tuple(state.sites))
    if summed.total is None or len(summed.sites) < len(state.sites):
        return {}
    fit = float(summed.total.value)
    total = fit - sum((ALPHA if name == "kl_inducing" else 1.0) * kl for name, kl in divergences.items())
    return {"free_energy": {"total": total, "fit": fit, **divergences}}


def parts_of(state: PVIState) -> tuple[Marginals, Factors]:
    """Return q(Z), q(β) and the factors of all sites."""
    return pvi_updates.marginals(state), pvi_state.of_function(state.sites.values())


class PVI(FederatedStrategy[PVIState]):
    """Partitioned variational inference of a sparse GP."""

    method = "pvi"
    options_class = PVIOptions
    state_class = PVIState
    options: PVIOptions

    @property
    def plan(self) -> Plan:
        """The plan of visits; exact factors and natural gradients are not damped by default."""
        plan = self.options.plan(self.config.seed)
        return replace(plan, damping=plan.damping or 1.0) if self.agreement else plan

    @property
    def agreement(self) -> AgreedParameters | None:
        """The rounds that agree on Z and β, if sites do not refine them; one exchange is kept for first visits."""
        if not self.options.agrees:
            return None
        config, exact = self.config, self.config.model.likelihood == "gaussian"
        most, target = self.options.exchanges or svgp.DEFAULT_EXCHANGES, self.preparation.training_target
        minimum = 0.0 if self.options.exchanges else (sgpr if exact else svgp).MINIMUM_GAIN
        return AgreedParameters(
            Problem(config.model, config.seed, max(most - 1, 1), target, minimum_gain=minimum), exact
        )

    def initialise(self, roster: Roster) -> Asking[PVIState]:
        """Return the start of the agreement, or Z from pooled histograms, with N(0, I) for what is in the product."""
        if self.agreement:
            return (yield from self.agreement.start(roster))
        shape, options = (yield from shape_of_inputs(roster)), self.options
        locations = initial_locations(shape, self.config.model, self.config.seed)
        hyper = SparseModel(self.config.model, locations.shape[1]).initial_hyper().numpy()
        first = {"inducing": locations, "hyper": hyper}
        priors = {n: NaturalParameters.of(Gaussian.standard(first[n].size)) for n in options.product}
        points = {name: LatentFactor(value=first[name].ravel()) for name in LATENTS if name not in options.product}
        return PVIState(priors, shared=points, first=first, rows=roster.rows)

    def one_round(self, state: PVIState, roster: Roster) -> Asking[tuple[PVIState, Figures]]:
        """Agree on Z and β while enough rounds remain for one visit to each site; otherwise visit sites."""
        if not self.agreement:
            averaged = ("inducing",) if self.options.inducing == "average" else ()
            update = pvi_updates.local_optimum(self.options.function, averaged, tied=self.options.factor == "tied")
            return (yield from one_round(state, roster, self.plan, update))
        if not state.values:
            left = self.planned_rounds - roster.round + 1
            needed = 1 if self.plan.schedule == "synchronous" else len(roster.sites)
            if left > needed and not self.agreement.finished(state):
                return (yield from self.agreement.one_round(state, roster))
            pooled = yield from self.agreement.pooled(state, roster)
            state = pvi_updates.agreed(replace(state, rows=roster.rows), pooled.values)
        update = yield from self.agreement.update(state, roster)
        return (yield from one_round(state, roster, self.plan, update))

    def finished(self, state: PVIState) -> bool:
        """Whether the plan has no more visits, or visits have converged."""
        sites, plan, record = self.roster().sites, self.plan, state.record
        if self.agreement and not state.values:
            return False
        if not due(plan, sites, record.visits):
            return True
        tries = self.config.max_failures
        done = [record.visits.get(site) or record.attempts.get(site, 0) >= tries for site in sites]
        if not (self.agreement and record.sizes and all(done)):
            return False
        exact = self.agreement.exact
        once = exact and plan.deletion and plan.damping == 1
        return once or max(record.sizes.values()) < (SETTLED_EXACT if exact else SETTLED)

    def converged(self, state: PVIState) -> bool:
        """Whether visits have converged, and the agreement on Z and β before them."""
        return self.finished(state) and (self.agreement is None or self.agreement.converged(state))

    def predictive(self, state: PVIState, roster: Roster) -> Asking[Predicted]:
        """Return q(Z), q(β) and the factors; at an agreed Z and β their product, or the posterior from totals."""
        facts = {**pvi_state.facts_of(state, self.plan), "damping": self.plan.damping}
        if self.agreement:
            pooled = pvi_updates.product(state) if state.values else (yield from self.agreement.pooled(state, roster))
            last = self.finished(state) or self.round >= self.planned_rounds
            if last and state.values and self.agreement.exact:
                sites = tuple(site for site in roster.sites if site in state.sites)
                normal = self.config.transform.target != "none"
                pooled = yield from sgpr.with_errors(pooled, sites, self.config.model, normal=normal)
            facts |= {"num_inducing": len(pooled.mean)} | self.agreement.progress(state)
            if state.values and not self.finished(state):  # more visits would move q, by how much is not known
                facts |= {"latest_gain_per_row": None, "forecast_rise": None}
            return Predicted(Predictive(agreed=pooled), saved(pooled, self.config.model), facts)
        section, (q, factors), num_inputs = self.config.model, parts_of(state), state.first["inducing"].shape[1]
        names = SparseModel(section, num_inputs).names
        relevance = lengthscale_facts(*pvi_state.lengthscales_of(q.hyper, names), "q(β), refined by all sites")
        arrays, meanings = pvi_state.saved_arrays(q, factors, num_inputs, names, tied=self.options.factor == "tied")
        model = {"family": "pvi", "kernel": section.kernel, "ard": section.ard, "jitter": section.jitter}
        model |= {"likelihood": section.likelihood, "samples": PREDICTION_DRAWS, "seed": self.config.seed}
        kept = Posterior(arrays, meanings, dict.fromkeys(arrays, "standardised"), pvi_state.EQUATION, model)
        facts |= {"version": state.version, "relevance": relevance, "budgets": []}
        return Predicted(Predictive(q, factors), kept, facts)

    def public(self, state: PVIState) -> NamedArrays:
        """Return the arrays that predict; none before the first factor."""
        if self.agreement:
            return encode(pvi_updates.product(state)) if state.values else {}
        return encode(Predictive(*parts_of(state)))

    def require_training(self) -> None:
        """Raise RunError if no site has a factor: the posterior would be the prior."""
        super().require_training()
        if self.current.values and not self.current.sites:
            raise RunError(f"no site could be visited, so the run has no result. {self.network.latest_failures()}")

    def warnings(self) -> list[str]:
        """Return a warning on sites whose sums nearly reveal their rows."""
        found = super().warnings()
        if not self.agreement or not self.current.values:
            return found
        count, rows = len(self.current.values[LOCATIONS]), self.roster().rows
        if small := [site for site, number in rows.items() if number < ROWS_PER_POINT * count]:
            found.append(
                f"site(s) {self.called(small)} have fewer than {ROWS_PER_POINT} rows for each of {count} inducing"
                " points: their factors, which the server keeps, nearly reveal their rows; set `model.num-inducing` ="
                f" {max(1, min(rows.values()) // ROWS_PER_POINT)} to avoid this"
            )
        return found + disclosure_by_total(min(count, sum(rows.values())), rows)

    def final(self, state: PVIState, roster: Roster) -> Asking[dict[str, Any]]:
        """Return the free energy."""
        if self.agreement:
            return {}
        q, factors = parts_of(state)
        model = SparseModel(self.config.model, state.first["inducing"].shape[1])
        draws = prediction_draws(q, model, self.config.seed)
        function = draws.product(factors_of(factors, tied=self.options.factor == "tied"))
        kl = {"kl_function": float(function.kl(draws.product([])).mean())}
        for name, latent in zip(LATENTS, (q.inducing, q.hyper), strict=True):
            kl[f"kl_{name}"] = 0.0
            if latent.value is None:
                kl[f"kl_{name}"] = float(latent.natural().gaussian.kl(Gaussian.standard(latent.size)))
        return (yield from free_energy(state, Predictive(q, factors), kl))
