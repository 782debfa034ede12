"""The command line ``fedgp``; ``fedgp --help`` loads neither PyTorch nor Flower nor pandas."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from click import Context, HelpFormatter
from typer.core import TyperCommand

from fedgp_flower.deploy.commands import deploy, doctor, site
from fedgp_flower.errors import ConfigError, DamagedError, FedGPError, RunError
from fedgp_flower.lazy import Lazy

if TYPE_CHECKING:
    from fedgp_flower import agreement
    from fedgp_flower.data import catalogue, tables
    from fedgp_flower.data import sites as site_tables
    from fedgp_flower.deploy import demo, processes, submission
    from fedgp_flower.options import FlatConfig, Value
    from fedgp_flower.privacy import audit
    from fedgp_flower.privacy import keys as identities
    from fedgp_flower.run import api, check, figures, forget, leaves, predict, registry, report, summary, terminal
    from fedgp_flower.run import in_process as engine
    from fedgp_flower.run import user_config as user
    from fedgp_flower.typing import Json
else:
    agreement, audit = Lazy("fedgp_flower.agreement"), Lazy("fedgp_flower.privacy.audit")
    catalogue, tables, site_tables = (Lazy(f"fedgp_flower.data.{name}") for name in ("catalogue", "tables", "sites"))
    demo, processes, submission = (Lazy(f"fedgp_flower.deploy.{name}") for name in ("demo", "processes", "submission"))
    identities, engine = Lazy("fedgp_flower.privacy.keys"), Lazy("fedgp_flower.run.in_process")
    user = Lazy("fedgp_flower.run.user_config")
    names = "api check figures forget leaves predict registry report summary terminal"
    globals().update({name: Lazy(f"fedgp_flower.run.{name}") for name in names.split()})

app = typer.Typer(
    no_args_is_help=True,
    help="Federated Gaussian processes on Flower.",
    pretty_exceptions_show_locals=False,  # local variables hold rows of data
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"fedgp-flower {version('fedgp-flower')}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    pass


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
Sites = Annotated[int, typer.Option(min=0, help="simulated sites; 0: every natural group, otherwise 5")]


EXAMPLES = """Examples:

fedgp run north.csv south.csv east.csv target=dose   a file is a site

fedgp run dataset=clinics.csv target=dose partitioner=natural partition.column=clinic

fedgp run --sites 5 dataset=breast-cancer model.likelihood=bernoulli

"""


class _WithKeys(TyperCommand):
    """A command whose help ends with examples and the basic keys; keys are loaded only for the help."""

    def format_help(self, ctx: Context, formatter: HelpFormatter) -> None:
        self.epilog = EXAMPLES.replace("fedgp run", f"fedgp {ctx.info_name}") + user.basic_keys()
        super().format_help(ctx, formatter)


@app.command(cls=_WithKeys)
def run(
    words: Words = None,
    sites: Sites = 0,
    config: ConfigFile = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what would be trained on, and stop")] = False,
    output_dir: Annotated[str | None, typer.Option(help="folder that the run's folder goes into")] = None,
    name: Annotated[str | None, typer.Option(help="name of the run's folder")] = None,
) -> None:
    """Run a method in this process: the same ServerApp and sites as `flwr run`, without Ray."""
    given = {key: value for key, value in (("output-dir", output_dir), ("name", name)) if value is not None}
    completed = _run_config(words, config, given)
    if dry_run:
        parsed = registry.parse_config(completed)
        _show_checked(*check.plan(parsed, sites))
        rounds = f"{parsed.num_server_rounds} rounds at most"
        print(f"would run {parsed.method}, {rounds}, into {user.run_folder(completed)}")
        return
    with terminal.interruptible(user.run_folder(completed)), terminal.progress_bar() as progress:
        folder = engine.run_in_process(completed, sites, progress=progress)
    terminal.show_result(folder)


def _run_config(words: Sequence[str] | None, file: Path | None, given: FlatConfig) -> FlatConfig:
    """Return the complete configuration from a TOML file, words and ``given`` keys; later ones take precedence."""
    files, keys = _files_and_keys(words)
    flat = (user.read_config(file) if file else {}) | keys | dict(given)
    if paths := _site_files(files):
        flat["dataset"] = ",".join(map(str, paths))
    return user.complete_config(flat)


def _files_and_keys(words: Sequence[str] | None) -> tuple[list[Path], dict[str, Value]]:
    """Split words into tables or folders, and keys."""
    files = [
        word for word in words or () if "=" not in word and (word.endswith(tables.SUFFIXES) or Path(word).is_dir())
    ]
    keys = user.parse_assignments([word for word in words or () if word not in files])
    if files and "dataset" in keys:
        raise ConfigError(f"both `{files[0]}` and `dataset` name tables; remove one")
    return [Path(file) for file in files], keys


def _site_files(files: Sequence[Path]) -> list[Path]:
    """Return the files that are a site each, and report the others on stderr."""
    paths, left_out = tables.sites_of(files)
    print(*left_out, sep="\n", end="\n" if left_out else "", file=sys.stderr)
    return paths


@app.command(cls=_WithKeys)
def simulate(
    words: Words = None,
    sites: Sites = 0,
    gpus_per_site: Annotated[float, typer.Option(min=0.0, help="share of a GPU each simulated site may use")] = 0.0,
    config: ConfigFile = None,
) -> None:
    """Run through Flower's SuperLink and its simulation engine, Ray, which are stopped afterwards.

    The exit status is the result of the run.
    """
    completed = _run_config(words, config, {})
    with processes.interruptible():
        submission.simulate(completed, sites, gpus_per_site)


@deploy.command("app")
def deploy_app(folder: Annotated[Path, typer.Argument(help="folder to write; an earlier copy is replaced")]) -> None:
    """Write this version as a Flower app: for `flwr build`, for Flower's Hub, to read before it runs at a site."""
    print(submission.write_app(folder))


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
) -> None:
    """Deploy on this machine: a SuperLink with TLS and authenticated SuperNodes with one CSV file each."""
    files, keys = _files_and_keys(words)
    with processes.interruptible():
        demo.run_demo(keys, _site_files([*(data or ()), *files]), num_sites, folder.resolve())


@app.command("check")
def check_tables(
    words: Annotated[list[str], typer.Argument(metavar="FILE… KEY=VALUE…", help="tables, one per site, and keys")],
) -> None:
    """Check tables without training: inputs, levels, missing cells, sites that differ, problems.

    Rows of `dataset`, or of one file with `partitioner`, are dealt to sites as a run would. The exit status is 2 if a
    table cannot be used.
    """
    files, keys = _files_and_keys(words)
    if len(files) > 1 or (files and "partitioner" not in keys):
        _show_checked(*check.check(_site_files(files), registry.parse_config(keys)))
    else:
        _show_checked(*check.plan(registry.parse_config(_run_config(words, None, {})), 0))


def _show_checked(data: Json, suspected: Sequence[str], problems: Sequence[str]) -> None:
    """Print the result of a check. Exit with status 2 if a table cannot be used."""
    lines = [*suspected, *problems]
    if data:
        terminal.show(terminal.table(agreement.OVERVIEW_TITLES, agreement.overview_rows(data), numbers=True))
        lines = [*agreement.overview_lines(data), *lines]
    for line in dict.fromkeys(lines):
        terminal.show(line)
    if problems:
        raise typer.Exit(2)


@app.command("predict")
def predict_rows(
    run: RunArgument,
    source: NewRows,
    output: Predicted,
    site: Annotated[str, typer.Option(help="predict at this site, with its saved state, if the method can")] = "",
    site_data: Annotated[Path | None, typer.Option(help="table of that site, unless it was simulated")] = None,
    state_dir: Annotated[Path | None, typer.Option(help="where that site keeps its state")] = None,
    policy: PolicyFile = None,
    picture: Picture = None,
    times: Annotated[str, typer.Option(help="of times to an event: also survival at these, such as 30,365")] = "",
) -> None:
    """Predict new rows from a run's posterior or at `--site`; a personal method predicts at all simulated sites."""
    where = {"data": site_data, "state_dir": state_dir, "policy": policy}
    if not site and any(where.values()):
        raise RunError("`--site-data`, `--state-dir` and `--policy` say where a site is: name it with `--site`")
    at_site = {site: predict.Predictor.at_site(run, site, **where)} if site else predict.Predictor.of_all(run)
    _predict(at_site, source, output, picture, predict.times_of(times))


@app.command()
def join(
    run: RunArgument,
    site_data: Annotated[Path, typer.Option(help="table of the new site, with the target")],
    source: NewRows,
    output: Predicted,
    picture: Picture = None,
) -> None:
    """Predict at a new site: fit its local parameters to its table, here, and send nothing."""
    name = tables.table_stem(site_data)
    _predict({name: predict.Predictor.joined(run, name, site_data)}, source, output, picture)


def _predict(
    predictors: dict[str, predict.Predictor],
    source: Path,
    output: Path,
    picture: Path | None,
    times: Sequence[float] = (),
) -> None:
    if picture is not None:
        figures.require_one_input(predictors)
    rows, unknown, beyond = predict.predict_file(predictors, source, output, times)
    terminal.show(f"{rows} rows predicted into {output}{predict.of_what(next(iter(predictors.values())))}")
    if unknown:
        terminal.show(f"{unknown} cell(s) hold a level that no site had and count as missing ones")
    if beyond:
        terminal.show(f"{beyond} row(s) lie outside the training rows; the column `outside` names the inputs")
    if picture is not None:
        figures.draw_curves(predictors, source, picture)
        terminal.show(f"drawn into {picture}")


@app.command("report")
def write_report(run: RunArgument) -> None:
    """Rewrite a run's report.html."""
    terminal.show(str(report.write_report(run)))


@app.command("forget")
def forget_site(
    run: RunArgument,
    site: Annotated[str, typer.Option(help="id or label of the site to forget")],
    rounds: Annotated[int, typer.Option(min=0, help="rounds of training afterwards")] = 0,
    name: Annotated[str, typer.Option(help="name of the new run's folder; default RUN-without-SITE")] = "",
) -> None:
    """Remove a site from a finished run, evaluate, and write a new run; for methods that can."""
    with terminal.progress_bar() as progress:
        new = name or f"{run.name}-without-{site}"
        folder = forget.forget(run, site, rounds=rounds, name=new, progress=progress)
    terminal.show_result(folder)


@app.command("leaves")
def what_leaves(
    words: Words,
    config: ConfigFile = None,
    policy: PolicyFile = None,
    test: Annotated[Path | None, typer.Option(help="rows to hold out; otherwise a share of the table")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="most rounds to try")] = 2,
) -> None:
    """Show what a site with this table would send in a run, and how its policy judges each message; no network."""
    files, keys = _files_and_keys(words)
    if not files:
        raise RunError("name the table of the site: `fedgp leaves north.csv target=dose`")
    for path in _site_files(files):
        node = {"data-path": path, "policy": policy, "test-path": test}
        named = {name: str(value) for name, value in node.items() if value is not None}
        lines, _ = leaves.try_out((user.read_config(config) if config else {}) | keys, named, rounds)
        print(*([f"{path}:"] if len(files) > 1 else []), *lines, sep="\n")


@app.command("audit")
def verify_audit(
    file: Annotated[Path, typer.Argument(help="audit log of a site")],
    seen: Annotated[str, typer.Option(help="a hash that was noted earlier; the log must still have it")] = "",
) -> None:
    """Print the messages that left a site, and verify that its log was not changed."""
    lines, problems, head = audit.read(file, seen)
    titles = ["", "time", "run", "round", "message", "bytes", "masked", "content", "rules"]
    terminal.show(terminal.table(titles, [audit.cells(line) for line in lines]))
    if problems:
        raise RunError(f"{file} was changed: {'; '.join(problems)}")
    print(f"{len(lines)} lines, unchanged; the last has the hash {head}")


@app.command("compare")
def compare_runs(
    runs: Annotated[list[Path], typer.Argument(help="folders of finished runs", exists=True)],
    figure: Annotated[Path | None, typer.Option(help="PNG or SVG to write: NLL against what was spent")] = None,
) -> None:
    """Compare the figures of runs. Runs of different targets are refused; different rows give a warning."""
    read = [api.load_run(path) for path in runs]
    if reasons := summary.incomparable(read):
        raise RunError(f"these runs cannot be compared: {'; '.join(reasons)}")
    for doubt in summary.comparison_warnings(read):
        terminal.show(f"careful: {doubt}")
    terminal.show(terminal.table(["", *(path.name for path in runs)], summary.side_by_side(read), numbers=True))
    if figure is not None:
        figures.save(figures.cost_figure(read), figure)
        terminal.show(str(figure))


@app.command()
def methods() -> None:
    """List the methods for the key `method`."""
    further = [name for name in registry.methods() if name not in registry.BUILT_IN]
    for title, names in [*registry.GROUPS.items(), *([("Further methods", further)] if further else [])]:
        rows = [[name, registry.methods()[name].summary, registry.methods()[name].paper] for name in names]
        models: dict[str, str] = {}  # methods may share them
        for section in (registry.option_classes()[name] for name in names):
            key = f"  {section.table}.{section.variant_key}"
            models |= {f"{key}={kind}": summary for kind, summary in section.variants.items()}
        rows += [[key, summary, ""] for key, summary in models.items()]
        terminal.show(terminal.table(["method", "what it is", "paper"], rows, title=title))


@app.command("keys")
def keys_of_a_run(
    word: Annotated[str, typer.Argument(help="only keys whose name holds this, such as model")] = "",
) -> None:
    """List the keys of a run: default, allowed values, meaning."""
    found = {name: key for name, key in user.reference().items() if word in name}
    rows = [
        [f"{name}={key['default']}", f"{key['meaning']}\nAllowed: {key['allowed']}".replace("`", "")]
        for name, key in found.items()
    ]
    terminal.show(terminal.table(["key=default", "meaning"], rows))


@app.command()
def datasets(data_dir: Annotated[str, typer.Option(help="folder of data sets; default FEDGP_DATA")] = "") -> None:
    """List the data sets for the key `dataset`."""
    rows = [
        [*map(str, (entry.name, entry.rows, entry.inputs, entry.splits, entry.natural, entry.summary or entry.source))]
        for entry in catalogue.catalogue(data_dir)
    ]
    terminal.show(terminal.table(["name", "rows", "inputs", "splits", "site column", "what it is"], rows))


@app.command()
def partition(
    dataset: Annotated[str, typer.Argument(help="name or path of a data set")],
    sites: Annotated[int, typer.Option(min=1)],
    output_dir: Annotated[Path, typer.Option(help="folder for one CSV per site")],
    assignments: Assignments = None,
) -> None:
    """Split a data set over sites and write a CSV for each, for real SuperNodes."""
    config = registry.parse_config(user.parse_assignments(assignments or []) | {"dataset": dataset})
    for path in site_tables.write_partition(config, sites, output_dir):
        terminal.show(str(path))


@site.command()
def key(file: Annotated[Path, typer.Argument(help="file with the site's secret; created if missing")]) -> None:
    """Print the public key of this site and its fingerprint; create the secret if it is missing."""
    if not file.expanduser().exists():
        identities.Identity.new().write(file)
    public = identities.Identity.read(file).public
    print(f"public key   {public}\nfingerprint  {identities.fingerprint(public)}")


@site.command()
def trust(
    file: Annotated[Path, typer.Argument(help="trust file; created with its first site")],
    name: Annotated[str, typer.Argument(help="id of a site to add")] = "",
    public: Annotated[str, typer.Argument(help="its public key")] = "",
) -> None:
    """Add a site to the trust file of this site, and print the trusted sites with their fingerprints."""
    known = identities.Trust({}) if name and not file.expanduser().exists() else identities.Trust.read(file)
    if name:
        known = known.with_site(name, public)
        known.write(file)
    for member, key in (known.keys or {}).items():
        print(f"{identities.fingerprint(key)}  {member}")


app.add_typer(site, name="site")
app.add_typer(deploy, name="deploy")
app.command()(doctor)


def main(words: Sequence[str] | None = None) -> None:
    """Run the command line. Expected errors print one line, without a traceback.

    The exit status is 2 for a wrong key or table or a damaged file, and 1 for a run that cannot be completed.
    """
    try:
        app(args=words, prog_name="fedgp")
    except FedGPError as error:
        print(f"error: {error}", file=sys.stderr)
        failed = isinstance(error, RunError) and not isinstance(error, DamagedError)
        raise SystemExit(1 if failed else 2) from None


if __name__ == "__main__":
    main()
