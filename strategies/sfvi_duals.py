"""SFVI in closed form for labels and counts: one exchange is a step of the natural gradient and one of Newton.

Sites see their rows as Gaussian pseudo-observations (:mod:`fedgp_flower.methods.sfvi.pseudo_observed`), which they
find by themselves at the θ and the q(Z_G) they are asked about. Their sums are those of the closed form: from a total
the server has the bound F(θ, q) there, whatever q(Z_G) is, the q(Z_G) that is best for these pseudo-observations, which
is a whole step of the natural gradient, and a Newton step on θ with the pseudo-observations held fixed. They do not
stay where they were, so both steps may lead too far: a trial counts only if F + log p(θ) is larger there, otherwise the
next one is nearer.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial

import numpy as np
import torch

from fedgp_flower.gp.ascent import unpack
from fedgp_flower.messages import message
from fedgp_flower.methods.closed_form import Sums, divergence, naturals
from fedgp_flower.methods.expansions import ExpansionRequest, ExpansionShare
from fedgp_flower.methods.family import GlobalPosterior
from strategies.server.questions import Asking, Figures, Roster, Summed, Total
from strategies.sfvi_closed import (
    FIRST_RADIUS,
    ClosedFormVI,
    FactorAt,
    NewtonState,
    inducing_factor,
    log_prior,
    next_radius,
    of_total,
    stepped,
    with_prior,
)

SHORTEST = 2.0**-6
"""A trial that loses with so short a step of the natural gradient is the last one."""


@message()
class DualNewtonState(NewtonState):
    """The same; ``parameters`` hold the q(Z_G) whose bound is known, ``precision`` and ``shift`` say which is next."""

    gain: float = 0.0
    """Rise of F by a whole step of the natural gradient at the best θ, pseudo-observations held fixed."""
    share: float = 1.0
    """Length of the next step of the natural gradient."""


def one_round(state: DualNewtonState, roster: Roster, factor_at: FactorAt) -> Asking[tuple[DualNewtonState, Figures]]:
    """One exchange. Totals of other sites than before belong to another F: then the trial point is taken."""
    del roster
    theta = unpack(state.trial, state.theta)
    request = ExpansionRequest({**theta, **state.widths, **state.asked})
    summed: Summed[ExpansionShare] = yield Total(ExpansionShare, request)
    if summed.total is None:
        return state, {}
    bound, count = bound_at(GlobalPosterior.of(state.asked), summed.total), float(summed.total.count)
    value = bound + log_prior(state)[0]
    first = state.value is None or (summed.sites, count) != (state.sites, state.count)
    if state.value is None or first or value > state.value:
        found = with_prior(state, summed.total)
        radius, share = FIRST_RADIUS if first else next_radius(state, value), min(1.0, 2 * state.share)
        state = replace(
            state,
            **of_total(summed.total, found),
            parameters={**theta, **state.widths, **state.asked},
            sites=summed.sites,
            count=count,
            value=value,
            bound=bound,
            gain=found.value - value,
        )
    else:
        radius, share = next_radius(state, value), state.share / 2
    state = both_stepped(replace(state, share=share), radius, factor_at)
    assert state.bound is not None
    return state, {"objective": state.bound / state.count, "promised_rise": state.rise}


def bound_at(q_global: GlobalPosterior, total: ExpansionShare) -> float:
    """F at any q(Z_G): ΣL_k − KL(q(Z_G) ‖ N(0, I))."""
    sums = Sums(*(torch.from_numpy(np.asarray(own)) for own in (total.precision, total.shift, total.constant)))
    return float(sums.expected(q_global) - divergence(q_global))


def both_stepped(state: DualNewtonState, radius: float, factor_at: FactorAt) -> DualNewtonState:
    """The next trial point: θ by Newton, q(Z_G) by its share of the step of the natural gradient."""
    assert state.precision is not None
    assert state.shift is not None
    before = naturals(GlobalPosterior.of(state.parameters))
    towards = torch.from_numpy(state.precision), torch.from_numpy(state.shift)
    precision, shift = (torch.lerp(a, b, state.share).numpy() for a, b in zip(before, towards, strict=True))
    moved = stepped(replace(state, precision=precision, shift=shift), radius, factor_at)
    promised, rise = moved.promised + state.share * state.gain, moved.rise + state.gain
    return replace(moved, precision=state.precision, shift=state.shift, promised=promised, rise=rise)


class SFVIDuals(ClosedFormVI[DualNewtonState]):
    """Newton steps on θ beside natural gradients, until whole ones promise no more than ``tolerance``."""

    method = "sfvi"
    state_class = DualNewtonState

    def initialise(self, roster: Roster) -> Asking[DualNewtonState]:
        """The mode of the prior, q(Z_G) = p(Z_G)."""
        start = yield from self.first_state(roster)
        return DualNewtonState(**{own.name: getattr(start, own.name) for own in fields(start)})

    def one_round(self, state: DualNewtonState, roster: Roster) -> Asking[tuple[DualNewtonState, Figures]]:
        """One exchange."""
        return (yield from one_round(state, roster, partial(inducing_factor, self.model_of(state))))

    def finished(self, state: DualNewtonState) -> bool:
        """Whether whole steps promise less than the tolerance or even short ones lose, and no healthy site is missing.

        What a step promises that was shortened, because the one before lost, does not count.
        """
        ended = state.value is not None and (state.rise < self.options.tolerance or state.share < SHORTEST)
        return ended and set(self.roster().sites) <= set(state.sites)
