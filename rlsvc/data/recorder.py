"""Record robot episodes into a LeRobot v3.0 dataset that is readable at every moment.

`end_episode` returns once the episode is in the dataset and on the disk: it is acknowledged, and no kill at any byte
loses it. LeRobot and rlsvc read the dataset as it lies there, also after a kill, before anyone opened it to record
again. An episode under way belongs to no one until then; a kill loses it and nothing else (see lerobot_append.py,
commit.py). Before the first acknowledged episode the folder is no dataset yet.

Letters: N steps, A action dimensions, H height, W width, K observations that have a time stamp.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np

from rlsvc.core.contract import TEXT, Feature
from rlsvc.core.errors import DatasetError, UserError, nearest
from rlsvc.data.commit import FULL
from rlsvc.data.encoder import MOST_SLOTS, Encoder, EncoderBehindError
from rlsvc.data.episode_stats import image_stats
from rlsvc.data.lerobot_append import LeRobotAppender
from rlsvc.data.video import count_frames

Outcome = Literal["success", "failure", "cut"]
OUTCOMES: tuple[Outcome, ...] = ("success", "failure", "cut")

FLAG, NUMBER, WORDS = Feature((), "bool"), Feature((), "float32"), Feature((), TEXT)
STEP: dict[str, Feature] = {
    "intervention": FLAG,
    "actor": WORDS,
    "reward": NUMBER,
    "reward_source": WORDS,
}
"""What every step says besides observation and action; `Recorder` explains each."""


class EpisodeLostError(UserError):
    """The episode under way could not be kept (disk full, video too slow). All acknowledged ones are whole."""


class CameraLostError(UserError):
    """A camera gives no new frames. The steps so far are kept: end the episode with them, or discard it."""


def step_features(observation: Mapping[str, Feature], action: Feature) -> dict[str, Feature]:
    """The columns of a recorded dataset.

    Args:
        observation: by name; the text `task` is left out, since LeRobot has a place of its own for it.
        action: [A].
    """
    seen = {key: feature for key, feature in observation.items() if key != "task"}
    return {
        **seen,
        "action": action,
        "commanded": action,
        **STEP,
        "next.done": FLAG,
        "next.success": FLAG,
        "capture_time": Feature((len(seen),), "float32", "s", tuple(seen)),
    }


class Recorder:
    """Records episodes of one robot into one dataset; see the module. Not for several threads at once.

    A dataset has these columns:
        observation.*: what was measured. Images [H, W, 3] uint8 become one mp4 a camera and episode.
        action: [A], what was sent after the guard, in the unit of its feature.
        commanded: [A], what was asked for before the guard.
        intervention: whether a person acted.
        actor: the policy's version, or the person's name.
        reward: float32.
        reward_source: where the reward comes from ("person", "environment", a classifier's version, "").
        next.done: true at the last step, unless the episode was cut.
        next.success: true at the last step of an episode that succeeded.
        capture_time: [K] float32, s since the episode's first capture, when each observation was measured; `names` says
            which. LeRobot's own `timestamp` is frame_index / fps, as its video lookup needs it.
    """

    def __init__(
        self,
        path: str | Path,
        observation: Mapping[str, Feature],
        action: Feature,
        fps: float,
        robot_type: str,
        *,
        camera_timeout_s: float = 1.0,
        queue_mb: int = 256,
    ) -> None:
        """Open a dataset to add to it, or begin one.

        Args:
            path: a new folder, or a LeRobot v3.0 dataset of the same robot.
            observation: features by name, those of images included.
            action: [A].
            fps: control rate, Hz.
            robot_type: kind of the robot ("so101"); datasets of different kinds are never mixed.
            camera_timeout_s: a camera whose newest frame is older than this beside the newest other measurement counts
                as lost.
            queue_mb: memory for frames that wait to be encoded, all cameras together.

        Raises:
            DatasetError: a folder of other things, or a dataset of another robot, rate or columns.
            BusyError: another process records into it.
        """
        features = step_features(observation, action)
        self._dataset = LeRobotAppender(Path(path), features, fps, robot_type)
        self._stamped = features["capture_time"].names
        self._given = {k: f for k, f in features.items() if k not in ("next.done", "next.success", "capture_time")}
        self._timeout = camera_timeout_s
        frame_bytes = sum(int(np.prod(features[camera].shape)) for camera in self._dataset.cameras)
        self._slots = min(max(2, queue_mb * 2**20 // max(frame_bytes, 1)), MOST_SLOTS)
        self._encoding = False
        self._steps: list[dict[str, Any]] = []
        self._stamps: list[list[float]] = []
        self._lost: CameraLostError | None = None
        self._encoders: dict[str, Encoder] = {}
        try:
            for camera in self._dataset.cameras:
                self._encoders[camera] = Encoder(features[camera].shape, fps, self._slots)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        """Itself; closed at the end."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Close."""
        self.close()

    @property
    def path(self) -> Path:
        """The dataset's folder."""
        return self._dataset.root

    @property
    def num_episodes(self) -> int:
        """Acknowledged episodes in the dataset."""
        return self._dataset.num_episodes

    @property
    def num_steps(self) -> int:
        """Steps of the episode under way."""
        return len(self._steps)

    def add(self, step: Mapping[str, Any], stamps: Mapping[str, float]) -> None:
        """Record a step; arrays are copied. It does not wait for disk or video.

        Args:
            step: by name one value for each column but `next.*` and `capture_time`, in the feature's shape.
            stamps: by observation when it was measured, s, all on one clock.

        Raises:
            DatasetError: a value is missing, unknown, of another shape or kind, or not finite; the step is not taken.
            CameraLostError: a camera gives no frames any more; this step and later ones are not taken.
            EpisodeLostError: the disk is full, or video encoding cannot keep up; the episode is given up.
        """
        if self._lost is not None:
            raise self._lost
        self._check_cameras(step, stamps)
        row = {key: self._check(key, feature, step) for key, feature in self._given.items()}
        unknown = [key for key in step if key not in self._given and key != "task"]
        if unknown:
            guess = nearest(unknown[0], self._given)
            hint = f" (did you mean '{guess}'?)" if guess else ""
            raise DatasetError(f"{self.path}: '{unknown[0]}' is no column of this dataset{hint}")
        times = [float(stamps[key]) for key in self._stamped]
        if not np.isfinite(times).all():
            raise DatasetError(f"{self.path}: step {self.num_steps} has a time stamp that is not finite: {stamps}")
        frames = {camera: row.pop(camera) for camera in self._dataset.cameras}
        if not self._steps:
            self._begin_videos()
        for camera, encoder in self._encoders.items():
            try:
                encoder.put(frames[camera])
            except EncoderBehindError:
                self.discard()
                raise EpisodeLostError(
                    f"{self.path}: video encoding of '{camera}' is {self._slots} frames behind, so the episode "
                    "was given up rather than drop frames; use smaller images, fewer cameras or a lower rate"
                ) from None
            except Exception as error:
                raise self._give_up(error) from error
        self._steps.append(row)
        self._stamps.append(times)

    def end_episode(
        self, outcome: Outcome, task: str, *, reward: float | None = None, reward_source: str | None = None
    ) -> int:
        """Put the episode into the dataset; returns when it is durable, which acknowledges it.

        Args:
            outcome: "success", "failure", or "cut" where it would have gone on (time is up, the connection is lost).
            task: the prompt.
            reward: in place of that of the last step, where it is known only now.
            reward_source: likewise.

        Returns:
            Its episode_index.

        Raises:
            DatasetError: no steps, an empty task, an outcome that there is not; the episode is still under way.
            EpisodeLostError: it could not be written; the dataset is as before.
        """
        if outcome not in OUTCOMES:
            raise DatasetError(f"outcome: got '{outcome}', expected one of {', '.join(OUTCOMES)}")
        if not task.strip():
            raise DatasetError("task: got an empty text, expected what the robot was to do, such as 'pick up the cup'")
        if not self._steps:
            raise DatasetError(f"{self.path}: an episode without a step cannot be ended; discard it")
        if reward is not None:
            self._steps[-1]["reward"] = self._check("reward", NUMBER, {"reward": reward})
        if reward_source is not None:
            self._steps[-1]["reward_source"] = reward_source
        try:
            stats = {}
            for camera, encoder in self._encoders.items():
                frames, histogram = encoder.finish()
                stats[camera] = image_stats(histogram, frames)
                if not frames == count_frames(encoder.path) == self.num_steps:
                    raise OSError(f"the video of '{camera}' has {frames} frames, {self.num_steps} were recorded")
            self._encoding = False
            videos = {camera: encoder.path for camera, encoder in self._encoders.items()}
            index = self._dataset.append(self._columns(outcome), videos, stats, [task] * len(self._steps))
        except DatasetError:
            self.discard()
            raise
        except Exception as error:
            raise self._give_up(error) from error
        self._forget()
        return index

    def discard(self) -> None:
        """Give up the episode under way."""
        if self._encoding:
            for encoder in self._encoders.values():
                encoder.abort()
        self._dataset.clear()
        self._forget()

    def close(self) -> None:
        """Discard what is under way, and let another process record. May be called twice."""
        for encoder in self._encoders.values():
            encoder.close()
        self._forget()
        self._dataset.close()

    def _forget(self) -> None:
        self._encoding, self._steps, self._stamps, self._lost = False, [], [], None

    def _begin_videos(self) -> None:
        self._encoding = True
        try:
            stage = self._dataset.begin()
            for i, encoder in enumerate(self._encoders.values()):
                encoder.begin(stage / f"{i}.mp4")
        except OSError as error:
            raise self._give_up(error) from error

    def _give_up(self, error: Exception) -> EpisodeLostError:
        self.discard()
        whole = f"the {self.num_episodes} episodes before it are whole"
        if isinstance(error, OSError) and error.errno in FULL:
            return EpisodeLostError(
                f"{self.path}: disk full ({error.strerror}): the episode under way was given up, {whole}; free some "
                "space and go on"
            )
        return EpisodeLostError(
            f"{self.path}: cannot be written ({error}): the episode under way was given up, {whole}"
        )

    def _check_cameras(self, step: Mapping[str, Any], stamps: Mapping[str, float]) -> None:
        missing = [key for key in self._stamped if key not in stamps]
        if missing:
            raise DatasetError(f"{self.path}: step {self.num_steps} lacks the time stamp of '{missing[0]}'")
        newest = max((stamps[key] for key in self._stamped), default=0.0)
        for camera in self._dataset.cameras:
            age = newest - stamps[camera]
            why = "gave no frame" if step.get(camera) is None else f"gave no new frame for {age:.2f} s"
            if step.get(camera) is None or age > self._timeout:
                self._lost = CameraLostError(
                    f"camera '{camera}' {why} at step {self.num_steps}: look at its cable and its power. The episode "
                    f"ends here; its {self.num_steps} steps can be kept or discarded"
                )
                raise self._lost

    def _check(self, key: str, feature: Feature, step: Mapping[str, Any]) -> Any:
        """One value as it is stored; a copy unless it is an image."""
        where = f"{self.path}: step {self.num_steps}, '{key}'"
        if key not in step:
            raise DatasetError(f"{where} is missing; got: {', '.join(step)}")
        if feature.dtype == TEXT:
            if not isinstance(step[key], str):
                raise DatasetError(f"{where} is {type(step[key]).__name__}, expected a text")
            return str(step[key])
        value, dtype = np.asarray(step[key]), np.dtype(feature.dtype)
        if value.shape != feature.shape and not (feature.shape == () and value.shape == (1,)):
            raise DatasetError(f"{where} has shape {value.shape}, expected {feature.shape}")
        if feature.is_image and value.dtype != np.uint8:
            raise DatasetError(f"{where} is {value.dtype}, expected uint8 in [0, 255]")
        if not np.can_cast(value.dtype, dtype, "same_kind"):
            raise DatasetError(f"{where} is {value.dtype}, expected {dtype}")
        if feature.is_image:
            return value
        with np.errstate(over="ignore"):
            stored = value.reshape(feature.shape).astype(dtype)
        if dtype.kind == "f" and not np.isfinite(stored).all():
            raise DatasetError(f"{where} has values that are not finite: {value.tolist()}")
        return stored

    def _columns(self, outcome: Outcome) -> dict[str, np.ndarray]:
        columns: dict[str, np.ndarray] = {}
        for key, feature in self._given.items():
            if not feature.is_image:
                cells = [step[key] for step in self._steps]
                columns[key] = np.array(cells, object) if feature.dtype == TEXT else np.stack(cells)
        last = np.arange(self.num_steps) == self.num_steps - 1
        columns["next.done"] = last & (outcome != "cut")
        columns["next.success"] = last & (outcome == "success")
        stamps = np.array(self._stamps, np.float64).reshape(self.num_steps, len(self._stamped))
        first = stamps.min() if stamps.size else 0.0
        columns["capture_time"] = (stamps - first).astype(np.float32)
        return columns
