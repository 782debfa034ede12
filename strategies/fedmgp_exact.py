"""Exact rounds of FedMGP: which answers count, which units are trusted, and the state that follows from them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fedgp_flower.errors import NumericsError, ProtocolError
from fedgp_flower.latent import Move, Posterior, Statistics, unpack
from strategies.exact_q import ExactState, bound_of, carried, hold, merge
from strategies.exact_trust import agreeing, consistent, possible
from strategies.wire import Answer, ArraySpec, Specs

logger = logging.getLogger("fedgp")

QUORUM = 0.5
"""Under ``agreement`` a trial move must help more than this share of the units."""

MOST_UPDATES = 2**53
"""Largest number of a site's memory that can be told apart from its neighbours."""

Refuse = Callable[[str, str], None]
"""Counts a failure of a site, with the reason."""


@dataclass(frozen=True, slots=True)
class Track:
    """One start of exact mode: the state, what sites said they remember, and whom ``agreement`` trusts."""

    state: ExactState
    updates: Mapping[str, int] = field(default_factory=dict)
    """Number of a site's memory behind its last report; a site that has another one starts afresh."""
    trusted: frozenset[str] = frozenset()


def statistics_specs(num_moves: int, size: int, num_latents: int) -> Specs:
    """Shapes of statistics at C trial moves, with I·J whitened latents."""
    return {
        "statistics.precision": ArraySpec((num_moves, size * (size + 1) // 2)),
        "statistics.shift": ArraySpec((num_moves, size)),
        "statistics.evidence": ArraySpec((num_moves,)),
        "statistics.slack": ArraySpec((num_moves, num_latents)),
    }


def claims_refusal(own: Answer, rows: int) -> str | None:
    """Why what a site says of itself cannot be true, or None."""
    if own.num_examples != rows:
        return f"claims {own.num_examples} rows, introduced itself with {rows}"
    if not 0 <= own.number("state-updates") <= MOST_UPDATES:
        return "`state-updates` is not a number of updates"
    return None


def usable(
    answers: Mapping[str, Answer],
    asked: Posterior,
    moves: Sequence[Move],
    rows: Mapping[str, int],
    refuse: Refuse,
) -> dict[str, tuple[Statistics, ...]]:
    """Statistics by site, without those that no rows can produce."""
    found = {}
    for site, own in answers.items():
        told, reason = unpack(own.arrays), claims_refusal(own, rows[site])
        if reason:
            refuse(site, reason)
        elif not possible(told[0], asked, rows[site]) or not consistent(told, moves, asked, rows[site]):
            refuse(site, "statistics that no rows can produce")
        else:
            found[site] = told
    return found


def advance(
    track: Track,
    replies: Mapping[str, tuple[Statistics, ...]],
    answers: Mapping[str, Answer],
    moves: Sequence[Move],
    *,
    rows: Mapping[str, int],
    agreement: bool,
) -> tuple[Track, dict[str, float]]:
    """The next track, and 1 or 0 for every site that has a report: whether it counts.

    A site whose answer was refused loses its earlier report too. Under ``agreement`` everyone with a report is judged
    in every round, and a round with nobody to trust changes nothing but reports.
    """
    refused = set(answers) - set(replies)
    kept = {site: report for site, report in track.state.reports.items() if site not in refused}
    state, trusted = replace(track.state, reports=kept), track.trusted
    if agreement:
        trusted = _trusted(state, replies, rows)
    keep = trusted if agreement else None
    try:
        if keep is None or keep:
            state = merge(state, replies, moves=moves, keep=keep, quorum=QUORUM if agreement else 0.0)
        else:
            logger.warning("no units agree on g yet; the round changes nothing but what is known of each")
            state = hold(state, replies, moves)
    except (NumericsError, ProtocolError) as error:
        logger.warning("the round changes nothing: %s", error)
        return replace(track, state=state, trusted=trusted), {}
    said = {site: int(answers[site].number("state-updates")) for site in replies}
    updates = {site: n for site, n in track.updates.items() if site not in refused} | said
    return Track(state, updates, trusted), {site: float(keep is None or site in keep) for site in sorted(state.reports)}


def _trusted(
    state: ExactState, replies: Mapping[str, tuple[Statistics, ...]], rows: Mapping[str, int]
) -> frozenset[str]:
    """Who agrees with most of all who ever reported."""
    first = {site: told[0] for site, told in replies.items()}
    absent = {s: carried(report, state.latents) for s, report in state.reports.items() if s not in replies}
    return frozenset(agreeing(first, asked=state.posterior, counts=rows, absent=absent))


def best_track(tracks: Sequence[Track], *, agreement: bool) -> int:
    """Index of the start with the best bound over the sites that all starts count.

    The bound of more sites is another number, so starts that counted different ones cannot be compared as they are.
    """
    counted = [
        set(track.state.reports) & (track.trusted if agreement else set(track.state.reports)) for track in tracks
    ]
    common = set.intersection(*counted)
    if not common:
        logger.warning("the starts have no unit in common; the last one goes on")
        return len(tracks) - 1
    return int(np.argmax([bound_of(track.state, common) for track in tracks]))
