"""A site's half of totals under masks: who it is, what it refuses, and what it remembers of a run.

What a site has answered stands in the node's Context and, with ``state-dir``, on its disk *before* the reply leaves:
a site that forgets can be asked the same under another roster. The same request gets the same bytes. With ``state-dir``
one question of a run is answered at a time, also where Flower starts a process for each: two that were asked at once
would not know of each other.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from pydantic import TypeAdapter, ValidationError

from fedgp_flower.clients.state import file_of, write_private
from fedgp_flower.data.sites import site_id
from fedgp_flower.errors import ConfigError, ProtocolError, RunError
from fedgp_flower.files import read_arrays, write_arrays
from fedgp_flower.messages import Layout, encode, is_summand
from fedgp_flower.privacy import masks
from fedgp_flower.privacy.keys import Identity, Trust
from fedgp_flower.privacy.questions import (
    LEAST_SITES,
    MAX_CHANGES,
    History,
    MaskedQuestion,
    SitePolicy,
    admitted,
    content_digest,
    flat,
    layout_of,
    length,
    read_members,
)
from fedgp_flower.records import array_record, numpy_array, record_of, settings_of
from fedgp_flower.typing import NamedArrays

logger = logging.getLogger("fedgp")

CONTEXT, CONFIGURATION = "context", "configuration"
"""Config key of a message that names what all sites share, and that of settings a message brings by itself."""
REQUEST, MEMBERS, ANSWERS, LAYOUT = "masked", "members", "answers", "layout"
"""Config key of a request, of the context's roster, and of a reply: H, and the layout where the server has none."""
WORDS = "masked"
"""The one array of a reply."""
KEYS = "query.keys"
DESCRIBE, TRUST = "query.describe", "trust-file"
"""Kind of the description, and the number in it that says that the site has a trust file."""


@dataclass(frozen=True, slots=True)
class Guard:
    """A site as it takes part in totals."""

    site: str
    identity: Identity
    trust: Trust
    policy: SitePolicy

    @staticmethod
    def of(node_config: Mapping[str, Any]) -> Guard:
        """By ``site-key``, ``trust``, ``min-sites`` and ``max-roster-changes`` of the node configuration."""
        site = site_id(node_config)
        least = int(node_config.get("min-sites", LEAST_SITES))
        policy = SitePolicy(max(least, LEAST_SITES), int(node_config.get("max-roster-changes", MAX_CHANGES)))
        files = [str(node_config.get(key, "")) for key in ("site-key", "trust")]
        if all(files):
            return Guard(site, Identity.read(Path(files[0])), Trust.read(Path(files[1])), policy)
        if any(files) or "partition-id" not in node_config:
            raise ConfigError(
                "totals under masks need `site-key` and `trust` in the node configuration of a real site; make them"
                " with `fedgp site key` and `fedgp site trust`"
            )
        return Guard(site, Identity.simulated(site), Trust(None), policy)


def introduced(context: Context, run: str) -> tuple[NamedArrays, dict[str, Any], dict[str, Any]]:
    """The answer to ``query.keys``: this site's line of the roster, and the latest question it has answered."""
    guard = Guard.of(context.node_config)
    member = guard.identity.member(run, guard.site)
    latest = Journal(context, run).history.number
    return {}, {"num-examples": 0, "latest-question": latest}, {"key": member.key, "signature": member.signature}


def require_masks(context: Context, wanted: bool, kind: str, public: bool) -> None:
    """Refuse to answer in the clear where the run or the site's owner wants masks."""
    if (wanted or context.node_config.get("trust")) and kind not in {DESCRIBE, KEYS} and not public:
        raise ProtocolError(
            f"this site answers `{kind}` under masks alone; the run needs `privacy.secure-aggregation = true` and a"
            " method that asks for totals"
        )


def require_shared(config: Mapping[str, Any]) -> None:
    """Refuse a question under masks that is understood by anything but the context, which its masks are bound to.

    A site that were told of other settings, or of no scales, would add another summand or none, under masks that
    cancel: from that total and the one before follows what it adds.
    """
    if CONTEXT not in config or CONFIGURATION in config:
        raise ProtocolError(
            "a question under masks is understood by the context that all sites share, and by nothing beside it; this"
            f" one {'brings a configuration' if CONFIGURATION in config else 'names no context'}"
        )


class Journal:
    """What a site remembers of the masked questions of a run, and its latest reply."""

    def __init__(self, context: Context, run: str) -> None:
        self.context, self.run = context, run
        self.name = f"masks.{hashlib.sha256(run.encode()).hexdigest()[:16]}"
        self.folder = file_of(context, "")

    @property
    def history(self) -> History:
        """The later of what the Context and the disk hold: a kill can leave an older Context."""
        texts = [str((record_of(self.context.state, self.name, ConfigRecord) or ConfigRecord()).get("history", ""))]
        if self.folder is not None and (self.folder / f"{self.name}.json").exists():
            texts.append((self.folder / f"{self.name}.json").read_text(encoding="utf-8"))
        found = [TypeAdapter(History).validate_json(text) for text in texts if text]
        return max(found, key=lambda entry: (entry.number, entry.changes), default=History(self.run))

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
        kept = record_of(self.context.state, "masks.reply", ArrayRecord) or ArrayRecord()
        if digest in kept:
            return numpy_array(kept[digest])
        try:
            return None if self.folder is None else read_arrays(self.folder / "masks.reply.safetensors").get(digest)
        except RunError:
            return None

    def keep(self, history: History, words: masks.Words) -> None:
        """Remember an answer before it leaves: the question first, then the reply."""
        text = json.dumps(asdict(history))
        if self.folder is not None:
            write_private(self.folder / f"{self.name}.json", text.encode())
            write_arrays(self.folder / "masks.reply.safetensors", {history.digest: words})
        self.context.state[self.name] = ConfigRecord({"history": text})
        self.context.state["masks.reply"] = array_record({history.digest: words})


def question_of(message: Message, context: Context, request: Any, digest: str) -> MaskedQuestion:
    """The question as this site has received it."""
    config = settings_of(message)
    try:
        said = json.loads(str(config[REQUEST]))
        sites, number = [str(site) for site in said["sites"]], int(said["number"])
        layout: Layout | None = TypeAdapter(Layout | None).validate_python(said["layout"])
    except (ValueError, KeyError, TypeError, ValidationError):
        raise ProtocolError("the message is no question under masks: other version of the app") from None
    kept = record_of(context.state, "context", ConfigRecord) or ConfigRecord()
    members = {member.site: member for member in read_members(str(kept.get(MEMBERS, "[]")))}
    missing = sorted(set(sites) - set(members))
    if missing:
        raise ProtocolError(f"the roster names {', '.join(missing[:5])}, whose keys were not sent")
    return MaskedQuestion(
        run=str(config["run"]),
        round=int(str(config["round"])),
        number=number,
        kind=message.metadata.message_type,
        content=content_digest(digest, encode(request)),
        layout=layout,
        members=tuple(members[site] for site in sites),
    )


def answered(
    question: MaskedQuestion, context: Context, answer: Callable[[], Any]
) -> tuple[NamedArrays, dict[str, Any], dict[str, Any]]:
    """The masked summand of this site, or masked zeros where it cannot answer and knows of what shape."""
    guard, journal = Guard.of(context.node_config), Journal(context, question.run)
    member = guard.identity.member(question.run, guard.site)
    texts: dict[str, Any] = {ANSWERS: question.digest}
    with journal.alone():
        history = admitted(question, member, guard.trust, guard.policy, journal.history)
        words = journal.reply(question.digest)
        if words is None or question.layout is None:
            plain, layout = _summand(question, answer)
            words = question.masked(plain, guard.identity, guard.site) if words is None else words
            texts |= {LAYOUT: json.dumps(layout)} if question.layout is None else {}
        journal.keep(history, words)
    return {WORDS: words}, {"num-examples": 0}, texts


def _summand(question: MaskedQuestion, answer: Callable[[], Any]) -> tuple[masks.Words, Layout]:
    """The site's summand, or zeros and a count of zero where it has none.

    Whatever the reason: the others' masks need its words. The total says how many added nothing; the reason stays in
    the site's log.
    """
    sites = len(question.members)
    try:
        found = answer()
        if not is_summand(type(found)):
            raise ProtocolError(f"`{type(found).__name__}` is no summand, so there is no total of it")
        arrays = encode(found)
        layout = layout_of(arrays) if question.layout is None else question.layout
        return masks.counted(flat(arrays, layout), sites), layout
    except Exception:
        if question.layout is None:
            raise
        logger.exception("this site adds nothing to `%s`", question.kind)
        return masks.nothing(length(question.layout)), question.layout
