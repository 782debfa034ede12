"""Bad units and unstable communication: what every aggregation rule makes of them.

Ten units of 40 rows. Some of them observe another process, a shifted signal or pure noise, or send what they compute
flipped or a hundredfold; the figure is the error over the honest units. Then units that can be reached with
probability 0.3 to 0.7.

    python simulations/fedmgp_anomalies.py [--bad 1 2 3 4] [--seeds 5] [--pseudo-seeds 3]
    python simulations/fedmgp_anomalies.py --only natural --pseudo-seeds 3              (natural parameters)
    python simulations/fedmgp_anomalies.py --only told --rules multi-krum --study-seeds 2    (least information)
    python simulations/fedmgp_anomalies.py --only kept --study-seeds 0 1 2      (what leaving out three units costs)
    python simulations/fedmgp_anomalies.py --only exact --rules agreement --seeds 2     (some of the runs, no page)

Runs that are complete are not repeated. Tables go to ``simulations/results/fedmgp_anomalies.md``,
those of pseudo-gradients in natural parameters to ``fedmgp_natural_rules.md``, what units with how little
information should have a vote to ``fedmgp_natural_told.md``, on other seeds than those reported, and the least price of
a rule that keeps 7 of 10 units to ``fedmgp_natural_kept.md``.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from fedmgp_common import RESULTS, RUNS, SIGNALS, finished, metrics, table
from fedmgp_natural import STEPS
from fedmgp_signals import SPOILT, signals
from flwr.app import Error, Message

from fedgp_flower.data.sites import site_id
from fedgp_flower.records import numpy_arrays, packed_record
from fedgp_flower.run.in_process import InProcessGrid
from strategies import fedmgp_natural

UNITS = 10
LIES: Mapping[str, tuple[float, float]] = {"update flipped": (-1.0, 1.0), "update × 100": (100.0, 100.0)}
"""Factors of a pseudo-gradient or of b, and of everything else in exact statistics."""
FIRST_LOOK = "first look × 100"
"""A hundredfold answer to the question that the first q(g) is made of."""
ATTACKS = (*SPOILT, *LIES)
EXACT_ATTACKS = (*ATTACKS, FIRST_LOOK)
EXACT_RULES = ("mean", "agreement")
PSEUDO_RULES = ("mean", "loss-weighted", "norm-clipped", "median", "trimmed-mean", "krum", "multi-krum")
NATURAL_RULES = (*PSEUDO_RULES, "agreement")
ENDED_RULES = ("mean", "median")
WITHSTAND = {"fedmgp.malicious": 3, "fedmgp.select": 4, "fedmgp.trim": 0.3}
"""What rules are told: 3 of 10."""
TOLD, TOLD_RULES, TOLD_ATTACKS = (0.0, 0.03, 0.1, 0.3), ("multi-krum", "median"), ("pure noise",)
SETS = 5
"""Draws of three units to do without."""
REACH = (0.3, 0.5, 0.7)
TRAIN = ("train", "train.natural", "train.exact")
NOTES = (
    "- Exact rounds: a unit of pure noise fits an amplitude near zero and says next to nothing about g, under either "
    "rule. A flipped or hundredfold answer contradicts itself (a unit that took its M-step has E‖y − f‖²/σ² = N, and a "
    "first look weighs what its rows weigh) and is refused under either rule. What is left is a unit that is honest "
    "about another g: `agreement` leaves out whose rows and those of most others are likelier apart than together. It "
    "can do nothing when bad units are the majority, when most pairs of units see no common range of inputs, or when "
    "units share nothing.",
    "- `mean`: one update a hundred times too long moves θ anywhere; units of another process pull by their share.",
    "- `loss-weighted`: meant for bad rows, whose fit is poor. A unit that lies about its update has a good fit, so it "
    "keeps its full weight, or more.",
    "- `norm-clipped`: bounds how far one unit moves θ, not in which direction: a flipped update is as long as an "
    "honest one and is not shortened.",
    "- `median`, `trimmed-mean`: bound every coordinate, whatever its sign or length, as long as fewer than half, or "
    "the trimmed share, are bad. The price is bias, since honest units differ: what only one unit has seen is cut too.",
    "- `krum`, `multi-krum`: one or a few whole updates are taken over. A hundredfold update is far from all others; "
    "but honest updates differ by where their rows lie, so those left out take their knowledge with them.",
    "- `staleness-weighted` has no row among the attacks: where every unit answers it is `mean`.",
    "- After pseudo-gradients with a rule other than `mean` the exact rounds use `agreement`.",
)
"""What a rule can and cannot see; how far it got is read off the tables."""


class SpoiltGrid(InProcessGrid):
    """Some units lie about their updates; every training message reaches its unit with some probability."""

    def __init__(
        self,
        *args: Any,
        bad: int = 0,
        lie: str = "",
        reach: float = 1.0,
        seed: int = 0,
        silent: Collection[str] = (),
    ) -> None:
        super().__init__(*args)
        self.bad, self.lie, self.reach, self.silent = bad, lie, reach, silent
        self.rng = np.random.default_rng([seed, 77])

    def answer(self, message: Message) -> Message:
        """The reply, spoilt or missing."""
        if message.metadata.message_type == "query.start" and self.lie == FIRST_LOOK:
            return self.spoilt(message, super().answer(message), "update × 100")
        if message.metadata.message_type not in TRAIN:
            return super().answer(message)
        silent = site_id(self.contexts[message.metadata.dst_node_id].node_config) in self.silent
        if silent or self.rng.random() > self.reach:
            return Message(Error(code=4, reason="unreachable"), reply_to=message)
        reply = super().answer(message)
        return reply if self.lie == FIRST_LOOK else self.spoilt(message, reply, self.lie)

    def spoilt(self, message: Message, reply: Message, lie: str) -> Message:
        """The reply of a bad unit with other numbers; that of any other unit as it is."""
        site = int(site_id(self.contexts[message.metadata.dst_node_id].node_config))
        if lie and site < self.bad and "arrays" in reply.content.array_records:
            shift, rest = LIES[lie]
            own = numpy_arrays(reply.content.array_records["arrays"])
            if any(name.startswith("parameters.") for name in own):
                rest = 1.0  # a pseudo-gradient comes with flags, which nobody believes a hundredfold
            shifted = {name for name in own if name.startswith("parameters.") or name.split(".")[-1] == "shift"}
            new = {name: np.asarray(array * (shift if name in shifted else rest)) for name, array in own.items()}
            reply.content["arrays"] = packed_record(new)
        return reply


def configuration(attack: str, bad: int, seed: int, mode: str, rule: str) -> dict[str, Any]:
    """Keys of a run."""
    spoilt = attack if attack in SPOILT else ""
    name = f"ten-{spoilt.replace(' ', '-') or 'honest'}-{bad if spoilt else 0}-{seed}.parquet"
    path = RUNS / "data" / name
    signals(path, units=UNITS, rows=40, seed=seed, widths=(5.0, 20.0), bad=bad, spoilt=spoilt)
    keys = {**SIGNALS, "dataset": str(path), "seed": seed, "fedmgp.aggregation": rule, "max-failures": 1000}
    if mode == "natural":
        keys |= STEPS | WITHSTAND | {"fedmgp.parametrisation": "natural", "num-server-rounds": 30}
        keys["fedmgp.select"] = UNITS - 3  # fewer whole units know less than all
    if mode in ("pseudo", "ended"):
        keys |= WITHSTAND | {
            "fedmgp.update": "pseudo-gradient",
            "fedmgp.final-rounds": 5 if mode == "ended" else 0,
            "num-server-rounds": 30 if mode == "ended" else 25,
            "optimizer.learning-rate": 0.03,
        }
    return keys


def honest_mse(found: dict[str, Any], bad: int) -> float:
    """Mean squared error over the rows of honest units, which all hold out as many."""
    return float(np.mean([row["rmse"] ** 2 for row in found["per_site"] if int(row["site"]) >= bad]))


def one(
    mode: str,
    rule: str,
    attack: str,
    bad: int,
    seed: int,
    reach: float = 1.0,
    leave_out: int | None = None,
    told: float | None = None,
) -> float:
    """The error over the honest units, or over all but the first ``leave_out``; infinite where the run broke down.

    Units that know less than the share ``told`` of the median unit have no vote.
    """
    from fedgp_flower.errors import FedGPError

    words = [mode, rule, attack or "clean", str(bad), str(seed), *([f"reach-{reach}"] if reach < 1 else [])]
    words += [] if told is None else [f"told-{told}"]
    name = "-".join(words).replace(" ", "-").replace("×", "x")
    keys = configuration(attack, bad, seed, mode, rule)
    if reach < 1:
        keys["num-server-rounds"] = 60 if mode == "exact" else 45
    grid: Callable[..., Any] = partial(
        SpoiltGrid, bad=bad, lie=attack if attack in (*LIES, FIRST_LOOK) else "", reach=reach, seed=seed
    )
    try:
        with mock.patch.object(fedmgp_natural, "LEAST_TOLD", fedmgp_natural.LEAST_TOLD if told is None else told):
            found = metrics(name) or finished(keys, name, grid=grid)
    except FedGPError:
        return float("inf")
    return honest_mse(found, bad if leave_out is None else leave_out)


class Damage(NamedTuple):
    """Error under an attack, and its ratio to the same rule's without attack; infinite where the run broke down."""

    error: float
    ratio: float


Damages = dict[tuple[str, str, int], Damage]
"""(rule, attack, number of bad units) → damage."""


def section(
    mode: str, rules: tuple[str, ...], counts: list[int], seeds: int, attacks: tuple[str, ...] = ATTACKS
) -> tuple[list[str], Damages]:
    """A table of the mean over seeds, and its ratio to the same rule's without attack: rules by attacks, bad units."""
    clean_titles = [f"clean, without {bad}" for bad in counts]
    titles, rows = ["rule", *clean_titles, *(f"{attack}, {bad} bad" for attack in attacks for bad in counts)], []
    damages: Damages = {}
    for rule in rules:
        clean = [
            float(np.mean([one(mode, rule, "", 0, seed, leave_out=bad) for seed in range(seeds)])) for bad in counts
        ]
        row: list[object] = [rule, *clean]
        for attack in attacks:
            for bad, base in zip(counts, clean, strict=True):
                error = float(np.mean([one(mode, rule, attack, bad, seed) for seed in range(seeds)]))
                damages[rule, attack, bad] = Damage(error, error / base if error < 100 else float("inf"))
                row.append(f"{error:.4f} ({error / base:.2f})" if error < 100 else "broke down")
                print(mode, rule, attack, bad, row[-1], flush=True)
        rows.append(row)
    return [table(titles, rows), ""], damages


def verdicts(damages: Damages, limit: float) -> list[str]:
    """For every rule, the attacks under which the error exceeds ``limit`` times that without attack; and its worst."""
    lines = []
    for rule in dict.fromkeys(rule for rule, _, _ in damages):
        own = {(attack, bad): damage.ratio for (name, attack, bad), damage in damages.items() if name == rule}
        worst, above = max(own, key=lambda key: own[key]), [key for key in own if own[key] > limit]
        told = "; ".join(f"{attack} with {bad} ({_times(own[attack, bad])})" for attack, bad in above)
        lines.append(
            f"- `{rule}` {f'exceeds {limit:g} times its clean error under: {told}.' if above else ''}"
            f"{'' if above else f'stays within {limit:g} times its clean error; worst: {worst[0]} with {worst[1]}'}"
            f"{'' if above else f' ({_times(own[worst])}).'}"
        )
    return [*lines, ""]


def _times(ratio: float) -> str:
    return f"{ratio:.2f}" if np.isfinite(ratio) else "broke down"


def best_rules(damages: Damages) -> list[str]:
    """For every attack, the rule with the least error under it."""
    lines = []
    for attack, bad in dict.fromkeys((attack, bad) for _, attack, bad in damages):
        own = {rule: damage.error for (rule, name, count), damage in damages.items() if (name, count) == (attack, bad)}
        rule = min(own, key=lambda name: own[name])
        lines.append(f"- {attack}, {bad} bad: `{rule}` ({own[rule]:.4f})")
    return ["Least error under each attack:", "", *lines, ""]


def reach_section(seeds: int) -> list[str]:
    """Error by the probability that a unit is reached."""
    rows: list[list[object]] = []
    for mode, rule in (("exact", "mean"), ("pseudo", "mean"), ("pseudo", "staleness-weighted")):
        full = float(np.mean([one(mode, "mean", "", 0, seed) for seed in range(seeds)]))
        some = [float(np.mean([one(mode, rule, "", 0, seed, reach) for seed in range(seeds)])) for reach in REACH]
        rows.append([f"{mode}, {rule}", full, *(f"{error:.4f} ({error / full:.2f})" for error in some)])
        print(rows[-1], flush=True)
    return [table(["rounds", "all reached", *(f"probability {reach}" for reach in REACH)], rows), ""]


def page(bad: list[int], seeds: int, pseudo_seeds: int) -> str:
    """All tables, with what is missing run first."""
    exact, of_exact = section("exact", EXACT_RULES, bad, seeds, EXACT_ATTACKS)
    pseudo, of_pseudo = section("pseudo", PSEUDO_RULES, [3], pseudo_seeds)
    ended, of_ended = section("ended", ENDED_RULES, [3], pseudo_seeds)
    return "\n".join(
        [
            "# FedMGP: bad units and unstable communication",
            "",
            "Made by `python simulations/fedmgp_anomalies.py`. Mean squared error over the honest of ten units, 40 "
            "rows each, noise 0.0100; in brackets over that of the same rule without attack, on the same rows of the "
            "same units (`clean, without n` leaves the first n units out of the error, not out of the training).",
            "",
            f"## Exact rounds ({seeds} seeds)",
            "",
            *exact,
            *verdicts(of_exact, 1.1),
            f"## Pseudo-gradients alone ({pseudo_seeds} seeds; 3 bad units only)",
            "",
            *pseudo,
            *verdicts(of_pseudo, 2.0),
            *best_rules(of_pseudo),
            f"## Pseudo-gradients that end with 5 exact rounds ({pseudo_seeds} seeds; 3 bad units only)",
            "",
            *ended,
            *verdicts(of_ended, 1.1),
            f"## Units that can be reached with some probability ({pseudo_seeds} seeds)",
            "",
            "Exact rounds: 60 instead of 20; pseudo-gradients: 45 instead of 25. In brackets over all units reached.",
            "",
            *reach_section(pseudo_seeds),
            "## What a rule sees",
            "",
            *NOTES,
            "",
        ]
    )


def write_natural(rules: tuple[str, ...], seeds: int) -> None:
    """A page of its own: rules on natural parameters, beside exact rounds on the same rows."""
    exact = float(np.mean([one("exact", "mean", "", 0, seed, leave_out=3) for seed in range(seeds)]))
    lines, damages = section("natural", rules, [3], seeds)
    clean = {rule: np.mean([one("natural", rule, "", 0, seed, leave_out=3) for seed in range(seeds)]) for rule in rules}
    ratios = ", ".join(f"`{rule}` {error / exact:.2f}" for rule, error in clean.items())
    text = [
        "# FedMGP: rules of aggregation on pseudo-gradients in natural parameters",
        "",
        f"Made by `python simulations/fedmgp_anomalies.py --only natural --pseudo-seeds {seeds} --rules "
        f"{' '.join(rules)}`. Ten units of 40 rows, 30 rounds of 20 local steps, no exact rounds; mean squared error "
        f"over the honest units, noise 0.0100, seeds: {seeds}; in brackets over that of the same rule without "
        f"attack, on the same rows. Exact rounds without attack: {exact:.4f}; without attack over exact rounds: "
        f"{ratios}.",
        "",
        *lines,
        *verdicts(damages, 1.3),
        "A unit whose rows are pure noise says next to nothing of g and is left out before rules that are no weighted "
        "mean: entries of a median would move towards knowing nothing, and Krum prefers such units. `agreement` leaves "
        "out who shares nothing. Flipped updates are left out before any rule where no rows can produce them.",
        "",
    ]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "fedmgp_natural_rules.md").write_text("\n".join(text))


def write_told(rules: tuple[str, ...], seeds: list[int]) -> None:
    """Errors by the least share of the median unit's information with which a unit has a vote."""
    rows: list[list[object]] = []
    for rule in rules:
        for told in TOLD:
            clean = [one("natural", rule, "", 0, seed, leave_out=3, told=told) for seed in seeds]
            spoilt = [
                float(np.mean([one("natural", rule, attack, 3, seed, told=told) for seed in seeds]))
                for attack in TOLD_ATTACKS
            ]
            rows.append([rule, told, float(np.mean(clean)), *spoilt])
            print(rows[-1], flush=True)
    exact = float(np.mean([one("exact", "mean", "", 0, seed, leave_out=3) for seed in seeds]))
    words = f"--only told --rules {' '.join(rules)} --study-seeds {' '.join(map(str, seeds))}"
    text = [
        "# FedMGP: how little a unit may know and have a vote",
        "",
        f"Made by `python simulations/fedmgp_anomalies.py {words}`. As [the rules in natural parameters]"
        "(fedmgp_natural_rules.md), on seeds that are not reported there. A unit has a vote if its rows say at least "
        "this share of what those of the median unit say. Mean squared error over the honest units without the first "
        f"three; exact rounds without attack {exact:.4f}.",
        "",
        table(["rule", "least share", "clean", *(f"{attack}, 3 bad" for attack in TOLD_ATTACKS)], rows),
        "",
    ]
    (RESULTS / "fedmgp_natural_told.md").write_text("\n".join(text))


def without(left_out: Collection[str], seed: int) -> float:
    """The error over all but the first three units where exact rounds never hear some units."""
    keys, names = configuration("", 0, seed, "exact", "mean"), sorted(left_out, key=int)
    grid: Callable[..., Any] = partial(SpoiltGrid, seed=seed, silent=frozenset(names))
    return honest_mse(finished(keys, f"exact-without-{'-'.join(names)}-{seed}", grid=grid), 3)


def write_kept(seeds: list[int]) -> None:
    """What multi-Krum costs without attack, and exact rounds with the units it keeps, or with any as many."""
    rows: list[list[object]] = []
    everyone = [str(site) for site in range(UNITS)]
    for seed in seeds:
        exact = one("exact", "mean", "", 0, seed, leave_out=3)
        krum = one("natural", "multi-krum", "", 0, seed, leave_out=3)
        found = metrics(f"natural-multi-krum-clean-0-{seed}")
        assert found is not None
        votes = Counter(site for own in found["method_details"]["weights"] for site in own if own[site])
        left_out = sorted(everyone, key=lambda site: votes[site])[:3]
        drawn = np.random.default_rng([seed, 3])
        others = [without(drawn.choice(everyone, 3, replace=False).tolist(), seed) for _ in range(SETS)]
        ratios = [error / exact for error in (krum, without(left_out, seed), *others)]
        rows.append([seed, exact, *ratios[:2], float(np.mean(ratios[2:])), max(ratios[2:]), ", ".join(left_out)])
        print(rows[-1], flush=True)
    mean: list[object] = [float(np.mean([float(str(row[i])) for row in rows])) for i in range(1, 6)]
    text = [
        "# FedMGP: what a rule costs that keeps 7 of 10 units",
        "",
        f"Made by `python simulations/fedmgp_anomalies.py --only kept --study-seeds {' '.join(map(str, seeds))}`. As "
        "[the rules in natural parameters](fedmgp_natural_rules.md), without attack. Multi-Krum withstands f = 3 bad "
        "of n = 10 units: it averages the n − f = 7 updates that are nearest to their n − f − 2 = 5 closest others. "
        "Beside it exact rounds that never hear the three units that it kept least often, or three drawn at random, "
        f"{SETS} times; mean squared errors over all but the first three units, over that of exact rounds with all. "
        "Krum leaves out the units that no others are near, and these know of g what no others do.",
        "",
        table(
            [
                "seed",
                "exact rounds, MSE",
                "multi-krum",
                "exact without those it left out",
                "exact without three at random, mean",
                "worst",
                "left out",
            ],
            [*rows, ["mean", *mean, ""]],
        ),
        "",
    ]
    (RESULTS / "fedmgp_natural_kept.md").write_text("\n".join(text))


def main() -> None:
    """Run what is missing, then write the tables; with ``--only`` or ``--rules`` only run, but for ``natural``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bad", type=int, nargs="*", default=[1, 2, 3, 4])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--pseudo-seeds", type=int, default=3)
    parser.add_argument("--only", choices=["exact", "pseudo", "natural", "told", "kept", "ended", "reach"])
    parser.add_argument("--study-seeds", type=int, nargs="*", default=[2, 3])
    parser.add_argument("--rules", nargs="*")
    chosen = parser.parse_args()
    if chosen.only == "reach":
        reach_section(chosen.pseudo_seeds)
    elif chosen.only == "exact":
        section("exact", tuple(chosen.rules or EXACT_RULES), chosen.bad, chosen.seeds, EXACT_ATTACKS)
    elif chosen.only == "pseudo":
        section("pseudo", tuple(chosen.rules or PSEUDO_RULES), [3], chosen.pseudo_seeds)
    elif chosen.only == "natural":
        write_natural(tuple(chosen.rules or NATURAL_RULES), chosen.pseudo_seeds)
    elif chosen.only == "told":
        write_told(tuple(chosen.rules or TOLD_RULES), chosen.study_seeds)
    elif chosen.only == "kept":
        write_kept(chosen.study_seeds)
    elif chosen.only == "ended":
        section("ended", tuple(chosen.rules or ENDED_RULES), [3], chosen.pseudo_seeds)
    else:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "fedmgp_anomalies.md").write_text(page(chosen.bad, chosen.seeds, chosen.pseudo_seeds))


if __name__ == "__main__":
    main()
