"""The same answer under masks.

`sgpr` at its defaults in the clear and under masks: ten sites, a split of each set. Masks round summands at 2^-80 and
add them in another order, so that sums differ in their last digits. The server rounds each step of the log
hyperparameters to 2^-26, so that both runs mostly take the same steps. *Apart* is the difference of NLL, in nats a row.
"""

from __future__ import annotations

from collections.abc import Iterator

from simulations.common import Row, cost, fit


def study(sets: tuple[str, ...] = ("concrete", "boston", "yacht", "power"), split: int = 3) -> Iterator[Row]:
    """A row for each set."""
    for name in sets:
        keys = {"dataset": f"uci/{name}", "split": split}
        plain, masked = (fit({**keys, "privacy.secure-aggregation": masks}) for masks in (False, True))
        row: Row = {"set": name}
        for where, run in (("plain", plain), ("masked", masked)):
            row |= {f"NLL, {where}": f"{run['test']['nll']:.7f}", f"M, {where}": run["method_details"]["num_inducing"]}
            row[f"MB up a site, {where}"] = cost(run)["MB up a site"]
        yield row | {"apart": f"{abs(plain['test']['nll'] - masked['test']['nll']):.1e}"}
