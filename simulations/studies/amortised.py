"""One encoder for all sites: an autoencoder of MNIST and topics of newsgroups.

`vae`: 2000 training and 1000 held-out images in black and white, 14 × 14 pixels, ten sites with 60 % of one digit
each; two latents, 64 hidden units, q(Z_G) over the decoder's last layer, which makes the digit too. Bound: of the
pixels of a held-out image, in nats, mean over images and 50 draws of z and Z_G. Accuracy and NLL: of the digit.

`prodlda`: 20 Newsgroups, 1500 training and 750 held-out documents with at least ten of 400 words, which are the most
widespread without the first fifty; three sites at random, 20 topics. Coherence: UMass (Mimno et al. 2011) over the ten
words of a topic that gain most against the background, in training documents of all sites, median over topics. It
rewards common words, whatever their theme: a topic of the ten commonest words scores what the row `no topics` says.
Bound: of the words of a held-out document, in nats, without the multinomial coefficient. NLL and accuracy: of whether
it says *god*. The paper has 18 884 documents, 2000 words, 21 topics, 10⁵ steps; its Figure 2 is a plot without numbers,
in which SFVI-Avg is more coherent than SFVI, and both than sites alone.

Pooled: the same model of all rows in one place. Local-only: mean over the sites' own models, on all held-out rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp
import torch

from simulations import common
from simulations.common import Row, averaged, data_dir, fit, images, posterior_arrays, train_and_test

DRAWS, WORDS, SHOWN, MENTIONED = 50, 400, 10, "god"
SITES = {"vae": 10, "prodlda": 3}
TARGET = {"vae": "digit", "prodlda": "mentioned"}
KEYS: dict[str, dict[str, Any]] = {
    "vae": {"sfvi.hidden": 64, "sfvi.latents": 2, "sfvi.learning-rate": 0.02},
    "prodlda": {"model.likelihood": "bernoulli", "sfvi.hidden": 32, "sfvi.latents": 20} | {"sfvi.learning-rate": 0.03},
}
COMMON: dict[str, Any] = {
    "split": 0,
    "partitioner": "natural",
    "partition.column": "silo",
    "sfvi.samples": 1,
    "sfvi.initial-scale": 0.1,
}
INFERENCE: dict[str, dict[str, Any]] = {
    "SFVI": {"method": "sfvi", "num-server-rounds": 300},
    "SFVI-Avg": {"method": "sfvi-avg", "num-server-rounds": 20, "sfvi.local-steps": 15},
}
SLOWER = {("vae", "SFVI-Avg"): {"sfvi.learning-rate": 0.01}}


def digits() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Black and white images, with 60 % of one digit at each site of ten; held-out ones are dealt likewise."""
    parts, rng = [], np.random.default_rng(0)
    for part, each in (("train", 200), ("t10k", 100)):
        x, y = images(part, 14)
        pools = [list(rng.permutation(np.flatnonzero(y == digit))) for digit in range(10)]
        many = round(0.6 * each)
        wanted = [[k] * many + [(k + 1 + i % 9) % 10 for i in range(each - many)] for k in range(10)]
        chosen = np.array([pools[digit].pop() for own in wanted for digit in own])
        frame = pd.DataFrame((x[chosen] > 0.5).astype(float), columns=[f"p{i}" for i in range(196)])
        silo = np.repeat([f"silo {k:02d}" for k in range(10)], each)
        parts.append(frame.assign(silo=silo, digit=y[chosen].astype(float)))
    return parts[0], parts[1]


def documents() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Counts of the commonest words, and whether a document has one that is not among them; dealt at random."""
    packed = np.load(data_dir() / "newsgroups" / "20news_bow.npz")
    vocabulary = np.array((data_dir() / "newsgroups" / "vocab.txt").read_text(encoding="utf-8").split())
    parts, rng, commonest = [], np.random.default_rng(0), None
    for part, rows in (("train", 1500), ("test", 750)):
        *content, shape = (packed[f"{part}_{name}"].astype(int) for name in ("data", "indices", "indptr", "shape"))
        counts = sp.csr_matrix(tuple(content), shape=tuple(shape)).tocsc()
        if commonest is None:  # in how many training documents; the commonest fifty tell nothing apart
            order = np.argsort(-np.diff(counts.indptr), kind="stable")
            commonest = [v for v in order[50 : 51 + WORDS] if vocabulary[v] not in {MENTIONED, "_eos_"}][:WORDS]
        words = counts[:, commonest].toarray()
        said = counts[:, list(vocabulary).index(MENTIONED)].toarray()[:, 0] > 0
        enough = rng.permutation(np.flatnonzero(words.sum(1) >= 10))[:rows]
        frame = pd.DataFrame(words[enough].astype(float), columns=vocabulary[commonest])
        silo = [f"silo {k % SITES['prodlda']}" for k in range(len(enough))]
        parts.append(frame.assign(silo=silo, mentioned=np.where(said[enough], "yes", "no")))
    return parts[0], parts[1]


def coherence(topics: list[list[str]], present: pd.DataFrame) -> list[float]:
    """UMass of every topic: Σ_{m>l} log((D(v_m, v_l) + 1) / D(v_l)), D the number of documents with these words."""
    found = []
    for words in topics:
        there = present[words[:SHOWN]].to_numpy(dtype=float)
        both = there.T @ there
        found.append(sum(np.log((both[m, k] + 1) / both[k, k]) for m in range(1, SHOWN) for k in range(m)))
    return found


@torch.no_grad()
def scores(run: Row, new: pd.DataFrame, train: pd.DataFrame) -> Row:
    """Held-out bound, and what is known of topics."""
    if common.CHECKING:
        return {}
    from fedgp_flower.methods.family import GlobalPosterior
    from fedgp_flower.methods.sfvi.classes import AmortisedModel
    from fedgp_flower.methods.sfvi.learner import model_at
    from fedgp_flower.run.registry import parse_config
    from fedgp_flower.run.user_config import read_config

    arrays, config = posterior_arrays(run), parse_config(read_config(run["folder"] / "config.toml"))
    x = torch.tensor(new.to_numpy())
    own: Any = config.options
    options = own.of_classes({"vae": 10, "prodlda": 2}[own.model])
    model, q = model_at(options, config.model, x.shape[1], arrays), GlobalPosterior.of(arrays)
    assert isinstance(model, AmortisedModel)
    generator, site, bound = torch.Generator().manual_seed(0), model.prepare(x, x.new_zeros(len(x))), 0.0
    for _ in range(DRAWS):
        z_global = q.transform(torch.randn(model.global_size, generator=generator, dtype=torch.float64))
        noise = torch.randn(len(x), model.latents, generator=generator, dtype=torch.float64)
        bound += float(model.bound(site, z_global, noise).mean()) / DRAWS
    row: Row = {"bound": bound, "NLL": run["test"]["nll"], "accuracy, %": 100 * run["test"]["accuracy"]}
    if own.model == "prodlda":
        topics = model.topics(q.mean, list(new))
        each = coherence(topics, train > 0)
        row |= {"coherence": float(np.median(each)), "least": min(each), "most": max(each)}
        row["different words"] = len({word for topic in topics for word in topic[:SHOWN]})
    return row


def study(models: tuple[str, ...] = tuple(KEYS), seeds: tuple[int, ...] = (0,)) -> Iterator[Row]:
    """A row for each model and inference."""
    for model in models:
        make = {"vae": digits, "prodlda": documents}[model]
        train, new = make()
        words = [name for name in train if name not in {"silo", TARGET[model]}]
        arms = {name: (train, new, SITES[model], keys) for name, keys in INFERENCE.items()}
        arms["pooled"] = (train.assign(silo="all"), new.assign(silo="all"), 1, INFERENCE["SFVI"])
        for silo in sorted(train["silo"].unique()):
            arms[silo] = (train[train["silo"] == silo], new.assign(silo=silo), 1, INFERENCE["SFVI"])
        rows = []
        for seed in seeds:
            for arm, (rows_of_arm, held_out, sites, keys) in arms.items():
                kind = "sites" if arm in INFERENCE else arm.replace(" ", "-")
                path = train_and_test(f"{model}-{kind}", lambda t=rows_of_arm, h=held_out: (t, h))
                flat = {**COMMON, **KEYS[model], **keys, **SLOWER.get((model, arm), {}), "seed": seed, "dataset": path}
                run = fit({**flat, "target": TARGET[model], "sfvi.model": model, "min-sites": min(sites, 2)}, 0)
                name = "local-only" if arm.startswith("silo") else arm
                rows.append({"table": model, "inference": name, **scores(run, new[words], train[words])})
        if model == "prodlda":
            present = train[words] > 0
            common = coherence([list(present.sum().sort_values(ascending=False).index)], present)[0]
            rows.append({"table": model, "inference": "no topics", "coherence": common, "different words": SHOWN})
        yield from averaged(rows, ("table", "inference"))
