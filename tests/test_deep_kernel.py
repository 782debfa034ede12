"""A Gaussian process on learned features: heads are those of the pooled process, whatever the partition."""

from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch.distributions import MultivariateNormal

from fedgp_flower.errors import ProtocolError
from fedgp_flower.messages import add
from fedgp_flower.methods.deep_kernel.model import Classes, DeepKernel, Heads, heads_of, sums_of
from fedgp_flower.methods.deep_kernel.options import DeepKernelOptions
from fedgp_flower.options import ModelSection
from fedgp_flower.shared_messages import Described
from strategies.deep_kernel import chosen

C, D, N = 3, 4, 24
SHARES = (0.0, 0.3, 0.8)


class Small(DeepKernelOptions):
    """Few features keep matrices of rows well conditioned."""

    features: ClassVar[int] = 5


@pytest.fixture(scope="module")
def problem() -> tuple[DeepKernel, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    options = Small.model_validate({"classes": C})
    x, new = (torch.randn(n, D, generator=generator, dtype=torch.float64) for n in (N, 7))
    y = torch.randint(C, (N,), generator=generator).double()
    return DeepKernel(options, ModelSection(), D), x, y, new


def summed(model: DeepKernel, x: torch.Tensor, y: torch.Tensor, sites: list[torch.Tensor]) -> Heads:
    with torch.no_grad():
        parts = [heads_of([model.sums(x[i], y[i]).without_personal(share) for share in SHARES]) for i in sites]
    return add(parts)


def dense(model, x, y, new, site, share, at):
    """Log evidence, mean and variance [C, N'] at new rows of a site, from N × N matrices of the process itself."""
    with torch.no_grad():
        phi, phi_new = model.features(x), model.features(new)
        t, s2 = model.observed.values(y)
    same = (site[:, None] == site).double()
    prior = (phi @ phi.T) * (1 - share + share * same)
    cross = (phi_new @ phi.T) * (1 - share + share * (site == at).double())
    evidence, means, variances = 0.0, [], []
    for c in range(len(t)):
        noisy = prior + torch.diag(s2[c])
        evidence += float(MultivariateNormal(torch.zeros(len(y)).double(), noisy).log_prob(t[c]))
        means.append(cross @ torch.linalg.solve(noisy, t[c]))
        variances.append(phi_new.square().sum(1) - (cross * torch.linalg.solve(noisy, cross.T).T).sum(1))
    return evidence, torch.stack(means), torch.stack(variances)


@pytest.mark.parametrize("which", range(len(SHARES)))
def test_heads_are_those_of_the_pooled_process(problem, which):
    """Evidence of all rows, and the personal predictions of a site and of a new one, by linear algebra in N rows."""
    (model, x, y, new), share = problem, SHARES[which]
    site = torch.arange(N) % 3
    totals = sums_of(summed(model, x, y, [torch.nonzero(site == k)[:, 0] for k in range(3)]))[which]
    mean, covariance = totals.posterior(1 - share)
    features = model.features(new).detach()
    with torch.no_grad():
        known = model.sums(x[site == 1], y[site == 1]).personal(mean, covariance, share)
    for at, (centre_w, wide) in ((1, known), (9, (mean, covariance + share * torch.eye(len(mean[0]))))):
        evidence, centre, spread = dense(model, x, y, new, site, share, at)
        assert float(totals.log_evidence(1 - share)) == pytest.approx(evidence, rel=1e-10)
        torch.testing.assert_close(centre_w @ features.T, centre, rtol=1e-8, atol=1e-8)
        found = torch.einsum("nf,cfg,ng->cn", features, wide, features)
        torch.testing.assert_close(found, spread, rtol=1e-8, atol=1e-8)


def test_the_evidence_of_one_site_is_the_same_for_all_shares_and_so_is_what_it_trains_on(problem):
    model, x, y, _ = problem
    heads = summed(model, x, y, [torch.arange(N)])
    assert heads.refusal(Described(N)) is None
    assert "positive semi-definite" in str(replace(heads, precision=-heads.precision).refusal(Described(N)))
    values = [float(own.log_evidence(1 - share)) for share, own in zip(SHARES, sums_of(heads), strict=True)]
    assert values == pytest.approx([float(model.sums(x, y).log_evidence(1.0).detach())] * 3, rel=1e-11)


def test_the_largest_evidence_is_taken(problem):
    """Sites with opposite classes have nothing in common; those of one rule have no use for personal heads."""
    model, x, _, _ = problem
    x = 10 * x
    label, site = (x[:, 0] > 0).double(), torch.arange(N) % 2
    found = {}
    for name, y in (("same", label), ("opposite", (label - site).abs())):
        totals = summed(model, x, y, [torch.nonzero(site == k)[:, 0] for k in range(2)])
        head, evidence = chosen({}, SHARES, totals)
        found[name] = head.share
        assert max(evidence) == evidence[SHARES.index(head.share)]
    assert found["same"] == 0.0
    assert found["opposite"] > 0.0


def test_classes_are_observed_as_their_paper_says(problem):
    """log α − s²/2 and s² are the moments of the logarithm of the log-normal that matches Gamma(α, 1)."""
    model, _, _, _ = problem
    values, variances = model.observed.values(torch.tensor([2.0, 0.0]).double())
    for (c, n), alpha in {(2, 0): 1.01, (0, 0): 0.01, (0, 1): 1.01}.items():
        t, s2 = float(values[c, n]), float(variances[c, n])
        assert np.exp(t + s2 / 2) == pytest.approx(alpha)  # mean of Gamma(α, 1)
        assert np.expm1(s2) * np.exp(2 * t + s2) == pytest.approx(alpha)  # and its variance


def test_probabilities_are_those_of_a_softmax_of_draws():
    mean, variance = torch.tensor([[0.3], [-1.0], [0.5]]).double(), torch.tensor([[0.5], [2.0], [0.1]]).double()
    normal = torch.randn(200000, 3, generator=torch.Generator().manual_seed(0)).double()
    drawn = mean[:, 0] + variance[:, 0].sqrt() * normal
    found, _ = Classes(3, binary=False, draws=4000).predict(mean, variance)
    torch.testing.assert_close(found[0], drawn.softmax(1).mean(0), atol=0.02, rtol=0)


def test_the_noise_starts_at_the_configured_value():
    start = DeepKernel(Small(), ModelSection(noise=0.07), D).observed.log_noise
    assert start.exp().item() == pytest.approx(0.07, rel=1e-12)


def test_weights_of_another_network_are_refused():
    model = DeepKernel(Small(), ModelSection(), D)
    weights = {name: value.detach().numpy() for name, value in model.named_parameters()}
    first, *others = weights
    with pytest.raises(ProtocolError, match="the model has no array `other`"):
        model.load(weights | {"other": np.zeros(2)})
    with pytest.raises(ProtocolError, match=rf"`{first}`: expected shape .*, found \(99,\)"):
        model.load(weights | {first: np.zeros(99)})
    with pytest.raises(ProtocolError, match=rf"`{first}`: expected shape .*, found nothing"):
        model.load({name: weights[name] for name in others})


def test_images_are_square():
    options = Small.model_validate({"network": "convolutional", "classes": 2})
    model = DeepKernel(options, ModelSection(), 64)
    assert model.features(torch.zeros(3, 64).double()).shape == (3, 6)
    with pytest.raises(Exception, match="a row has 60 inputs"):
        DeepKernel(options, ModelSection(), 60)
