"""Federated averaging (McMahan et al. 2017, Algorithm 1) with Flower's rules, as a pure update of a state.

Flower's rules sample nodes and hide their moments; here sites are sampled by id and the state holds the moments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
from flwr.app import Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam, FedAvg, FedMedian, FedTrimmedAvg, FedYogi
from flwr.serverapp.strategy.fedopt import FedOpt

from fedgp_flower.config import RunConfig
from fedgp_flower.errors import RunError
from fedgp_flower.messages import message, too_far
from fedgp_flower.options import AveragingSection, OptimizerSection
from fedgp_flower.records import array_record, numpy_arrays
from fedgp_flower.shared_messages import MOVE, Step, Stepped, WeightedStep
from fedgp_flower.typing import AnyShape
from strategies.server.questions import Asking, Each, Figures, Roster, Summed, Total

RULES: Mapping[str, Callable[[], FedAvg]] = {
    "fedavg": FedAvg,
    "fedadam": FedAdam,
    "fedyogi": partial(FedYogi, eta=0.1),  # the learning rate of FedAdam
    "fedmedian": FedMedian,
    "fedtrimmedavg": FedTrimmedAvg,
}
ADAM = 3.2
"""A step of Adam with β = (.9, .999) is never longer than (1 − β₁)/√(1 − β₂) learning rates (Kingma and Ba 2015)."""


@message()
class AveragingState:
    """Parameters in unconstrained coordinates and the moments of the server's optimiser, if any."""

    parameters: Mapping[str, AnyShape]
    moments: Mapping[str, AnyShape]


def first_state(parameters: Mapping[str, np.ndarray]) -> AveragingState:
    """Return the state before the first round; arrays have an axis, because Flower's clipping skips scalars."""
    return AveragingState({name: np.atleast_1d(array) for name, array in parameters.items()}, {})


def sampled(roster: Roster, fraction: float, seed: int) -> list[str]:
    """Return max(⌈ρK⌉, 1) sites, drawn from the seed and the round."""
    size = max(math.ceil(fraction * len(roster.sites)), 1)
    draw = np.random.default_rng([seed, roster.round, *b"sample"])
    return [roster.sites[index] for index in sorted(draw.choice(len(roster.sites), size=size, replace=False))]


def averaged(
    state: AveragingState, roster: Roster, config: RunConfig, local: OptimizerSection
) -> Asking[tuple[AveragingState, Figures]]:
    """Sampled sites take local steps and the rule combines them; under masks it sees the mean as one site."""
    rate = local.learning_rate * local.decay ** (roster.round - 1)
    longest = ADAM * local.steps if local.name == "adam" else math.inf  # steps of SGD and L-BFGS have no such bound
    step, rows = Step(state.parameters, rate, min(MOVE, rate * longest)), roster.rows
    if roster.totals_only:
        summed: Summed[WeightedStep] = yield Total(WeightedStep, step)
        answers = {} if summed.total is None else {"all": summed.total.mean()}
        rows = {"all": 1}
        for name, array in ((name, array) for mean in answers.values() for name, array in mean.values.items()):
            if reason := too_far(step.values[name], array, step.reach):
                raise RunError(f"the total under masks cannot come from honest sites: `{name}` {reason}")
    else:
        answers = yield Each(Stepped, dict.fromkeys(sampled(roster, config.averaging.fraction, config.seed), step))
    if not answers:
        return state, {}
    weights = {site: rows[site] for site in answers}
    objective = np.average([answer.objective for answer in answers.values()], weights=[*weights.values()])
    return combined(state, answers, weights, roster.round, config.averaging), {"objective": float(objective)}


def combined(
    state: AveragingState,
    answers: Mapping[str, Stepped],
    rows: Mapping[str, int],
    server_round: int,
    averaging: AveragingSection,
) -> AveragingState:
    """Return the state after Flower's rule on the sites' parameters, with weights N_k / Σ N_k for N_k rows."""
    rule = RULES[averaging.server_optimizer]()
    adaptive = rule if isinstance(rule, FedOpt) else FedOpt()
    adaptive.current_arrays = dict(state.parameters)
    adaptive.m_t, adaptive.v_t = (
        {name.removeprefix(kind): array for name, array in state.moments.items() if name.startswith(kind)}
        for kind in ("m_t.", "v_t.")
    )
    replies = []
    for site, answer in answers.items():
        metrics = MetricRecord({"num-examples": rows[site]})
        content = RecordDict({"arrays": array_record(dict(answer.values)), "metrics": metrics})
        replies.append(Message(content, dst_node_id=0, message_type="train"))
    aggregated, _ = rule.aggregate_train(server_round, replies)
    assert aggregated is not None
    moments = {f"m_t.{name}": np.asarray(array) for name, array in adaptive.m_t.items()}
    moments |= {f"v_t.{name}": np.asarray(array) for name, array in adaptive.v_t.items()}
    return AveragingState(numpy_arrays(aggregated), moments)
