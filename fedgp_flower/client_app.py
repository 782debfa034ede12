"""The ClientApp: turns messages into ``fit`` and ``evaluate`` calls of the configured method's client, and back."""

from __future__ import annotations

import json
import logging
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedgp_flower.clients.base import NAMES_KEY, GPClient
from fedgp_flower.clients.state import SiteState, load_state, save_state
from fedgp_flower.data.sites import load_site, site_id
from fedgp_flower.errors import FedGPError
from fedgp_flower.linalg import counting_repairs
from fedgp_flower.registry import METHODS, all_phases, load, parse_config

app = ClientApp()
logger = logging.getLogger("fedgp")


def answer(message: Message, context: Context) -> Message:
    """Answer one message. A site's error becomes a reply that names the site and says what is wrong.

    The words of an error that nobody foresaw may hold a cell of the site's table: they stay in the site's own log.
    """
    identity: dict[str, Any] = {
        "schema-version": 1,
        "site": site_id(context.node_config),
        "run": message.content.config_records["config"]["run"],
    }
    started = time.perf_counter()
    try:
        with counting_repairs() as repairs:
            arrays, metrics, texts = _call(message, context)
    except FedGPError as error:
        return _refusal(message, identity, str(error))
    except Exception as error:
        logger.exception("site %s could not answer %s", identity["site"], message.metadata.message_type)
        place = traceback.extract_tb(error.__traceback__)[-1]
        told = f"unexpected {type(error).__name__} in {Path(place.filename).name}:{place.lineno}; see the site's log"
        return _refusal(message, identity, told)
    metrics |= {f"repairs.{name}": count for name, count in repairs.items()}
    metrics["seconds"] = time.perf_counter() - started
    content = RecordDict(
        {
            "arrays": ArrayRecord({name: Array(np.asarray(array, order="C")) for name, array in arrays.items()}),
            "metrics": MetricRecord(metrics),
            "config": ConfigRecord({**identity, **texts}),
        }
    )
    return Message(content, reply_to=message)


def _refusal(message: Message, identity: Mapping[str, Any], error: str) -> Message:
    return Message(RecordDict({"config": ConfigRecord({**identity, "error": error})}), reply_to=message)


def _call(message: Message, context: Context) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """Arrays, numbers and texts of the reply."""
    record = message.content.array_records["arrays"]
    parameters = [array.numpy() for array in record.values()]
    config: dict[str, Any] = {**message.content.config_records["config"], NAMES_KEY: json.dumps(list(record))}
    state = load_state(context, str(config["run"]))
    client = make_client(context, state)
    if message.metadata.message_type == "evaluate":
        loss, count, scores = client.evaluate(parameters, config)
        return {}, {"num-examples": count, "loss": loss, **scores}, {}
    outputs, count, mixed = client.fit(parameters, config)
    save_state(context, state)
    names = json.loads(str(mixed.pop(NAMES_KEY)))
    texts = {name: value for name, value in mixed.items() if isinstance(value, str)}
    numbers = {name: value for name, value in mixed.items() if name not in texts}
    return dict(zip(names, outputs, strict=True)), {"num-examples": count, **numbers}, texts


def make_client(context: Context, state: SiteState) -> GPClient:
    """The client of the configured method, holding this node's data and state."""
    flat: Mapping[str, Any] = context.run_config
    config = parse_config(flat)
    client: GPClient = load(METHODS[config.method].client)(config, load_site(config, context.node_config), state)
    return client


for _phase in all_phases():
    _category, _, _action = _phase.partition(".")
    getattr(app, _category)(*([_action] if _action else []))(answer)
