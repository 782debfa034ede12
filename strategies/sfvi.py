"""SFVI: structured federated variational inference by gradients.

Hassan, Salomone and Mengersen, *Federated variational inference methods for structured latent variable models* (2023),
Algorithm 1. A site has latents Z_Lk whose q(Z_Lk | Z_G) never leaves it; only q(Z_G) and θ are shared. Every site sends
the gradient of its term of the bound, and the server takes one step of Adam on the sum. Where units are not the sites
themselves, as they are for ``gp``, that step is the same for any partition.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from fedgp_flower.methods.family import GlobalPosterior, global_term
from fedgp_flower.methods.sfvi.messages import GradientRequest, GradientShare
from fedgp_flower.methods.sfvi.options import CONSTANT_SHARE, FLAT_SHARE, SFVIOptions
from fedgp_flower.typing import Array, NamedArrays
from strategies import sfvi_avg
from strategies.server.questions import Asking, Figures, Roster, Summed, Total
from strategies.server.strategy import FederatedStrategy
from strategies.sfvi_avg import Prior, SFVIState, first_state, predicted, shared_inputs

LEARNED_PRIOR = "theta.prior_log_scales"


def one_round(
    state: SFVIState, roster: Roster, options: SFVIOptions, seed: int, rate: float
) -> Asking[tuple[SFVIState, Figures]]:
    """Algorithm 1 of the paper. The server asks for a :class:`Total`: it needs the sum of the gradients alone."""
    noise = None
    if not options.row.known_expectations:  # 1. ε_G ~ N(0, I)
        noise = global_noise(seed, roster.round, options.samples, len(state.prior.fixed))
    request = GradientRequest(state.parameters, rate, noise)  # 2. ∇ of the sites' terms, summed
    summed: Summed[GradientShare] = yield Total(GradientShare, request, retries=0)
    if summed.total is None or summed.silent:  # the rows behind the sum are not known then
        return state, {}
    rows = sum(roster.rows.values())
    scale = rows / sum(roster.rows[site] for site in summed.sites)  # the sum stands in for sites that are absent
    value, gradient = server_term(state.parameters, state.prior, noise)  # 3. and of log p_θ(Z_G) − log q(Z_G)
    moves, adam = state.adam.update(plus(gradient, summed.total.values, scale=scale), rate)  # 4. a step of Adam
    parameters = {name: np.asarray(array + moves[name]) for name, array in state.parameters.items()}
    bound = value + scale * summed.total.objective
    state = replace(state.caught_up(summed.total.fresh), parameters=parameters, bound=bound)
    state = replace(state, steps=adam.step, first=adam.first, second=adam.second)
    return state, {"objective": bound / rows}


def global_noise(seed: int, server_round: int, draws: int, size: int) -> Array:
    """ε_G [S, M] of a round, standard normal."""
    return np.random.default_rng((seed, server_round)).standard_normal((draws, size))


def server_term(parameters: Mapping[str, np.ndarray], prior: Prior, noise: Array | None) -> tuple[float, NamedArrays]:
    """Value and gradient of E[log p_θ(Z_G) − log q(Z_G)] by θ and η_G: averaged over draws, or in closed form."""
    names = [name for name in parameters if name.startswith("q.") or (name == LEARNED_PRIOR and len(prior.block))]
    leaves = {name: torch.tensor(parameters[name], requires_grad=True) for name in names}
    log_scale, q_global = torch.tensor(prior.fixed), GlobalPosterior.of(leaves)
    if len(prior.block):
        log_scale = log_scale + leaves[LEARNED_PRIOR][torch.tensor(prior.block)]
    value = global_term(log_scale, q_global, None if noise is None else torch.from_numpy(noise))
    slopes = torch.autograd.grad(value, list(leaves.values()))
    return float(value.detach()), {name: slope.numpy() for name, slope in zip(leaves, slopes, strict=True)}


def plus(server: Mapping[str, np.ndarray], sites: Mapping[str, np.ndarray], *, scale: float = 1.0) -> NamedArrays:
    """The server's gradient plus ``scale`` times the sum of the sites'; a name may be missing in either."""
    total = {name: np.asarray(scale * value) for name, value in sites.items()}
    return total | {name: np.asarray(value + total.get(name, 0.0)) for name, value in server.items()}


class SFVI(FederatedStrategy[SFVIState]):
    """Rounds of gradients; before them, where ``warm_start_rounds`` says so, rounds of SFVI-Avg."""

    method = "sfvi"
    options_class = SFVIOptions
    state_class = SFVIState
    watched, anneals = "objective", (CONSTANT_SHARE, FLAT_SHARE)
    options: SFVIOptions
    initialise, predictive, constants = first_state, predicted, shared_inputs

    def one_round(self, state: SFVIState, roster: Roster) -> Asking[tuple[SFVIState, Figures]]:
        """Algorithm 1 of the paper, after a warm start by Algorithm 2 if there is one."""
        rate = self.options.rate(roster.round - 1, self.horizon(), flat=self.course.flat_from is not None)
        if roster.round <= self.options.warm_start_rounds:
            return (yield from sfvi_avg.one_round(state, roster, self.options, rate))
        return (yield from one_round(state, roster, self.options, self.config.seed, rate))
