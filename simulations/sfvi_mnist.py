"""MNIST: multinomial regression with learned prior scales at many small sites (Hassan et al. 2023, S3.2, Table S1).

    python simulations/sfvi_mnist.py --data-dir DIR [--sites 25 200] [--only "SFVI" …]
    python simulations/sfvi_mnist.py --data-dir DIR --choose          (rates and initial scales, on training images)

5000 images at (200 rows, 25 sites) and (25 rows, 200 sites); 10 000 test images, dealt to the sites for scoring only.
Accuracy is that of the mixture of 10 draws. Tables and a figure of the warm start (the paper's Figure S2) go to
``simulations/results/``. Complete runs are not repeated. With ``--choose`` rates and initial scales are compared on
2000 training images that are at no site, at 25 sites, in ``simulations/results/sfvi_mnist_choice.md``.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from sfvi_runs import RESULTS, RUNS, ensure, write_table

NAME = "sfvi_mnist"
ROWS = 5000
TITLE = "MNIST: multinomial regression at small sites"
LINES = (
    "Made by `python simulations/sfvi_mnist.py`. Accuracy on 10 000 test images, of a mixture of 10 draws, which are",
    "dealt to the sites for scoring alone. Independent: every site fits the same model to its own rows. MB: of all",
    "messages, those of evaluations included; for seconds see the [benchmark](sfvi_benchmark.md). The paper's column",
    "is its Table S1, for 25 sites of 200 rows; its rounds differ: 1 x 50 000 steps, 50 x 1000 steps, 50 000 rounds",
    "of SFVI. The learning rate falls over the second half of the rounds, however many they are; rates and the",
    "initial standard deviation of q(Z_G) are those that were best on [other training images](sfvi_mnist_choice.md).",
)

ONE_ROUND: dict[str, Any] = {"num-server-rounds": 1, "sfvi.local-steps": 400}
AVERAGE: dict[str, Any] = {"method": "sfvi-avg", "sfvi.learning-rate": 0.01, "sfvi.initial-scale": 0.03}
GRADIENTS: dict[str, Any] = {"method": "sfvi", "sfvi.learning-rate": 0.03, "sfvi.initial-scale": 0.03}
ALONE: dict[str, Any] = {"baselines.local-only": True}
SCRATCH, WARM, CONTROL = "SFVI", "5 rounds of SFVI-Avg, then SFVI", "SFVI, 105 rounds"
VARIANTS: dict[str, dict[str, Any]] = {
    "SFVI-Avg, 1 round × 400": {**AVERAGE, **ONE_ROUND, **ALONE},
    "SFVI-Avg, 20 rounds × 10": {**AVERAGE, "num-server-rounds": 20, "sfvi.local-steps": 10},
    WARM: {**GRADIENTS, "num-server-rounds": 105, "sfvi.warm-start-rounds": 5, "sfvi.local-steps": 10},
    CONTROL: {**GRADIENTS, "num-server-rounds": 105},
    SCRATCH: {**GRADIENTS, "num-server-rounds": 200},
}
RATES, SCALES, HELD_OUT = (0.003, 0.01, 0.03), (0.03, 0.1), 2000
"""What is compared with ``--choose``, and on how many training images."""
COMPARED = ("SFVI-Avg, 20 rounds × 10", CONTROL)
CONTROLLED = 25
"""Sites at which the control is run: the warm start's rounds, rates and initial scale, without the warm start."""
INDEPENDENT = "independent, 400 steps"
PAPER = {INDEPENDENT: 51.5, "SFVI-Avg, 1 round × 400": 63.9, "SFVI-Avg, 20 rounds × 10": 69.3, SCRATCH: 84.0}
"""Test accuracy in per cent, Table S1, J = 25 and N_j = 200."""


def images(data_dir: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Pixels [N, 784] between 0 and 1, and digits."""
    packed = (data_dir / "mnist" / f"{part}-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1"))
    pixels, digits = (gzip.decompress(path.read_bytes()) for path in packed)
    return np.frombuffer(pixels, np.uint8)[16:].reshape(-1, 784) / 255.0, np.frombuffer(digits, np.uint8)[8:]


def table_of(data_dir: Path, *, held_out: bool = False) -> Path:
    """A table of 5000 training and 10 000 test images, the latter as split 0; or of as many training images besides."""
    folder = RUNS / NAME / "data"
    folder.mkdir(parents=True, exist_ok=True)
    name = "held-out" if held_out else "digits"
    path = folder / f"{name}.parquet"
    if not path.exists():
        x, y = images(data_dir, "train")
        order = np.random.default_rng(0).permutation(len(x))
        chosen, others = order[:ROWS], order[ROWS : ROWS + HELD_OUT]
        x_test, y_test = (x[others], y[others]) if held_out else images(data_dir, "t10k")
        frame = pd.DataFrame(np.concatenate([x[chosen], x_test]), columns=[f"p{i}" for i in range(784)])
        frame["digit"] = np.concatenate([y[chosen], y_test]).astype(float)
        listing = {"n": len(frame), "n_splits": 1, "test": [list(range(ROWS, len(frame)))]}
        with gzip.open(folder / f"{name}.splits.json.gz", "wt") as out:
            json.dump(listing, out)
        frame.to_parquet(path)
    return path


def keys(path: Path) -> dict[str, Any]:
    """What all variants share."""
    return {
        "dataset": str(path),
        "target": "digit",
        "split": 0,
        "standardise": False,
        "evaluate-every": 20,
        "sfvi.model": "multinomial",
        "sfvi.samples": 1,
        "sfvi.prediction-draws": 10,
    }


def folder_of(variant: str, sites: int) -> str:
    """Name of a run's folder."""
    return "".join(c if c.isalnum() else "-" for c in f"{variant}-{sites}")


def rows_of(variant: str, sites: int, run: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of the table from one run; one of them has the comparison with sites alone."""
    first = {"sites": sites, "rows": ROWS // sites}
    paper = {"paper, %": PAPER.get(variant, float("nan")) if sites == 25 else float("nan")}
    cost = {"MB up": run["bytes"]["up"] / 1e6, "MB down": run["bytes"]["down"] / 1e6}
    own = {"variant": variant, "rounds": run["rounds"], "accuracy, %": 100 * run["test"]["accuracy"]}
    found = [{**first, **own, **paper, **cost}]
    if run["local_only"]:
        paper = {"paper, %": PAPER[INDEPENDENT] if sites == 25 else float("nan")}
        alone = {"variant": INDEPENDENT, "rounds": 0, "accuracy, %": 100 * run["local_only"]["accuracy"], **paper}
        found.insert(0, {**first, **alone})
    return found


def there(variant: str, sites: int) -> bool:
    """Whether a run is complete."""
    return (RUNS / NAME / folder_of(variant, sites) / "metrics.json").exists()


def history_of(variant: str, sites: int) -> pd.DataFrame:
    """Figures by round; the bound of rounds of SFVI-Avg is not known."""
    return pd.read_csv(RUNS / NAME / folder_of(variant, sites) / "history.csv")


def warm_line(sites: int, scratch: str) -> str:
    """What the rounds of SFVI-Avg change: accuracy at the first evaluation, and who has the better bound when."""
    warm, other = (history_of(variant, sites).set_index("round") for variant in (WARM, scratch))
    both = warm["objective"].dropna().index.intersection(other.index)
    behind = both[warm.loc[both, "objective"] < other.loc[both, "objective"]]
    scored = warm["test_accuracy"].dropna().index.intersection(other["test_accuracy"].dropna().index)
    first, last = int(scored[0]), int(both[-1])
    accuracy = [100 * frame.loc[first, "test_accuracy"] for frame in (warm, other)]
    bound = [frame.loc[last, "objective"] for frame in (warm, other)]
    when = f"it is first the lower in round {int(behind[0])}" if len(behind) else "it is never the lower"
    return (
        f"- {sites} sites, against `{scratch}`: accuracy {accuracy[0]:.1f} % instead of {accuracy[1]:.1f} % after "
        f"{first} rounds; ELBO per row {bound[0]:.3f} instead of {bound[1]:.3f} after {last} rounds, and {when}."
    )


def warm_figure(sizes: list[int]) -> Figure:
    """Bound and accuracy against rounds, from scratch and after rounds of SFVI-Avg."""
    figure = Figure(figsize=(8.6, 3.1 * len(sizes)), layout="constrained")
    for row, sites in zip(figure.subplots(len(sizes), 2, squeeze=False), sizes, strict=True):
        for variant, colour in ((SCRATCH, "C0"), (CONTROL, "C2"), (WARM, "C3")):
            if not there(variant, sites):
                continue
            history = history_of(variant, sites)
            scored = history.dropna(subset="test_accuracy")
            row[0].plot(history["round"], history["objective"], label=variant, lw=1.2, color=colour)
            row[1].plot(scored["round"], 100 * scored["test_accuracy"], "o-", ms=3, label=variant, lw=1.2, color=colour)
        title = f"{sites} sites of {ROWS // sites} rows"
        row[0].set(xlabel="rounds", ylabel="ELBO per row (nats)", ylim=(-4, None), title=title)
        row[1].set(xlabel="rounds", ylabel="test accuracy (%)", ylim=(70, 95), title=title)
        row[0].legend(frameon=False, fontsize=8)
    return figure


def choose(data_dir: Path, only: list[str]) -> None:
    """Write the accuracy on held-out training images for every rate and initial scale."""
    path, rows = table_of(data_dir, held_out=True), []
    for variant in (own for own in COMPARED if own in only):
        for rate in RATES:
            for scale in SCALES:
                own = {"sfvi.learning-rate": rate, "sfvi.initial-scale": scale, "evaluate-every": 0}
                name = folder_of(f"choice-{variant}-{rate}-{scale}", CONTROLLED)
                run = ensure(NAME, name, CONTROLLED, keys(path) | VARIANTS[variant] | own)
                found = {"accuracy, %": 100 * run["test"]["accuracy"], "NLL": run["test"]["nll"]}
                rows.append({"variant": variant, "learning rate": str(rate), "initial scale": str(scale), **found})
                print(rows[-1], flush=True)
                words = [
                    "Made by `python simulations/sfvi_mnist.py --choose`: accuracy and NLL of a mixture of 10 draws on",
                    f"{HELD_OUT} training images that are at no site; {CONTROLLED} sites of {ROWS // CONTROLLED} rows.",
                ]
                title = "MNIST: rates and initial scales, chosen on training images"
                write_table(RESULTS / f"{NAME}_choice.md", title, words, pd.DataFrame(rows))


def main() -> None:
    """Run what is missing, then write table and figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("FEDGP_DATA", ".")))
    parser.add_argument("--sites", nargs="*", type=int, default=[25, 200])
    parser.add_argument("--only", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--choose", action="store_true", help="compare rates and initial scales on training images")
    chosen = parser.parse_args()
    if chosen.choose:
        choose(chosen.data_dir, chosen.only)
        return
    path = table_of(chosen.data_dir)
    rows, complete = [], []
    for sites in chosen.sites:
        found = [v for v in VARIANTS if there(v, sites)]
        asked = [v for v in chosen.only if v != CONTROL or sites == CONTROLLED]
        for variant in [v for v in VARIANTS if v in asked or v in found]:
            run = ensure(NAME, folder_of(variant, sites), sites, keys(path) | VARIANTS[variant])
            rows += rows_of(variant, sites, run)
        if {SCRATCH, WARM} <= {*found, *chosen.only}:
            complete.append(sites)
    asked = " ".join(map(str, chosen.sites))
    lines = [LINES[0].replace("sfvi_mnist.py`", f"sfvi_mnist.py --sites {asked}`"), *LINES[1:]]
    if complete:
        pairs = [(sites, v) for sites in complete for v in (CONTROL, SCRATCH) if there(v, sites)]
        lines += ["", "What five rounds of SFVI-Avg change:", "", *(warm_line(*pair) for pair in pairs)]
        if (CONTROLLED, CONTROL) in pairs:
            lines += [
                "",
                f"`{CONTROL}` has the warm start's rounds, `{SCRATCH}` its own.",
            ]
        lines += ["", f"![warm start]({NAME}.png)"]
    write_table(RESULTS / f"{NAME}.md", TITLE, lines, pd.DataFrame(rows), digits=1)
    if complete:
        warm_figure(complete).savefig(RESULTS / f"{NAME}.png", dpi=150)


if __name__ == "__main__":
    main()
