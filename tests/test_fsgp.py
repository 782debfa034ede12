"""FSGP as a federation does it: equal to one analyst with all rows, whatever the partition."""

import weakref
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from faults import Fault, FaultyGrid, Recorder, configured, csv_nodes, each, numbers, parameters, rows_of, run, waves
from scipy.stats import kstest

from fedgp_flower.gp.models import SparseGP
from fedgp_flower.gp.sparse import pooled_bound, pooled_sums
from fedgp_flower.gp.sums import INPUT_EDGES, input_shape
from fedgp_flower.messages import add
from fedgp_flower.methods.sgpr.messages import SparseStatistics
from fedgp_flower.options import ModelSection
from fedgp_flower.shared_messages import Described, Shape
from strategies.server.questions import Total
from strategies.server.session import Contract
from strategies.server.shapes import points_like_inputs

SGD = {"method": "fsgp", "optimizer__name": "sgd", "optimizer__steps": 1}


def test_one_site_and_one_step_is_a_plain_gradient_step():
    """w + η dF/dw with F Titsias' bound per row, differentiated here by autograd."""
    flat = configured(**SGD, optimizer__learning_rate=0.03, num_server_rounds=1, min_sites=1)
    grid = FaultyGrid(flat, 1)
    before, strategy = parameters(run(FaultyGrid(flat | {"num-server-rounds": 0}, 1))), run(grid)
    x, y = rows_of(grid, strategy, "0")
    model = SparseGP.from_arrays(strategy.config.model, before)
    (pooled_bound(model, x, y) / len(x)).backward()
    for name, leaf in model.wire_parameters().items():
        expected = before[name] + 0.03 * leaf.grad.numpy()
        assert parameters(strategy)[name] == pytest.approx(expected, rel=1e-6, abs=1e-8), name


def test_the_average_weighs_sites_by_their_rows(tmp_path):
    """Replies written by hand: with 48 and 16 training rows, 3/4 of one and 1/4 of the other."""
    nodes = csv_nodes(tmp_path, {"a": waves(60, 0), "b": waves(20, 1)})
    flat = configured(method="fsgp", num_server_rounds=1, optimizer__steps=50)  # that could go so far
    recorder, faults = Recorder(), []
    for site, value, objective in (("a", -1.0, 4.0), ("b", 1.0, 8.0)):
        fill = each(lambda array, value=value: np.full_like(array, value))
        faults += [Fault(site, change, ("train",)) for change in (fill, numbers(objective=objective))]
    strategy = run(FaultyGrid(flat, nodes, *faults), recorder)
    for array in parameters(strategy).values():
        assert array == pytest.approx(np.full_like(array, -0.5), rel=1e-15)
    assert recorder.rows[0]["objective"] == pytest.approx(5.0)


def sampled(seed, fraction, sites=5):
    flat = configured(method="fsgp", averaging__fraction=fraction, seed=seed, optimizer__steps=1)
    grid = FaultyGrid(flat, sites)
    run(grid)
    visits = [(visit.round, visit.site) for visit in grid.visits if visit.phase == "train"]
    return [[site for number, site in visits if number == wanted] for wanted in range(1, 5)]


def test_sampling_takes_a_share_rounded_up_and_repeats_with_the_seed():
    first = sampled(0, 0.41)
    assert [len(set(sites)) for sites in first] == [3, 3, 3, 3]  # ⌈0.41 · 5⌉
    assert sampled(0, 0.41) == first
    assert sampled(1, 0.41) != first
    assert len({tuple(sites) for sites in first}) > 1
    assert [len(sites) for sites in sampled(0, 0.01)] == [1, 1, 1, 1]


def test_sums_of_honest_rows_are_never_refused():
    draw = np.random.default_rng(0)
    for size in (1, 2, 30):
        x, y = torch.from_numpy(draw.standard_normal((size, 1))), torch.from_numpy(draw.standard_normal(size))
        with torch.no_grad():
            sums = pooled_sums(SparseGP(ModelSection(), torch.cat([x, x])[:5]), x, y)
        statistics = SparseStatistics(**vars(sums))
        for added in (False, True):
            assert statistics.refusal(Described(size, added=added)) is None
            assert statistics.refusal(Described(size + 1, added=added)) is not None


def stated(gram, projection=0.0, square=1.0):
    size = len(gram)
    return SparseStatistics(gram, np.zeros(size) + projection, np.array(square), np.array(float(size)), np.array(10.0))


def test_gross_lies_show_at_a_glance():
    draw, size = np.random.default_rng(0), 40
    half = draw.standard_normal((size, 10))
    gram = half @ half.T / np.square(half).sum() * size
    targets = draw.standard_normal(10)
    honest = stated(gram, half @ targets / np.sqrt(np.square(half).sum() / size), float(targets @ targets))
    assert [honest.refusal(Described(10, added=True)) for _ in range(200)] == [None] * 200  # whatever the directions
    assert honest.refusal(Described(10)) is None
    crossed = gram.copy()
    crossed[0, 1] = crossed[1, 0] = 2 * np.diagonal(gram).max()
    for lie, words in (
        (stated(-gram), "not a Gram matrix"),
        (stated(gram - 3 * np.eye(size)), "not a Gram matrix"),
        (stated(crossed), "not a Gram matrix"),
        (stated(gram, honest.projection, float(targets @ targets) / 10), "larger than the targets"),
        (stated(2 * gram), "more than the prior variance"),
    ):
        assert words in str(lie.refusal(Described(10, added=True)))
        assert words in str(lie.refusal(Described(10)))


def test_a_lie_that_no_glance_shows_is_refused_where_no_rows_have_the_total():
    """Where some have, the mean is that of rows: ‖B⁻¹b/σ²‖ ≤ √s / 2σ."""
    draw, size = np.random.default_rng(1), 40
    direction = draw.standard_normal(size)
    direction /= np.linalg.norm(direction)
    eye, noise = np.eye(size), 0.1
    lie = stated(eye - 1.5 * np.outer(direction, direction))
    assert lie.refusal(Described(10, added=True)) is None
    assert lie.refusal(Described(10)) is not None

    def refused(answers):
        question, described = Total(SparseStatistics, None), dict.fromkeys(answers, Described(10))
        contract = Contract(question, {"M": size}, described, dict.fromkeys(answers), [], added=True)
        replies = [SimpleNamespace(site=site) for site in answers]
        found = {}
        with (
            mock.patch("strategies.server.network.claimed_site", lambda reply: reply.site),
            mock.patch.object(Contract, "read", lambda _, reply: answers[reply.site]),
        ):
            contract.settled(replies, found.__setitem__)
        return found

    for gram, projection in ((0.4, 0.0), (0.6, 0.7)):  # totals without positive eigenvalues, and with a b too large
        honest = stated(gram * eye, projection * direction)
        assert honest.refusal(Described(10)) is None
        assert refused({"honest": honest, "liar": lie}) == {"liar": "`gram` is not a Gram matrix"}
    honest = stated(0.6 * eye, 0.4 * direction)
    total = add([honest, lie])
    assert refused({"honest": honest, "liar": lie}) == {}
    posterior = total.posterior(noise)
    assert 0.5 < float(posterior.mean.norm()) * 2 * np.sqrt(noise / float(total.target_squares)) <= 1


def test_a_total_reads_the_answers_of_sites_one_at_a_time():
    """At 4000 points an answer has 128 MB, and a hundred sites may send one."""
    read_so_far, alive = [], []

    def read(_, reply):
        answer = stated(reply.site * np.eye(40))
        read_so_far.append(weakref.ref(answer.gram))
        alive.append(sum(gram() is not None for gram in read_so_far))
        return answer

    sites = (0.125, 0.25, 0.5, 1.0)
    described = {str(site): Described(10) for site in sites}
    contract = Contract(Total(SparseStatistics, None), {"M": 40}, described, dict.fromkeys(described), [], added=True)
    replies = [SimpleNamespace(site=site) for site in sites]
    with (
        mock.patch("strategies.server.network.claimed_site", lambda reply: reply.site),
        mock.patch.object(Contract, "read", read),
    ):
        summed = contract.settled(replies, pytest.fail)
        parts = [float(part.gram[0, 0]) for part in summed.parts.values()]
    assert float(summed.total.gram[0, 0]) == sum(parts) == sum(sites)
    assert len(alive) > len(sites)
    assert max(alive) == 2  # while one is added, the next is read


def correlated(rows):
    """Three columns: one skewed, one of two values, one normal and correlated with the first."""
    draw = np.random.default_rng(1)
    first = draw.exponential(size=rows)
    second = draw.choice([0.0, 1.0], rows, p=[0.7, 0.3])
    columns = np.stack([first, second, 0.8 * first + 0.6 * draw.standard_normal(rows)], axis=1)
    return (columns - columns.mean(axis=0)) / columns.std(axis=0)


def test_points_like_inputs_follow_marginals_and_correlations():
    x = correlated(4000)
    z = points_like_inputs(Shape(*input_shape(x), np.array(0.0)), 512, np.random.default_rng(0))
    width = INPUT_EDGES[1] - INPUT_EDGES[0]
    for column in (0, 2):  # a histogram knows a distribution up to the width of its bins
        assert kstest(z[:, column], x[:, column]).statistic < 0.5 * width
    assert np.corrcoef(z.T)[0, 2] == pytest.approx(np.corrcoef(x.T)[0, 2], abs=0.08)
    assert np.abs(np.corrcoef(z.T)[1, [0, 2]]).max() < 0.1
    low, high = np.unique(x[:, 1])
    near = np.minimum(np.abs(z[:, 1] - low), np.abs(z[:, 1] - high))
    assert near.max() <= width  # two values stay two clusters
    assert (z[:, 1] > 0).mean() == pytest.approx((x[:, 1] > 0).mean(), abs=0.02)
