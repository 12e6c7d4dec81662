"""``sb3-per compare`` and ``sb3-per plot``."""

import sys
from typing import Any

import gymnasium as gym

from sb3_per.compare.agents import parse_agent, parse_agents
from sb3_per.compare.hyperparams import DEFAULT_FILE, full_env_id, load_hyperparams
from sb3_per.compare.pictures import draw
from sb3_per.compare.pipeline import command, make_missing
from sb3_per.compare.report import render_report, summary_rows
from sb3_per.compare.settings import CompareSettings, PlotSettings
from sb3_per.compare.store import Store, package_versions, writing
from sb3_per.compare.summary import Comparison, summarize
from sb3_per.compare.training import Run, train, try_out

__all__ = ["main", "plan", "plot", "write_results"]


@command("sb3-per compare")
def main(settings: CompareSettings) -> int:
    """
    Make the runs that are missing, then write tables, pictures and the report.

    :param settings: what to compare
    :return: exit code: 0, 1 if runs failed, 2 if the settings can't be used, 130 if stopped
    """
    runs, agreed = plan(settings)
    store = Store(settings.folder)
    with store.lock():
        _warn_of_other_versions(store)
        store.agree_on(agreed)
        store.remove_damaged()
        return make_missing(
            store,
            runs,
            train,
            lambda: write_results(store),
            jobs=settings.jobs,
            backend=settings.backend,
            address=settings.address,
        )


@command("sb3-per plot")
def plot(settings: PlotSettings) -> int:
    """
    Draw pictures and report again, from the tables alone.

    :param settings: folder of the comparison, and options of the pictures
    :return: exit code: 0, or 2 if there is no comparison
    """
    settings.check()
    store = Store(settings.folder)
    # Before the lock, which would create the folder
    store.settings()
    with store.lock(), writing(store.folder):
        write_results(store, threshold=settings.threshold, window=settings.window)
    return 0


def plan(settings: CompareSettings) -> tuple[list[Run], dict[str, Any]]:
    """
    Check everything that can be checked without training. Nothing is written.

    :param settings: what to compare
    :return: all runs, including finished ones, and the settings for the folder of the comparison
    :raises SettingsError: if a setting can't be used
    """
    settings.check()
    agents = parse_agents(settings.agents)
    environments = {}
    for name in settings.envs:
        env_id = full_env_id(name)
        is_continuous = all(agent.is_actor_critic for agent in agents)
        environments[env_id] = _hyperparams(settings, env_id, is_continuous)
        for agent in agents:
            agent.check(environments[env_id])
    in_common: dict[str, Any] = {
        "n_evals": settings.n_evals,
        "eval_episodes": settings.eval_episodes,
        "snapshot_episodes": sorted(set(settings.snapshot_episodes)),
        "n_snapshots": settings.n_snapshots,
        "max_transitions": settings.max_transitions,
        "device": settings.device,
    }
    thresholds = {
        env_id: _threshold(settings, env_id, hyperparams.pop("threshold", None))
        for env_id, hyperparams in environments.items()
    }
    for env_id, hyperparams in environments.items():
        try_out(env_id, hyperparams, agents, settings.seeds[-1], settings.device)
    runs = [
        Run(
            env_id,
            str(agent),
            seed,
            hyperparams,
            **{**in_common, "snapshot_episodes": tuple(in_common["snapshot_episodes"])},
        )
        for env_id, hyperparams in environments.items()
        for seed in settings.seeds
        for agent in agents
    ]
    return runs, {
        "environments": environments,
        "agents": [str(agent) for agent in agents],
        "seeds": list(settings.seeds),
        "run": in_common,
        "analysis": {"window": settings.window, "thresholds": thresholds},
        "versions": package_versions(),
    }


def _hyperparams(settings: CompareSettings, env_id: str, is_continuous: bool) -> dict[str, Any]:
    hyperparams = load_hyperparams(settings.hyperparams or DEFAULT_FILE, env_id, is_continuous)
    n_timesteps = settings.timesteps or round(hyperparams["n_timesteps"] * settings.share)
    hyperparams["n_timesteps"] = max(n_timesteps, 1)
    return hyperparams


def _threshold(settings: CompareSettings, env_id: str, in_file: float | None) -> float | None:
    if settings.threshold is not None:
        return settings.threshold
    return gym.spec(env_id.rpartition(":")[2]).reward_threshold if in_file is None else in_file


def _warn_of_other_versions(store: Store) -> None:
    if not (store.folder / "settings.json").exists():
        return
    there, now = store.settings()["versions"], package_versions()
    changes = [
        f"{name} {there.get(name, 'missing')}, now {now.get(name, 'missing')}"
        for name in {**there, **now}
        if there.get(name) != now.get(name)
    ]
    if changes:
        print(f"{store.folder} has runs made with {'; '.join(changes)}", file=sys.stderr)


def write_results(
    store: Store, threshold: float | None = None, window: int | None = None
) -> Comparison:
    """
    Write ``summary.csv``, the pictures and ``report.html``, and print the summary.

    :param store: folder with the tables
    :param threshold: threshold that replaces those of the settings
    :param window: window that replaces that of the settings
    :return: the comparison
    :raises SettingsError: if there are no tables
    """
    settings = store.settings()
    analysis = settings["analysis"]
    if threshold is not None:
        analysis["thresholds"] = dict.fromkeys(settings["environments"], threshold)
    if window is not None:
        analysis["window"] = window
    comparison = Comparison(store.read_tables(), settings)
    summary = summarize(comparison)
    store.write_text("summary.csv", summary.to_csv(index=False))
    pictures = draw(comparison, store.folder / "pictures")
    store.write_text("report.html", render_report(comparison, summary, pictures, store.failures()))
    for env_id in comparison.env_ids:
        _print_summary(comparison, summary, env_id)
    print(f"\n{len(pictures)} pictures, the first of them: {pictures[0][1]}")
    print(f"The page with all of them: {store.folder / 'report.html'}")
    return comparison


def _print_summary(comparison: Comparison, summary: Any, env_id: str) -> None:
    agents = comparison.agents(env_id)
    rows = [("", *(parse_agent(agent).label for agent in agents))]
    rows += [(row["title"], *row["cells"]) for row in summary_rows(summary, env_id, agents)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(agents) + 1)]
    print(f"\n{env_id}")
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
