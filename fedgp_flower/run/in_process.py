"""A Flower Grid that runs the ServerApp and the ClientApps in one process, without SuperLink or Ray."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedgp_flower import client_app, server_app
from fedgp_flower.data.sites import count_sites, simulated_nodes, site_id
from fedgp_flower.options import FlatConfig
from fedgp_flower.outcome import Progress, silent
from fedgp_flower.run.check import require_usable
from fedgp_flower.run.registry import parse_config
from fedgp_flower.typing import Node

NODE_OFFSET = 1000  # node ids differ from site ids, as they do in Flower


def run_in_process(flat: FlatConfig, sites: int = 0, nodes: Sequence[Node] = (), progress: Progress = silent) -> Path:
    """Run over simulated ``sites``, 0 for those in the data, or over ``nodes``. Return the run's folder."""
    config = parse_config(flat)
    if not nodes:
        count = count_sites(config, sites)
        require_usable(config, count)
        nodes = simulated_nodes(count)
    grid = InProcessGrid(client_app.app, flat, nodes)
    return server_app.execute(grid, flat, progress, lambda folder: grid.keep_states(folder / "sites"))


class InProcessGrid(Grid):
    """Grid with nodes that answer in this process, each with its Context."""

    def __init__(self, client_app: ClientApp, run_config: FlatConfig, node_configs: Iterable[Node]) -> None:
        logging.getLogger("flwr").setLevel(logging.WARNING)  # it logs every round
        # Messages need this identity; Flower 1.41 has no public way to set it outside of its runtime.
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
        self.client_app = client_app
        self.contexts = {
            NODE_OFFSET + index: Context(
                run_id=1,
                node_id=NODE_OFFSET + index,
                node_config=dict(node_config),
                state=RecordDict(),
                run_config=dict(run_config),
            )
            for index, node_config in enumerate(node_configs)
        }
        self._pending: dict[str, Message] = {}
        self._run = Run.create_empty(run_id=1)

    def keep_states(self, folder: Path) -> None:
        """Set ``state-dir`` below ``folder`` for sites without one, so that a resumed run finds their state."""
        for context in self.contexts.values():
            context.node_config.setdefault("state-dir", str(folder / site_id(context.node_config)))

    def set_run(self, run: Run) -> None:
        """Flower's bookkeeping."""
        self._run = run

    @property
    def run(self) -> Run:
        """Flower's bookkeeping."""
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Create a message to a node."""
        return Message(content, dst_node_id=dst_node_id, message_type=message_type, group_id=group_id, ttl=ttl)

    def get_node_ids(self) -> Iterable[int]:
        """Return all nodes; they are always online."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Accept messages, which are answered when pulled."""
        pushed = {uuid.uuid4().hex: message for message in messages}
        for message_id, message in pushed.items():
            message.metadata.__dict__["_message_id"] = message_id
        self._pending |= pushed
        return list(pushed)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Answer only the oldest of these messages, so that replies arrive one by one in a reproducible order."""
        waiting = [message_id for message_id in message_ids if message_id in self._pending]
        return [self.answer(self._pending.pop(message_id)) for message_id in waiting[:1]]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Answer all messages; the timeout is unused."""
        return [self.answer(self._pending.pop(message_id)) for message_id in self.push_messages(messages)]

    def answer(self, message: Message) -> Message:
        """Return the reply of the ClientApp, or Flower's error reply for an exception."""
        try:
            return self.client_app(message, self.contexts[message.metadata.dst_node_id])
        except Exception as error:
            return Message(Error(code=2, reason=f"{type(error).__name__}: {error}"), reply_to=message)
