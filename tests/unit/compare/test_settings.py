from pathlib import Path
from typing import Any

import pytest
import tyro

from sb3_per.compare.settings import CompareSettings, PlotSettings, SettingsError


def parse(*arguments: str) -> CompareSettings:
    return tyro.cli(CompareSettings, args=arguments)


def test_defaults_are_ten_seeds_of_both_agents_on_both_environments() -> None:
    settings = parse()
    assert settings.envs == ("GridWorld-v0", "CartPole-v1")
    assert settings.agents == ("uniform", "per")
    assert settings.seeds == tuple(range(10))
    assert (settings.share, settings.folder) == (1.0, Path("comparison"))
    settings.check()


def test_quick_is_a_preset_that_options_change() -> None:
    quick = parse("--quick")
    assert (quick.seeds, quick.share) == ((0, 1, 2), 0.3)
    assert quick.folder == Path("comparison-quick")
    own = parse("--quick", "--n-seeds", "2", "--first-seed", "5", "--budget", "0.1")
    assert (own.seeds, own.share) == ((5, 6), 0.1)


def test_agents_and_environments_come_as_lists() -> None:
    settings = parse("--envs", "Acrobot-v1", "--agents", "uniform", "per(alpha=0.8)")
    assert settings.envs == ("Acrobot-v1",)
    assert settings.agents == ("uniform", "per(alpha=0.8)")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"envs": ()}, "--envs needs at least one"),
        ({"agents": ()}, "--agents needs at least one"),
        ({"envs": ("A", "B", "A")}, r"--envs has \['A'\] more than once"),
        ({"n_seeds": 0}, "--n-seeds must be at least 1, got 0"),
        ({"first_seed": -1}, "--first-seed must be at least 0, got -1"),
        ({"timesteps": 0}, "--timesteps must be at least 1, got 0"),
        ({"window": 0}, "--window"),
        ({"n_evals": 0}, "--n-evals"),
        ({"eval_episodes": 0}, "--eval-episodes"),
        ({"n_snapshots": -1}, "--n-snapshots"),
        ({"max_transitions": 0}, "--max-transitions"),
        ({"budget": 0.0}, "--budget must be above 0"),
        ({"budget": float("nan")}, "--budget must be above 0"),
        ({"budget": float("inf")}, "--budget must be above 0 and finite, got inf"),
        ({"threshold": float("nan")}, "--threshold must be a finite number, got nan"),
        ({"budget": 0.5, "timesteps": 10}, "--budget or --timesteps, not both"),
        ({"snapshot_episodes": (0, -5)}, r"--snapshot-episodes .* got \(0, -5\)"),
        ({"jobs": 0}, "--jobs"),
        ({"address": "auto"}, "--address belongs to"),
    ],
)
def test_values_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        CompareSettings(**options).check()


def test_plot_takes_a_folder() -> None:
    settings = tyro.cli(PlotSettings, args=["some/folder", "--window", "5"])
    assert settings == PlotSettings(Path("some/folder"), window=5)
    with pytest.raises(SettingsError, match="--window must be at least 1, got 0"):
        PlotSettings(Path("x"), window=0).check()
