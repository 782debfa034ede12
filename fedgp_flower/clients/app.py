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
from numpy.typing import NDArray

from fedgp_flower.clients import masking
from fedgp_flower.clients.numpy_client import KIND, NAMES, Setting, SiteClient
from fedgp_flower.clients.prepared import prepared_site
from fedgp_flower.clients.state import SiteState, load_state, require_same_rows, save_state
from fedgp_flower.config import RunConfig
from fedgp_flower.data.sites import RawSite, load_site, site_id
from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.errors import FedGPError
from fedgp_flower.gp.linalg import counting_repairs
from fedgp_flower.messages import ECHOED
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
        self.parsed = lru_cache(maxsize=8)(lambda flat: parse(json.loads(flat)))
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
                audit.record(path, message, reply, decisions, masking.REQUEST in message.content["config"])
            except FedGPError as error:
                return _refusal(message, _identity(message, context), str(error))
        return reply

    def _answered(self, message: Message, context: Context, decisions: list[Decision]) -> Message:
        """The reply. A site's error becomes one that names the site and says what is wrong.

        The words of an error that nobody foresaw may hold a cell of the site's table: they stay in the site's own log.
        """
        identity = _identity(message, context)
        started = time.perf_counter()
        try:
            if _lacks(message, context):
                return _reply(message, identity, {}, {"num-examples": 0}, {LACKS: True})
            with counting_repairs() as repairs:
                arrays, metrics, texts = self._computed(message, context, decisions)
        except FedGPError as error:
            return _refusal(message, identity, str(error))
        except Exception as error:
            logger.exception("site %s could not answer %s", identity["site"], message.metadata.message_type)
            place = traceback.extract_tb(error.__traceback__)[-1]
            what = f"unexpected {type(error).__name__} in {Path(place.filename).name}:{place.lineno}"
            said = f" ({error.strerror})" if isinstance(error, OSError) and error.strerror else ""
            return _refusal(message, identity, f"{what}{said}; see the site's log")
        if masking.WORDS not in arrays:  # what a site spent may say how many rows it has
            metrics |= {f"repairs.{name}": count for name, count in repairs.items()}
            metrics["seconds"] = time.perf_counter() - started
        return _reply(message, identity, arrays, metrics, texts)

    def _computed(self, message: Message, context: Context, decisions: list[Decision]) -> Answer:
        """Arrays, numbers and texts of the reply: the site's owner decides before any row is read."""
        given: dict[str, Any] = {**settings_of(message)}
        kind, masked = message.metadata.message_type, masking.REQUEST in given
        if masked:
            masking.require_shared(given)
        config = self.parsed(self._configuration(message, context))
        method = self.client_of(config)
        rules = Rules.of(context.node_config, kind, masked, decisions)
        rules.admit(config, str(given["run"]), int(given["round"]), context.node_config.get("state-dir"))
        if kind == masking.KEYS:
            return masking.introduced(context, str(given["run"]))
        if not masked:
            masking.require_masks(context, config.privacy.secure_aggregation, kind)
        state = load_state(context, str(given["run"]))
        client = self._client(method, config, given, context, state, rules)
        arrays = numpy_arrays(record_of(message.content, "arrays", ArrayRecord) or ArrayRecord())
        if masked:
            answer = self._masked(message, context, client, arrays)
        else:
            given |= {KIND: kind, NAMES: "\n".join(arrays)}
            answer = self._plain(client, list(arrays.values()), given, rules)
            answer[1].update(masking.stance(context, kind))
        if kind != "evaluate":
            save_state(context, state)
        return answer

    @staticmethod
    def _plain(client: SiteClient, parameters: list[NDArray[Any]], given: dict[str, Any], rules: Rules) -> Answer:
        """The reply to a question in the clear, through Flower's ``fit`` or ``evaluate``."""
        if given[KIND] == "evaluate":
            loss, count, scores = client.evaluate(parameters, given)
            return {}, {"num-examples": count, "loss": loss, **scores}, {}
        outputs, count, mixed = client.fit(parameters, given)
        said = str(mixed.pop(NAMES))
        texts = {name: value for name, value in mixed.items() if isinstance(value, str)}
        numbers = {name: value for name, value in mixed.items() if name not in texts}
        warned = [words for words in (texts.get(WARNING), rules.warning) if words]
        texts |= {WARNING: ". ".join(warned)} if warned else {}
        named = dict(zip(said.split("\n") if said else [], outputs, strict=True))
        return named, {"num-examples": count, **numbers}, texts

    @staticmethod
    def _masked(message: Message, context: Context, client: SiteClient, arrays: NamedArrays) -> Answer:
        """The reply to a question under masks."""
        kind, given = message.metadata.message_type, dict(settings_of(message))
        request = client.asked(kind, arrays, given)
        kept = record_of(context.state, CONTEXT, ConfigRecord) or ConfigRecord()
        digest = context_digest(kept, _constants(context))
        question = masking.question_of(message, context, request, digest)
        return masking.answered(question, context, lambda: client.handler(kind)(request))

    def _configuration(self, message: Message, context: Context) -> str:
        """The configuration that the server names, else this node's copy of the run's, as JSON."""
        asked, kept = settings_of(message), record_of(context.state, CONTEXT, ConfigRecord)
        text = asked.get("configuration")
        if text is None and kept is not None and CONTEXT in asked:
            text = kept["configuration"]
        return json.dumps(context.run_config, sort_keys=True) if text is None else str(text)

    def _client(
        self,
        method: type[SiteClient],
        config: RunConfig,
        given: Mapping[str, Any],
        context: Context,
        state: SiteState,
        rules: Rules,
    ) -> SiteClient:
        """The client of the configured method, holding this node's data and state."""
        kept = record_of(context.state, CONTEXT, ConfigRecord) if given.get(CONTEXT) else None
        preparation = None if kept is None else _preparation(kept)
        site = self._site(config, context, (state.run, preparation), rules)
        constants = _constants(context) if kept is not None else {}
        numbers = int(given["round"]), int(given["communication"])
        bare = masking.bare(context, config)
        return method(Setting(config, site, state, preparation, *numbers, constants, rules, bare))

    def _site(self, config: RunConfig, context: Context, of: tuple[str, Preparation | None], rules: Rules) -> RawSite:
        """This node's rows as its policy lets messages know them; what a loader of one's own reads is not kept."""
        run, preparation = of

        def checked(applied: Rules) -> RawSite:
            raw = load_site(config, context.node_config, run) if self.load is None else self.load(config, context)
            require_same_rows(context, run, raw)
            return applied.site(raw)

        if self.load is not None:
            return checked(rules)
        return prepared_site(context, (run, config, preparation), rules, checked)


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
    means, scales = (tuple(kept[name]) for name in ("input.mean", "input.scale"))  # type: ignore[arg-type]
    numbers = (tuple(np.ravel(kept[name])) for name in ("target.mean", "target.scale"))
    return _agreed(str(kept["schema"]), means, scales, *numbers)


@lru_cache(maxsize=8)
def _agreed(schema: str, means: Any, scales: Any, mean: Any, scale: Any) -> Preparation:
    """Sites that share a process agreed on the same."""
    arrays = {"input.mean": np.array(means), "input.scale": np.array(scales)}
    arrays |= {"target.mean": np.reshape(mean, ()), "target.scale": np.reshape(scale, ())}
    return Preparation.from_wire(arrays, schema)


def _identity(message: Message, context: Context) -> dict[str, Any]:
    """Who answers, and which question: the server refuses an answer to another one."""
    given = settings_of(message)
    asked = {name: given[name] for name in ECHOED if name in given}
    return {"schema-version": SCHEMA_VERSION, "site": site_id(context.node_config), **asked}


def _reply(
    message: Message,
    identity: Mapping[str, Any],
    arrays: Mapping[str, Any],
    metrics: Mapping[str, Any],
    texts: Mapping[str, Any],
) -> Message:
    record = array_record if settings_of(message).get(APART) else packed_record
    content = RecordDict(
        {
            "arrays": record(arrays),
            "metrics": MetricRecord(dict(metrics)),
            "config": ConfigRecord({**identity, **texts}),
        }
    )
    return Message(content, reply_to=message)


def _refusal(message: Message, identity: Mapping[str, Any], error: str) -> Message:
    return Message(RecordDict({"config": ConfigRecord({**identity, "error": error})}), reply_to=message)
