"""What a round of SFVI carries: once a site has what does not change, the numbers of the method and little else."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from faults import Fault, FaultyGrid, Recorder, arrays, blamed, configured, parameters, run
from flwr.app import Message, RecordDict

from fedgp_flower.records import numpy_arrays
from strategies.server.network import LACKS, SharedContext


class Watched(FaultyGrid):
    """Keeps what every message carries, as the site gets it, and the reply's arrays."""

    def __init__(self, *told: Any) -> None:
        super().__init__(*told)
        self.down: list[tuple[str, int, dict[str, np.ndarray]]] = []
        self.up: list[dict[str, np.ndarray]] = []
        self.once: list[bool] = []

    def answer(self, message: Message) -> Message:
        reply = super().answer(message)
        records, config = message.content.array_records, message.content.config_records["config"]
        carries = {name: array for record in records.values() for name, array in numpy_arrays(record).items()}
        self.once.append("context" in message.content)
        self.down.append((message.metadata.message_type, int(str(config["round"])), carries))
        self.up.append(numpy_arrays(reply.content.array_records["arrays"]))
        return reply

    def forget(self, site: str) -> None:
        """The site loses its memory and keeps its node id."""
        self.contexts[self.node_of(site)].state = RecordDict()


def classes_csv(folder: Path) -> Path:
    """Three classes, a hundred inputs of which one tells them apart."""
    draw = np.random.default_rng(2)
    label = draw.integers(0, 3, 120)
    x = draw.standard_normal((120, 100))
    x[:, 0] += label
    frame = pd.DataFrame(x, columns=[f"x{i}" for i in range(100)]).assign(y=label)
    frame.to_csv(folder / "classes.csv", index=False)
    return folder / "classes.csv"


def multinomial(folder: Path, **changes: Any) -> dict[str, Any]:
    """Multinomial regression: no local latents, so that a site that forgets owes nothing but what was sent once."""
    own = {
        "method": "sfvi",
        "dataset": str(classes_csv(folder)),
        "target": "y",
        "standardise": False,
        "sfvi__model": "multinomial",
        "sfvi__classes": 3,
        "sfvi__samples": 2,
        "sfvi__learning_rate": 0.1,
    }
    return configured(**{**own, **changes})


def test_bytes_of_a_round_keep_to_the_bound(tmp_path: Path) -> None:
    """1.1 · (2 |η_G| + 2 |θ| + S |ε|) · 8 for a site, everything included that crosses the wire."""
    grid = Watched(multinomial(tmp_path), 3)
    strategy = run(grid)
    numbers = sum(array.size for array in parameters(strategy).values())
    draws = 2 * len(parameters(strategy)["q.mean"])
    visits = [visit for visit in grid.visits if visit.phase == "train.gradient"]
    later = [visit.down + visit.up for visit in visits if visit.round > 1]
    assert len(later) == 9
    assert max(later) <= 1.1 * (2 * numbers + draws) * 8
    with_context = [phase for (phase, _, _), once in zip(grid.down, grid.once, strict=True) if once]
    assert with_context == ["train.gradient"] * 3  # the first message that needs it


def test_a_site_that_forgot_is_sent_it_again_and_nothing_changes(tmp_path: Path) -> None:
    flat = multinomial(tmp_path)
    calm = run(FaultyGrid(flat, 3))
    grid, recorder = Watched(flat, 3), Recorder()
    recorder.at[2] = lambda: grid.forget("1")
    strategy = run(grid, recorder)
    assert not blamed(strategy)
    for name, array in parameters(calm).items():
        assert np.array_equal(parameters(strategy)[name], array), name
    assert strategy.evaluation["test"] == calm.evaluation["test"]
    asked = [(visit.round, visit.site) for visit in grid.visits if visit.phase == "train.gradient"]
    assert {key for key in asked if asked.count(key) > 1} == {(3, "1")}


def test_a_site_that_claims_to_forget_for_ever_fails(tmp_path: Path) -> None:
    flat = multinomial(tmp_path, num_server_rounds=2)
    grid = FaultyGrid(flat, 3, Fault("1", claiming, ("train.gradient",)))
    strategy = run(grid)
    reasons = blamed(strategy)
    assert set(reasons) == {"1"}
    assert len(reasons["1"]) == 2
    assert all("sent once" in reason for reason in reasons["1"])


def claiming(reply: Message) -> Message:
    """A site that says it lacks what it was sent."""
    reply = arrays(lambda own: {})(reply) or reply
    reply.content.config_records["config"][LACKS] = True
    return reply


def test_a_context_is_named_by_what_it_holds() -> None:
    """A message that names another digest is not read with what a site keeps."""
    arrays_of_all, texts = {"input.mean": np.array([2.0, 3.0])}, {"schema": "a"}
    context = SharedContext.of(arrays_of_all, texts, {"points": np.ones((2, 3))})
    others = (
        SharedContext.of({"input.mean": np.array([2.0, 3.5])}, texts, {"points": np.ones((2, 3))}),
        SharedContext.of(arrays_of_all, {"schema": "b"}, {"points": np.ones((2, 3))}),
        SharedContext.of(arrays_of_all, texts, {"points": np.ones((3, 2))}),
        SharedContext.of(arrays_of_all, texts, {"point": np.ones((2, 3))}),
        SharedContext.of(arrays_of_all, texts),
    )
    assert len({context.whole, *(other.whole for other in others)}) == 6
    same = SharedContext.of(arrays_of_all, texts, {"points": np.ones((2, 3))})
    assert same.whole == context.whole
    assert same.constants["points"].numpy().shape == (2, 3)
