"""Shared variational parameters: an autoencoder of MNIST and topics of newsgroups, one encoder for all sites.

    python simulations/amortised.py --data-dir DIR [vae prodlda averages seeds]

SFVI at several sites beside the same model of all rows in one place and of each site's alone: held-out bounds, a
picture of latent space, and the coherence of topics. Complete runs are not repeated.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp
import torch
from matplotlib.figure import Figure
from sfvi_mnist import images
from sfvi_networks import SIDE
from sfvi_runs import RESULTS, RUNS, ensure, write_table

from fedgp_flower.methods.family import GlobalPosterior
from fedgp_flower.methods.sfvi.amortised import AmortisedModel
from fedgp_flower.methods.sfvi.models import model_at
from fedgp_flower.methods.sfvi.options import SFVIOptions
from fedgp_flower.options import ModelSection
from fedgp_flower.run.artefacts import read_run

NAME = "amortised"
DRAWS = 50
"""Of z and Z_G in a held-out bound."""
WORDS, TOPICS, SHOWN, MENTIONED = 400, 20, 10, "god"
SITES = {"vae": 10, "prodlda": 3}
KEYS: dict[str, dict[str, Any]] = {
    "vae": {"target": "digit", "sfvi.classes": 10, "sfvi.hidden": 64, "sfvi.latents": 2},
    "prodlda": {"target": "mentioned", "sfvi.classes": 2, "sfvi.hidden": 32, "sfvi.latents": TOPICS}
    | {"model.likelihood": "bernoulli", "sfvi.concentration": 0.1, "sfvi.learning-rate": 0.03},
}
COMMON: dict[str, Any] = {
    "split": 0,
    "standardise": False,
    "partitioner": "natural",
    "partition.column": "silo",
    "sfvi.samples": 1,
    "sfvi.initial-scale": 0.1,
    "sfvi.learning-rate": 0.02,
    "sfvi.prediction-draws": 20,
}
INFERENCE: dict[str, dict[str, Any]] = {
    "SFVI": {"method": "sfvi", "num-server-rounds": 300},
    "SFVI-Avg": {"method": "sfvi-avg", "num-server-rounds": 20, "sfvi.local-steps": 15},
}
OWN: dict[tuple[str, str], dict[str, Any]] = {("vae", "SFVI-Avg"): {"sfvi.learning-rate": 0.01}}
"""Of one model and inference; topics by averages have the rate that is best on training documents, that of SFVI."""


def written(name: str, frame: pd.DataFrame, held_out: int) -> Path:
    """A table whose last rows are split 0."""
    folder = (RUNS / NAME / "data").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    listing = {"n": len(frame), "n_splits": 1, "test": [list(range(len(frame) - held_out, len(frame)))]}
    with gzip.open(folder / f"{name}.splits.json.gz", "wt") as out:
        json.dump(listing, out)
    frame.to_parquet(folder / f"{name}.parquet")
    return folder / f"{name}.parquet"


def digits(data_dir: Path) -> tuple[pd.DataFrame, int]:
    """Black and white images, with 60 % of one digit at each site of ten; held-out ones are dealt likewise."""
    parts, rng = [], np.random.default_rng(0)
    for part, each in (("train", 200), ("t10k", 100)):
        x, y = images(data_dir, part)
        pools = [list(rng.permutation(np.flatnonzero(y == digit))) for digit in range(10)]
        many = round(0.6 * each)
        wanted = [[k] * many + [(k + 1 + i % 9) % 10 for i in range(each - many)] for k in range(SITES["vae"])]
        chosen = np.array([pools[digit].pop() for own in wanted for digit in own])
        small = x[chosen].reshape(-1, SIDE, 28 // SIDE, SIDE, 28 // SIDE).mean((2, 4)).reshape(len(chosen), -1) > 0.5
        own = pd.DataFrame(small.astype(float), columns=[f"p{i}" for i in range(SIDE**2)])
        silo = np.repeat([f"silo {k:02d}" for k in range(SITES["vae"])], each)
        parts.append(own.assign(silo=silo, digit=y[chosen].astype(float)))
    return pd.concat(parts, ignore_index=True), len(parts[1])


def documents(data_dir: Path) -> tuple[pd.DataFrame, int]:
    """Counts of the commonest words, and whether a document has one that is not among them; dealt at random."""
    packed = np.load(data_dir / "newsgroups" / "20news_bow.npz")
    vocabulary = np.array((data_dir / "newsgroups" / "vocab.txt").read_text().split())
    parts, rng = [], np.random.default_rng(0)
    commonest = None
    for part, rows in (("train", 1500), ("test", 750)):
        arrays = (packed[f"{part}_{name}"].astype(int) for name in ("data", "indices", "indptr", "shape"))
        *content, shape = arrays
        counts = sp.csr_matrix(tuple(content), shape=tuple(shape)).tocsc()
        if commonest is None:  # in how many training documents; the commonest fifty tell nothing apart
            order = np.argsort(-np.diff(counts.indptr), kind="stable")
            commonest = [v for v in order[50 : 51 + WORDS] if vocabulary[v] not in (MENTIONED, "_eos_")][:WORDS]
        words = counts[:, commonest].toarray()
        said = counts[:, list(vocabulary).index(MENTIONED)].toarray()[:, 0] > 0
        enough = rng.permutation(np.flatnonzero(words.sum(1) >= 10))[:rows]
        own = pd.DataFrame(words[enough].astype(float), columns=vocabulary[commonest])
        silo = [f"silo {k % SITES['prodlda']}" for k in range(len(enough))]
        parts.append(own.assign(silo=silo, mentioned=np.where(said[enough], "yes", "no")))
    return pd.concat(parts, ignore_index=True), len(parts[1])


def model_of(run: Mapping[str, Any], inputs: int) -> tuple[AmortisedModel, GlobalPosterior]:
    """What a run ended with."""
    saved = read_run(run["folder"]).posterior
    assert saved is not None
    arrays = {name: np.array(array) for name, array in saved.arrays.items()}
    options = SFVIOptions.model_validate(saved.model["structure"])
    model = model_at(options, ModelSection.model_validate(saved.model["model"]), inputs, arrays)
    assert isinstance(model, AmortisedModel)
    return model, GlobalPosterior.of(arrays)


@torch.no_grad()
def held_out_bound(model: AmortisedModel, q: GlobalPosterior, x: torch.Tensor) -> float:
    """Mean over rows of the bound of their features, over draws of z and Z_G."""
    generator, site = torch.Generator().manual_seed(0), model.prepare(x, x.new_zeros(len(x)))
    total = 0.0
    for _ in range(DRAWS):
        z_global = q.transform(torch.randn(model.global_size, generator=generator, dtype=torch.float64))
        noise = torch.randn(len(x), model.latents, generator=generator, dtype=torch.float64)
        total += float(model.bound(site, z_global, noise).mean()) / DRAWS
    return total


def coherence(topics: list[list[str]], present: pd.DataFrame) -> list[float]:
    """UMass (Mimno et al. 2011) of every topic: Σ_{m>l} log((D(v_m, v_l) + 1) / D(v_l)) over its first words.

    D counts the documents, here of training, in which words are.
    """
    found = []
    for words in topics:
        own = present[words[:SHOWN]].to_numpy(dtype=float)
        both = own.T @ own
        found.append(sum(np.log((both[m, k] + 1) / both[k, k]) for m in range(1, SHOWN) for k in range(m)))
    return found


def picture(model: AmortisedModel, q: GlobalPosterior, x: torch.Tensor, label: np.ndarray) -> Figure:
    """Held-out images in latent space by digit, and what the decoder makes of a grid of it."""
    figure = Figure(figsize=(9, 4.7), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2)
    with torch.no_grad():
        mean = model.encoded(x)[0].numpy()
        ticks = torch.linspace(-2.4, 2.4, 13, dtype=torch.float64)
        grid = torch.stack(torch.meshgrid(ticks, ticks.flip(0), indexing="xy"), -1).reshape(-1, 2)
        layer = model.layer(q.mean)[: model.num_inputs]
        seen = torch.sigmoid(model.code(grid) @ layer[:, :-1].T + layer[:, -1]).numpy()
    for digit in range(10):
        own = mean[label == digit]
        left.scatter(own[:, 0], own[:, 1], s=6, color=f"C{digit}", label=str(digit))
    figure.legend(loc="outside lower left", fontsize=7, ncols=10, markerscale=2)
    left.set(title="held-out images, mean of q(z | x)", xlabel="z₁", ylabel="z₂")
    tiles = seen.reshape(13, 13, SIDE, SIDE).transpose(0, 2, 1, 3).reshape(13 * SIDE, 13 * SIDE)
    right.imshow(tiles, cmap="gray_r", extent=(-2.6, 2.6, -2.6, 2.6))
    right.set(title="pixels that a latent makes", xlabel="z₁", ylabel="z₂")
    return figure


def figures_of(model: str, data_dir: Path) -> tuple[list[dict[str, Any]], dict[str, list[list[str]]]]:
    """Rows of the table, and the topics of every kind of inference."""
    frame, held = {"vae": digits, "prodlda": documents}[model](data_dir)
    names = [name for name in frame.columns if name not in ("silo", KEYS[model]["target"])]
    new = torch.tensor(frame[names].to_numpy()[-held:])
    keys = {**COMMON, **KEYS[model], "sfvi.model": model}
    tables = {name: (written(model, frame, held), SITES[model], own) for name, own in INFERENCE.items()}
    tables["pooled"] = (written(f"{model}-one", frame.assign(silo="all"), held), 1, INFERENCE["SFVI"])
    alone = {}
    for silo in sorted(frame["silo"].unique()):
        mine = pd.concat([frame[:-held][frame["silo"][:-held] == silo], frame[-held:].assign(silo=silo)])
        alone[silo] = (written(f"{model}-{silo.replace(' ', '-')}", mine, held), 1, INFERENCE["SFVI"])
    rows: list[dict[str, Any]] = []
    if model == "prodlda":
        present = frame[names][:-held] > 0
        [common] = coherence([list(present.sum().sort_values(ascending=False).index)], present)
        plain = np.log((frame[names][:-held].sum() + 1) / (frame[names][:-held].sum() + 1).sum())
        row = {"inference": "no topics", "bound": float((frame[names][-held:] @ plain).mean())}
        rows.append({**row, "coherence": common, "different words": SHOWN})
    topics: dict[str, list[list[str]]] = {}
    for inference, table in {**tables, **alone}.items():
        path, sites, own = table
        own = {**own, **OWN.get((model, inference), {}), "min-sites": min(sites, 2)}
        run = ensure(
            NAME, f"{model}-{inference.lower().replace(' ', '-')}", sites, {**keys, **own, "dataset": str(path)}
        )
        found, q = model_of(run, len(names))
        row = {"inference": "local-only" if inference in alone else inference, "bound": held_out_bound(found, q, new)}
        row |= {"nll": run["test"]["nll"], "accuracy": 100 * run["test"]["accuracy"]}
        if model == "prodlda":
            words = found.topics(q.mean, names)
            each = coherence(words, frame[names][:-held] > 0)
            row |= {"coherence": float(np.median(each)), "least": min(each), "most": max(each)}
            row["different words"] = len({word for topic in words for word in topic[:SHOWN]})
            topics.setdefault(row["inference"], words)
        elif inference == "SFVI":
            label = frame["digit"].to_numpy()[-held:]
            picture(found, q, new, label).savefig(RESULTS / f"{NAME}_vae.png")
        rows.append(row)
        print(model, row, flush=True)
    return rows, topics


AVERAGES = (
    ("sfvi-avg", 20, 15, 0.03),
    ("sfvi-avg", 20, 15, 0.01),
    ("sfvi", 300, 1, 0.03),
    ("sfvi-avg", 100, 3, 0.03),
)
"""Method, rounds, local steps, rate."""
WHY = (
    "`sfvi.model=prodlda` on the 1500 training documents of [topics](amortised_prodlda.md) alone: 1200 to train on at",
    "three sites, 300 held out, on which the bound is (nats a document). All networks start alike, so that topics of",
    "sites cannot be permuted before the first average. SFVI-Avg had 0.01 in the table of topics before; by the bound",
    "0.03 is better, and it has that now.",
    "",
)
LINES = {
    "vae": (
        f"![Latent space of SFVI]({NAME}_vae.png)",
        "",
        "MNIST, 2000 training and 1000 held-out images in black and white, 14 × 14 pixels, ten sites with 60",
        "% of one digit each; `sfvi.model=vae`, two latents, 64 hidden units, q(Z_G) over the decoder's last",
        "layer, which makes the digit too. Bound: of the pixels of a held-out image, in nats, mean over",
        "images and 50 draws of z and Z_G. Accuracy and NLL: of the digit, through the two latents. Local-",
        "only: mean over the sites' own models, on all held-out images. The paper that claims shared",
        "variational parameters for autoencoders (*Federated learning of sparse GPs*) has no figure to put",
        "beside these.",
        "",
    ),
    "prodlda": (
        f"20 Newsgroups, 1500 training and 750 held-out documents with at least ten of {WORDS} words, which",
        f"are the most widespread without the first fifty; three sites at random, {TOPICS} topics,",
        "`sfvi.model=prodlda`. The paper has 18 884 documents, 2000 words, 21 topics, 10⁵ steps; its Figure 2",
        "is a plot without numbers, in which SFVI-Avg is more coherent than SFVI, and both than sites alone.",
        "Coherence: UMass over the ten words of a topic that gain most against the background, in training",
        "documents of all sites; median over topics, then least and most. It rewards common words, whatever",
        "their theme: a topic of the ten commonest words scores what the first row says, so that more is not",
        "always better; how many different words the topics have is beside it. Bound: of the words of a held-out",
        "document, in the first row with the frequencies that words have in training, otherwise as the model has it;",
        f"in nats, without the multinomial coefficient. NLL: of whether it says *{MENTIONED}*.",
        "",
    ),
}


def averages(data_dir: Path) -> None:
    """Why SFVI-Avg is behind SFVI on documents: rounds, steps and rate, judged by a fifth of the training documents."""
    frame, held = documents(data_dir)
    frame = frame[:-held]
    held = len(frame) // 5
    names = [name for name in frame.columns if name not in ("silo", KEYS["prodlda"]["target"])]
    path, new, rows = written("averages", frame, held), torch.tensor(frame[names].to_numpy()[-held:]), []
    for method, rounds, steps, rate in AVERAGES:
        plan = {"method": method, "num-server-rounds": rounds, "sfvi.local-steps": steps, "sfvi.learning-rate": rate}
        keys = {**COMMON, **KEYS["prodlda"], "sfvi.model": "prodlda", "dataset": str(path), **plan}
        run = ensure(NAME, f"averages-{method}-{rounds}-{steps}-{rate}", SITES["prodlda"], keys)
        found, q = model_of(run, len(names))
        words = found.topics(q.mean, names)
        each = coherence(words, frame[names][:-held] > 0)
        row = {"method": method, "rounds": rounds, "local steps": steps, "rate": rate}
        row |= {"bound": held_out_bound(found, q, new), "coherence": float(np.median(each))}
        rows.append({**row, "different words": len({word for topic in words for word in topic[:SHOWN]})})
        print(rows[-1], flush=True)
        lines = [f"Made by `python simulations/{NAME}.py averages`, seed 0.", *WHY]
        write_table(
            RESULTS / f"{NAME}_averages.md", "Topics by SFVI-Avg: steps, rate, rounds", lines, pd.DataFrame(rows)
        )


SEEDS: dict[str, tuple[int, ...]] = {"SFVI": (0, 1), "SFVI-Avg": (0, 1, 2)}
BY_SEED = (
    "`sfvi.model=prodlda` on the documents of [topics](amortised_prodlda.md), with other draws: seed 0 is the run",
    "there. Coherence: median over the twenty topics; ±: its standard error, by 1000 bootstrap draws of topics; mean:",
    "over topics; by use: mean weighted by how much of the training documents a topic makes; by likeliest: the median,",
    "by the ten words a topic makes likeliest, background included. Weights: mean of the ten largest of every topic.",
    "",
)


def seeds(data_dir: Path) -> None:
    """How much of a difference in coherence is chance: other draws, and other topics."""
    frame, held = documents(data_dir)
    names = [name for name in frame.columns if name not in ("silo", KEYS["prodlda"]["target"])]
    train, new = frame[names][:-held], torch.tensor(frame[names].to_numpy()[-held:])
    path, rows = written("prodlda", frame, held), []
    for inference, own in INFERENCE.items():
        for seed in SEEDS[inference]:
            name = f"prodlda-{inference.lower()}" + (f"-seed-{seed}" if seed else "")
            keys = {**COMMON, **KEYS["prodlda"], "sfvi.model": "prodlda", "dataset": str(path), **own, "seed": seed}
            found, q = model_of(ensure(NAME, name, SITES["prodlda"], keys), len(names))
            each = np.array(coherence(found.topics(q.mean, names), train > 0))
            draws = np.random.default_rng(0).choice(each, (1000, len(each)))
            layer = found.layer(q.mean)[: len(names)].numpy()
            with torch.no_grad():
                use = found.encoded(torch.tensor(train.to_numpy()))[0].softmax(-1).mean(0).numpy()
            likely = [[names[v] for v in np.argsort(-column)] for column in (layer[:, :-1] + layer[:, -1:]).T]
            row = {"inference": inference, "seed": seed, "bound": held_out_bound(found, q, new)}
            row |= {"coherence": float(np.median(each)), "±": float(np.median(draws, 1).std()), "mean": each.mean()}
            row |= {"by use": float(each @ use), "by likeliest": float(np.median(coherence(likely, train > 0)))}
            rows.append({**row, "weights": float(np.sort(layer[:, :-1], 0)[-SHOWN:].mean())})
            print(rows[-1], flush=True)
            lines = [f"Made by `python simulations/{NAME}.py seeds`.", *BY_SEED]
            table = pd.DataFrame(rows)
            write_table(RESULTS / f"{NAME}_seeds.md", "Topics: what of their coherence is chance", lines, table)


def page(model: str, rows: list[dict[str, Any]], topics: Mapping[str, list[list[str]]]) -> None:
    """A page for each model."""
    frame = pd.DataFrame(rows)
    table = frame.groupby("inference", sort=False).mean().reset_index()
    title = {"vae": "An autoencoder that ten sites train together", "prodlda": "Topics of newsgroups by SFVI"}[model]
    lines = [f"Made by `python simulations/{NAME}.py {model}`, seed 0.", *LINES[model]]
    path = RESULTS / f"{NAME}_{model}.md"
    write_table(path, title, lines, table)
    if topics:
        shown = [f"| {k + 1} | {', '.join(words[:SHOWN])} |" for k, words in enumerate(topics["SFVI"])]
        path.write_text("\n".join([path.read_text(), "| topic of SFVI | words |", "| --- | --- |", *shown, ""]))


def main() -> None:
    """Everything asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(KEYS))
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("FEDGP_DATA", ".")))
    asked = parser.parse_args()
    for model in asked.models:
        if model in ("averages", "seeds"):
            {"averages": averages, "seeds": seeds}[model](asked.data_dir)
            continue
        page(model, *figures_of(model, asked.data_dir))


if __name__ == "__main__":
    main()
