"""FSGP: federated averaging of a sparse GP, with an exact posterior of all rows from sums.

Guo et al., *Federated sparse Gaussian processes* (2022), Algorithms 1-2. Sampled sites take a few steps on their bound
per row from w = {β, Z}, and the server averages. After training, sums over sites give the optimal q(u) of all rows at
w (Eqs. 14-15), whatever the partition. :mod:`strategies.sgpr` trains by sums too.
"""

from __future__ import annotations

from fedgp_flower.messages import encode
from fedgp_flower.methods.sgpr.options import AveragedOptions
from fedgp_flower.shared_messages import Parameters
from fedgp_flower.typing import NamedArrays
from strategies.pooled_bound import LOCATIONS, facts, noise_of, pooled, posterior_at, saved
from strategies.server.fedavg import AveragingPlan, AveragingState, averaging_round, first_state
from strategies.server.questions import Asking, Figures, Predicted, Roster
from strategies.server.shapes import initial_hyperparameters, initial_locations, shapes_of_inputs
from strategies.server.strategy import FederatedStrategy


class FSGP(FederatedStrategy[AveragingState]):
    """Federated averaging of w, then the exact posterior at it."""

    method = "fsgp"
    options_class = AveragedOptions
    state_class = AveragingState
    watched = "objective"
    options: AveragedOptions

    def initialise(self, roster: Roster) -> Asking[AveragingState]:
        """Inducing points from federated statistics, hyperparameters as configured; no moments."""
        answers = yield from shapes_of_inputs(roster)
        locations = initial_locations(answers, self.config.model, self.config.seed)
        return first_state({LOCATIONS: locations, **initial_hyperparameters(answers)})

    def one_round(self, state: AveragingState, roster: Roster) -> Asking[tuple[AveragingState, Figures]]:
        """Algorithm 1 of the paper."""
        state, figures = yield from averaging_round(state, roster, AveragingPlan.of(self.config))
        return state, figures and {**figures, "noise": noise_of(state.parameters)}

    def predictive(self, state: AveragingState, roster: Roster) -> Asking[Predicted]:
        """Parameters and the exact posterior at them, from one query for sums."""
        totals = yield from pooled(state.parameters, roster.everyone)
        found = posterior_at(state.parameters, totals)
        return Predicted(found, saved(found, self.config.model), facts(state.parameters, totals))

    def public(self, state: AveragingState) -> NamedArrays:
        """The parameters."""
        return encode(Parameters(state.parameters))

    def adopt(self, state: AveragingState, arrays: NamedArrays) -> AveragingState:
        """Other parameters, the same moments."""
        return AveragingState({name.removeprefix("values."): array for name, array in arrays.items()}, state.moments)
