"""Variants of prioritized replay that were tried and are not options of PERDQN."""

import inspect
from typing import Any, Literal, get_args

import numpy as np
from stable_baselines3.common.vec_env import VecNormalize

from sb3_per import PERDQN, PrioritizedReplayBuffer
from sb3_per.buffers.importance import importance_sampling_weights
from sb3_per.buffers.replay import Array, check_choice, check_number
from sb3_per.buffers.samples import PrioritizedReplayBufferSamples
from sb3_per.callbacks import drawable_indices, td_errors_in_buffer

__all__ = ["PERDQNTrial", "TrialReplayBuffer"]

#: Priority of new transitions: the largest of all, or of those that were replayed
NewPriority = Literal["max", "measured"]

#: Divisor of the importance-sampling weights: the largest of the batch, their mean, or none
WeightDivisor = Literal["max", "mean", "none"]


class TrialReplayBuffer(PrioritizedReplayBuffer):
    """
    Buffer of :class:`PERDQNTrial`, for one environment or several, without memory saving.

    :param new_priority: priority of transitions that were never replayed
    :param uniform_share: share of each batch that is drawn uniformly, in ``[0, 1]``
    :param weight_divisor: divisor of the importance-sampling weights; with ``"max"``,
        ``weight_normalization`` selects the largest of the batch or of the buffer
    """

    def __init__(
        self,
        *args: Any,
        new_priority: NewPriority = "max",
        uniform_share: float = 0.0,
        weight_divisor: WeightDivisor = "max",
        **kwargs: Any,
    ) -> None:
        check_choice("new_priority", new_priority, get_args(NewPriority))
        check_choice("weight_divisor", weight_divisor, get_args(WeightDivisor))
        self.new_priority = new_priority
        self.uniform_share = check_number("uniform_share", uniform_share, high=1.0)
        self.weight_divisor = weight_divisor
        super().__init__(*args, **kwargs)
        if self.optimize_memory_usage:
            raise ValueError("the buffer of a trial does not support `optimize_memory_usage=True`")
        self.was_replayed = np.zeros(self.tree.capacity, dtype=bool)

    def add(
        self,
        obs: Array,
        next_obs: Array,
        action: Array,
        reward: Array,
        done: Array,
        infos: list[dict[str, Any]],
    ) -> None:
        """As in :class:`PrioritizedReplayBuffer`, with the priority of ``new_priority``."""
        start, stop = self.pos * self.n_envs, (self.pos + 1) * self.n_envs
        largest = self._largest_replayed() if self.new_priority == "measured" else None
        super().add(obs, next_obs, action, reward, done, infos)
        self.was_replayed[start:stop] = False
        if largest is not None:
            self.tree.fill(start, stop, largest)

    def _largest_replayed(self) -> float:
        n = self.n_transitions
        return float(self.tree[:n][self.was_replayed[:n]].max(initial=0.0)) or 1.0

    def update_priorities(self, indices: Any, td_errors: Any) -> None:
        """As in :class:`PrioritizedReplayBuffer`."""
        super().update_priorities(indices, td_errors)
        self.was_replayed[indices] = True

    def sample(  # type: ignore[override]
        self, batch_size: int, env: VecNormalize | None = None
    ) -> PrioritizedReplayBufferSamples:
        """As in :class:`PrioritizedReplayBuffer`, with probabilities that include the share."""
        indices, masses = self.tree.sample(batch_size)
        share, n = self.uniform_share, self.n_transitions
        if share:
            uniform = np.random.random_sample(batch_size) < share
            indices = np.where(uniform, np.random.randint(n, size=batch_size), indices)
            masses = self.tree.masses(indices)
        probabilities = (1.0 - share) * masses / self.tree.total + share / n
        # As a probability, too, since masses have another scale
        smallest = float(probabilities.min())
        if self.weight_normalization == "buffer":
            smallest = (1.0 - share) * self.tree.min_mass / self.tree.total + share / n
        batch = self._get_samples(indices, env)
        # Divided by the largest, that of the least likely transition
        relative = importance_sampling_weights(probabilities, self.beta, smallest)
        weights = batch.weights.new_tensor(relative[:, None])
        if self.weight_divisor == "mean":
            weights = weights * (1.0 / weights.mean())
        elif self.weight_divisor == "none":
            weights = weights * (n * smallest) ** -self.beta
        return batch._replace(weights=weights)


class PERDQNTrial(PERDQN):
    """
    PERDQN with the variants reported in ``docs/results.md``.

    :param new_priority: priority of transitions that were never replayed: the largest of all
        (``"max"``, as in PERDQN), or of those that were replayed (``"measured"``)
    :param uniform_share: share of each batch that is drawn uniformly, in ``[0, 1]``
    :param weight_divisor: divisor of the weights: the largest of the batch (``"max"``, as in
        PERDQN), their mean (``"mean"``) or none (``"none"``)
    :param refresh: whether to compute all stored TD errors again after each update of the target
        network
    """

    def __init__(
        self,
        *args: Any,
        new_priority: NewPriority = "max",
        uniform_share: float = 0.0,
        weight_divisor: WeightDivisor = "max",
        refresh: bool = False,
        **kwargs: Any,
    ) -> None:
        self.refresh = refresh
        self._last_measured = 0
        super().__init__(  # type: ignore[misc]  # an argument given twice is an error, as intended
            *args,
            replay_buffer_class=TrialReplayBuffer,
            replay_buffer_kwargs={
                "new_priority": new_priority,
                "uniform_share": uniform_share,
                "weight_divisor": weight_divisor,
            },
            **kwargs,
        )

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        """As in :class:`~sb3_per.PERDQN`, after an update of the priorities."""
        buffer = self.replay_buffer
        assert isinstance(buffer, TrialReplayBuffer)
        interval = max(self.target_update_interval // self.n_envs, 1)
        if self.refresh and self._n_calls // interval != self._last_measured:
            self._last_measured = self._n_calls // interval
            buffer.update_priorities(drawable_indices(buffer), td_errors_in_buffer(self))
        super().train(gradient_steps, batch_size)


# Signature for introspection, in place of `*args` and `**kwargs`
_own = inspect.signature(PERDQNTrial.__init__).parameters
PERDQNTrial.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        *inspect.signature(PERDQN).parameters.values(),
        *(value for value in _own.values() if value.kind is value.KEYWORD_ONLY),
    ]
)
