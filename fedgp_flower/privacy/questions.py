"""A question under masks as both sides see it: its masks are bound to a hash that both compute from what they have."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from fedgp_flower.errors import ProtocolError
from fedgp_flower.messages import Layout
from fedgp_flower.privacy import masks
from fedgp_flower.privacy.keys import Identity, Member, Trust
from fedgp_flower.typing import Array, NamedArrays

LEAST_SITES = 3
"""Of two sites each knows the other's summand from the total."""
MAX_CHANGES = 2
"""Changes of the roster in a run that a site accepts unless its owner says otherwise."""


def context_digest(record: Mapping[str, Any], constants: Mapping[str, NDArray[Any]]) -> str:
    """The hash of what every message needs and is sent once: agreed columns and scales, settings, keys, constants."""
    content = {name: value for name, value in record.items() if name != "digest"}
    whole = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
    for name, array in sorted(constants.items()):
        whole.update(f"{name} {array.dtype} {array.shape} ".encode() + array.tobytes())
    return whole.hexdigest()


def content_digest(context: str, arrays: Mapping[str, NDArray[Any]]) -> str:
    """The hash of what a question asks: its arrays, and the agreed scales and settings it is understood by."""
    whole = hashlib.sha256(context.encode())
    for name, array in sorted(arrays.items()):
        whole.update(f"\n{name} {array.dtype.str} {array.shape} ".encode() + np.ascontiguousarray(array).tobytes())
    return whole.hexdigest()


@dataclass(frozen=True, slots=True)
class MaskedQuestion:
    """Everything that the masks of a question are bound to."""

    run: str
    round: int
    number: int
    """Counts the questions of a run; a site answers no older one."""
    kind: str
    content: str
    """:func:`content_digest`."""
    layout: Layout | None
    """Arrays of the answer; None where the server learns it from the replies."""
    members: tuple[Member, ...]

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites of the roster."""
        return tuple(member.site for member in self.members)

    @property
    def subject(self) -> str:
        """The hash of the question without its roster."""
        return _hash(self.run, self.round, self.number, self.kind, self.content, self.layout)

    @property
    def digest(self) -> str:
        """H."""
        return _hash(self.subject, [[entry.site, entry.key, entry.signature] for entry in self.members])

    def secrets(self, identity: Identity, site: str) -> dict[str, bytes]:
        """What a site shares with each of the others."""
        private, keys, found = identity.run_key(self.run), {entry.site: entry.key for entry in self.members}, {}
        for other in keys.keys() - {site}:
            info = json.dumps(["fedgp pair 1", self.run, sorted([[site, keys[site]], [other, keys[other]]])]).encode()
            found[other] = masks.pair_secret(private, bytes.fromhex(keys[other]), info)
        return found

    def masked(self, words: masks.Words, identity: Identity, site: str) -> masks.Words:
        """What a site sends."""
        return masks.masked(words, self.secrets(identity, site), site, bytes.fromhex(self.digest))


def _hash(*content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def read_members(text: str) -> tuple[Member, ...]:
    """The roster in a message."""
    try:
        return TypeAdapter(tuple[Member, ...]).validate_json(text)
    except ValidationError:
        raise ProtocolError("the roster is not JSON of sites, keys and signatures") from None


def written_members(members: Sequence[Member]) -> str:
    """The inverse of :func:`read_members`."""
    return json.dumps([asdict(member) for member in members])


def flat(arrays: NamedArrays, layout: Layout) -> Array:
    """The arrays of a summand as one vector, in the order of the layout."""
    have = {name: list(array.shape) for name, array in arrays.items()}
    want = {name: list(shape) for name, shape, _ in layout}
    if have != want:
        odd = sorted(name for name in {**have, **want} if have.get(name) != want.get(name))[0]
        raise ProtocolError(f"array `{odd}` of a summand: shape {have.get(odd)}, expected {want.get(odd)}")
    return np.concatenate([np.asarray(arrays[name], np.float64).ravel() for name, _, _ in layout] or [np.empty(0)])


def unflat(vector: Array, layout: Layout) -> NamedArrays:
    """The inverse of :func:`flat`; whole numbers are whole again."""
    arrays: NamedArrays = {}
    for name, shape, dtype in layout:
        size = int(np.prod(shape))
        part, vector = vector[:size].reshape(shape), vector[size:]
        arrays[name] = np.rint(part).astype(dtype) if dtype == "int64" else part
    return arrays


def length(layout: Layout) -> int:
    """Numbers in a summand."""
    return sum(int(np.prod(shape)) for _, shape, _ in layout)


def layout_of(arrays: NamedArrays) -> Layout:
    """The layout of a summand at hand."""
    kinds = {"i": "int64", "u": "int64", "b": "int64"}
    return [[name, list(entry.shape), kinds.get(entry.dtype.kind, "float64")] for name, entry in arrays.items()]


@dataclass(frozen=True, slots=True)
class History:
    """What a site remembers of the questions of a run."""

    run: str
    round: int = -1
    number: int = -1
    subject: str = ""
    digest: str = ""
    roster: tuple[tuple[str, str], ...] = field(default=())
    changes: int = 0
    """How often the roster was another one than before."""


def admitted(
    question: MaskedQuestion, member: Member, trust: Trust, history: History, limits: tuple[int, int]
) -> History:
    """What a site remembers of a question that it may answer; ``limits``: fewest sites, most changes of the roster."""
    least, most = max(limits[0], LEAST_SITES), limits[1]
    sites, keys = question.sites, [entry.key for entry in question.members]
    if list(sites) != sorted(sites) or len(set(sites)) < len(sites) or len(set(keys)) < len(keys):
        raise ProtocolError("the roster names a site or a key twice, or is not sorted")
    if len(sites) < least:
        raise ProtocolError(f"a total of {len(sites)} sites was asked for; this site takes part from {least} on")
    if member not in question.members:
        raise ProtocolError("this site's key is not in the roster")
    for other in question.members:
        trust.require(question.run, other)
    _check_order(question, history)
    roster = tuple((entry.site, entry.key) for entry in question.members)
    changes = history.changes + (bool(history.roster) and roster != history.roster)
    if changes > most:
        raise ProtocolError(
            f"the roster would change for the {changes}. time in this run; this site accepts {most}"
            " (`max-roster-changes`), because the difference of two totals is the summand of whoever left"
        )
    return History(question.run, question.round, question.number, question.subject, question.digest, roster, changes)


def _check_order(question: MaskedQuestion, history: History) -> None:
    if question.number < history.number or question.round < history.round:
        raise ProtocolError(
            f"question {question.number} of round {question.round} is older than question {history.number} of round"
            f" {history.round}, which this site has answered"
        )
    if question.number > history.number or question.digest == history.digest:
        return
    if question.subject != history.subject:
        raise ProtocolError(f"another question under number {question.number}, which this site has answered")
    roster = {(entry.site, entry.key) for entry in question.members}
    if not roster < set(history.roster):
        raise ProtocolError(f"the roster of question {question.number} does not shrink: it may only lose sites")
