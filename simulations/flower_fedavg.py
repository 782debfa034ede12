"""Flower's own FedAvg over an in-process Grid, a baseline of the papers' models: any torch module, a loss, rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch import Tensor, nn

from fedgp_flower.run.in_process import InProcessGrid

Rows = tuple[Tensor, ...]
Loss = Callable[[nn.Module, Rows], Tensor]
"""Of a module on some rows, to be lowered; a mean over the rows."""


def fedavg(
    make: Callable[[], nn.Module],
    sites: Mapping[str, Rows],
    loss: Loss,
    *,
    rounds: int,
    steps: int,
    rate: float,
    batch: int,
    seed: int = 0,
    shared: Callable[[str], bool] = lambda name: True,
) -> dict[str, nn.Module]:
    """The module of every site after rounds of McMahan et al. (2017): local steps of Adam, then Flower's FedAvg.

    Args:
        make: A module at its start, the same for all.
        sites: Rows of every site; weights are their number.
        loss: What a site lowers.
        rounds: How many.
        steps: Of Adam, which begins anew in every round.
        rate: Of Adam.
        batch: Rows of a step.
        seed: Of the batches.
        shared: Which parameters are averaged, by name; the others stay at their site (Arivazhagan et al. 2019).
    """
    logging.getLogger("flwr").setLevel(logging.WARNING)
    modules, app = {name: make() for name in sites}, ClientApp()
    draws = {name: np.random.default_rng([seed, k]) for k, name in enumerate(sites)}

    def common(module: nn.Module) -> dict[str, Tensor]:
        return {name: value for name, value in module.state_dict().items() if shared(name)}

    @app.train()
    def train(message: Message, context: Context) -> Message:
        name = str(context.node_config["site"])
        module, rows = modules[name], sites[name]
        module.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict(), strict=False)
        optimiser = torch.optim.Adam(module.parameters(), rate)
        for _ in range(steps):
            chosen = torch.from_numpy(draws[name].choice(len(rows[0]), min(batch, len(rows[0])), replace=False))
            value = loss(module, tuple(part[chosen] for part in rows))
            optimiser.zero_grad()
            value.backward()
            optimiser.step()
        metrics = MetricRecord({"num-examples": len(rows[0])})
        return Message(RecordDict({"arrays": ArrayRecord(common(module)), "metrics": metrics}), reply_to=message)

    grid = InProcessGrid(app, {}, [{"site": name} for name in sites])
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=len(sites))
    result = strategy.start(grid, ArrayRecord(common(make())), num_rounds=rounds)
    for module in modules.values():
        module.load_state_dict(result.arrays.to_torch_state_dict(), strict=False)
    return modules
