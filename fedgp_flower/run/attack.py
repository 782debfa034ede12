"""``fedgp attack RUN``: attacks on a simulated run, for what the server saw and for what a reader of it sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from fedgp_flower.data.sites import SiteData, load_all_sites
from fedgp_flower.errors import RunError
from fedgp_flower.privacy.attacks import READER, Attack, attacked
from fedgp_flower.run.artefacts import RunData, read_checkpoint, read_run
from fedgp_flower.run.files import write_json
from fedgp_flower.run.predict import preparation_of, row_of
from fedgp_flower.run.registry import METHODS, load, parse_config

FILE = "attacks.json"
TOTAL, OTHERS = "total", "others"
TITLES = ("attack", "figure", "chance", "the server", "a reader of the posterior")


def attack(folder: Path) -> list[Attack]:
    """Attack a run and write what was reached into its folder.

    Under masks the server has the total alone, and attacks every site with that.

    Raises:
        RunError: the run is not simulated, its rows are not there, or nothing is known against its method.
    """
    run = read_run(folder)
    reference = row_of(run).attacks
    if not reference or run.posterior is None:
        able = ", ".join(repr(name) for name, method in METHODS.items() if method.attacks)
        raise RunError(f"{folder} is a run of {run.metrics.method!r}; attacks are known for {able}")
    config, sites = parse_config(run.config), rows_of(run)
    groups = {site: [own] for site, own in sites.items()}
    seen = load(reference)
    everyone, masked = list(sites.values()), "privacy" in run.metrics.method_details
    reader = seen(run, config, {READER: everyone})[READER]
    server = dict.fromkeys(sites, seen(run, config, {TOTAL: everyone})[TOTAL]) if masked else seen(run, config, groups)
    smallest = min(sites.values(), key=lambda own: len(own.x))
    others = seen(run, config, {OTHERS: [own for own in everyone if own is not smallest]})[OTHERS]
    found = attacked(server, reader, sites, others=others, seed=config.seed)
    write_json(folder / FILE, {"masked": masked, "attacks": [asdict(own) for own in found]})
    return found


def rows_of(run: RunData) -> dict[str, SiteData]:
    """The rows of a simulated run's sites, standardised as they agreed.

    Raises:
        RunError: the sites were real, or the rows are others now.
    """
    assert run.posterior is not None
    facts = read_checkpoint(run.path).facts["preparation"]
    if not facts["simulated"]:
        raise RunError(f"{run.path}: its sites are real machines, which keep their rows; only a simulation is attacked")
    raw = {own.site: own for own in load_all_sites(parse_config(run.config), len(facts["rows"]))}
    if {site: len(own.train) for site, own in raw.items()} != facts["rows"]:
        raise RunError(f"{run.path}: the rows of `dataset` are not those that the run had")
    return {site: own.encode(preparation_of(run.posterior)) for site, own in raw.items()}


def cells(attacks: Sequence[Attack]) -> list[list[str]]:
    """A row of text for each attack."""
    told = [(own, (own.chance, own.server, own.reader)) for own in attacks]
    return [[own.name, own.figure, *("–" if v is None else f"{v:.3f}" for v in values)] for own, values in told]
