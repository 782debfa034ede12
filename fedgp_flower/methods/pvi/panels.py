"""Report panels of PVI: q(β), strength of the factors, free energy, and the effect of forgetting a site."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from fedgp_flower.files import read_json
from fedgp_flower.gp.gaussian import Gaussian
from fedgp_flower.methods.pvi.messages import SAVED_LATENTS
from fedgp_flower.methods.pvi.model import ALPHA, SparseModel
from fedgp_flower.methods.pvi.options import PVIOptions
from fedgp_flower.methods.pvi.posterior import read_marginal
from fedgp_flower.options import ModelSection
from fedgp_flower.run.artefacts import Run
from fedgp_flower.run.figures import Z95, intervals
from fedgp_flower.run.registry import parse_config
from fedgp_flower.run.report import Panel, html_table
from fedgp_flower.run.summary import cell, number, show, title_of
from fedgp_flower.typing import NamedArrays

STRENGTHS = {
    "rows": "training rows",
    "points": "pseudo-observations",
    "weight": "their summed precision",
    "directions": "directions of v",
    "values": "precision of u",
    "weights": "mean precision",
    "inducing": "precision of Z",
    "hyper": "precision of β",
}
"""Column of the table of factors → its title."""
PARTS = {
    "fit": "expected log likelihood of all training rows",
    "kl_function": "KL of q(u) from its prior",
    "kl_inducing": f"KL of q(Z) from its prior, with weight {ALPHA:g}",
    "kl_hyper": "KL of q(β) from its prior",
    "kl_weights": "KL of q(θ) from its prior",
    "total": "free energy",
}
STRENGTHS_CAPTION = (
    "Information in each site's factor: the precision of tied pseudo-observations in units of a row with noise σ², the"
    " number of directions of the whitened inducing values v that it determines, and mean precisions; a prior has 1."
)
HYPER_CAPTION = (
    "Medians and 95 % intervals of the log-normal posterior; amplitudes and noise as standard deviations of the"
    " standardised target."
)


def panels(run: Run) -> list[Panel]:
    """Forgetting, posterior of the hyperparameters, factors, and free energy."""
    if run.saved is None:
        return []
    arrays = run.saved.arrays
    sections: list[Panel] = []
    if "hyper.mean" in arrays:  # otherwise sums determined Z and β
        section = ModelSection.model_validate({n: run.saved.model[n] for n in ("kernel", "ard", "likelihood")})
        inputs = run.saved.inputs
        names = [
            re.sub(r"(?<=lengthscale )(\d+)$", lambda found: f"of {inputs[int(found[0]) - 1]}", name)
            for name in SparseModel(section, len(inputs)).names
        ]
        sections.append(Panel("Posterior of the hyperparameters", hyperparameters(arrays, names), HYPER_CAPTION))
    if (run.path / "forgotten.json").exists():
        sections.insert(0, forgetting(read_json(run.path / "forgotten.json")))
    return [*sections, *product_panels(run)]


def product_panels(run: Run) -> list[Panel]:
    """Strength of the factors, and free energy."""
    details = run.metrics.method_details
    sections = [Panel("Strength of each factor", strength_table(details, run.metrics.labels), STRENGTHS_CAPTION)]
    if parts := details.get("free_energy"):
        caption = "The expected log likelihood less the divergences, in nats, estimates the log evidence"
        caption += (
            "; with α below 1 it is no lower bound." if "kl_inducing" in parts else " and is a lower bound of it."
        )
        rows = [(words, show(parts[name])) for name, words in PARTS.items() if name in parts]
        sections.append(Panel("Free energy", html_table(("part", "nats"), rows), caption))
    return sections


def hyperparameters(arrays: NamedArrays, names: list[str]) -> Figure:
    """Log-normal 95 % intervals of every hyperparameter."""
    mean = np.asarray(arrays["hyper.mean"])
    spread = Z95 * np.asarray(arrays.get("hyper.scale", np.zeros_like(mean)))
    ends = {"low": np.exp(mean - spread), "value": np.exp(mean), "high": np.exp(mean + spread)}
    return intervals(pd.DataFrame(ends, index=names), "value in standardised units", positive=True)


def strength_table(details: Mapping[str, Any], labels: Mapping[str, str]) -> str:
    """HTML table with the strength of the factors, one row per site; columns without values are left out."""
    strengths: Mapping[str, Mapping[str, float]] = details["factors"]
    shown = [name for name in STRENGTHS if any(name in each for each in strengths.values())]
    counts, place = {"rows", "points"}, {site: index for index, site in enumerate(labels)}
    rows = [
        (
            labels.get(site, site),
            str(details["visits"].get(site, 0)),
            *(f"{each[n]:,.0f}" if n in counts else show(number(each[n])) if n in each else "–" for n in shown),
        )
        for site, each in sorted(strengths.items(), key=lambda item: place.get(item[0], len(place)))
    ]
    return html_table(("site", "visits", *(STRENGTHS[name] for name in shown)), rows)


# ---- Forgetting a site ----------------------------------------------------------------------------------------------


def changes(before: Run, after: Run) -> dict[str, object]:
    """``divergence``, KL(after ‖ before) in nats by part of q, and ``remains``, what may still depend on the site."""
    divergence = {}
    if before.saved is not None and after.saved is not None:
        old, new = _densities(before.saved.arrays), _densities(after.saved.arrays)
        divergence = {name: float(new[name].kl(old[name])) for name in old if name in new}
    return {"divergence": divergence, "remains": _remains(before)}


def _densities(arrays: NamedArrays) -> dict[str, Gaussian]:
    distributions = [name for name, saved in SAVED_LATENTS.items() if f"{saved}.scale" in arrays]
    densities = {name: read_marginal(arrays, name).natural().gaussian for name in distributions}
    if "inducing.covariance" in arrays:
        moments = (torch.from_numpy(arrays[f"inducing.{part}"]) for part in ("mean", "covariance"))
        densities["whitened"] = Gaussian.from_moments(*moments)
    return densities


def _remains(before: Run) -> list[str]:
    config = parse_config(before.config)
    options = cast(PVIOptions, config.options)
    remains = ["the standardisation and the first inducing inputs, which all sites agreed on"]
    if options.inducing == "average":
        remains.append("the inducing inputs, an average over sites that included it")
    if options.agrees:
        remains.append("inducing inputs and hyperparameters, which all sites agreed on")
    if not (options.agrees and config.model.likelihood == "gaussian"):
        remains.append("factors of other sites, which were fitted given the site's; further visits update them")
    return remains


def forgetting(content: Mapping[str, Any]) -> Panel:
    """Panel from ``forgotten.json``: scores before and after, and changes of the posterior."""
    before, after = content["test_before"], content["test_after"]
    rows = [(title_of(name), cell(name, before[name]), cell(name, after[name])) for name in before if name in after]
    body = html_table(("held-out figure", "before", "after"), rows)
    symbols = {"inducing": "q(Z)", "hyper": "q(β)", "whitened": "q(v)"}
    moved = [f"{symbols[name]} moved by {show(value)} nats" for name, value in content["divergence"].items()]
    shifts = content["predictions"]
    if "rms_shift_in_sd" in shifts:
        moved.append(f"predictive means by {show(shifts['rms_shift_in_sd'])} standard deviations (root mean square)")
        moved.append(f"standard deviations by a factor of {show(shifts['sd_ratio'])}")
    if "mean_change_of_probability" in shifts:
        moved.append(f"class probabilities by {show(shifts['mean_change_of_probability'])} on average")
    removed = content["training_rows_removed"]
    caption = f"Run {content['from']} without site {content['label'] or content['site']}"
    caption += "" if removed is None else f" and its {removed:,} training rows"
    caption += f", after {content['rounds_after']} further rounds: {content['sites_after']} sites of "
    caption += f"{content['sites_before']}. Both columns score the same {content['test_rows']:,} held-out rows, "
    caption += f"those of the remaining sites. {'; '.join(moved)}. Parts that may still depend on the site: "
    return Panel("Effect of forgetting", body, f"{caption}{'; '.join(content['remains'])}.")
