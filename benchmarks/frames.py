"""
Stacked images of Atari's games: memory, and the time of ``add`` and ``sample``, in each buffer.

Run from the root of a checkout: ``python -m benchmarks.frames`` (extras ``atari``, ``compression``
and ``bench``). All buffers store the same stream of random play. Where sb3-extra-buffers is
installed, it takes part. With ``--write``, the tables go into ``docs/atari.md``, too, and all times
into ``benchmarks/frames.json`` (pyperf's form).
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyperf
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer

from benchmarks.race import Race
from sb3_per import PrioritizedFrameReplayBuffer

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "atari.md"
RESULTS = ROOT / "benchmarks" / "frames.json"

GAMES = ["Pong", "Breakout", "Seaquest", "MsPacman"]
IMAGES = spaces.Box(0, 255, (4, 84, 84), np.uint8)
ACTIONS = spaces.Discrete(6)
SB3, FRAMES, ZSTD = "SB3's ReplayBuffer", "frames", "frames, zstd"
EXTRA = "sb3-extra-buffers, zstd5"

Step = tuple[Any, ...]


def _extra(n: int) -> ReplayBuffer:
    from sb3_extra_buffers.compressed import CompressedReplayBuffer

    buffer: ReplayBuffer = CompressedReplayBuffer(
        n, IMAGES, ACTIONS, "cpu", compression_method="zstd5"
    )
    return buffer


MAKERS: dict[str, Callable[[int], ReplayBuffer]] = {
    SB3: lambda n: ReplayBuffer(n, IMAGES, ACTIONS, "cpu"),
    FRAMES: lambda n: PrioritizedFrameReplayBuffer(n, IMAGES, ACTIONS, "cpu", frame_stack=4),
    ZSTD: lambda n: PrioritizedFrameReplayBuffer(
        n, IMAGES, ACTIONS, "cpu", frame_stack=4, compression="zstd"
    ),
    EXTRA: _extra,
}


def available() -> list[str]:
    """:return: names of the buffers that can be made here"""
    names = []
    for name, make in MAKERS.items():
        try:
            make(10)
        except ImportError:
            continue
        names.append(name)
    return names


def play(game: str, n: int, path: Path) -> None:
    """
    :param game: such as ``"Pong"``
    :param n: number of steps of random play
    :param path: file for the frames, and where episodes begin and end
    """
    import ale_py
    import gymnasium as gym
    from stable_baselines3.common.env_util import make_atari_env

    gym.register_envs(ale_py)
    env = make_atari_env(f"{game}NoFrameskip-v4", seed=1)
    env.action_space.seed(1)
    frames = [env.reset()[0, :, :, 0].copy()]
    # Whether a frame is the first of an episode, and the last
    first, last = [True], [False]
    for _ in range(n):
        obs, _, dones, infos = env.step(np.array([env.action_space.sample()]))
        if dones[0]:
            frames.append(infos[0]["terminal_observation"][:, :, 0])
            first.append(False)
            last.append(True)
        frames.append(obs[0, :, :, 0].copy())
        first.append(bool(dones[0]))
        last.append(False)
    env.close()
    np.savez(path, frames=np.array(frames), first=first, last=last)


def steps_of(path: Path) -> Iterator[Step]:
    """
    :param path: file that :func:`play` wrote
    :return: arguments of ``add``, again and again, in the order of the axes and of the memory that
        a model of SB3 gives them
    """
    stored = np.load(path)
    frames, first, last = stored["frames"], stored["first"], stored["last"]
    while True:
        stack = np.zeros((1, 84, 84, 4), np.uint8)
        for frame, is_first, is_last in zip(frames, first, last, strict=True):
            if is_first:
                stack = np.zeros_like(stack)
                stack[0, :, :, -1] = frame
                continue
            before, stack = stack, np.roll(stack, -1, axis=-1)
            stack[0, :, :, -1] = frame
            obs, next_obs = before.transpose(0, 3, 1, 2), stack.transpose(0, 3, 1, 2)
            yield obs, next_obs, np.zeros(1, int), np.zeros(1), np.array([is_last]), [{}]


def resident() -> int:
    """:return: memory of this process in bytes, as the system counts it"""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def counted(buffer: ReplayBuffer) -> int:
    """
    :param buffer: any
    :return: bytes of its arrays, and of the objects in them
    """
    if isinstance(buffer, PrioritizedFrameReplayBuffer):
        return buffer.nbytes
    arrays = [array for array in vars(buffer).values() if isinstance(array, np.ndarray)]
    objects = (content for array in arrays if array.dtype == object for content in array.flat)
    return sum(array.nbytes for array in arrays) + sum(map(sys.getsizeof, objects))


def grown_by(name: str, path: Path, n: int) -> tuple[int, int]:
    """
    :param name: of a buffer
    :param path: file that :func:`play` wrote
    :param n: transitions to be stored, as many as it can hold
    :return: by how many bytes the process grows, and how many of them the buffer counts
    """
    steps = steps_of(path)
    warm = MAKERS[name](64)
    for _ in range(100):
        warm.add(*next(steps))
    warm.sample(32)
    before = resident()
    buffer = MAKERS[name](n)
    for _ in range(n):
        buffer.add(*next(steps))
    return resident() - before, counted(buffer)


def memory_of(name: str, path: Path, n: int) -> tuple[int, int]:
    """
    :param name: of a buffer
    :param path: file that :func:`play` wrote
    :param n: transitions
    :return: the same as :func:`grown_by`, in a process of its own
    """
    command = [sys.executable, "-m", "benchmarks.frames", "--grow", name, str(path), str(n)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    grown, of_buffer = map(int, out.split()[-2:])
    return grown, of_buffer


def races(game: str, path: Path, names: list[str], n: int, rounds: int) -> list[Race]:
    """
    :param game: such as ``"Pong"``
    :param path: file that :func:`play` wrote
    :param names: of the buffers
    :param n: transitions in each
    :param rounds: of each race
    :return: times of ``sample(32)`` and of ``add``
    """
    buffers = {name: MAKERS[name](n) for name in names}
    steps = steps_of(path)
    for _ in range(n + n // 10):
        step = next(steps)
        for buffer in buffers.values():
            buffer.add(*step)
    streams = {name: steps_of(path) for name in names}
    # Made beforehand: what is timed is `add`
    ready: dict[str, list[Step]] = {
        name: [step for _, step in zip(range(1000), stream, strict=False)]
        for name, stream in streams.items()
    }
    places = dict.fromkeys(names, 0)

    def adding(name: str) -> Callable[[], None]:
        add = buffers[name].add

        def one() -> None:
            add(*ready[name][places[name] % 1000])
            places[name] += 1

        return one

    def sampling(name: str) -> Callable[[], Any]:
        return lambda: buffers[name].sample(32)

    return [
        _race(f"{what}, {game}", {name: make(name) for name in names}, loops, rounds)
        for what, make, loops in (("sample(32)", sampling, 40), ("add", adding, 400))
    ]


def _race(title: str, contestants: dict[str, Callable[[], Any]], loops: int, rounds: int) -> Race:
    """
    :param title: what is timed
    :param contestants: from names to what to call
    :param loops: how often to call it in a turn
    :param rounds: how many times each has its turn
    :return: all times, of the processor: others may use it meanwhile
    """
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(rounds):
        for name in np.roll(list(contestants), turn).tolist():
            started = time.thread_time()
            for _ in range(loops):
                contestants[name]()
            times[name].append((time.thread_time() - started) / loops)
    return Race(title, times)


def tables(options: argparse.Namespace, all_races: list[Race]) -> Iterator[str]:
    """
    :param options: of the command line
    :param all_races: gets the races
    :return: lines of the tables
    """
    names = available()
    with tempfile.TemporaryDirectory() as folder:
        paths = {game: Path(folder) / f"{game}.npz" for game in options.games}
        for game, path in paths.items():
            play(game, options.steps, path)
        yield (
            f"Memory that the process grows by for {options.memory:,} transitions, in MB, and how "
            "much of it the buffer counts:"
        )
        yield ""
        yield f"| game | {' | '.join(name for name in names if name != SB3)} |"
        yield "|---" * len(names) + "|"
        for game, path in paths.items():
            weighed = [memory_of(name, path, options.memory) for name in names if name != SB3]
            cells = [f"{grown / 1e6:,.0f}, {own / 1e6:,.0f}" for grown, own in weighed]
            yield f"| {game} | {' | '.join(cells)} |"
        results = {}
        for game, path in paths.items():
            results[game] = races(game, path, names, options.size, options.rounds)
            all_races += results[game]
        for number, what in enumerate(("sample(32)", "add")):
            yield ""
            yield f"Processor time of `{what}` in a buffer of {options.size:,}; how many times that of SB3:"
            yield ""
            yield f"| game | SB3, µs | {' | '.join(name for name in names if name != SB3)} |"
            yield "|---" * (len(names) + 1) + "|"
            for game in paths:
                race = results[game][number]
                cells = [str(race.ratio(name, SB3)) for name in names if name != SB3]
                yield f"| {game} | {1e6 * race.median(SB3):,.0f} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--games", nargs="+", choices=GAMES, default=GAMES)
    parser.add_argument("--steps", type=int, default=8_000, help="of random play, repeated")
    parser.add_argument("--memory", type=int, default=20_000, help="transitions to be weighed")
    parser.add_argument("--size", type=int, default=20_000, help="transitions while timing")
    parser.add_argument("--rounds", type=int, default=11, help="turns of each buffer")
    parser.add_argument("--write", action="store_true", help="into docs/atari.md and frames.json")
    parser.add_argument("--grow", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    th.set_num_threads(1)
    if options.grow:
        name, path, n = options.grow
        print(*grown_by(name, Path(path), int(n)))
        return
    all_races: list[Race] = []
    text = ""
    for line in tables(options, all_races):
        print(line, flush=True)
        text += line + "\n"
    if options.write:
        page = PAGE.read_text(encoding="utf-8")
        marks = "<!-- frames -->\n", "<!-- end of frames -->"
        pattern = re.compile(f"{re.escape(marks[0])}.*?{re.escape(marks[1])}", re.DOTALL)
        PAGE.write_text(pattern.sub(lambda _: marks[0] + text + marks[1], page), encoding="utf-8")
        results = [benchmark for race in all_races for benchmark in race.benchmarks()]
        pyperf.BenchmarkSuite(results).dump(str(RESULTS), replace=True)


if __name__ == "__main__":
    main()
