"""
The arithmetic on single batches, compiled by numba.

A batch is so small that NumPy would spend most of its time on the overhead of each operation.
Here each step from a draw to its feedback is one call. Inputs are not checked unless stated.

The kernels fill arrays that they get as arguments, for the reason given at
:func:`~sb3_per.trees.sum_kernels.compile_kernel`; the function after each kernel allocates these
arrays and calls it.
"""

import numpy as np
import numpy.typing as npt

from sb3_per.trees.sum_kernels import FloatArray, IntArray, compile_kernel

Float32Array = npt.NDArray[np.float32]

#: NumPy takes longer to find out what a type's name means than to make a small array
_FLOAT32 = np.dtype(np.float32)

#: Priority of a transition whose power is too small for a normal float64
SMALLEST_PRIORITY = float(np.finfo(np.float64).tiny)


@compile_kernel
def gather_into(
    indices: IntArray,
    rewards: Float32Array,
    dones: Float32Array,
    timeouts: Float32Array,
    batch_rewards: Float32Array,
    batch_dones: Float32Array,
) -> None:
    """
    :func:`gather`, into arrays of shape ``(n, 1)``.

    :param batch_rewards: receives the rewards
    :param batch_dones: receives the terminations
    """
    for j in range(indices.shape[0]):
        i = np.uint64(indices[j])
        batch_rewards[j, 0] = rewards[i]
        # A time limit is not an end of the task: the value of the next observation counts
        batch_dones[j, 0] = dones[i] * (np.float32(1.0) - timeouts[i])


def gather(
    indices: IntArray, rewards: Float32Array, dones: Float32Array, timeouts: Float32Array
) -> tuple[Float32Array, Float32Array]:
    """
    :param indices: stored transitions, shape ``(n,)``
    :param rewards: rewards of all transitions
    :param dones: whether an episode ended there, for all transitions
    :param timeouts: whether it ended by a time limit, for all transitions
    :return: rewards of the batch, and 1 where its episodes terminated, shape ``(n, 1)`` each
    """
    shape = (len(indices), 1)
    batch_rewards, batch_dones = np.empty(shape, _FLOAT32), np.empty(shape, _FLOAT32)
    gather_into(indices, rewards, dones, timeouts, batch_rewards, batch_dones)
    return batch_rewards, batch_dones


@compile_kernel
def look_ahead_into(
    indices: IntArray,
    n_envs: int,
    newest_row: int,
    rewards: Float32Array,
    dones: Float32Array,
    timeouts: Float32Array,
    factors: Float32Array,
    last: IntArray,
    path_rewards: Float32Array,
    counts: Float32Array,
    discounts: Float32Array,
) -> None:
    """
    :func:`look_ahead`, into arrays of the shapes that it returns.

    :param last: receives the last transitions
    :param path_rewards: receives the rewards
    :param counts: receives the factors of the rewards
    :param discounts: receives the discounts
    """
    n_steps = factors.shape[0] - 1
    n_transitions = rewards.shape[0]
    for j in range(indices.shape[0]):
        i = indices[j]
        length = 0
        for step in range(n_steps):
            path_rewards[j, step] = rewards[i]
            counts[j, step] = 0.0
            if length == step:
                # Not at the end of the path yet
                counts[j, step] = factors[step]
                last[j] = i
                ends = dones[i] != 0.0 or timeouts[i] != 0.0 or i // n_envs == newest_row
                length += 0 if ends else 1
            # One row further is n_envs transitions further
            i += n_envs
            if i >= n_transitions:
                i -= n_transitions
        discounts[j, 0] = factors[min(length + 1, n_steps)]


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

    :param indices: first transitions of the paths, shape ``(n,)``
    :param newest_row: number of the row that was added last
    :param rewards: rewards of all transitions
    :param dones: whether an episode ended there, for all transitions
    :param timeouts: whether it ended by a time limit, for all transitions
    :param factors: powers of the discount factor, shape ``(n_steps + 1,)``
    :return: the last transition of each path, shape ``(n,)``; the rewards along a path of full
        length, shape ``(n, n_steps)``; their factors, 0 after the end, same shape; the discount of
        the value of the next observation, shape ``(n, 1)``
    """
    n, n_steps = len(indices), len(factors) - 1
    last = np.empty(n, np.int64)
    path_rewards = np.empty((n, n_steps), np.float32)
    counts = np.empty((n, n_steps), np.float32)
    discounts = np.empty((n, 1), np.float32)
    look_ahead_into(
        indices,
        n_envs,
        newest_row,
        rewards,
        dones,
        timeouts,
        factors,
        last,
        path_rewards,
        counts,
        discounts,
    )
    return last, path_rewards, counts, discounts


@compile_kernel
def weights_into(
    priorities: FloatArray, smallest: float, beta: float, weights: Float32Array
) -> None:
    """
    :func:`weights_of`, into an array of shape ``(n, 1)``.

    :param weights: receives the weights
    """
    n = priorities.shape[0]
    if smallest == 0.0:
        smallest = np.inf
        for j in range(n):
            if priorities[j] > 0.0:
                smallest = min(smallest, priorities[j])
    if smallest == np.inf:
        smallest = 1.0
    for j in range(n):
        # Transitions given by the caller may be ones that can't be drawn: their weight is 1
        priority = priorities[j] if priorities[j] > 0.0 else smallest
        weights[j, 0] = (smallest / priority) ** beta


def weights_of(priorities: FloatArray, smallest: float, beta: float) -> Float32Array:
    """
    The weights of :func:`~sb3_per.buffers.importance.importance_sampling_weights`.

    :param priorities: priorities of the batch, shape ``(n,)``; one of zero, which can't be drawn,
        has a weight of 1
    :param smallest: priority whose weight is 1; 0 for the smallest of the batch
    :param beta: strength of the correction
    :return: weights, shape ``(n, 1)``
    """
    weights = np.empty((len(priorities), 1), _FLOAT32)
    weights_into(priorities, smallest, beta, weights)
    return weights


@compile_kernel
def priorities_into(
    td_errors: Float32Array,
    indices: IntArray,
    size: int,
    eps: float,
    alpha: float,
    limit: float,
    priorities: FloatArray,
) -> bool:
    """
    :func:`priorities_of`, into an array of shape ``(n,)``.

    :param priorities: receives the priorities
    :return: whether all of them can be written to a tree
    """
    is_valid = True
    for j in range(indices.shape[0]):
        size_of_error = abs(np.float64(td_errors[j]))
        base = size_of_error + eps
        # A value above zero stays above zero, even if its power is too small for a float
        priority = max(base**alpha, SMALLEST_PRIORITY) if base > 0.0 else base**alpha
        priorities[j] = priority
        if not (0 <= indices[j] < size and size_of_error < np.inf and priority <= limit):
            is_valid = False
    return is_valid


def priorities_of(
    td_errors: Float32Array, indices: IntArray, size: int, eps: float, alpha: float, limit: float
) -> tuple[FloatArray, bool]:
    """
    ``(|td_error| + eps) ** alpha``, and whether all of them can be written to a tree.

    :param td_errors: one for each index, shape ``(n,)``
    :param indices: shape ``(n,)``
    :param size: number of stored transitions
    :param limit: largest priority that is allowed
    :return: priorities, shape ``(n,)``, and whether all indices are in ``[0, size)``, all errors
        finite and all priorities at most ``limit``
    """
    priorities = np.empty(len(indices))
    is_valid = priorities_into(td_errors, indices, size, eps, alpha, limit, priorities)
    return priorities, is_valid


@compile_kernel
def batch_means(td_errors: Float32Array, weights: Float32Array) -> tuple[float, float, float]:
    """
    Means of some batches for the log.

    :param td_errors: shape ``(n_batches, batch)``
    :param weights: same shape, not negative
    :return: means over the batches: of the absolute TD error, of the weight, of Kish's effective
        sample size divided by the batch size (in ``(0, 1]``)
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
        # If all weights underflowed, they are equal. Rounding can lead just above 1.
        ess_sum += min(total * total / (n * squares), 1.0) if squares > 0.0 else 1.0
    n_all = n_batches * n
    return error_sum / n_all, weight_sum / n_all, ess_sum / n_batches


@compile_kernel
def note_draws(
    indices: IntArray,
    pos: int,
    n_envs: int,
    counts: npt.NDArray[np.int32],
    totals: IntArray,
    latest_ages: IntArray,
) -> int:
    """
    Count the draws of a batch; see :class:`~sb3_per.buffers.draws.DrawRecord`.

    :param indices: drawn transitions, shape ``(n,)``
    :param pos: number of the row that is written next
    :param n_envs: number of transitions in each row
    :param counts: number of draws of each transition, shape ``(n_rows * n_envs,)``; updated
    :param totals: number of all draws and sum of their ages, shape ``(2,)``; updated
    :param latest_ages: ages of the latest draws, draw ``i`` at ``i % n_latest``, shape
        ``(n_latest,)``; updated
    :return: -1, or the position in ``indices`` of the first one that is outside ``[0, n_rows *
        n_envs)``; nothing is updated then
    """
    n = indices.shape[0]
    n_transitions = counts.shape[0]
    n_latest = latest_ages.shape[0]
    for j in range(n):
        if not 0 <= indices[j] < n_transitions:
            return j
    newest = (pos - 1) * n_envs
    for j in range(n):
        i = indices[j]
        age = newest - i // n_envs * n_envs
        if age < 0:
            # The row lies after `pos`: it was written in the lap before
            age += n_transitions
        counts[i] += 1
        latest_ages[totals[0] % n_latest] = age
        totals[0] += 1
        totals[1] += age
    return -1
