"""Which OpenGL MuJoCo's cameras draw with."""

from __future__ import annotations

import importlib
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


def settle_opengl() -> None:
    """Choose before somebody imports dm_control who does not (RLlib): by itself it takes GLFW, and no camera draws.

    Without a library for EGL it draws nothing, and everything else of it works.
    """
    if choose_opengl():
        return
    try:
        importlib.import_module("dm_control.rl.control")
    except ModuleNotFoundError:
        return
    except (ImportError, AttributeError, RuntimeError):  # what OpenGL's bindings raise without a library
        os.environ["MUJOCO_GL"] = "disabled"
