"""The ServerApp: validates the configuration, opens the run's folder, runs the Strategy, writes the results."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from fedgp_flower.config import RunConfig
from fedgp_flower.errors import FedGPError
from fedgp_flower.options import AUTO, FlatConfig
from fedgp_flower.outcome import Observer, Progress, Summary, figures_of
from fedgp_flower.run.artefacts import RunFolder, RunMetrics, locked, saved_posterior
from fedgp_flower.run.registry import parse_config, strategy_class
from fedgp_flower.typing import Facts

app = ServerApp()
logger = logging.getLogger("fedgp")


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Entry point of ``flwr run``. A run that cannot be completed raises, so that its status is a failure."""
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("fedgp: %(message)s"))
        logger.addHandler(handler)

    def progress(row: Facts, total: int) -> None:
        logger.info("round %d of about %d  %s", row["round"], total, figures_of(row))

    try:
        folder = execute(grid, context.run_config, progress)
    except FedGPError as error:
        logger.error("%s", error)  # in place of Flower's traceback
        logging.getLogger("flwr").addFilter(lambda record: not isinstance((record.exc_info or "no")[1], FedGPError))
        raise
    logger.info("results: %s", folder.resolve())


def execute(
    grid: Grid, flat: FlatConfig, progress: Progress, opened: Callable[[Path], None] = lambda folder: None
) -> Path:
    """Run the configured method over a Grid. ``opened`` is called with the run's folder before any message."""
    config = parse_config(flat)
    folder = RunFolder.open(config)

    def on_round(row: Mapping[str, float], total: int) -> None:
        folder.append_history(row)
        progress(row, total)

    logger.setLevel(logging.INFO)
    with locked(folder.path):
        try:
            opened(folder.path)
            with folder.logging_to_file():
                if flat.get("method", AUTO) == AUTO:
                    logger.info("method auto is %s: the likelihood is %s", config.method, config.model.likelihood)
                for note in config.ignored:
                    logger.warning(note)
                snapshot = folder.restore() if config.resume else None
                observer = Observer(on_round, folder.checkpoint)
                strategy = strategy_class(config).from_config(config, observer, snapshot)
                strategy.start(grid, ArrayRecord(), num_rounds=config.num_server_rounds, timeout=config.round_timeout)
                write_results(folder, config, strategy.outcome)
        except BaseException:  # also Ctrl-C: a run without a round must not block its name
            folder.mark_as_failed()
            raise
    return folder.path


def write_results(folder: RunFolder, config: RunConfig, summary: Summary) -> None:
    """Write posterior and predictions, then ``metrics.json``, which marks a finished run, then the report."""
    from fedgp_flower.run.report import write_report  # noqa: PLC0415  pictures and models, not needed before

    found = saved_posterior(config, summary)
    if found is not None:
        folder.write_posterior(found)
    metrics = RunMetrics(**summary.metrics)
    levels = json.loads(summary.schema)["target"].get("levels", ())
    folder.write_predictions(summary.predictions, summary.input_names, metrics.labels, levels)
    folder.write_metrics(metrics)
    folder.seal()
    write_report(folder.path)
