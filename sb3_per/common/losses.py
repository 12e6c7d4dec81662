"""Losses with one value for each transition, so that each can have its weight."""

from collections.abc import Callable
from typing import Literal

import torch as th
from torch.nn import functional as F

__all__ = ["LOSSES", "Loss", "check_loss"]

#: Names of the losses: ``"huber"`` (quadratic up to an error of 1, linear beyond; what DQN uses)
#: or ``"mse"`` (the squared error, not halved)
Loss = Literal["huber", "mse"]


def _huber(predictions: th.Tensor, targets: th.Tensor) -> th.Tensor:
    return F.smooth_l1_loss(predictions, targets, reduction="none")


def _mse(predictions: th.Tensor, targets: th.Tensor) -> th.Tensor:
    return F.mse_loss(predictions, targets, reduction="none")


#: Each maps predictions and targets, shape ``(batch, 1)``, to losses, shape ``(batch, 1)``
LOSSES: dict[str, Callable[[th.Tensor, th.Tensor], th.Tensor]] = {"huber": _huber, "mse": _mse}


def check_loss(loss: str) -> None:
    """
    :param loss: name of a loss
    :raises ValueError: if there is none of that name
    """
    if not isinstance(loss, str) or loss not in LOSSES:
        raise ValueError(f"`loss` must be one of {sorted(LOSSES)}, got {loss!r}")
