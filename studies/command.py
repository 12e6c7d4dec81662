"""``python -m studies``: make the runs of a study, and write its results."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from sb3_per.compare.pipeline import command, make_missing
from sb3_per.compare.settings import RunSettings, SettingsError
from studies import (
    actor_critics,
    blind_cliffwalk,
    confirmation,
    few_updates,
    hypotheses,
    task_map,
)
from studies.study import RunTable, Study, StudyRun

__all__ = ["STUDIES", "StudySettings", "main", "plan"]

PROGRAM = "python -m studies"

STUDIES: Mapping[str, Study] = {
    "blind-cliffwalk": blind_cliffwalk.STUDY,
    "map": task_map.STUDY,
    "few-updates": few_updates.STUDY,
    "hypotheses": hypotheses.STUDY,
    "confirmation": confirmation.STUDY,
    **actor_critics.STUDIES,
}


@dataclass(frozen=True)
class StudySettings(RunSettings):
    """
    Make the runs of a study behind docs/results.md, or the same with other seeds, and write its
    results: a line for each run, tables, pictures. The same command again makes the missing runs.

    :param study: `blind-cliffwalk`, `map`, `few-updates`, `hypotheses` or `confirmation`;
        planned, and not on that page yet: `td3-pendulum`, `td3-hopper`, `sac-pendulum`,
        `sac-hopper`
    :param tasks: tasks to run; all tasks of the study by default
    :param agents: agents to run; those of the study by default. Where networks learn, in the form
        of `sb3-per compare`
    :param base: agent that the others are compared with; by default that of docs/results.md
    :param n_seeds: number of runs of each agent on each task; those of the study by default
    :param output: folder for the results; `results/STUDY` by default. Those that the
        documentation shows are in docs/results/STUDY.
    """

    study: Annotated[str, tyro.conf.Positional]
    tasks: tuple[str, ...] = ()
    agents: tuple[str, ...] = ()
    base: str | None = None

    @property
    def default_n_seeds(self) -> int:
        """Number of seeds of the study."""
        return STUDIES[self.study].n_seeds

    @property
    def default_output(self) -> Path:
        """Folder of the study."""
        return Path("results") / self.study

    def check(self) -> None:
        """:raises SettingsError: if an option is out of its range"""
        super().check()
        if self.study not in STUDIES:
            raise SettingsError(f"there is no study {self.study!r}, only {', '.join(STUDIES)}")


def plan(settings: StudySettings) -> tuple[list[StudyRun], list[str], str | None]:
    """
    :param settings: settings of the command
    :return: all runs; their agents; the agent that the others are compared with
    :raises SettingsError: if a study, task or agent does not exist
    """
    settings.check()
    study = STUDIES[settings.study]
    agents = list(dict.fromkeys(map(study.agent_name, settings.agents or study.agents)))
    tasks = dict.fromkeys(settings.tasks or study.tasks)
    runs = [
        study.run_of(task, agent, seed)
        for seed in settings.seeds
        for task in tasks
        for agent in agents
    ]
    if study.base is None:
        if settings.base is not None:
            raise SettingsError(f"--base: the study {settings.study} compares with no agent")
        return runs, agents, None
    if settings.base is None:
        base = study.agent_name(study.base)
        return runs, agents, base if base in agents else agents[0]
    base = study.agent_name(settings.base)
    if base not in agents:
        raise SettingsError(f"--base {base} is none of the agents: {', '.join(agents)}")
    return runs, agents, base


@command(PROGRAM)
def main(settings: StudySettings) -> int:
    """
    :param settings: settings of the command
    :return: exit code: 0, 1 if runs failed, 2 if the settings can't be used, 130 if stopped
    """
    runs, agents, base = plan(settings)
    study = STUDIES[settings.study]
    table = RunTable(settings.folder)
    with table.lock():
        return make_missing(
            table,
            runs,
            study.make,
            lambda: print("\n".join(study.report(table.folder, agents, base))),
            jobs=settings.jobs,
        )
