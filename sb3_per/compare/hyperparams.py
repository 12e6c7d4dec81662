"""Hyperparameters from YAML files in rl-zoo's format, read without running code in them."""

import ast
import importlib
import inspect
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch as th
import yaml
from stable_baselines3.common.utils import LinearSchedule

from sb3_per import PERDQN
from sb3_per.compare.settings import SettingsError

__all__ = [
    "DEFAULT_FILE",
    "KEYS",
    "check_option",
    "full_env_id",
    "load_hyperparams",
    "model_arguments",
    "parse_value",
    "wrapper_of",
]

#: Default file
DEFAULT_FILE = Path(__file__).with_name("hyperparams.yml")

Hyperparams = dict[str, Any]

#: Keys of rl-zoo's files, or arguments of algorithms, that can't be given here, and why
REFUSED = {
    "callback": "callbacks would differ from those of the comparison",
    "vec_env_wrapper": "use `env_wrapper`, `frame_stack` or `normalize`",
    "replay_buffer_class": "each agent has its own",
    "action_noise": "it is `noise_type` and `noise_std`",
    "seed": "it is --first-seed and --n-seeds",
    "device": "it is --device",
    "env": "it is --envs",
    "verbose": "there is a progress bar",
    "tensorboard_log": "results go to --output",
    "stats_window_size": "it is --window",
}

#: Largest number of entries of a YAML file, counting repeats by aliases: rl-zoo's largest has 500
MOST_ENTRIES = 100_000

#: Largest number of characters of a value written as Python
LONGEST_VALUE = 10_000

#: Options of prioritized replay, and of quantile networks
OF_AGENTS = {
    name
    for name, parameter in inspect.signature(PERDQN).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
} | {"n_quantiles"}


# Values written as Python, such as "dict(net_arch=[256, 256])"


def parse_value(text: str) -> Any:
    """
    Value of a Python expression in one of rl-zoo's files, without running it: numbers, strings,
    lists, tuples, dicts, ``dict(...)``, and classes of torch (``nn.ReLU``, ``th.optim.Adam``).

    :param text: the expression
    :return: its value
    :raises SettingsError: if it is anything else

    >>> parse_value("dict(net_arch=[256, 256], activation_fn=nn.ReLU)")
    {'net_arch': [256, 256], 'activation_fn': <class 'torch.nn.modules.activation.ReLU'>}
    """
    try:
        return _value_of(parse_expression(text))
    except (ValueError, TypeError) as error:
        raise SettingsError(f"can't read {shortened(text)}: {error}") from None


def parse_expression(text: str) -> ast.expr:
    """
    :param text: Python expression
    :return: parsed expression
    :raises ValueError: if it is not an expression, or too long or too deeply nested to be a value
    """
    if len(text) > LONGEST_VALUE:
        raise ValueError(f"it has {len(text):,} characters, at most {LONGEST_VALUE:,} are read")
    try:
        parsed = ast.parse(text.strip(), mode="eval").body
        # Raises RecursionError for what no function here could walk through, either
        ast.unparse(parsed)
    except SyntaxError as error:
        raise ValueError(str(error)) from None
    except (RecursionError, MemoryError):
        raise ValueError("it is nested too deeply") from None
    return parsed


def shortened(value: Any) -> str:
    """
    :param value: value that is refused
    :return: shortened value, for error messages
    """
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _value_of(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | str() | None as value):
            return value
        case ast.Constant(value=float(value)):
            # Such as 1e999, which Python reads as infinity
            if not math.isfinite(value):
                raise ValueError(f"{ast.unparse(node)} is too large for a number")
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value_of(operand)
        case ast.List(elts=elements):
            return [_value_of(element) for element in elements]
        case ast.Tuple(elts=elements):
            return tuple(_value_of(element) for element in elements)
        case ast.Dict(keys=keys, values=values) if None not in keys:
            items = zip(keys, values, strict=True)
            return {_value_of(key): _value_of(value) for key, value in items if key is not None}
        case ast.Call(func=ast.Name(id="dict"), args=[], keywords=keywords):
            return dict(keyword_options(keywords))
        case ast.Attribute():
            return _torch_class(node)
    raise ValueError(
        f"{ast.unparse(node)!r} is neither a number, a text, a list, a tuple, a dict nor a class "
        "of torch.nn or torch.optim"
    )


def keyword_options(keywords: list[ast.keyword]) -> dict[str, Any]:
    """
    :param keywords: keyword arguments of a call
    :return: their values by name
    :raises ValueError: if one is ``**options``, or not a value
    """
    if any(keyword.arg is None for keyword in keywords):
        raise ValueError("** is not supported")
    return {str(keyword.arg): _value_of(keyword.value) for keyword in keywords}


def _torch_class(node: ast.Attribute) -> Any:
    """
    :param node: dotted name
    :return: class of torch with that name
    """
    first, *rest = ast.unparse(node).split(".")
    if first in ("th", "torch"):
        first, *rest = rest
    value: Any = {"nn": th.nn, "optim": th.optim}.get(first)
    for name in rest:
        value = getattr(value, name, None)
    if not (isinstance(value, type) and issubclass(value, th.nn.Module | th.optim.Optimizer)):
        raise ValueError(f"{ast.unparse(node)!r} is no class of torch.nn or torch.optim")
    return value


# Checks of the keys


def _number(value: Any) -> float:
    # YAML reads 1e-3 as a string, and rl-zoo's files put !!float before it
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("a number is needed")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError("a finite number is needed")
    return number


def _integer(low: int) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        number = _number(value)
        if number != int(number) or number < low:
            raise ValueError(f"an integer of at least {low} is needed")
        return int(number)

    return check


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("True or False is needed")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a text is needed")
    return value


def _options(value: Any) -> Any:
    """Check the value, and keep it as it is written: the settings go to a JSON file."""
    if not isinstance(parse_value(value) if isinstance(value, str) else value, dict):
        raise ValueError('a dict is needed, or a text like "dict(net_arch=[64, 64])"')
    return value


def _learning_rate(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("lin_"):
        _number(value.removeprefix("lin_"))
        return value
    return _number(value)


def _train_freq(value: Any) -> Any:
    if isinstance(value, str) and value.strip()[:1] in ("(", "["):
        value = parse_value(value)
    if isinstance(value, list | tuple):
        if len(value) != 2 or value[1] not in ("step", "episode"):
            raise ValueError('a number of steps is needed, or a pair such as [2, "episode"]')
        return [_integer(1)(value[0]), value[1]]
    return _integer(1)(value)


def _normalize(value: Any) -> Any:
    return value if isinstance(value, bool) else _options(value)


def _noise_type(value: Any) -> str:
    if value not in ("normal", "ornstein-uhlenbeck"):
        raise ValueError('"normal" or "ornstein-uhlenbeck" is needed')
    return _text(value)


def _ent_coef(value: Any) -> Any:
    """The coefficient, or the target that the entropy should have."""
    if isinstance(value, str) and value.startswith("auto"):
        _number(value.removeprefix("auto").removeprefix("_") or 1.0)
        return value
    return _number(value)


def _env_wrapper(value: Any) -> Any:
    wrapper_of(value)
    return value


#: The keys that are understood, and what checks each. ``threshold`` is not in rl-zoo's files.
KEYS: dict[str, Callable[[Any], Any]] = {
    "n_timesteps": _integer(1),
    "threshold": _number,
    "n_envs": _integer(1),
    "env_kwargs": _options,
    "env_wrapper": _env_wrapper,
    "frame_stack": _integer(1),
    "normalize": _normalize,
    "policy": _text,
    "policy_kwargs": _options,
    "learning_rate": _learning_rate,
    "buffer_size": _integer(1),
    "learning_starts": _integer(0),
    "batch_size": _integer(1),
    "tau": _number,
    "gamma": _number,
    "train_freq": _train_freq,
    "gradient_steps": _integer(-1),
    "n_steps": _integer(1),
    "optimize_memory_usage": _flag,
    "replay_buffer_kwargs": _options,
    "target_update_interval": _integer(1),
    "exploration_fraction": _number,
    "exploration_initial_eps": _number,
    "exploration_final_eps": _number,
    "max_grad_norm": _number,
    "noise_type": _noise_type,
    "noise_std": _number,
    "ent_coef": _ent_coef,
    "target_entropy": _ent_coef,
    "use_sde": _flag,
    "sde_sample_freq": _integer(-1),
    "use_sde_at_warmup": _flag,
    "policy_delay": _integer(1),
    "target_policy_noise": _number,
    "target_noise_clip": _number,
    "top_quantiles_to_drop_per_net": _integer(0),
}

#: Those that are no arguments of the algorithm
OF_ENV = (
    "n_timesteps",
    "threshold",
    "n_envs",
    "env_kwargs",
    "env_wrapper",
    "frame_stack",
    "normalize",
)

#: Hyperparameters that all agents of a comparison share, so that they can't be options of one
SHARED = ("policy", "policy_kwargs", "optimize_memory_usage", "replay_buffer_kwargs")


def check_option(name: str, value: Any) -> Any:
    """
    :param name: name of an option of an agent
    :param value: its value, in the same forms as in a YAML file
    :return: checked value, as one from a YAML file
    :raises ValueError: if the value is not allowed in a YAML file, or, such as a class, can't be
        read back from its text
    """
    if name in KEYS and name not in OF_ENV and name not in SHARED:
        value = KEYS[name](value)
    _check_can_be_kept(value)
    return value


# Files


def full_env_id(env_id: str) -> str:
    """
    :param env_id: id as the user gave it
    :return: as Gymnasium knows it: the toy environments of this package don't need their
        namespace, Atari's games not the name of their module, and of ``module:Id``, the module has
        been imported
    :raises SettingsError: if there is none
    """
    module, _, name = env_id.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        elif name.startswith("ALE/") or "NoFrameskip" in name:
            # A process knows Atari's games once it has imported their package: workers, too
            return full_env_id(f"ale_py:{env_id}")
        for candidate in (env_id, f"sb3_per/{env_id}"):
            if (candidate.rpartition(":")[2]) in gym.registry:
                return candidate
        # The error names existing versions and similar names
        gym.spec(name)
    except gym.error.Error as error:
        raise SettingsError(f"--envs {env_id}: {error}") from None
    except Exception as error:
        # Whatever a module of the user's raises while it is imported
        raise SettingsError(
            f"--envs {env_id}: can't import {module}: {type(error).__name__}: {error}"
        ) from None
    return env_id


def load_hyperparams(path: Path, env_id: str, is_continuous: bool = False) -> Hyperparams:
    """
    :param path: YAML file in rl-zoo's format: a mapping from environments to their hyperparameters,
        with ``atari`` for all of Atari's games and ``default`` for what has no place of its own;
        ``continuous`` comes before it for agents with continuous actions
    :param env_id: full Gymnasium id
    :param is_continuous: whether the agents have continuous actions
    :return: the checked hyperparameters of that environment, ready for JSON
    :raises SettingsError: if the file can't be read, has nothing for that environment, or a key
        or value that is not allowed
    """
    content = _content_of(path)
    if not isinstance(content, Mapping):
        raise SettingsError(f"{path} must map environments to their hyperparameters")
    name = env_id.rpartition(":")[2]
    is_atari = "AtariEnv" in str(gym.spec(name).entry_point)
    places = [env_id, name, name.rpartition("/")[2], *(["atari"] if is_atari else [])]
    places += ["continuous", "default"] if is_continuous else ["default"]
    section = next((place for place in places if place in content), None)
    if section is None:
        raise SettingsError(
            f"{path} has no hyperparameters for {env_id}: it has {', '.join(map(str, content))}. "
            "Add a section of that name, or one named default."
        )
    given = content[section]
    if not isinstance(given, Mapping):
        raise SettingsError(f"{path}: {section} must map names to values, got {shortened(given)}")
    return _checked(given, f"{path}: {section}")


def _content_of(path: Path) -> Any:
    """
    :param path: path of a YAML file
    :return: its content
    :raises SettingsError: if it can't be read, or aliases or nesting make it too large
    """
    try:
        with path.open(encoding="utf-8") as file:
            loader = yaml.SafeLoader(file)
            root = loader.get_single_node()
            # Before it is converted: merging a mapping into others copies its entries
            if root is not None and _n_entries(root, {}) > MOST_ENTRIES:
                raise SettingsError(
                    f"{path} has more than {MOST_ENTRIES:,} entries, those that aliases repeat "
                    "counted each time, or an alias that contains itself"
                )
            return None if root is None else loader.construct_document(root)
    except RecursionError:
        raise SettingsError(f"{path} is nested too deeply") from None
    except SettingsError:
        raise
    except Exception as error:
        # Not YAMLError alone: for values such as `!!int ''`, PyYAML passes on any exception
        raise SettingsError(f"can't read the hyperparameters in {path}: {error}") from None


def _n_entries(node: yaml.Node, known: dict[int, int]) -> int:
    """
    :param node: node of a YAML file
    :param known: numbers of entries of the nodes counted before, by their ``id``
    :return: number of nodes in it, counting repeats by aliases; above :data:`MOST_ENTRIES` if it
        contains itself
    """
    if id(node) not in known:
        known[id(node)] = MOST_ENTRIES + 1
        parts: list[yaml.Node] = []
        if isinstance(node, yaml.SequenceNode):
            parts = node.value
        elif isinstance(node, yaml.MappingNode):
            parts = [part for entry in node.value for part in entry]
        known[id(node)] = 1 + sum(_n_entries(part, known) for part in parts)
    return known[id(node)]


def _checked(given: Mapping[Any, Any], where: str) -> Hyperparams:
    checked = {}
    for key, value in given.items():
        if key in REFUSED:
            raise SettingsError(f"{where} has {key}, which can't be given here: {REFUSED[key]}")
        if key in OF_AGENTS:
            raise SettingsError(
                f"{where} has {key}, which belongs to an agent, as in --agents uniform "
                f'"per({key}=...)"'
            )
        if key not in KEYS:
            raise SettingsError(f"{where} has the unknown key {key!r}; known are {', '.join(KEYS)}")
        try:
            checked[key] = KEYS[key](value)
            _check_can_be_kept(checked[key])
        except (ValueError, TypeError) as error:
            raise SettingsError(f"{where}: {key} is {shortened(value)}: {error}") from None
    for key in ("n_timesteps", "policy"):
        if key not in checked:
            raise SettingsError(f"{where} has no {key}")
    return checked


def _check_can_be_kept(value: Any) -> None:
    """
    :param value: value for ``settings.json``
    :raises ValueError: if JSON can't represent it, such as a date
    """
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"only numbers, texts, lists and dicts are supported: {error}") from None


def model_arguments(hyperparams: Hyperparams) -> dict[str, Any]:
    """
    :param hyperparams: hyperparameters from :func:`load_hyperparams`
    :return: arguments for the algorithm
    """
    arguments = {key: value for key, value in hyperparams.items() if key not in OF_ENV}
    for key in ("policy_kwargs", "replay_buffer_kwargs"):
        if key in arguments:
            arguments[key] = options_of(arguments[key])
    rate = arguments.get("learning_rate")
    if isinstance(rate, str):
        arguments["learning_rate"] = LinearSchedule(float(rate.removeprefix("lin_")), 0.0, 1.0)
    if isinstance(arguments.get("train_freq"), list):
        arguments["train_freq"] = tuple(arguments["train_freq"])
    return arguments


def options_of(value: Any) -> dict[str, Any]:
    """
    :param value: a dict, or one written as Python
    :return: the dict, a copy
    """
    return dict(parse_value(value) if isinstance(value, str) else value)


def wrapper_of(given: Any) -> Callable[[gym.Env[Any, Any]], gym.Env[Any, Any]] | None:
    """
    :param given: value of ``env_wrapper``: the dotted name of a wrapper class, a mapping from it to
        its arguments, or a list of these, the innermost first
    :return: function that wraps an environment; None if there are no wrappers
    :raises SettingsError: if one can't be imported, or is not a ``gymnasium.Wrapper``
    """
    if given is None:
        return None
    wrappers = [_one_wrapper(entry) for entry in (given if isinstance(given, list) else [given])]

    def wrap(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
        for wrapper, arguments in wrappers:
            env = wrapper(env, **arguments)
        return env

    return wrap


def _one_wrapper(entry: Any) -> tuple[type[gym.Wrapper[Any, Any, Any, Any]], dict[str, Any]]:
    name: Any = entry
    arguments: Any = {}
    if isinstance(entry, Mapping) and len(entry) == 1:
        ((name, arguments),) = entry.items()
    if not isinstance(name, str) or "." not in name or not isinstance(arguments or {}, Mapping):
        raise SettingsError(
            f"env_wrapper: {shortened(entry)} is neither the dotted name of a wrapper class nor a "
            "mapping from one to its arguments"
        )
    module, _, attribute = name.rpartition(".")
    try:
        wrapper = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        # Whatever a module of the user's raises while it is imported
        raise SettingsError(
            f"env_wrapper: can't import {name}: {type(error).__name__}: {error}"
        ) from None
    # Nothing else is ever called: a file of hyperparameters must not run code
    if not (isinstance(wrapper, type) and issubclass(wrapper, gym.Wrapper)):
        raise SettingsError(
            f"env_wrapper: {name} is no wrapper: a class derived from gymnasium.Wrapper is needed"
        )
    return wrapper, dict(arguments or {})
