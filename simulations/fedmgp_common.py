"""What the FedMGP experiments share: finished runs are kept, tables are written as Markdown."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

HERE = Path(__file__).parent
RUNS = HERE.parent / "results" / "fedmgp"
RESULTS = HERE / "results"

SIGNALS: dict[str, Any] = {
    "method": "fedmgp",
    "dataset": "convolved-signals",
    "partitioner": "natural",
    "partition.column": "unit",
    "split": 0,
    "fedmgp.covariance": "convolved",
    "model.num-inducing": 30,
    "num-server-rounds": 20,
    "evaluate-every": 0,
    "baselines.linear": False,
    "baselines.local-only": False,
    "baselines.pooled": False,
    "keep-predictions": False,
    "output-dir": str(RUNS),
}
"""The paper's Section 5.1 with exact rounds."""


def metrics(name: str) -> dict[str, Any] | None:
    """The figures of a finished run."""
    path = RUNS / name / "metrics.json"
    return json.loads(path.read_text()) if path.exists() else None


def simulated(count: int) -> list[tuple[int, dict[str, Any]]]:
    """Numbers and node configurations of simulated units."""
    from fedgp_flower.run import in_process as engine

    return list(enumerate(engine.simulated_nodes(count)))


def finished(
    keys: dict[str, Any],
    name: str,
    sites: int = 0,
    grid: Callable[..., Any] | None = None,
    each_round: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """The figures of a run, made now if it is not there; one that was cut off goes on where it was.

    Args:
        keys: configuration, without ``name``.
        name: folder of the run.
        sites: number of units; 0 takes the natural ones.
        grid: makes the Grid from ClientApp, configuration and nodes, where it is not the ordinary one.
        each_round: called after every round.
    """
    from fedgp_flower import client_app, server_app
    from fedgp_flower.data.sites import natural_sites
    from fedgp_flower.run import in_process as engine
    from fedgp_flower.run.registry import parse_config

    found = metrics(name)
    if found is None:
        flat = {**keys, "name": name, "resume": (RUNS / name / "config.toml").exists()}
        count = sites or natural_sites(parse_config(flat))
        nodes = [{**node, "state-dir": str(RUNS / name / "state" / str(i))} for i, node in simulated(count)]
        own = grid(client_app.app, flat, nodes) if grid else engine.InProcessGrid(client_app.app, flat, nodes)
        with mock.patch("fedgp_flower.run.report.write_report"):  # a sweep needs no pages
            server_app.execute(own, flat, lambda row, total: each_round())
        found = metrics(name)
    assert found is not None
    return found


def mse(found: dict[str, Any]) -> float:
    """Mean squared error on held-out rows, in the units of the data."""
    return float(found["test"]["rmse"] ** 2)


def table(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; numbers with four digits."""
    lines = [list(titles), ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(_cell(value) for value in line) + " |" for line in lines)


def _cell(value: object) -> str:
    if isinstance(value, float | np.floating):
        return "" if np.isnan(value) else f"{value:.4f}" if abs(value) < 10 else f"{value:.1f}"
    return str(value)


def kept(page: Path, titles: Sequence[str], rows: Sequence[Sequence[object]]) -> list[Sequence[object]]:
    """These rows, and those of the page's table whose first two cells are of none of them; in order."""
    lines = page.read_text().splitlines() if page.exists() else []
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    new = {(str(row[0]), str(row[1])) for row in rows}
    earlier = [row for row in cells if len(row) == len(titles) and row[0] not in ("---", titles[0])]
    merged = [*rows, *(row for row in earlier if (row[0], row[1]) not in new)]
    return sorted(merged, key=lambda row: (str(row[0]), int(str(row[1]))))


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation."""
    return f"{np.mean(values):.4f} ± {np.std(values):.4f}"
