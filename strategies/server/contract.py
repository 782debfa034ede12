"""What a reply must be, and who contradicts how it described its rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from flwr.app import Message

from fedgp_flower.errors import FedGPError, ProtocolError
from fedgp_flower.messages import decode, join, misfit, refusal_of
from fedgp_flower.records import numpy_arrays
from fedgp_flower.shared_messages import Described
from strategies.server.wire import claimed_site


class ContradictionError(FedGPError):
    """Sites whose first answers cannot come from the rows they described, and what shows it."""

    def __init__(self, sites: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"{site}: {reason}" for site, reason in sites.items()))
        self.sites = sites


@dataclass(frozen=True, slots=True)
class Contract:
    """What an answer must be: as its class declares, of the lengths that are known, from as many rows as the site has.

    A class of answers may have a method ``refusal(described)``, conditions that every honest answer from such rows
    meets, and a static method ``outliers(answers, rows)``, which of several answers no honest site gives beside the
    others. Checks that cost O(M³) run on the total. Only if the total fails do they run on each site.
    """

    answer: type
    sizes: Mapping[str, int]
    described: Mapping[str, Described]
    """How each site described its rows."""
    requests: Mapping[str, Any]
    """What each site was asked."""
    enrolling: bool = False
    """Before the first round a refusal is no failure yet: the sites agree again without the one that lied."""
    added: bool = False
    """Whether nothing but the total of the answers counts."""
    seen: dict[int, tuple[Message, Any]] = field(default_factory=dict)
    """Replies read so far with their answers, by identity."""
    contradicted: dict[str, str] = field(default_factory=dict)
    """Sites whose answers cannot come from the rows they described, and what shows it."""

    def refusal(self, reply: Message) -> str | None:
        """Why a reply cannot be used, or None."""
        site, rows = str(claimed_site(reply)), int(reply.content["metrics"]["num-examples"])  # type: ignore[arg-type]
        described = self.described.get(site, Described(rows))
        try:
            answer = self.read(reply)
        except ProtocolError as error:
            return str(error)
        if rows != described.rows:
            reason: str | None = f"claims {rows} rows, introduced itself with {described.rows}"
        elif site in self.requests and (odd := misfit(self.requests[site], answer)):
            return odd
        else:
            reason = refusal_of(answer, replace(described, added=self.added))
        if reason and self.enrolling:
            self.contradicted[site] = reason
        return None if self.enrolling else reason

    def refused(self, answers: Mapping[str, Any], total: Any = None) -> dict[str, str]:
        """Sites whose answers no honest site gives beside the others, or, if no rows have the total, no rows have.

        A total that some rows have does no more harm than these rows would; nobody looks for who lied in it.
        """
        described = {site: self.described.get(site, Described(0)) for site in answers}
        rows = {site: known.rows for site, known in described.items()}
        if total is None:
            compare = getattr(self.answer, "outliers", None)
            return {} if compare is None else compare(answers, rows)
        if not refusal_of(total, Described(sum(rows.values()))):
            return {}
        found = {site: refusal_of(answer, described[site]) for site, answer in answers.items()}
        return {site: reason for site, reason in found.items() if reason}

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
