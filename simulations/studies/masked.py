"""The same optimum under masks.

`uci/energy`, split 0, ten sites, M = 3: sgpr in the clear and under masks from the same start. Masks round at 2^-80
and add in another order, so that two paths of an optimiser differ in their last digits. *Apart*: the relative
difference of the final bounds and of the NLL of held-out rows.
"""

from __future__ import annotations

from collections.abc import Iterator

from simulations.common import Row, fit


def study(points: int = 3, exchanges: int = 400) -> Iterator[Row]:
    """One row."""
    keys = {"method": "sgpr", "dataset": "uci/energy", "split": 0, "model.num-inducing": points}
    keys |= {"sgpr.exchanges": exchanges, "num-server-rounds": exchanges}
    plain, hidden = (fit({**keys, "privacy.secure-aggregation": masks}) for masks in (False, True))
    bounds = [run["method_details"]["evidence"] for run in (plain, hidden)]
    scores = [run["test"]["nll"] for run in (plain, hidden)]
    row: Row = {"M": points, "rounds": f"{plain['rounds']} and {hidden['rounds']}"}
    for name, (before, after) in (("evidence", bounds), ("NLL", scores)):
        row |= {f"{name}, plain": f"{before:.9f}", f"{name}, masked": f"{after:.9f}"}
        row[f"{name} apart"] = f"{abs(after - before) / abs(before):.1e}"
    yield row | {"both converged": plain["converged"] and hidden["converged"]}
