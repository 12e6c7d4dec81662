"""Losses: one value for each transition, from their definitions."""

from typing import Any, get_args

import pytest
import torch as th
from torch.nn import functional as F

from sb3_per.common.losses import LOSSES, Loss, check_loss

ERRORS = (-100.0, -1.5, -1.0, -0.5, 0.0, 0.25, 1.0, 3.0)


def test_the_names_of_the_losses() -> None:
    assert tuple(LOSSES) == get_args(Loss) == ("huber", "mse")


@pytest.mark.parametrize("loss", ["huber", "mse"])
def test_each_transition_has_its_own_loss(loss: str) -> None:
    targets = th.linspace(-2.0, 2.0, len(ERRORS)).reshape(-1, 1)
    predictions = targets + th.tensor(ERRORS).reshape(-1, 1)
    losses = LOSSES[loss](predictions, targets)
    expected = {
        "huber": [0.5 * e**2 if abs(e) < 1.0 else abs(e) - 0.5 for e in ERRORS],
        "mse": [e**2 for e in ERRORS],
    }
    assert losses.shape == (len(ERRORS), 1)
    assert losses.dtype == th.float32
    assert losses.flatten().tolist() == pytest.approx(expected[loss], rel=1e-5)


@pytest.mark.parametrize("loss", ["huber", "mse"])
def test_slopes(loss: str) -> None:
    """Huber's is the error, clipped to [-1, 1]; the squared error is not halved."""
    errors = th.tensor(ERRORS).reshape(-1, 1).requires_grad_()
    LOSSES[loss](errors, th.zeros_like(errors)).sum().backward()  # type: ignore[no-untyped-call]
    assert errors.grad is not None
    expected = {"huber": [max(-1.0, min(1.0, e)) for e in ERRORS], "mse": [2 * e for e in ERRORS]}
    assert errors.grad.flatten().tolist() == expected[loss]


def test_the_mean_of_huber_is_the_loss_of_dqn() -> None:
    th.manual_seed(0)
    predictions, targets = th.randn(64, 1) * 3, th.randn(64, 1)
    mean = LOSSES["huber"](predictions, targets).mean()
    assert th.equal(mean, F.smooth_l1_loss(predictions, targets))


@pytest.mark.parametrize("loss", ["huber", "mse"])
def test_known_losses_are_accepted(loss: str) -> None:
    check_loss(loss)


@pytest.mark.parametrize("loss", ["l1", "Huber", "", "mse ", None, ["huber"], F.mse_loss])
def test_an_unknown_loss_is_refused(loss: Any) -> None:
    with pytest.raises(ValueError, match=r"`loss` must be one of \['huber', 'mse'\]") as refusal:
        check_loss(loss)
    assert str(refusal.value).endswith(f"got {loss!r}")
