"""The same answer under masks.

`sgpr` at its defaults in the clear and under masks: ten sites, some splits of each set. Masks round summands at 2^-80.
Sums without masks are rounded once, at their end, so that both are the same numbers. *Apart* is the difference of NLL,
in nats a row.
"""

from __future__ import annotations

from collections.abc import Iterator

from simulations.common import Row, cost, fit


def study(
    sets: tuple[str, ...] = ("concrete", "boston", "yacht"), splits: tuple[int, ...] = (3, 4, 5, 6)
) -> Iterator[Row]:
    """A row for each set and split."""
    for name, split in ((name, split) for name in sets for split in splits):
        keys = {"dataset": f"uci/{name}", "split": split}
        plain, masked = (fit({**keys, "privacy.secure-aggregation": masks}) for masks in (False, True))
        row: Row = {"set": name, "split": split}
        for where, run in (("plain", plain), ("masked", masked)):
            row |= {f"NLL, {where}": f"{run['test']['nll']:.7f}", f"M, {where}": run["method_details"]["num_inducing"]}
            row[f"MB up a site, {where}"] = cost(run)["MB up a site"]
        yield row | {"apart": f"{abs(plain['test']['nll'] - masked['test']['nll']):.1e}"}
