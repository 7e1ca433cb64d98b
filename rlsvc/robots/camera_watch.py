"""Cameras that deliver, but not what they see: black frames, and one frame again and again.

Letters: H height, W width.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from rlsvc.robots.api import ConnectionLost

DARK = 16
"""Brightest value, of 255, that a frame may have and still be black: the noise of a covered sensor stays below."""


def boot_id() -> str:
    """What tells this host's monotonic clock from any other's; "" where the system does not say."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""


def is_black(frame: np.ndarray) -> bool:
    """Whether a frame [H, W, 3] uint8 shows nothing at all."""
    return int(frame.max(initial=0)) <= DARK


class CameraWatch:
    """Looks at every reading of a robot for cameras that have gone blind.

    A camera is frozen when its frames were the same, byte by byte, over more than `frozen_s` in which other cameras or
    the joints went on changing: a sensor's noise makes no two frames alike, but a simulator's frames of a scene at rest
    are. It is black when nothing in its frames was brighter than DARK for more than `black_s`.
    """

    def __init__(self, frozen_s: float = 1.0, black_s: float = 1.0) -> None:
        self._frozen_s, self._black_s = frozen_s, black_s
        self._last: dict[str, np.ndarray] = {}
        self._stirred: dict[str, float] = {}  # when others changed first since the camera's last change
        self._dark: dict[str, float] = {}  # since when the camera has been black

    def check(self, values: Mapping[str, np.ndarray], now: float) -> None:
        """Look at one reading.

        Args:
            values: by name `observation.state` and images [H, W, 3] uint8, as in Reading.
            now: `time.monotonic()`, s.

        Raises:
            ConnectionLost: a camera is black or frozen; names it.
        """
        changed = {name for name, value in values.items() if self._is_new(name, value)}
        for name in values:
            if values[name].dtype != np.uint8:
                continue
            if name in changed:
                self._stirred.pop(name, None)
                if not is_black(values[name]):
                    self._dark.pop(name, None)
                else:
                    self._dark.setdefault(name, now)
            elif changed - {name} and now - self._stirred.setdefault(name, now) > self._frozen_s:
                raise ConnectionLost(
                    f"camera '{_short(name)}' is frozen: the same frame for more than {self._frozen_s:g} s while "
                    f"'{_short(min(changed))}' changed. Plug it in again."
                )
            if name in self._dark and now - self._dark[name] > self._black_s:
                raise ConnectionLost(
                    f"camera '{_short(name)}' has been black for more than {self._black_s:g} s: no value is above "
                    f"{DARK} of 255. Is something before the lens?"
                )

    def _is_new(self, name: str, value: np.ndarray) -> bool:
        last, self._last[name] = self._last.get(name), value
        return last is None or (value is not last and not np.array_equal(value, last))


def _short(name: str) -> str:
    return name.removeprefix("observation.images.").removeprefix("observation.")
