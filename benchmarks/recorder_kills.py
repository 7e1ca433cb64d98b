"""Kill a recorder at random bytes and moments, and count acknowledged episodes that are lost or unreadable.

    python benchmarks/recorder_kills.py [--kills 300] [--seed 0] [--no-store]

A child records short episodes with two cameras and says over a pipe which of them `end_episode` acknowledged. It dies

- of SIGKILL at a random moment,
- of SIGKILL just before or just after a random rename, fsync, mkdir or unlink, or
- of SIGXFSZ at a random byte of a file (RLIMIT_FSIZE); the encoder's process finds the disk full instead.

Nothing is mended after it: LeRobot's own reader and rlsvc's open what lies there, and every value of every acknowledged
episode is compared with what was recorded, numbers exactly and each image with its own. A few kills later the next
child goes on in the same dataset. An episode that was not acknowledged may be there, but only whole.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import resource
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import numpy as np
from common import write_result
from rich.console import Console

from rlsvc.core.contract import Feature
from rlsvc.core.types import EpisodeTable
from rlsvc.data.check import check_path
from rlsvc.data.lerobot_meta import read_meta
from rlsvc.data.load import load_table
from rlsvc.data.recorder import EpisodeLostError, Recorder
from rlsvc.spec.data import DatasetSpec

FPS = 20
JOINTS = ("pan", "lift", "grip")
CAMERAS = ("observation.images.front", "observation.images.wrist")
OBSERVATION = {
    "observation.state": Feature((3,), "float32", "rad", JOINTS),
    **dict.fromkeys(CAMERAS, Feature((48, 64, 3), "uint8")),
}
ACTION = Feature((3,), "float32", "rad", JOINTS)
KINDS = ("moment", "call", "byte")
CALLS = ("rename", "replace", "fsync", "mkdir", "unlink")
KILLS_PER_DATASET = 5
EPISODES_PER_CHILD = 4
DEADLINE_S = 60.0
IMAGE_TOLERANCE = 6.0
"""Mean absolute error of a decoded image; two images that were recorded differ by 50 and more."""


@dataclass
class Recorded:
    """What an episode holds: columns [N, ...] as a reader must give them, images included, and the task."""

    columns: dict[str, np.ndarray]
    task: str

    @property
    def length(self) -> int:
        """N."""
        return len(self.columns["action"])


def episode(seed: int) -> Recorded:
    """The episode of a seed: 3 to 9 steps; each image is 12 blocks of colours that no other image has."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(3, 10))
    action = rng.normal(size=(n, 3)).astype(np.float32)
    blocks = rng.integers(0, 256, (len(CAMERAS), n, 3, 4, 3), np.uint8)
    images = blocks.repeat(16, axis=2).repeat(16, axis=3)
    success = bool(rng.integers(2))
    last = np.arange(n) == n - 1
    columns = {
        "observation.state": rng.normal(size=(n, 3)).astype(np.float32),
        **{camera: images[i] for i, camera in enumerate(CAMERAS)},
        "action": action,
        "commanded": action * 2,
        "intervention": rng.integers(0, 2, n).astype(bool),
        "actor": np.array([f"policy-{seed}" if i % 2 else "anna" for i in range(n)], object),
        "reward": rng.normal(size=n).astype(np.float32),
        "reward_source": np.array(["environment"] * n, object),
        "next.done": last,
        "next.success": last & success,
        # Twentieths and eighths of a second, which float32 and float64 hold alike once the start is taken away.
        "capture_time": np.stack([np.arange(n) / 8 + k / 16 for k in range(3)], 1).astype(np.float32),
    }
    return Recorded(columns, f"task {seed % 3}")


def record(path: Path, seeds: list[int], kind: str, after: int, at: int, pipe: Connection) -> None:
    """The child: records the episodes of these seeds, and says ("ack", seed, index) when one is acknowledged.

    Args:
        path: of the dataset.
        seeds: of the episodes.
        kind: one of KINDS.
        after: so many episodes are recorded before the fault is armed; 0 arms it before the recorder opens.
        at: which call, or which byte of a file.
        pipe: to the parent.
    """
    if after == 0:
        _arm(kind, at)
    with Recorder(path, OBSERVATION, ACTION, FPS, "toy arm") as recorder:
        for done, seed in enumerate(seeds):
            if done == after > 0:
                _arm(kind, at)
            made = episode(seed)
            names = [key for key in made.columns if not key.startswith("next.") and key != "capture_time"]
            for i in range(made.length):
                step = {key: made.columns[key][i] for key in names}
                stamps = {k: 1000.0 + float(made.columns["capture_time"][i, j]) for j, k in enumerate(OBSERVATION)}
                recorder.add(step, stamps)
            try:
                index = recorder.end_episode("success" if made.columns["next.success"].any() else "failure", made.task)
            except EpisodeLostError:
                break  # the encoder was over the limit
            pipe.send(("ack", seed, index))
    pipe.send(("closed",))
    signal.pause()  # the kill comes after the end, too


def _arm(kind: str, at: int) -> None:
    if kind == "byte":
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (at, at))
    if kind == "call":
        _die_at_call(at)


def _die_at_call(at: int) -> None:
    """SIGKILL at the at-th of CALLS: before it where `at` is even, after it where it is odd."""
    count = 0

    def mortal(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            mine, count = count, count + 1
            if mine == at // 2 and at % 2 == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*arguments, **options)
            if mine == at // 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return wrapped

    for name in CALLS:
        setattr(os, name, mortal(getattr(os, name)))


@dataclass
class Count:
    """What came of the kills; `by_itself`: a call or a byte was deadly, not the parent at the end."""

    kills: Counter[str] = field(default_factory=Counter)
    by_itself: int = 0
    acknowledged: int = 0
    unacknowledged_there: int = 0
    lost: int = 0
    problems: list[str] = field(default_factory=list)


def kill_once(path: Path, seeds: list[int], kind: str, rng: random.Random) -> tuple[list[tuple[int, int]], bool]:
    """One child and its death; gives (seed, index) of what it acknowledged, and whether it died by itself."""
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe(duplex=False)
    at = {"moment": 0, "call": rng.randrange(2 * 60), "byte": rng.randrange(100, 30_000)}[kind]
    after = rng.randrange(EPISODES_PER_CHILD)
    child = context.Process(target=record, args=(path, seeds, kind, after, at, there), daemon=True)
    child.start()
    there.close()
    kill_at = time.monotonic() + (rng.uniform(0.0, 1.5) if kind == "moment" and after == 0 else DEADLINE_S)
    acknowledged = []
    while time.monotonic() < kill_at:
        try:
            if not here.poll(max(0.0, kill_at - time.monotonic())):
                continue
            said = here.recv()
        except EOFError:
            break
        if said[0] == "closed":
            break
        acknowledged.append(said[1:])
        if kind == "moment" and len(acknowledged) == after:
            kill_at = time.monotonic() + rng.uniform(0.0, 0.6)
    child.join(0.2 if kind != "moment" else 0.0)
    by_itself = child.exitcode in (-signal.SIGKILL, -signal.SIGXFSZ)
    child.kill()
    child.join()
    # What was still in the pipe was acknowledged too.
    try:
        while here.poll(0):
            said = here.recv()
            if said[0] == "ack":
                acknowledged.append(said[1:])
    except EOFError:
        pass
    return acknowledged, by_itself


def read_with_lerobot(path: Path, cache: Path) -> Iterator[Recorded]:
    """Episodes by LeRobot's own reader and its own video decoder."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    import datasets

    shutil.rmtree(cache, ignore_errors=True)
    datasets.config.HF_DATASETS_CACHE = cache
    dataset = LeRobotDataset("local/kills", root=path, video_backend="pyav", return_uint8=True)
    lengths = dataset.meta.episodes["length"][: dataset.meta.total_episodes]
    if sum(lengths) != len(dataset):
        raise ValueError(f"lengths of episodes sum to {sum(lengths)}, there are {len(dataset)} frames")
    first = 0
    for length in lengths:
        items = cast("list[dict[str, Any]]", [dataset[i] for i in range(first, first + length)])
        first += length
        columns: dict[str, np.ndarray] = {}
        for key in (*OBSERVATION, *episode(0).columns):
            cells = [item[key] for item in items]
            columns[key] = (
                np.array(cells, object) if isinstance(cells[0], str) else np.stack([np.asarray(c) for c in cells])
            )
            if key in CAMERAS:
                columns[key] = columns[key].transpose(0, 2, 3, 1)
        yield Recorded(columns, items[0]["task"])


def read_with_rlsvc(path: Path) -> Iterator[Recorded]:
    """Episodes by our reader."""
    read_meta(path)
    table: EpisodeTable = load_table(DatasetSpec.model_validate({"path": str(path)}))
    shutil.rmtree(path / ".rlsvc", ignore_errors=True)
    for i, start in enumerate(table.episode_starts):
        yield Recorded(table.episode(i), table.tasks[table.task[start]])


def difference(got: Recorded, expected: Recorded) -> str:
    """What differs; "" when nothing does."""
    if got.task != expected.task:
        return f"task '{got.task}', recorded '{expected.task}'"
    for key, column in expected.columns.items():
        mine = got.columns[key].reshape(got.length, *column.shape[1:])
        if mine.shape != column.shape:
            return f"{key} {mine.shape}, recorded {column.shape}"
        if key in CAMERAS:
            error = np.abs(mine.astype(np.float32) - column).mean(axis=(1, 2, 3)).max()
            if error > IMAGE_TOLERANCE:
                return f"{key} is off by {error:.1f}"
        elif not np.array_equal(mine, column):
            return f"{key} is not what was recorded"
    return ""


def examine(path: Path, acknowledged: list[tuple[int, int]], begun: list[int], cache: Path, count: Count) -> None:
    """Compare what both readers give with what is known; adds to `count`."""
    known = {seed: episode(seed) for seed in begun}
    by_state = {e.columns["observation.state"][0].tobytes(): seed for seed, e in known.items()}
    readers = {"LeRobot": lambda: read_with_lerobot(path, cache), "rlsvc": lambda: read_with_rlsvc(path)}
    bad: set[int] = set()
    for name, read in readers.items():
        if not acknowledged and not (path / "meta" / "info.json").exists():
            continue
        try:
            episodes = list(read())
            if not all(report.usable for report in check_path(path)):
                raise ValueError("the check says that it cannot be used")
        except Exception as error:
            count.problems.append(f"{name} cannot read {path}: {type(error).__name__}: {error}")
            bad |= {seed for seed, _ in acknowledged}
            continue
        for seed, index in acknowledged:
            what = difference(episodes[index], known[seed]) if index < len(episodes) else "is not there"
            if what:
                count.problems.append(f"{name}: episode {index}: {what}")
                bad.add(seed)
        indices = {index for _, index in acknowledged}
        for index, there in enumerate(episodes):
            if index not in indices:
                seed = by_state.get(there.columns["observation.state"][0].tobytes())
                what = "was never recorded" if seed is None else difference(there, known[seed])
                count.unacknowledged_there += name == "rlsvc"
                if what:
                    count.problems.append(f"{name}: unacknowledged episode {index}: {what}")
    count.lost += len(bad)


def run(kills: int, seed: int, folder: Path, say: Callable[[str], None]) -> Count:
    """All kills; each dataset takes a few."""
    rng, count, next_seed = random.Random(seed), Count(), seed * 1_000_000
    acknowledged: list[tuple[int, int]] = []
    begun: list[int] = []
    path = folder
    for kill in range(kills):
        if kill % KILLS_PER_DATASET == 0:
            shutil.rmtree(path, ignore_errors=True)
            path, acknowledged, begun = folder / f"dataset_{kill}", [], []
            folder.mkdir(exist_ok=True)
        seeds = list(range(next_seed, next_seed + EPISODES_PER_CHILD))
        next_seed += EPISODES_PER_CHILD
        kind = KINDS[kill % len(KINDS)]
        begun += seeds
        new, by_itself = kill_once(path, seeds, kind, rng)
        count.by_itself += by_itself
        acknowledged += new
        count.kills[kind] += 1
        count.acknowledged += len(new)
        before = len(count.problems)
        examine(path, acknowledged, begun, folder / "cache", count)
        for problem in count.problems[before:]:
            say(f"kill {kill} ({kind}): {problem}")
        if (kill + 1) % 10 == 0:
            say(f"{kill + 1} kills, {count.acknowledged} episodes acknowledged, {count.lost} lost")
    return count


def main() -> None:
    """Kill, count, print, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-store", action="store_true", help="print only, as with fewer than 300 kills")
    options = parser.parse_args()
    console = Console(soft_wrap=True)
    os.environ["HF_HUB_OFFLINE"] = "1"
    multiprocessing.set_forkserver_preload(["__main__", "pandas", "pyarrow.parquet", "av"])
    with tempfile.TemporaryDirectory() as folder:
        count = run(options.kills, options.seed, Path(folder) / "kills", console.print)
    console.print(
        f"{count.kills.total()} kills ({dict(count.kills)}, {count.by_itself} at a call or a byte): "
        f"{count.acknowledged} episodes acknowledged, "
        f"{count.lost} lost or unreadable; {count.unacknowledged_there} more were there whole"
    )
    if not options.no_store and options.kills >= 300:
        write_result(
            "recorder_episodes_lost", count.lost, "count over 300 kills",
            packages=("rlsvc", "lerobot", "av", "pyarrow"), seeds=[options.seed],
        )  # fmt: skip
    if count.problems or not count.acknowledged:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
