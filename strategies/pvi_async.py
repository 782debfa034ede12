"""Asynchronous PVI: a reply is folded in when it arrives, and that site at once gets the newest posterior.

Replies are pulled as the Grid has them; how many merges each one had not seen (its staleness) is recorded. A resumed
run sends its first messages again: what was under way when it was killed is lost, and only that.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from flwr.app import Message

from strategies.base import Observer, Snapshot
from strategies.pvi import PVI
from strategies.pvi_schedule import Outstanding, damping_of, next_sites
from strategies.wire import answer


@dataclass(frozen=True, slots=True)
class Sent:
    """A visit under way."""

    message: str
    node: int
    deadline: float


class AsynchronousPVI(PVI):
    """Several sites work at once, each on the posterior it was given; a round is one reply."""

    def __init__(self, config: Any, observer: Observer, snapshot: Snapshot | None = None) -> None:
        super().__init__(config, observer, snapshot)
        self.outstanding = Outstanding()
        self.sent: dict[str, Sent] = {}
        self.arrived: list[Message] = []
        """Replies pulled together with one that came first."""

    def train(self, num_rounds: int) -> None:
        """One reply, or one site given up, per round."""
        self.settle_forgetting()
        while self.round < num_rounds:
            self.begin_round()
            self._occupy()
            at_once = len(self.sent)
            site, reply = self._next_reply()
            kept = self.network.accept(site, reply, self.train_specs())
            self.outstanding, stale = self.outstanding.received(site, self.factors.version)
            metrics = None
            if kept is not None:
                metrics = self.merge({site: answer(site, kept)}, damping_of(self.plan, at_once))
                self.book.staleness[site] = stale
            self.complete_round({**(metrics or {}), "staleness": stale})

    def _occupy(self) -> None:
        """Give idle sites the newest posterior; a site that came back under another node is idle."""
        for site, sent in list(self.sent.items()):
            if self.network.nodes.get(site) != sent.node:
                self._drop(site)
        healthy = self.network.healthy()
        capacity = self.options.concurrency or len(healthy)
        plan = replace(self.plan, schedule="sequential")
        while len(self.sent) < capacity and (idle := [site for site in healthy if site not in self.sent]):
            [site] = next_sites(plan, idle, self.book.attempts, self.book.sizes, self.generator("order"))
            message = self.visit(site)
            deadline = time.monotonic() + self.network.timeout
            self.outstanding = self.outstanding.sent(site, self.factors.version)
            self.sent[site] = Sent(self.network.push(message), self.network.nodes[site], deadline)

    def _drop(self, site: str) -> None:
        lost = self.sent.pop(site).message
        self.arrived = [reply for reply in self.arrived if reply.metadata.reply_to_message_id != lost]
        self.outstanding, _ = self.outstanding.received(site, self.factors.version)

    def _next_reply(self) -> tuple[str, Message | None]:
        """The site that answers next, and its reply; None if its time is up."""
        pause = 0.01
        while True:
            waiting = {sent.message: site for site, sent in self.sent.items()}
            if not self.arrived:
                self.arrived = self.network.pull(waiting)
            if self.arrived:
                reply = self.arrived.pop(0)
                site = waiting[reply.metadata.reply_to_message_id]
                del self.sent[site]
                return site, reply
            for site, sent in self.sent.items():
                if time.monotonic() > sent.deadline:
                    del self.sent[site]
                    return site, None
            time.sleep(pause)
            pause = min(pause * 1.5, 0.5)
