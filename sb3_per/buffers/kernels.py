"""
The arithmetic on single batches, compiled by numba.

A batch is so small that NumPy would spend its time on starting one operation after the other.
Here each step from a draw to its feedback is one call. No input is checked beyond what is said.
"""

import numpy as np
import numpy.typing as npt

from sb3_per.trees.sum_kernels import FloatArray, IntArray, compile_kernel

Float32Array = npt.NDArray[np.float32]

#: Priority of a transition whose power is too small for a normal float64
SMALLEST_PRIORITY = float(np.finfo(np.float64).tiny)


@compile_kernel
def gather(
    indices: IntArray, rewards: Float32Array, dones: Float32Array, timeouts: Float32Array
) -> tuple[Float32Array, Float32Array]:
    """
    :param indices: which transitions, shape ``(n,)``
    :param rewards: of all transitions, one number each
    :param dones: whether their episodes ended there
    :param timeouts: whether that was for lack of time
    :return: rewards of the batch, and 1 where its episodes really ended, shape ``(n, 1)`` each
    """
    n = indices.shape[0]
    batch_rewards = np.empty((n, 1), np.float32)
    batch_dones = np.empty((n, 1), np.float32)
    for j in range(n):
        i = np.uint64(indices[j])
        batch_rewards[j, 0] = rewards[i]
        # Time limits are no end of the task: the value of the next observation counts
        batch_dones[j, 0] = dones[i] * (np.float32(1.0) - timeouts[i])
    return batch_rewards, batch_dones


@compile_kernel
def look_ahead(
    indices: IntArray,
    n_envs: int,
    newest_row: int,
    rewards: Float32Array,
    dones: Float32Array,
    timeouts: Float32Array,
    factors: Float32Array,
) -> tuple[IntArray, Float32Array, Float32Array, Float32Array]:
    """
    Follow transitions up to ``n_steps``, to the end of the episode or to the newest row.

    :param indices: where to start, shape ``(n,)``
    :param newest_row: number of the row that was added last
    :param rewards: of all transitions, one number each
    :param dones: whether their episodes ended there
    :param timeouts: whether that was for lack of time
    :param factors: powers of the discount factor, shape ``(n_steps + 1,)``
    :return: the last transition of each path, shape ``(n,)``; the rewards along a path of full
        length, shape ``(n, n_steps)``; what they count, 0 after the end, same shape; the discount
        of what follows, shape ``(n, 1)``
    """
    n = indices.shape[0]
    n_steps = factors.shape[0] - 1
    n_transitions = rewards.shape[0]
    last = np.empty(n, np.int64)
    path_rewards = np.empty((n, n_steps), np.float32)
    counts = np.zeros((n, n_steps), np.float32)
    discounts = np.empty((n, 1), np.float32)
    for j in range(n):
        i = indices[j]
        length = 0
        for step in range(n_steps):
            path_rewards[j, step] = rewards[i]
            if length == step:
                # Not at the end yet
                counts[j, step] = factors[step]
                last[j] = i
                ends = dones[i] != 0.0 or timeouts[i] != 0.0 or i // n_envs == newest_row
                length += 0 if ends else 1
            # One row further is n_envs transitions further
            i += n_envs
            if i >= n_transitions:
                i -= n_transitions
        discounts[j, 0] = factors[min(length + 1, n_steps)]
    return last, path_rewards, counts, discounts


@compile_kernel
def weights_of(priorities: FloatArray, smallest: float, beta: float) -> Float32Array:
    """
    The weights of :func:`~sb3_per.buffers.importance.importance_sampling_weights`.

    :param priorities: of the batch, shape ``(n,)``; one of zero, which can't be drawn, weighs 1
    :param smallest: the priority whose weight is 1; 0 for the smallest of the batch
    :param beta: strength of the correction
    :return: weights, shape ``(n, 1)``
    """
    n = priorities.shape[0]
    if smallest == 0.0:
        smallest = np.inf
        for j in range(n):
            if priorities[j] > 0.0:
                smallest = min(smallest, priorities[j])
    if smallest == np.inf:
        smallest = 1.0
    weights = np.empty((n, 1), np.float32)
    for j in range(n):
        # Who names transitions may name some that can't be drawn: they count in full
        priority = priorities[j] if priorities[j] > 0.0 else smallest
        weights[j, 0] = (smallest / priority) ** beta
    return weights


@compile_kernel
def priorities_of(
    td_errors: Float32Array, indices: IntArray, size: int, eps: float, alpha: float, limit: float
) -> tuple[FloatArray, bool]:
    """
    ``(|td_error| + eps) ** alpha``, and whether all of it can be written to a tree.

    :param td_errors: one for each index, shape ``(n,)``
    :param indices: shape ``(n,)``
    :param size: how many transitions are stored
    :param limit: largest priority that is allowed
    :return: priorities, shape ``(n,)``, and whether all indices are in ``[0, size)``, all errors
        finite and all priorities at most ``limit``
    """
    n = indices.shape[0]
    priorities = np.empty(n)
    is_valid = True
    for j in range(n):
        size_of_error = abs(np.float64(td_errors[j]))
        base = size_of_error + eps
        # What is above zero stays so, also where the power is too small for a float
        priority = max(base**alpha, SMALLEST_PRIORITY) if base > 0.0 else base**alpha
        priorities[j] = priority
        if not (0 <= indices[j] < size and size_of_error < np.inf and priority <= limit):
            is_valid = False
    return priorities, is_valid


@compile_kernel
def batch_means(td_errors: Float32Array, weights: Float32Array) -> tuple[float, float, float]:
    """
    What some batches add to the log.

    :param td_errors: shape ``(n_batches, batch)``
    :param weights: same shape, not negative
    :return: means over the batches: of the absolute TD error, of the weight, of Kish's effective
        sample size over the batch's (in ``(0, 1]``)
    """
    n_batches, n = td_errors.shape
    error_sum = 0.0
    weight_sum = 0.0
    ess_sum = 0.0
    for k in range(n_batches):
        total = 0.0
        squares = 0.0
        for j in range(n):
            weight = np.float64(weights[k, j])
            error_sum += abs(np.float64(td_errors[k, j]))
            total += weight
            squares += weight * weight
        weight_sum += total
        # Where all weights underflowed, they did it alike. Rounding can end just above 1.
        ess_sum += min(total * total / (n * squares), 1.0) if squares > 0.0 else 1.0
    n_all = n_batches * n
    return error_sum / n_all, weight_sum / n_all, ess_sum / n_batches
