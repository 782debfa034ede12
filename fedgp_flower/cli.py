"""The command line ``fedgp``: thin over the functions that ``flwr run`` uses.

Commands import what they need when they run: ``fedgp --help`` loads neither PyTorch nor Flower nor pandas.
"""
# ruff: noqa: PLC0415

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from click import Context, HelpFormatter
from typer.core import TyperCommand

from fedgp_flower.deploy.commands import add_to, deploy
from fedgp_flower.errors import ConfigError, DamagedError, FedGPError, RunError

if TYPE_CHECKING:
    from rich.console import Console

    from fedgp_flower.options import FlatConfig, Value
    from fedgp_flower.outcome import Progress
    from fedgp_flower.run.check import Checked
    from fedgp_flower.run.predict import Predictor
    from fedgp_flower.typing import Facts

app = typer.Typer(
    no_args_is_help=True,
    help="Federated Gaussian processes on Flower.",
    pretty_exceptions_show_locals=False,  # they would print rows of data
)

RunArgument = Annotated[Path, typer.Argument(help="folder of a finished run", exists=True, file_okay=False)]
Assignments = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="keys of the run configuration")]
Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="FILE… KEY=VALUE…", help="a table, or several that are a site each, and keys of the run"),
]
Picture = Annotated[Path | None, typer.Option(help="picture to draw: mean and 95 % band along the one input")]
ConfigFile = Annotated[Path | None, typer.Option(help="TOML file with keys of the run configuration")]
NewRows = Annotated[Path, typer.Option("--input", help="CSV or Parquet with the feature columns")]
Predicted = Annotated[Path, typer.Option(help="CSV to write: mean, sd, quantiles of a noisy observation")]
PolicyFile = Annotated[Path | None, typer.Option(help="policy of the site; otherwise the default")]
Sites = Annotated[int, typer.Option(min=0, help="simulated sites; 0 takes every natural group")]
Gpus = Annotated[float, typer.Option(min=0.0, help="share of a GPU each simulated site may use")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="say what would be trained on, and stop")]


class _WithKeys(TyperCommand):
    """A command whose help ends with the basic keys, which are read only when the help is asked for."""

    def format_help(self, ctx: Context, formatter: HelpFormatter) -> None:
        from fedgp_flower.run.keys import basic_keys

        self.epilog = basic_keys()
        super().format_help(ctx, formatter)


@app.command(cls=_WithKeys)
def run(
    words: Words = None,
    sites: Sites = 5,
    config: ConfigFile = None,
    dry_run: DryRun = False,
    output_dir: Annotated[str | None, typer.Option(help="folder that the run's folder goes into")] = None,
    name: Annotated[str | None, typer.Option(help="name of the run's folder")] = None,
) -> None:
    """Run a method in this process: the same ServerApp and sites as `flwr run`, without Ray."""
    from fedgp_flower.run.in_process import run_in_process
    from fedgp_flower.run.terminal import show_result

    given = {key: value for key, value in (("output-dir", output_dir), ("name", name)) if value is not None}
    completed, sites = _completed(words, config, given, sites)
    if dry_run:
        _show_plan(completed, sites)
        return
    with _progress_bar() as progress:
        folder = run_in_process(completed, sites, progress=progress)
    show_result(folder)


def _completed(words: Sequence[str] | None, file: Path | None, given: FlatConfig, sites: int) -> tuple[FlatConfig, int]:
    """The keys of a file and of words, and how many sites: as many as there are tables, where there are several."""
    from fedgp_flower.data.tables import read_table, table_stem
    from fedgp_flower.run.user_config import complete_config, read_config

    files, keys = _split(words)
    flat = (read_config(file) if file else {}) | keys | dict(given)
    paths = _sites_of(files)
    if len(paths) == 1:
        flat["dataset"] = str(paths[0])
    elif paths:
        from fedgp_flower.run.api import together

        tables = {table_stem(path): read_table(path) for path in paths}
        if len(tables) < len(paths):
            raise ConfigError("every table is a site with the name of its file: two files have the same name")
        flat, sites = flat | together(tables, flat), 0
    return complete_config(flat, Path.cwd()), sites


def _split(words: Sequence[str] | None) -> tuple[list[Path], dict[str, Value]]:
    """The words that are tables, and the others as keys."""
    from fedgp_flower.data.tables import SUFFIXES
    from fedgp_flower.run.user_config import parse_assignments

    files = [word for word in words or () if word.endswith(SUFFIXES) and "=" not in word]
    return [Path(file) for file in files], parse_assignments([word for word in words or () if word not in files])


def _sites_of(files: Sequence[Path]) -> list[Path]:
    """The files that are a site; what is left out is told."""
    from fedgp_flower.data.tables import sites_of

    paths, left_out = sites_of(files)
    print(*left_out, sep="\n", end="\n" if left_out else "", file=sys.stderr)
    return paths


def _show_plan(completed: FlatConfig, sites: int) -> None:
    """What a run with this configuration would train on."""
    from fedgp_flower.run.check import plan
    from fedgp_flower.run.registry import parse_config
    from fedgp_flower.run.user_config import run_folder

    config = parse_config(completed)
    _show_checked(plan(config, sites))
    rounds = f"{config.num_server_rounds} rounds at most"
    print(f"would run {config.method}, {rounds}, into {run_folder(completed)}")


@contextmanager
def _progress_bar() -> Iterator[Progress]:
    """A bar that moves with every round; what goes wrong at a site is printed above it."""
    from rich.console import Console
    from rich.logging import RichHandler
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    from fedgp_flower.server_app import figures_of

    terminal, logger = Console(stderr=True), logging.getLogger("fedgp")
    clock = (TimeElapsedColumn(), TextColumn("at most"), TimeRemainingColumn())
    columns = (BarColumn(), MofNCompleteColumn(), *clock, TextColumn("{task.description}"))
    handler = RichHandler(logging.INFO, terminal, show_time=False, show_path=False, show_level=False)
    handler.addFilter(lambda record: record.levelno >= logging.WARNING or record.name == "fedgp.data")
    handler.addFilter(lambda record: record.exc_info is None)  # tracebacks belong in log.txt
    logger.addHandler(handler)
    try:
        with Bar(*columns, console=terminal, transient=True) as bar:
            task = bar.add_task("", total=None)

            def show(row: Facts, total: int) -> None:
                bar.update(task, completed=row["round"], total=total, description=figures_of(row))

            yield show
    finally:
        logger.removeHandler(handler)


@app.command(cls=_WithKeys)
def simulate(
    words: Words = None,
    sites: Sites = 5,
    gpus_per_site: Gpus = 0.0,
    config: ConfigFile = None,
    dry_run: DryRun = False,
) -> None:
    """Run through Flower's SuperLink and its simulation engine, Ray; nothing is left behind.

    The exit status is the result of the run.
    """
    from fedgp_flower.deploy import submission
    from fedgp_flower.deploy.processes import interruptible

    completed, sites = _completed(words, config, {}, sites)
    if dry_run:
        _show_plan(completed, sites)
        return
    with interruptible():
        submission.simulate(completed, sites, gpus_per_site)


@deploy.command("app")
def deploy_app(folder: Annotated[Path, typer.Argument(help="folder to write; a copy of before is replaced")]) -> None:
    """Write this version as a Flower app: for `flwr build`, for Flower's Hub, to read before it runs at a site."""
    from fedgp_flower.deploy.submission import write_app

    print(write_app(folder))


@deploy.command("demo")
def deploy_demo(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="keys of the run configuration; files after --data"),
    ] = None,
    num_sites: Annotated[int, typer.Option(min=1, help="SuperNodes, where no --data is given")] = 3,
    data: Annotated[
        list[Path] | None,
        typer.Option(help="CSV files, one per site; rows to hold out may lie beside NAME.csv in NAME.test.csv"),
    ] = None,
    folder: Annotated[Path, typer.Option(help="where keys, logs and state go")] = Path(".deploy"),
    keep: Annotated[bool, typer.Option("--keep", help="leave everything up after the run, until Ctrl-C")] = False,
) -> None:
    """Deploy on this machine: a SuperLink with TLS, SuperNodes that authenticate, each with one CSV file."""
    from fedgp_flower.deploy.demo import run_demo
    from fedgp_flower.deploy.processes import interruptible

    files, keys = _split(words)
    with interruptible():
        run_demo(keys, _sites_of([*(data or ()), *files]), num_sites, folder.resolve(), keep=keep)


@app.command()
def check(
    words: Annotated[list[str], typer.Argument(metavar="FILE… KEY=VALUE…", help="tables, one per site, and keys")],
) -> None:
    """Look at tables as a run would, without training: inputs, levels, missing cells, sites that differ, problems.

    The exit status is 2 where a table cannot be used.
    """
    from fedgp_flower.run.check import check as look
    from fedgp_flower.run.registry import parse_config

    files, keys = _split(words)
    _show_checked(look(_sites_of(files), parse_config({"test-fraction": 0.0} | keys)))


def _show_checked(found: Checked) -> None:
    """What is known of tables before training; the exit status is 2 where one cannot be used."""
    from fedgp_flower.agreement import OVERVIEW_TITLES, overview_lines, overview_rows
    from fedgp_flower.run.terminal import table

    console = _console()
    if found.data:
        console.print(table(OVERVIEW_TITLES, overview_rows(found.data), numbers=True))
    for line in [*(overview_lines(found.data) if found.data else []), *found.suspected, *found.problems]:
        console.print(line, markup=False, soft_wrap=True)
    if found.problems:
        raise typer.Exit(2)


@app.command()
def predict(
    run: RunArgument,
    source: NewRows,
    output: Predicted,
    site: Annotated[str, typer.Option(help="predict at this site, with what it alone keeps, if the method can")] = "",
    site_data: Annotated[Path | None, typer.Option(help="table of that site, unless it was simulated")] = None,
    state_dir: Annotated[Path | None, typer.Option(help="where that site keeps its state")] = None,
    policy: PolicyFile = None,
    picture: Picture = None,
) -> None:
    """Predict new rows from a run's saved posterior, or at `--site`; of units with curves, at all simulated ones."""
    from fedgp_flower.run.predict import Predictor

    where = {"data": site_data, "state_dir": state_dir, "policy": policy}
    if not site and any(where.values()):
        raise RunError("`--site-data`, `--state-dir` and `--policy` say where a site is: name it with `--site`")
    _predict({site: Predictor.at_site(run, site, **where)} if site else Predictor.of_all(run), source, output, picture)


@app.command()
def join(
    run: RunArgument,
    site_data: Annotated[Path, typer.Option(help="table of the new site, with the target")],
    source: NewRows,
    output: Predicted,
    picture: Picture = None,
) -> None:
    """Predict at a site that took no part: fit what it alone knows to its table, here, and send nothing."""
    from fedgp_flower.run.predict import Predictor

    name = site_data.name.split(".")[0]
    _predict({name: Predictor.joined(run, name, site_data)}, source, output, picture)


def _predict(predictors: dict[str, Predictor], source: Path, output: Path, picture: Path | None) -> None:
    from fedgp_flower.run.predict import predict_file

    rows, unknown = predict_file(predictors, source, output)
    _console().print(f"{rows} rows predicted into {output}", soft_wrap=True)
    if unknown:
        _console().print(f"{unknown} cell(s) hold a level that no site had; they count as none of the known levels")
    if picture is not None:
        from fedgp_flower.run.figures import draw_curves

        draw_curves(predictors, source, picture)
        _console().print(f"drawn into {picture}", soft_wrap=True)


@app.command()
def report(run: RunArgument) -> None:
    """Write a run's report.html again."""
    from fedgp_flower.run.report import write_report

    _console().print(str(write_report(run)), soft_wrap=True)


@app.command()
def forget(
    run: RunArgument,
    site: Annotated[str, typer.Option(help="id or label of the site to forget")],
    rounds: Annotated[int, typer.Option(min=0, help="rounds of training afterwards")] = 0,
    name: Annotated[str, typer.Option(help="name of the new run's folder; default RUN-without-SITE")] = "",
) -> None:
    """Remove a site from a finished run, evaluate again, and write a new run; for methods that can."""
    from fedgp_flower.run import forget as forgetting
    from fedgp_flower.run.in_process import run_in_process
    from fedgp_flower.run.terminal import show_result

    going_on = forgetting.prepare(run, site, rounds=rounds, name=name or f"{run.name}-without-{site}")
    with _progress_bar() as progress:
        folder = run_in_process(going_on.flat, nodes=going_on.nodes, progress=progress)
    forgetting.record(run, folder, site, rounds)
    show_result(folder)


@app.command()
def leaves(
    data: Annotated[Path, typer.Option(help="table of the site")],
    assignments: Assignments = None,
    config: ConfigFile = None,
    policy: PolicyFile = None,
    test: Annotated[Path | None, typer.Option(help="rows to hold out; otherwise a share of the table")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="most rounds to try")] = 2,
) -> None:
    """Show what a site with this table would send in a run, and what its policy says of every message; no network."""
    from fedgp_flower.run.leaves import try_out
    from fedgp_flower.run.user_config import parse_assignments, read_config

    flat = (read_config(config) if config else {}) | parse_assignments(assignments or [])
    files = {"data-path": data, "policy": policy, "test-path": test}
    trial = try_out(flat, {name: str(path) for name, path in files.items() if path is not None}, rounds)
    for line in trial.lines():
        print(line)


@app.command()
def audit(
    file: Annotated[Path, typer.Argument(help="audit log of a site")],
    seen: Annotated[str, typer.Option(help="a hash that was noted earlier; the log must still have it")] = "",
) -> None:
    """Print what has left a site, and verify that its log was not changed."""
    from fedgp_flower.privacy.audit import cells, read
    from fedgp_flower.run.terminal import table

    log = read(file, seen)
    titles = ["", "time", "run", "round", "message", "bytes", "masked", "arrays", "rules"]
    _console().print(table(titles, [cells(line) for line in log.lines]))
    if log.problems:
        raise RunError(f"{file} was changed: {'; '.join(log.problems)}")
    print(f"{len(log.lines)} lines, unchanged; the last has the hash {log.head}")


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="folders of finished runs", exists=True)],
    figure: Annotated[Path | None, typer.Option(help="PNG or SVG to write: NLL against what was spent")] = None,
) -> None:
    """Put the figures of several runs side by side; runs of other targets are refused, of other rows warned of."""
    from fedgp_flower.run import compare as comparing
    from fedgp_flower.run.artefacts import read_run
    from fedgp_flower.run.terminal import table

    read, console = [read_run(path) for path in runs], _console()
    if reasons := comparing.unlike(read):
        raise RunError(f"these runs cannot be compared: {'; '.join(reasons)}")
    for doubt in comparing.doubtful(read):
        console.print(f"careful: {doubt}", markup=False, soft_wrap=True)
    console.print(table(["", *(path.name for path in runs)], comparing.side_by_side(read), numbers=True))
    if figure is not None:
        comparing.cost_figure(read).savefig(figure)
        console.print(str(figure), soft_wrap=True)


@app.command()
def methods() -> None:
    """The methods that `method = …` can name, by what they are for."""
    from fedgp_flower.run.registry import METHODS, grouped, option_classes
    from fedgp_flower.run.terminal import table

    for title, names in grouped().items():
        rows = [[name, METHODS[name].summary, METHODS[name].paper] for name in names]
        for section in dict.fromkeys(option_classes()[name] for name in names):
            key = f"  {section.table}.{section.variant_key}"
            rows += [[f"{key}={kind}", summary, ""] for kind, summary in section.variants.items()]
        _console().print(table(["method", "what it is", "paper"], rows, title=title))


@app.command()
def datasets(data_dir: Annotated[str, typer.Option(help="folder of data sets; default FEDGP_DATA")] = "") -> None:
    """The data sets that `dataset = …` can name."""
    from fedgp_flower.data.catalogue import catalogue
    from fedgp_flower.run.terminal import table

    entries = [asdict(entry) for entry in catalogue(data_dir)]
    wanted = {"name": "name", "rows": "rows", "inputs": "inputs", "splits": "splits", "natural": "site column"}
    rows = [[*(str(entry[key]) for key in wanted), entry["summary"] or entry["source"]] for entry in entries]
    _console().print(table([*wanted.values(), "what it is"], rows))


@app.command()
def partition(
    dataset: Annotated[str, typer.Argument(help="name or path of a data set")],
    sites: Annotated[int, typer.Option(min=1)],
    output_dir: Annotated[Path, typer.Option(help="folder for one CSV per site")],
    assignments: Assignments = None,
) -> None:
    """Deal a data set to sites and write a CSV for each, as input of real SuperNodes."""
    from fedgp_flower.data.sites import write_partition
    from fedgp_flower.run.registry import parse_config
    from fedgp_flower.run.user_config import parse_assignments

    config = parse_config(parse_assignments(assignments or []) | {"dataset": dataset})
    for path in write_partition(config, sites, output_dir):
        _console().print(str(path), soft_wrap=True)


site = typer.Typer(no_args_is_help=True, help="A site: joining a federation, and keys for totals under masks.")
app.add_typer(site, name="site")


@site.command()
def key(file: Annotated[Path, typer.Argument(help="file with the site's secret; made where there is none")]) -> None:
    """Print the public key of this site and its fingerprint; make the secret if there is none."""
    from fedgp_flower.privacy.keys import Identity, fingerprint

    if not file.expanduser().exists():
        Identity.new().write(file)
    public = Identity.read(file).public
    print(f"public key   {public}\nfingerprint  {fingerprint(public)}")


@site.command()
def trust(
    file: Annotated[Path, typer.Argument(help="trust file; made where there is none")],
    name: Annotated[str, typer.Argument(help="id of a site to add")] = "",
    public: Annotated[str, typer.Argument(help="its public key")] = "",
) -> None:
    """Add a site to the trust file of this one, and print whom it trusts with fingerprints to compare."""
    from fedgp_flower.privacy.keys import Trust, fingerprint

    known = Trust.read(file) if file.expanduser().exists() else Trust({})
    if name:
        known = known.with_site(name, public)
        known.write(file)
    for member, key in (known.keys or {}).items():
        print(f"{fingerprint(key)}  {member}")


add_to(app, site)


def _console() -> Console:
    from rich.console import Console

    return Console()


def main(words: Sequence[str] | None = None) -> None:
    """Entry point: expected errors are one line, without a traceback.

    A wrong key or table and a damaged file have exit status 2, a run that cannot be completed has 1.
    """
    try:
        app(args=words, prog_name="fedgp")
    except FedGPError as error:
        print(f"error: {error}", file=sys.stderr)
        failed = isinstance(error, RunError) and not isinstance(error, DamagedError)
        raise SystemExit(1 if failed else 2) from None


if __name__ == "__main__":
    main()
