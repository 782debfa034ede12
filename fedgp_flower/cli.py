"""The command line ``fedgp``: thin over the functions that ``flwr run`` uses."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fedgp_flower.config import Value
from fedgp_flower.data.catalogue import catalogue
from fedgp_flower.data.datasets import load_table
from fedgp_flower.data.sites import natural_sites, write_partition
from fedgp_flower.errors import FedGPError, RunError
from fedgp_flower.launch import complete_config, parse_assignments, read_config, show_result
from fedgp_flower.registry import METHODS, parse_config
from fedgp_flower.summary import TITLES, cell, comparison_frame

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Federated Gaussian processes on Flower.",
    pretty_exceptions_show_locals=False,  # they would print rows of data
)
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
    flat = (read_config(config) if config else {}) | parse_assignments(assignments or [])
    flat |= {key: value for key, value in (("output-dir", output_dir), ("name", name)) if value is not None}
    show_result(run_in_process(complete_config(flat, Path.cwd()), sites))


def run_in_process(flat: Mapping[str, Value], sites: int, nodes: Sequence[Mapping[str, Any]] = ()) -> Path:
    """Run a configuration over an in-process Grid with a progress bar; returns the run's folder.

    Args:
        flat: Keys of the run configuration.
        sites: Number of simulated sites; 0 takes every natural group.
        nodes: Node configurations, if they are not those of ``sites`` simulated ones.
    """
    from fedgp_flower import client_app, engine, server_app  # noqa: PLC0415  Flower takes a second to import

    logging.getLogger("flwr").setLevel(logging.WARNING)  # it logs every round; the progress bar says the same
    config = parse_config(flat)
    load_table(config).rows(config.split)  # a data set nobody can use is one error here, not one of every site
    chosen = nodes or engine.simulated_nodes(sites or natural_sites(config))
    grid = engine.InProcessGrid(client_app.app, flat, chosen)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[figures]}"),
    )
    terminal = Console(stderr=True)
    with Progress(*columns, console=terminal, transient=True) as progress, _warnings_shown(terminal):
        task = progress.add_task(config.method, total=config.num_server_rounds, figures="")

        def show(row: Mapping[str, Any], total: int) -> None:
            shown = ("objective", "site_estimate", "test_nll", "test_rmse", "test_accuracy")
            figures = " ".join(f"{key} {row[key]:.4f}" for key in shown if key in row)
            progress.update(task, completed=row["round"], total=total, figures=figures)

        return server_app.execute(grid, flat, show, lambda folder: grid.keep_states(folder / "sites"))


@contextmanager
def _warnings_shown(terminal: Console) -> Iterator[None]:
    """Print above the progress bar what goes wrong at a site."""
    handler = RichHandler(logging.WARNING, terminal, show_time=False, show_path=False)
    handler.addFilter(lambda record: record.exc_info is None)  # tracebacks belong in log.txt
    logger = logging.getLogger("fedgp")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@app.command()
def predict(
    run: RunArgument,
    source: Annotated[Path, typer.Option("--input", help="CSV or Parquet with the feature columns")],
    output: Annotated[Path, typer.Option(help="CSV to write: mean, sd, quantiles of a noisy observation")],
    site: Annotated[str, typer.Option(help="sfvi: predict at this site, with the deviation that it alone keeps")] = "",
    site_data: Annotated[Path | None, typer.Option(help="table of that site, unless it was simulated")] = None,
    state_dir: Annotated[Path | None, typer.Option(help="where that site keeps its state")] = None,
) -> None:
    """Predict new rows from a run's saved posterior; no site is needed."""
    from fedgp_flower.predict import predict_file  # noqa: PLC0415  PyTorch takes seconds to import

    own = None
    if site:
        from fedgp_flower.predict_at_site import predictor_at  # noqa: PLC0415  PyTorch takes seconds to import

        own = predictor_at(run, site, data=site_data, state_dir=state_dir)
    elif site_data or state_dir:
        raise RunError("`--site-data` and `--state-dir` say where a site is: name it with `--site`")
    rows, unknown = predict_file(run, source, output, own)
    console.print(f"{rows} rows predicted into {output}", soft_wrap=True)
    if unknown:
        console.print(f"{unknown} cell(s) hold a level that no site had; they count as none of the known levels")


@app.command()
def report(run: RunArgument) -> None:
    """Write a run's report.html again."""
    from fedgp_flower import predict as prediction  # noqa: PLC0415  PyTorch takes seconds to import

    console.print(str(prediction.report(run)), soft_wrap=True)


@app.command()
def forget(
    run: RunArgument,
    site: Annotated[str, typer.Option(help="id or label of the site to forget")],
    rounds: Annotated[int, typer.Option(min=0, help="rounds of training afterwards")] = 0,
    name: Annotated[str, typer.Option(help="name of the new run's folder; default RUN-without-SITE")] = "",
) -> None:
    """Remove a site's factor from a run of pvi, evaluate again, and write a new run."""
    from fedgp_flower import forget as forgetting  # noqa: PLC0415  Flower takes a second to import

    going_on = forgetting.prepare(run, site, rounds=rounds, name=name or f"{run.name}-without-{site}")
    folder = run_in_process(going_on.flat, 0, going_on.nodes)
    forgetting.record(run, folder, site, rounds)
    show_result(folder)


@app.command()
def compare(runs: Annotated[list[Path], typer.Argument(help="folders of finished runs", exists=True)]) -> None:
    """Put the figures of several runs side by side."""
    frame = comparison_frame(runs)
    figures = {str(name): frame[name] for name in frame}
    rows = [
        [TITLES.get(name, name.replace("_", " ")), *(cell(name, value) for value in values)]
        for name, values in figures.items()
    ]
    console.print(_table(["", *map(str, frame.index)], rows, numbers=True))


@app.command()
def methods() -> None:
    """The methods that `method = …` can name."""
    rows = [[name, method.summary, method.paper] for name, method in METHODS.items()]
    console.print(_table(["method", "what it is", "paper"], rows))


@app.command()
def datasets(data_dir: Annotated[str, typer.Option(help="folder of data sets; default FEDGP_DATA")] = "") -> None:
    """The data sets that `dataset = …` can name."""
    entries = [asdict(entry) for entry in catalogue(data_dir)]
    wanted = {"name": "name", "rows": "rows", "inputs": "inputs", "splits": "splits", "natural": "site column"}
    rows = [[*(str(entry[key]) for key in wanted), entry["summary"] or entry["source"]] for entry in entries]
    console.print(_table([*wanted.values(), "what it is"], rows))


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


def _table(titles: list[str], rows: list[list[str]], *, numbers: bool = False) -> Table:
    """Rows of text; the first column, which people copy from, is never shortened."""
    table = Table()
    for position, title in enumerate(titles):
        table.add_column(
            title,
            no_wrap=position == 0,
            overflow="fold",
            justify="right" if numbers and position else "left",
        )
    for row in rows:
        table.add_row(*row)
    return table


def main() -> None:
    """Entry point: expected errors are told in a line, without a traceback."""
    try:
        app()
    except FedGPError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2 if not isinstance(error, RunError) else 1) from None


if __name__ == "__main__":
    main()
