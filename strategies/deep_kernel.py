"""A GP on learned features: a network by federated averaging (Achituve et al. 2021), exact heads from sums."""

from __future__ import annotations

import numpy as np

from fedgp_flower.methods.deep_kernel.model import DeepKernel, HeadPosterior, HeadRequest, Heads, sums_of
from fedgp_flower.methods.deep_kernel.options import DeepKernelOptions
from fedgp_flower.options import OptimizerSection
from fedgp_flower.outcome import Posterior
from fedgp_flower.typing import NamedArrays
from strategies.server.fedavg import AveragingState, averaged, first_state
from strategies.server.questions import Asking, Figures, Predicted, Roster, Summed, Total
from strategies.server.strategy import FederatedStrategy

SHARES = (0.0, 0.05, 0.2, 0.4, 0.6, 0.8, 0.95)
"""Candidate shares ρ of the prior variance for personal heads; the evidence of all rows selects one."""
EQUATION = (
    "φ(x) = (1, network(x)), x standardised by input.mean and input.scale; f_c(x) = φ(x)ᵀ (w_c + v_c) with w_c ~"
    " N(heads.mean[c], heads.covariance[c]) and, at a new site, v_c ~ N(0, ρ I). Classes: P(y = c) ="
    " E softmax(f)_c. Numbers: y ~ N(f, exp(observed.log_noise)), standardised by target.mean and target.scale."
)


def chosen(values: NamedArrays, shares: tuple[float, ...], totals: Heads) -> tuple[HeadPosterior, list[float]]:
    """Return the head at the ρ with the largest evidence of all rows, and the log evidence at each ρ."""
    each = sums_of(totals)
    evidence = [float(sums.log_evidence(1 - share)) for sums, share in zip(each, shares, strict=True)]
    best = int(np.argmax(evidence))
    mean, covariance = each[best].posterior(1 - shares[best])
    return HeadPosterior(values, mean.numpy(), covariance.numpy(), shares[best]), evidence


class DeepKernelGP(FederatedStrategy[AveragingState]):
    """Federated averaging of the network, then the exact heads on its features."""

    method = "deep-kernel"
    options_class = DeepKernelOptions
    state_class = AveragingState
    watched = "objective"
    options: DeepKernelOptions

    def initialise(self, roster: Roster) -> Asking[AveragingState]:
        """Return a network drawn from the seed."""
        yield from ()
        start = DeepKernel(self.options, self.config.model, self.preparation.num_inputs, self.config.seed)
        return first_state(start.to_arrays())

    def one_round(self, state: AveragingState, roster: Roster) -> Asking[tuple[AveragingState, Figures]]:
        """Average after local steps of Adam with a constant learning rate."""
        keys = {"learning-rate": self.options.learning_rate, "steps": self.options.local_steps}
        local = OptimizerSection.model_validate(keys)
        return (yield from averaged(state, roster, self.config, local))

    def predictive(self, state: AveragingState, roster: Roster) -> Asking[Predicted]:
        """Return the heads of all rows, from one total."""
        values = dict(state.parameters)
        summed: Summed[Heads] = yield Total(Heads, HeadRequest(values, np.array(SHARES)), roster.all_sites)
        head, evidence = chosen(values, SHARES, summed.required("usable sums"))
        arrays = {**values, "heads.mean": head.mean, "heads.covariance": head.covariance}
        meanings = dict.fromkeys(arrays, "weights of the network, or log noise variance")
        meanings |= {"heads.mean": "E w_c, by output", "heads.covariance": "Cov w_c, by output"}
        model = {"family": "deep-kernel", "deep": self.options.model_dump(by_alias=True), "share": head.share}
        model |= {"likelihood": self.config.model.likelihood, "classes": self.options.classes}
        saved = Posterior(arrays, meanings, dict.fromkeys(arrays, "standardised"), EQUATION, model)
        return Predicted(head, saved, {"share": head.share, "shares": list(SHARES), "evidence": evidence})
