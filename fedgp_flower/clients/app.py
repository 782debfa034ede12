"""The ClientApp of a site. Every message passes the guard, a handler and the guard again before the reply leaves."""

from __future__ import annotations

import json
import logging
import time
import traceback
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod

from fedgp_flower import records
from fedgp_flower.clients.guard import CONFIGURATION, DESCRIBE, WARNING, Guard, Outgoing
from fedgp_flower.clients.numpy_client import EVALUATE, KIND, NAMES, Setting, SiteClient, handlers
from fedgp_flower.clients.state import load_state, prepared_site, require_same_rows, save_state
from fedgp_flower.config import RunConfig
from fedgp_flower.data.sites import RawSite, load_site, site_id
from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.errors import FedGPError
from fedgp_flower.gp.linalg import counting_repairs
from fedgp_flower.messages import ECHOED
from fedgp_flower.options import Value
from fedgp_flower.privacy.keys import Trust
from fedgp_flower.privacy.policy import Rules
from fedgp_flower.privacy.questions import KEYS, WORDS, context_digest
from fedgp_flower.typing import NamedArrays

logger = logging.getLogger("fedgp")

LoadSite: TypeAlias = Callable[[RunConfig, Context], RawSite]


@lru_cache(maxsize=8)
def _parsed(parse: Callable[[dict[str, Value]], RunConfig], text: str) -> RunConfig:
    """The configuration from JSON, cached for all sites of a process. Ray pickles the app, so the cache is global."""
    return parse(json.loads(text))


class SiteApp(ClientApp):
    """Answers the messages of all methods. ``mods`` are Flower mods for all messages, ``train_mods`` for training."""

    def __init__(
        self,
        parse: Callable[[dict[str, Value]], RunConfig],
        client_of: Callable[[RunConfig], type[SiteClient]],
        load: LoadSite | None = None,
        mods: list[Mod] | None = None,
        train_mods: list[Mod] | None = None,
    ) -> None:
        super().__init__(mods=mods)
        self.parse, self.client_of, self.load = parse, client_of, load
        self.train_mods, self.registered = train_mods or [], set[str]()

    def __call__(self, message: Message, context: Context) -> Message:
        """The reply to a message. A new message type is first registered with Flower."""
        kind = message.metadata.message_type
        if kind not in self.registered:
            category, _, action = kind.partition(".")
            register = {"train": self.train, "query": self.query, "evaluate": self.evaluate}[category]
            mods = self.train_mods if category == "train" else []
            register(*([action] if action else []), mods=mods)(self.answer)
            self.registered.add(kind)
        return super().__call__(message, context)

    def answer(self, message: Message, context: Context) -> Message:
        """The reply to a message, after the guard recorded it. The text of an unexpected error stays in the log."""
        started, guard = time.perf_counter(), Guard(message, context)
        try:
            with counting_repairs() as repairs:
                outgoing = self._answered(guard)
            if WORDS not in outgoing.arrays and records.LACKS not in outgoing.texts:  # timing could reveal masked rows
                outgoing.numbers.update({f"repairs.{name}": count for name, count in repairs.items()})
                outgoing.numbers["seconds"] = time.perf_counter() - started
            outgoing = guard.released(outgoing)
            record = records.array_record if guard.settings.get(records.APART) else records.packed_record
            metrics = MetricRecord({**outgoing.numbers})
            reply = _reply(guard, outgoing.texts, arrays=record(outgoing.arrays), metrics=metrics)
        except FedGPError as error:
            reply = _reply(guard, {"error": _without_folders(error, context)})
        except Exception as error:
            logger.exception("site %s could not answer %s", site_id(context.node_config), guard.kind)
            place = traceback.extract_tb(error.__traceback__)[-1]
            what = f"unexpected {type(error).__name__} in {Path(place.filename).name}:{place.lineno}"
            reason = f" ({error.strerror})" if isinstance(error, OSError) and error.strerror else ""
            reply = _reply(guard, {"error": f"{what}{reason}; see the site's log"})
        try:
            guard.record(reply)
        except FedGPError as error:
            return _reply(guard, {"error": _without_folders(error, context)})
        return reply

    def _answered(self, guard: Guard) -> Outgoing:
        """The answer to a message. No row is read before the guard admits the message."""
        message, context, kind = guard.message, guard.context, guard.kind
        shared = _shared(guard)
        if shared is None:
            return Outgoing({}, {"num-examples": 0}, {records.LACKS: True})
        text = guard.settings.get(CONFIGURATION) or shared.get(CONFIGURATION)
        config = _parsed(self.parse, str(text) if text else json.dumps(context.run_config, sort_keys=True))
        method = self.client_of(config)
        handler = handlers(method).get(kind)
        guard.admit(config, handler and handler.answer)
        if kind == KEYS:
            return guard.introduced()
        constants = records.arrays_of(context.state, records.CONSTANTS) if shared else {}
        preparation = Preparation.from_wire(constants, str(shared["schema"])) if "schema" in shared else None
        site = self._site(guard, config, preparation)
        if kind == DESCRIBE:
            return _described(site, config, context)
        state = load_state(context, guard.run)
        setting = Setting(config, site, state, preparation, guard.round, constants, guard.rules, guard.summands)
        client = method(setting)
        before = state.updates
        arrays = records.arrays_of(message.content, "arrays")
        if guard.masked:
            request = client.request_of(kind, arrays, guard.settings)
            outgoing = guard.summand(request, context_digest(shared, constants), lambda: client.answer(kind, request))
        else:
            outgoing = _plain(client, arrays, guard)
        if state.updates > before:
            save_state(context, state)
        return outgoing

    def _site(self, guard: Guard, config: RunConfig, preparation: Preparation | None) -> RawSite:
        """The rows of this node that its policy allows. Rows from a user's loader are not stored."""
        context = guard.context

        def read(rules: Rules) -> RawSite:
            raw = self.load(config, context) if self.load else load_site(config, context.node_config, guard.run)
            require_same_rows(context, guard.run, raw)
            return rules.site(raw)

        if self.load:
            return read(guard.rules)
        return prepared_site(context, (guard.run, config, preparation), guard.rules, read)


def _plain(client: SiteClient, arrays: NamedArrays, guard: Guard) -> Outgoing:
    """The answer to an unmasked message, by Flower's ``fit`` or ``evaluate``."""
    parameters = list(arrays.values())
    settings: dict[str, Any] = {**guard.settings, KIND: guard.kind, NAMES: "\n".join(arrays)}
    if guard.kind == EVALUATE:
        loss, count, scores = client.evaluate(parameters, settings)
        return Outgoing({}, {"num-examples": count, "loss": loss, **scores})
    outputs, count, numbers = client.fit(parameters, settings)
    names = str(numbers.pop(NAMES))
    named = dict(zip(names.split("\n") if names else [], outputs, strict=True))
    texts = {WARNING: guard.rules.warning} if guard.rules.warning else {}
    return Outgoing(named, {"num-examples": count, **numbers}, {**texts})


def _described(site: RawSite, config: RunConfig, context: Context) -> Outgoing:
    """The answer to ``query.describe``: schema and sums, or the schema alone if the run or the site requires masks."""
    bounds, trust = config.privacy.bounds, bool(Trust.of(context.node_config).keys)
    description = site.describe(bounds)
    numbers = {"num-examples": site.num_examples, "partitions": site.partitions, "dropped": site.dropped}
    texts: dict[str, str | bool] = {"schema": description.schema, "label": site.label}
    bare = (config.privacy.secure_aggregation or trust) and not bounds
    numbers |= ({"dropped": 0, "bare": 1} if bare else {}) | ({records.TRUST: 1} if trust else {})
    warning = "\n".join(filter(None, (site.left_out, "" if bare or bounds else site.suspected())))
    texts |= {WARNING: warning} if warning else {}
    return Outgoing({} if bare else dict(description.arrays), {**numbers}, texts)


def _reply(guard: Guard, texts: Mapping[str, str | bool], **parts: ArrayRecord | MetricRecord) -> Message:
    """A reply that repeats the settings of its request, so that the server can refuse a reply to another request."""
    echoed = {name: guard.settings[name] for name in ECHOED if name in guard.settings}
    site = site_id(guard.context.node_config)
    config = ConfigRecord({"schema-version": records.SCHEMA_VERSION, "site": site, **echoed, **texts})
    return Message(RecordDict({**parts, "config": config}), reply_to=guard.message)


def _without_folders(error: FedGPError, context: Context) -> str:
    """The words of an error without the folders of this site's files, which are not for the coordinator."""
    text, folders = str(error), {f"{Path(str(value)).parent}/" for value in context.node_config.values()} - {"./", "//"}
    for folder in sorted(folders, key=len, reverse=True):
        text = text.replace(folder, "")
    return text


def _shared(guard: Guard) -> ConfigRecord | None:
    """The context that all sites share, from the message or else the state; None if this site has lost it."""
    digest, content, state = guard.settings.get(records.SHARED), guard.message.content, guard.context.state
    if digest is None:
        return ConfigRecord()
    brought = records.record_of(content, records.SHARED, ConfigRecord)
    if brought is not None:
        state[records.SHARED] = ConfigRecord({**brought, "digest": str(digest)})
        state[records.CONSTANTS] = records.record_of(content, records.CONSTANTS, ArrayRecord) or ArrayRecord()
    stored = records.record_of(state, records.SHARED, ConfigRecord)
    return stored if stored is not None and stored["digest"] == digest else None
