"""The guard of a site's rows: the owner's policy, masked totals, and the log of replies.

A site stores each masked answer *before* the reply leaves, in its state folder or its Context. Otherwise a server could
ask the same question under another roster. With a state folder, a site answers one masked question at a time.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from pydantic import TypeAdapter, ValidationError

from fedgp_flower.clients.state import file_of, write_private
from fedgp_flower.config import RunConfig
from fedgp_flower.data.sites import site_id
from fedgp_flower.errors import ConfigError, ProtocolError, RunError, first_of
from fedgp_flower.files import exclusive, read_arrays, write_arrays
from fedgp_flower.messages import Layout, encode, from_parts, is_public, is_summand, to_parts
from fedgp_flower.privacy import audit, masks, questions
from fedgp_flower.privacy.keys import Identity, Trust
from fedgp_flower.privacy.policy import Rules
from fedgp_flower.records import SHARED, array_record, arrays_of, config_of, record_of
from fedgp_flower.typing import NamedArrays

logger = logging.getLogger("fedgp")

CONFIGURATION = "configuration"
"""Config key of a configuration that the message itself carries."""
WARNING = "warning"
"""Config key of a reply: warnings of the site's policy and about its rows."""
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
    """Checks one message before its handler, and its answer before the reply."""

    def __init__(self, message: Message, context: Context) -> None:
        self.message, self.context = message, context
        self.kind, self.settings = message.metadata.message_type, config_of(message)
        self.run, number = str(self.settings.get("run", "")), self.settings.get("round")
        self.round = number if isinstance(number, int) else -1
        self.masked = questions.REQUEST in self.settings
        self.rules = Rules(self.kind, self.masked)
        self.in_clear = False
        """Whether the message may be answered without masks; False until :meth:`admit`."""

    def admit(self, config: RunConfig, answer: object) -> None:
        """Raise an error unless the owner's policy allows the message and an ``answer`` of this class.

        A masked request may refer only to the context that all sites share. Other settings for one site would change
        its summand, and the difference of two totals would reveal it. Raises ProtocolError for a malformed or unmasked
        request, and the errors of :meth:`Rules.admit`.
        """
        if not self.run or self.round < 0:
            raise ProtocolError("the message names no run, or no round: its sender is no server of this app")
        if self.masked and (SHARED not in self.settings or CONFIGURATION in self.settings):
            fault = "carries a configuration" if CONFIGURATION in self.settings else "names no context"
            raise ProtocolError(f"a masked request may use only the context that all sites share; this one {fault}")
        node, rules = self.context.node_config, self.rules
        content = questions.content_digest(self.kind, arrays_of(self.message.content, "arrays"))
        rules.read(node).admit(config, self.run, self.round, str(node.get("state-dir") or ""), content)
        masked = config.privacy.secure_aggregation or Trust.of(node).keys
        self.in_clear = not masked or self.kind in {DESCRIBE, questions.KEYS} or is_public(answer)
        if not self.masked and not self.in_clear:
            raise ProtocolError(
                f"this site answers `{self.kind}` only with masks; the run needs `privacy.secure-aggregation = true`"
                " and a method that asks for totals"
            )

    def introduced(self) -> Outgoing:
        """The answer to ``query.keys``: the roster entry of this site, and the number of its latest masked question."""
        member = self._party()[0].member(self.run, site_id(self.context.node_config))
        latest = Journal(self.context, self.run).history.number
        numbers: dict[str, int | float] = {"num-examples": 0, "latest-question": latest}
        return Outgoing({}, numbers, {"key": member.key, "signature": member.signature})

    def summand(self, request: object, shared: str, handler: Callable[[], object]) -> Outgoing:
        """The masked answer of a handler, or ProtocolError; ``shared`` is the hash of the context."""
        question, (identity, trust) = self._question(questions.content_digest(shared, encode(request))), self._party()
        node, journal = self.context.node_config, Journal(self.context, self.run)
        member = identity.member(self.run, site_id(node))
        limits = (
            int(node.get("min-sites", questions.LEAST_SITES)),
            int(node.get("max-roster-changes", questions.MAX_CHANGES)),
        )
        texts: dict[str, str | bool] = {questions.ANSWERS: question.digest}
        with journal.locked():
            history = questions.admitted(question, member, trust, journal.history, limits)
            words = journal.reply(question.digest)
            if words is None or question.layout is None:
                plain, layout = _summand(question, handler)
                words = question.masked(plain, identity, member.site) if words is None else words
                texts |= {questions.LAYOUT: json.dumps(layout)} if question.layout is None else {}
            journal.keep(history, words)
        return Outgoing({questions.WORDS: words}, {"num-examples": 0}, texts)

    def _party(self) -> tuple[Identity, Trust]:
        """Its identity and the sites it trusts; ConfigError if a real site lacks ``site-key`` or ``trust``."""
        node = self.context.node_config
        file, trust = str(node.get("site-key", "")), Trust.of(node)
        if file and trust.keys:
            return Identity.read(Path(file)), trust
        if file or trust.keys or "partition-id" not in node:
            raise ConfigError(
                "masked totals need `site-key` and `trust` in the node configuration of a real site; create them with"
                " `fedgp site key` and `fedgp site trust`"
            )
        return Identity.simulated(site_id(node)), Trust(None)

    @property
    def summands(self) -> int:
        """Number of sites in the total that hides the answer; 1 without masks."""
        return len(self._asked[0]) if self.masked else 1

    @cached_property
    def _asked(self) -> tuple[list[str], int, Layout | None]:
        """Sites, number and layout of the masked question of the message; ProtocolError if it is malformed."""
        try:
            fields = json.loads(str(self.settings[questions.REQUEST]))
            sites, number = [str(site) for site in fields["sites"]], int(fields["number"])
            layout: Layout | None = TypeAdapter(Layout | None).validate_python(fields["layout"])
        except (ValueError, KeyError, TypeError, ValidationError):
            raise ProtocolError("the message is no masked question of this version of the app") from None
        return sites, number, layout

    def _question(self, content: str) -> questions.MaskedQuestion:
        """The masked question of the message; ProtocolError if it is malformed or its roster lacks keys."""
        sites, number, layout = self._asked
        shared = record_of(self.context.state, SHARED, ConfigRecord) or ConfigRecord()
        members = {member.site: member for member in questions.read_members(str(shared.get(questions.MEMBERS, "[]")))}
        missing = sorted(set(sites) - set(members))
        if missing:
            raise ProtocolError(f"the roster names {first_of(missing)}, but the server sent no keys of them")
        roster = tuple(members[site] for site in sites)
        return questions.MaskedQuestion(self.run, self.round, number, self.kind, content, layout, roster)

    def released(self, outgoing: Outgoing) -> Outgoing:
        """Return an answer that may leave; ProtocolError if it has unmasked arrays and must be masked."""
        if outgoing.arrays.keys() - {questions.WORDS} if self.masked else outgoing.arrays and not self.in_clear:
            raise ProtocolError(f"`{self.kind}` may not be answered in the clear")
        return outgoing

    def record(self, reply: Message) -> None:
        """Write the reply to the audit log of the site, before the reply leaves."""
        path = audit.log_of(self.context.node_config)
        if path is not None:
            copy = str(self.context.node_config.get("audit-copy", ""))
            audit.record(path, self.message, reply, self.rules.decisions, self.masked, copy)


class Journal:
    """The history of masked questions of a run and the latest masked reply, on disk or in the Context of the site."""

    def __init__(self, context: Context, run: str) -> None:
        self.state, self.run = context.state, run
        self.name = f"masks.{hashlib.sha256(run.encode()).hexdigest()[:16]}"
        self.folder = file_of(context, "")

    @property
    def history(self) -> questions.History:
        """The history of the answered questions."""
        if self.folder is None:
            text = str((record_of(self.state, self.name, ConfigRecord) or ConfigRecord()).get("history", ""))
        else:
            path = self.folder / f"{self.name}.json"
            text = path.read_text(encoding="utf-8") if path.exists() else ""
        return TypeAdapter(questions.History).validate_json(text) if text else questions.History(self.run)

    def locked(self) -> AbstractContextManager[None]:
        """Hold the lock of this run in the state folder; without a folder there is no lock."""
        return nullcontext() if self.folder is None else exclusive(self.folder / f"{self.name}.lock")

    def reply(self, digest: str) -> masks.Words | None:
        """The stored masked reply to the question with this hash, or None."""
        if self.folder is None:
            stored = record_of(self.state, KEPT_REPLY, ArrayRecord) or ArrayRecord()
            return stored[digest].numpy() if digest in stored else None
        try:
            return read_arrays(self.folder / f"{KEPT_REPLY}.safetensors").get(digest)
        except RunError:
            return None

    def keep(self, history: questions.History, words: masks.Words) -> None:
        """Store an answer before it leaves: first the question, then the reply."""
        text = json.dumps(asdict(history))
        if self.folder is None:
            self.state[self.name] = ConfigRecord({"history": text})
            self.state[KEPT_REPLY] = array_record({history.digest: words})
        else:
            write_private(self.folder / f"{self.name}.json", text.encode())
            write_arrays(self.folder / f"{KEPT_REPLY}.safetensors", {history.digest: words})


def _summand(question: questions.MaskedQuestion, handler: Callable[[], object]) -> tuple[masks.Words, Layout]:
    """The summand of the site and its layout; zeros if the handler fails, so that the masks of all sites cancel."""
    try:
        answer = handler()
        if not is_summand(type(answer)):
            raise ProtocolError(f"`{type(answer).__name__}` is no summand, so sites cannot send its total")
        arrays = encode(from_parts(type(answer), *to_parts(answer)))  # rounded as an answer without a mask
        layout = questions.layout_of(arrays) if question.layout is None else question.layout
        return masks.counted(questions.flat(arrays, layout), len(question.members)), layout
    except Exception:  # a missing reply would spoil the total of all sites, and zeros reveal nothing
        if question.layout is None:
            raise
        logger.exception("this site adds zero to `%s`", question.kind)
        return masks.nothing(questions.length(question.layout)), question.layout
