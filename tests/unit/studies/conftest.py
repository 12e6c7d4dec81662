from pathlib import Path

import pandas as pd
import pytest


class ScoredRuns:
    """Writes ``runs.csv`` of a study whose runs have given scores."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, scores: dict[tuple[str, str], list[float]]) -> Path:
        """
        :param scores: by task and agent, for the seeds from 0 on; NaN where a run is missing
        :return: the folder
        """
        rows = [
            (task, agent, seed, 100, 10, 1.0, f"-7 {score - 1} {score + 1}")
            for (task, agent), values in scores.items()
            for seed, score in enumerate(values)
            if score == score
        ]
        columns = ["task", "agent", "seed", "steps", "episodes", "seconds", "returns"]
        pd.DataFrame(rows, columns=columns).to_csv(self.folder / "runs.csv", index=False)
        return self.folder


@pytest.fixture
def scored(tmp_path: Path) -> ScoredRuns:
    return ScoredRuns(tmp_path)
