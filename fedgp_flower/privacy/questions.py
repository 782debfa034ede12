"""Questions under masks: server and sites compute the same hash of a question, and the masks depend on the hash."""

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

KEYS = "query.keys"
"""Message type that asks for a site's run key."""
REQUEST, MEMBERS, ANSWERS, LAYOUT, WORDS = "masked", "members", "answers", "layout", "masked"
"""Config keys of a request, of the context's roster, of a reply (H, and the layout if needed); the array of a reply."""
LEAST_SITES = 3
"""Fewest sites in a total; with two, each site could subtract its summand to find the other's."""
MAX_CHANGES = 2
"""Default of the most changes of the roster in a run that a site accepts."""


def context_digest(record: Mapping[str, Any], constants: Mapping[str, NDArray[Any]]) -> str:
    """Return the hash of the context: agreed columns and scales, settings, keys and constants, which are sent once."""
    content = {name: value for name, value in record.items() if name != "digest"}
    return content_digest(json.dumps(content, sort_keys=True), constants)


def content_digest(context: str, arrays: Mapping[str, NDArray[Any]]) -> str:
    """Return the hash of a question's arrays and its context."""
    whole = hashlib.sha256(context.encode())
    for name, array in sorted(arrays.items()):
        whole.update(f"\n{name} {array.dtype.str} {array.shape} ".encode() + np.ascontiguousarray(array).tobytes())
    return whole.hexdigest()


@dataclass(frozen=True, slots=True)
class MaskedQuestion:
    """The parts of a question that determine its masks."""

    run: str
    round: int
    number: int
    """Number of the question in the run; a site answers no question with a lower number than its latest."""
    kind: str
    content: str
    """:func:`content_digest`."""
    layout: Layout | None
    """Arrays of the answer; None if the server learns them from the replies."""
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
        """H, the hash of the question with its roster."""
        return _hash(self.subject, [[member.site, member.key, member.signature] for member in self.members])

    def secrets(self, identity: Identity, site: str) -> dict[str, bytes]:
        """Return the secret that a site shares with each other site of the roster."""
        private, keys, found = identity.run_key(self.run), {member.site: member.key for member in self.members}, {}
        for other in keys.keys() - {site}:
            info = json.dumps(["fedgp pair 1", self.run, sorted([[site, keys[site]], [other, keys[other]]])]).encode()
            found[other] = masks.pair_secret(private, bytes.fromhex(keys[other]), info)
        return found

    def masked(self, words: masks.Words, identity: Identity, site: str) -> masks.Words:
        """Return the masked words that a site sends."""
        return masks.masked(words, self.secrets(identity, site), site, bytes.fromhex(self.digest))


def _hash(*content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def read_members(text: str) -> tuple[Member, ...]:
    """Read the roster in a message; raise ProtocolError if it is malformed."""
    try:
        return TypeAdapter(tuple[Member, ...]).validate_json(text)
    except ValidationError:
        raise ProtocolError("the roster is not JSON of sites, keys and signatures") from None


def written_members(members: Sequence[Member]) -> str:
    """Write a roster as JSON for :func:`read_members`."""
    return json.dumps([asdict(member) for member in members])


def flat(arrays: NamedArrays, layout: Layout) -> Array:
    """Return the arrays of a summand as one vector, in the order of the layout."""
    found = {name: list(array.shape) for name, array in arrays.items()}
    expected = {name: list(shape) for name, shape, _ in layout}
    if found != expected:
        name = min(name for name in {**found, **expected} if found.get(name) != expected.get(name))
        raise ProtocolError(f"array `{name}` of a summand: shape {found.get(name)}, expected {expected.get(name)}")
    return np.concatenate([np.asarray(arrays[name], np.float64).ravel() for name, _, _ in layout] or [np.empty(0)])


def unflat(vector: Array, layout: Layout) -> NamedArrays:
    """Return the arrays of a vector from :func:`flat`; integer arrays are rounded to integers."""
    arrays: NamedArrays = {}
    for name, shape, dtype in layout:
        size = int(np.prod(shape))
        part, vector = vector[:size].reshape(shape), vector[size:]
        arrays[name] = np.rint(part).astype(dtype) if dtype == "int64" else part
    return arrays


def length(layout: Layout) -> int:
    """Return the number of entries of a summand."""
    return sum(int(np.prod(shape)) for _, shape, _ in layout)


def layout_of(arrays: NamedArrays) -> Layout:
    """Return the layout of a summand."""
    return [[name, list(a.shape), "int64" if a.dtype.kind in "iub" else "float64"] for name, a in arrays.items()]


@dataclass(frozen=True, slots=True)
class History:
    """The latest question of a run that a site answered."""

    run: str
    round: int = -1
    number: int = -1
    subject: str = ""
    digest: str = ""
    roster: tuple[tuple[str, str], ...] = field(default=())
    changes: int = 0
    """Number of changes of the roster so far."""


def admitted(
    question: MaskedQuestion, member: Member, trust: Trust, history: History, limits: tuple[int, int]
) -> History:
    """Return the history after a question, or raise ProtocolError if the site may not answer it.

    ``limits`` are the fewest sites of a total and the most changes of the roster.
    """
    least, most = max(limits[0], LEAST_SITES), limits[1]
    sites, keys = question.sites, [member.key for member in question.members]
    if list(sites) != sorted(sites) or len(set(sites)) < len(sites) or len(set(keys)) < len(keys):
        raise ProtocolError("the roster names a site or a key twice, or is not sorted")
    if len(sites) < least:
        raise ProtocolError(f"the total has {len(sites)} sites; this site requires at least {least}")
    if member not in question.members:
        raise ProtocolError("this site's key is not in the roster")
    for other in question.members:
        trust.require(question.run, other)
    _check_order(question, history)
    roster = tuple((member.site, member.key) for member in question.members)
    changes = history.changes + (bool(history.roster) and roster != history.roster)
    if changes > most:
        raise ProtocolError(
            f"the roster would change {changes} times in this run; this site accepts {most} changes"
            " (`max-roster-changes`), because the difference of two totals is the summand of the site that left"
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
        raise ProtocolError(f"question {question.number} differs from the question with this number that was answered")
    roster = {(member.site, member.key) for member in question.members}
    if not roster < set(history.roster):
        raise ProtocolError(f"the roster of question {question.number} does not shrink: it may only lose sites")
