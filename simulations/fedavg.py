"""Flower's own FedAvg over an in-process Grid: a baseline for any torch module, a loss and rows."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch import Tensor, nn

from fedgp_flower.run.in_process import InProcessGrid
from simulations.common import Row

Rows = tuple[Tensor, Tensor]
WAYS: Mapping[str, Callable[[str], bool]] = {
    "FedAvg": lambda name: True,
    "FedAvg, heads stay": lambda name: not name.startswith("head."),
}
"""What is averaged, by the name of a parameter; the rest stays at its site (Arivazhagan et al. 2019)."""


def fedavg(
    make: Callable[[], nn.Module],
    sites: Mapping[str, Rows],
    *,
    rounds: int,
    steps: int,
    rate: float,
    batch: int,
    seed: int = 0,
    shared: Callable[[str], bool] = WAYS["FedAvg"],
) -> dict[str, nn.Module]:
    """The module of every site after rounds of McMahan et al. (2017): local steps of Adam, then Flower's FedAvg.

    Args:
        make: A module at its start, the same for all; it gives the logits of classes.
        sites: Inputs and classes of every site; weights are their number.
        rounds: How many.
        steps: Of Adam, which begins anew in every round.
        rate: Of Adam.
        batch: Rows of a step.
        seed: Of the batches.
        shared: Which parameters are averaged.
    """
    logging.getLogger("flwr").setLevel(logging.WARNING)
    modules, app = {name: make() for name in sites}, ClientApp()
    draws = {name: np.random.default_rng([seed, k]) for k, name in enumerate(sites)}

    def common(module: nn.Module) -> dict[str, Tensor]:
        return {name: value for name, value in module.state_dict().items() if shared(name)}

    @app.train()
    def train(message: Message, context: Context) -> Message:
        name = str(context.node_config["site"])
        module, (x, y) = modules[name], sites[name]
        module.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict(), strict=False)
        optimiser = torch.optim.Adam(module.parameters(), rate)
        for _ in range(steps):
            chosen = torch.from_numpy(draws[name].choice(len(x), min(batch, len(x)), replace=False))
            optimiser.zero_grad()
            nn.functional.cross_entropy(module(x[chosen]), y[chosen]).backward()
            optimiser.step()
        content = {"arrays": ArrayRecord(common(module)), "metrics": MetricRecord({"num-examples": len(x)})}
        return Message(RecordDict(content), reply_to=message)

    grid = InProcessGrid(app, {}, [{"site": name} for name in sites])
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=len(sites))
    result = strategy.start(grid, ArrayRecord(common(make())), num_rounds=rounds)
    for module in modules.values():
        module.load_state_dict(result.arrays.to_torch_state_dict(), strict=False)
    return modules


def scored(path: str, make: Callable[[], nn.Module], way: str, held_out: int, **plan: Any) -> Row:
    """Accuracy in per cent and its spread over sites, and NLL, of a table of images whose last rows are held out."""
    frame = pd.read_parquet(path)
    x = torch.from_numpy(frame.filter(regex=r"^p\d+$").to_numpy(copy=True))
    y, silo = torch.from_numpy(frame["digit"].to_numpy(int, copy=True)), frame["silo"].to_numpy()
    training, names = np.arange(len(frame)) < len(frame) - held_out, sorted(set(silo))
    rows, new = ({s: np.flatnonzero((silo == s) & part) for s in names} for part in (training, ~training))
    modules = fedavg(make, {s: (x[own], y[own]) for s, own in rows.items()}, shared=WAYS[way], **plan)
    right, nll = [], 0.0
    for s, own in new.items():
        with torch.no_grad():
            log_class = modules[s](x[own]).log_softmax(-1)
        right.append(100 * float((log_class.argmax(1) == y[own]).double().mean()))
        nll -= float(log_class.gather(1, y[own][:, None]).sum())
    found: Row = json.loads(json.dumps({"accuracy, %": np.mean(right), "spread": np.std(right), "NLL": nll / held_out}))
    return found


def over_sites(scores: Row) -> Row:
    """Mean and spread over sites of the accuracy, and the NLL, of a run's scores or of a baseline's."""
    accuracy = [100 * row["accuracy"] for row in scores["per_site"]]
    spread = float(np.std(accuracy)) if len(accuracy) > 1 else None
    return {"accuracy, %": float(np.mean(accuracy)), "spread": spread, "NLL": scores["nll"]}
