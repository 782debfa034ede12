"""A run of tables in memory that leaves nothing behind but what predicts: what estimators fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from flwr.app import ArrayRecord, Context

from fedgp_flower.client_app import site_app
from fedgp_flower.data.sites import RawSite, site_of
from fedgp_flower.errors import RunError
from fedgp_flower.options import FlatConfig, Value
from fedgp_flower.outcome import Observer
from fedgp_flower.run.artefacts import RunData, RunMetrics, saved_posterior
from fedgp_flower.run.config import RunConfig
from fedgp_flower.run.in_process import InProcessGrid
from fedgp_flower.run.predict import Predictor
from fedgp_flower.run.registry import parse_config, strategy_class

NOWHERE = Path("(fitted in memory)")


def fit_in_memory(flat: FlatConfig, tables: Mapping[str, pd.DataFrame], target: str) -> Predictor:
    """Train on a table per site; all rows are training rows, and nothing is compared or written.

    Args:
        flat: Keys of the run configuration.
        tables: By site; their columns are the features and the target.
        target: Name of the target.

    Raises:
        ConfigError: naming every wrong key.
        DataError: naming the column and row that cannot be used.
        RunError: the method saves nothing that predicts, or no site could take part.
    """
    quiet: dict[str, Value] = {
        "keep-predictions": False,
        "test-fraction": 0.0,
        "min-sites": 1,
    }
    quiet |= {f"baselines.{name}": False for name in ("linear", "local-only", "pooled")} | {"evaluate-every": 0}
    flat = {**quiet, **flat, "sites": len(tables)}
    config = parse_config(flat)
    raw = {}
    for site, table in tables.items():
        raw[site] = replace(site_of(config, {"site": site}, (table, target)), partitions=len(tables))

    def load(config: RunConfig, context: Context) -> RawSite:
        del config
        return raw[str(context.node_config["site"])]

    grid = InProcessGrid(site_app(load), flat, [{"site": site} for site in tables])
    strategy = strategy_class(config).from_config(config, Observer())
    strategy.start(grid, ArrayRecord(), num_rounds=config.num_server_rounds, timeout=config.round_timeout)
    summary = strategy.outcome
    posterior = saved_posterior(config, summary)
    if posterior is None:
        raise RunError(f"method {config.method!r} saves nothing that predicts new rows; take one that does")
    metrics = RunMetrics(**summary.metrics)
    return Predictor.of(RunData(NOWHERE, dict(config.flat()), pd.DataFrame(), metrics, posterior, None))


def dealt(table: pd.DataFrame, sites: int, seed: int) -> dict[str, pd.DataFrame]:
    """Rows dealt to sites at random, two or more each where there are so many."""
    order = np.random.default_rng(seed).permutation(len(table))
    parts = np.array_split(order, max(1, min(sites, len(table) // 2)))
    return {str(number): table.iloc[np.sort(part)] for number, part in enumerate(parts)}
