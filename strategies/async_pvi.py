"""Asynchronous PVI: an answer is folded in when it arrives, and that site at once gets the newest posterior.

Section 4 of Ashman et al. (2022). How many merges an answer had not seen, its staleness, is recorded. A resumed run
asks again: what was under way when it was killed is lost, and only that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from fedgp_flower.methods.pvi.options import Plan, PVIOptions
from strategies.pvi import PVI, REFINED, PVIState, Refinement, begun, damping_of, fold, next_sites, order_of
from strategies.server.questions import Asking, Figures, First, Roster


def one_round(
    state: PVIState, roster: Roster, plan: Plan, options: PVIOptions, asked: Refinement = REFINED
) -> Asking[tuple[PVIState, Figures]]:
    """Give idle sites the newest posterior, and fold in the first answer of all that are under way."""
    state = replace(state, rows={**state.rows, **roster.rows})
    # 1. and 2. sites that are idle, in turn, up to the number that may work at once
    sent = {site: state.sent.get(site, state.version) for site in roster.busy}
    in_turn, requests = replace(plan, schedule="sequential"), {}
    while len(sent) < (plan.concurrency or len(roster.sites)):
        idle = [site for site in roster.sites if site not in sent]
        if not idle:
            break
        record = state.record
        [site] = next_sites(in_turn, idle, record.attempts, record.sizes, order_of(plan, roster.round))
        state = begun(state, [site])
        requests[site], sent[site] = asked.request(state, site, plan), state.version
    site, answer = yield First(asked.answer, requests)
    # 3. the merge, damped by how many work at once
    damping, stale = damping_of(plan, len(sent)), state.version - sent.pop(site)
    answers = {} if answer is None else {site: asked.read(answer, state.rows[site])}
    state, figures = yield from fold(replace(state, sent=sent), answers, damping, plan, options)
    if answers:
        record = state.record
        state = replace(state, record=replace(record, staleness={**record.staleness, site: stale}))
    return state, figures and {**figures, "staleness": stale}


class AsynchronousPVI(PVI):
    """Several sites work at once, each on the posterior it was given; a round is one answer."""

    implied: ClassVar[Mapping[str, Any]] = {**PVI.implied, "schedule": "asynchronous"}

    def one_round(self, state: PVIState, roster: Roster) -> Asking[tuple[PVIState, Figures]]:
        """One answer, or one site given up."""
        return (yield from one_round(state, roster, self.plan, self.options))
