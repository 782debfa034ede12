"""Whether a change of the code changed a figure: short runs of every method, recorded once and compared later.

    python simulations/same_figures.py record simulations/results/figures.json
    python simulations/same_figures.py compare simulations/results/figures.json [--only fgpr …] [--jobs 2]
    python simulations/same_figures.py list

Every run is made by the command line alone, so that the same list serves code that is built otherwise; to record a
checkout that is not installed, put it first in PYTHONPATH. The runs are too short to say how good a method is. Data
sets come from the folder FEDGP_DATA; a run whose file is not there is skipped, with the reason. ``compare`` prints a
table in Markdown, with the name of the figure that differs most, and ends with status 1 if a run fails or a figure
differs by more than 1e-9 of its size.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOLERANCE = 1e-9
LIMIT = 300.0
"""Seconds after which a command counts as failed."""
FIGURES = ("test", "test_standardised", "per_site", "pooled", "local_only")
"""What is kept of ``metrics.json`` and compared number by number."""
COUNTS = ("sites", "rounds", "communications")
"""What is kept, and told where it changes; it is no figure."""

# ------------------------------------------------------------------------------------------------ the list of runs


@dataclass(frozen=True)
class Run:
    """A run, and what is done with it afterwards; figures are kept after every command."""

    name: str
    sites: int
    keys: str
    """KEY=VALUE, as on the command line."""
    needs: str = ""
    """File below FEDGP_DATA."""
    quiet: bool = True
    """Without the two baselines and without pictures of predictions, which cost more than most of these runs."""
    resume_to: int = 0
    """Then the same run goes on to this round."""
    forget: str = ""
    """Then this site is forgotten."""

    def commands(self) -> list[list[str]]:
        """Arguments of the command line; the folder that the last one writes is :meth:`folders`' of the same place."""
        keys = shlex.split(self.keys)
        keys += QUIET if self.quiet else []
        first = ["run", "--sites", str(self.sites), "--output-dir", "runs", "--name", self.name, *keys]
        found = [first]
        if self.resume_to:
            more = [key for key in keys if not key.startswith("num-server-rounds=")]
            found.append([*first[:7], *more, f"num-server-rounds={self.resume_to}", "resume=true"])
        if self.forget:
            found.append(["forget", f"runs/{self.name}", "--site", self.forget, "--rounds", "1", "--name", "without"])
        return found

    def folders(self) -> list[str]:
        """Where each command leaves its figures."""
        return [self.name, *([self.name] if self.resume_to else []), *(["without"] if self.forget else [])]


QUIET = ["baselines.linear=false", "baselines.local-only=false", "baselines.pooled=false", "keep-predictions=false"]
FSGP = "method=fsgp fsgp.objective=exact model.num-inducing=20 evaluate-every=0 num-server-rounds"
AVERAGE = "method=fsgp fsgp.objective=average model.num-inducing=20 evaluate-every=5 num-server-rounds=10"
PVI = "method=pvi dataset=diabetes model.num-inducing=15 pvi.prediction-samples=20 evaluate-every=0 num-server-rounds"
REPLAY = "pvi.local-update=replay"
ADAM = "pvi.local-update=adam pvi.first-steps=20 pvi.steps=10"
FIXED = "pvi.inducing=fixed pvi.hyper=fixed"
UNITS = "dataset=convolved-signals partitioner=natural partition.column=unit split=0 model.num-inducing=25"
MGP = f"method=fedmgp {UNITS} evaluate-every=0 num-server-rounds"
PSEUDO = f"{MGP}=6 fedmgp.update=pseudo-gradient fedmgp.local-steps=5 fedmgp.final-rounds=2"
STOCHASTIC = "sfvi.objective=stochastic"
SFVI = "evaluate-every=0 model.kernel=matern52 model.num-inducing=15 sfvi.site-inducing=8"
CLINICS = "dataset=clinics.csv features=age,weight,ward,smoker partitioner=natural partition.column=clinic"

RUNS = (
    # the federated sparse GP, and averages of hyperparameters
    Run("fsgp-exact", 4, f"{FSGP}=15 dataset=diabetes baselines.max-evaluations=40", quiet=False),
    Run("fsgp-exact-split", 5, f"{FSGP}=12 dataset=uci/energy split=0 'model.kernel=matern52 + linear'",
        needs="uci/energy.csv.gz"),
    Run("fsgp-exact-countries", 0, f"{FSGP}=6 dataset=weather features=lon,lat,elev target=tmin partitioner=natural "
        "partition.column=country partition.min-rows=30 model.kernel=matern32", needs="weather.csv.gz"),
    Run("fsgp-exact-text", 0, f"{FSGP}=8 {CLINICS} target=cost fsgp.exact-optimizer=adam"),
    Run("fsgp-average-fedavg", 4, f"{AVERAGE} dataset=diabetes fsgp.fraction=0.6 partitioner=dirichlet "
        "optimizer.decay=0.95"),
    Run("fsgp-average-fedadam", 4, f"{AVERAGE} dataset=sine split=0 fsgp.server-optimizer=fedadam partitioner=blocks "
        "optimizer.name=lbfgs fsgp.server-learning-rate=0.05"),
    Run("fgpr", 4, "method=fgpr dataset=uci/yacht split=1 num-server-rounds=10 fgpr.server-optimizer=fedyogi "
        "partitioner=kmeans model.kernel=linear optimizer.name=sgd", needs="uci/yacht.csv.gz"),
    Run("local-only", 3, "method=local-only dataset=diabetes baselines.max-evaluations=40 partitioner=linear"),
    Run("pooled", 0, "method=pooled dataset=five-blocks split=0 partitioner=natural partition.column=site "
        "model.num-inducing=15 baselines.max-evaluations=40"),
    # partitioned variational inference
    Run("pvi-replay", 4, f"{PVI}=4 {REPLAY} pvi.evaluations=60 pvi.refit-evaluations=40 pvi.refit-steps=5", forget="1"),
    Run("pvi-replay-synchronous", 4, f"{PVI}=2 {REPLAY} pvi.schedule=synchronous pvi.evaluations=60 "
        "pvi.refit-evaluations=40 pvi.refit-steps=5 pvi.min-rows-per-pseudo-point=2"),
    Run("pvi-tied-adam", 4, f"{PVI}=4 {ADAM} pvi.order=random partitioner=exponential"),
    Run("pvi-free-adam", 4, f"{PVI}=5 {ADAM} pvi.factor=free {FIXED} pvi.order=residual optimizer.batch-size=32"),
    Run("pvi-cpo-average", 4, f"{PVI}=3 {ADAM} pvi.factor=cpo pvi.inducing=average pvi.schedule=synchronous"),
    Run("pvi-asynchronous", 4, f"{PVI}=6 {ADAM} pvi.schedule=asynchronous pvi.concurrency=3"),
    Run("pvi-natural-gradient", 4, f"{PVI}=4 pvi.local-update=natural-gradient {FIXED} model.likelihood=student-t "
        "pvi.step=0.5"),
    Run("pvi-bcm-same", 4, f"{PVI}=1 pvi.preset=bcm-same {ADAM}"),
    Run("pvi-bcm-split", 4, f"{PVI}=1 pvi.preset=bcm-split pvi.local-update=analytic {FIXED}"),
    Run("pvi-vcl", 4, f"{PVI}=4 pvi.preset=vcl {ADAM} pvi.factor=cpo"),
    Run("pvi-streaming", 4, f"{PVI}=4 pvi.preset=streaming-vb pvi.local-update=lbfgs pvi.factor=cpo "
        "pvi.evaluations=15 pvi.order=random"),
    Run("pvi-global-vi", 4, f"{PVI}=5 pvi.preset=global-vi pvi.local-update=gradient {FIXED} pvi.step=0.001"),
    Run("pvi-bernoulli", 4, "method=pvi dataset=breast-cancer model.likelihood=bernoulli model.ard=false "
        f"model.lengthscale=5 model.num-inducing=10 num-server-rounds=3 evaluate-every=0 {ADAM}"),
    Run("pvi-poisson", 0, f"method=pvi {CLINICS} target=visits model.likelihood=poisson model.num-inducing=10 "
        "num-server-rounds=3 evaluate-every=0 pvi.local-update=lbfgs pvi.factor=full pvi.evaluations=15"),
    # multi-output GPs
    Run("fedmgp-exact", 0, f"{MGP}=5 baselines.max-evaluations=30", quiet=False),
    Run("fedmgp-two-latents", 0, f"{MGP}=10 fedmgp.latents=2 fedmgp.starts=2 fedmgp.start-rounds=3 "
        "fedmgp.own-deviation=true"),
    Run("fedmgp-lmc", 0, f"{MGP}=8 fedmgp.covariance=lmc fedmgp.aggregation=agreement"),
    Run("fedmgp-pseudo-mean", 0, f"{PSEUDO} fedmgp.server-momentum=0.5 fedmgp.fraction=0.8"),
    Run("fedmgp-pseudo-median", 0, f"{PSEUDO} fedmgp.aggregation=median fedmgp.learn-inducing=true"),
    Run("fedmgp-pseudo-krum", 0, f"{PSEUDO} fedmgp.aggregation=krum fedmgp.malicious=1"),
    Run("modular-gp", 0, f"method=modular-gp {UNITS}"),
    Run("fed-poly", 0, f"method=fed-poly {UNITS}"),
    # structured variational inference
    Run("sfvi-diagonal", 4, f"method=sfvi dataset=diabetes {SFVI} {STOCHASTIC} num-server-rounds=12", resume_to=20),
    Run("sfvi-closed-form", 4, f"method=sfvi dataset=diabetes {SFVI} num-server-rounds=4", resume_to=7),
    Run("sfvi-avg", 4, f"method=sfvi-avg dataset=diabetes {SFVI} num-server-rounds=4 sfvi.local-steps=5 "
        "sfvi.fraction=0.8"),
    Run("sfvi-full-warm-start", 0, f"method=sfvi dataset=five-blocks split=0 partitioner=natural partition.column=site "
        f"{SFVI} {STOCHASTIC} num-server-rounds=12 sfvi.warm-start-rounds=3 sfvi.local-steps=5 "
        "sfvi.structure=full sfvi.learn-inputs=true sfvi.own-steps=2 sfvi.shared-inputs=box"),
    Run("sfvi-six-cities", 0, "method=sfvi dataset=ohio features=id,smoke,age target=resp standardise=false "
        "partitioner=natural partition.column=smoke model.likelihood=bernoulli sfvi.model=logistic-mixed "
        "sfvi.unit-column=id sfvi.structure=full sfvi.importance-samples=5 sfvi.prediction-draws=20 "
        "num-server-rounds=15 evaluate-every=0", needs="ohio.csv.gz"),
    Run("sfvi-multinomial", 3, "method=sfvi dataset=classes.csv target=label standardise=false sfvi.model=multinomial "
        "sfvi.classes=3 sfvi.prediction-draws=20 num-server-rounds=15 evaluate-every=0"),
)  # fmt: skip


def write_tables(folder: Path) -> None:
    """Two small made-up tables: clinics with columns of text and a count, and classes of points in four dimensions."""
    draw = random.Random(0)
    clinics = ["age,weight,ward,smoker,clinic,cost,visits"]
    for row in range(240):
        age, weight = draw.uniform(20, 90), draw.gauss(75, 12)
        ward, smoker = draw.choice(["north", "south", "east"]), draw.choice(["yes", "no", "former"])
        level = 0.02 * age + 0.5 * (ward == "south") + 0.3 * (smoker == "yes") + math.sin(weight / 10)
        cost, visits = 100 * level + draw.gauss(0, 20), sum(draw.random() < 0.1 + 0.1 * level for _ in range(8))
        clinics.append(f"{age:.2f},{weight:.2f},{ward},{smoker},clinic-{row % 3},{cost:.3f},{visits}")
    classes = ["a,b,c,d,label"]
    for row in range(180):
        point = [draw.gauss(0.7 * ((row % 3 == k) - 0.2), 1) for k in range(4)]
        classes.append(",".join(f"{x:.4f}" for x in point) + f",{row % 3}")
    (folder / "clinics.csv").write_text("\n".join([*clinics, ""]))
    (folder / "classes.csv").write_text("\n".join([*classes, ""]))


# ------------------------------------------------------------------------------------------------------- making runs


def missing(run: Run) -> str:
    """Why a run cannot be made here; empty if it can."""
    if not run.needs:
        return ""
    folder = os.environ.get("FEDGP_DATA", "")
    if not folder:
        return "FEDGP_DATA is not set"
    return "" if (Path(folder) / run.needs).exists() else f"FEDGP_DATA has no {run.needs}"


def figures_of(run: Run, command: Sequence[str]) -> list[dict[str, Any]]:
    """Make a run in a folder of its own; what is kept after each of its commands.

    Raises:
        RuntimeError: with what a command said last.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if data := os.environ.get("FEDGP_DATA"):
        environment["FEDGP_DATA"] = str(Path(data).resolve())
    kept = []
    with tempfile.TemporaryDirectory(prefix="same-figures-") as place:
        write_tables(Path(place))
        for arguments, folder in zip(run.commands(), run.folders(), strict=True):
            begun = time.monotonic()
            done = subprocess.run(
                [*command, *arguments],
                cwd=place,
                env=environment,
                capture_output=True,
                text=True,
                timeout=LIMIT,
                check=False,
            )
            if done.returncode:
                said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
                raise RuntimeError(f"`fedgp {shlex.join(arguments)}` ended with status {done.returncode}: {said}")
            metrics = json.loads((Path(place) / "runs" / folder / "metrics.json").read_text())
            kept.append(
                {
                    "argv": arguments,
                    "seconds": round(time.monotonic() - begun, 1),
                    **{key: metrics.get(key) for key in COUNTS},
                    "failures": len(metrics.get("failures", ())),
                    **{key: metrics.get(key) for key in FIGURES},
                }
            )
    return kept


def make(runs: Sequence[Run], jobs: int, command: Sequence[str]) -> Iterator[tuple[Run, list[dict[str, Any]] | str]]:
    """Runs as they are finished, with what is kept of them or why there is nothing; progress goes to stderr."""

    def one(run: Run) -> list[dict[str, Any]] | str:
        if reason := missing(run):
            return f"skipped: {reason}"
        try:
            return figures_of(run, command)
        except (RuntimeError, OSError, ValueError, subprocess.TimeoutExpired) as error:
            return f"failed: {error}"

    with ThreadPoolExecutor(jobs) as pool:
        waiting = {pool.submit(one, run): run for run in runs}
        for count, future in enumerate(as_completed(waiting), 1):
            run, result = waiting[future], future.result()
            told = result if isinstance(result, str) else f"{sum(kept['seconds'] for kept in result):.1f} s"
            print(f"[{count:2}/{len(runs)}] {run.name}: {told}", file=sys.stderr, flush=True)
            yield run, result


# -------------------------------------------------------------------------------------------------------- comparing


def numbers(content: Any, path: str = "") -> Iterator[tuple[str, float | None]]:
    """Every number below ``content`` with its path; sites by their id, null where a figure is not finite."""
    if isinstance(content, Mapping):
        for key, value in content.items():
            yield from numbers(value, f"{path}/{key}")
    elif isinstance(content, list):
        for place, value in enumerate(content):
            own = value.get("site", place) if isinstance(value, Mapping) else place
            yield from numbers(value, f"{path}/{own}")
    elif isinstance(content, int | float) and not isinstance(content, bool):
        yield path, float(content)
    elif content is None and path:
        yield path, None


def difference(before: Any, after: Any) -> tuple[float, str]:
    """The largest relative difference of a recorded number, and whose; ∞ where one is gone, new ones do not count."""
    now = dict(numbers(after))
    return max(((_relative(own, now.get(path, math.inf)), path) for path, own in numbers(before)), default=(0.0, ""))


def _relative(before: float | None, after: float | None) -> float:
    if before == after:
        return 0.0
    if before is None or after is None or not (math.isfinite(before) and math.isfinite(after)):
        return math.inf
    return abs(before - after) / max(abs(before), abs(after))


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What else is not as it was: the command, counts, failures of sites."""
    told = [f"{key} {before[key]} → {after[key]}" for key in (*COUNTS, "failures") if before[key] != after[key]]
    return [*told, *(["other arguments"] if before["argv"] != after["argv"] else [])]


def compared(
    name: str, before: Sequence[Mapping[str, Any]] | None, now: list[dict[str, Any]] | str
) -> tuple[list[list[str]], bool]:
    """Rows of the table for a run, one for each command, and whether its figures are as they were."""
    if isinstance(now, str):
        return [[name, "", "", "", now]], now.startswith("skipped")
    if before is None or len(before) != len(now):
        return [[name, "", "", "", "not in the record"]], True
    rows, same = [], True
    for place, (then, kept) in enumerate(zip(before, now, strict=True)):
        test, _ = difference(then["test"], kept["test"])
        others, where = difference({key: then[key] for key in FIGURES}, {key: kept[key] for key in FIGURES})
        same &= others <= TOLERANCE and then["failures"] == kept["failures"]
        told = [f"at {where}"] * (others > TOLERANCE) + changes(then, kept)
        what = f"{name}, then {'forget' if kept['argv'][0] == 'forget' else 'resume'}" if place else name
        rows.append([what, f"{test:.1e}", f"{others:.1e}", f"{kept['seconds']:.1f}", "; ".join(told)])
    return rows, same


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Markdown; the last column only says what a person should look at."""
    print("| run | test figures | all figures | seconds | notes |\n| --- | ---: | ---: | ---: | --- |")
    for row in rows:
        print(f"| {' | '.join(row)} |")


# ------------------------------------------------------------------------------------------------------ command line


def record(path: Path, runs: Sequence[Run], jobs: int, command: Sequence[str]) -> bool:
    """Make the runs and write what is kept; whether none failed. Runs that are not asked for stay as they are."""
    results = dict(make(runs, jobs, command))
    asked = {run.name for run in runs}
    before = json.loads(path.read_text())["runs"] if path.exists() else {}
    old = {name: kept for name, kept in before.items() if name not in asked}
    new = {run.name: kept for run, kept in results.items() if not isinstance(kept, str)}
    ordered = {run.name: (old | new)[run.name] for run in RUNS if run.name in old | new}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(kept)}" for name, kept in ordered.items())
    path.write_text(f'{{"made_by": "python simulations/same_figures.py record", "runs": {{\n{lines}\n}}}}\n')
    return not any(isinstance(kept, str) and kept.startswith("failed") for kept in results.values())


def compare(path: Path, runs: Sequence[Run], jobs: int, command: Sequence[str]) -> bool:
    """Make the runs and print how far their figures are from the recorded ones; whether all are as they were."""
    before = json.loads(path.read_text())["runs"]
    results = dict(make(runs, jobs, command))
    table, same, skipped = [], True, 0
    for run in runs:
        rows, alike = compared(run.name, before.get(run.name), results[run])
        table, same, skipped = [*table, *rows], same and alike, skipped + (not rows[0][1])
    print_table(table)
    verdict = f"No figure differs by more than {TOLERANCE:g}" if same else f"NOT the same to {TOLERANCE:g}"
    print(f"\n{verdict}; {len(runs) - skipped} of {len(runs)} runs compared.")
    return same


def main() -> None:
    """Record, compare, or list the runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    modes.add_parser("list", help="print the runs with their commands")
    for mode in (record, compare):
        own = modes.add_parser(mode.__name__, help=(mode.__doc__ or "").split(";")[0].lower())
        own.add_argument("path", type=Path, metavar="FILE.json")
        own.add_argument("--only", nargs="+", choices=[run.name for run in RUNS], metavar="NAME", default=())
        own.add_argument("--jobs", type=int, default=1, help="runs at a time, each on one core")
        own.add_argument("--command", default="", help="the command line; default python -m fedgp_flower.cli")
        own.set_defaults(act=mode)
    chosen = parser.parse_args()
    if chosen.mode == "list":
        for run in RUNS:
            print(run.name, *(f"    fedgp {shlex.join(arguments)}" for arguments in run.commands()), sep="\n")
        return
    runs = [run for run in RUNS if run.name in chosen.only or not chosen.only]
    command = shlex.split(chosen.command) or [sys.executable, "-m", "fedgp_flower.cli"]
    raise SystemExit(0 if chosen.act(chosen.path, runs, chosen.jobs, command) else 1)


if __name__ == "__main__":
    main()
