"""FSGP: federated averaging of a sparse GP, then the exact posterior from sums. FGPR: averaging of an exact GP.

Guo et al., *Federated sparse Gaussian processes* (2022), Algorithms 1-2. Sampled sites take a few steps from w = {β, Z}
on their bound per row, and the server averages. After training, sums over sites give the optimal q(u) of all rows at
w (Eqs. 14-15). FGPR, after Yue and Kontar, *Federated Gaussian process* (2021), shares only hyperparameters.
"""

from __future__ import annotations

from fedgp_flower.gp.models import LOCATIONS
from fedgp_flower.gp.sums import collapsed_bound
from fedgp_flower.methods.sgpr.options import AveragedOptions
from fedgp_flower.shared_messages import Parameters
from fedgp_flower.typing import NamedArrays
from strategies.pooled_bound import initial_hyperparameters, noise_of, posterior_at, saved, total_statistics
from strategies.server.course import log_units
from strategies.server.fedavg import AveragingState, averaged, first_state
from strategies.server.questions import Asking, Figures, Predicted, Roster
from strategies.server.shapes import initial_locations, shape_of_inputs
from strategies.server.strategy import FederatedStrategy


def tolerances(strategy: FSGP | FGPR, state: AveragingState) -> NamedArrays:
    """Return units of the hyperparameters; inducing points need not converge."""
    return log_units({name: array for name, array in state.parameters.items() if name != LOCATIONS})


class FSGP(FederatedStrategy[AveragingState]):
    """Federated averaging of w, then the exact posterior at it."""

    method = "fsgp"
    options_class = AveragedOptions
    state_class = AveragingState
    watched = "objective"
    options: AveragedOptions
    tolerances = tolerances

    def initialise(self, roster: Roster) -> Asking[AveragingState]:
        """Return inducing points from pooled histograms, and hyperparameters as configured."""
        shape, section = (yield from shape_of_inputs(roster)), self.config.model
        locations = initial_locations(shape, section, self.config.seed)
        return first_state({LOCATIONS: locations, **initial_hyperparameters(section, locations.shape[1])})

    def one_round(self, state: AveragingState, roster: Roster) -> Asking[tuple[AveragingState, Figures]]:
        """Algorithm 1 of the paper."""
        state, figures = yield from averaged(state, roster, self.config, self.config.optimizer)
        return state, figures and {**figures, "noise": noise_of(state.parameters)}

    def predictive(self, state: AveragingState, roster: Roster) -> Asking[Predicted]:
        """Return the exact posterior at the parameters from one total; name sites that contradict the others."""
        totals = yield from total_statistics(state.parameters, self.config.model, roster.all_sites)
        found, noise = posterior_at(state.parameters, totals), noise_of(state.parameters)
        details = {"bound": collapsed_bound(totals, noise), "noise_sd_standardised": noise**0.5}
        return Predicted(found, saved(found, self.config.model), details)


class FGPR(FederatedStrategy[AveragingState]):
    """Federated averaging of kernel hyperparameters and noise; each site predicts from its own rows."""

    method = "fgpr"
    options_class = AveragedOptions
    state_class = AveragingState
    watched = "objective"
    options: AveragedOptions
    tolerances = tolerances

    def initialise(self, roster: Roster) -> Asking[AveragingState]:
        """Return the configured hyperparameters."""
        shape = yield from shape_of_inputs(roster)  # the report shows the ranges of the inputs
        return first_state(initial_hyperparameters(self.config.model, len(shape.products)))

    def one_round(self, state: AveragingState, roster: Roster) -> Asking[tuple[AveragingState, Figures]]:
        """Average after local steps on the evidence of each site."""
        return (yield from averaged(state, roster, self.config, self.config.optimizer))

    def predictive(self, state: AveragingState, roster: Roster) -> Asking[Predicted]:
        """Return the hyperparameters."""
        yield from ()
        return Predicted(Parameters(state.parameters))
