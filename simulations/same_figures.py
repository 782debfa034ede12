"""Whether a change of the code changed a figure: short runs of every method, recorded once and compared later.

    python -m simulations.same_figures record figures.json
    python -m simulations.same_figures compare figures.json [--only fgpr …] [--jobs 2]

Every run is made by the command line alone, so that the same list serves code that is built otherwise. The runs are too
short to say how good a method is. A run whose file is not below FEDGP_DATA is skipped. ``compare`` prints a table with
the figure that differs most, and ends with status 1 if a run fails or a figure differs by more than 1e-8 of its size.
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOLERANCE, LIMIT = 1e-8, 300.0
"""Of a figure's size; seconds after which a command counts as failed."""
FIGURES = ("test", "test_standardised", "per_site", "pooled", "local_only")
"""What is kept of ``metrics.json`` and compared number by number."""
COUNTS = ("sites", "rounds", "communications")
"""What is kept, and shown where it changes; it is no figure."""


@dataclass(frozen=True)
class Run:
    """A run, and what is done with it afterwards; figures are kept after every command."""

    name: str
    sites: int
    keys: str  # KEY=VALUE, as on the command line
    needs: str = ""  # file below FEDGP_DATA
    quiet: bool = True  # without baselines and pictures, which cost more than most of these runs
    resume_to: int = 0  # then the same run goes on to this round
    forget: str = ""  # then this site is forgotten

    def commands(self) -> list[tuple[list[str], str]]:
        """Arguments of each command, and the folder that it writes."""
        keys = shlex.split(self.keys) + (QUIET if self.quiet else [])
        first = ["run", "--sites", str(self.sites), "--output-dir", "runs", "--name", self.name]
        found = [([*first, *keys], self.name)]
        if self.resume_to:
            more = [key for key in keys if not key.startswith("num-server-rounds=")]
            found.append(([*first, *more, f"num-server-rounds={self.resume_to}", "resume=true"], self.name))
        if self.forget:
            words = ["forget", f"runs/{self.name}", "--site", self.forget, "--rounds", "1", "--name", "without"]
            found.append((words, "without"))
        return found


QUIET = ["baselines.linear=false", "baselines.local-only=false", "baselines.pooled=false", "keep-predictions=false"]
SGPR = "method=sgpr model.num-inducing=20 evaluate-every=0 sgpr.exchanges=10 num-server-rounds=20"
SVGP = "method=svgp model.num-inducing=20 evaluate-every=0 num-server-rounds=10 sgpr.exchanges=12"
FSGP = "method=fsgp model.num-inducing=20 evaluate-every=5 num-server-rounds=10"
PVI = "method=pvi dataset=diabetes model.num-inducing=15 evaluate-every=0"
LOCAL = f"{PVI} num-server-rounds"
ADAM = "pvi.local-update=adam pvi.steps=10"
FIXED = "pvi.inducing=fixed"
LABELS = "dataset=breast-cancer model.likelihood=bernoulli evaluate-every=0"
UNITS = "dataset=convolved-signals partitioner=natural partition.column=unit split=0 model.num-inducing=25"
EXACT = f"method=fedmgp-exact {UNITS} evaluate-every=0 num-server-rounds"
FEDMGP = f"method=fedmgp {UNITS} fedmgp.local-steps=5 evaluate-every=0 num-server-rounds=8"
SHAPES = "evaluate-every=0 model.kernel=matern52 model.num-inducing=15"
CLINICS = "dataset=clinics.csv features=age,weight,ward,smoker partitioner=natural partition.column=clinic"

RUNS = (
    Run("sgpr", 4, f"{SGPR} dataset=diabetes baselines.max-evaluations=40", quiet=False),
    Run("sgpr-energy", 5, f"{SGPR} dataset=uci/energy split=0 model.kernel=matern52", needs="uci/energy.csv.gz"),
    Run("sgpr-countries", 0, f"{SGPR} dataset=weather features=lon,lat,elev target=tmin partitioner=natural "
        "partition.column=country partition.min-rows=30 model.kernel=matern32", needs="weather.csv.gz"),
    Run("sgpr-text", 0, f"{SGPR} {CLINICS} target=cost transform.target=yeo-johnson"),
    Run("sgpr-masked", 4, f"{SGPR} dataset=diabetes privacy.secure-aggregation=true"),
    Run("sgpr-resumed", 4, "method=sgpr model.num-inducing=20 evaluate-every=0 dataset=diabetes num-server-rounds=4",
        resume_to=8),
    Run("svgp-labels", 4, f"{SVGP} dataset=breast-cancer model.likelihood=bernoulli"),
    Run("svgp-counts", 0, f"{SVGP} {CLINICS} target=visits model.likelihood=poisson"),
    Run("fsgp-fedavg", 4, f"{FSGP} dataset=diabetes averaging.fraction=0.6 partitioner=dirichlet optimizer.decay=0.95"),
    Run("fsgp-fedadam", 4, f"{FSGP} dataset=sine split=0 averaging.server-optimizer=fedadam partitioner=blocks "
        "optimizer.name=lbfgs"),
    Run("fgpr", 4, "method=fgpr dataset=uci/yacht split=1 num-server-rounds=10 averaging.server-optimizer=fedyogi "
        "partitioner=kmeans model.kernel=linear optimizer.name=sgd", needs="uci/yacht.csv.gz"),
    Run("local-only", 3, "method=local-only dataset=diabetes baselines.max-evaluations=40 partitioner=linear"),
    Run("pooled", 0, "method=pooled dataset=five-blocks split=0 partitioner=natural partition.column=site "
        "model.num-inducing=15 baselines.max-evaluations=40"),
    Run("pvi-sums", 4, f"{PVI} num-server-rounds=4", forget="1"),
    Run("pvi-sums-synchronous", 4, f"{PVI} num-server-rounds=3 pvi.schedule=synchronous"),
    Run("pvi-tied-adam", 4, f"{LOCAL}=4 {ADAM} pvi.order=random partitioner=exponential"),
    Run("pvi-free-adam", 4, f"{LOCAL}=5 {ADAM} pvi.factor=free {FIXED} optimizer.batch-size=32"),
    Run("pvi-cpo-average", 4, f"{LOCAL}=3 {ADAM} pvi.factor=cpo pvi.inducing=average pvi.schedule=synchronous"),
    Run("pvi-asynchronous", 4, f"{LOCAL}=6 {ADAM} pvi.schedule=asynchronous pvi.concurrency=3"),
    Run("pvi-bcm-same", 4, f"{LOCAL}=1 pvi.preset=bcm-same {ADAM}"),
    Run("pvi-bcm-split", 4, f"{LOCAL}=4 pvi.preset=bcm-split"),
    Run("pvi-vcl", 4, f"{LOCAL}=4 pvi.preset=vcl {ADAM} pvi.factor=cpo"),
    Run("pvi-global-vi", 4, f"{LOCAL}=5 pvi.preset=global-vi model.likelihood=student-t"),
    Run("pvi-labels", 4, f"method=pvi {LABELS} model.num-inducing=10 num-server-rounds=4"),
    Run("pvi-labels-adam", 4, f"method=pvi {LABELS} model.ard=false model.lengthscale=5 model.num-inducing=10 "
        f"num-server-rounds=3 {ADAM}"),
    Run("pvi-counts", 0, f"method=pvi {CLINICS} target=visits model.likelihood=poisson model.num-inducing=10 "
        f"num-server-rounds=3 evaluate-every=0 {ADAM} pvi.factor=cpo"),
    Run("pvi-glm", 4, f"method=pvi-glm {LABELS} num-server-rounds=8"),
    Run("pvi-bnn", 3, f"method=pvi-bnn {LABELS} bnn.hidden=5 pvi.steps=20 "
        "num-server-rounds=3"),
    Run("fedmgp-exact", 0, f"{EXACT}=5 baselines.max-evaluations=30", quiet=False),
    Run("fedmgp-exact-two-latents", 0, f"{EXACT}=10 fedmgp.latents=2"),
    Run("fedmgp-exact-agreement", 0, f"{EXACT}=8 fedmgp.aggregation=agreement"),
    Run("fedmgp", 0, FEDMGP),
    Run("fedmgp-median", 0, f"{FEDMGP} fedmgp.aggregation=median"),
    Run("fedmgp-krum", 0, f"{FEDMGP} fedmgp.aggregation=krum fedmgp.malicious=1"),
    Run("hierarchical-gp", 4, f"method=hierarchical-gp dataset=diabetes {SHAPES} num-server-rounds=4", resume_to=7),
    Run("hierarchical-gp-units", 0, f"method=hierarchical-gp hierarchical.deviation=rough {UNITS} evaluate-every=0 "
        "num-server-rounds=5"),
    Run("deep-kernel", 3, f"method=deep-kernel {LABELS} num-server-rounds=3"),
    Run("sfvi", 4, f"method=sfvi dataset=diabetes {SHAPES} num-server-rounds=12", resume_to=20),
    Run("sfvi-avg", 4, f"method=sfvi-avg dataset=diabetes {SHAPES} num-server-rounds=4 sfvi.local-steps=5"),
    Run("sfvi-full-warm-start", 0, f"method=sfvi dataset=five-blocks split=0 partitioner=natural partition.column=site "
        f"{SHAPES} num-server-rounds=12 sfvi.warm-start-rounds=3 sfvi.local-steps=5 sfvi.structure=full"),
    Run("sfvi-glmm", 0, "method=sfvi dataset=ohio features=id,smoke,age target=resp standardise=false "
        "partitioner=natural partition.column=smoke model.likelihood=bernoulli sfvi.model=glmm sfvi.unit-column=id "
        "sfvi.structure=full sfvi.importance-samples=5 num-server-rounds=15 evaluate-every=0",
        needs="ohio.csv.gz"),
    Run("sfvi-multinomial", 3, "method=sfvi dataset=classes.csv target=label sfvi.model=multinomial "
        "num-server-rounds=15 evaluate-every=0"),
    Run("sfvi-fedpop", 3, f"method=sfvi {LABELS} sfvi.model=fedpop sfvi.hidden=5 num-server-rounds=10 "
        "sfvi.samples=1"),
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


def figures_of(run: Run) -> list[dict[str, Any]] | str:
    """What is kept after each command of a run, made in a folder of its own; or why there is nothing."""
    if run.needs and not (Path(os.environ.get("FEDGP_DATA", "")) / run.needs).exists():
        return f"skipped: FEDGP_DATA has no {run.needs}"
    environment, kept = {**os.environ, "OMP_NUM_THREADS": "1"}, []
    with tempfile.TemporaryDirectory(prefix="same-figures-") as place:
        write_tables(Path(place))
        for arguments, folder in run.commands():
            begun, words = time.monotonic(), [sys.executable, "-m", "fedgp_flower.cli", *arguments]
            try:
                done = subprocess.run(
                    words, cwd=place, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
                )
            except subprocess.TimeoutExpired:
                return f"failed: `fedgp {shlex.join(arguments)}` took more than {LIMIT:.0f} s"
            if done.returncode:
                said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
                return f"failed: `fedgp {shlex.join(arguments)}` ended with status {done.returncode}: {said}"
            metrics = json.loads((Path(place) / "runs" / folder / "metrics.json").read_text(encoding="utf-8"))
            found = {"argv": arguments, "seconds": round(time.monotonic() - begun, 1)}
            found |= {key: metrics.get(key) for key in (*COUNTS, *FIGURES)}
            kept.append(found | {"failures": len(metrics.get("failures", ()))})
    return kept


def numbers(content: Any, path: str = "") -> Iterator[tuple[str, float | None]]:
    """Every number below ``content`` with its path; sites by their id, null where a figure is not finite."""
    if isinstance(content, Mapping):
        for key, value in content.items():
            yield from numbers(value, f"{path}/{key}")
    elif isinstance(content, list):
        for place, value in enumerate(content):
            name = value.get("site", place) if isinstance(value, Mapping) else place
            yield from numbers(value, f"{path}/{name}")
    elif isinstance(content, int | float) and not isinstance(content, bool):
        yield path, float(content)
    elif content is None and path:
        yield path, None


def difference(before: Any, after: Any) -> tuple[float, str]:
    """The largest relative difference of a recorded number, and its path; ∞ where one is gone."""
    now = dict(numbers(after))
    return max(((_relative(own, now.get(path, math.inf)), path) for path, own in numbers(before)), default=(0.0, ""))


def _relative(before: float | None, after: float | None) -> float:
    if before == after:
        return 0.0
    if before is None or after is None or not (math.isfinite(before) and math.isfinite(after)):
        return math.inf
    return abs(before - after) / max(abs(before), abs(after))


def compared(
    name: str, before: Sequence[Mapping[str, Any]] | None, now: list[dict[str, Any]] | str
) -> tuple[str, bool]:
    """Rows of the table for a run, one for each command, and whether its figures are as they were."""
    if isinstance(now, str) or before is None or len(before) != len(now):
        said = now if isinstance(now, str) else "not in the record"
        return f"| {name} | | | | {said} |", not said.startswith("failed")
    rows, same = [], True
    for then, kept in zip(before, now, strict=True):
        test, _ = difference(then["test"], kept["test"])
        others, where = difference({key: then[key] for key in FIGURES}, {key: kept[key] for key in FIGURES})
        same &= others <= TOLERANCE and then["failures"] == kept["failures"]
        notes = [f"at {where}"] * (others > TOLERANCE)
        notes += [f"{key} {then[key]} → {kept[key]}" for key in (*COUNTS, "failures") if then[key] != kept[key]]
        rows.append(f"| {name} | {test:.1e} | {others:.1e} | {kept['seconds']:.1f} | {'; '.join(notes)} |")
    return "\n".join(rows), same


def main() -> None:
    """Record or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("record", "compare"))
    parser.add_argument("path", type=Path, metavar="FILE.json")
    parser.add_argument("--only", nargs="+", choices=[run.name for run in RUNS], metavar="NAME", default=())
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each on one core")
    chosen = parser.parse_args()
    runs = [run for run in RUNS if run.name in chosen.only or not chosen.only]
    before = json.loads(chosen.path.read_text(encoding="utf-8"))["runs"] if chosen.path.exists() else {}
    print("| run | test figures | all figures | seconds | notes |\n| --- | ---: | ---: | ---: | --- |", flush=True)
    good = True
    with ThreadPoolExecutor(chosen.jobs) as pool:
        for run, found in zip(runs, pool.map(figures_of, runs), strict=True):
            row, same = compared(run.name, before.get(run.name) if chosen.mode == "compare" else None, found)
            print(row, flush=True)
            good &= same
            before |= {} if isinstance(found, str) or chosen.mode == "compare" else {run.name: found}
    if chosen.mode == "record":
        chosen.path.write_text(json.dumps({"runs": before}) + "\n", encoding="utf-8")
    else:
        print(f"\n{'No figure differs' if good else 'Figures differ'} by more than {TOLERANCE:g}.")
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
