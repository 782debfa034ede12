"""Merging replies: damping, improper updates, averages of points, schedules."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from test_pvi_exact import blocks, contribution, contribution_of

from fedgp_flower.gp.gaussian import DiagonalGaussian, NaturalGaussian
from fedgp_flower.methods.pvi.messages import Marginal, PseudoPoints
from fedgp_flower.methods.pvi.options import Plan
from strategies.pvi import damping_of, due, in_turn, next_visits
from strategies.pvi_state import Contribution, PVIState, cavities, cavity, merge, posterior
from strategies.pvi_updates import averaged
from strategies.server.questions import Roster


def test_damping_is_a_geometric_mean_of_old_and_new():
    q = blocks(b=DiagonalGaussian.standard(2))
    old, new = (DiagonalGaussian(v * torch.ones(2).double(), -v * torch.ones(2).double()) for v in (1.0, 3.0))
    state = PVIState(q, {"s": Contribution(blocks(b=old))})
    merged, record = merge(state, {"s": Contribution(blocks(b=new))}, damping=0.25)
    torch.testing.assert_close(merged.sites["s"].factors["b"].gaussian.eta1, torch.full((2,), 1.5).double())
    assert record.damping == 0.25
    assert record.size["s"] == pytest.approx(float(posterior(merged)["b"].kl(posterior(state)["b"])))
    assert merged.version == 1


def test_cavities_of_all_sites_at_once_are_those_of_each():
    """Sites `a` and `c` have a block that `b` has not, and that has no prior."""
    sites = {name: contribution_of(4.0**k) for k, name in enumerate("abc")}
    for name in "ac":
        own = Contribution(blocks(u=DiagonalGaussian.standard(2)))
        sites[name] = Contribution({**sites[name].factors, **own.factors})
    state = PVIState(blocks(b=DiagonalGaussian.standard(1)), sites)
    for site, found in zip(sites, cavities(state), strict=True):
        expected = cavity(state, site)
        assert found.keys() == expected.keys()
        for name, own in expected.items():
            torch.testing.assert_close(found[name].eta2, own.eta2, rtol=1e-14, atol=0)
    assert list(cavities(PVIState(state.prior))) == []


def test_an_improper_update_is_damped_further_and_counted():
    """Prior precision 1 and t̂ precision −3: proper only if ρ < ⅓, so ρ = 1 is halved twice."""
    state = PVIState(blocks(b=DiagonalGaussian.standard(1)))
    bad = DiagonalGaussian(torch.zeros(1).double(), torch.full((1,), 1.5).double())
    merged, record = merge(state, {"s": Contribution(blocks(b=bad))}, damping=1.0)
    assert (record.damping, record.halvings, record.refused) == (0.25, 2, ())
    assert float(posterior(merged)["b"].precision) == pytest.approx(0.25)


def test_an_update_that_cannot_be_made_proper_is_refused():
    state = PVIState(blocks(b=DiagonalGaussian.standard(1)))
    nan = DiagonalGaussian(torch.full((1,), float("nan")).double(), torch.full((1,), -0.5).double())
    merged, record = merge(state, {"s": Contribution(blocks(b=nan))}, damping=1.0)
    assert record.refused == ("s",)
    assert (record.damping, dict(record.size)) == (0.0, {})
    assert merged is state


def test_an_improper_site_does_not_hold_up_the_others():
    """Precisions: prior 1, a proposes 4, b −3, c −1e20. Alone b is proper at ρ/4, c at none; together a and b are."""
    state = PVIState(blocks(b=DiagonalGaussian.standard(1)), {"c": contribution_of(1.0)}, version=3)
    replies = {"a": contribution_of(4.0), "b": contribution_of(-3.0), "c": contribution_of(-1e20)}
    merged, record = merge(state, replies, damping=1.0)
    assert record.refused == ("c",)
    assert record.halvings == 2
    assert record.damping == 0.25
    found = {name: float(site.factors["b"].gaussian.precision) for name, site in merged.sites.items()}
    assert found == {"a": 4.0, "b": -0.75, "c": 1.0}
    assert set(record.size) == {"a", "b"}
    assert merged.version == 4


def test_sites_that_are_improper_together_are_damped_together():
    """Each takes 0.6 of a prior precision of 1: alone proper, together not, at half of that they are."""
    state = PVIState(blocks(b=DiagonalGaussian.standard(1)))
    merged, record = merge(state, {"a": contribution_of(-0.6), "b": contribution_of(-0.6)}, damping=1.0)
    assert (record.damping, record.halvings, record.refused) == (0.5, 1, ())
    assert float(posterior(merged)["b"].precision) == pytest.approx(0.4)


def test_a_proper_posterior_with_an_improper_cavity_is_damped():
    """q has precision 1 + 4 − 2 = 3, but without the site of precision 4 it would have −1."""
    half = torch.full((1,), -0.5).double()
    state = PVIState(
        blocks(b=DiagonalGaussian.standard(1)), {"a": Contribution(blocks(b=DiagonalGaussian(0 * half, 4 * half)))}
    )
    _, record = merge(state, {"s": Contribution(blocks(b=DiagonalGaussian(0 * half, -2 * half)))}, damping=1.0)
    assert record.halvings == 2  # −2, −1 improper; −½ proper


def test_pseudo_observations_are_replaced_undamped():
    def points(targets):
        return PseudoPoints(np.zeros((len(targets), 1)), targets, targets + 1)

    state = PVIState({}, {"s": Contribution({}, points(np.zeros(2)))})
    merged, _ = merge(state, {"s": Contribution({}, points(np.ones(3)))}, damping=0.1)
    np.testing.assert_array_equal(merged.sites["s"].points.targets, np.ones(3))


def test_points_are_averaged_by_share_of_rows():
    state = PVIState(shared={"inducing": Marginal(value=np.array([0.0, 4.0]))})
    found = averaged(state, {"inducing": Marginal(value=np.array([1.0, 0.0]))}, 0.25)
    np.testing.assert_allclose(found.shared["inducing"].value, [0.25, 3.0])


def test_block_without_a_prior_is_the_product_of_the_factors():
    t = NaturalGaussian(torch.ones(2).double(), -torch.eye(2).double())
    state, _ = merge(PVIState({}), {"a": contribution(t), "b": contribution(t)}, damping=1.0)
    torch.testing.assert_close(posterior(state)["function"].eta1, torch.full((2,), 2.0).double())
    torch.testing.assert_close(cavity(state, "a")["function"].eta2, -torch.eye(2).double())


def test_schedules():
    rng, sites = np.random.default_rng(0), ["c", "a", "b"]

    def in_order(plan: Plan, rounds: int) -> Iterator[str]:
        attempts: dict[str, int] = {}
        for _ in range(rounds):
            (site,) = in_turn(plan, sites, attempts, 1, rng)
            attempts[site] = attempts.get(site, 0) + 1
            yield site

    assert list(in_order(Plan(), 6)) == ["a", "b", "c", "a", "b", "c"]
    order = list(in_order(Plan(order="random"), 30))
    passes = [tuple(order[i:j]) for i, j in pairwise(range(0, 31, 3))]
    assert all(sorted(p) == ["a", "b", "c"] for p in passes)
    assert len(set(passes)) > 1
    assert in_turn(Plan(), sites, {"a": 1}, 2, rng) == ["b", "c"]
    assert in_turn(Plan(), [], {}, 1, rng) == []
    roster = Roster(dict.fromkeys(sites, 1), tuple(sites), (), 1)
    assert next_visits(PVIState(), roster, Plan("synchronous")) == ["a", "b", "c"]
    assert due(Plan(passes=2), sites, {"a": 2, "b": 1}) == ["c", "b"]
    assert (damping_of(Plan("synchronous"), 4), damping_of(Plan("sequential"), 1)) == (0.25, 1.0)
