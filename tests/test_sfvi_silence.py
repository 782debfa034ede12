"""Nothing that is a site's own is among the bytes it sends, and the listener would hear it."""

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
from fedgp_flower.methods.sfvi.learner import SiteMemory
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
    """The bytes of every number but whole ones: a count of rows, which a site sends, may equal an input such as 10."""
    flat = np.asarray(array, dtype=np.float64).ravel()
    return {value.tobytes() for value in flat if math.isfinite(value) and value != np.rint(value)}


def content(message: Message) -> bytes:
    """Every byte of a message: arrays, numbers, texts."""
    records = message.content
    arrays = [array.data for record in records.array_records.values() for array in record.values()]
    numbers = [np.float64(value).tobytes() for record in records.metric_records.values() for value in record.values()]
    texts = [repr(value).encode() for record in records.config_records.values() for value in record.values()]
    return b"|".join([*arrays, *numbers, *texts])


def leaks(flat: dict[str, Any]) -> dict[str, int]:
    """How many private numbers of each of three sites are among the bytes it sent."""
    grid = Listening(flat, 3)
    strategy = run(grid)
    preparation, found = Preparation.from_wire(strategy.preparation.arrays, strategy.preparation.schema), {}
    for site in load_all_sites(strategy.config, 3):
        data = site.encode(preparation)
        private = grid.secrets[site.site] | words(data.x) | words(data.y) | words(site.train.select_dtypes("number"))
        heard = b"".join(sent for sender, sent in grid.sent if sender == site.site)
        assert len(private) > 100
        assert len(heard) > 1000
        found[site.site] = sum(word in heard for word in private)
    return found


def test_nothing_about_local_latents_leaves_a_site(tmp_path: Path) -> None:
    """No number of q(Z_Lk | Z_G), of its optimiser, or of a row is among the bytes of any message of any site."""
    warm = {"sfvi__warm_start_rounds": 2, "sfvi__local_steps": 2}
    average = {"method": "sfvi-avg", "sfvi__local_steps": 2, "sfvi__structure": "full"}
    units = mixed(visits_csv(tmp_path), "three", sfvi__warm_start_rounds=2, sfvi__local_steps=2)
    for flat in (tiny(evaluate_every=2, **warm), tiny(evaluate_every=2, **average), units):
        assert not any(leaks(flat).values())


def test_the_listener_hears_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """One number of one site's latents among the figures of its replies is enough."""
    original = SFVIClient.gradient

    def gradient(self: SFVIClient, request: GradientRequest) -> GradientShare:
        share = original(self, request)
        latents = next(iter(decode(SiteMemory, self.state.arrays).latest.local.values()))
        return replace(share, objective=float(latents.ravel()[0])) if self.site.site == "1" else share

    monkeypatch.setattr(SFVIClient, "gradient", gradient)
    assert {site for site, found in leaks(tiny()).items() if found} == {"1"}
