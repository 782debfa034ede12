"""SFVI and SFVI-Avg: structured federated variational inference by gradients, and by local steps and averages.

Hassan, Salomone and Mengersen, *Federated variational inference methods for structured latent variable models* (2023).
A site has latents Z_Lk whose q(Z_Lk | Z_G) never leaves it; only q(Z_G) and θ are shared. In Algorithm 1, SFVI, each
site sends the gradient of its term of the bound, and the server takes one step of Adam on the sum. Unless the units are
the sites, as for ``gp``, this step does not depend on the partition. In Algorithm 2, SFVI-Avg, a site takes many steps
on a bound that extrapolates its rows to all sites; the server averages θ and takes the Wasserstein barycentre of the
sites' q(Z_G). A site moves its q(Z_Lk | Z_G) to the new μ_G in its next round.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy import ndarray

from fedgp_flower.agreement import COVARIANCE, Agreement
from fedgp_flower.errors import NumericsError
from fedgp_flower.gp.barycentre import barycentre, wasserstein_distance
from fedgp_flower.gp.optimisers import AdamState
from fedgp_flower.messages import message
from fedgp_flower.methods.family import GlobalPosterior, global_term, initial_global, named, on_the_wire
from fedgp_flower.methods.sfvi.messages import GradientRequest, GradientShare, LocalEnd, LocalEndSum, LocalStepsRequest
from fedgp_flower.methods.sfvi.options import CONSTANT_SHARE, SHARED, SFVIAvgKeys, SFVIKeys, SFVIOptions
from fedgp_flower.methods.sfvi.structured import configured
from fedgp_flower.outcome import Posterior
from fedgp_flower.shared_messages import MOVE, Parameters
from fedgp_flower.typing import AnyShape, Array, NamedArrays
from strategies.server.course import log_units
from strategies.server.questions import Asking, Each, Figures, Predicted, Roster, Summed, Total, lengthscale_facts
from strategies.server.shapes import initial_locations, shape_of_inputs
from strategies.server.strategy import FederatedStrategy

logger = logging.getLogger("fedgp")

LEARNED_PRIOR = "theta.prior_log_scales"
LONGEST = 7.3
"""Longest step of Adam, in learning rates: (1 − β₁) / √((1 − β₂) (1 − β₁²/β₂)), by Cauchy-Schwarz."""


@message()
class Prior:
    """p_θ(Z_G) = N(0, diag s²), log s = ``fixed`` + θ.prior_log_scales[``block``]; ``fixed`` if ``block`` is empty."""

    fixed: Float[ndarray, " G"]
    block: Int[ndarray, " B"]


@message()
class SFVIState:
    """θ and η_G, the moments of the server's Adam, and figures."""

    parameters: Mapping[str, AnyShape]
    """θ as ``theta.*``; η_G as ``q.mean``, ``q.log_scale`` and, unless q(Z_G) is diagonal, ``q.lower``."""
    prior: Prior
    shared: Mapping[str, AnyShape]
    """Shared inducing inputs of ``gp``."""
    steps: int = 0
    first: Mapping[str, AnyShape] = field(default_factory=dict)
    second: Mapping[str, AnyShape] = field(default_factory=dict)
    bound: float | None = None
    """The latest ELBO of all rows, in nats; None before the first sum of gradients."""
    fresh: int = 0
    """Number of times that a site started without memory of earlier rounds."""

    @property
    def adam(self) -> AdamState[Array]:
        """The moments as a state of the optimiser."""
        return AdamState(self.steps, self.first, self.second)

    def with_fresh_starts(self, fresh: int) -> SFVIState:
        """Return the state after a round in which ``fresh`` sites had no memory of earlier rounds."""
        if fresh:
            logger.warning("%d site(s) had no memory of earlier rounds and started again", fresh)
        return replace(self, fresh=self.fresh + fresh)


def gradient_round(
    state: SFVIState, roster: Roster, options: SFVIOptions, seed: int, rate: float
) -> Asking[tuple[SFVIState, Figures]]:
    """Algorithm 1 of the paper; the server needs only the sum of the gradients."""
    noise = None
    if not options.row.known_expectations:  # 1. ε_G ~ N(0, I)
        noise = global_noise(seed, roster.round, options.samples, len(state.prior.fixed))
    request = GradientRequest(state.parameters, rate, noise)  # 2. ∇ of the sites' terms, summed
    summed: Summed[GradientShare] = yield Total(GradientShare, request, retries=0)
    if summed.total is None or summed.silent:  # the number of rows in the sum is unknown
        return state, {}
    rows = sum(roster.rows.values())
    scale = rows / sum(roster.rows[site] for site in summed.sites)  # extrapolate to absent sites
    value, gradient = server_term(state.parameters, state.prior, noise)  # 3. and of log p_θ(Z_G) − log q(Z_G)
    moves, adam = state.adam.update(plus(gradient, summed.total.values, scale=scale), rate)  # 4. a step of Adam
    parameters = {name: np.asarray(array + moves[name]) for name, array in state.parameters.items()}
    bound = value + scale * summed.total.objective
    state = replace(state.with_fresh_starts(summed.total.fresh), parameters=parameters, bound=bound)
    state = replace(state, steps=adam.step, first=adam.first, second=adam.second)
    return state, {"objective": bound / rows}


def global_noise(seed: int, server_round: int, draws: int, size: int) -> Array:
    """Return ε_G [S, M] of a round, standard normal."""
    return np.random.default_rng((seed, server_round)).standard_normal((draws, size))


def server_term(parameters: Mapping[str, np.ndarray], prior: Prior, noise: Array | None) -> tuple[float, NamedArrays]:
    """Return E[log p_θ(Z_G) − log q(Z_G)], over draws or in closed form, and its gradient by θ and η_G."""
    names = [name for name in parameters if name.startswith("q.") or (name == LEARNED_PRIOR and len(prior.block))]
    leaves = {name: torch.tensor(parameters[name], requires_grad=True) for name in names}
    log_scale, q_global = torch.tensor(prior.fixed), GlobalPosterior.of(leaves)
    if len(prior.block):
        log_scale = log_scale + leaves[LEARNED_PRIOR][torch.tensor(prior.block)]
    value = global_term(log_scale, q_global, None if noise is None else torch.from_numpy(noise))
    slopes = torch.autograd.grad(value, list(leaves.values()))
    return float(value.detach()), {name: slope.numpy() for name, slope in zip(leaves, slopes, strict=True)}


def plus(server: Mapping[str, np.ndarray], sites: Mapping[str, np.ndarray], *, scale: float = 1.0) -> NamedArrays:
    """Return the server's gradient plus ``scale`` times the sum of the sites'; a name may be missing in either."""
    total = {name: np.asarray(scale * value) for name, value in sites.items()}
    return total | {name: np.asarray(value + total.get(name, 0.0)) for name, value in server.items()}


def averaging_round(
    state: SFVIState, roster: Roster, options: SFVIOptions, rate: float
) -> Asking[tuple[SFVIState, Figures]]:
    """Algorithm 2 of the paper. For a diagonal q(Z_G) the barycentre follows from sums, as masks require."""
    rows, reach = sum(roster.rows.values()), min(MOVE, LONGEST * rate * options.local_steps)
    request = LocalStepsRequest(state.parameters, rate, float(rows), reach)  # 1. sites take m steps from {θ, η_G}
    if roster.totals_only:
        summed: Summed[LocalEndSum] = yield Total(LocalEndSum, request, retries=0)
        if summed.total is None or summed.silent:
            return state, {}
        state = replace(state.with_fresh_starts(summed.total.fresh), parameters=summed.total.mean())
        return state, {"site_estimate": float(summed.total.objective / summed.total.weight) / rows}
    answers: dict[str, LocalEnd] = yield Each(LocalEnd, dict.fromkeys(roster.sites, request))
    if not answers:
        return state, {}
    state = state.with_fresh_starts(sum(end.fresh for end in answers.values()))
    weights = np.array([float(roster.rows[site]) for site in answers])
    try:  # 2. mean of θ, barycentre of q(Z_G)
        parameters, spread = average([end.values for end in answers.values()], weights)
    except (NumericsError, np.linalg.LinAlgError) as error:
        logger.warning("round %d: parameters are not updated: %s", roster.round, error)
        return state, {}
    estimate = float(np.average([end.objective for end in answers.values()], weights=weights))
    return replace(state, parameters=parameters), {"site_estimate": estimate / rows, "spread": float(np.mean(spread))}


def average(sites: Sequence[Mapping[str, np.ndarray]], weights: Array) -> tuple[NamedArrays, list[float]]:
    """Return Σ wₖ θₖ with the Wasserstein barycentre of the sites' q(Z_G), and W₂ from each q(Z_G) to it."""
    shares, posteriors = weights / weights.sum(), [GlobalPosterior.of(site) for site in sites]
    means = np.stack([q.mean.numpy() for q in posteriors])
    factors = np.stack([(q.log_scale.exp() if q.lower is None else q.factor()).numpy() for q in posteriors])
    mean, factor = barycentre(means, factors, weights)
    merged: NamedArrays = {
        name: np.asarray(np.tensordot(shares, np.stack([site[name] for site in sites]), 1))
        for name in sites[0]
        if name.startswith("theta.")
    }
    scale = factor if factor.ndim == 1 else np.diagonal(factor)
    merged |= {"q.mean": mean, "q.log_scale": np.log(scale)}
    if factor.ndim == 2:
        merged["q.lower"] = (factor / scale[:, None])[np.tril_indices(len(factor), -1)]
    return merged, [wasserstein_distance(mean, factor, m, f) for m, f in zip(means, factors, strict=True)]


EQUATION = (
    "q(Z_G) = N(μ_G, diag(σ_G) L_G L_Gᵀ diag(σ_G)); without q.lower, L_G = I. The model of `sfvi.model` with "
    "parameters θ (theta.*) gives p(y | x, Z_G, Z_L), and a new site has Z_L from its prior. For `gp`: "
    "f(x) = a(x)ᵀ Z_G[:M] + [1, x]ᵀ Z_G[M:] + h(x) with L Lᵀ = k_G(Z, Z) + jitter · k_G(z, z) · I, "
    "a(x) = L⁻¹ k_G(Z, x), h(x) ~ N(0, k_L(x, x) + [1, x²]ᵀ exp(2 theta.log_site_slope)); x and y standardised."
)
MEANINGS = {
    "q.mean": "μ_G, mean of the shared latents Z_G",
    "q.log_scale": "log σ_G, by entry of Z_G",
    "q.lower": "strictly lower entries of L_G, row by row",
    SHARED: "Z, shared inducing inputs",
}


def saved(arrays: NamedArrays, equation: str, model: Mapping[str, Any], **meanings: str) -> Posterior:
    """Return the posterior to save, of parameters and shared inputs."""
    coordinates = {name: "standardised" if name == SHARED else "unconstrained" for name in arrays}
    known = {name: {**MEANINGS, **meanings}.get(name, "hyperparameter") for name in arrays}
    return Posterior(arrays, known, coordinates, equation, model)


def first_state(strategy: SFVI | SFVIAvg, roster: Roster) -> Asking[SFVIState]:
    """Return configured θ, shared inputs from pooled histograms, and q(Z_G) = N(0, scale² I)."""
    options, section, shared = strategy.options, strategy.config.model, dict[str, ndarray]()
    if options.row.inducing:
        shared[SHARED] = initial_locations((yield from shape_of_inputs(roster)), section, strategy.config.seed)
    points = torch.from_numpy(shared[SHARED]) if shared else None
    model = configured(options, section, len(options.columns(strategy.preparation.names)), points)
    q_global = initial_global(model.global_size, scale=options.scale, triangular=options.structure == "full")
    prior = Prior(model.fixed_log_scale.numpy(), model.block.numpy())
    return SFVIState(on_the_wire(model.theta() | named(q_global)), prior, shared)


def predicted(strategy: SFVI | SFVIAvg, state: SFVIState, roster: Roster) -> Asking[Predicted]:
    """Return θ and q(Z_G); a site has the shared inputs and its local posterior."""
    yield from ()
    section, structure = (part.model_dump(by_alias=True) for part in (strategy.config.model, strategy.options))
    model = {"family": "structured", "model": section, "structure": structure, "classes": strategy.options.classes}
    if strategy.options.row.personal:
        model["why_no_posterior"] = "each site keeps its own last layer; name the site with `--site`"
    posterior = saved({**state.parameters, **state.shared}, EQUATION, model)
    facts = {"shared_latents": len(state.prior.fixed), "relevance": lengthscale_facts(state.parameters, None)}
    facts |= {"bound": state.bound} if state.bound is not None else {}
    facts |= {"fresh_starts": state.fresh} if state.fresh else {}
    return Predicted(Parameters(state.parameters), posterior, facts)


def without_scaling(strategy: SFVI | SFVIAvg, preparation: Agreement) -> Agreement:
    """Return the agreement without standardised inputs, if the model needs raw inputs."""
    if not strategy.options.row.untouched:
        return preparation
    scales = {"input.mean": np.zeros_like, "input.scale": np.ones_like}
    changed = {name: make(preparation.arrays[name]) for name, make in scales.items()}
    kept = {name: array for name, array in preparation.arrays.items() if name != COVARIANCE}
    return replace(preparation, arrays={**kept, **changed})


def shared_inputs(strategy: SFVI | SFVIAvg, state: SFVIState) -> NamedArrays:
    """Return the shared inducing inputs."""
    return dict(state.shared)


def tolerances(strategy: SFVI | SFVIAvg, state: SFVIState) -> NamedArrays:
    """Return sds of q(Z_G), the same KL divergence for its scales, and units of logarithms of θ.

    Networks have none, because their weights do not converge.
    """
    if strategy.options.row.mean_field:
        return {}
    found, q = log_units(state.parameters), GlobalPosterior.of(state.parameters)
    found |= {"q.mean": q.factor().norm(dim=1).numpy(), "q.log_scale": np.full(len(q.mean), 0.5**0.5)}
    return found | ({} if q.lower is None else {"q.lower": np.ones(len(q.lower))})


def one_round(strategy: SFVI | SFVIAvg, state: SFVIState, roster: Roster) -> Asking[tuple[SFVIState, Figures]]:
    """Algorithm 2 of the paper for ``sfvi-avg`` and in rounds of the warm start, else Algorithm 1."""
    options, rate = strategy.options, strategy.options.rate(roster.round - 1, strategy.horizon())
    if roster.round <= options.averaging_rounds(roster.round):
        return (yield from averaging_round(state, roster, options, rate))
    return (yield from gradient_round(state, roster, options, strategy.config.seed, rate))


class SFVIAvg(FederatedStrategy[SFVIState]):
    """Rounds of local steps and averaging."""

    method, watched = "sfvi-avg", "site_estimate"
    options_class, state_class, anneals = SFVIAvgKeys, SFVIState, CONSTANT_SHARE
    options: SFVIAvgKeys
    initialise, predictive, constants, tolerances = first_state, predicted, shared_inputs, tolerances
    adjusted, one_round = without_scaling, one_round


class SFVI(FederatedStrategy[SFVIState]):
    """Rounds of gradients, after ``warm_start_rounds`` rounds of SFVI-Avg."""

    method, watched = "sfvi", "objective"
    options_class, state_class, anneals = SFVIKeys, SFVIState, CONSTANT_SHARE
    options: SFVIKeys
    initialise, predictive, constants, tolerances = first_state, predicted, shared_inputs, tolerances
    adjusted, one_round = without_scaling, one_round
