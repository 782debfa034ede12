"""What stands before a site's rows: its owner's policy, totals under masks, and the log of what leaves.

What a site has answered under masks is kept *before* the reply leaves, in the folder of its state or in its Context: a
site that forgets could be asked the same under another roster. With a folder one question is answered at a time.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from pydantic import TypeAdapter, ValidationError

from fedgp_flower.clients.state import file_of, write_private
from fedgp_flower.config import RunConfig
from fedgp_flower.data.sites import site_id
from fedgp_flower.errors import ConfigError, ProtocolError, RunError
from fedgp_flower.files import read_arrays, write_arrays
from fedgp_flower.messages import Layout, encode, is_public, is_summand
from fedgp_flower.privacy import audit, masks
from fedgp_flower.privacy.keys import Identity, Trust
from fedgp_flower.privacy.policy import Rules
from fedgp_flower.privacy.questions import (
    ANSWERS,
    KEYS,
    LAYOUT,
    LEAST_SITES,
    MAX_CHANGES,
    MEMBERS,
    REQUEST,
    WORDS,
    History,
    MaskedQuestion,
    admitted,
    content_digest,
    flat,
    layout_of,
    length,
    read_members,
)
from fedgp_flower.records import SHARED, array_record, arrays_of, record_of, settings_of
from fedgp_flower.typing import NamedArrays

logger = logging.getLogger("fedgp")

CONFIGURATION = "configuration"
"""Config key of settings that a message brings by itself."""
WARNING = "warning"
"""Config key of a reply: what the site's policy warns of, and what it suspects of its rows."""
DESCRIBE = "query.describe"
"""Message type that asks for the columns and sums of a site; it and ``KEYS`` are always answered without masks."""
KEPT_REPLY = "masks.reply"


@dataclass(frozen=True, slots=True)
class Outgoing:
    """Arrays, numbers and texts of a reply."""

    arrays: NamedArrays = field(default_factory=dict)
    numbers: dict[str, int | float] = field(default_factory=dict)
    texts: dict[str, str | bool] = field(default_factory=dict)


class Guard:
    """What one message may ask, and what of the answer may leave."""

    def __init__(self, message: Message, context: Context) -> None:
        self.message, self.context = message, context
        self.kind, self.given = message.metadata.message_type, settings_of(message)
        self.run, number = str(self.given.get("run", "")), self.given.get("round")
        self.round = number if isinstance(number, int) else -1
        self.masked = REQUEST in self.given
        self.rules = Rules(self.kind, self.masked)
        self.in_clear = False
        """Whether this message may be answered without masks; not before it is admitted."""

    def admit(self, config: RunConfig, answer: object) -> None:
        """Refuse what the owner's policy does not allow, and an ``answer`` of this class where masks are wanted.

        Under masks the context alone may say what is asked: a site told of other settings than the rest would add
        another summand, which the difference of two totals shows.
        """
        if not self.run or self.round < 0:
            raise ProtocolError("the message names no run, or no round: it comes from no server of this app")
        if self.masked and (SHARED not in self.given or CONFIGURATION in self.given):
            found = "brings a configuration" if CONFIGURATION in self.given else "names no context"
            raise ProtocolError(
                "a question under masks is understood by the context that all sites share, and by nothing beside it;"
                f" this one {found}"
            )
        node, rules = self.context.node_config, self.rules
        content = content_digest(self.kind, arrays_of(self.message.content, "arrays"))
        rules.read(node).admit(config, self.run, self.round, str(node.get("state-dir") or ""), content)
        wanted = config.privacy.secure_aggregation or node.get("trust")
        self.in_clear = not wanted or self.kind in {DESCRIBE, KEYS} or is_public(answer)
        if not self.masked and not self.in_clear:
            raise ProtocolError(
                f"this site answers `{self.kind}` under masks alone; the run needs `privacy.secure-aggregation = true`"
                " and a method that asks for totals"
            )

    def introduced(self) -> Outgoing:
        """The answer to ``query.keys``: this site's line of the roster, and the latest question it has answered."""
        party = Party.of(self.context.node_config)
        member = party.identity.member(self.run, party.site)
        latest = Journal(self.context, self.run).history.number
        numbers: dict[str, int | float] = {"num-examples": 0, "latest-question": latest}
        return Outgoing({}, numbers, {"key": member.key, "signature": member.signature})

    def summand(self, request: object, shared: str, handler: Callable[[], object]) -> Outgoing:
        """The handler's answer under masks; ``shared`` is the hash of the context that the request is understood by."""
        question, party = self._question(content_digest(shared, encode(request))), Party.of(self.context.node_config)
        journal, member = Journal(self.context, self.run), party.identity.member(self.run, party.site)
        texts: dict[str, str | bool] = {ANSWERS: question.digest}
        with journal.alone():
            history = admitted(question, member, party.trust, journal.history, party.limits)
            words = journal.reply(question.digest)
            if words is None or question.layout is None:
                plain, layout = _summand(question, handler)
                words = question.masked(plain, party.identity, party.site) if words is None else words
                texts |= {LAYOUT: json.dumps(layout)} if question.layout is None else {}
            journal.keep(history, words)
        return Outgoing({WORDS: words}, {"num-examples": 0}, texts)

    def _question(self, content: str) -> MaskedQuestion:
        try:
            said = json.loads(str(self.given[REQUEST]))
            sites, number = [str(site) for site in said["sites"]], int(said["number"])
            layout: Layout | None = TypeAdapter(Layout | None).validate_python(said["layout"])
        except (ValueError, KeyError, TypeError, ValidationError):
            raise ProtocolError("the message is no question under masks: other version of the app") from None
        kept = record_of(self.context.state, SHARED, ConfigRecord) or ConfigRecord()
        members = {member.site: member for member in read_members(str(kept.get(MEMBERS, "[]")))}
        missing = sorted(set(sites) - set(members))
        if missing:
            raise ProtocolError(f"the roster names {', '.join(missing[:5])}, whose keys were not sent")
        roster = tuple(members[site] for site in sites)
        return MaskedQuestion(self.run, self.round, number, self.kind, content, layout, roster)

    def released(self, found: Outgoing) -> Outgoing:
        """What is about to leave, whatever has made it: words under masks alone, unless it may be in the clear."""
        if found.arrays.keys() - {WORDS} if self.masked else found.arrays and not self.in_clear:
            raise ProtocolError(f"`{self.kind}` may not be answered in the clear")
        return found

    def record(self, reply: Message) -> None:
        """Write the reply into the site's log, before it leaves."""
        path = audit.log_of(self.context.node_config)
        if path is not None:
            copy = str(self.context.node_config.get("audit-copy", ""))
            audit.record(path, self.message, reply, self.rules.decisions, self.masked, copy)


@dataclass(frozen=True, slots=True)
class Party:
    """A site as it takes part in totals."""

    site: str
    identity: Identity
    trust: Trust
    limits: tuple[int, int]
    """Fewest sites of a total, and most changes of the roster."""

    @staticmethod
    def of(node_config: Mapping[str, Any]) -> Party:
        """By ``site-key``, ``trust``, ``min-sites`` and ``max-roster-changes`` of the node configuration."""
        site = site_id(node_config)
        least, most = node_config.get("min-sites", LEAST_SITES), node_config.get("max-roster-changes", MAX_CHANGES)
        limits = int(least), int(most)
        files = [str(node_config.get(key, "")) for key in ("site-key", "trust")]
        if all(files):
            return Party(site, Identity.read(Path(files[0])), Trust.read(Path(files[1])), limits)
        if any(files) or "partition-id" not in node_config:
            raise ConfigError(
                "totals under masks need `site-key` and `trust` in the node configuration of a real site; make them"
                " with `fedgp site key` and `fedgp site trust`"
            )
        return Party(site, Identity.simulated(site), Trust(None), limits)


class Journal:
    """What a site remembers of the masked questions of a run, and its latest reply: on its disk, or in its Context."""

    def __init__(self, context: Context, run: str) -> None:
        self.state, self.run = context.state, run
        self.name = f"masks.{hashlib.sha256(run.encode()).hexdigest()[:16]}"
        self.folder = file_of(context, "")

    @property
    def history(self) -> History:
        """What was answered last."""
        if self.folder is None:
            text = str((record_of(self.state, self.name, ConfigRecord) or ConfigRecord()).get("history", ""))
        else:
            path = self.folder / f"{self.name}.json"
            text = path.read_text(encoding="utf-8") if path.exists() else ""
        return TypeAdapter(History).validate_json(text) if text else History(self.run)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else answers a question of this run meanwhile, as far as a folder can tell."""
        if self.folder is None:
            yield
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{self.name}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def reply(self, digest: str) -> masks.Words | None:
        """The words that were sent in answer to the question with this hash, if they are still here."""
        if self.folder is None:
            kept = record_of(self.state, KEPT_REPLY, ArrayRecord) or ArrayRecord()
            return kept[digest].numpy() if digest in kept else None
        try:
            return read_arrays(self.folder / f"{KEPT_REPLY}.safetensors").get(digest)
        except RunError:
            return None

    def keep(self, history: History, words: masks.Words) -> None:
        """Remember an answer before it leaves: the question first, then the reply."""
        text = json.dumps(asdict(history))
        if self.folder is None:
            self.state[self.name] = ConfigRecord({"history": text})
            self.state[KEPT_REPLY] = array_record({history.digest: words})
        else:
            write_private(self.folder / f"{self.name}.json", text.encode())
            write_arrays(self.folder / f"{KEPT_REPLY}.safetensors", {history.digest: words})


def _summand(question: MaskedQuestion, handler: Callable[[], object]) -> tuple[masks.Words, Layout]:
    """The site's summand, or zeros and a count of zero where it fails: the others' masks need its words."""
    try:
        found = handler()
        if not is_summand(type(found)):
            raise ProtocolError(f"`{type(found).__name__}` is no summand, so there is no total of it")
        arrays = encode(found)
        layout = layout_of(arrays) if question.layout is None else question.layout
        return masks.counted(flat(arrays, layout), len(question.members)), layout
    except Exception:  # whatever a method raises: silence would end the total of all, and zeros tell of no row
        if question.layout is None:
            raise
        logger.exception("this site adds nothing to `%s`", question.kind)
        return masks.nothing(length(question.layout)), question.layout
