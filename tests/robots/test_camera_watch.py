"""Cameras that are there and see nothing."""

from __future__ import annotations

import numpy as np
import pytest

from rlsvc.robots.api import ConnectionLost
from rlsvc.robots.camera_watch import CameraWatch, is_black

FRONT, WRIST, STATE = "observation.images.front", "observation.images.wrist", "observation.state"


def noisy(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(100, 140, (8, 8, 3), np.uint8)


def at(tick: int, front: np.ndarray, wrist: np.ndarray, state: float = 0.0) -> tuple[dict[str, np.ndarray], float]:
    return {FRONT: front, WRIST: wrist, STATE: np.full(6, state, np.float32)}, tick / 10


def test_a_camera_that_repeats_its_frame_while_another_changes_is_frozen() -> None:
    watch = CameraWatch(frozen_s=1.0)
    for tick in range(11):
        watch.check(*at(tick, noisy(0), noisy(tick)))
    watch.check(*at(11, noisy(0), noisy(11)))
    with pytest.raises(ConnectionLost, match=r"'front' is frozen: .* 1 s while 'wrist'"):
        watch.check(*at(13, noisy(0), noisy(13)))


def test_the_joints_give_a_single_frozen_camera_away() -> None:
    watch = CameraWatch(frozen_s=1.0)
    frame = noisy(0)
    for tick in range(12):
        watch.check({FRONT: frame, STATE: np.full(6, tick, np.float32)}, tick / 10)
    with pytest.raises(ConnectionLost, match="'front' is frozen"):
        watch.check({FRONT: frame, STATE: np.full(6, 12, np.float32)}, 1.25)


def test_a_scene_at_rest_is_not_frozen_nor_is_a_slow_camera() -> None:
    watch = CameraWatch(frozen_s=1.0)
    for tick in range(100):  # nothing changes at all
        watch.check(*at(tick, noisy(0), noisy(1)))
    for tick in range(100, 200):  # 1.25 Hz beside 10 Hz
        watch.check(*at(tick, noisy(tick // 8), noisy(tick), state=tick))


def test_one_stir_after_a_long_rest_is_not_held_against_a_camera() -> None:
    watch = CameraWatch(frozen_s=1.0)
    for tick in range(50):
        watch.check(*at(tick, noisy(0), noisy(1)))
    watch.check(*at(50, noisy(0), noisy(1), state=1.0))
    for tick in range(51, 80):
        watch.check(*at(tick, noisy(0), noisy(1), state=1.0))


def test_a_camera_that_stays_black_is_lost_and_one_that_blinks_is_not() -> None:
    dark = np.full((8, 8, 3), 12, np.uint8)
    watch = CameraWatch(frozen_s=60, black_s=1.0)
    for tick in range(30):
        watch.check(*at(tick, dark if tick % 9 else noisy(tick), noisy(tick)))
    for tick in range(30, 38):
        watch.check(*at(tick, dark, noisy(tick)))
    with pytest.raises(ConnectionLost, match="'front' has been black"):
        watch.check(*at(45, dark, noisy(45)))


def test_a_night_scene_is_not_black() -> None:
    frame = np.zeros((8, 8, 3), np.uint8)
    assert is_black(frame)
    frame[3, 4, 1] = 40
    assert not is_black(frame)
