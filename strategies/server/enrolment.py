"""Enrolment: find the sites, agree on shared columns, and standardise the data."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from fedgp_flower import shared_messages as wire
from fedgp_flower.agreement import (
    COVARIANCE,
    Agreement,
    Column,
    SiteDescription,
    agree,
    encoded_sums,
    overview_lines,
    squares_about,
)
from fedgp_flower.config import RunConfig
from fedgp_flower.errors import DataError, ProtocolError, RunError
from fedgp_flower.follow_up import UNITS, edges_around, life_table, unit_of
from fedgp_flower.outcome import Snapshot
from fedgp_flower.records import TRUST, arrays_of
from fedgp_flower.transforms import Transform
from strategies.server.network import Network, count_of, pause_after, texts_of
from strategies.server.questions import A, Asking, Summed, Total

logger = logging.getLogger("fedgp")


def described(agreement: Agreement, site: str) -> wire.Described:
    """Return a site's number of rows and, if it described its columns, their standardised sums and squares."""
    rows = agreement.rows[site]
    if site not in agreement.sums:
        return wire.Described(rows)
    arrays = agreement.arrays
    mean, scale = (np.append(arrays[f"input.{part}"], arrays[f"target.{part}"]) for part in ("mean", "scale"))
    sums = agreement.sums[site]
    squares = squares_about(rows, sums, mean) / scale**2
    means = (sums[:-1, 0] / rows - mean[:-1]) / scale[:-1]
    spread = np.maximum(squares[:-1] / rows - means**2, 0.0)
    square = np.nan if agreement.transformed else float(squares[-1])  # sites describe the target as it is
    return wire.Described(rows, squares[:-1], square, means, np.sqrt((rows - 1) * spread))


def restored(snapshot: Snapshot) -> Agreement:
    """Return the agreement of a saved run."""
    facts = snapshot.facts["preparation"]
    arrays = {name: array for name, array in snapshot.arrays.items() if name.startswith(("input.", "target."))}
    return Agreement(arrays, **{**facts, "names": tuple(facts["names"])})


def agreed(network: Network, config: RunConfig, described: Mapping[str, SiteDescription]) -> Agreement:
    """Return the agreement that follows from the sites' descriptions; sites that do not match it are dismissed."""
    present = {site: description for site, description in described.items() if site in network.nodes}
    found = agree(present, **config.agreement_options)
    for site, reason in found.refused.items():
        network.dismiss(site, reason)
    network.require(config.min_sites)
    if not any(described[site].bare for site in found.rows):
        _log(found)
    return found


def _log(found: Agreement) -> None:
    if found.constant:
        logger.warning("columns that are constant at every site are ignored: %s", ", ".join(found.constant))
    for line in overview_lines(found.data):
        logging.getLogger("fedgp.data").info("%s", line)
    for warning in found.warnings:
        logger.warning("%s", warning)


def meet(network: Network, config: RunConfig) -> dict[str, SiteDescription]:
    """Wait for the sites and return their descriptions; either all or none of them describe their rows."""
    described = _wait_for_sites(network, config)
    with_sums = {site: description for site, description in described.items() if not description.bare}
    if not with_sums:
        return described
    for site in sorted(described.keys() - with_sums.keys()):
        network.dismiss(site, "it describes its columns only under masks, and other sites have no trust file")
    network.require(config.min_sites)
    return with_sums


def from_totals(network: Network, config: RunConfig, bare: Agreement) -> Asking[Agreement]:
    """Return the agreement from two totals; columns are divided by their mean size, so that squares fit the masks."""
    first: Summed[wire.ColumnSums] = yield Total(wire.ColumnSums, wire.Nothing())
    sums = _complete(first, network)
    rows = sum(bare.rows[site] for site in first.sites)
    filled = np.maximum(rows - sums.missing[: len(sums.sums)], 1)
    size = np.where(sums.sizes > 0, sums.sizes / filled, 1.0)
    centres = wire.Centres(sums.sums / filled, size)
    second: Summed[wire.ColumnSquares] = yield Total(wire.ColumnSquares, centres, first.sites)
    squares = _complete(second, network, first.sites)
    columns = np.stack([sums.sums, squares.residual * size, squares.squares * size**2], axis=1)
    arrays = {"sums": columns, "missing": np.rint(sums.missing), "levels": np.rint(sums.levels)}
    total = SiteDescription(arrays, bare.schema, rows, dropped=int(sums.dropped))
    found = agree({"all sites": total}, **config.agreement_options)
    here = {site: count for site, count in bare.rows.items() if site in network.nodes}
    found = replace(found, rows=here, labels=bare.labels, simulated=bare.simulated, sums={})
    network.require(config.min_sites)
    _log(found)
    return found


def _complete(summed: Summed[A], network: Network, sites: tuple[str, ...] | None = None) -> A:
    """Return the total; raise RunError if a site is missing from it or added zero."""
    if summed.total is None or summed.silent or summed.sites != (sites or summed.sites):
        why = "its numbers are not finite or too large for masks; write such a column in larger units"
        if network.failures and not summed.silent:
            why = "it did not answer"
        raise RunError(f"the total of the columns lacks a site: {why}. {network.latest_failures()}")
    return summed.total


def meet_again(network: Network, config: RunConfig, saved: Agreement) -> None:
    """Wait for the sites of a resumed run; the saved agreement stays."""
    described = _wait_for_sites(network, config)
    changed = [site for site, found in described.items() if saved.rows.get(site) != found.num_examples]
    if saved.simulated and changed:
        raise RunError(
            f"cannot resume: the run has {len(saved.rows)} simulated sites, and {len(changed)} of the {len(described)}"
            " sites present now have other rows. Resume with the same number of sites and the same data."
        )
    _add_sites(network, saved, described)


def _wait_for_sites(network: Network, config: RunConfig) -> dict[str, SiteDescription]:
    described: dict[str, SiteDescription] = {}
    deadline = time.monotonic() + config.wait_seconds
    while True:
        described |= _new_descriptions(network)
        partitions = max((description.partitions for description in described.values()), default=0)
        enough = config.sites or partitions or config.min_sites
        known = bool(config.sites or partitions or not described)  # otherwise further sites may still connect
        if len(network.asked_nodes if known else described) >= enough:
            network.require(config.min_sites)
            return described
        if time.monotonic() > deadline:
            if len(described) >= config.min_sites:
                logger.warning("%d of %d sites after %g s; starting", len(described), enough, config.wait_seconds)
                return described
            raise RunError(
                f"{len(described)} usable site(s) of {len(network.asked_nodes)} connected after `wait-seconds` = "
                f"{config.wait_seconds:g}; expected {enough}. "
                + "; ".join(f"{failure.site}: {failure.reason}" for failure in network.failures)
            )
        time.sleep(0.1)


def _new_descriptions(network: Network) -> dict[str, SiteDescription]:
    """Return the descriptions of sites on new nodes."""
    found: dict[str, SiteDescription] = {}
    for site, reply in network.ask_new_nodes("query.describe").items():
        texts, arrays, count = texts_of(reply), arrays_of(reply.content, "arrays"), partial(count_of, reply)
        if not {"schema", "label"} <= texts.keys():
            network.dismiss(site, "its description lacks a schema or a label: it has another version of the app")
            continue
        network.labels[site] = texts["label"]
        counts = count("dropped"), count("partitions"), count("bare") > 0, count(TRUST) > 0
        found[site] = SiteDescription(arrays, texts["schema"], count("num-examples"), texts["label"], *counts)
    return found


def admit_new_nodes(network: Network, agreement: Agreement) -> None:
    """Add the sites on nodes that are new since the last round: restarted sites and late ones."""
    if set(network.grid.get_node_ids()) - network.asked_nodes:
        _add_sites(network, agreement, _new_descriptions(network))


def await_sites(network: Network, agreement: Agreement, sites: Iterable[str]) -> None:
    """Wait until these sites are online again, on the same node or another, for at most the network's timeout."""
    begun, missing = time.monotonic(), set(sites)
    while True:
        admit_new_nodes(network, agreement)
        online = set(network.grid.get_node_ids())
        missing -= {site for site in missing if network.nodes.get(site) in online}
        waited = time.monotonic() - begun
        if not missing or waited > network.timeout:
            return
        time.sleep(pause_after(waited))


def _add_sites(network: Network, agreement: Agreement, described: Mapping[str, SiteDescription]) -> None:
    for site, description in described.items():
        try:
            agreement.sums[site] = encoded_sums(description, agreement.schema)
        except ProtocolError as error:
            network.dismiss(site, str(error))
            continue
        logger.info("site %s %s", site, "is back" if site in agreement.rows else "joined")
        agreement.labels[site] = description.label
        agreement.rows[site] = description.num_examples


def transformed(agreement: Agreement, name: str, sites: tuple[str, ...]) -> Asking[Agreement]:
    """Return the agreement with the target transformed by the power λ that maximises −½ N log σ² + Σ log g'(y)."""
    powers = np.array(Transform(name).powers)
    middle = np.array(agreement.training_target["mean"])
    centres = np.array([float(Transform(name, power).forward(middle)) for power in powers])
    summed: Summed[wire.TargetMoments] = yield Total(wire.TargetMoments, wire.TargetTrials(powers, centres), sites)
    best, mean, scale = chosen(summed.required(f"moments of its target under `transform.target` = '{name}'"), centres)
    if not scale > 0:
        raise DataError(f"the target is constant under `transform.target` = '{name}'")
    schema = json.loads(agreement.schema)
    schema["target"]["transform"] = Transform(name, float(powers[best])).as_json()
    scales = {"target.mean": np.array(mean), "target.scale": np.array(scale)}
    return replace(agreement, schema=json.dumps(schema), arrays={**agreement.arrays, **scales})


def related(agreement: Agreement, sites: tuple[str, ...]) -> Asking[Agreement]:
    """Return the agreement with the covariance of the inputs, from which the sites impute missing cells."""
    columns = (Column.from_json(entry) for entry in json.loads(agreement.schema)["features"])
    size = agreement.num_inputs - sum(column.flagged for column in columns)
    summed: Summed[wire.CellProducts] = yield Total(wire.CellProducts, wire.Nothing(), sites, sizes={"E": size})
    covariance = summed.required("products of its inputs").covariance()
    return replace(agreement, arrays={**agreement.arrays, COVARIANCE: covariance})


def followed(agreement: Agreement, sites: tuple[str, ...]) -> Asking[Agreement]:
    """Return the agreement with a life table of the follow-up times, from counts of times in bins.

    The first question has one bin: its answer tells the unit of rounded times, between which the edges of bins lie.
    """
    mean, whole = agreement.training_target["mean"], "counts of its follow-up times"
    sizes = {"B": 1, "U": len(UNITS)}
    first: Summed[wire.TimeCounts] = yield Total(wire.TimeCounts, wire.OneArray(np.empty(0)), sites, sizes=sizes)
    unit = unit_of(first.required(whole).rounded, first.required(whole).counts[:, 0].sum(), mean)
    edges = edges_around(mean, unit)
    sizes["B"] = len(edges) + 1
    summed: Summed[wire.TimeCounts] = yield Total(wire.TimeCounts, wire.OneArray(edges), sites, sizes=sizes)
    table = life_table(summed.required(whole).counts, edges, unit)
    return replace(agreement, arrays={**agreement.arrays, **table.to_arrays()})


def chosen(sums: wire.TargetMoments, centres: np.ndarray) -> tuple[int, float, float]:
    """Return the position of the most likely power, and the mean and standard deviation of t under it."""
    rows, offset = float(sums.count), sums.first / sums.count
    variance = sums.second / rows - offset**2
    with np.errstate(divide="ignore", invalid="ignore"):
        likelihood = np.where(variance > 0, -rows / 2 * np.log(variance) + sums.slopes, -np.inf)
    best = int(np.argmax(likelihood))
    return best, float(centres[best] + offset[best]), float(np.sqrt(max(variance[best], 0.0)))


SPREADS = (8.0, 2.0, 1.25, 1.05)
"""Ratio of neighbouring candidate scales in each exchange."""
CANDIDATES = 8
CAUCHY_SCALE = 0.6120031809624805
"""Scale of the Cauchy distribution that fits a standard normal one best: E 1/(1 + z²/s²) = ½."""


def robustly_standardised(agreement: Agreement, sites: tuple[str, ...]) -> Asking[Agreement]:
    """Return the agreement with the target standardised by a location and scale that outliers do not move.

    They maximise the Cauchy likelihood: Σ w z = 0 and Σ w z² = N (Maronna et al. 2006, §2.7). For normal targets they
    equal mean and sd. Their breakdown point is one half.
    """
    centre, scale = agreement.training_target["mean"], agreement.training_target["sd"]
    place = CANDIDATES - 1.0  # position of the current scale among the candidates
    for ratio in SPREADS:
        scales = scale * ratio ** (np.arange(CANDIDATES) - place)
        request = wire.TargetTrials(scales, np.full_like(scales, centre))
        summed: Summed[wire.RobustMoments] = yield Total(wire.RobustMoments, request, sites)
        sums = summed.required("robust moments of its target")
        excess = sums.second / sums.count - 1.0  # falls as the scale grows
        if not excess[0] > 0:
            return agreement  # more than half of the targets are equal
        position = float(np.interp(0.0, -excess, np.arange(CANDIDATES)))
        scale = float(np.exp(np.interp(position, np.arange(CANDIDATES), np.log(scales))))
        centre += float(np.interp(position, np.arange(CANDIDATES), scales * sums.first / sums.weights))
        place = (CANDIDATES - 1) / 2
    found = {"target.mean": np.array(centre), "target.scale": np.array(scale / CAUCHY_SCALE)}
    return replace(agreement, arrays={**agreement.arrays, **found})
