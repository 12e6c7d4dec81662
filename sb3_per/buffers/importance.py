"""Importance sampling: weights that correct the bias of prioritized draws."""

import numpy as np
import numpy.typing as npt

__all__ = ["effective_sample_size", "importance_sampling_weights"]

FloatArray = npt.NDArray[np.float64]


def importance_sampling_weights(
    priorities: FloatArray, beta: float, smallest: float | None = None
) -> FloatArray:
    """
    Weights that correct the bias of prioritized draws.

    A transition drawn with probability ``P(i)`` instead of ``1 / N`` counts
    ``(N * P(i)) ** -beta`` in the loss, divided by the largest weight, so that a weight only ever
    scales an update down (Schaul et al. 2016, section 3.4). The largest weight belongs to the
    smallest priority, and ``P(i)`` is the priority divided by the total: both ``N`` and the total
    cancel, which leaves ``(smallest / priority) ** beta``.

    :param priorities: priorities of the drawn transitions, shape ``(batch,)``, all above zero
    :param beta: strength of the correction: 0 gives weights of 1, 1 removes the bias fully
    :param smallest: priority whose weight is 1, at most the smallest of ``priorities``; by
        default the smallest, so that the largest weight of the batch is 1
    :return: weights, shape ``(batch,)``, in ``[0, 1]``; 0 only where the quotient is too small
        for a float64

    >>> importance_sampling_weights(np.array([4.0, 1.0]), beta=0.5)
    array([0.5, 1. ])
    """
    if smallest is None:
        smallest = float(priorities.min())
    weights: FloatArray = (smallest / priorities) ** beta
    return weights


def effective_sample_size(weights: npt.ArrayLike) -> float:
    """
    Kish's effective sample size: the number of equally weighted transitions that the batch is
    worth, as a share of its size, ``sum(w) ** 2 / (n * sum(w ** 2))``.

    :param weights: shape ``(batch,)`` or ``(batch, 1)``, not negative, at least one of them
    :return: share in ``(0, 1]``: 1 when all weights are equal, ``1 / batch`` when one outweighs the
        rest

    >>> effective_sample_size([1.0, 1.0, 0.0, 0.0])
    0.5
    """
    values = np.asarray(weights, dtype=np.float64)
    largest = values.max()
    if largest <= 0.0:
        # All weights underflowed, so they are equal
        return 1.0
    scaled = values / largest
    # Rounding can lead just above 1
    return min(1.0, float(scaled.sum() ** 2 / (scaled.size * np.square(scaled).sum())))
