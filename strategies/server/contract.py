"""What a reply must be, and who contradicts how it described its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message

from fedgp_flower.errors import FedGPError, ProtocolError
from fedgp_flower.messages import decode, join, misfit, verdict
from fedgp_flower.records import numpy_arrays
from fedgp_flower.shared_messages import Described
from strategies.server.wire import claimed_site


class ContradictionError(FedGPError):
    """Sites whose first answers contradict how they described their rows, and what shows it."""

    def __init__(self, sites: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"{site}: {reason}" for site, reason in sites.items()))
        self.sites = sites


@dataclass(frozen=True, slots=True)
class Contract:
    """What an answer must be: as its class declares, of the lengths that are known, from as many rows as the site has.

    A class of answers may have a method ``refusal(rows)``, conditions that every honest answer from so many rows meets,
    a method ``contradiction(rows)``, what shows that the site has other rows than it described, and a static method
    ``outliers(answers, rows)``, which of several answers no honest site gives beside the others. Where answers are but
    added up and ``refusal`` takes long, it is asked of their total, and a method ``glance(rows)`` of each.
    """

    answer: type
    sizes: Mapping[str, int]
    rows: Mapping[str, int]
    requests: Mapping[str, Any]
    """What each site was asked."""
    described: Mapping[str, Described] = field(default_factory=dict)
    """What follows of each site's rows from its description."""
    enrolling: bool = False
    """Before the first round a contradiction is no failure yet: the sites agree again without the one that lied."""
    added: bool = False
    """Whether nothing but the total of the answers counts."""
    seen: dict[int, tuple[Message, Any]] = field(default_factory=dict)
    """Replies read so far with their answers, by identity."""
    contradicted: dict[str, str] = field(default_factory=dict)
    """Sites that have other rows than they described, and what shows it."""

    def refusal(self, reply: Message) -> str | None:
        """Why a reply cannot be used, or None."""
        site, rows = str(claimed_site(reply)), int(reply.content["metrics"]["num-examples"])  # type: ignore[arg-type]
        described = self.rows.get(site, rows)
        if rows != described:
            return self._contradicted(site, f"claims {rows} rows, introduced itself with {described}")
        try:
            answer = self.read(reply)
        except ProtocolError as error:
            return str(error)
        said = self.described.get(site)
        if reason := verdict(answer, "contradiction", rows) or (said and verdict(answer, "disagreement", said)):
            return self._contradicted(site, reason)
        reason = misfit(self.requests[site], answer) if site in self.requests else None
        return reason or verdict(answer, "glance" if self.glances else "refusal", rows)

    @property
    def glances(self) -> bool:
        """Whether answers are judged at length by their total."""
        return self.added and hasattr(self.answer, "glance")

    def outliers(self, answers: Mapping[str, Any]) -> dict[str, str]:
        """Sites whose answers no honest site gives beside the others, and why."""
        compare: Callable[[Any, Mapping[str, int]], dict[str, str]] | None = getattr(self.answer, "outliers", None)
        return {} if compare is None else compare(answers, self.rows)

    def unfit(self, answers: Mapping[str, Any], total: Any) -> dict[str, str]:
        """Sites whose answers no rows have, and why, where no rows have their total, although each passed at a glance.

        A total that some rows have does no more harm than these rows would; nobody looks for who lied in it.
        """
        rows = {site: self.rows.get(site, 0) for site in answers}
        if not self.glances or not verdict(total, "refusal", sum(rows.values())):
            return {}
        found = {site: verdict(answer, "refusal", rows[site]) for site, answer in answers.items()}
        return {site: reason for site, reason in found.items() if reason}

    def _contradicted(self, site: str, reason: str) -> str | None:
        self.contradicted[site] = reason
        return None if self.enrolling else reason

    def read(self, reply: Message) -> Any:
        """The answer in a reply; read once."""
        if id(reply) not in self.seen:
            try:
                arrays = numpy_arrays(reply.content["arrays"])  # type: ignore[arg-type]
                arrays = join(self.answer, arrays, reply.content["metrics"])
            except Exception as error:  # whatever decoding of foreign bytes raises, it is the sender's fault
                raise ProtocolError(f"arrays cannot be decoded ({type(error).__name__})") from error
            self.seen[id(reply)] = reply, decode(self.answer, arrays, self.sizes)
        return self.seen[id(reply)][1]
