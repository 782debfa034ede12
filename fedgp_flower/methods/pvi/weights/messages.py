"""What server and sites say to each other where the model is its weights θ: a cavity down, a factor of θ up."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from fedgp_flower.messages import leaves, message
from fedgp_flower.methods.pvi.messages import LIMIT, NaturalParameters
from fedgp_flower.methods.pvi.weights.options import WeightsOptions


def prior_of(options: WeightsOptions, num_inputs: int) -> NaturalParameters:
    """N(0, s² I) over the weights, in the form of q."""
    size = options.num_weights(num_inputs)
    precision = options.prior_scale**-2
    return NaturalParameters(np.zeros(size), -0.5 * precision * (np.eye(size) if options.full else np.ones(size)))


@message()
class WeightsVisit:
    """Refine your factor of θ."""

    posterior: NaturalParameters = leaves("q(θ), to start from")
    context: NaturalParameters = leaves("what the site's factor multiplies: the cavity, or what stands for it")


@message("train")
class RefinedWeights:
    """A site's new factor of θ."""

    factor: NaturalParameters
    objective: float = leaves("local free energy, in nats per row")
    iterations: int = leaves("steps taken")
    halvings: int = leaves("steps that were shortened")

    def num_parameters(self) -> int:
        """The number of weights."""
        return len(self.factor.eta1)

    def refusal(self, rows: int) -> str | None:
        """Why this is no factor of a site with a log-concave likelihood, or None: its precision is not negative."""
        eta1, eta2 = self.factor.eta1, self.factor.eta2
        if min(self.iterations, self.halvings) < 0:
            return "counts of steps cannot be negative"
        if eta2.ndim == 2:
            return self.factor.refusal("factor", negative=False)
        if eta2.shape != eta1.shape:
            return f"`factor.eta2`: shape {eta2.shape}, expected that of `eta1`, {eta1.shape}"
        size = float(np.abs(eta2).max())
        if max(size, float(np.abs(eta1).max())) > LIMIT**2:
            return f"`factor`: numbers above {LIMIT**2:g}, which no standardised rows give"
        return "`factor.eta2`: a precision is negative" if eta2.max() > 1e-8 * size else None


@message()
class WeightsPredictive:
    """All that predicts."""

    posterior: NaturalParameters = leaves("q(θ)")


@message("query.log_likelihood", summand=True)
class LogLikelihood:
    """A site's term of the global free energy."""

    value: Float[ndarray, ""] = leaves("E_q log p(y_k | θ), in nats")

    def num_parameters(self) -> int:
        """One number."""
        return 1
