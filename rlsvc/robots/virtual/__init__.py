"""Virtual hardware: it speaks the real wire protocols, so that real driver code runs against it."""

import os

# MuJoCo reads it when it is imported, and its own choice needs a display.
if not os.environ.get("DISPLAY"):
    os.environ.setdefault("MUJOCO_GL", "egl")
