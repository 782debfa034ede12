"""FGPR: federated averaging of an exact GP's hyperparameters; every site predicts from its rows.

The baseline of Guo et al. (2022), after Yue and Kontar, *Federated Gaussian process* (2021). Nothing about a site's
rows is shared but the hyperparameters fitted to them, and prediction is personal.
"""

from __future__ import annotations

from fedgp_flower.messages import encode
from fedgp_flower.methods.sgpr.options import AveragedOptions
from fedgp_flower.shared_messages import Parameters
from fedgp_flower.typing import NamedArrays
from strategies.server.fedavg import AveragingPlan, AveragingState, averaging_round, first_state
from strategies.server.questions import Asking, Figures, Predicted, Roster
from strategies.server.shapes import initial_hyperparameters, shapes_of_inputs
from strategies.server.strategy import FederatedStrategy


class FGPR(FederatedStrategy[AveragingState]):
    """Hyperparameters of the kernel and the noise are global; rows, and so predictions, belong to a site."""

    method = "fgpr"
    options_class = AveragedOptions
    state_class = AveragingState
    watched = "objective"
    options: AveragedOptions

    def initialise(self, roster: Roster) -> Asking[AveragingState]:
        """Hyperparameters start where the configuration says."""
        return first_state(initial_hyperparameters((yield from shapes_of_inputs(roster))))

    def one_round(self, state: AveragingState, roster: Roster) -> Asking[tuple[AveragingState, Figures]]:
        """Local steps on the evidence of a site's rows; the server averages."""
        return (yield from averaging_round(state, roster, AveragingPlan.of(self.config)))

    def predictive(self, state: AveragingState, roster: Roster) -> Asking[Predicted]:
        """The hyperparameters are all a site needs besides its rows."""
        yield from ()
        return Predicted(Parameters(state.parameters))

    def public(self, state: AveragingState) -> NamedArrays:
        """The hyperparameters."""
        return encode(Parameters(state.parameters))

    def adopt(self, state: AveragingState, arrays: NamedArrays) -> AveragingState:
        """Other hyperparameters, the same moments."""
        return AveragingState({name.removeprefix("values."): array for name, array in arrays.items()}, state.moments)
