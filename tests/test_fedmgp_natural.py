"""Natural pseudo-gradients: exact steps, pooled fixed points, and rules of aggregation with answers by hand."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_exact_q import grid, random_unit

from fedgp_flower.errors import ConfigError, NumericsError
from fedgp_flower.messages import add
from fedgp_flower.methods.fedmgp.latents import (
    PRECISION,
    SCALES,
    SHIFT,
    LatentPosterior,
    from_natural,
    latents_at,
    posterior,
    to_natural,
)
from fedgp_flower.methods.fedmgp.options import NATURAL_STEP, FedMGPOptions
from fedgp_flower.methods.fedmgp.unit import LocalSteps, natural_steps, statistics
from fedgp_flower.run.registry import parse_config
from strategies import fedmgp
from strategies import fedmgp_rules as rules
from strategies.fedmgp_rules import mean, merged

MOVED = 1 - (1 - NATURAL_STEP) ** 4


def steps(count, rho, weight=1.0, rows=None):
    """Local steps that leave hyperparameters alone."""
    return LocalSteps(count, 0.0, rho, weight, lambda: rows)


def rule(name, **more):
    """Four local steps, merged by a rule."""
    return FedMGPOptions.model_validate({"aggregation": name, "local-steps": 4, **more})


def prior(latents):
    """θ before any unit has answered: q(u_i) = N(0, I)."""
    count, J = len(latents.scales), len(latents.inducing)
    return {SCALES: np.log(latents.scales), PRECISION: np.stack([np.eye(J)] * count), SHIFT: np.zeros((count, J))}


def sent(units, weight):
    zeros = prior(units[0][1])
    ends = [natural_steps(zeros, *unit, steps(4, NATURAL_STEP, weight))[0] for unit in units]
    return {str(m): {name: zeros[name] - end[name] for name in zeros} for m, end in enumerate(ends)}


def test_a_whole_step_is_the_exact_posterior_of_the_unit():
    """ρ = 1, all rows, p = 1 and still hyperparameters: λ = I + G and h = b, and φ_m stays."""
    latents, _, data, phi, _ = random_unit(1, 1)
    after, same = natural_steps(prior(latents), data, latents, phi, steps(1, 1.0))
    expected = posterior(statistics(data, latents, phi))
    mean, factors = from_natural(after[PRECISION], after[SHIFT])
    np.testing.assert_allclose(mean[0], expected.mean, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(factors[0] @ factors[0].T, expected.covariance, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(same.smoothing, phi.smoothing)


def test_two_functions_know_of_each_other():
    """The best product of two functions has the mean of the joint posterior, and a step leaves it where it is."""
    latents, _, data, phi, _ = random_unit(2, 1)
    J, sums = len(latents.inducing), statistics(data, latents, phi)
    mean, whole = posterior(sums).mean.reshape(2, J), sums.precision.reshape(2, J, 2, J)
    precision = np.stack([np.eye(J) + whole[i, :, i] for i in range(2)])
    best = {SCALES: np.log(latents.scales), PRECISION: precision, SHIFT: np.einsum("iab,ib->ia", precision, mean)}
    after, _ = natural_steps(best, data, latents, phi, steps(1, 0.5))
    for name in (PRECISION, SHIFT):
        np.testing.assert_allclose(after[name], best[name], rtol=1e-7, atol=1e-7)


def test_averages_over_units_settle_at_the_pooled_posterior():
    """Still hyperparameters, three units: λ = I + Σ G_m and h = Σ b_m."""
    latents, _, data, phi, _ = random_unit(1, 1)
    J, weights = len(latents.inducing), (0.5, 0.2, 0.3)
    scaled = ((replace(data, y=gain * data.y), gain * phi.amplitudes) for gain in (1.0, -0.5, 2.0))
    units = [(rows, latents, replace(phi, amplitudes=amplitudes)) for rows, amplitudes in scaled]
    theta = prior(latents)
    for _ in range(10):
        ends = [natural_steps(theta, *unit, steps(5, 0.5, p))[0] for unit, p in zip(units, weights, strict=True)]
        theta = {name: sum(p * end[name] for p, end in zip(weights, ends, strict=True)) for name in theta}
    total = add([statistics(*unit) for unit in units])
    np.testing.assert_allclose(theta[PRECISION][0], np.eye(J) + total.precision, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(theta[SHIFT][0], total.shift, rtol=1e-6, atol=1e-6)


def test_agreement_reads_what_rows_say_and_counts_out_another_process():
    """Δ_m of still hyperparameters is G_m and b_m; with a unit of another g the mean is as if it had no rows."""
    latents, _, data, phi, x = random_unit(1, 1)
    g, J, weight, zeros = np.sin(3 * x[:, 0]), len(latents.inducing), 0.2, prior(latents)
    units = [(replace(data, y=gain * g), latents, phi) for gain in (1.0, 0.9, 1.1, 1.2, -1.0)]
    updates = sent(units, weight)
    parts = [statistics(*unit) for unit in units]
    for part, update in zip(parts, updates.values(), strict=True):
        [said] = rules.statistics_of(zeros, update, MOVED, weight)
        np.testing.assert_allclose(said.precision, part.precision, rtol=1e-7, atol=1e-7)
        np.testing.assert_allclose(said.shift, part.shift, rtol=1e-7, atol=1e-7)
    merged, counted = rules.merge_natural(rule("agreement"), zeros, updates)
    assert counted == ("0", "1", "2", "3")
    expected = np.eye(J) + MOVED * sum(part.precision for part in parts[:4])
    np.testing.assert_allclose((zeros[PRECISION] - merged[PRECISION])[0], expected, rtol=1e-7, atol=1e-7)
    flipped = {site: {name: -array for name, array in update.items()} for site, update in updates.items()}
    with pytest.raises(NumericsError, match="no unit sent an update that rows can produce"):
        rules.merge_natural(rule("mean"), zeros, flipped)
    spoilt = {**updates, "0": flipped["0"]}  # the same without unit 0, under any rule
    rest = {site: update for site, update in updates.items() if site != "0"}
    for name in ("mean", "median", "agreement"):
        found, counted = rules.merge_natural(rule(name), zeros, spoilt)
        assert "0" not in counted
        wanted, _ = rules.merge_natural(rule(name), zeros, rest)
        np.testing.assert_allclose(found[PRECISION], wanted[PRECISION], rtol=1e-9)


@pytest.mark.parametrize(("name", "select"), [("median", 1), ("trimmed-mean", 1), ("krum", 1), ("krum", 3)])
def test_units_that_say_next_to_nothing_have_no_vote(name, select):
    """Two of six have an amplitude near zero, as pure noise makes it: the rule does without them."""
    latents, _, data, phi, x = random_unit(1, 1)
    draw = np.random.default_rng(0)
    silent = replace(phi, amplitudes=1e-3 * phi.amplitudes)
    noisy = [np.sin(3 * x[:, 0]) + 0.1 * draw.standard_normal(len(x)) for _ in range(4)]
    units = [(replace(data, y=y), latents, phi) for y in noisy]
    units += [(replace(data, y=draw.standard_normal(len(x))), latents, silent) for _ in range(2)]
    zeros, updates = prior(latents), sent(units, 1 / 6)
    found, counted = rules.merge_natural(rule(name, malicious=2, select=select), zeros, updates)
    wanted, _ = rules.merge_natural(rule(name, select=select), zeros, {site: updates[site] for site in "0123"})
    assert counted == ("0", "1", "2", "3")
    for part in wanted:
        np.testing.assert_allclose(found[part], wanted[part], rtol=1e-9, atol=1e-12)


def test_coordinates_of_q_change_no_mean():
    """What a mean makes of updates is the same in them; and in them q(u) is N(0, I)."""
    draw = np.random.default_rng(0)
    factor = np.tril(draw.standard_normal((8, 8))) + 3 * np.eye(8)
    precision, shift = to_natural(LatentPosterior(draw.standard_normal(8), factor @ factor.T), 2)
    theta = {SCALES: np.zeros((2, 1)), PRECISION: precision, SHIFT: shift}
    frame = rules.Frame(np.linalg.cholesky(precision), from_natural(precision, shift)[0])
    whole = frame.whiten({**theta})
    np.testing.assert_allclose(whole[PRECISION], np.stack([np.eye(4)] * 2), atol=1e-12)
    np.testing.assert_allclose(whole[SHIFT], 0, atol=1e-12)
    symmetric = np.diag([-1.0, 0.2, 0.7, 2.0])[None] + np.zeros((2, 4, 4))
    within = rules.within_averages(symmetric, 0.5)
    np.testing.assert_allclose(within, np.minimum(symmetric, 0.5 * np.eye(4)), atol=1e-12)
    other = {name: draw.standard_normal(array.shape) for name, array in theta.items()}
    other[PRECISION] = other[PRECISION] + other[PRECISION].transpose(0, 2, 1)
    again = frame.unwhiten(frame.whiten(other))
    np.testing.assert_allclose(again[SHIFT], other[SHIFT], atol=1e-10)
    np.testing.assert_allclose(again[PRECISION], other[PRECISION], atol=1e-10)


@pytest.mark.parametrize("value", [1e308, -800.0, 800.0])
def test_a_step_out_of_the_numbers_is_refused(value):
    state = fedmgp.begin(latents_at(grid(1), [1.0], 1e-8), LatentPosterior(np.zeros(16), np.eye(16)), gaussian=False)
    zeros = {name: np.zeros_like(array) for name, array in state.parameters.items()}
    with pytest.raises(NumericsError, match="far too large"):
        fedmgp.step(state, {"a": {**zeros, SCALES: np.full((1, 1), value)}}, rule("mean"))


def test_the_local_rate_falls_to_its_last_share_over_the_rounds():
    config = parse_config({"method": "fedmgp", "optimizer.learning-rate": 0.02, "optimizer.decay": 0.5})
    rates = [fedmgp.learning_rate(config, t, 3) for t in (1, 2, 3)]
    np.testing.assert_allclose(rates, [0.02 * 0.5**t * fedmgp.FINAL_RATE ** (t / 2) for t in range(3)])


ROWS = np.array([[1.0, 2.0], [3.0, -4.0], [100.0, 6.0]])
USUAL = FedMGPOptions()


def test_the_mean_keeps_names_and_shapes():
    found = merged(mean, USUAL, [{"b": row[1:], "a": row[:1].reshape(1, 1)} for row in ROWS])
    np.testing.assert_allclose(found["a"], [[104 / 3]])
    np.testing.assert_allclose(found["b"], [4 / 3])


def test_norm_clipping_bounds_every_site():
    rows = np.array([[3.0, 4.0], [0.0, 1.0], [600.0, 800.0]])  # norms 5, 1, 1000: the median is 5
    np.testing.assert_allclose(rules.norm_clipped(rows, USUAL), np.array([6.0, 9.0]) / 3)
    np.testing.assert_allclose(rules.norm_clipped(rows * 0, USUAL), [0.0, 0.0])


def test_median_and_trimmed_mean_by_coordinate():
    np.testing.assert_allclose(rules.median(ROWS, USUAL), [3.0, 2.0])
    np.testing.assert_allclose(rules.median(np.vstack([ROWS, [[5.0, 5.0]]]), USUAL), [4.0, 3.5])
    rows = np.arange(10.0)[:, None] ** 2
    np.testing.assert_allclose(rules.trimmed_mean(rows, FedMGPOptions(trim=0.2)), [np.mean([4, 9, 16, 25, 36, 49])])


def test_krum_takes_an_honest_update_or_averages_several():
    rng = np.random.default_rng(0)
    honest = 1.0 + 0.1 * rng.normal(size=(5, 4))
    rows = np.vstack([honest, np.full((2, 4), -50.0) + rng.normal(size=(2, 4))])
    distance = np.square(rows[:, None] - rows[None]).sum(-1)
    scores = np.sort(distance, axis=1)[:, 1 : 7 - 2 - 2 + 1].sum(1)
    for select in (1, 3):
        options = FedMGPOptions(aggregation="krum", malicious=2, select=select)
        np.testing.assert_allclose(rules.krum(rows, options), rows[np.argsort(scores)[:select]].mean(0))
    with pytest.raises(ConfigError, match="2f"):
        rules.krum(ROWS, options)


@settings(max_examples=30)
@given(st.integers(5, 9), st.integers(0, 10_000))
def test_no_rule_depends_on_the_order_of_sites_and_robust_ones_stay_in_the_honest_range(count, seed):
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(count, 3))
    rows[0] *= 1e6
    order = rng.permutation(count)
    for name, rule in rules.RULES.items():
        options = FedMGPOptions(aggregation=name, trim=0.25, malicious=1, select=2)
        update = rule(rows, options)
        np.testing.assert_allclose(update, rule(rows[order], options), rtol=1e-9, err_msg=name)
        if name in {"median", "trimmed-mean", "krum"}:
            assert np.all(update <= rows[1:].max(0)), name
            assert np.all(update >= rows[1:].min(0)), name
