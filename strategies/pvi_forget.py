"""Forgetting a site: its factor leaves the posterior, and a run goes on from there without it."""

from __future__ import annotations

from fedgp_flower.errors import NumericsError
from strategies import pvi_arrays as wire
from strategies.base import Snapshot
from strategies.pvi_state import forget


def without(snapshot: Snapshot, site: str) -> Snapshot:
    """A checkpoint from which a site's factor, its rows and the records of its visits are gone.

    Its label stays, since simulated rows go on being dealt to as many sites as there were, and so do its failures.

    Raises:
        NumericsError: the site has no factor, or what remains is no density.
    """
    facts = dict(snapshot.facts)
    state = forget(wire.state_of(wire.part(snapshot.arrays, "pvi"), facts["pvi"]), site)
    arrays, facts["pvi"] = wire.state_arrays(state)
    kept = {name: array for name, array in snapshot.arrays.items() if not name.startswith("pvi.")}
    book = {"forgotten_visits": 0, **facts["book"]}
    book["forgotten_visits"] += book["visits"].get(site, 0)
    for name in ("visits", "attempts", "sizes", "staleness", "leakage"):
        book[name] = {key: value for key, value in book[name].items() if key != site}
    facts["book"] = book | {"forgotten": [*book["forgotten"], site], "refit_due": True}
    preparation = dict(facts["preparation"])
    preparation["rows"] = {key: rows for key, rows in preparation["rows"].items() if key != site}
    facts["preparation"] = preparation
    if not state.sites:
        raise NumericsError(f"site {site!r} is the only one with a factor: without it nothing is left")
    return Snapshot(kept | wire.under("pvi", arrays), facts)
