"""Forward, backward, clipping and what else the compiled update is made of, piece by piece."""

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch as th
from torch import nn

from sb3_per.common import mlp_kernels

Float32Array = npt.NDArray[np.float32]

#: Widths on both sides of what the products take at once, in all combinations of depth
NETWORKS = [
    (4, 2),
    (1, 1, 1),
    (3, 5, 18),
    (16, 64, 64, 2),
    (17, 300, 7, 3),
    (2, 1, 300, 1, 4),
    (40, 31, 33, 32, 29, 6),
]


def make_network(sizes: tuple[int, ...], activation: type[nn.Module]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for n_in, n_out in pairwise(sizes):
        layers += [nn.Linear(n_in, n_out), activation()]
    return nn.Sequential(*layers[:-1])


def addresses_of(network: nn.Module) -> npt.NDArray[np.uint64]:
    return np.array([parameter.data_ptr() for parameter in network.parameters()], np.uint64)


def run_forward(
    network: nn.Sequential, sizes: tuple[int, ...], inputs: th.Tensor, is_tanh: bool
) -> tuple[Float32Array, Float32Array]:
    """:return: outputs, shape ``(n, sizes[-1])``, and the results of all layers"""
    n = len(inputs)
    results = np.full(n * sum(sizes[1:]), np.nan, np.float32)
    outputs = mlp_kernels._forward(
        addresses_of(network), np.array(sizes), is_tanh, inputs.numpy(), results
    )
    return outputs, results


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
@pytest.mark.parametrize("n", [1, 3, 4, 33, 300])
@pytest.mark.parametrize("sizes", NETWORKS)
def test_forward_and_backward_are_those_of_torch(
    sizes: tuple[int, ...], n: int, activation: type[nn.Module]
) -> None:
    is_tanh = activation is nn.Tanh
    network = make_network(sizes, activation)
    inputs = th.randn(n, sizes[0])
    outputs, results = run_forward(network, sizes, inputs, is_tanh)

    # In float64, so that the differences are those of the kernels
    exact = make_network(sizes, activation).double()
    exact.load_state_dict(network.state_dict())
    expected = exact(inputs.double())
    scale = expected.abs().max().item()
    np.testing.assert_allclose(outputs, expected.detach().numpy(), rtol=1e-5, atol=2e-6 * scale)

    slopes = th.randn(n, sizes[-1])
    expected.backward(slopes.double())
    deltas = np.full_like(results, np.nan)
    deltas[len(deltas) - n * sizes[-1] :] = slopes.numpy().ravel()
    gradients = np.full(sum(p.numel() for p in network.parameters()), np.nan, np.float32)
    mlp_kernels.backward(
        addresses_of(network), np.array(sizes), is_tanh, inputs.numpy(), results, deltas, gradients
    )
    start = 0
    for parameter in exact.parameters():
        wanted = parameter.grad.numpy().ravel()  # type: ignore[union-attr]
        found = gradients[start : start + wanted.size]
        assert np.linalg.norm(found - wanted) <= 1e-5 * np.linalg.norm(wanted)
        start += wanted.size
    assert start == gradients.size


def test_relu_is_that_of_torch_at_zero_and_nan() -> None:
    """A unit that is exactly at zero learns nothing, one that is NaN spreads it."""
    sizes = (1, 3, 1)
    network = make_network(sizes, nn.ReLU)
    with th.no_grad():
        values = ([[1.0], [1.0], [1.0]], [0.0, 1.0, -1.0], [[1.0, 1.0, 1.0]], [0.0])
        for parameter, value in zip(network.parameters(), values, strict=True):
            parameter.copy_(th.tensor(value))
    inputs = th.tensor([[0.0], [2.0]])
    outputs, results = run_forward(network, sizes, inputs, False)
    assert outputs.ravel().tolist() == [1.0, 6.0]
    deltas = np.ones_like(results)
    gradients = np.empty(10, np.float32)
    mlp_kernels.backward(
        addresses_of(network), np.array(sizes), False, inputs.numpy(), results, deltas, gradients
    )
    network(inputs).sum().backward()
    expected = th.cat([p.grad.reshape(-1) for p in network.parameters()])  # type: ignore[union-attr]
    assert gradients.tolist() == expected.tolist()
    assert gradients[3:6].tolist() == [1.0, 2.0, 1.0]
    outputs, _ = run_forward(network, sizes, th.tensor([[np.nan]]), False)
    assert np.isnan(outputs[0, 0])


def test_tanh_is_exact_to_a_unit_in_the_last_place() -> None:
    values = np.concatenate(
        [
            np.linspace(-12, 12, 200_001),
            np.logspace(-38, 1, 10_000),
            -np.logspace(-38, 1, 10_000),
            [0.0, 1e30, -1e30, np.inf, -np.inf],
        ]
    ).astype(np.float32)
    network = nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 1))
    with th.no_grad():
        for parameter in network.parameters():
            parameter.fill_(1.0 if parameter.ndim == 2 else 0.0)
    outputs, _ = run_forward(network, (1, 1, 1), th.from_numpy(values[:, None]), True)
    expected = np.tanh(values.astype(np.float64)).astype(np.float32)
    np.testing.assert_array_almost_equal_nulp(outputs.ravel(), expected, 1)
    outputs, _ = run_forward(network, (1, 1, 1), th.tensor([[np.nan]]), True)
    assert np.isnan(outputs[0, 0])


@pytest.mark.parametrize("max_norm", [0.0, 1e-3, 1.0, 4.9, 5.1, 1e9])
def test_gradients_are_clipped_as_by_torch(max_norm: float) -> None:
    parameter = nn.Parameter(th.zeros(2))
    parameter.grad = th.tensor([3.0, -4.0])
    factor = mlp_kernels.clip_factor(parameter.grad.numpy(), max_norm)
    nn.utils.clip_grad_norm_([parameter], max_norm)
    np.testing.assert_allclose(
        factor * np.array([3.0, -4.0]), parameter.grad.numpy(), rtol=1e-6, atol=0
    )
    assert (factor == 1.0) == (max_norm > 5.0)


def test_a_gradient_that_is_nan_stays_nan_when_clipped() -> None:
    assert np.isnan(mlp_kernels.clip_factor(np.array([1.0, np.nan], np.float32), 1.0))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"betas": (0.0, 0.0)},
        {"betas": (0.6, 0.9), "eps": 1e-2},
        {"weight_decay": 0.3},
        {"eps": 0.0},
    ],
)
def test_adam_is_that_of_torch(options: dict[str, Any]) -> None:
    """Not from the start alone: each parameter counts its own steps."""
    network = make_network((3, 5, 2), nn.ReLU)
    before = [parameter.detach().clone() for parameter in network.parameters()]
    optimizer = th.optim.Adam(network.parameters(), lr=0.02, **options)
    states = []
    for i, parameter in enumerate(network.parameters()):
        state = {
            "step": th.tensor(float(i // 2 * 10)),
            "exp_avg": th.randn(parameter.shape),
            "exp_avg_sq": th.rand(parameter.shape),
        }
        optimizer.state[parameter] = state
        states.append({key: value.clone() for key, value in state.items()})
    rows = [
        [value.data_ptr() for value in before],
        [0] * len(before),
        *([state[key].data_ptr() for state in states] for key in ("exp_avg", "exp_avg_sq", "step")),
    ]
    group = optimizer.param_groups[0]
    beta_1, beta_2 = group["betas"]
    for _ in range(3):
        for parameter in network.parameters():
            parameter.grad = th.randn(parameter.shape)
        gradients = th.cat([p.grad.reshape(-1) for p in network.parameters()])  # type: ignore[union-attr]
        mlp_kernels.adam(
            np.array(rows, np.uint64),
            np.array([3, 5, 2]),
            (2.0 * gradients).numpy(),
            0.5,
            group["lr"],
            beta_1,
            beta_2,
            group["eps"],
            float(group["weight_decay"]),
        )
        optimizer.step()
    for value, state, parameter in zip(before, states, network.parameters(), strict=True):
        th.testing.assert_close(value, parameter.detach(), rtol=1e-5, atol=1e-6)
        for key, expected in optimizer.state[parameter].items():
            th.testing.assert_close(state[key], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 16, 31, 33, 200])
def test_columns_are_sorted(n: int) -> None:
    rng = np.random.default_rng(n)
    columns = rng.normal(size=(n, 6)).astype(np.float32)
    columns[:, 1] = rng.integers(3, size=n)
    columns[:, 2] = np.sort(columns[:, 2])[::-1]
    columns[:, 3] = np.sort(columns[:, 3])
    columns[0, 4] = np.inf
    columns[-1, 5] = -np.inf
    expected = np.sort(columns, axis=0)
    errors = np.empty((6, 1), np.float32)
    mlp_kernels.distances(columns, columns[::-1].copy(), errors)
    assert np.array_equal(columns, expected)


def test_the_distance_of_distributions_is_that_of_their_sorted_quantiles() -> None:
    columns = np.array([[3.0, 0.0], [1.0, 0.0]], np.float32)
    others = np.array([[2.0, -1.0], [6.0, 4.0]], np.float32)
    errors = np.empty((2, 1), np.float32)
    mlp_kernels.distances(columns, others, errors)
    # |1 - 2| and |3 - 6|; |0 + 1| and |0 - 4|
    assert errors.ravel().tolist() == [2.0, 2.5]


def test_one_hot_codes_stand_side_by_side() -> None:
    out = np.full((2, 5), np.nan, np.float32)
    assert mlp_kernels.one_hot(np.array([[1, 0], [0, 2]]), np.array([2, 3]), out)
    assert out.tolist() == [[0, 1, 1, 0, 0], [1, 0, 0, 0, 1]]
    for values in ([[2, 0]], [[-1, 0]], [[0, 3]]):
        assert not mlp_kernels.one_hot(np.array(values), np.array([2, 3]), out[:1])
