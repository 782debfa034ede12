"""Rounds of pseudo-gradients of FedMGP: which answers count, what a rule may know of them, and θ after the round."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import numpy as np

from fedgp_flower.errors import ConfigError, NumericsError, RunError
from fedgp_flower.shapes import Array, NamedArrays
from strategies import pseudo_gradient
from strategies.aggregators import Signals
from strategies.fedmgp_options import FedMGPOptions
from strategies.pseudo_gradient import PseudoState
from strategies.wire import Answer

logger = logging.getLogger("fedgp")


def require_enough(options: FedMGPOptions, asked: int) -> None:
    """Krum chooses among 2f + 3 or more: with fewer units no round could ever change anything.

    Raises:
        RunError: fewer units are asked.
    """
    least = 2 * options.malicious + 3
    if options.aggregation in {"krum", "multi-krum"} and asked < least:
        raise RunError(
            f"`fedmgp.aggregation` = {options.aggregation!r} with `fedmgp.malicious` = {options.malicious} needs "
            f"{least} units in a round (2f + 3), {asked} can be asked. Lower `fedmgp.malicious`, raise "
            "`fedmgp.fraction`, or take another rule"
        )


def advance(
    state: PseudoState,
    answers: Mapping[str, Answer],
    server_round: int,
    *,
    options: FedMGPOptions,
    shares: Callable[[list[str]], Array],
) -> tuple[PseudoState, dict[str, float]]:
    """θ after a round, and the weight of every site in it; no weights where the round changes nothing."""
    updates: dict[str, NamedArrays] = {
        site: {n.removeprefix("update."): a for n, a in own.arrays.items()} for site, own in answers.items()
    }
    staleness = dict.fromkeys(updates, 0.0)
    if options.aggregation == "staleness-weighted":
        state, updates, staleness = pseudo_gradient.with_late(state, updates, server_round, options.patience)
    sites = list(updates)
    if not sites:
        return state, {}
    p, fits = shares(sites), [answers[site].number("log-likelihood") if site in answers else 0.0 for site in sites]
    signals = _signals(options, p / p.sum(), np.array(fits), np.array([staleness[site] for site in sites]))
    try:
        return pseudo_gradient.merge(
            state,
            updates,
            options.aggregation,
            signals,
            size=options.server_step,
            momentum=options.server_momentum,
            optimizer=options.server_optimizer,
        )
    except (ConfigError, NumericsError) as error:
        logger.warning("the round changes nothing: %s", error)
        return state, {}


def _signals(options: FedMGPOptions, shares: Array, fits: Array, staleness: Array) -> Signals:
    return Signals(
        shares=shares,
        log_likelihoods=fits,
        staleness=staleness,
        threshold=options.clip_norm,
        quantile=options.clip_quantile,
        trim=options.trim,
        malicious=options.malicious,
        select=options.select,
        decay=options.staleness_decay,
    )
