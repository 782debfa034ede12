"""Local updates reach known optima, and start near them; pseudo-observations are averages of rows."""

import math

import pytest
import torch
from test_pvi_exact import collapsed_local_bound

from fedgp_flower.gp.gaussian import Gaussian
from fedgp_flower.methods.pvi.messages import LatentFactor, Marginals
from fedgp_flower.methods.pvi.model import Data, PseudoObservations, SparseModel, local_free_energy
from fedgp_flower.methods.pvi.updates import LocalProblem, adam_update, averages, first_factor, lbfgs_update
from fedgp_flower.options import ModelSection

INDUCING = 8


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sine(rows: int = 60, seed: int = 0) -> Data:
    x = 3 * torch.randn(rows, 1, generator=generator(seed), dtype=torch.float64)
    return Data(x, x[:, 0].sin() + 0.2 * torch.randn(rows, generator=generator(seed + 1), dtype=torch.float64))


def model(likelihood: str = "gaussian") -> SparseModel:
    return SparseModel(ModelSection(likelihood=likelihood, lengthscale=1.5, noise=0.04), 1)


def grid(likelihood: str = "gaussian") -> Marginals:
    hyper = model(likelihood).initial_hyper().numpy()
    return Marginals(LatentFactor(value=torch.linspace(-6, 6, INDUCING).double().numpy()), LatentFactor(value=hyper))


def standard() -> dict[str, Gaussian]:
    return {"inducing": Gaussian.standard(INDUCING), "hyper": Gaussian.standard(3)}


def narrow(data: Data) -> Marginals:
    """Where a first visit may start: q(Z) around rows, q(β) around the initial values."""
    means = (data.inputs[:INDUCING].flatten(), model().initial_hyper())
    return Marginals(*(LatentFactor.of(Gaussian.from_moments(mean, torch.full_like(mean, 0.01))) for mean in means))


def exact(data: Data) -> PseudoObservations:
    return PseudoObservations(data.inputs, data.targets, torch.ones(len(data)).double())


def start_near(data: Data, size: int = 20) -> PseudoObservations:
    own = averages(data, size)
    return PseudoObservations(own.inputs + 0.2, 0.5 * own.targets, own.root)


@pytest.mark.parametrize("form", ["tied", "free", "cpo"])
def test_every_form_of_factor_reaches_the_collapsed_bound_at_fixed_latents(form):
    """With as many pseudo-points as inducing points the local optimum is the closed form."""
    data, latents, others = sine(), grid(), [exact(sine(20, 5))]
    problem = LocalProblem(model(), data, others, {}, num_samples=1)
    near = start_near(data)
    before = {
        "tied": near,
        "free": PseudoObservations(near.inputs, near.targets, 3 * near.root, tied=False),
        "cpo": first_factor(model(), sine(30), latents, "cpo"),
    }[form]
    found = adam_update(problem, before, latents, 100, generator())
    best = collapsed_local_bound(model().at_means(latents), others, data).item()
    assert best - 3.0 < found.free_energy <= best + 1e-9
    assert all(latent.answer() is None for latent in found.latents.values())


def test_lbfgs_reaches_the_collapsed_bound_and_says_the_free_energy_of_its_factor():
    data, latents, others = sine(), grid(), [exact(sine(20, 5))]
    problem = LocalProblem(model(), data, others, {}, num_samples=1)
    found = lbfgs_update(problem, start_near(data), latents, 400, generator())
    best = collapsed_local_bound(model().at_means(latents), others, data).item()
    assert best - 0.05 < found.free_energy <= best + 1e-9
    again = local_free_energy(model().at_means(latents), others, found.factor, data).item()
    assert found.free_energy == pytest.approx(again, rel=1e-12)


def test_the_new_posterior_is_always_more_precise_than_the_cavity():
    data = sine()
    prior = standard()
    problem = LocalProblem(model(), data, [], prior)
    start = narrow(data)
    found = adam_update(problem, start_near(data), start, 30, generator(1))
    for latent in found.latents.values():
        assert bool((latent.answer().natural().gaussian.precision > 0).all())
    before = adam_update(problem, start_near(data), start, 1, generator(1)).free_energy
    assert found.free_energy > before + 5


def test_alpha_weighs_the_kl_of_z_alone():
    data = sine()
    prior = standard()
    start = narrow(data)
    values = {}
    for alpha in (0.0, 0.5):
        problem = LocalProblem(model(), data, [], prior, alpha=alpha)
        one_step = adam_update(problem, exact(data), start, 1, generator(3))
        values[alpha] = one_step.free_energy
    expected = 0.5 * float(start.inducing.natural().gaussian.kl(prior["inducing"]))
    assert values[0.0] - values[0.5] == pytest.approx(expected, rel=1e-9)


def test_kl_of_beta_is_taken_from_the_cavity():
    """The same samples under two cavities of β: the objectives differ by the difference of the KLs."""
    data, prior = sine(), standard()
    wide = Gaussian(prior["hyper"].eta1 + 0.1, 0.25 * prior["hyper"].eta2)
    start = narrow(data)
    values = [
        adam_update(
            LocalProblem(model(), data, [], prior | {"hyper": cavity}, alpha=0.0),
            exact(data),
            start,
            1,
            generator(3),
        ).free_energy
        for cavity in (prior["hyper"], wide)
    ]
    q = start.hyper.natural().gaussian
    expected = float(q.kl(wide) - q.kl(prior["hyper"]))
    assert values[0] - values[1] == pytest.approx(expected, rel=1e-8)
    assert abs(expected) > 0.1


def test_an_averaged_z_moves_and_every_other_point_stays():
    """A site that fitted its factor at a β of its own would send it to a posterior at another β."""
    data, latents = sine(), grid()
    for learn in (True, False):
        problem = LocalProblem(model(), data, [], {}, num_samples=1, learn_inducing=learn)
        found = adam_update(problem, start_near(data), latents, 5, generator())
        answer = found.latents["inducing"].answer()
        assert (answer is not None) == learn
        assert found.latents["hyper"].answer() is None
        at = Marginals(answer or latents.inducing, latents.hyper)
        assert learn == (at.inducing.value != latents.inducing.value).any()
        value = local_free_energy(model().at_means(at), [], found.factor, data).item()
        assert value > found.values[0], "at the β that all sites share"


@pytest.mark.parametrize("form", ["tied", "free", "cpo"])
def test_first_factor_of_all_rows_is_exact_at_the_starting_latents(form):
    """With a pseudo-observation per row the local free energy of the first factor is the collapsed bound."""
    data, latents = sine(), grid()
    draws, factor = model().at_means(latents), first_factor(model(), data, latents, form, most=60, least=1)
    value = local_free_energy(draws, [], factor, data).item()
    assert value == pytest.approx(collapsed_local_bound(draws, [], data).item(), abs=1e-6)


def counts(level: float, rows: int = 60) -> Data:
    x = 6 * torch.rand(rows, 1, generator=generator(), dtype=torch.float64) - 3
    return Data(x, torch.poisson((level + 0.7 * x[:, 0].sin()).exp(), generator=generator(1)))


@pytest.mark.parametrize("form", ["tied", "free", "cpo"])
@pytest.mark.parametrize("level", [5.0])
def test_a_first_factor_of_counts_starts_near_the_optimum_at_any_level(form: str, level: float) -> None:
    """The raw counts would be off by thousands of nats; log(y + ½) is off by less than one per row."""
    poisson, data, latents = model("poisson"), counts(level), grid("poisson")
    start = first_factor(poisson, data, latents, form, most=40, least=1)
    value = local_free_energy(poisson.at_means(latents), [], start, data).item()
    begun = first_factor(poisson, data, latents, "free", most=60, least=1)
    problem = LocalProblem(poisson, data, [], {}, num_samples=1)
    best = adam_update(problem, begun, latents, 100, generator()).free_energy
    assert best - len(data) < value <= best + 1


def test_averaged_counts_weigh_what_their_rows_say_of_the_logarithm() -> None:
    """Var log y ≈ 1/E y: a mean of n counts near λ suggests log λ with precision nλ."""
    same = Data(torch.zeros(6, 1).double(), torch.full((6,), 20.0).double())
    factor = first_factor(model("poisson"), same, grid("poisson"), "tied", most=2, least=3)
    assert factor.targets.tolist() == pytest.approx([math.log(20.5)] * 2)
    assert factor.root.square().tolist() == pytest.approx([3 * 20.5] * 2)


def test_a_mini_batch_stands_for_all_rows() -> None:
    """All rows are equal, so N/|B| times any batch is the sum over all rows: the update is that of all rows."""
    same = Data(torch.full((24, 1), 0.7).double(), torch.full((24,), 1.1).double())
    factor = PseudoObservations(same.inputs[:3] + 0.1, same.targets[:3], torch.ones(3).double())
    problems = [LocalProblem(model(), same, [], {}, num_samples=1, batch_size=size) for size in (0, 8)]
    found = [adam_update(problem, factor, grid(), 4, generator()) for problem in problems]
    assert found[1].values == pytest.approx(found[0].values, rel=1e-10)
    torch.testing.assert_close(found[1].factor.targets, found[0].factor.targets)
    assert abs(found[0].values[0]) > 1.0
