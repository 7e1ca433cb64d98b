"""Which OpenGL MuJoCo's cameras draw with."""

from __future__ import annotations

import os

INSTALL = "apt install libegl1 libgl1-mesa-dri with MUJOCO_GL=egl, or libosmesa6 with MUJOCO_GL=osmesa"


def choose_opengl() -> bool:
    """Take EGL where there is no display and nobody chose: GLFW, MuJoCo's own choice, needs a display.

    Returns:
        Whether it had been chosen before, by a display or by `MUJOCO_GL`.
    """
    chosen = bool(os.environ.get("DISPLAY") or os.environ.get("MUJOCO_GL"))
    if not chosen:
        os.environ["MUJOCO_GL"] = "egl"
    return chosen
