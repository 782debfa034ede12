"""How server and sites meet: who is there, which columns they share, and how data are standardised."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from fedgp_flower.agreement import (
    Agreement,
    SiteDescription,
    agree,
    encoded_sums,
    overview_lines,
    squares_about,
    summed_arrays,
)
from fedgp_flower.config import RunConfig
from fedgp_flower.errors import DataError, ProtocolError, RunError
from fedgp_flower.follow_up import edges_around, life_table
from fedgp_flower.outcome import Snapshot
from fedgp_flower.records import TRUST
from fedgp_flower.shared_messages import (
    Centres,
    ColumnSquares,
    ColumnSums,
    Described,
    Edges,
    Nothing,
    RobustMoments,
    RobustScales,
    TargetMoments,
    TargetPowers,
    TimeCounts,
)
from fedgp_flower.transforms import Transform
from strategies.server.network import Network, pause_after
from strategies.server.questions import A, Asking, Summed, Total

logger = logging.getLogger("fedgp")


def described(met: Agreement, site: str) -> Described:
    """A site's rows, and what follows of them, standardised, from how the site described them, if it did."""
    rows = met.rows[site]
    if site not in met.sums:
        return Described(rows)
    mean, scale = (np.append(met.arrays[f"input.{part}"], met.arrays[f"target.{part}"]) for part in ("mean", "scale"))
    sums = met.sums[site]
    squares = squares_about(rows, sums, mean) / scale**2
    means = (sums[:-1, 0] / rows - mean[:-1]) / scale[:-1]
    spread = np.maximum(squares[:-1] / rows - means**2, 0.0)
    return Described(rows, squares[:-1], float(squares[-1]), means, np.sqrt((rows - 1) * spread))


def restored(snapshot: Snapshot) -> Agreement:
    """What the sites of a checkpoint had agreed on."""
    facts = snapshot.facts["preparation"]
    arrays = {name: array for name, array in snapshot.arrays.items() if name.startswith(("input.", "target."))}
    return Agreement(arrays, **{**facts, "names": tuple(facts["names"])})


def agreed(network: Network, config: RunConfig, described: Mapping[str, SiteDescription]) -> Agreement:
    """What sites agree on from what each says of its columns; one that the others cannot agree with is dismissed."""
    found = agree({site: told for site, told in described.items() if site in network.nodes}, **config.agreement_options)
    for site, reason in found.refused.items():
        network.dismiss(site, reason)
    network.require(config.min_sites)
    if not any(described[site].bare for site in found.rows):
        _tell(found)
    return found


def _tell(found: Agreement) -> None:
    if found.constant:
        logger.warning("constant at every site, of no use to a model: %s", ", ".join(found.constant))
    for line in overview_lines(found.data):
        logging.getLogger("fedgp.data").info("%s", line)
    for warning in found.warnings:
        logger.warning("%s", warning)


def meet(network: Network, config: RunConfig) -> dict[str, SiteDescription]:
    """Wait for the sites and hear their descriptions; none says anything of its rows, or all do."""
    described = _gather(network, config)
    open_sites = {site: told for site, told in described.items() if not told.bare}
    if not open_sites:
        return described
    for site in sorted(described.keys() - open_sites.keys()):
        network.dismiss(site, "it describes its columns under masks alone, and other sites have no trust file")
    network.require(config.min_sites)
    return open_sites


def from_totals(network: Network, config: RunConfig, met: Agreement) -> Asking[Agreement]:
    """What sites agree on from two totals, of columns in their mean size: masks have room for the squares."""
    first: Summed[ColumnSums] = yield Total(ColumnSums, Nothing())
    sums = _of_all(first, network)
    rows = sum(met.rows[site] for site in first.sites)
    filled = np.maximum(rows - sums.missing, 1)
    size = np.where(sums.sizes > 0, sums.sizes / filled, 1.0)
    second: Summed[ColumnSquares] = yield Total(ColumnSquares, Centres(sums.sums / filled, size), first.sites)
    squares = _of_all(second, network, first.sites)
    parts = sums.sums, squares.residual * size, squares.squares * size**2
    arrays = summed_arrays(met.schema, parts, sums.missing, sums.levels, rows)
    found = agree(
        {"all sites": SiteDescription(arrays, met.schema, rows, dropped=int(sums.dropped))}, **config.agreement_options
    )
    here = {site: count for site, count in met.rows.items() if site in network.nodes}
    found = replace(found, rows=here, labels=met.labels, simulated=met.simulated, sums={})
    network.require(config.min_sites)
    _tell(found)
    return found


def _of_all(summed: Summed[A], network: Network, sites: tuple[str, ...] | None = None) -> A:
    """A total to which every site added something."""
    if summed.total is None or summed.silent or summed.sites != (sites or summed.sites):
        raise RunError(
            "the columns of some site are in no total: its numbers are not finite or too large for masks; write such a"
            f" column in larger units. {network.latest_failures()}"
        )
    return summed.total


def meet_again(network: Network, config: RunConfig, saved: Agreement) -> None:
    """Hear the sites of a run that is resumed; what they had agreed on stays as it was."""
    described = _gather(network, config)
    changed = [site for site, told in described.items() if saved.rows.get(site) != told.num_examples]
    if saved.simulated and changed:
        raise RunError(
            f"cannot resume: the run has {len(saved.rows)} simulated sites, and the rows of {len(changed)} of the "
            f"{len(described)} sites there now are not theirs. Resume with the same number of sites and the same data."
        )
    _welcome(network, saved, described)


def _gather(network: Network, config: RunConfig) -> dict[str, SiteDescription]:
    described: dict[str, SiteDescription] = {}
    deadline = time.monotonic() + config.wait_seconds
    while True:
        described |= _introduced(network)
        partitions = max((told.partitions for told in described.values()), default=0)
        wanted = config.sites or partitions or config.min_sites
        known = bool(config.sites or partitions or not described)  # else more sites may be on their way
        if len(network.heard if known else described) >= wanted:
            network.require(config.min_sites)
            return described
        if time.monotonic() > deadline:
            if len(described) >= config.min_sites:
                logger.warning("%d of %d sites after %g s; starting", len(described), wanted, config.wait_seconds)
                return described
            raise RunError(
                f"{len(described)} usable site(s) of {len(network.heard)} heard after `wait-seconds` = "
                f"{config.wait_seconds:g}; wanted {wanted}. "
                + "; ".join(f"{failure.site}: {failure.reason}" for failure in network.failures)
            )
        time.sleep(0.1)


def _introduced(network: Network) -> dict[str, SiteDescription]:
    """Descriptions by nodes never heard of."""
    found: dict[str, SiteDescription] = {}
    for site, answer in network.introduce("query.describe").items():
        texts, count = answer.texts, answer.number
        if not {"schema", "label"} <= texts.keys():
            network.dismiss(site, "its description lacks a schema or a label: other version of the app")
            continue
        counts = count("dropped"), count("partitions"), count("bare") > 0, count(TRUST) > 0
        found[site] = SiteDescription(answer.arrays, texts["schema"], count("num-examples"), texts["label"], *counts)
    return found


def greet(network: Network, met: Agreement) -> None:
    """Hear nodes that are new since the last round: a site that restarted, or one that joins late."""
    if set(network.grid.get_node_ids()) - network.heard:
        _welcome(network, met, _introduced(network))


def reunite(network: Network, met: Agreement, sites: Iterable[str]) -> None:
    """Wait until sites that missed a round are there again, at most the timeout, under another node or the same."""
    begun, missing = time.monotonic(), set(sites)
    while True:
        greet(network, met)
        online = set(network.grid.get_node_ids())
        missing -= {site for site in missing if network.nodes.get(site) in online}
        waited = time.monotonic() - begun
        if not missing or waited > network.timeout:
            return
        time.sleep(pause_after(waited))


def _welcome(network: Network, met: Agreement, described: Mapping[str, SiteDescription]) -> None:
    for site, told in described.items():
        try:
            met.sums[site] = encoded_sums(told, met.schema)
        except ProtocolError as error:
            network.dismiss(site, str(error))
            continue
        logger.info("site %s %s", site, "is back" if site in met.rows else "joined")
        met.labels[site] = told.label
        met.rows[site] = told.num_examples


def transformed(met: Agreement, name: str, sites: tuple[str, ...]) -> Asking[Agreement]:
    """What the sites agreed on, with the target transformed by the power λ that maximises −½ N log σ² + Σ log g'(y)."""
    powers = np.array(Transform(name).powers)
    middle = np.array(met.training_target["mean"])
    centres = np.array([float(Transform(name, power).forward(middle)) for power in powers])
    summed: Summed[TargetMoments] = yield Total(TargetMoments, TargetPowers(powers, centres), sites)
    if summed.total is None:
        raise DataError(f"no site answered how its target is spread under `transform.target` = '{name}'")
    best, mean, scale = chosen(summed.total, centres)
    if not scale > 0:
        raise DataError(f"the target is one number everywhere under `transform.target` = '{name}'")
    schema = json.loads(met.schema)
    schema["target"]["transform"] = Transform(name, float(powers[best])).as_json()
    scales = {"target.mean": np.array(mean), "target.scale": np.array(scale)}
    unknown = np.full((1, 3), np.nan)  # what a site said of its target was of the one before
    sums = {site: np.vstack([known[:-1], unknown]) for site, known in met.sums.items()}
    return replace(met, schema=json.dumps(schema), arrays={**met.arrays, **scales}, sums=sums)


def followed(met: Agreement, sites: tuple[str, ...]) -> Asking[Agreement]:
    """What the sites agreed on, with how long rows were followed, from counts of times in bins."""
    edges = edges_around(met.training_target["mean"])
    summed: Summed[TimeCounts] = yield Total(TimeCounts, Edges(edges), sites, sizes={"B": len(edges) + 1})
    if summed.total is None:
        raise DataError("no site answered how long its rows were followed")
    return replace(met, arrays={**met.arrays, **life_table(summed.total.counts, edges).to_arrays()})


def chosen(sums: TargetMoments, centres: np.ndarray) -> tuple[int, float, float]:
    """Position of the best power, and mean and standard deviation of t there."""
    rows, offset = float(sums.count), sums.first / sums.count
    variance = sums.second / rows - offset**2
    with np.errstate(divide="ignore", invalid="ignore"):
        likelihood = np.where(variance > 0, -rows / 2 * np.log(variance) + sums.slopes, -np.inf)
    best = int(np.argmax(likelihood))
    return best, float(centres[best] + offset[best]), float(np.sqrt(max(variance[best], 0.0)))


SPREADS = (8.0, 2.0, 1.25, 1.05)
"""Ratios of neighbouring scales, an exchange each."""
CANDIDATES = 8
NORMAL = 0.6120031809624805
"""Scale of Cauchy's distribution that fits a normal one of sd 1 best: E 1/(1 + z²/s²) = ½."""


def centred(met: Agreement, sites: tuple[str, ...]) -> Asking[Agreement]:
    """What the sites agreed on, with the target standardised by a middle and spread that outliers do not move.

    They maximise Cauchy's likelihood, whose slopes vanish where Σ w z = 0 and Σ w z² = N (Maronna et al. 2006, §2.7),
    and are as the mean and sd where targets are normal. Up to half of the rows may lie anywhere.
    """
    centre, scale = met.training_target["mean"], met.training_target["sd"]
    place = CANDIDATES - 1.0
    """Of the current scale among the candidates."""
    for ratio in SPREADS:
        scales = scale * ratio ** (np.arange(CANDIDATES) - place)
        summed: Summed[RobustMoments] = yield Total(RobustMoments, RobustScales(float(centre), scales), sites)
        if summed.total is None:
            raise DataError("no site answered how its target is spread")
        sums = summed.total
        excess = sums.second / sums.count - 1.0  # falls as the scale grows
        if not excess[0] > 0:
            return met  # most targets are one number
        position = float(np.interp(0.0, -excess, np.arange(CANDIDATES)))
        scale = float(np.exp(np.interp(position, np.arange(CANDIDATES), np.log(scales))))
        centre += float(np.interp(position, np.arange(CANDIDATES), scales * sums.first / sums.weights))
        place = (CANDIDATES - 1) / 2
    found = {"target.mean": np.array(centre), "target.scale": np.array(scale / NORMAL)}
    return replace(met, arrays={**met.arrays, **found})
