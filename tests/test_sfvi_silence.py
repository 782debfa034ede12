"""Nothing that is a site's own is among the bytes it sends, and the listener would hear it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults import FaultyGrid, run
from flwr.app import Message
from test_sfvi import mixed, tiny, visits_csv

from fedgp_flower.clients.state import ARRAYS
from fedgp_flower.data.sites import load_all_sites
from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.messages import decode
from fedgp_flower.methods.sfvi.client import SFVIClient
from fedgp_flower.methods.sfvi.memory import SiteMemory
from fedgp_flower.methods.sfvi.messages import GradientRequest, GradientShare


class Listening(FaultyGrid):
    """Keeps all bytes that leave a site, and what the site knew when they left."""

    def __init__(self, *told: Any) -> None:
        super().__init__(*told)
        self.sent: list[tuple[str, bytes]] = []
        self.secrets: dict[str, set[bytes]] = {}

    def answer(self, message: Message) -> Message:
        reply = super().answer(message)
        context = self.contexts[message.metadata.dst_node_id]
        site = str(context.node_config["partition-id"])
        own = {name: array.numpy() for name, array in (context.state.array_records.get(ARRAYS) or {}).items()}
        memory = decode(SiteMemory, own).latest
        for values in () if memory is None else (memory.local, memory.first, memory.second):
            for value in values.values():
                self.secrets.setdefault(site, set()).update(words(value))
        self.sent.append((site, content(reply)))
        return reply


def words(array: np.ndarray) -> set[bytes]:
    """The bytes of every number that is not one that anybody may come by."""
    flat = np.asarray(array, dtype=np.float64).ravel()
    return {value.tobytes() for value in flat if value not in (0.0, 1.0) and math.isfinite(value)}


def content(message: Message) -> bytes:
    """Every byte of a message: arrays, numbers, texts."""
    out = []
    for record in message.content.array_records.values():
        out += [array.data for array in record.values()]
    for numbers_of in message.content.metric_records.values():
        out += [np.asarray(value, dtype=np.float64).tobytes() for value in numbers_of.values()]
    for texts_of in message.content.config_records.values():
        out += [repr(value).encode() for value in texts_of.values()]
    return b"|".join(out)


def leaks(flat: dict[str, Any]) -> dict[str, int]:
    """How many private numbers of each of three sites are among the bytes it sent."""
    grid = Listening(flat, 3)
    strategy = run(grid)
    prepared = strategy.preparation
    preparation = Preparation.from_wire(prepared.arrays, prepared.schema)
    found = {}
    for site in load_all_sites(strategy.config, 3):
        data = site.encode(preparation)
        own = grid.secrets[site.site] | words(data.x) | words(data.y) | words(site.train.select_dtypes("number"))
        heard = b"".join(sent for sender, sent in grid.sent if sender == site.site)
        assert len(own) > 100
        assert len(heard) > 1000
        found[site.site] = sum(word in heard for word in own)
    return found


@pytest.mark.parametrize(
    "keys",
    [
        {"sfvi__warm_start_rounds": 2, "sfvi__local_steps": 3},
        {"method": "sfvi-avg", "sfvi__local_steps": 3, "sfvi__structure": "full"},
    ],
    ids=["sfvi", "avg"],
)
def test_nothing_about_local_latents_leaves_a_site(keys: dict[str, Any]) -> None:
    """No number of q(Z_Lk | Z_G), of its optimiser, or of a row is among the bytes of any message of any site."""
    assert not any(leaks(tiny(evaluate_every=2, **keys)).values())


def test_nothing_about_units_leaves_a_site(tmp_path: Path) -> None:
    """The latents of units are not among the bytes of any message."""
    keys = {"sfvi__warm_start_rounds": 2, "sfvi__local_steps": 2}
    assert not any(leaks(mixed(visits_csv(tmp_path), "three", **keys)).values())


def test_the_listener_hears_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """One number of one site's latents among the figures of its replies is enough."""
    original = SFVIClient.gradient

    def gradient(self: SFVIClient, request: GradientRequest) -> GradientShare:
        share = original(self, request)
        latents = next(iter(decode(SiteMemory, self.state.arrays).latest.local.values()))
        return replace(share, objective=float(latents.ravel()[0])) if self.site.site == "1" else share

    monkeypatch.setattr(SFVIClient, "gradient", gradient)
    assert {site for site, found in leaks(tiny()).items() if found} == {"1"}
