"""The keys ``device``, ``precision`` and ``threads``: what they change, and what they must not."""

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info

from fedgp_flower.errors import ConfigError
from fedgp_flower.gp.models import FLOAT32_JITTER, SparseGP
from fedgp_flower.gp.placement import Placement, limit_threads
from fedgp_flower.gp.sparse import pooled_sums, rows_gradient
from fedgp_flower.gp.sums import bound_gradient, collapsed_bound, exact_posterior
from fedgp_flower.run.registry import parse_config


def rows(n: int = 80):
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, (n, 2))
    return x, np.sin(2 * x[:, 0]) + 0.1 * rng.standard_normal(n)


def computed(precision: str):
    """Bound, gradient and prediction of the same model in a precision; everything that travels is float64."""
    config = parse_config({"precision": precision, "model.lengthscale": 0.7})
    place, (x, y) = Placement.of(config), rows()
    model = place.module(SparseGP(config.model, torch.from_numpy(x[:15])))
    inputs, targets = place.tensor(x), place.tensor(y)
    assert model.noise.dtype == inputs.dtype == getattr(torch, precision)
    assert (model.jitter == config.model.jitter) == (precision == "float64")
    assert model.jitter in {config.model.jitter, FLOAT32_JITTER}
    sums = pooled_sums(model, inputs, targets)
    noise = float(model.noise.detach())
    gradient = rows_gradient(model, inputs, targets, bound_gradient(sums, np.log(noise)))
    with torch.no_grad():
        mean, _ = model.predict(place.tensor(x[:5] + 0.1), exact_posterior(sums, noise))
    assert all(
        array.dtype == np.float64 for array in (*vars(sums).values(), *gradient.values(), *model.to_arrays().values())
    )
    return collapsed_bound(sums, noise), gradient, mean.double().numpy()


def test_float32_agrees_with_float64_to_its_own_precision():
    bound, gradient, mean = computed("float64")
    bound32, gradient32, mean32 = computed("float32")
    assert bound32 == pytest.approx(bound, rel=1e-3)
    np.testing.assert_allclose(mean32, mean, atol=5e-3)
    assert mean32.tolist() != mean.tolist()
    for name, array in gradient.items():
        np.testing.assert_allclose(gradient32[name], array, rtol=0.05, atol=0.02 * abs(bound))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_where_there_is_none_is_refused_and_auto_falls_back():
    assert Placement.of(parse_config({"device": "auto"})).device.type == "cpu"
    with pytest.raises(ConfigError, match="no CUDA device"):
        Placement.of(parse_config({"device": "cuda"}))


def test_threads_are_those_of_numpy_too():
    before = torch.get_num_threads()
    try:
        for count in (2, 1):
            limit_threads(count)
            assert torch.get_num_threads() == count
            blas = [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]
            assert set(blas) == {count}
    finally:
        limit_threads(before)
