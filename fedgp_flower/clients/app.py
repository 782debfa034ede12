"""A site's ClientApp: Flower messages in and out of a method's client, whatever the message and whatever goes wrong."""

from __future__ import annotations

import json
import logging
import time
import traceback
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod

from fedgp_flower.clients import masking
from fedgp_flower.clients.numpy_client import KIND, NAMES, Setting, SiteClient, handlers
from fedgp_flower.clients.prepared import prepared_site
from fedgp_flower.clients.state import load_state, require_same_rows, save_state
from fedgp_flower.config import RunConfig
from fedgp_flower.data.sites import RawSite, load_site, site_id
from fedgp_flower.data.standardisation import Preparation, bare
from fedgp_flower.errors import FedGPError
from fedgp_flower.gp.linalg import counting_repairs
from fedgp_flower.messages import ECHOED, is_public
from fedgp_flower.options import Value
from fedgp_flower.privacy import audit
from fedgp_flower.privacy.policy import Decision, Rules
from fedgp_flower.privacy.questions import context_digest
from fedgp_flower.records import APART, array_record, numpy_arrays, packed_record, record_of, settings_of
from fedgp_flower.typing import NamedArrays

logger = logging.getLogger("fedgp")

SCHEMA_VERSION = 2
CONTEXT, CONSTANTS, LACKS = "context", "constants", "lacks-context"
"""Records, config key and state of what travels to a site once; config key of a reply by a site that has it not."""
WARNING = "warning"
"""Config key of a reply: what the site's policy warns of, and what it suspects of its rows."""

LoadSite: TypeAlias = Callable[[RunConfig, Context], RawSite]
Answer: TypeAlias = tuple[NamedArrays, dict[str, Any], dict[str, Any]]
"""Arrays, numbers and texts of a reply."""


@lru_cache(maxsize=8)
def _parsed(parse: Callable[[dict[str, Value]], RunConfig], text: str) -> RunConfig:
    """The configuration in a text of JSON; sites that share a process have the same one. Ray pickles the app."""
    return parse(json.loads(text))


class SiteApp(ClientApp):
    """Answers every message of every method.

    Args:
        parse: From keys of a run to its configuration.
        client_of: From a configuration to the class of its method's client.
        load: The rows of a node, by the configuration of a run and the node's Context.
        mods: Flower's mods, applied to every message.
        train_mods: Mods of training messages alone, such as ``fixedclipping_mod``.
    """

    def __init__(
        self,
        parse: Callable[[dict[str, Value]], RunConfig],
        client_of: Callable[[RunConfig], type[SiteClient]],
        load: LoadSite | None = None,
        mods: list[Mod] | None = None,
        train_mods: list[Mod] | None = None,
    ) -> None:
        super().__init__(mods=mods)
        self.parse = parse
        self.client_of = client_of
        self.load = load
        self.train_mods = train_mods or []
        self.known: set[str] = set()

    def __call__(self, message: Message, context: Context) -> Message:
        """The reply to a message; a type seen for the first time is registered with Flower first."""
        kind = message.metadata.message_type
        if kind not in self.known:
            category, _, action = kind.partition(".")
            register = {"train": self.train, "query": self.query, "evaluate": self.evaluate}[category]
            mods = self.train_mods if category == "train" else []
            register(*([action] if action else []), mods=mods)(self.answer)
            self.known.add(kind)
        return super().__call__(message, context)

    def answer(self, message: Message, context: Context) -> Message:
        """Answer one message, and write into the site's audit log what leaves before it does."""
        decisions: list[Decision] = []
        reply = self._answered(message, context, decisions)
        path = audit.log_of(context.node_config)
        if path is not None:
            try:
                audit.record(path, message, reply, decisions, masking.REQUEST in settings_of(message))
            except FedGPError as error:
                return _refusal(message, context, str(error))
        return reply

    def _answered(self, message: Message, context: Context, decisions: list[Decision]) -> Message:
        """The reply. A site's error becomes one that names the site and says what is wrong.

        The words of an error that nobody foresaw may hold a cell of the site's table: they stay in the site's log.
        """
        started = time.perf_counter()
        try:
            if _lacks(message, context):
                return _reply(message, context, {}, {"num-examples": 0}, {LACKS: True})
            with counting_repairs() as repairs:
                arrays, metrics, texts = self._computed(message, context, decisions)
        except FedGPError as error:
            return _refusal(message, context, str(error))
        except Exception as error:
            kind, site = message.metadata.message_type, site_id(context.node_config)
            logger.exception("site %s could not answer %s", site, kind)
            place = traceback.extract_tb(error.__traceback__)[-1]
            what = f"unexpected {type(error).__name__} in {Path(place.filename).name}:{place.lineno}"
            said = f" ({error.strerror})" if isinstance(error, OSError) and error.strerror else ""
            return _refusal(message, context, f"{what}{said}; see the site's log")
        if masking.WORDS not in arrays:  # what a site spent may say how many rows it has
            metrics |= {f"repairs.{name}": count for name, count in repairs.items()}
            metrics["seconds"] = time.perf_counter() - started
        return _reply(message, context, arrays, metrics, texts)

    def _computed(self, message: Message, context: Context, decisions: list[Decision]) -> Answer:
        """Arrays, numbers and texts of the reply: the site's owner decides before any row is read."""
        given: dict[str, Any] = {**settings_of(message)}
        kind, run, masked = message.metadata.message_type, str(given["run"]), masking.REQUEST in given
        if masked:
            masking.require_shared(given)
        kept = record_of(context.state, CONTEXT, ConfigRecord) if given.get(CONTEXT) else None
        text = given.get("configuration") or (kept and kept["configuration"])
        config = _parsed(self.parse, str(text) if text else json.dumps(context.run_config, sort_keys=True))
        method = self.client_of(config)
        rules = Rules.of(context.node_config, kind, masked, decisions)
        rules.admit(config, run, int(given["round"]), context.node_config.get("state-dir"))
        if kind == masking.KEYS:
            return masking.introduced(context, run)
        if not masked:
            found = handlers(method).get(kind)
            public = found is not None and is_public(found.answer)
            masking.require_masks(context, config.privacy.secure_aggregation, kind, public)
        preparation = None if kept is None else _preparation(kept)
        site = self._site(config, context, (run, preparation), rules)
        if kind == masking.DESCRIBE:
            return _described(site, config, context)
        state, constants = load_state(context, run), _constants(context) if kept is not None else {}
        client = method(Setting(config, site, state, preparation, int(given["round"]), constants, rules))
        arrays = numpy_arrays(record_of(message.content, "arrays", ArrayRecord) or ArrayRecord())
        if masked:
            request, digest = client.asked(kind, arrays, given), context_digest(kept or {}, constants)
            question = masking.question_of(message, context, request, digest)
            answer = masking.answered(question, context, lambda: client.answer(kind, request))
        else:
            answer = _plain(client, list(arrays.values()), {**given, KIND: kind, NAMES: "\n".join(arrays)}, rules)
        if kind != "evaluate":
            save_state(context, state)
        return answer

    def _site(self, config: RunConfig, context: Context, of: tuple[str, Preparation | None], rules: Rules) -> RawSite:
        """This node's rows as its policy lets messages know them; what a user's loader reads is not kept."""
        run, preparation = of

        def checked(applied: Rules) -> RawSite:
            raw = load_site(config, context.node_config, run) if self.load is None else self.load(config, context)
            require_same_rows(context, run, raw)
            return applied.site(raw)

        if self.load is not None:
            return checked(rules)
        return prepared_site(context, (run, config, preparation), rules, checked)


def _plain(client: SiteClient, parameters: list[np.ndarray], given: dict[str, Any], rules: Rules) -> Answer:
    """The reply to a question in the clear, through Flower's ``fit`` or ``evaluate``."""
    if given[KIND] == "evaluate":
        loss, count, scores = client.evaluate(parameters, given)
        return {}, {"num-examples": count, "loss": loss, **scores}, {}
    outputs, count, numbers = client.fit(parameters, given)
    names = str(numbers.pop(NAMES))
    named = dict(zip(names.split("\n") if names else [], outputs, strict=True))
    return named, {"num-examples": count, **numbers}, {WARNING: rules.warning} if rules.warning else {}


def _described(site: RawSite, config: RunConfig, context: Context) -> Answer:
    """The answer to ``query.describe``: counts, sums and sums of squares of the training rows, and the schema.

    A site that answers under masks describes its columns alone; public ranges say nothing of rows anyway.
    """
    bounds, trust = config.privacy.bounds, bool(context.node_config.get("trust"))
    description = site.describe(bounds)
    numbers = {"num-examples": site.num_examples, "partitions": site.partitions, "dropped": site.dropped}
    texts = {"schema": description.schema, "label": site.label}
    if (config.privacy.secure_aggregation or trust) and not bounds:
        description, numbers = bare(description), {**numbers, "dropped": 0, "bare": 1}
    elif site.suspected and not bounds:
        texts[WARNING] = site.suspected
    return dict(description.arrays), {**numbers, **({masking.TRUST: 1} if trust else {})}, texts


def _lacks(message: Message, context: Context) -> bool:
    """Keep the context that a message brings; whether it names one that is not kept here."""
    digest = settings_of(message).get(CONTEXT)
    if digest is None:
        return False
    brought = record_of(message.content, CONTEXT, ConfigRecord)
    if brought is not None:
        context.state[CONTEXT] = ConfigRecord({**brought, "digest": str(digest)})
        context.state[CONSTANTS] = record_of(message.content, CONSTANTS, ArrayRecord) or ArrayRecord()
    kept = record_of(context.state, CONTEXT, ConfigRecord)
    return kept is None or kept["digest"] != digest


def _constants(context: Context) -> NamedArrays:
    """The arrays that this node was sent once."""
    return numpy_arrays(record_of(context.state, CONSTANTS, ArrayRecord) or ArrayRecord())


def _preparation(kept: ConfigRecord) -> Preparation:
    names = ("input.mean", "input.scale", "target.mean", "target.scale")
    return _agreed(str(kept["schema"]), tuple((name, tuple(np.ravel(kept[name]).tolist())) for name in names))


@lru_cache(maxsize=8)
def _agreed(schema: str, numbers: tuple[tuple[str, tuple[float, ...]], ...]) -> Preparation:
    """Sites that share a process agreed on the same."""
    arrays = {name: np.reshape(values, -1 if name.startswith("input") else ()) for name, values in numbers}
    return Preparation.from_wire(arrays, schema)


def _reply(
    message: Message,
    context: Context,
    arrays: Mapping[str, Any],
    metrics: Mapping[str, Any],
    texts: Mapping[str, Any],
) -> Message:
    record = array_record if settings_of(message).get(APART) else packed_record
    config = ConfigRecord({**_identity(message, context), **texts})
    content = RecordDict({"arrays": record(arrays), "metrics": MetricRecord(dict(metrics)), "config": config})
    return Message(content, reply_to=message)


def _refusal(message: Message, context: Context, error: str) -> Message:
    config = ConfigRecord({**_identity(message, context), "error": error})
    return Message(RecordDict({"config": config}), reply_to=message)


def _identity(message: Message, context: Context) -> dict[str, Any]:
    """Who answers, and which question: the server refuses an answer to another one."""
    given = settings_of(message)
    asked = {name: given[name] for name in ECHOED if name in given}
    return {"schema-version": SCHEMA_VERSION, "site": site_id(context.node_config), **asked}
