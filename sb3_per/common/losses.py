"""Losses with one value per transition, so that each can be weighted."""

from collections.abc import Callable
from typing import Literal

import torch as th
from torch.nn import functional as F

__all__ = [
    "LOSSES",
    "Loss",
    "check_loss",
    "pairwise_quantile_loss",
    "quantile_huber_loss",
]

#: Names of the losses: ``"huber"`` (quadratic up to an error of 1, linear beyond; the loss of DQN)
#: or ``"mse"`` (the squared error, not halved)
Loss = Literal["huber", "mse"]


def _huber(predictions: th.Tensor, targets: th.Tensor) -> th.Tensor:
    return F.smooth_l1_loss(predictions, targets, reduction="none")


def _mse(predictions: th.Tensor, targets: th.Tensor) -> th.Tensor:
    return F.mse_loss(predictions, targets, reduction="none")


#: Functions of predictions and targets, shape ``(batch, 1)`` each, that return the losses, shape
#: ``(batch, 1)``
LOSSES: dict[str, Callable[[th.Tensor, th.Tensor], th.Tensor]] = {"huber": _huber, "mse": _mse}


def check_loss(loss: str) -> None:
    """
    :param loss: name of a loss
    :raises ValueError: if there is no loss of that name
    """
    if not isinstance(loss, str) or loss not in LOSSES:
        raise ValueError(f"`loss` must be one of {sorted(LOSSES)}, got {loss!r}")


def quantile_huber_loss(quantiles: th.Tensor, targets: th.Tensor) -> th.Tensor:
    """
    Quantile regression with a Huber loss, threshold 1 (Dabney et al. 2018, equations 9 and 10).

    A target below a quantile counts ``1 - midpoint``, one above it ``midpoint``, which moves
    quantile ``i`` of ``n`` to the midpoint ``(i + 0.5) / n`` of the targets' distribution.

    :param quantiles: estimates, shape ``(batch, n_quantiles)``
    :param targets: samples or quantiles of the target distribution, shape ``(batch, n_targets)``;
        no gradient flows through them
    :return: losses summed over the quantiles, shape ``(batch, n_targets)``; the loss of a
        transition is the mean of its row. The mean of all is then, bit for bit, sb3-contrib's
        ``quantile_huber_loss`` of the batch.
    :raises ValueError: if the shapes don't match

    >>> quantile_huber_loss(th.tensor([[0.0, 1.0]]), th.tensor([[3.0]]))
    tensor([[1.7500]])
    """
    if quantiles.ndim != 2 or targets.ndim != 2 or len(quantiles) != len(targets):
        raise ValueError(
            "`quantiles` and `targets` must have the shapes (batch, n_quantiles) and (batch, "
            f"n_targets), got {tuple(quantiles.shape)} and {tuple(targets.shape)}"
        )
    return pairwise_quantile_loss(quantiles, targets).sum(dim=1)


def pairwise_quantile_loss(quantiles: th.Tensor, targets: th.Tensor) -> th.Tensor:
    """
    Loss of :func:`quantile_huber_loss` for each pair of a quantile and a target.

    :param quantiles: estimates, shape ``(..., n_quantiles)``
    :param targets: samples or quantiles of the target distribution, shape ``(..., n_targets)``,
        with the same number of dimensions; no gradient flows through them
    :return: shape ``(..., n_quantiles, n_targets)``
    """
    n_quantiles = quantiles.shape[-1]
    midpoints = (th.arange(n_quantiles, device=quantiles.device) + 0.5) / n_quantiles
    pairs = quantiles.unsqueeze(-1), targets.detach().unsqueeze(-2)
    estimates, wanted = th.broadcast_tensors(*pairs)  # type: ignore[no-untyped-call]
    huber = F.smooth_l1_loss(estimates, wanted, reduction="none")
    return th.abs(midpoints[:, None] - (wanted < estimates).float()) * huber
