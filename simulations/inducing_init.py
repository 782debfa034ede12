"""Does it help to draw initial inducing points from federated statistics? ``copula`` against ``normal``, exact FSGP.

    python simulations/inducing_init.py --data-dir DIR [--splits 0 1 2]

Ten sites, M = 100, four UCI sets, the same sites, seeds and optimiser; only ``model.inducing-init`` differs. Shown is
the held-out NLL (standardised, mean over splits) after so many evaluations. Complete runs are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from fedgp_flower.run.in_process import run_in_process

HERE = Path(__file__).parent
RUNS = HERE.parent / "results" / "inducing_init"
RESULTS = HERE / "results"
SETS = ("uci/energy", "uci/concrete", "uci/wine", "uci/kin8nm")
ROUNDS, EVERY = 100, 10
COLOURS = {"normal": "C1", "copula": "C0"}


def history(dataset: str, init: str, split: int, data_dir: Path) -> pd.DataFrame:
    """Evaluated rounds of one run: round, bound per row, standardised NLL."""
    name = f"{dataset}-{init}-{split}".replace("/", "-")
    if not (RUNS / name / "metrics.json").exists():
        keys: dict[str, bool | int | float | str] = {
            "dataset": dataset,
            "data-dir": str(data_dir),
            "split": split,
            "model.num-inducing": 100,
            "model.inducing-init": init,
            "num-server-rounds": ROUNDS,
            "evaluate-every": EVERY,
            "fsgp.tolerance": 0.0,
            "baselines.linear": False,
            "baselines.local-only": False,
            "baselines.pooled": False,
            "keep-predictions": False,
            "output-dir": str(RUNS),
            "name": name,
            "resume": (RUNS / name / "config.toml").exists(),
        }
        run_in_process(keys, 10)
    metrics = json.loads((RUNS / name / "metrics.json").read_text())
    shift = metrics["test"]["nll"] - metrics["test_standardised"]["nll"]
    everything = pd.read_csv(RUNS / name / "history.csv")
    everything["objective"] = everything["objective"].cummax()  # the best point so far, as the evaluations have it
    rows = everything.dropna(subset=["test_nll"])
    own = {"data": dataset, "init": init, "split": split}
    return pd.DataFrame({**own, "round": rows["round"], "bound": rows["objective"], "nll": rows["test_nll"] - shift})


def write(frame: pd.DataFrame) -> None:
    """Markdown table and figure."""
    mean = frame.groupby(["data", "init", "round"], as_index=False)[["bound", "nll"]].mean()
    names = list(dict.fromkeys(frame["data"]))
    figure = Figure(figsize=(3.4 * len(names), 3.2), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        for init, colour in COLOURS.items():
            for _, line in frame[(frame["data"] == name) & (frame["init"] == init)].groupby("split"):
                axes.plot(line["round"], line["nll"], color=colour, alpha=0.3, linewidth=0.8)
            line = mean[(mean["data"] == name) & (mean["init"] == init)]
            axes.plot(line["round"], line["nll"], color=colour, label=init)
        axes.set_title(name)
        axes.set_xlabel("evaluations of the pooled bound")
    figure.axes[0].set_ylabel("held-out NLL, standardised (nats per row)")
    figure.axes[0].legend(frameon=False, title="model.inducing-init")
    RESULTS.mkdir(exist_ok=True)
    figure.savefig(RESULTS / "inducing_init.png", dpi=150)
    splits = frame["split"].nunique()
    lines = ["# Initial inducing points: `copula` against `normal`", ""]
    lines += [
        f"Made by `python simulations/inducing_init.py`; exact FSGP, ten sites, M = 100, mean over {splits} splits.",
        "",
    ]
    for figure_name, title in (
        ("nll", "Held-out NLL, standardised, in nats per row"),
        ("bound", "Pooled bound per row"),
    ):
        lines += [
            f"{title}, after so many evaluations:",
            "",
            "| data | init | " + " | ".join(map(str, rounds(mean))) + " |",
        ]
        lines += ["| --- " * (2 + len(rounds(mean))) + "|"]
        for (name, init), own in mean.groupby(["data", "init"], sort=False):
            cells = " | ".join(f"{value:.3f}" for value in own.sort_values("round")[figure_name])
            lines += [f"| {name} | {init} | {cells} |"]
        lines += [""]
    lines += ["![NLL against evaluations](inducing_init.png)", ""]
    (RESULTS / "inducing_init.md").write_text("\n".join(lines))


def rounds(frame: pd.DataFrame) -> list[int]:
    """The evaluated rounds."""
    return sorted(int(value) for value in frame["round"].unique())


def main() -> None:
    """Run what is missing, then write table and figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("FEDGP_DATA", ".")))
    parser.add_argument("--splits", type=int, nargs="*", default=[0, 1, 2])
    chosen = parser.parse_args()
    frames = [history(d, i, s, chosen.data_dir) for d in SETS for s in chosen.splits for i in COLOURS]
    write(pd.concat(frames))


if __name__ == "__main__":
    main()
