"""Replay: sites read each other's pseudo-observations as likelihoods, so that q(Z) and q(β) need no factors.

The variant of PVI for a Gaussian likelihood in which q(Z) and q(β) are values that all sites share. One after another a
site refits them on [the others' pseudo-observations + its rows], then distils its rows into pseudo-observations; in
parallel all sites distil at the shared values, and one site refits them on everybody's pseudo-observations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from fedgp_flower.errors import RunError
from fedgp_flower.methods.pvi.messages import Distilled, Refitted
from fedgp_flower.methods.pvi.options import Plan, PVIOptions
from strategies.pvi import PVI, PVIState, Refinement, misfit, one_round, predictive, shared
from strategies.server.questions import Asking, Each, Figures, Refuse, Roster

REFITTERS = 3
"""Sites that are asked to refit, one after another, until one of them does."""


def refit(state: PVIState, roster: Roster, options: PVIOptions) -> Asking[tuple[PVIState, Figures]]:
    """A site refits q(Z), q(β) on all pseudo-observations, none of its rows; another one takes over if it fails."""
    for offset in range(min(len(roster.sites), REFITTERS)):
        site = roster.sites[(roster.round + offset) % len(roster.sites)]
        answers = yield Each(Refitted, {site: predictive(state)})
        for answer in answers.values():
            reason = misfit(state, answer, options)
            if reason is None:
                return shared(state, answer, options), {"refit": answer.objective}
            yield Refuse(site, reason)
    return state, {}


class Distillation(Refinement):
    """The same, at the shared q(Z), q(β)."""

    answer = Distilled


def parallel_round(
    state: PVIState, roster: Roster, plan: Plan, options: PVIOptions
) -> Asking[tuple[PVIState, Figures]]:
    """Sites distil at the shared q(Z), q(β); one of them refits these, where anybody's answer could be used."""
    state, figures = yield from one_round(state, roster, plan, options, Distillation())
    if not figures:
        return state, {}
    state, fitted = yield from refit(state, roster, options)
    return state, figures | fitted


class ReplayPVI(PVI):
    """One site after another refits and distils."""

    implied: ClassVar[Mapping[str, Any]] = {"local_update": "replay"}

    @property
    def plan(self) -> Plan:
        """Pseudo-observations are replaced as a whole: nothing is damped."""
        return replace(super().plan, damping=1.0)

    def resumed(self, state: PVIState, roster: Roster) -> Asking[PVIState]:
        """Refit the shared q(Z), q(β) of a run from which a site was taken: they still hold what it had said.

        Raises:
            RunError: no site refitted them.
        """
        if state.record.refit_due:
            state, figures = yield from refit(state, roster, self.options)
            if not figures:
                raise RunError(
                    f"no site refitted q(Z), q(β) after {', '.join(state.record.forgotten)} was forgotten, so they "
                    "still hold what it had said; see the failures above and forget it again, under another `--name`"
                )
        return (yield from super().resumed(state, roster))


class ParallelReplayPVI(ReplayPVI):
    """All sites distil at once; then one of them refits."""

    implied: ClassVar[Mapping[str, Any]] = {"local_update": "replay", "schedule": "synchronous"}

    def one_round(self, state: PVIState, roster: Roster) -> Asking[tuple[PVIState, Figures]]:
        """Distil, merge, refit."""
        return (yield from parallel_round(state, roster, self.plan, self.options))
