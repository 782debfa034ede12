"""Federated averaging of named parameters: Flower's FedAvg, FedAdam and FedYogi, as a pure update of a state.

What Flower's rules lack is here: sites sampled by their stable ids from a seed, and moments that are part of the state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from flwr.app import Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam, FedAvg, FedMedian, FedTrimmedAvg, FedYogi

from fedgp_flower.config import RunConfig
from fedgp_flower.errors import RunError
from fedgp_flower.messages import message, too_far
from fedgp_flower.records import array_record, numpy_arrays
from fedgp_flower.shared_messages import MOVE, Step, Stepped, WeightedStep
from fedgp_flower.typing import AnyShape, NamedArrays
from strategies.server.questions import Asking, Each, Figures, Roster, Summed, Total

RULES: Mapping[str, Callable[[float], FedAvg]] = {
    "fedavg": lambda rate: FedAvg(),
    "fedadam": lambda rate: FedAdam(eta=rate),
    "fedyogi": lambda rate: FedYogi(eta=rate),
    "fedmedian": lambda rate: FedMedian(),
    "fedtrimmedavg": lambda rate: FedTrimmedAvg(),
}
MOMENTS = ("m_t", "v_t")
ADAM = 3.2
"""A step of Adam with β = (.9, .999) is never longer than (1 − β₁)/√(1 − β₂) learning rates (Kingma and Ba 2015)."""


@message()
class AveragingState:
    """Parameters in unconstrained coordinates, and the moments of a server optimiser that has them."""

    parameters: Mapping[str, AnyShape]
    moments: Mapping[str, AnyShape]


def first_state(parameters: NamedArrays) -> AveragingState:
    """The state before the first round; every array has an axis, because Flower's clipping passes over one without."""
    return AveragingState({name: np.atleast_1d(array) for name, array in parameters.items()}, {})


@dataclass(frozen=True, slots=True)
class AveragingPlan:
    """How a round of federated averaging goes."""

    fraction: float
    """Share ρ of the sites in a round."""
    rule: str
    """A key of :data:`RULES`."""
    server_learning_rate: float
    learning_rate: float
    """Of the sites' steps in the first round."""
    decay: float
    seed: int
    steps: float = math.inf
    """Learning rates that an optimiser goes in one round at most; no bound is known of SGD and L-BFGS."""

    @staticmethod
    def of(config: RunConfig) -> AveragingPlan:
        """From the configuration."""
        local, rule = config.optimizer, config.averaging
        steps = ADAM * local.steps if local.name == "adam" else math.inf
        rates = rule.server_learning_rate, local.learning_rate, local.decay
        return AveragingPlan(rule.fraction, rule.server_optimizer, *rates, config.seed, steps)

    def step(self, values: Mapping[str, np.ndarray], server_round: int) -> Step:
        """What sites are asked in a round."""
        rate = self.learning_rate * self.decay ** (server_round - 1)
        return Step(values, rate, min(MOVE, rate * self.steps))


def sampled(roster: Roster, fraction: float, seed: int) -> list[str]:
    """max(⌈ρK⌉, 1) sites, drawn from the seed and the round."""
    size = max(math.ceil(fraction * len(roster.sites)), 1)
    draw = np.random.default_rng([seed, roster.round, *b"sample"])
    return [roster.sites[index] for index in sorted(draw.choice(len(roster.sites), size=size, replace=False))]


def averaging_round(
    state: AveragingState, roster: Roster, plan: AveragingPlan
) -> Asking[tuple[AveragingState, Figures]]:
    """Sampled sites take local steps; the rule combines what they send (McMahan et al. 2017, Algorithm 1)."""
    step = plan.step(state.parameters, roster.round)
    if roster.totals_only:
        return (yield from _averaged_total(state, roster, plan, step))
    chosen = sampled(roster, plan.fraction, plan.seed)
    answers: Mapping[str, Stepped] = yield Each(Stepped, dict.fromkeys(chosen, step))
    if not answers:
        return state, {}
    weights = [roster.rows[site] for site in answers]
    objective = float(np.average([answer.objective for answer in answers.values()], weights=weights))
    values = {site: (dict(answer.values), roster.rows[site]) for site, answer in answers.items()}
    merged = combined(state, values, roster.round, plan)
    return merged, {"objective": objective}


def _averaged_total(
    state: AveragingState, roster: Roster, plan: AveragingPlan, step: Step
) -> Asking[tuple[AveragingState, Figures]]:
    """The same from Σ N_k w_k and Σ N_k: the rule is given their mean as if it came from one site."""
    summed: Summed[WeightedStep] = yield Total(WeightedStep, step)
    if summed.total is None:
        return state, {}
    mean = summed.total.mean()
    for name, array in mean.values.items():
        if reason := too_far(step.values[name], array, step.reach):
            raise RunError(f"the total under masks is of no honest sites: `{name}` {reason}")
    return combined(state, {"all": (dict(mean.values), 1)}, roster.round, plan), {"objective": mean.objective}


def combined(
    state: AveragingState, values: Mapping[str, tuple[NamedArrays, int]], server_round: int, plan: AveragingPlan
) -> AveragingState:
    """The state after Flower's rule, from parameters and rows N_k; weights N_k / Σ N_k."""
    rule = RULES[plan.rule](plan.server_learning_rate)
    if isinstance(rule, FedAdam | FedYogi):
        rule.current_arrays = dict(state.parameters)
        for kind in MOMENTS if state.moments else ():
            moments = {n.removeprefix(f"{kind}."): a for n, a in state.moments.items() if n.startswith(f"{kind}.")}
            setattr(rule, kind, moments)
    aggregated, _ = rule.aggregate_train(server_round, [_reply(arrays, rows) for arrays, rows in values.values()])
    assert aggregated is not None
    kept = {kind: getattr(rule, kind, None) or {} for kind in MOMENTS}
    moments = {f"{kind}.{n}": np.asarray(a) for kind, arrays in kept.items() for n, a in arrays.items()}
    return AveragingState(numpy_arrays(aggregated), moments)


def _reply(arrays: NamedArrays, rows: int) -> Message:
    content = RecordDict({"arrays": array_record(arrays), "metrics": MetricRecord({"num-examples": rows})})
    return Message(content, dst_node_id=0, message_type="train")
