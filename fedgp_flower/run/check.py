"""Look at tables as a run would, without training: every file is a site, and says what a server would hear of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fedgp_flower.agreement import agree
from fedgp_flower.config import CoreConfig
from fedgp_flower.data.sites import RawSite, load_site, natural_sites, simulated_nodes
from fedgp_flower.data.tables import table_stem
from fedgp_flower.errors import DataError
from fedgp_flower.typing import Json


@dataclass(frozen=True, slots=True)
class Checked:
    """What a run would know of some tables before it trains."""

    data: Json
    """As in ``metrics.json``; empty where no table can be used."""
    problems: tuple[str, ...]
    suspected: tuple[str, ...] = ()


def check(files: Sequence[Path], config: CoreConfig) -> Checked:
    """Read every file as a site, and agree on columns."""
    nodes = {table_stem(file): {"data-path": str(file)} for file in files}
    return agreed({name: partial(load_site, config, node) for name, node in nodes.items()}, config)


def plan(config: CoreConfig, sites: int) -> Checked:
    """What a simulated run would train on; 0 sites takes every natural group."""
    nodes = simulated_nodes(sites or natural_sites(config))
    return agreed({str(node["partition-id"]): partial(load_site, config, node) for node in nodes}, config)


def agreed(sites: Mapping[str, Callable[[], RawSite]], config: CoreConfig) -> Checked:
    """What these sites agree on."""
    described, dropped, problems, suspected = {}, 0, [], []
    for name, load in sites.items():
        try:
            site = load()
        except DataError as error:
            problems.append(str(error))
            continue
        described[name] = site.describe()
        dropped += site.dropped
        suspected += [f"{name}: {site.suspected}"] if site.suspected else []
    try:
        agreement = agree(described, **config.terms)
    except DataError as error:
        return Checked({}, (*problems, *([str(error)] if described else [])))
    problems += [f"{site}: {reason}" for site, reason in agreement.refused.items()]
    problems += [f"`{name}` is constant at every site, of no use to a model" for name in agreement.constant]
    counted = {"sites": len(agreement.rows), "rows": sum(agreement.rows.values()), "inputs": len(agreement.names)}
    return Checked({**counted, "dropped": dropped, "columns": agreement.columns}, tuple(problems), tuple(suspected))
