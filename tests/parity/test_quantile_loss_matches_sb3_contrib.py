"""The mean quantile Huber loss is sb3-contrib's, to the last bit, and so is its gradient."""

import pytest
import torch as th
from sb3_contrib.common.utils import quantile_huber_loss as sb3_contrib_loss

from sb3_per.common.losses import quantile_huber_loss

SHAPES = [(1, 1, 1), (1, 7, 7), (3, 1, 5), (4, 5, 5), (7, 3, 11), (13, 25, 25), (33, 51, 51)]


@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
@pytest.mark.parametrize(("batch", "n_quantiles", "n_targets"), SHAPES)
def test_loss_and_gradient_are_those_of_sb3_contrib(
    batch: int, n_quantiles: int, n_targets: int, scale: float
) -> None:
    quantiles = (scale * th.randn(batch, n_quantiles)).requires_grad_()
    targets = scale * th.randn(batch, n_targets)
    # Differences of exactly 0 and 1, where the pieces meet
    targets[0, 0] = quantiles[0, 0].item()
    targets[-1, -1] = quantiles[-1, -1].item() + 1.0

    ours = (th.ones(batch, 1) * quantile_huber_loss(quantiles, targets)).mean()
    theirs = sb3_contrib_loss(quantiles, targets, sum_over_quantiles=True)
    assert th.equal(ours, theirs)
    (our_gradient,) = th.autograd.grad(ours, quantiles)
    (their_gradient,) = th.autograd.grad(theirs, quantiles)
    assert th.equal(our_gradient, their_gradient)


def test_a_weighted_batch_is_the_weighted_mean_of_batches_of_one() -> None:
    quantiles, targets = th.randn(5, 7), th.randn(5, 7)
    weights = th.rand(5, 1)
    ours = (weights * quantile_huber_loss(quantiles, targets)).mean()
    rows = zip(weights, quantiles, targets, strict=True)
    each = [weight * sb3_contrib_loss(one[None], other[None]) for weight, one, other in rows]
    assert ours.item() == pytest.approx(th.cat(each).mean().item(), rel=1e-6)
