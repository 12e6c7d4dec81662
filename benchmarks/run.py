"""
Table of all speeds, as ratios, and picture of times against sizes.

Run from the root of a checkout: ``make bench``, or ``python -m benchmarks.run --only trees``.
Numbers are printed; with ``--write``, they also go to ``docs/performance.md``, its picture, and
``benchmarks/results.json`` (pyperf's format: ``python -m pyperf show benchmarks/results.json``).
"""

import argparse
import os
import platform
import re
import warnings
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import matplotlib as mpl
import pyperf

from benchmarks import buffers, learning, startup, trees
from benchmarks.race import Race, Ratio
from sb3_per import SumTree

mpl.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "performance.md"
PICTURE = ROOT / "docs" / "images" / "tree_speed.png"
RESULTS = ROOT / "benchmarks" / "results.json"
SECTIONS = ["trees", "sizes", "buffers", "train", "learn", "startup"]
VERSIONS = [
    "sb3-per",
    "stable-baselines3",
    "torch",
    "numpy",
    "numba",
    "gymnasium",
    "sumtree",
    "cpprb",
    "tianshou",
    "torchrl",
]
CAPACITIES = [1_000, 10_000, 100_000, 1_000_000, 10_000_000]
BATCH_SIZES = [1, 4, 16, 64, 256, 1024]
# Okabe and Ito's colors
STYLES = {
    trees.OURS: ("#0072B2", "o"),
    trees.BY_RANK: ("#56B4E9", "s"),
    "sumtree": ("#D55E00", "^"),
    "tianshou": ("#009E73", "v"),
    "cpprb": ("#CC79A7", "D"),
    "torchrl": ("#E69F00", "P"),
}


class Bench:
    """
    Measurements of one call, and their tables.

    :param rounds: number of rounds of each race
    :param seconds: length of a turn
    """

    def __init__(self, rounds: int, seconds: float) -> None:
        self.rounds = rounds
        self.seconds = seconds
        self.races: list[Race] = []
        self.missing = trees.available()
        self.names = [name for name in trees.MAKERS if name not in self.missing]

    def trees(self) -> Iterator[str]:
        """Draws and writes of the sum-tree against the other trees, at several sizes."""
        others = [name for name in self.names if name != trees.OURS]
        yield f"| | ours | {' | '.join(others)} |"
        yield "|---" * (len(others) + 2) + "|"
        medians: dict[tuple[int, int], float] = {}
        for (capacity, batch_size), names in {
            (10_000, 32): self.names,
            (1_000_000, 256): self.names,
            (10_000, 256): [trees.OURS, trees.BY_RANK],
            (10_000_000, 256): [trees.OURS, trees.BY_RANK],
        }.items():
            races = trees.race(capacity, batch_size, names, self.rounds, self.seconds)
            self.races += races.values()
            medians[capacity, batch_size] = sum(race.median(trees.OURS) for race in races.values())
            for what, race in races.items():
                cells = [
                    str(race.ratio(name, trees.OURS)) if name in names else "" for name in others
                ]
                label = f"{what}, {capacity:,} leaves, batch {batch_size}"
                ours = _microseconds(race.median(trees.OURS))
                yield f"| {label} | {ours} | {' | '.join(cells)} |"
        growth = medians[10_000_000, 256] / medians[10_000, 256]
        yield ""
        yield (
            f"- From 10,000 to 10,000,000 leaves, at batch 256, draw and write together take "
            f"{growth:.1f} times as long."
        )
        bytes_each = SumTree(1_000_000).nbytes / 1_000_000
        yield f"- Memory at 1,000,000 leaves: {bytes_each:.1f} bytes a leaf."
        for name, reason in self.missing.items():
            yield f"- `{name}` could not take part: {reason}"

    def sizes(self) -> Iterator[str]:
        """Picture of the times against capacity and batch size."""
        figure, axes = plt.subplots(2, 2, figsize=(9, 7), sharey=True, layout="constrained")
        for column, (label, pairs) in enumerate(
            {
                "leaves, at batch 256": [(capacity, 256) for capacity in CAPACITIES],
                "batch size, at 1,000,000 leaves": [(1_000_000, size) for size in BATCH_SIZES],
            }.items()
        ):
            curves: dict[tuple[str, str], list[float]] = {}
            for capacity, batch_size in pairs:
                races = trees.race(
                    capacity, batch_size, self.names, max(5, self.rounds // 3), self.seconds / 2
                )
                for what, race in races.items():
                    for name in self.names:
                        curves.setdefault((what, name), []).append(1e6 * race.median(name))
            places = [pair[column] for pair in pairs]
            for row, what in enumerate(("draw", "write")):
                for name in self.names:
                    color, marker = STYLES[name]
                    axes[row, column].loglog(
                        places, curves[what, name], color=color, marker=marker, label=name
                    )
                axes[row, column].set_xlabel(label)
                axes[row, column].grid(alpha=0.3)
                if column == 0:
                    axes[row, column].set_ylabel(f"{what} a batch (µs)")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))
        PICTURE.parent.mkdir(exist_ok=True)
        figure.savefig(PICTURE, dpi=110)
        yield (
            "![Time of a draw and of a write against the size of tree and batch, both axes "
            f"logarithmic](images/{PICTURE.name})"
        )

    def buffers(self) -> Iterator[str]:
        """``sample(32)`` against SB3's buffers."""
        yield "| buffer | ours, `sample(32)` | SB3's, uniform | ours, with `update_priorities` |"
        yield "|---|---|---|---|"
        for title, case in buffers.CASES.items():
            race = buffers.race(case, f"sample, {title}", 32, self.rounds, self.seconds)
            self.races.append(race)
            ours, theirs, both = "ours, sample", "SB3, sample", "ours, sample and update_priorities"
            yield (
                f"| {title}, {case.capacity:,} | {_microseconds(race.median(ours))} | "
                f"{race.ratio(theirs, ours)} | {race.ratio(both, ours)} |"
            )

    def train(self) -> Iterator[str]:
        """Gradient steps with a batch of 32 alone."""
        yield "| policy | PERDQN, a gradient step | DQN | DQN over `compiled=False` |"
        yield "|---|---|---|---|"
        for policy in ("MlpPolicy", "CnnPolicy", "MultiInputPolicy"):
            race = learning.race_train(policy, self.rounds)
            self.races.append(race)
            yield (
                f"| {policy} | {_microseconds(race.median(learning.OURS) / 4)} | "
                f"{race.ratio(learning.ORIGINAL, learning.OURS)} | "
                f"{race.ratio(learning.ORIGINAL, learning.PLAIN)} |"
            )

    def learn(self) -> Iterator[str]:
        """Whole training on CartPole-v1."""
        yield (
            "| CartPole-v1 | steps a second | SB3's time over ours | over `compiled=False` | "
            "by rank | tianshou's |"
        )
        yield "|---|---|---|---|---|---|"
        steps = 400
        for case in learning.CASES:
            race = learning.race(case, self.rounds, steps)
            self.races.append(race)
            speed = steps * case.train_freq * case.n_envs / race.median(learning.OURS)
            peer = race.ratio("tianshou", learning.OURS) if "tianshou" in race.seconds else ""
            yield (
                f"| {case} | {speed:,.0f} | {race.ratio(learning.ORIGINAL, learning.OURS)} | "
                f"{race.ratio(learning.ORIGINAL, learning.PLAIN)} | "
                f"{race.ratio(learning.BY_RANK, learning.OURS)} | {peer} |"
            )

    def startup(self) -> Iterator[str]:
        """Imports and first calls, each in a fresh process."""
        rounds = max(3, self.rounds // 3)
        imports = startup.race_imports(rounds)
        first = startup.race_first_calls(rounds)
        self.races += [imports, first]
        yield "| process | seconds | |"
        yield "|---|---|---|"
        for name, of in (("sb3_per_envs", "gymnasium"), ("sb3_per", "stable_baselines3")):
            ratio: Ratio = imports.ratio(name, of)
            yield f"| `import {name}` | {imports.median(name):.2f} | {ratio} times `import {of}` |"
        for name in first.seconds:
            yield f"| {name} | {first.median(name):.2f} | |"


def _microseconds(seconds: float) -> str:
    return f"{1e6 * seconds:,.1f} µs"


def machine() -> str:
    """:return: description of the machine and the versions of packages"""
    found = []
    for package in VERSIONS:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return (
        f"{model}, {os.cpu_count()} cores, one thread; Python {platform.python_version()}, "
        f"{', '.join(found)}"
    )


def write(section: str, text: str) -> None:
    """
    Write a table between its marks in the page.

    :param section: name of the marks
    :param text: new text between them
    """
    page = PAGE.read_text(encoding="utf-8")
    marks = f"<!-- {section} -->\n", f"<!-- end of {section} -->"
    pattern = re.compile(f"{re.escape(marks[0])}.*?{re.escape(marks[1])}", re.DOTALL)
    PAGE.write_text(pattern.sub(lambda _: marks[0] + text + marks[1], page), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--rounds", type=int, default=15, help="turns of each contestant")
    parser.add_argument("--seconds", type=float, default=0.04, help="of a turn")
    parser.add_argument("--write", action="store_true", help="into the docs and results.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    learning.one_thread()
    bench = Bench(options.rounds, options.seconds)
    sections = {"machine": machine() + "\n"}
    print(sections["machine"])
    for section in options.only:
        lines = []
        print(f"## {section}")
        for line in getattr(bench, section)():
            print(line, flush=True)
            lines.append(line + "\n")
        sections[section] = "".join(lines)
    if options.write:
        for section, text in sections.items():
            write(section, text)
        results = [benchmark for race in bench.races for benchmark in race.benchmarks()]
        pyperf.BenchmarkSuite(results).dump(str(RESULTS), replace=True)


if __name__ == "__main__":
    main()
