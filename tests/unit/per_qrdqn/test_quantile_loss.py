"""The quantile Huber loss, from its definition."""

import pytest
import torch as th

from sb3_per.common.losses import quantile_huber_loss


def test_each_pair_counts_by_its_side_and_its_huber_loss() -> None:
    quantiles, targets = th.randn(4, 3) * 2.0, th.randn(4, 5)
    losses = quantile_huber_loss(quantiles, targets)
    assert losses.shape == (4, 5)
    for row in range(4):
        for column in range(5):
            expected = 0.0
            for rank, midpoint in enumerate((1 / 6, 3 / 6, 5 / 6)):
                error = float(targets[row, column] - quantiles[row, rank])
                huber = 0.5 * error**2 if abs(error) < 1.0 else abs(error) - 0.5
                expected += (midpoint if error > 0.0 else 1.0 - midpoint) * huber
            assert float(losses[row, column]) == pytest.approx(expected, rel=1e-5)


def test_it_is_least_where_quantiles_are_those_of_the_targets() -> None:
    # Far apart in units of Huber's threshold: the quantiles of the definition
    targets = th.linspace(-300.0, 300.0, 601)[None]
    quantiles = th.zeros(1, 3, requires_grad=True)
    optimizer = th.optim.Adam([quantiles], lr=3.0)
    for step in range(400):
        optimizer.param_groups[0]["lr"] = 3.0 * (1 - step / 400)
        optimizer.zero_grad()
        quantile_huber_loss(quantiles, targets).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert quantiles[0].tolist() == pytest.approx([-200.0, 0.0, 200.0], abs=2.0)


def test_no_gradient_flows_to_the_targets() -> None:
    quantiles, targets = th.zeros(2, 3, requires_grad=True), th.ones(2, 3, requires_grad=True)
    quantile_huber_loss(quantiles, targets).sum().backward()  # type: ignore[no-untyped-call]
    assert quantiles.grad is not None
    assert targets.grad is None


@pytest.mark.parametrize(
    ("quantiles", "targets"),
    [((4, 3), (5, 3)), ((4, 3), (4,)), ((4,), (4, 3)), ((2, 4, 3), (4, 3))],
    ids=str,
)
def test_shapes_that_do_not_go_together_are_refused(
    quantiles: tuple[int, ...], targets: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=r"must have the shapes .*, got") as refusal:
        quantile_huber_loss(th.zeros(quantiles), th.zeros(targets))
    assert str(refusal.value).endswith(f"got {quantiles} and {targets}")
