"""The server's half."""

import numpy as np

from fedgp_flower.outcome import Posterior
from fedgp_flower.shared_messages import Nothing
from strategies.server.questions import Asking, Figures, Predicted, Roster, Total
from strategies.server.strategy import FederatedStrategy
from toy_method.shared import Products, ToyOptions, Weights


def fitted(totals: Products, noise: float, prior_scale: float) -> Weights:
    """The posterior of the weights at a noise variance, and the noise variance that maximises the expected evidence."""
    precision = totals.gram / noise + np.eye(len(totals.moment)) / prior_scale**2
    covariance = np.linalg.solve(precision, np.eye(len(precision)))
    mean = np.linalg.solve(precision, totals.moment / noise)
    second = covariance + np.outer(mean, mean)
    left = totals.squares - 2 * mean @ totals.moment + np.sum(totals.gram * second)
    return Weights(mean, covariance, float(left / totals.count))


class Toy(FederatedStrategy[Weights]):
    """A round: one question, for sums; one step of expectation maximisation."""

    method = "toy"
    options_class = ToyOptions
    state_class = Weights
    options: ToyOptions

    def initialise(self, roster: Roster) -> Asking[Weights]:
        yield from ()
        size = self.preparation.num_inputs + 1
        return Weights(np.zeros(size), self.options.prior_scale**2 * np.eye(size), self.options.noise)

    def one_round(self, state: Weights, roster: Roster) -> Asking[tuple[Weights, Figures]]:
        summed = yield Total(Products, Nothing())
        if summed.total is None:
            return state, {}
        state = fitted(summed.total, state.noise, self.options.prior_scale)
        return state, {"noise": state.noise}

    def predictive(self, state: Weights, roster: Roster) -> Asking[Predicted]:
        yield from ()
        arrays = {"weights.mean": state.mean, "weights.covariance": state.covariance, "noise": np.array(state.noise)}
        meanings = {"weights.mean": "m", "weights.covariance": "S", "noise": "noise variance"}
        equation = "y ~ N(mᵀφ, φᵀSφ + noise)"
        return Predicted(state, Posterior(arrays, meanings, dict.fromkeys(arrays, "standardised"), equation, {}))
