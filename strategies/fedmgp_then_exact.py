"""FedMGP by Algorithm 2, ended by exact rounds: pseudo-gradients, then a few M-steps and the optimal q(u).

A composition of :mod:`strategies.fedmgp` and :mod:`strategies.fedmgp_exact`, for a Gaussian likelihood. The last
``final-rounds`` rounds are exact; they start from the latent functions and q(u) at θ, and units go on from the φ_m they
remember.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from fedgp_flower.messages import message
from strategies import fedmgp
from strategies.fedmgp import PseudoGradients, PseudoState
from strategies.fedmgp_exact import ExactRun, round_with, start_state
from strategies.fedmgp_shared import Plan
from strategies.server.fedavg import sampled
from strategies.server.questions import Asking, Figures, Roster


@message()
class TwoPhases:
    """Where the run is: θ, and the exact rounds once they have begun."""

    pseudo: PseudoState
    exact: ExactRun | None = None


def one_round(state: TwoPhases, roster: Roster, plan: Plan) -> Asking[tuple[TwoPhases, Figures]]:
    """A round of Algorithm 2, or an exact one when few rounds are left.

    An exact round also asks every unit that is not in q(u) yet: they are too few to wait.
    """
    if state.exact is None and roster.round <= plan.pseudo_rounds:
        pseudo, figures = yield from fedmgp.one_round(state.pseudo, roster, plan)
        return replace(state, pseudo=pseudo), figures
    run = state.exact or exact_from(state.pseudo)
    drawn = sampled(roster, plan.options.fraction, plan.config.seed)
    chosen = [site for site in roster.sites if site in drawn or site not in run.state.reports]
    run, figures = yield from round_with(run, chosen, roster, plan)
    return replace(state, exact=run), figures


def exact_from(pseudo: PseudoState) -> ExactRun:
    """Exact rounds from the latent functions and q(u) at θ; what the server knows of each unit's memory stays."""
    first = start_state(pseudo.shared.latents, pseudo.shared.posterior)
    return ExactRun((replace(first, reported=pseudo.reports),), 0, pseudo.record)


class FedMGPThenExact(PseudoGradients[TwoPhases]):
    """Pseudo-gradients, then exact rounds."""

    state_class = TwoPhases
    implied: ClassVar[Mapping[str, Any]] = {"update": "pseudo-gradient"}

    def phase(self, state: TwoPhases) -> PseudoState | ExactRun:
        """What goes on now."""
        return state.exact or state.pseudo

    def initialise(self, roster: Roster) -> Asking[TwoPhases]:
        """As Algorithm 2 begins."""
        return TwoPhases((yield from fedmgp.initialise(roster, self.plan)))

    def one_round(self, state: TwoPhases, roster: Roster) -> Asking[tuple[TwoPhases, Figures]]:
        """Whichever phase it is."""
        self.sizes |= (state.exact or exact_from(state.pseudo)).sizes
        return (yield from one_round(state, roster, self.plan))

    def finished(self, state: TwoPhases) -> bool:
        """Whether pseudo-gradients have ended early, and the exact rounds after them as well."""
        return self.converged(state) and self.round >= self.plan.pseudo_rounds + self.options.final_rounds
