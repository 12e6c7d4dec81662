"""
A gradient step of a small network, compiled by numba.

A network is a stack of linear layers with an activation between them. It is not copied: the kernels
get the addresses of its memory, so that one compiled function serves any depth and any width:

* ``sizes``: number of inputs of the first layer, then of outputs of each layer, shape
  ``(n_layers + 1,)``;
* ``addresses``: a row for each of ``ONLINE``, ``TARGET``, ``EXP_AVG``, ``EXP_AVG_SQ`` and
  ``STEPS``, a column for each parameter (weight and bias of the first layer, of the second, ...),
  shape ``(5, 2 * n_layers)``. Parameters are float32 and contiguous, weights have the shape
  ``(outputs, inputs)``; ``STEPS`` are single numbers;
* ``results``: outputs of the layers for a batch, one layer after the other, each of shape
  ``(n, outputs)``, in one float32 array of ``n * sum(sizes[1:])`` numbers. Two such arrays are
  needed: the outputs of the online network for the observations are kept in ``results`` for the
  step; everything else is in ``scratch``.

The caller keeps the memory alive and passes arrays of the stated shapes: little is checked here.
LLVM chooses the order of sums, which is the same in every run on one machine. numba would compile
an inner kernel for each constant argument: values for which it must not are passed as data.
"""

import ctypes
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from numba.core import types
from numba.extending import intrinsic, overload
from numba.np.numpy_support import carray

from sb3_per.buffers.kernels import gather_into, priorities_into, weights_into
from sb3_per.buffers.replay import BatchSource
from sb3_per.trees.sum_kernels import FloatArray, compile_kernel

Float32Array = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]
AddressArray = npt.NDArray[np.uint64]

#: Rows of ``addresses``
ONLINE, TARGET, EXP_AVG, EXP_AVG_SQ, STEPS = range(5)

#: Result of :func:`td_errors` without a fault
ALL_WELL = -1

#: A quarter of the value from which on tanh is 1 in float32
_TANH_LIMIT = np.float64(2.375)

_ZERO = np.float32(0.0)
_HALF = np.float32(0.5)
_ONE = np.float32(1.0)

#: A product and a sum may be rounded once instead of twice
_compile_fused = partial(compile_kernel, fastmath=frozenset({"contract"}))
#: A sum may also be taken in any order
_compile_sums = partial(compile_kernel, fastmath=frozenset({"contract", "reassoc"}))


def _pointer(address: int) -> ctypes.c_void_p:
    """
    Pointer for ``numba.carray``.

    :param address: address of the memory
    """
    return ctypes.c_void_p(int(address))


@intrinsic
def _to_pointer(_: Any, __: Any) -> Any:
    def generate(context: Any, builder: Any, ___: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.uint64), generate


@overload(_pointer)
def _compiled_pointer(address):  # type: ignore[no-untyped-def] # numba compares it with the lambda
    # numba passes the first argument itself
    return lambda address: _to_pointer(address)  # type: ignore[call-arg]


@compile_kernel
def _parameter(addresses: AddressArray, parameter: int, size: int) -> Float32Array:
    """
    :param addresses: a row of the addresses
    :return: memory of the parameter, shape ``(size,)``
    """
    flat: Float32Array = carray(_pointer(addresses[parameter]), (size,), np.float32)
    return flat


@compile_kernel
def _block(memory: Float32Array, start: int, n: int, width: int) -> Float32Array:
    """:return: a part of the memory, shape ``(n, width)``"""
    return memory[start : start + n * width].reshape((n, width))


@_compile_sums
def _multiply_transposed(
    rows: Float32Array, weight: Float32Array, bias: Float32Array, out: Float32Array
) -> None:
    """
    ``rows @ weight.T + bias``, tile by tile of 4 x 4 inner products.

    :param rows: shape ``(n, inputs)``
    :param weight: shape ``(outputs, inputs)``
    :param bias: shape ``(outputs,)``
    :param out: shape ``(n, outputs)``, written to
    """
    n, n_in = rows.shape
    n_out = weight.shape[0]
    n_full = n - n % 4
    out_full = n_out - n_out % 4
    for i in range(0, n_full, 4):
        for j in range(0, out_full, 4):
            s00 = s01 = s02 = s03 = _ZERO
            s10 = s11 = s12 = s13 = _ZERO
            s20 = s21 = s22 = s23 = _ZERO
            s30 = s31 = s32 = s33 = _ZERO
            for k in range(n_in):
                a0, a1, a2, a3 = rows[i, k], rows[i + 1, k], rows[i + 2, k], rows[i + 3, k]
                b0, b1, b2, b3 = weight[j, k], weight[j + 1, k], weight[j + 2, k], weight[j + 3, k]
                s00 += a0 * b0
                s01 += a0 * b1
                s02 += a0 * b2
                s03 += a0 * b3
                s10 += a1 * b0
                s11 += a1 * b1
                s12 += a1 * b2
                s13 += a1 * b3
                s20 += a2 * b0
                s21 += a2 * b1
                s22 += a2 * b2
                s23 += a2 * b3
                s30 += a3 * b0
                s31 += a3 * b1
                s32 += a3 * b2
                s33 += a3 * b3
            c0, c1, c2, c3 = bias[j], bias[j + 1], bias[j + 2], bias[j + 3]
            out[i, j], out[i, j + 1] = s00 + c0, s01 + c1
            out[i, j + 2], out[i, j + 3] = s02 + c2, s03 + c3
            out[i + 1, j], out[i + 1, j + 1] = s10 + c0, s11 + c1
            out[i + 1, j + 2], out[i + 1, j + 3] = s12 + c2, s13 + c3
            out[i + 2, j], out[i + 2, j + 1] = s20 + c0, s21 + c1
            out[i + 2, j + 2], out[i + 2, j + 3] = s22 + c2, s23 + c3
            out[i + 3, j], out[i + 3, j + 1] = s30 + c0, s31 + c1
            out[i + 3, j + 2], out[i + 3, j + 3] = s32 + c2, s33 + c3
    for i in range(n):
        # Outside of the tiles
        for j in range(out_full if i < n_full else 0, n_out):
            total = _ZERO
            for k in range(n_in):
                total += rows[i, k] * weight[j, k]
            out[i, j] = total + bias[j]


@_compile_fused
def _combine_rows(
    factors: Float32Array,
    n: int,
    stride: int,
    stride_of_factor: int,
    rows: Float32Array,
    out: Float32Array,
) -> None:
    """
    ``factors @ rows``, in tiles of four rows and four rows of the result.

    :param factors: a matrix of shape ``(n, m)``, or its transpose, as a flat array
    :param n: number of rows of the result
    :param stride: distance from a factor to that of the next row of the result, in bytes
    :param stride_of_factor: distance from a factor to the next of the same row of the result, in
        bytes
    :param rows: shape ``(m, width)``
    :param out: shape ``(n, width)``, written to
    """
    m, width = rows.shape
    stride //= factors.itemsize
    stride_of_factor //= factors.itemsize
    n_full = n - n % 4
    m_full = m - m % 4
    for i in range(n):
        for k in range(width):
            out[i, k] = _ZERO
    for i in range(0, n_full, 4):
        for j in range(0, m_full, 4):
            at = i * stride + j * stride_of_factor
            a00, a10 = factors[at], factors[at + stride]
            a20, a30 = factors[at + 2 * stride], factors[at + 3 * stride]
            at += stride_of_factor
            a01, a11 = factors[at], factors[at + stride]
            a21, a31 = factors[at + 2 * stride], factors[at + 3 * stride]
            at += stride_of_factor
            a02, a12 = factors[at], factors[at + stride]
            a22, a32 = factors[at + 2 * stride], factors[at + 3 * stride]
            at += stride_of_factor
            a03, a13 = factors[at], factors[at + stride]
            a23, a33 = factors[at + 2 * stride], factors[at + 3 * stride]
            for k in range(width):
                b0, b1, b2, b3 = rows[j, k], rows[j + 1, k], rows[j + 2, k], rows[j + 3, k]
                out[i, k] += a00 * b0 + a01 * b1 + a02 * b2 + a03 * b3
                out[i + 1, k] += a10 * b0 + a11 * b1 + a12 * b2 + a13 * b3
                out[i + 2, k] += a20 * b0 + a21 * b1 + a22 * b2 + a23 * b3
                out[i + 3, k] += a30 * b0 + a31 * b1 + a32 * b2 + a33 * b3
    for i in range(n):
        # Outside of the tiles
        for j in range(m_full if i < n_full else 0, m):
            factor = factors[i * stride + j * stride_of_factor]
            for k in range(width):
                out[i, k] += factor * rows[j, k]


@compile_kernel
def _rectify(values: Float32Array) -> None:
    """
    ReLU in place; NaN stays.

    :param values: shape ``(n,)``
    """
    for i in range(values.shape[0]):
        value = values[i]
        values[i] = _ZERO if value < _ZERO else value


@_compile_fused
def _squash(values: Float32Array) -> None:
    """
    Tanh in place; NaN stays.

    Lambert's continued fraction for a quarter of the value, truncated to the accuracy of float32;
    then ``tanh(2x) = 2 tanh(x) / (1 + tanh(x) ** 2)`` twice, all with one division.

    :param values: shape ``(n,)``
    """
    for i in range(values.shape[0]):
        x = 0.25 * np.float64(values[i])
        # Beyond, tanh rounds to 1 in float32
        x = -_TANH_LIMIT if x < -_TANH_LIMIT else x
        x = _TANH_LIMIT if x > _TANH_LIMIT else x
        s = x * x
        above = x * (2027025.0 + s * (270270.0 + s * (6930.0 + s * 36.0)))
        below = 2027025.0 + s * (945945.0 + s * (51975.0 + s * (630.0 + s)))
        above, below = 2.0 * above * below, below * below + above * above
        values[i] = np.float32(2.0 * above * below / (below * below + above * above))


@compile_kernel
def _activate(values: Float32Array, is_tanh: bool) -> None:
    if is_tanh:
        _squash(values)
    else:
        _rectify(values)


@_compile_fused
def _pass_activation(deltas: Float32Array, results: Float32Array, is_tanh: bool) -> None:
    """
    Backward pass of an activation, in place.

    :param deltas: derivative of the loss by the results, shape ``(n,)``; replaced by the derivative
        by the inputs of the activation
    :param results: results of the activation, shape ``(n,)``
    """
    if is_tanh:
        for i in range(deltas.shape[0]):
            result = results[i]
            deltas[i] *= _ONE - result * result
    else:
        for i in range(deltas.shape[0]):
            # NaN passes, as in torch
            deltas[i] = _ZERO if results[i] <= _ZERO else deltas[i]


@compile_kernel
def _forward(
    addresses: AddressArray,
    sizes: IntArray,
    is_tanh: bool,
    inputs: Float32Array,
    results: Float32Array,
) -> Float32Array:
    """
    :param addresses: row of the network
    :param is_tanh: whether the activation is Tanh; otherwise it is ReLU
    :param inputs: shape ``(n, sizes[0])``
    :param results: results of the layers, written to
    :return: results of the last layer, shape ``(n, sizes[-1])``
    """
    n = inputs.shape[0]
    n_layers = sizes.shape[0] - 1
    start = 0
    out = inputs
    for layer in range(n_layers):
        n_in, n_out = sizes[layer], sizes[layer + 1]
        weight = _parameter(addresses, 2 * layer, n_out * n_in).reshape((n_out, n_in))
        bias = _parameter(addresses, 2 * layer + 1, n_out)
        rows, out = out, _block(results, start, n, n_out)
        _multiply_transposed(rows, weight, bias, out)
        if layer < n_layers - 1:
            _activate(out.reshape(out.size), is_tanh)
        start += n * n_out
    return out


@compile_kernel
def backward(
    addresses: AddressArray,
    sizes: IntArray,
    is_tanh: bool,
    inputs: Float32Array,
    results: Float32Array,
    deltas: Float32Array,
    gradients: Float32Array,
) -> None:
    """
    :param addresses: row of the network
    :param inputs: inputs of :func:`_forward`
    :param results: results of :func:`_forward`
    :param deltas: derivatives of the loss by the results, in the same layout: those of the last
        layer are given, the others are written to
    :param gradients: derivatives by the parameters, one parameter after the other, written to
    """
    n = inputs.shape[0]
    start = 0
    for layer in range(sizes.shape[0] - 1):
        start += n * sizes[layer + 1]
    stop = gradients.shape[0]
    for layer in range(sizes.shape[0] - 2, -1, -1):
        n_in, n_out = sizes[layer], sizes[layer + 1]
        start -= n * n_out
        factors = deltas[start : start + n * n_out]
        # No constants: see above
        down, across = factors.reshape((n, n_out)).strides
        rows = _block(results, start - n * n_in, n, n_in) if layer > 0 else inputs
        bias = gradients[stop - n_out : stop]
        bias[:] = _ZERO
        for i in range(n):
            for j in range(n_out):
                bias[j] += factors[i * n_out + j]
        stop -= n_out * (n_in + 1)
        _combine_rows(factors, n_out, across, down, rows, _block(gradients, stop, n_out, n_in))
        if layer > 0:
            weight = _parameter(addresses, 2 * layer, n_out * n_in).reshape((n_out, n_in))
            below = _block(deltas, start - n * n_in, n, n_in)
            _combine_rows(factors, n, down, across, weight, below)
            _pass_activation(below.reshape(below.size), rows.reshape(rows.size), is_tanh)


@_compile_sums
def _squares(values: Float32Array) -> float:
    total = 0.0
    for i in range(values.shape[0]):
        value = np.float64(values[i])
        total += value * value
    return total


@compile_kernel
def clip_factor(gradients: Float32Array, max_norm: float) -> float:
    """
    :param gradients: shape ``(n,)``
    :param max_norm: largest norm allowed
    :return: factor for the gradients, at most 1, as in ``torch.nn.utils.clip_grad_norm_``
    """
    factor = max_norm / (np.sqrt(_squares(gradients)) + 1e-6)
    # NaN stays
    return 1.0 if factor > 1.0 else factor


@_compile_fused
def _adam_update(
    values: Float32Array,
    exp_avg: Float32Array,
    exp_avg_sq: Float32Array,
    gradients: Float32Array,
    factor: float,
    step_size: float,
    beta_1: float,
    beta_2: float,
    correction: float,
    eps: float,
    weight_decay: float,
) -> None:
    """
    :param values: values of a parameter, shape ``(n,)``; changed, as are the two averages
    :param gradients: shape ``(n,)``
    :param factor: factor for the gradients
    :param correction: bias correction of the root of ``exp_avg_sq``
    """
    f, s, c, e, d = (
        np.float32(factor),
        np.float32(step_size),
        np.float32(correction),
        np.float32(eps),
        np.float32(weight_decay),
    )
    new_1, new_2 = np.float32(1.0 - beta_1), np.float32(1.0 - beta_2)
    old_1, old_2 = np.float32(beta_1), np.float32(beta_2)
    for i in range(values.shape[0]):
        gradient = gradients[i] * f + d * values[i]
        average = old_1 * exp_avg[i] + new_1 * gradient
        square = old_2 * exp_avg_sq[i] + new_2 * gradient * gradient
        exp_avg[i] = average
        exp_avg_sq[i] = square
        values[i] -= s * average / (np.sqrt(square) * c + e)


@compile_kernel
def adam(
    addresses: AddressArray,
    sizes: IntArray,
    gradients: Float32Array,
    factor: float,
    learning_rate: float,
    beta_1: float,
    beta_2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """
    A step of ``torch.optim.Adam`` for the online network (Kingma and Ba 2015, algorithm 1).

    :param addresses: all addresses
    :param gradients: gradients of all parameters, one after the other
    :param factor: factor for the gradients
    :param weight_decay: factor of the parameters that are added to the gradients
    """
    start = 0
    known = -_ONE
    correction_1 = correction_2 = 1.0
    for parameter in range(addresses.shape[1]):
        n_out = sizes[parameter // 2 + 1]
        size = n_out * sizes[parameter // 2] if parameter % 2 == 0 else n_out
        step = carray(_pointer(addresses[STEPS, parameter]), (1,), np.float32)
        step[0] += _ONE
        if step[0] != known:
            known = step[0]
            correction_1 = 1.0 - beta_1 ** np.float64(known)
            correction_2 = 1.0 / np.sqrt(1.0 - beta_2 ** np.float64(known))
        _adam_update(
            _parameter(addresses[ONLINE], parameter, size),
            _parameter(addresses[EXP_AVG], parameter, size),
            _parameter(addresses[EXP_AVG_SQ], parameter, size),
            gradients[start : start + size],
            factor,
            learning_rate / correction_1,
            beta_1,
            beta_2,
            correction_2,
            eps,
            weight_decay,
        )
        start += size


@compile_kernel
def _choose(outputs: Float32Array, n_actions: int, actions: IntArray) -> None:
    """
    Greedy action of each row: the first one of equal values, as in torch's ``argmax``.

    :param outputs: values, shape ``(n, n_actions)``; or quantile by quantile, shape
        ``(n, n_quantiles * n_actions)``, whose mean is the value
    :param actions: shape ``(n,)``, written to
    """
    n, width = outputs.shape
    for i in range(n):
        best = -np.inf
        actions[i] = 0
        for action in range(n_actions):
            value = 0.0
            for at in range(action, width, n_actions):
                value += outputs[i, at]
            # NaN counts as the largest
            if value > best or (value != value and best == best):
                best = value
                actions[i] = action


@compile_kernel
def greedy_actions(
    addresses: AddressArray,
    sizes: IntArray,
    is_tanh: bool,
    inputs: Float32Array,
    results: Float32Array,
    n_actions: int,
    actions: IntArray,
) -> None:
    """
    :param addresses: all addresses
    :param inputs: shape ``(n, sizes[0])``
    :param results: written to
    :param actions: shape ``(n,)``, written to
    """
    _choose(_forward(addresses[ONLINE], sizes, is_tanh, inputs, results), n_actions, actions)


@compile_kernel
def one_hot(values: IntArray, sizes: IntArray, out: Float32Array) -> bool:
    """
    :param values: shape ``(n, len(sizes))``
    :param sizes: number of values of each column
    :param out: shape ``(n, sum(sizes))``, written to
    :return: whether each value is in its range
    """
    out[:] = _ZERO
    is_well = True
    for i in range(values.shape[0]):
        start = 0
        for j in range(sizes.shape[0]):
            if 0 <= values[i, j] < sizes[j]:
                out[i, start + values[i, j]] = _ONE
            else:
                is_well = False
            start += sizes[j]
    return is_well


@compile_kernel
def _first_fault(actions: IntArray, n_actions: int) -> int:
    for i in range(actions.shape[0]):
        if not 0 <= actions[i, 0] < n_actions:
            return i
    return ALL_WELL


@compile_kernel
def _target(reward: float, done: float, discount: float, value: float) -> float:
    """The value after a terminal state does not count, even if it is NaN."""
    return reward if done > _ZERO else reward + discount * value


@compile_kernel
def _sort_columns(values: Float32Array) -> None:
    """
    Sort each column in place, all of them at once: the pairs that Batcher's merge exchange
    compares don't depend on the values (Knuth, The Art of Computer Programming, 5.2.2, algorithm
    M).

    :param values: shape ``(n, width)``
    """
    n, width = values.shape
    top = 1
    while 2 * top < n:
        top *= 2
    p = top if n > 1 else 0
    while p > 0:
        q, r, d = top, 0, p
        while d > 0:
            for i in range(n - d):
                if i & p == r:
                    low, high = values[i], values[i + d]
                    for j in range(width):
                        a, b = low[j], high[j]
                        swap = b < a
                        low[j] = b if swap else a
                        high[j] = a if swap else b
            d = q - p
            q //= 2
            r = p
        p //= 2


@compile_kernel
def distances(columns: Float32Array, others: Float32Array, errors: Float32Array) -> None:
    """
    :param columns: quantiles, one column for each distribution, shape ``(n_quantiles, n)``; sorted
        in place
    :param others: quantiles of the other distributions, same shape; sorted in place
    :param errors: mean distances of the sorted quantiles, shape ``(n, 1)``, written to
    """
    _sort_columns(columns)
    _sort_columns(others)
    n_quantiles, n = columns.shape
    errors[:] = _ZERO
    for k in range(n_quantiles):
        for i in range(n):
            errors[i, 0] += abs(columns[k, i] - others[k, i])
    for i in range(n):
        errors[i, 0] /= np.float32(n_quantiles)


@compile_kernel
def td_errors(
    addresses: AddressArray,
    sizes: IntArray,
    is_tanh: bool,
    inputs: Float32Array,
    next_inputs: Float32Array,
    actions: IntArray,
    rewards: Float32Array,
    dones: Float32Array,
    discounts: Float32Array,
    double_q: bool,
    n_quantiles: int,
    results: Float32Array,
    scratch: Float32Array,
    quantiles: Float32Array,
    errors: Float32Array,
) -> int:
    """
    Targets minus Q-values; or, for quantiles, the mean distance of sorted targets and estimates.
    Changes no network.

    :param addresses: all addresses
    :param inputs: shape ``(n, sizes[0])``
    :param next_inputs: shape ``(n, sizes[0])``
    :param actions: shape ``(n, 1)``
    :param rewards: shape ``(n, 1)``
    :param dones: shape ``(n, 1)``
    :param discounts: shape ``(n, 1)``
    :param double_q: whether the online network chooses the next action
    :param n_quantiles: number of quantiles of each action, in the order of quantiles; 0 if outputs
        are values
    :param results: kept for :func:`step`
    :param scratch: written to
    :param quantiles: kept for :func:`step`, ``4 * n * n_quantiles`` numbers
    :param errors: shape ``(n, 1)``, written to
    :return: ``ALL_WELL``, or the first row whose action doesn't exist: then errors are not computed
    """
    n = inputs.shape[0]
    n_actions = sizes[-1] // max(n_quantiles, 1)
    at = _first_fault(actions, n_actions)
    if at >= 0:
        return at
    best = np.empty(n, np.int64)
    chooser = _forward(
        addresses[ONLINE if double_q else TARGET], sizes, is_tanh, next_inputs, scratch
    )
    _choose(chooser, n_actions, best)
    if double_q:
        _forward(addresses[TARGET], sizes, is_tanh, next_inputs, scratch)
    # In the same memory as those of the network that chooses the action
    next_outputs = chooser
    outputs = _forward(addresses[ONLINE], sizes, is_tanh, inputs, results)
    if n_quantiles == 0:
        for i in range(n):
            value = next_outputs[i, best[i]]
            target = _target(rewards[i, 0], dones[i, 0], discounts[i, 0], value)
            errors[i, 0] = target - outputs[i, actions[i, 0]]
        return ALL_WELL
    size = n * n_quantiles
    estimates = _block(quantiles, 0, n, n_quantiles)
    targets = _block(quantiles, size, n, n_quantiles)
    estimate_columns = _block(quantiles, 2 * size, n_quantiles, n)
    target_columns = _block(quantiles, 3 * size, n_quantiles, n)
    for i in range(n):
        for k in range(n_quantiles):
            value = next_outputs[i, k * n_actions + best[i]]
            target = _target(rewards[i, 0], dones[i, 0], discounts[i, 0], value)
            estimate = outputs[i, k * n_actions + actions[i, 0]]
            targets[i, k] = target_columns[k, i] = target
            estimates[i, k] = estimate_columns[k, i] = estimate
    distances(estimate_columns, target_columns, errors)
    return ALL_WELL


@_compile_sums
def _quantile_loss(
    estimate: np.float32, midpoint: np.float32, targets: Float32Array
) -> tuple[np.float32, np.float32]:
    """
    :param estimate: one quantile
    :param midpoint: its share of the targets below it
    :param targets: shape ``(n,)``
    :return: the sum of its losses, and their derivative by the estimate
    """
    # Separate sums for above and below, so that no share has to be looked up
    loss_above = loss_below = slope_above = slope_below = _ZERO
    for j in range(targets.shape[0]):
        difference = targets[j] - estimate
        above = max(difference, _ZERO)
        bounded = min(above, _ONE)
        slope_above += bounded
        loss_above += bounded * (above - _HALF * bounded)
        below = max(-difference, _ZERO)
        bounded = min(below, _ONE)
        slope_below += bounded
        loss_below += bounded * (below - _HALF * bounded)
    rest = _ONE - midpoint
    return midpoint * loss_above + rest * loss_below, rest * slope_below - midpoint * slope_above


@compile_kernel
def step(
    addresses: AddressArray,
    sizes: IntArray,
    is_tanh: bool,
    inputs: Float32Array,
    actions: IntArray,
    errors: Float32Array,
    weights: Float32Array,
    is_huber: bool,
    n_quantiles: int,
    results: Float32Array,
    scratch: Float32Array,
    quantiles: Float32Array,
    gradients: Float32Array,
    max_norm: float,
    learning_rate: float,
    beta_1: float,
    beta_2: float,
    eps: float,
    weight_decay: float,
) -> float:
    """
    Gradient step on the weighted loss, after :func:`td_errors` with the same arrays: on
    ``mean(weights * loss(errors))``; or, for quantiles, on the quantile Huber loss (Dabney et al.
    2018, equations 9 and 10).

    :param addresses: all addresses
    :param weights: shape ``(n, 1)``
    :param is_huber: whether the loss is the Huber loss, threshold 1; otherwise it is the squared
        error. Quantiles have only the Huber loss.
    :param gradients: one number for each parameter, written to
    :param max_norm: largest norm of the gradient; infinity for no limit
    :return: loss before the step
    """
    n = inputs.shape[0]
    width = sizes[-1]
    deltas = scratch[scratch.shape[0] - n * width :].reshape((n, width))
    deltas[:] = _ZERO
    loss = 0.0
    for i in range(n):
        action = actions[i, 0]
        if n_quantiles == 0:
            error = errors[i, 0]
            bounded = min(max(error, -_ONE), _ONE)
            weight = weights[i, 0] / np.float32(n)
            if is_huber:
                own_loss, slope = bounded * (error - _HALF * bounded), -bounded
            else:
                own_loss, slope = error * error, -(error + error)
            loss += np.float64(weight * own_loss)
            deltas[i, action] = weight * slope
        else:
            weight = weights[i, 0] / np.float32(n * n_quantiles)
            estimates = quantiles[i * n_quantiles : (i + 1) * n_quantiles]
            targets = quantiles[(n + i) * n_quantiles : (n + i + 1) * n_quantiles]
            for k in range(n_quantiles):
                midpoint = (np.float32(k) + _HALF) / np.float32(n_quantiles)
                own_loss, slope = _quantile_loss(estimates[k], midpoint, targets)
                loss += np.float64(weight * own_loss)
                deltas[i, k * (width // n_quantiles) + action] = weight * slope
    backward(addresses[ONLINE], sizes, is_tanh, inputs, results, scratch, gradients)
    factor = clip_factor(gradients, max_norm) if max_norm < np.inf else 1.0
    adam(addresses, sizes, gradients, factor, learning_rate, beta_1, beta_2, eps, weight_decay)
    return loss


@compile_kernel
def _take(rows: Float32Array, indices: IntArray) -> Float32Array:
    """:return: some of the rows, shape ``(len(indices), width)``"""
    n, width = indices.shape[0], rows.shape[1]
    taken = np.empty((n, width), np.float32)
    for i in range(n):
        at = np.uint64(indices[i])
        for k in range(width):
            taken[i, k] = rows[at, k]
    return taken


@compile_kernel
def replay(
    source: BatchSource,
    indices: IntArray,
    masses: FloatArray,
    smallest_mass: float,
    beta: float,
    n_transitions: int,
    priority_eps: float,
    exponent: float,
    limit: float,
    is_clipped: bool,
    gamma: float,
    double_q: bool,
    errors: Float32Array,
    weights: Float32Array,
    priorities: FloatArray,
    addresses: AddressArray,
    sizes: IntArray,
    is_tanh: bool,
    is_huber: bool,
    n_quantiles: int,
    results: Float32Array,
    scratch: Float32Array,
    quantiles: Float32Array,
    gradients: Float32Array,
    max_norm: float,
    learning_rate: float,
    beta_1: float,
    beta_2: float,
    eps: float,
    weight_decay: float,
) -> tuple[bool, float]:
    """
    All steps after a draw: gather the batch, :func:`td_errors`, priorities, and :func:`step`.

    :param source: the ``batch_source`` of a buffer: float32, actions int64
    :param indices: drawn transitions, shape ``(n,)``
    :param masses: their masses, shape ``(n,)``
    :param smallest_mass: this and the next one are the ``weight_arguments`` of a buffer
    :param n_transitions: this and the next three are the ``priority_arguments`` of a buffer
    :param is_clipped: whether priorities come from ``max(|error|, 1)``; otherwise from ``|error|``
    :param gamma: discount factor without n-step returns
    :param errors: TD errors of the batch, shape ``(n, 1)``, written to
    :param weights: weights of the batch, same shape, written to
    :param priorities: new priorities for the tree, shape ``(n,)``, written to
    :return: whether all actions exist and all priorities are allowed, otherwise there was no step;
        and the loss before the step
    """
    n = indices.shape[0]
    inputs = _take(source.observations, indices)
    next_inputs = _take(source.next_observations, source.following)
    actions = np.empty((n, 1), np.int64)
    for i in range(n):
        actions[i, 0] = source.actions[np.uint64(indices[i]), 0]
    rewards, dones = np.empty((n, 1), np.float32), np.empty((n, 1), np.float32)
    gather_into(source.last, source.rewards, source.dones, source.timeouts, rewards, dones)
    if source.returns.shape[0] == 0:
        discounts = np.full((n, 1), np.float32(gamma), np.float32)
    else:
        rewards, discounts = source.returns, source.discounts
    at = td_errors(
        addresses,
        sizes,
        is_tanh,
        inputs,
        next_inputs,
        actions,
        rewards,
        dones,
        discounts,
        double_q,
        n_quantiles,
        results,
        scratch,
        quantiles,
        errors,
    )
    if at != ALL_WELL:
        return False, 0.0
    bases = np.empty(n, np.float32)
    for i in range(n):
        base = abs(errors[i, 0])
        # NaN stays
        bases[i] = _ONE if is_clipped and base < _ONE else base
    if not priorities_into(
        bases, indices, n_transitions, priority_eps, exponent, limit, priorities
    ):
        return False, 0.0
    weights_into(masses, smallest_mass, beta, weights)
    loss = step(
        addresses,
        sizes,
        is_tanh,
        inputs,
        actions,
        errors,
        weights,
        is_huber,
        n_quantiles,
        results,
        scratch,
        quantiles,
        gradients,
        max_norm,
        learning_rate,
        beta_1,
        beta_2,
        eps,
        weight_decay,
    )
    return True, loss
