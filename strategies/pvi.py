"""PVI: a posterior kept as a product of one factor per site, each refined in turn against all the others.

Ashman et al., *Partitioned variational inference* (2022); for sparse GPs with distributions over inducing inputs and
hyperparameters, *Federated learning of sparse Gaussian processes*. The mathematics is in :mod:`strategies.pvi_state`
and :mod:`strategies.pvi_schedule`; here state moves between server and sites. The server keeps every factor and gives
a site its own one back with each visit: a site needs no memory, and a restart can neither lose nor double its share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from fedgp_flower.errors import RunError
from fedgp_flower.gaussian import Gaussian
from fedgp_flower.shapes import NamedArrays
from strategies import pvi_arrays as wire
from strategies.averaging import ParameterStrategy
from strategies.base import Observer, Snapshot
from strategies.closing import Posterior
from strategies.pvi_book import LATENTS, Book, contribution, latents_refusal, refusal
from strategies.pvi_options import PVIOptions
from strategies.pvi_posterior import described, factor_strengths, free_energy
from strategies.pvi_schedule import damping_of, next_sites
from strategies.pvi_state import PVIState, average_points, context, merge, posterior
from strategies.wire import Answer, ArraySpec, Specs, answer

FIRST_SCALE = 0.1
"""Standard deviation of q(Z) and q(β) that the first visits start from: wide draws of Z would hide their means."""


class PVI(ParameterStrategy):
    """Visit sites, merge what they answer; sequential and synchronous schedules."""

    def __init__(self, config: Any, observer: Observer, snapshot: Snapshot | None = None) -> None:
        super().__init__(config, observer, snapshot)
        self.plan = self.options.plan()
        self.book = Book()
        self.factors = PVIState({})

    @property
    def options(self) -> PVIOptions:
        """The table ``pvi.*``."""
        return cast(PVIOptions, self.config.options)

    def initialise(self) -> None:
        """Draw the first Z from federated statistics, the same for all sites; nothing is known of the function yet."""
        answers = self.shapes_of_inputs()
        start = self.initial_inducing_points(answers)
        hyper = np.median([own.arrays["hyper.start"] for own in answers.values()], axis=0)
        self.parameters = {"inducing": start.ravel(), "hyper": hyper}
        own = self.options
        learned = {"inducing": own.inducing == "distribution", "hyper": own.hyper == "distribution"}
        prior = {name: wire.standard(len(self.parameters[name])) for name in LATENTS if learned[name]}
        points = {f"{name}.value": self.parameters[name] for name in LATENTS if own.replays or not learned[name]}
        if own.linear:
            prior["whitened"] = wire.standard(self.config.model.num_inducing, full=True)
        self.factors = PVIState({} if own.replays else prior, points=points)

    def train(self, num_rounds: int) -> None:
        """Rounds until there are enough, or until a one-pass special case has visited every site."""
        self.settle_forgetting()
        while self.round < num_rounds and self._due():
            super().train(self.round + 1)

    def settle_forgetting(self) -> None:
        """Refit the shared q(Z), q(β) of a run from which a site was taken: they still hold what it had said.

        Raises:
            RunError: no site refitted them.
        """
        if self.book.refit_due and self.options.replays and not self.refit():
            raise RunError(
                f"no site refitted q(Z), q(β) after {', '.join(self.book.forgotten)} was forgotten, so they still hold "
                "what it had said; see the failures above and forget it again, under another `--name`"
            )
        self.book.refit_due = False

    def _due(self) -> list[str]:
        """Sites that the plan may still visit."""
        passes, visits = self.plan.passes, self.book.visits
        return [site for site in self.network.healthy() if not passes or visits.get(site, 0) < passes]

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Tell the sites of this round what the others know."""
        del arrays, config, grid, server_round
        once = replace(self.plan, passes=0)
        chosen = next_sites(once, self._due(), self.book.attempts, self.book.sizes, self.generator("order"))
        return [self.visit(site) for site in chosen]

    def visit(self, site: str) -> Message:
        """The message of one visit."""
        self.book.attempts[site] = self.book.attempts.get(site, 0) + 1
        phase = "train.distil" if self.options.replays and self.plan.schedule == "synchronous" else "train"
        told = {**self.preparation.arrays, **self.situation(site)}
        return self.network.message(site, phase, told, self.preparation.settings)

    def situation(self, site: str) -> NamedArrays:
        """What a site is told: q of Z and β, their cavities, the others' factors of u, and its own."""
        state, plan = self.factors, self.plan
        share = self.preparation.rows[site] / sum(self.preparation.rows.values()) if plan.split_prior else None
        around = context(state, site, deletion=plan.deletion, prior_share=share)
        rest = [own for name, own in state.sites.items() if name != site or not plan.deletion]
        told = self._latents("q", posterior(state)) | wire.under("others", wire.factor_arrays(rest))
        told["known"] = np.array(self._known(site))
        if self.options.linear:
            told |= wire.under("context", around["whitened"].to_arrays())
            told |= wire.under("posterior", posterior(state)["whitened"].to_arrays())
        elif not self.options.replays:
            told |= self._latents("cavity", around)
        if plan.deletion and site in state.sites:
            told |= wire.under("own", wire.own_arrays(state.sites[site]))
        return told

    def _known(self, site: str) -> float:
        """Share of all rows that the sites visited so far and this one hold: how mature q(Z) and q(β) can be."""
        rows = self.preparation.rows
        return sum(rows[name] for name in {*self.factors.sites, site}) / sum(rows.values())

    def _latents(self, prefix: str, blocks: Mapping[str, Gaussian]) -> NamedArrays:
        arrays: NamedArrays = {}
        for name in LATENTS:
            if name not in self.factors.prior:
                own = wire.part(self.factors.points, name)
            elif prefix == "q" and self.factors.version == 0:
                own = wire.narrow(self.parameters[name], FIRST_SCALE)
            else:
                own = blocks[name].to_arrays()
            arrays |= wire.under(f"{prefix}.{name}", own)
        return arrays

    def train_specs(self) -> Specs:
        """A factor of u; a share of each latent that is a distribution; each latent that is a point and moves."""
        own, sizes = self.options, {name: len(self.parameters[name]) for name in LATENTS}
        num_inducing = self.config.model.num_inducing
        blocks: dict[str, ArraySpec] = {}
        distils = own.replays and self.plan.schedule == "synchronous"
        for name in () if distils else LATENTS:
            blocks |= self._latent_specs(name, sizes[name])
        if own.linear or own.factor == "cpo":
            block = "whitened" if own.linear else "values"
            blocks |= {f"{block}.eta1": ArraySpec((num_inducing,))}
            blocks |= {f"{block}.eta2": ArraySpec((num_inducing, num_inducing))}
        points = not own.linear and own.factor != "cpo"
        num_inputs = sizes["inducing"] // num_inducing
        return wire.reply_specs(blocks, points=points, full=own.factor == "full", num_inputs=num_inputs)

    def _latent_specs(self, name: str, size: int) -> dict[str, ArraySpec]:
        own = self.options
        kind = own.inducing if name == "inducing" else own.hyper
        if kind == "distribution" and not (own.replays and own.refit_steps == 0):
            return {f"{name}.{eta}": ArraySpec((size,)) for eta in ("eta1", "eta2")}
        moves = kind == "average" or (own.replays and kind == "distribution")
        return {f"{name}.value": ArraySpec((size,))} if moves else {}

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """tₖ ← tₖ^(1−ρ) t̂ₖ^ρ for those that answered (Algorithm 1, step 3); parallel replay then refits q(Z), q(β)."""
        del server_round
        answers = {self.network.site_of(reply): answer(self.network.site_of(reply), reply) for reply in replies}
        damping = 1.0 if self.options.replays else damping_of(self.plan, max(len(answers), 1))
        metrics = self.merge(answers, damping)
        if metrics is not None and self.options.replays and self.plan.schedule == "synchronous":
            metrics |= self.refit()
        return None, None if metrics is None else MetricRecord(dict(metrics))

    def merge(self, answers: Mapping[str, Answer], damping: float) -> dict[str, float] | None:
        """Merge usable answers; returns figures for the history, None when nobody's was usable."""
        usable: dict[str, Answer] = {}
        for site, own in answers.items():
            reason = refusal(own, self.preparation.rows[own.site], densities=self.options.replays)
            if reason:
                self.network.fail(site, reason)
            else:
                usable[site] = own
        proposed = {site: contribution(own, self.options) for site, own in usable.items()}
        self.factors, record = merge(self.factors, proposed, damping=damping, deletion=self.plan.deletion)
        for site in record.refused:
            self.network.fail(site, "no damping makes its update proper")
            del usable[site]
        self._take_points(usable)
        self.book.note(usable, record, replays=self.options.replays)
        if not usable:
            return None
        rows = [own.num_examples for own in usable.values()]
        objective = float(np.average([own.number("objective") for own in usable.values()], weights=rows))
        moved = {"damping": record.damping, "halvings": record.halvings, "refused": len(record.refused)}
        return {"objective": objective, "visits": self.book.communications, **moved}

    def _take_points(self, answers: Mapping[str, Answer]) -> None:
        """Latents outside the product: a refit replaces them, averaging moves them by the site's share of the rows."""
        total = sum(self.preparation.rows.values())
        for own in answers.values():
            if self.options.replays:
                self._share(own)
            elif "inducing.value" in own.arrays:
                moved = {"inducing.value": own.arrays["inducing.value"]}
                self.factors = average_points(self.factors, moved, own.num_examples / total)

    def _share(self, own: Answer) -> None:
        latents = {n: a for n, a in own.arrays.items() if n.partition(".")[0] in LATENTS}
        names = {name.partition(".")[0] for name in latents}
        kept = {n: a for n, a in self.factors.points.items() if n.partition(".")[0] not in names}
        self.factors = replace(self.factors, points={**kept, **latents})

    def refit(self) -> dict[str, float]:
        """A site refits q(Z), q(β) on all pseudo-observations, none of its rows; another one takes over if it fails."""
        told = self._latents("q", {}) | wire.under("others", wire.factor_arrays(self.factors.sites.values()))
        specs: dict[str, ArraySpec] = {}
        for name in LATENTS:
            specs |= self._latent_specs(name, len(self.parameters[name]))
        healthy = self.network.healthy()
        for offset in range(min(len(healthy), 3)):
            site = healthy[(self.round + offset) % len(healthy)]
            for own in self.ask("train.refit", told, specs, [site]).values():
                reason = latents_refusal(own)
                if reason is None:
                    self._share(own)
                    return {"refit": own.number("objective")}
                self.network.fail(site, reason)
        return {}

    def predictive(self) -> NamedArrays:
        """q(Z), q(β) and the factors of all sites."""
        factors = wire.factor_arrays(self.factors.sites.values())
        return self._latents("q", posterior(self.factors)) | wire.under("others", factors)

    def posterior(self) -> Posterior:
        """The saved posterior: it predicts without any site."""
        return described(self.predictive(), self.parameters["inducing"], self.config, self.preparation)

    def details(self) -> dict[str, Any]:
        """Free energy, counts, and what sites said of how near their pseudo-observations are to rows."""
        facts = {"version": self.factors.version, "damping": self.plan.damping}
        book = asdict(self.book) | facts | {"factors": factor_strengths(self.factors)}
        answers = self.ask("query.free_energy", self.predictive(), {}, retries=1)
        q = posterior(self.factors)
        kl = {name: self._divergence(name, q) for name in LATENTS}
        return book | {"free_energy": free_energy(answers, set(self.factors.sites), kl, self.options.alpha)}

    def _divergence(self, name: str, q: Mapping[str, Gaussian]) -> float:
        arrays = wire.part(self.factors.points, name) if name not in q else q[name].to_arrays()
        if "eta1" not in arrays:
            return 0.0  # a point
        return float(wire.gaussian_of(arrays).kl(wire.standard(len(arrays["eta1"]))))

    def state(self) -> Snapshot:
        """The first latents, the factors, and the book."""
        arrays, facts = wire.state_arrays(self.factors)
        return Snapshot(super().state().arrays | wire.under("pvi", arrays), {"pvi": facts, "book": asdict(self.book)})

    def restore(self, snapshot: Snapshot) -> None:
        """Undo :meth:`state`."""
        super().restore(snapshot)
        self.factors = wire.state_of(wire.part(snapshot.arrays, "pvi"), snapshot.facts["pvi"])
        self.book = Book(**snapshot.facts["book"])


def create(config: Any, observer: Observer, snapshot: Snapshot | None = None) -> PVI:
    """The Strategy of ``pvi.schedule``."""
    if config.options.plan().schedule != "asynchronous":
        return PVI(config, observer, snapshot)
    from strategies.pvi_async import AsynchronousPVI  # noqa: PLC0415  it builds on this module

    return AsynchronousPVI(config, observer, snapshot)
