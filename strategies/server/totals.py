"""Totals under masks at the server: the sites that take part, the question, and the sum.

An algorithm asks the same :class:`~strategies.server.questions.Total` with and without masks. A silent site is left out
of all later totals of the run: each change of the roster lets the server compare the totals before and after the
change, so sites accept only few changes. Sites that join late do not take part.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message

from fedgp_flower.errors import ProtocolError, RunError
from fedgp_flower.messages import Layout, decode, encode, kind_of, layout, refusal_of
from fedgp_flower.privacy import masks, questions
from fedgp_flower.privacy.keys import Member
from fedgp_flower.records import config_of, numpy_arrays
from fedgp_flower.shared_messages import Described
from fedgp_flower.typing import Facts, Json
from strategies.server.network import Network, by_site, count_of, finite_arrays, texts_of
from strategies.server.questions import Summed, Total

logger = logging.getLogger("fedgp")

SEEN = "names and kinds of columns, levels of text, numbers of rows (`query.describe`), keys, which site is silent"
"""Data of each site that the server sees despite masks."""


@dataclass(frozen=True, slots=True)
class MaskedContract:
    """A question under masks with its messages, and the form of a reply; masked content cannot be checked."""

    question: Total[Any]
    masked: questions.MaskedQuestion
    messages: list[Message] = field(default_factory=list)

    @property
    def settings(self) -> dict[str, str]:
        """The settings of a message besides the request."""
        question = self.masked
        asked = {"number": question.number, "sites": list(question.sites), "layout": question.layout}
        return {questions.REQUEST: json.dumps(asked)}

    def refusal(self, reply: Message) -> str | None:
        """Return why a reply cannot be used, or None."""
        if config_of(reply).get(questions.ANSWERS) != self.masked.digest:
            return "it answers another question, or the site received another roster or other scales than the others"
        try:
            arrays = numpy_arrays(reply.content.array_records["arrays"])
            shape = (questions.length(self.layout(reply)) + 1, 2)
        except Exception as error:  # any error in decoding foreign bytes is the sender's fault
            return f"a masked summand cannot be decoded ({type(error).__name__})"
        if set(arrays) != {questions.WORDS}:
            return f"expected one masked array, found {', '.join(sorted(arrays)) or 'none'}"
        words = arrays[questions.WORDS]
        if words.shape != shape or words.dtype != np.uint64:
            return f"expected words of shape {shape}, found {words.shape} of {words.dtype}"
        return None

    def layout(self, reply: Message) -> Layout:
        """Return the layout of the question, or the one the reply names."""
        return self.masked.layout or list(json.loads(str(config_of(reply)[questions.LAYOUT])))


@dataclass(slots=True)
class Masking:
    """The sites of a run that take part in totals, and counts for ``metrics.json``."""

    network: Network
    members: dict[str, Member]
    least: int
    simulated: bool
    number: int = 0
    left_out: dict[str, str] = field(default_factory=dict)
    """Sites that missed a question, with the round and the reason."""
    totals: int = 0
    empty: int = 0
    """Summands that were masked zeros."""

    @staticmethod
    def enrol(network: Network, configuration: str, least: int, simulated: bool) -> Masking:
        """Ask every site for its key of the run."""
        masking = Masking(network, {}, least, simulated)
        settings = {"configuration": configuration}
        asked = [network.message(site, questions.KEYS, ArrayRecord(), settings) for site in network.sites()]
        for site, reply in by_site(network.exchange(asked, finite_arrays, retries=1)).items():
            texts = texts_of(reply)
            if {"key", "signature"} <= set(texts):
                masking.members[site] = Member(site, texts["key"], texts["signature"])
                masking.number = max(masking.number, count_of(reply, "latest-question") + 1)
            else:
                network.fail(site, "it sent no key of the run: it has another version of the app")
        masking.require(masking.members)
        return masking

    def require(self, sites: Collection[str]) -> None:
        """Raise RunError if a total would have too few sites."""
        if len(sites) < self.least:
            raise RunError(
                f"{len(sites)} site(s) can take part in a total under masks, `privacy.min-sites` = {self.least}."
                f" Left out: {'; '.join(f'{site}: {why}' for site, why in self.left_out.items()) or 'none'}."
                f" {self.network.latest_failures()}"
            )

    def taking_part(self, sites: Sequence[str]) -> list[str]:
        """Return the sites that have a key and were never silent."""
        return [site for site in sites if site in self.members and site not in self.left_out]

    def open(self, total: Total[Any], sites: Sequence[str], sizes: Mapping[str, int]) -> MaskedContract:
        """Return a question under a new number."""
        roster = sorted(self.taking_part(sites))
        self.require(roster)
        self.number += 1
        question = questions.MaskedQuestion(
            run=self.network.run,
            round=self.network.round,
            number=self.number,
            kind=kind_of(total.answer),
            content=questions.content_digest(self.network.context.digest, encode(total.request)),
            layout=layout(total.answer, sizes, total.request),
            members=tuple(self.members[site] for site in roster),
        )
        return MaskedContract(total, question)

    def without(self, contract: MaskedContract, silent: Sequence[str]) -> MaskedContract:
        """Return the same question to the other sites; silent sites no longer take part."""
        question = contract.masked
        reasons = {failure.site: failure.reason for failure in self.network.failures if failure.round == question.round}
        for site in silent:
            self.left_out[site] = f"missing in round {question.round}: {reasons.get(site, 'no reply')}"
        members = tuple(member for member in question.members if member.site not in silent)
        self.require([member.site for member in members])
        logger.warning("round %d: question repeated without %s", question.round, ", ".join(silent))
        return replace(contract, masked=replace(question, members=members))

    def summed(
        self, contract: MaskedContract, replies: Mapping[str, Message], sizes: Mapping[str, int], rows: int
    ) -> Summed[Any]:
        """Return the total of the replies of all sites of the question, which have ``rows`` rows together.

        Raises RunError if the masks do not cancel, or if no such rows have this total.
        """
        sites = tuple(site for site in self.members if site in replies)
        count, vector = masks.total(
            numpy_arrays(replies[site].content.array_records["arrays"])[questions.WORDS] for site in sites
        )
        name = contract.question.answer.__name__
        if not 0 <= count <= len(sites):
            raise RunError(
                f"the masks of a total of `{name}` did not cancel: a site answered another question than the others,"
                " or its reply was changed in transit. The site cannot be identified; the total was not used"
            )
        self.totals += 1
        silent = len(sites) - count
        self.empty += silent
        if silent:
            logger.warning("%d of %d sites added zero to `%s`; masks hide which", silent, len(sites), name)
        if count == 0:
            return Summed(None, ())
        try:
            arrays = questions.unflat(vector, contract.layout(replies[sites[0]]))
            found = decode(contract.question.answer, arrays, sizes)
        except ProtocolError as error:
            raise RunError(f"a total under masks cannot be used: {error}") from None
        if not silent and (reason := refusal_of(found, Described(rows))):  # the checks of one site hold for all rows
            raise RunError(
                f"no {rows} rows have such a total of `{name}`: {reason}. Under masks the site at fault cannot be"
                " identified; `privacy.secure-aggregation = false` names it"
            )
        return Summed(found, sites, silent)

    @staticmethod
    def with_common_layout(contract: MaskedContract, replies: Mapping[str, Message]) -> dict[str, Message]:
        """Return the replies with the layout that most sites send."""
        layouts = {site: json.dumps(contract.layout(reply)) for site, reply in replies.items()}
        most = Counter(layouts.values()).most_common(1)
        return {site: reply for site, reply in replies.items() if layouts[site] == most[0][0]}

    def what_the_server_sees(self) -> str:
        """Return one sentence on what the server sees."""
        if self.simulated:
            return (
                "totals under masks, simulated: keys follow from site ids and one machine holds all rows, so nothing is"
                " secret here. On real machines the server would see of each site: " + SEEN
            )
        return f"totals under masks: the server sees sums over {len(self.members)} sites, and of each site: {SEEN}"

    def warnings(self) -> list[str]:
        """Return warnings for readers of the results."""
        found = [
            f"Site {site} was {why}. It did not take part in later totals. The totals before and after differ by its"
            " summand; if its late reply reached the server, the server can compute the summand."
            for site, why in self.left_out.items()
        ]
        if self.empty:
            found.append(
                f"{self.empty} summand(s) under masks were empty. Masks hide from which sites, but the number of rows"
                " in a total may reveal it; totals with and without such a site differ by its summand."
            )
        return found

    def facts(self) -> Json:
        """Return the entries of ``metrics.json`` and of a checkpoint."""
        return {"left_out": dict(self.left_out), "totals": self.totals, "empty_summands": self.empty}

    def restore(self, facts: Facts) -> None:
        """Continue from the entries of a checkpoint."""
        self.left_out = dict(facts["left_out"])
        self.totals, self.empty = int(facts["totals"]), int(facts["empty_summands"])
