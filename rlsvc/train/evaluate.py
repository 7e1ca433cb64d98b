"""Evaluation: episodes from seeds, one policy batch for all of them, intervals, and videos by replaying actions.

The batch that the policy sees is made of the episodes in the order of their seeds, whatever worker steps them, so the
result is the same for any number of workers.

Letters: E episodes, B batch, T observation steps, H actions of a chunk.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from rlsvc.core.errors import UserError
from rlsvc.core.types import MALFORMED
from rlsvc.envs.make import make_env
from rlsvc.runner import Runner, take_rows
from rlsvc.spec.env import EnvSpec
from rlsvc.train.workers import EpisodeResult, WorkerLost, Workers

log = logging.getLogger(__name__)

MAX_RETRIES = 3


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % confidence interval."""

    mean: float
    low: float
    high: float


def mean_interval(values: Sequence[float]) -> Interval:
    """Mean of independent values, normal approximation; with one value the interval is unbounded."""
    x = np.asarray(values, np.float64)
    half = 1.96 * x.std(ddof=1) / math.sqrt(len(x)) if len(x) > 1 else math.inf
    return Interval(float(x.mean()), float(x.mean() - half), float(x.mean() + half))


def share_interval(successes: int, count: int) -> Interval:
    """Share of successes, Wilson's score interval (1927)."""
    p, z2 = successes / count, 1.96**2
    center = (p + z2 / (2 * count)) / (1 + z2 / count)
    half = 1.96 / (1 + z2 / count) * math.sqrt(p * (1 - p) / count + z2 / (4 * count**2))
    return Interval(p, max(0.0, center - half), min(1.0, center + half))


def paired_share_interval(only_one: int, only_other: int, count: int) -> Interval:
    """Difference of two shares on the same trials: Wald's interval after half a trial in each of the four cells.

    Agresti and Min, "Simple improved confidence intervals for comparing matched proportions" (2005).

    Args:
        only_one: trials that the first alone won.
        only_other: likewise the second.
        count: of all trials.
    """
    n, difference = count + 2, only_one - only_other
    half = 1.96 * math.sqrt(only_one + only_other + 1 - difference**2 / n) / n
    return Interval(difference / count, max(-1.0, difference / n - half), min(1.0, difference / n + half))


@dataclass(frozen=True)
class Evaluation:
    """All episodes and what they come to."""

    episodes: list[EpisodeResult]

    def scores(self, metric: str) -> np.ndarray:
        """[E] float64; metric is max_reward, return, success or length."""
        pick = {
            "max_reward": lambda e: max(e.rewards, default=0.0),
            "return": lambda e: sum(e.rewards),
            "success": lambda e: float(e.success),
            "length": lambda e: float(e.length),
        }[metric]
        return np.array([pick(episode) for episode in self.episodes])

    def interval(self, metric: str) -> Interval:
        """95 % interval of a metric's mean."""
        scores = self.scores(metric)
        return share_interval(int(scores.sum()), len(scores)) if metric == "success" else mean_interval(scores.tolist())

    def minus(self, other: Evaluation, metric: str) -> Interval:
        """95 % interval of a metric's mean difference to another policy on the same starts, seed by seed."""
        assert [e.seed for e in self.episodes] == [e.seed for e in other.episodes], "pairs are of the same seeds"
        one, two = self.scores(metric), other.scores(metric)
        if metric == "success":
            return paired_share_interval(int((one > two).sum()), int((two > one).sum()), len(one))
        return mean_interval((one - two).tolist())

    def by_task(self) -> dict[str, Evaluation]:
        """The episodes of each task by its name, in the order in which they come; one "" where there is one task."""
        names = dict.fromkeys(episode.task for episode in self.episodes)
        return {name: Evaluation([e for e in self.episodes if e.task == name]) for name in names}

    def metrics(self) -> dict[str, float]:
        """Means with the bounds of their intervals, `<metric>`, `<metric>_low`, `<metric>_high`.

        Of several tasks each one's share of successes besides, `task_success/<task>`. The means are over episodes,
        which are those over tasks where each has as many.
        For a policy that says its actions as tokens also `malformed_chunks`, how many were none.
        """
        out: dict[str, float] = {"episodes": float(len(self.episodes))}
        for metric in ("max_reward", "success", "return", "length"):
            interval = self.interval(metric)
            out[metric] = interval.mean
            if math.isfinite(interval.low):
                out |= {f"{metric}_low": interval.low, f"{metric}_high": interval.high}
        tasks = self.by_task()
        if len(tasks) > 1:
            out |= {f"task_success/{name}": float(part.scores("success").mean()) for name, part in tasks.items()}
        counts = [e.malformed for e in self.episodes if e.malformed is not None]
        return out | ({"malformed_chunks": float(sum(counts))} if counts else {})

    def extremes(self, metric: str) -> dict[str, EpisodeResult]:
        """The best, median and worst episode; ties go to the smaller seed."""
        order = np.argsort(self.scores(metric), kind="stable")
        return {
            "worst": self.episodes[order[0]],
            "median": self.episodes[order[len(order) // 2]],
            "best": self.episodes[order[-1]],
        }


def evaluate(
    runner: Runner,
    workers: Workers,
    seeds: Sequence[int],
    parallel: int,
    *,
    finished: Callable[[list[EpisodeResult]], None] | None = None,
) -> Evaluation:
    """Run one episode for each seed.

    Args:
        runner: acts; compiled for batches of up to `parallel`.
        workers: step the episodes.
        seeds: of the episodes; the policy's noise at control step t follows from (seed, t).
        parallel: episodes side by side, over all workers.
        finished: told the episodes that have ended, whenever there are more.

    Raises:
        UserError: workers were lost in the same wave more than MAX_RETRIES times.
    """
    episodes: list[EpisodeResult] = []
    for start in range(0, len(seeds), parallel):
        wave = list(seeds[start : start + parallel])
        for attempt in range(MAX_RETRIES + 1):
            try:
                episodes += _wave(runner, workers, wave)
                break
            except WorkerLost as lost:
                log.warning("evaluation: %s; the wave runs again", lost, exc_info=lost.__cause__)
                if attempt == MAX_RETRIES:
                    raise UserError(
                        f"evaluation: {lost}, {MAX_RETRIES + 1} times with the seeds {wave[0]} to {wave[-1]}; "
                        "see the worker's log above"
                    ) from lost
        if finished is not None:
            finished(episodes)
    return Evaluation(episodes)


def _wave(runner: Runner, workers: Workers, seeds: list[int]) -> list[EpisodeResult]:
    shares = np.array_split(np.arange(len(seeds)), workers.count)
    owner = {int(e): (w, i) for w, share in enumerate(shares) for i, e in enumerate(share)}
    windows = [w for part in workers.call("reset", [([seeds[e] for e in share],) for share in shares]) for w in part]
    active = list(range(len(seeds)))
    malformed: list[int | None] = [None] * len(seeds)
    steps, carry = 0, None
    while active:
        observation = {key: np.stack([windows[e][key] for e in active]) for key in runner.contract.observation}
        answer = runner.act(observation, np.array([seeds[e] for e in active]), np.full(len(active), steps), carry)
        action = answer.action
        steps += action.shape[1]
        if (reasons := answer.extras.get(MALFORMED)) is not None:
            for reason, e in zip(reasons, active, strict=True):
                malformed[e] = (malformed[e] or 0) + bool(reason)
        # Without an action there is nothing to execute: the episode ends here, as a failure.
        given = [row for row in range(len(active)) if reasons is None or not reasons[row] or _finite(action[row])]
        chunks: list[dict[int, np.ndarray]] = [{} for _ in shares]
        for row in given:
            worker, index = owner[active[row]]
            chunks[worker][index] = action[row]
        out = workers.call("step", [(chunk,) for chunk in chunks])
        rows = []
        for row in given:
            e = active[row]
            worker, index = owner[e]
            windows[e], done = out[worker][index]
            if not done:
                rows.append(row)
        active = [active[row] for row in rows]
        carry = take_rows(answer.carry, rows)
    results = [result for part in workers.call("results", [() for _ in shares]) for result in part]
    return [replace(result, malformed=count) for result, count in zip(results, malformed, strict=True)]


def _finite(action: np.ndarray) -> bool:
    return bool(np.isfinite(action).all())


def batch_sizes(parallel: int) -> tuple[int, ...]:
    """Batch shapes to compile: `parallel`, and where that is small (on a CPU) a quarter of it for when few are left."""
    return tuple(sorted({parallel, max(1, parallel // 4)})) if parallel <= 64 else (parallel,)


def write_video(episode: EpisodeResult, spec: EnvSpec, path: Path) -> Path:
    """Replay an episode's actions from its seed and write an H.264 mp4 at the environment's rate.

    Raises:
        UserError: PyAV is not installed, or the episode's actions were not kept.
    """
    if not episode.actions:
        raise UserError(
            f"--videos: the actions of the episode with seed {episode.seed} are not stored with its scores; evaluate "
            "without --resume"
        )
    try:
        import av
    except ImportError as error:
        raise UserError("writing a video needs PyAV; install rlsvc[sim], or set evaluation.videos=false") from error
    env = make_env(spec)
    env.reset(seed=episode.seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = None
        for action in episode.actions:
            env.step(action)
            image = env.render()
            if stream is None:
                stream = container.add_stream("libx264", rate=int(env.metadata["render_fps"]))
                stream.width, stream.height, stream.pix_fmt = image.shape[1], image.shape[0], "yuv420p"
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        if stream is not None:
            container.mux(stream.encode())
    env.close()
    return path
