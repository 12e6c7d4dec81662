import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch as th
from stable_baselines3.common.atari_wrappers import MaxAndSkipEnv

import sb3_per  # noqa: F401  # registers the toy environments
from sb3_per.compare.hyperparams import (
    DEFAULT_FILE,
    full_env_id,
    load_hyperparams,
    model_arguments,
    parse_value,
    wrapper_of,
)
from sb3_per.compare.settings import SettingsError

BASE = "CartPole-v1:\n  n_timesteps: 1000\n  policy: MlpPolicy\n"


def load(tmp_path: Path, text: str, env_id: str = "CartPole-v1") -> dict[str, Any]:
    path = tmp_path / "own.yml"
    path.write_text(text)
    return load_hyperparams(path, env_id)


def load_line(tmp_path: Path, line: str) -> dict[str, Any]:
    return load(tmp_path, f"{BASE}  {line}\n")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("dict(net_arch=[256, 256])", {"net_arch": [256, 256]}),
        ("dict(net_arch=dict(pi=[8], qf=[8, -1.5]))", {"net_arch": {"pi": [8], "qf": [8, -1.5]}}),
        ("{'a': (1, None), 'b': True}", {"a": (1, None), "b": True}),
        ("dict(activation_fn=nn.ReLU)", {"activation_fn": th.nn.ReLU}),
        ("dict(activation_fn=th.nn.Tanh)", {"activation_fn": th.nn.Tanh}),
        ("dict(optimizer_class=torch.optim.RMSprop)", {"optimizer_class": th.optim.RMSprop}),
        (" dict() ", {}),
    ],
)
def test_values_written_as_python(text: str, value: Any) -> None:
    assert parse_value(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "dict(a=open('x'))",
        "[x for x in (1, 2)]",
        "lambda: 1",
        "nn.functional.relu",
        "nn.Module.__init__",
        "os.path",
        "dict(**{'a': 1})",
        "dict(1)",
        "2 ** 1000000",
        "{**{}}",
        "dict(a=",
        "-'a'",
        "{[]: 1}",
        "1e999",
        "dict(a=[-1e999])",
        "1j",
        "b'bytes'",
        "...",
        "[" * 1000 + "]" * 1000,
        "-" * 5000 + "1",
        "nn" + ".nn" * 2000,
        "1" * 20_000,
        "9" * 5000,
        "\0",
    ],
    ids=lambda text: text[:20],
)
def test_nothing_else_is_read_and_nothing_is_run(text: str) -> None:
    with pytest.raises(SettingsError, match="can't read"):
        parse_value(text)


def test_numbers_as_yaml_and_rl_zoo_write_them(tmp_path: Path) -> None:
    text = """
CartPole-v1:
  n_timesteps: !!float 5e4
  policy: 'MlpPolicy'
  learning_rate: 1e-3
  buffer_size: 1e5
  train_freq: [4, "step"]
  gradient_steps: -1
  gamma: 1
"""
    assert load(tmp_path, text) == {
        "n_timesteps": 50_000,
        "policy": "MlpPolicy",
        "learning_rate": 0.001,
        "buffer_size": 100_000,
        "train_freq": [4, "step"],
        "gradient_steps": -1,
        "gamma": 1.0,
    }


def test_arguments_for_the_algorithm(tmp_path: Path) -> None:
    hyperparams = load(
        tmp_path,
        f"""{BASE}
  learning_rate: lin_2.3e-3
  train_freq: "(2, 'episode')"
  policy_kwargs: "dict(net_arch=[64], activation_fn=nn.ELU)"
  replay_buffer_kwargs:
    handle_timeout_termination: False
  normalize: "dict(norm_obs=True, norm_reward=False)"
  n_envs: 2
  frame_stack: 4
  threshold: 100
  env_kwargs:
    sutton_barto_reward: True
""",
    )
    # As it goes to settings.json
    arguments = model_arguments(json.loads(json.dumps(hyperparams)))
    schedule = arguments.pop("learning_rate")
    assert [schedule(1.0), schedule(0.5), schedule(0.0)] == pytest.approx([2.3e-3, 1.15e-3, 0.0])
    assert arguments == {
        "policy": "MlpPolicy",
        "train_freq": (2, "episode"),
        "policy_kwargs": {"net_arch": [64], "activation_fn": th.nn.ELU},
        "replay_buffer_kwargs": {"handle_timeout_termination": False},
    }


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("batchsize: 32", "unknown key 'batchsize'"),
        ("alpha: 0.5", r'alpha, which belongs to an agent, as in .*"per\(alpha=...\)"'),
        ("double_q: True", "double_q, which belongs to an agent"),
        ("n_quantiles: 25", "n_quantiles, which belongs to an agent"),
        ("callback: x.Y", "callback, which can't be given here"),
        ("replay_buffer_class: HerReplayBuffer", "each agent has its own"),
        ("batch_size: 0", "batch_size is 0: an integer of at least 1"),
        ("batch_size: 32.5", "batch_size is 32.5: an integer"),
        ("batch_size: True", "batch_size is True: a number"),
        ("gamma: .nan", "gamma is nan: a finite number"),
        ("gamma: high", "gamma is 'high'"),
        ("learning_rate: lin_fast", "learning_rate is 'lin_fast'"),
        ("learning_rate: cos_1e-3", "learning_rate is 'cos_1e-3'"),
        (
            "train_freq: [4, week]",
            r'a number of steps is needed, or a pair such as \[2, "episode"\]',
        ),
        ("train_freq: [1]", r"train_freq is \[1\]: a number of steps is needed, or a pair"),
        ("train_freq: [1, step, 2]", "a number of steps is needed, or a pair"),
        ("train_freq: []", "a number of steps is needed, or a pair"),
        ("train_freq: [step, 1]", "a number of steps is needed, or a pair"),
        ('train_freq: "(1,)"', "a number of steps is needed, or a pair"),
        ("train_freq: [0, step]", "an integer of at least 1"),
        (f"batch_size: {10**400}", "a finite number"),
        ("env_kwargs: {since: 2020-01-01}", "only numbers, texts, lists and dicts"),
        ("env_kwargs: {names: !!set {a, b}}", "only numbers, texts, lists and dicts"),
        ("optimize_memory_usage: maybe", "True or False"),
        ("policy_kwargs: [64]", "a dict is needed"),
        ("policy_kwargs: \"eval('1')\"", "can't read"),
        ("normalize: 3", "a dict is needed"),
        ("env_wrapper: NoDot", "neither the dotted name"),
        ("env_wrapper: no.such.Wrapper", "can't import no.such.Wrapper"),
        ("env_wrapper: gymnasium.wrappers.NoSuch", "can't import gymnasium.wrappers.NoSuch"),
        ("env_wrapper: ..x.Wrapper", r"can't import \.\.x\.Wrapper"),
    ],
)
def test_refusals_name_the_key_and_the_place(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message) as error:
        load_line(tmp_path, line)
    assert "own.yml: CartPole-v1" in str(error.value)


def test_what_every_section_needs(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="has no n_timesteps"):
        load(tmp_path, "CartPole-v1:\n  policy: MlpPolicy\n")
    with pytest.raises(SettingsError, match="has no policy"):
        load(tmp_path, "CartPole-v1:\n  n_timesteps: 10\n")
    with pytest.raises(SettingsError, match="must map names to values"):
        load(tmp_path, "CartPole-v1: 3\n")


@pytest.mark.parametrize(
    "text",
    [
        "- a\n",
        "",
        "a: [\n",
        # Of what it can't make a value of, PyYAML passes on errors of every kind
        "a: !!int ''\n",
        "a: !!bool maybe\n",
        "a: !!timestamp soon\n",
        "a: 2020-99-99\n",
        f"a: {'9' * 5000}\n",
        "a: 1\n---\na: 2\n",
    ],
    ids=lambda text: text[:20],
)
def test_files_that_are_no_hyperparameters(tmp_path: Path, text: str) -> None:
    with pytest.raises(SettingsError, match=r"own\.yml"):
        load(tmp_path, text)


def repeated(first: str, level: str) -> str:
    """Each of 12 lines has ten times the line before it: 10 ** 12 entries in all."""
    lines = [f"a0: &a0 {first}"]
    for n in range(1, 13):
        lines.append(f"a{n}: &a{n} {level.format(', '.join([f'*a{n - 1}'] * 10))}")
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (repeated("[0]", "[{}]"), "has more than 100,000 entries"),
        (repeated("{k: 0}", "{{<<: [{}]}}"), "has more than 100,000 entries"),
        ("a: &a [*a]\n", "an alias that contains itself"),
        ("a: &a {b: [*a]}\n", "an alias that contains itself"),
        ("&a {<<: *a}\n", "an alias that contains itself"),
        ("a: " + "[" * 5000, "is nested too deeply"),
        ("".join(f"{' ' * n}a:\n" for n in range(2000)), "is nested too deeply"),
    ],
    ids=["lists", "merges", "itself", "itself deeper", "itself merged", "brackets", "mappings"],
)
def test_aliases_that_grow_and_nesting_without_end(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message) as error:
        load(tmp_path, text)
    assert "own.yml" in str(error.value)
    assert len(str(error.value)) < 300 + len(str(tmp_path))


def test_aliases_in_moderation_are_read(tmp_path: Path) -> None:
    text = "base: &base\n  n_timesteps: 7\n  policy: MlpPolicy\nCartPole-v1:\n  <<: *base\n"
    assert load(tmp_path, text) == {"n_timesteps": 7, "policy": "MlpPolicy"}


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"none\.yml"):
        load_hyperparams(tmp_path / "none.yml", "CartPole-v1")


def test_yaml_objects_are_not_made(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="can't read"):
        load(tmp_path, "CartPole-v1: !!python/object/apply:os.getcwd []\n")


def test_section_of_an_environment(tmp_path: Path) -> None:
    text = "\n".join(
        f"{name}:\n  n_timesteps: {n}\n  policy: MlpPolicy"
        for n, name in enumerate(["sb3_per/GridWorld-v0", "Acrobot-v1", "default"], start=1)
    )
    for env_id, n in (
        ("sb3_per/GridWorld-v0", 1),
        ("sb3_per_envs:sb3_per/GridWorld-v0", 1),
        ("Acrobot-v1", 2),
        ("CartPole-v1", 3),
    ):
        assert load(tmp_path, text, env_id)["n_timesteps"] == n
    with pytest.raises(SettingsError, match="no hyperparameters for Acrobot-v1: it has CartPole"):
        load(tmp_path, BASE, "Acrobot-v1")


def test_file_of_the_package() -> None:
    grid = load_hyperparams(DEFAULT_FILE, "sb3_per/GridWorld-v0")
    assert (grid["n_timesteps"], grid["threshold"]) == (10_000, 0.9)
    cartpole = load_hyperparams(DEFAULT_FILE, "CartPole-v1")
    assert cartpole["n_timesteps"] == 50_000
    assert model_arguments(cartpole)["policy_kwargs"] == {"net_arch": [256, 256]}
    assert load_hyperparams(DEFAULT_FILE, "Acrobot-v1")["n_timesteps"] == 100_000


def test_rl_zoos_own_files_can_be_used() -> None:
    # Not imported: it patches Gymnasium
    spec = find_spec("rl_zoo3")
    if spec is None or spec.origin is None:
        pytest.skip("needs the extra zoo")
    folder = Path(spec.origin).parent / "hyperparams"
    for name in ("dqn.yml", "qrdqn.yml"):
        for env_id in ("CartPole-v1", "MountainCar-v0", "LunarLander-v3", "Acrobot-v1"):
            hyperparams = load_hyperparams(folder / name, env_id)
            assert hyperparams["n_timesteps"] >= 50_000
            assert model_arguments(hyperparams)["policy_kwargs"]["net_arch"] == [256, 256]


@pytest.mark.parametrize(
    ("given", "full"),
    [
        ("GridWorld-v0", "sb3_per/GridWorld-v0"),
        ("sb3_per/GridWorld-v0", "sb3_per/GridWorld-v0"),
        ("sb3_per_envs:sb3_per/GridWorld-v0", "sb3_per_envs:sb3_per/GridWorld-v0"),
        ("CartPole-v1", "CartPole-v1"),
    ],
)
def test_env_ids(given: str, full: str) -> None:
    assert full_env_id(given) == full
    assert gym.make(full).spec is not None


def test_ataris_games_are_found_without_their_module() -> None:
    pytest.importorskip("ale_py", reason="needs the extra `atari`")
    for given in ("PongNoFrameskip-v4", "ale_py:PongNoFrameskip-v4"):
        # With the module: another process has not imported it yet
        assert full_env_id(given) == "ale_py:PongNoFrameskip-v4"
    atari = load_hyperparams(DEFAULT_FILE, "ale_py:PongNoFrameskip-v4")
    assert (atari["policy"], atari["frame_stack"]) == ("CnnPolicy", 4)
    with pytest.raises(SettingsError, match="NoFrameskip-v99"):
        full_env_id("PongNoFrameskip-v99")


@pytest.mark.parametrize(
    "env_id",
    [
        "CartPoll-v1",
        "CartPole-v99",
        "no_such_module:X-v0",
        "../evil:Foo-v0",
        "a..b:Foo-v0",
        ".:Foo-v0",
        "a b:Foo-v0",
        "CartPole-v1/",
        "",
    ],
)
def test_unknown_env_ids(env_id: str) -> None:
    with pytest.raises(SettingsError, match=f"--envs {re.escape(env_id)}"):
        full_env_id(env_id)


def test_module_that_fails_while_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_written.py").write_text("raise RuntimeError('not yet')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SettingsError, match="can't import half_written: RuntimeError: not yet"):
        full_env_id("half_written:Foo-v0")
    with pytest.raises(SettingsError, match=r"half_written\.Wrapper: RuntimeError: not yet"):
        wrapper_of("half_written.Wrapper")


def test_wrappers_go_around_in_order_with_their_arguments() -> None:
    wrap = wrapper_of(
        [
            "gymnasium.wrappers.FlattenObservation",
            {"stable_baselines3.common.atari_wrappers.MaxAndSkipEnv": {"skip": 7}},
        ]
    )
    assert wrap is not None
    env = wrap(gym.make("CartPole-v1"))
    assert isinstance(env, MaxAndSkipEnv)
    assert env._skip == 7
    assert isinstance(env.env, gym.wrappers.FlattenObservation)
    assert wrapper_of(None) is None


@pytest.mark.parametrize(
    "name",
    [
        "builtins.print",
        "builtins.type",
        "os.system",
        "timeit.timeit",
        "subprocess.Popen",
        "gymnasium.make",
        "gymnasium.Env",
        "stable_baselines3.common.vec_env.VecNormalize",
        "stable_baselines3.DQN",
    ],
)
def test_what_is_no_wrapper_is_never_called(tmp_path: Path, name: str) -> None:
    for line in (f"env_wrapper: {name}", f"env_wrapper: [{name}: {{a: 1}}]"):
        with pytest.raises(SettingsError, match=f"{name} is no wrapper: a class derived from"):
            load_line(tmp_path, line)


def test_file_that_names_functions_runs_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    line = (
        "env_wrapper: [builtins.type, {timeit.timeit: "
        "{setup: \"__import__('os').system('echo it ran')\", number: 0}}]"
    )
    with pytest.raises(SettingsError, match=r"builtins\.type is no wrapper"):
        load_line(tmp_path, line)
    assert "it ran" not in capfd.readouterr().out
