"""Mixed models from sums against lme4 of all rows.

Each set is generated, but for the children of six cities. References are lme4's with tight tolerances: lmer by REML;
glmer with 25 nodes for one random effect, else Laplace. They are in `mixed_models_lme4.json`; `python -m
simulations.run mixed_models --reference-only` makes them anew and needs R with lme4. Differences are the largest of
fixed effects in standard errors, and of standard errors, standard deviations and ends of profile intervals
(`confint`, at `delta = 0.05`) as shares of themselves. lme4 leaves a constant out of the log likelihood of counts by
quadrature.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from simulations.common import RESULTS, Row, data_dir, fit, kept_table

LME4 = RESULTS / "mixed_models_lme4.json"
SCRIPT = """
library(lme4)
args <- commandArgs(TRUE)
d <- read.csv(args[1], stringsAsFactors = TRUE)
f <- as.formula(args[2])
if (args[3] == "gaussian") {
  m <- lmer(f, d, control = lmerControl(optimizer = "nloptwrap", optCtrl = list(
    xtol_abs = 1e-14, xtol_rel = 1e-14, ftol_abs = 1e-14, ftol_rel = 1e-15, maxeval = 1e5)))
} else {
  m <- glmer(f, d, family = if (args[3] == "poisson") poisson else binomial, nAGQ = as.integer(args[4]),
             control = glmerControl(optimizer = "bobyqa", tolPwrss = 1e-13,
                                    optCtrl = list(rhoend = 1e-10, maxfun = 1e6)))
}
v <- as.data.frame(VarCorr(m))
v <- v[is.na(v$var2), ]
write(sprintf("%.15g", c(length(fixef(m)), fixef(m), sqrt(diag(as.matrix(vcov(m)))), v$sdcor, logLik(m), AIC(m))), "")
p <- confint(m, method = "profile", delta = 0.05, devtol = 1e-9)
write(sprintf("p%.15g", sort(p)), "")
"""


def slopes() -> pd.DataFrame:
    """Like sleepstudy: ten days of 18 subjects whose intercepts and slopes differ."""
    draw = np.random.default_rng(0)
    subject, days = np.repeat(np.arange(18), 10), np.tile(np.arange(10.0), 18)
    b = draw.normal(size=(18, 2)) @ np.linalg.cholesky([[600.0, 30.0], [30.0, 35.0]]).T
    y = 251 + b[subject, 0] + (10.5 + b[subject, 1]) * days + draw.normal(0, 25, 180)
    return pd.DataFrame({"subject": [f"s{s}" for s in subject], "days": days, "reaction": y})


def crossed() -> pd.DataFrame:
    """Like Penicillin: 24 plates, each with every one of six samples."""
    draw = np.random.default_rng(1)
    plate, sample = np.repeat(np.arange(24), 6), np.tile(np.arange(6), 24)
    y = 23 + draw.normal(0, 0.85, 24)[plate] + draw.normal(0, 1.9, 6)[sample] + draw.normal(0, 0.55, 144)
    return pd.DataFrame({"plate": [f"p{p}" for p in plate], "sample": [f"s{s}" for s in sample], "diameter": y})


def counts() -> pd.DataFrame:
    """Counts with exposure: 60 wards of twelve clinics in six months."""
    draw = np.random.default_rng(2)
    ward = np.repeat(np.arange(60), 6)
    beds, drug = draw.uniform(5, 60, 360), draw.integers(0, 2, 360)
    rate = np.exp(-3 + 0.4 * drug + draw.normal(0, 0.5, 60)[ward] + draw.normal(0, 0.7, 12)[ward // 5])
    names = {"clinic": [f"c{w // 5}" for w in ward], "ward": [f"w{w}" for w in ward]}
    return pd.DataFrame({**names, "drug": drug, "beds": beds, "falls": draw.poisson(beds * rate)})


def schools() -> pd.DataFrame:
    """Pupils in classes in schools: nested factors, a category, an interaction."""
    draw = np.random.default_rng(3)
    school = np.repeat(np.arange(12), 40)
    class_ = np.tile(np.repeat(np.arange(4), 10), 12)
    kind, hours = draw.choice(["arts", "maths", "music"], 480), draw.gamma(3, 2, 480)
    effect = pd.Series(kind).map({"arts": 0.0, "maths": 2.0, "music": -1.0}).to_numpy()
    y = 50 + effect + 0.8 * hours + draw.normal(0, 4, 12)[school] + draw.normal(0, 2, (12, 4))[school, class_]
    table = {"school": [f"n{s}" for s in school], "room": class_, "kind": kind, "hours": hours}
    return pd.DataFrame({**table, "score": y + draw.normal(0, 5, 480)})


def ohio() -> pd.DataFrame:
    """The children of six cities."""
    return pd.read_csv(data_dir() / "ohio.csv.gz")


SETS: dict[str, tuple[Callable[[], pd.DataFrame], str, str, int, int]] = {
    "slopes": (slopes, "reaction ~ days + (days | subject)", "gaussian", 1, 5),
    "independent slopes": (slopes, "reaction ~ days + (days || subject)", "gaussian", 1, 5),
    "crossed": (crossed, "diameter ~ 1 + (1 | plate) + (1 | sample)", "gaussian", 1, 1),
    "nested": (schools, "score ~ kind * hours + (1 | school / room)", "gaussian", 1, 4),
    "counts": (counts, "falls ~ drug + offset(log(beds)) + (1 | ward)", "poisson", 25, 5),
    "counts, nested": (counts, "falls ~ drug + offset(log(beds)) + (1 | clinic / ward)", "poisson", 1, 5),
    "six cities": (ohio, "resp ~ smoke * age + (1 | id)", "bernoulli", 25, 10),
}
"""Table, formula, likelihood, nodes of the reference, sites."""


def reference(name: str) -> dict[str, Any]:
    """The figures of lme4."""
    make, formula, family, nodes, _ = SETS[name]
    with tempfile.TemporaryDirectory() as folder:
        path, script = Path(folder) / "table.csv", Path(folder) / "fit.R"
        make().to_csv(path, index=False)
        script.write_text(SCRIPT, encoding="utf-8")
        words = ["Rscript", str(script), str(path), formula, family, str(nodes)]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
    count, *numbers = (float(word) for word in done.stdout.split() if word[0] != "p")
    size, ends = int(count), [float(word[1:]) for word in done.stdout.split() if word[0] == "p"]
    parts = {"fixed": numbers[:size], "se": numbers[size : 2 * size], "sd": numbers[2 * size : -2], "profile": ends}
    return parts | {"log_likelihood": numbers[-2], "aic": numbers[-1]}


def keys(name: str) -> dict[str, Any]:
    """The configuration of a set, without its table."""
    _, formula, family, _, _ = SETS[name]
    return {"formula": formula, "model.likelihood": family, "test-fraction": 0.0, "min-sites": 1}


def apart(found: dict[str, Any], known: dict[str, Any]) -> Row:
    """How far estimates are from the reference."""
    if "effects" not in found:  # keys alone are checked
        return {}
    fixed, random = found["effects"], [row for row in found["random"] if row["kind"] == "sd"]
    mean, se = (np.array([row[part] for row in fixed]) for part in ("estimate", "se"))
    sd = np.array(sorted(row["estimate"] for row in random))
    told: Row = {}
    if known["profile"]:
        ends = [row[f"profile_{end}"] for row in (*fixed, *found["random"]) for end in ("low", "high")]
        told = {"profile": float(np.abs(np.sort(ends) / known["profile"] - 1).max())}
    return told | {
        "effects": float(np.abs((mean - known["fixed"]) / known["se"]).max()),
        "standard errors": float(np.abs(se / known["se"] - 1).max()),
        "sd": float(np.abs(sd / np.sort(known["sd"]) - 1).max()),
        "log likelihood": found["log_likelihood"] - known["log_likelihood"],
    }


def study(sets: tuple[str, ...] = tuple(SETS), reference_only: bool = False) -> Iterator[Row]:
    """A row for each set, plain and under masks; or the references, and nothing else."""
    if reference_only:
        LME4.write_text(json.dumps({name: reference(name) for name in SETS}, indent=1) + "\n", encoding="utf-8")
        return
    known = json.loads(LME4.read_text(encoding="utf-8"))
    for name in sets:
        make, *_, sites = SETS[name]
        path = kept_table(name.replace(", ", "-").replace(" ", "-"), make)
        for masked in (False, True)[: 1 + (sites >= 3)]:
            found = fit({**keys(name), "dataset": path, "privacy.secure-aggregation": masked}, sites)
            row: Row = {"set": name, "sites": sites, "masks": "yes" if masked else "no"}
            yield (
                row | {"exchanges": found["method_details"]["exchanges"]} | apart(found["method_details"], known[name])
            )
