"""The command line ``fedgp``: thin over the functions that ``flwr run`` uses."""

from __future__ import annotations

import logging
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fedgp_flower import predict as prediction
from fedgp_flower.artefacts import read_run
from fedgp_flower.config import Value, flatten
from fedgp_flower.data.catalogue import catalogue
from fedgp_flower.data.sites import natural_sites, write_partition
from fedgp_flower.errors import ConfigError, FedGPError, RunError
from fedgp_flower.launch import complete_config, parse_assignments
from fedgp_flower.registry import METHODS, parse_config
from fedgp_flower.summary import calibration_verdict, comparison_frame, headline, rich_table, verdict

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Federated Gaussian processes on Flower.")
console = Console()

RunArgument = Annotated[Path, typer.Argument(help="folder of a finished run", exists=True, file_okay=False)]
Assignments = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="keys of the run configuration")]


@app.command()
def run(
    assignments: Assignments = None,
    sites: Annotated[int, typer.Option(min=0, help="simulated sites; 0 takes every natural group")] = 5,
    config: Annotated[Path | None, typer.Option(help="TOML file with keys of the run configuration")] = None,
    output_dir: Annotated[str | None, typer.Option(help="folder that the run's folder goes into")] = None,
    name: Annotated[str | None, typer.Option(help="name of the run's folder")] = None,
) -> None:
    """Run a method in this process: the same ServerApp and sites as `flwr run`, without Ray."""
    flat = _flat(config, assignments or [])
    flat |= {key: value for key, value in (("output-dir", output_dir), ("name", name)) if value is not None}
    folder = run_in_process(complete_config(flat, Path.cwd()), sites)
    metrics = read_run(folder).metrics
    console.print(rich_table(headline(metrics), f"{metrics.method} on {metrics.dataset}: {metrics.sites} sites"))
    for sentence in filter(None, (verdict(metrics), calibration_verdict(metrics))):
        console.print(sentence)
    console.print(f"run folder  {folder}\nreport      {folder / 'report.html'}", soft_wrap=True)


def run_in_process(flat: Mapping[str, Value], sites: int) -> Path:
    """Run a configuration over an in-process Grid with a progress bar; returns the run's folder."""
    from fedgp_flower import client_app, engine, server_app  # noqa: PLC0415  Flower takes a second to import

    logging.getLogger("flwr").setLevel(logging.WARNING)  # it logs every round; the progress bar says the same
    config = parse_config(flat)
    count = sites or natural_sites(config)
    grid = engine.InProcessGrid(client_app.app, flat, engine.simulated_nodes(count))
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[figures]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(config.method, total=config.num_server_rounds, figures="")

        def show(row: Mapping[str, Any], total: int) -> None:
            shown = ("objective", "test_nll", "test_rmse", "test_accuracy")
            figures = " ".join(f"{key} {row[key]:.4f}" for key in shown if key in row)
            progress.update(task, completed=row["round"], total=total, figures=figures)

        return server_app.execute(grid, flat, show)


@app.command()
def predict(
    run: RunArgument,
    source: Annotated[Path, typer.Option("--input", help="CSV or Parquet with the feature columns")],
    output: Annotated[Path, typer.Option(help="CSV to write: mean, sd, quantiles of a noisy observation")],
) -> None:
    """Predict new rows from a run's saved posterior; no site is needed."""
    rows, unknown = prediction.predict_file(run, source, output)
    console.print(f"{rows} rows predicted into {output}", soft_wrap=True)
    if unknown:
        console.print(f"{unknown} cell(s) hold a level that no site had; they count as none of the known levels")


@app.command()
def report(run: RunArgument) -> None:
    """Write a run's report.html again."""
    console.print(str(prediction.report(run)), soft_wrap=True)


@app.command()
def compare(runs: Annotated[list[Path], typer.Argument(help="folders of finished runs", exists=True)]) -> None:
    """Put the figures of several runs side by side."""
    console.print(rich_table(comparison_frame(runs)))


@app.command()
def methods() -> None:
    """The methods that `method = …` can name."""
    rows = [{"method": name, "what it is": method.summary, "paper": method.paper} for name, method in METHODS.items()]
    console.print(rich_table(pd.DataFrame(rows)))


@app.command()
def datasets(data_dir: Annotated[str, typer.Option(help="folder of data sets; default FEDGP_DATA")] = "") -> None:
    """The data sets that `dataset = …` can name."""
    console.print(rich_table(pd.DataFrame([asdict(entry) for entry in catalogue(data_dir)])))


@app.command()
def partition(
    dataset: Annotated[str, typer.Argument(help="name or path of a data set")],
    sites: Annotated[int, typer.Option(min=1)],
    output_dir: Annotated[Path, typer.Option(help="folder for one CSV per site")],
    assignments: Assignments = None,
) -> None:
    """Deal a data set to sites and write a CSV for each, as input of real SuperNodes."""
    config = parse_config(parse_assignments(assignments or []) | {"dataset": dataset})
    for path in write_partition(config, sites, output_dir):
        console.print(str(path), soft_wrap=True)


def _flat(config: Path | None, assignments: list[str]) -> dict[str, Value]:
    written: dict[str, Value] = {}
    if config is not None:
        try:
            written = flatten(tomllib.loads(config.read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise ConfigError(f"there is no file {config}") from None
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{config} is not valid TOML: {error}") from None
    return written | parse_assignments(assignments)


def main() -> None:
    """Entry point: expected errors are told in a line, without a traceback."""
    try:
        app()
    except FedGPError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2 if not isinstance(error, RunError) else 1) from None


if __name__ == "__main__":
    main()
