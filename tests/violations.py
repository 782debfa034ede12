"""Runs in which every rule of a policy is violated by a separate site, beside three sites that are in order."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from faults import FaultyGrid, blamed, configured, csv_nodes, run, waves

METHODS: dict[str, dict[str, Any]] = {
    "sgpr": {"num_server_rounds": 1},
    "fgpr": {"method": "fgpr"},
    "pvi-glm": {"method": "pvi-glm", "pvi__schedule": "synchronous"},
    "sfvi-avg": {"method": "sfvi-avg", "sfvi__local_steps": 2},
    "local-only": {"method": "local-only", "baselines__local_only": True},
}
"""One method for each way of asking sites: sums, averages, factors, structured models, and comparisons alone."""
TRAINING = {"sgpr": "query.trials", "fgpr": "train", "pvi-glm": "train", "sfvi-avg": "train.average"}
TRAINING |= {"local-only": "query.local_scores"}
"""A message that the method cannot do without."""
ROWS = 120


def wards(rows: int, seed: int) -> pd.DataFrame:
    found = waves(rows, seed)
    return found[["x1", "x2"]].assign(ward=[f"w{i % 10}" for i in range(rows)], y=found["y"])


def named(words: Callable[[int], str], rows: int = ROWS) -> Callable[[int], pd.DataFrame]:
    return lambda seed: wards(rows, seed).assign(ward=[words(i) for i in range(rows)])


@dataclass(frozen=True)
class Violation:
    """A site that a rule refuses."""

    tried: str
    said: str
    """What the refusal holds: rule, value and file, or what no policy allows."""
    policy: str = ""
    """The owner's file; empty: the default policy."""
    frame: Callable[[int], pd.DataFrame] = lambda seed: wards(ROWS, seed)
    later: bool = False
    """The rule is about a message: the site has described itself before."""


STRICT = "strict = true\nparameters-per-row = 0.01"
VIOLATIONS: dict[str, Violation] = {
    "default least-rows": Violation(
        "9 training rows or fewer", "`least-rows` = 10 in the default policy", frame=named(lambda i: f"w{i % 2}", 11)
    ),
    "default rows-per-level": Violation(
        "24 ids, each of 4 visits", "`rows-per-level` = 10 in the default", frame=named(lambda i: f"person-{i % 24}")
    ),
    "default identifier": Violation("an id for each row", "like an identifier", frame=named(lambda i: f"person-{i}")),
    "default dates": Violation(
        "dates of admission as text", "`ward` holds dates", frame=named(lambda i: f"2021-03-{1 + i % 12:02d}")
    ),
    "methods": Violation("another method", '`methods` = ["pooled"]', 'methods = ["pooled"]'),
    "keys": Violation("other keys", '`keys` = ["model.*"]', 'keys = ["model.*"]'),
    "kinds": Violation(
        "training", '`kinds` = ["query.describe"', 'kinds = ["query.describe", "query.shape"]', later=True
    ),
    "least-rows": Violation("96 training rows", "`least-rows` = 200", "least-rows = 200"),
    "rows-per-level": Violation("10 levels of 12 rows", "`rows-per-level` = 100", "rows-per-level = 100"),
    "hidden-columns": Violation("column x2", '`hidden-columns` = ["x2"]', 'hidden-columns = ["x2"]'),
    "parameters-per-row": Violation("5 inducing points and more", "`parameters-per-row` = 0.01", STRICT, later=True),
    "secure-aggregation": Violation("totals in the clear", "`secure-aggregation` = true", "secure-aggregation = true"),
}
NO_STATISTICS = {("local-only", "parameters-per-row")}
"""Scores of a site's model are no statistics of many parameters: nothing to refuse."""


class Transcript(FaultyGrid):
    """Counts the bytes that left a site, by kind."""

    def left(self, site: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for name, kind, reply in self.replies:
            if reply.has_error():
                continue
            sent = [reply.content[key].count_bytes() for key in ("arrays", "metrics") if key in reply.content]
            if name == site and sent:
                found[kind] = found.get(kind, 0) + sum(sent)
        return found


def violated(method: str, folder: Path) -> tuple[Transcript, Any]:
    frames = {site: wards(ROWS, seed) for seed, site in enumerate("abc")}
    frames |= {site: entry.frame(seed) for seed, (site, entry) in enumerate(VIOLATIONS.items(), len(frames))}
    nodes = csv_nodes(folder, frames, "")
    for node in nodes:
        policy = VIOLATIONS[node["site"]].policy if node["site"] in VIOLATIONS else ""
        if policy:
            path = folder / f"{node['site']}.toml"
            path.write_text(policy)
            node["policy"] = str(path)
    grid = Transcript(configured(**{"sites": len(nodes), "num_server_rounds": 2} | METHODS[method]), nodes)
    return grid, run(grid)


def refusal(method: str, site: str, grid: Transcript, strategy: Any) -> str:
    """What a site was refused with; empty where the rule is not violated.

    Raises:
        AssertionError: it is not by name, or something that the rule forbids left.
    """
    entry, reasons, left = VIOLATIONS[site], blamed(strategy), grid.left(site)
    if (method, site) in NO_STATISTICS:
        assert site not in reasons
        return ""
    assert all(entry.said in reason for reason in reasons[site])
    assert not entry.policy or all(f"in {site}.toml of this site" in reason for reason in reasons[site])
    assert TRAINING[method] not in left
    assert "query.describe" in left if entry.later else left == {}
    return reasons[site][0]


def require_others(method: str, grid: Transcript, strategy: Any) -> None:
    assert set(blamed(strategy)) <= set(VIOLATIONS)
    assert all({*grid.left(site)} >= {"query.describe", TRAINING[method]} for site in "abc")
    assert strategy.outcome.metrics["rounds"] == strategy.round
    assert strategy.outcome.metrics["test"]["rmse"] < 2
