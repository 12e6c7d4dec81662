"""The update of PERQRDQN: targets, errors, weights, what goes back to the buffer, and files."""

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from sb3_contrib import QRDQN
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.vec_env import VecNormalize

from model_helpers import (
    NEXT_S,
    SAVING_MEMORY,
    S,
    ScriptedEnv,
    TenStepEnv,
    buffer_of,
    side_by_side,
    silent,
    small_model,
)
from sb3_per import (
    PERDQN,
    PERQRDQN,
    PrioritizedDictReplayBuffer,
    PrioritizedHerReplayBuffer,
    PrioritizedReplayBuffer,
    PrioritizedReplayBufferSamples,
)
from sb3_per.per_qrdqn.per_qrdqn import wasserstein_distance

ZEROS = [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]


def make_model(env: Any = None, n_quantiles: int = 2, **kwargs: Any) -> PERQRDQN:
    """A model with linear quantiles, trained by plain gradient descent."""
    kwargs = {
        "buffer_size": 20,
        "gamma": 0.5,
        "train_freq": 1,
        "learning_rate": 0.1,
        "policy_kwargs": {
            "net_arch": [],
            "n_quantiles": n_quantiles,
            "optimizer_class": th.optim.SGD,
        },
        "seed": 0,
        "device": "cpu",
        **kwargs,
    }
    return silent(small_model(env or ScriptedEnv(), PERQRDQN, **kwargs))


def set_quantiles(
    model: PERQRDQN,
    online: list[list[float]] = ZEROS,
    next_online: list[list[float]] = ZEROS,
    next_target: list[list[float]] = ZEROS,
) -> None:
    """Make the networks give these quantiles, a list for each action, at S and at NEXT_S."""
    unused = [[1e6] * len(ZEROS[0])] * 3
    for network, here, there in (
        (model.quantile_net, online, next_online),
        (model.quantile_net_target, unused, next_target),
    ):
        (layer,) = (part for part in network.modules() if isinstance(part, th.nn.Linear))
        with th.no_grad():
            # One output for each action of each quantile, the actions side by side
            outputs = [th.tensor(values).T.flatten() for values in (here, there)]
            layer.weight.copy_(th.stack(outputs, dim=1))
            layer.bias.zero_()


def quantiles_at(model: PERQRDQN, state: list[float]) -> list[list[float]]:
    with th.no_grad():
        return model.quantile_net(th.tensor([state]))[0].T.tolist()  # type: ignore[no-any-return]


def add(model: PERQRDQN, reward: float, *, action: int = 1, done: bool = False) -> None:
    buffer_of(model).add(
        np.array([S], dtype=np.float32),
        np.array([NEXT_S], dtype=np.float32),
        np.array([action]),
        np.array([reward]),
        np.array([done]),
        [{}],
    )


def fed_back(model: PERQRDQN, batch_size: int) -> th.Tensor:
    """The TD errors that one gradient step gives to the buffer."""
    seen: list[th.Tensor] = []
    buffer = buffer_of(model)
    update_priorities = buffer.update_priorities

    def recording(indices: Any, td_errors: Any) -> None:
        seen.append(td_errors.detach().clone())
        update_priorities(indices, td_errors)

    buffer.update_priorities = recording  # type: ignore[method-assign]
    model.train(1, batch_size=batch_size)
    (errors,) = seen
    return errors


# --- signature


def test_the_arguments_are_those_of_qrdqn_then_options_by_name_only() -> None:
    ours = list(inspect.signature(PERQRDQN).parameters.values())
    theirs = list(inspect.signature(QRDQN).parameters.values())
    shared, options = ours[: len(theirs)], ours[len(theirs) :]

    def essence(parameters: list[inspect.Parameter]) -> list[tuple[Any, ...]]:
        return [(parameter.name, parameter.kind, parameter.default) for parameter in parameters]

    assert essence(shared) == essence(theirs)
    assert {parameter.kind for parameter in options} == {inspect.Parameter.KEYWORD_ONLY}
    # As those of PERDQN, as far as they make sense here
    of_perdqn = inspect.signature(PERDQN).parameters
    assert [parameter.name for parameter in options] == [
        name
        for name, parameter in of_perdqn.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and name != "loss"
    ]
    assert all(of_perdqn[parameter.name].default == parameter.default for parameter in options)


@pytest.mark.parametrize("method", ["learn", "train", "predict", "save", "load"])
def test_the_methods_take_what_those_of_qrdqn_take(method: str) -> None:
    ours = inspect.signature(getattr(PERQRDQN, method)).parameters
    theirs = inspect.signature(getattr(QRDQN, method)).parameters
    assert list(ours) == list(theirs)
    changed = {
        name: ours[name].default for name in ours if ours[name].default != theirs[name].default
    }
    assert changed == ({"tb_log_name": "PERQRDQN"} if method == "learn" else {})


def test_every_argument_arrives() -> None:
    given: dict[str, Any] = {
        "learning_rate": 0.25,
        "buffer_size": 33,
        "learning_starts": 7,
        "batch_size": 5,
        "tau": 0.5,
        "gamma": 0.75,
        "train_freq": 3,
        "gradient_steps": 2,
        "replay_buffer_class": PrioritizedReplayBuffer,
        "replay_buffer_kwargs": {"handle_timeout_termination": False},
        "optimize_memory_usage": True,
        "n_steps": 2,
        "target_update_interval": 11,
        "exploration_fraction": 0.3,
        "exploration_initial_eps": 0.9,
        "exploration_final_eps": 0.2,
        "max_grad_norm": 4.0,
        "stats_window_size": 13,
        "tensorboard_log": "logs",
        "policy_kwargs": {"net_arch": [3]},
        "verbose": 0,
        "seed": 5,
        "device": "cpu",
        "alpha": 0.3,
        "beta": 0.2,
        "beta_final": 0.8,
        "beta_fraction": 0.5,
        "priority_eps": 0.01,
        "weight_normalization": "buffer",
        "double_q": True,
        "prioritization": "rank",
        "initial_priority": "td_error",
        "priority": "clipped",
        "compiled": False,
    }
    parameters = inspect.signature(PERQRDQN).parameters
    assert list(given) == [
        name for name in parameters if name not in ("policy", "env", "_init_setup_model")
    ]
    n_positional = list(given).index("alpha")
    # By position, as far as QRDQN takes them so, which a swap of two would not survive
    model = PERQRDQN(
        "MlpPolicy",
        ScriptedEnv(),
        *list(given.values())[:n_positional],
        **dict(list(given.items())[n_positional:]),
    )
    attributes: dict[str, Any] = dict(vars(model))
    assert attributes.pop("_stats_window_size") == 13
    assert attributes["train_freq"].frequency == 3
    for name in given.keys() - {"stats_window_size", "train_freq", "device"}:
        assert attributes[name] == given[name], name
    # sb3-contrib's own choice, which depends on the size of the batch
    assert model.policy_kwargs["optimizer_kwargs"] == {"eps": 0.01 / 5}
    buffer = buffer_of(model)
    assert (buffer.buffer_size, buffer.alpha, buffer.eps, buffer.beta) == (33, 0.3, 0.01, 0.2)
    assert (buffer.n_steps, buffer.gamma, buffer.weight_normalization) == (2, 0.75, "buffer")
    assert buffer.prioritization == "rank"


def test_no_network_and_no_buffer_before_they_are_asked_for() -> None:
    model = PERQRDQN("MlpPolicy", ScriptedEnv(), _init_setup_model=False)
    assert model.replay_buffer is None
    assert not hasattr(model, "policy")


@pytest.mark.parametrize(
    ("option", "value"),
    [("alpha", -1.0), ("double_q", None), ("beta_final", 1.5), ("prioritization", "ranks")],
)
def test_options_out_of_range_are_refused(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"`{option}`.*got {value!r}"):
        make_model(**{option: value})


# --- targets and errors


@pytest.mark.parametrize("action", [0, 1, 2])
def test_the_error_is_that_of_the_stored_action(action: int) -> None:
    model = make_model(alpha=0.5, priority_eps=0.25)
    online = [[2.0, 4.0], [-1.0, 0.0], [9.0, 5.0]]
    # The mean decides, here for action 2, not the largest quantile
    set_quantiles(model, online, [[50.0, 60.0]] * 3, [[0.0, 9.0], [1.0, 2.0], [6.0, 8.0]])
    add(model, reward=1.0, action=action)
    errors = fed_back(model, batch_size=4)

    # Targets are 1 + 6/2 and 1 + 8/2, compared with the quantiles by rank
    expected = np.abs(np.array([4.0, 5.0]) - sorted(online[action])).mean()
    assert errors.shape == (4, 1)
    np.testing.assert_allclose(errors.numpy(), expected, rtol=1e-6)
    assert buffer_of(model).priorities[0] == pytest.approx((expected + 0.25) ** 0.5, rel=1e-6)


def test_double_q_takes_the_online_choice_with_its_quantiles_of_the_target_network() -> None:
    errors = {}
    for double_q in (False, True):
        model = make_model(double_q=double_q)
        set_quantiles(
            model,
            next_online=[[5.0, 5.0], [0.0, 20.0], [7.0, 7.0]],
            next_target=[[10.0, 14.0], [-2.0, 6.0], [4.0, 4.0]],
        )
        add(model, reward=1.0)
        errors[double_q] = float(fed_back(model, batch_size=1))
    # Action 0 is the target network's choice, action 1 the online one's
    assert errors[False] == pytest.approx((6.0 + 8.0) / 2)
    assert errors[True] == pytest.approx((0.0 + 4.0) / 2)


def test_the_error_is_zero_where_both_distributions_agree() -> None:
    quantiles = th.tensor([[3.0, -1.0, 2.0], [3.0, -1.0, 2.0], [1.0, 1.0, 1.0]])
    targets = th.tensor([[-1.0, 2.0, 3.0], [0.0, 3.0, 4.0], [1.0, 2.0, -3.0]])
    errors = wasserstein_distance(quantiles, targets)
    np.testing.assert_allclose(errors.numpy(), [[0.0], [1.0], [5.0 / 3.0]], rtol=1e-6)


def test_certain_returns_give_the_td_error_of_dqn() -> None:
    model = make_model()
    set_quantiles(model, [[0.0, 0.0], [3.0, 3.0], [0.0, 0.0]], next_target=[[8.0, 8.0]] * 3)
    add(model, reward=-5.0)
    assert float(fed_back(model, batch_size=1)) == abs(-5.0 + 0.5 * 8.0 - 3.0)


def test_the_bootstrap_ends_with_the_task() -> None:
    model = make_model()
    set_quantiles(model, next_target=[[8.0, 8.0]] * 3)
    add(model, reward=1.0, done=True)
    add(model, reward=1.0)
    np.testing.assert_allclose(fed_back(model, batch_size=2).numpy(), [[1.0], [5.0]])


def test_n_step_returns_and_their_discounts_make_the_target() -> None:
    model = make_model(n_steps=3)
    set_quantiles(model, next_target=[[16.0, 16.0]] * 3)
    for reward in (1.0, 2.0, 4.0):
        add(model, reward)
    add(model, 8.0, done=True)
    # 1 + 2/2 + 4/4 and 1/8 of 16; from the second on, the end of the episode is in sight
    expected = [3.0 + 2.0, 2.0 + 2.0 + 2.0, 4.0 + 4.0, 8.0]
    np.testing.assert_allclose(fed_back(model, batch_size=4)[:, 0].numpy(), expected)


# --- loss and weights


def test_each_quantile_moves_by_its_share_times_the_weight() -> None:
    model = make_model()
    set_quantiles(model)
    add(model, 8.0, action=0, done=True)
    add(model, -0.5, action=1, done=True)
    buffer = buffer_of(model)
    sample = buffer.sample

    def weighted(batch_size: int, env: VecNormalize | None) -> PrioritizedReplayBufferSamples:
        batch = sample(batch_size, env=env)
        np.testing.assert_array_equal(batch.indices, [0, 1])
        return batch._replace(weights=th.tensor([[1.0], [0.25]]))

    buffer.sample = weighted  # type: ignore[method-assign,assignment]
    errors = fed_back(model, batch_size=2)
    # Raw: neither clipped nor weighted
    np.testing.assert_allclose(errors.numpy(), [[8.0], [0.5]])

    # Midpoints 1/4 and 3/4. Above them, the linear part pulls with the midpoint; below, the
    # quadratic one with the error times what is missing to 1. Each counts half in the batch, and
    # the bias of the linear layer doubles the step.
    step = 0.1 / 2 * 2
    expected = [
        [step * 0.25, step * 0.75],
        [step * 0.25 * -0.5 * 0.75, step * 0.25 * -0.5 * 0.25],
        [0.0, 0.0],
    ]
    np.testing.assert_allclose(quantiles_at(model, S), expected, rtol=1e-5)
    linear = 0.25 * 7.5 + 0.75 * 7.5
    quadratic = 0.25 * (0.75 + 0.25) * 0.125
    loss = model.logger.name_to_value["train/loss"]
    assert loss == pytest.approx((linear + quadratic) / 2, rel=1e-6)


def test_weights_of_zero_leave_the_parameters_alone() -> None:
    model = make_model()
    for reward in (3.0, -200.0, 0.1):
        add(model, reward)
    before = quantiles_at(model, S)
    buffer = buffer_of(model)
    sample = buffer.sample

    def weightless(batch_size: int, env: VecNormalize | None) -> PrioritizedReplayBufferSamples:
        return sample(batch_size, env=env)._replace(weights=th.zeros(batch_size, 1))

    buffer.sample = weightless  # type: ignore[method-assign,assignment]
    model.train(2, batch_size=5)
    assert quantiles_at(model, S) == before
    # And the broken twin: with its own weights, the same model moves
    buffer.sample = sample  # type: ignore[method-assign]
    model.train(1, batch_size=5)
    assert quantiles_at(model, S) != before


def test_the_batch_may_be_shorter_than_asked_for() -> None:
    model = make_model()
    add(model, 1.0)
    buffer = buffer_of(model)
    sample = buffer.sample

    def three(batch_size: int, env: VecNormalize | None) -> PrioritizedReplayBufferSamples:
        return sample(3, env=env)

    buffer.sample = three  # type: ignore[method-assign,assignment]
    assert fed_back(model, batch_size=7).shape == (3, 1)


def test_no_gradient_flows_through_the_targets() -> None:
    for double_q in (False, True):
        model = make_model(double_q=double_q)
        set_quantiles(model, next_online=[[5.0, 6.0]] * 3, next_target=[[8.0, 8.0]] * 3)
        add(model, reward=1.0)
        model.train(1, batch_size=1)
        assert all(parameter.grad is None for parameter in model.quantile_net_target.parameters())
        (layer,) = (p for p in model.quantile_net.modules() if isinstance(p, th.nn.Linear))
        # Column 1 belongs to the next state
        assert layer.weight.grad is not None
        assert bool((layer.weight.grad[:, 0] != 0.0).any())
        assert bool((layer.weight.grad[:, 1] == 0.0).all())


def test_gradients_are_clipped_where_asked_for() -> None:
    model = make_model(max_grad_norm=0.01)
    before = [parameter.detach().clone() for parameter in model.quantile_net.parameters()]
    add(model, 50.0, done=True)
    model.train(1, batch_size=1)
    steps = [
        (old - new.detach()) / 0.1
        for old, new in zip(before, model.quantile_net.parameters(), strict=True)
    ]
    assert float(th.cat([step.flatten() for step in steps]).norm()) == pytest.approx(0.01, rel=1e-3)


def test_no_gradient_steps_touch_nothing() -> None:
    model = make_model()
    add(model, 1.0)
    model.train(0, batch_size=2)
    assert model.logger.name_to_value == {"train/learning_rate": 0.1, "train/n_updates": 0}


@pytest.mark.parametrize("reward", [np.nan, np.inf])
def test_a_reward_that_is_not_finite_stops_training_with_everything_whole(reward: float) -> None:
    model = make_model()
    for value in (1.0, reward):
        add(model, value)
    before = quantiles_at(model, S)
    leaves = buffer_of(model).priorities
    with pytest.raises(ValueError, match=rf"got {reward} for transition 1"):
        model.train(1, batch_size=4)
    assert quantiles_at(model, S) == before
    np.testing.assert_array_equal(buffer_of(model).priorities, leaves)


@pytest.mark.parametrize("double_q", [False, True])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_follows_a_terminal_transition_may_have_any_value(
    value: float, double_q: bool
) -> None:
    model = make_model(double_q=double_q)
    set_quantiles(model, next_target=[[value] * 2] * 3)
    add(model, 5.0, done=True)
    np.testing.assert_array_equal(fed_back(model, batch_size=2), [[5.0], [5.0]])
    assert np.isfinite(quantiles_at(model, S)).all()


def test_nan_in_what_goes_on_stops_training_with_everything_whole() -> None:
    model = make_model()
    set_quantiles(model, next_target=[[np.nan] * 2] * 3)
    add(model, 5.0, done=True)
    add(model, 1.0)
    before = quantiles_at(model, S)
    with pytest.raises(
        ValueError, match=r"nan for transition 1 \(1 of 2 are not finite, .*\[1\]\)"
    ):
        model.train(1, batch_size=2)
    assert quantiles_at(model, S) == before
    np.testing.assert_array_equal(buffer_of(model).priorities, [1.0, 1.0])


def test_the_log_has_the_means_of_all_gradient_steps() -> None:
    model = make_model(alpha=1.0, beta=0.5, learning_rate=0.0)
    set_quantiles(model)
    for reward in (1.0, 3.0):
        add(model, reward, done=True)
    model.train(2, batch_size=2)
    values = model.logger.name_to_value
    # The priorities 1 and 3 of the first step leave two possible batches for the second
    both = (2.0, (0.5 + 2.5 / 3**0.5) / 2)
    second_twice = (3.0, 2.5)
    means = [((2.0 + error) / 2, (1.5 + loss) / 2) for error, loss in (both, second_twice)]
    logged = (values["per/td_error_mean"], values["train/loss"])
    assert any(logged == pytest.approx(mean, rel=1e-5) for mean in means)
    assert values["per/priority_max"] == pytest.approx(3.0 + 1e-6)
    assert values["per/beta"] == 0.5
    assert values["train/n_updates"] == 2
    assert {type(value) for key, value in values.items() if key.startswith("per/")} == {float}


# --- what it shares with PERDQN


def random_env() -> TenStepEnv:
    return TenStepEnv(spaces.Box(-100.0, 100.0, (2,), np.float32), spaces.Discrete(3))


def learner(env: Any = None, **kwargs: Any) -> Any:
    """A model that learns from random observations."""
    policy_kwargs = {"net_arch": [8], "n_quantiles": 3}
    return small_model(
        env or random_env(), **{"algorithm": PERQRDQN, "policy_kwargs": policy_kwargs, **kwargs}
    )


@pytest.mark.parametrize(
    ("make_env", "kwargs", "buffer_class"),
    [
        (
            lambda: TenStepEnv(
                spaces.Dict({"room": spaces.Discrete(9), "place": spaces.Box(-1, 1)})
            ),
            {"n_steps": 3},
            PrioritizedDictReplayBuffer,
        ),
        (
            lambda: BitFlippingEnv(n_bits=3),
            {"replay_buffer_class": HerReplayBuffer},
            PrioritizedHerReplayBuffer,
        ),
        (random_env, {**SAVING_MEMORY, "n_steps": 2}, PrioritizedReplayBuffer),
        (lambda: VecNormalize(side_by_side(3, random_env)), {}, PrioritizedReplayBuffer),
    ],
    ids=["Dict", "HER", "memory saving", "VecNormalize"],
)
def test_all_kinds_of_buffers_learn_and_get_their_errors_back(
    make_env: Any, kwargs: dict[str, Any], buffer_class: type[PrioritizedReplayBuffer]
) -> None:
    model = learner(make_env(), **kwargs)
    buffer = buffer_of(model)
    assert type(buffer) is buffer_class
    model.learn(30)
    assert model._n_updates > 0
    assert len(set(buffer.priorities)) > 3
    assert buffer.tree.check_valid() == (True, "")


def test_a_saved_run_goes_on_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    def go_on(model: PERQRDQN) -> list[list[float]]:
        model.set_random_seed(1)
        # A new episode in both
        model.learn(20)
        return [
            *quantiles_at(model, S),
            buffer_of(model).priorities.tolist(),
            [float(model._n_updates)],
        ]

    model = learner(alpha=0.7, beta=0.3).learn(30)
    model.save(tmp_path / "model")
    model.save_replay_buffer(tmp_path / "buffer")
    loaded = PERQRDQN.load(tmp_path / "model", env=random_env(), device="cpu")
    loaded.load_replay_buffer(tmp_path / "buffer")
    assert (loaded.alpha, loaded.beta, loaded.double_q) == (0.7, 0.3, False)
    assert go_on(loaded) == go_on(model)


def test_options_given_at_load_time_take_effect(tmp_path: Path) -> None:
    learner().save(tmp_path / "model")
    loaded = PERQRDQN.load(tmp_path / "model", env=random_env(), alpha=0.25, double_q=True)
    assert (loaded.alpha, loaded.double_q, buffer_of(loaded).alpha) == (0.25, True, 0.25)
    with pytest.raises(ValueError, match=r"`alpha`.*got -1"):
        PERQRDQN.load(tmp_path / "model", env=random_env(), alpha=-1)


def test_zips_of_qrdqn_are_understood_and_understand_ours(tmp_path: Path) -> None:
    plain = learner(algorithm=QRDQN).learn(20)
    plain.save(tmp_path / "plain")
    loaded = PERQRDQN.load(tmp_path / "plain", env=random_env(), device="cpu").learn(20)
    assert type(buffer_of(loaded)) is PrioritizedReplayBuffer
    assert loaded.alpha == 0.6
    assert len(set(buffer_of(loaded).priorities)) > 1

    loaded.save(tmp_path / "prioritized")
    back = QRDQN.load(tmp_path / "prioritized", env=random_env(), device="cpu")
    observations = np.random.normal(size=(50, 2)).astype(np.float32)
    ours, theirs = (model.predict(observations, deterministic=True)[0] for model in (loaded, back))
    np.testing.assert_array_equal(ours, theirs)
    back.learn(20)


def test_tensorboard_gets_a_name_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra `experiments`")
    learner(tensorboard_log=str(tmp_path)).learn(2)
    assert [path.name for path in tmp_path.iterdir()] == ["PERQRDQN_1"]


# --- without sb3-contrib


STATEMENTS = ["sb3_per.PERQRDQN", "from sb3_per import PERQRDQN", "import sb3_per.per_qrdqn"]


def test_without_sb3_contrib_an_import_says_what_to_install(tmp_path: Path) -> None:
    code = f"""
import sys
sys.modules["sb3_contrib"] = None
from sb3_per import *
import sb3_per
sb3_per.PERDQN
for statement in {STATEMENTS}:
    try:
        exec(statement)
    except ImportError as error:
        print(error)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.stderr == ""
    assert result.stdout.splitlines() == 3 * [
        'PERQRDQN builds on sb3-contrib, which is not installed: pip install "sb3-per[contrib]"'
    ]
