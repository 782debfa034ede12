"""Check tables without training, as sites of a run: the agreed columns, warnings and problems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from fedgp_flower.agreement import agree
from fedgp_flower.config import CoreConfig
from fedgp_flower.data.sites import check_partition, count_sites, load_site, simulated_nodes
from fedgp_flower.data.tables import table_stem, tables_in
from fedgp_flower.errors import DataError, PolicyError
from fedgp_flower.privacy.policy import Rules
from fedgp_flower.typing import Json, Node

Checked: TypeAlias = tuple[Json, list[str], list[str]]
"""Summary as in ``metrics.json``, empty if no table can be used; warnings; problems."""


def check(files: Sequence[Path], config: CoreConfig) -> Checked:
    """Check every file as a site."""
    same_name = len({table_stem(file) for file in files}) < len(files)
    nodes = {str(file) if same_name else table_stem(file): {"data-path": str(file)} for file in files}
    names = {name: file.name for name, file in zip(nodes, files, strict=True)}
    summary, suspected, problems = _agreed(nodes, config, names)
    if config.partitioner != "iid":
        dealt = f"every file is a site, and `partitioner` = '{config.partitioner}' deals the rows of one table"
        problems = [f"{dealt}: leave it out, or set `dataset` to one file with all rows", *problems]
    return summary, suspected, problems


def plan(config: CoreConfig, sites: int) -> Checked:
    """Check the sites of a simulated run; 0 sites means those in the data."""
    if files := tables_in(config.dataset):
        return check(files, config)
    nodes = simulated_nodes(count_sites(config, sites))
    return _agreed({str(node["partition-id"]): node for node in nodes}, config, {})


def require_usable(config: CoreConfig, sites: int) -> None:
    """Raise DataError, once for all sites, if a simulated run cannot use the data."""
    if not tables_in(config.dataset):
        check_partition(config, sites)
    elif problems := plan(config, sites)[2]:
        raise DataError("\n".join(problems))


def _agreed(nodes: Mapping[str, Node], config: CoreConfig, names: Mapping[str, str]) -> Checked:
    """Check sites and their agreement; ``names`` are the names of their files for messages."""
    files = {name: name for name in nodes} | dict(names)
    described, problems, suspected = {}, [], []
    for name, node in nodes.items():
        try:
            site = Rules("query.describe").site(load_site(config, node))
        except PolicyError as error:
            problems.append(f"{files[name]}: {error}. Real sites go on without this one: leave the file out")
            continue
        except DataError as error:
            problems.append(str(error))
            continue
        described[name] = replace(site.describe(), label=name, dropped=site.dropped)
        suspected += [f"{files[name]}: {line}" for line in site.suspected().splitlines()]
        suspected += site.left_out.splitlines()
    try:
        agreement = agree(described, **config.agreement_options)
    except DataError as error:
        return {}, [], [*problems, *([str(error)] if described else [])]
    problems += [f"{files[site]}: {reason}" for site, reason in agreement.refused.items()]
    if config.design is not None:
        problems += filter(None, [config.design.unknown_reference(agreement.levels)])
    suspected += config.excluded
    suspected += [f"`{name}` is constant at every site and cannot help a model" for name in agreement.constant]
    return dict(agreement.data), suspected, problems
