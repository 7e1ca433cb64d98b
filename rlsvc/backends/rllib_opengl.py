"""Imported before RLlib, which imports dm_control, which chooses its OpenGL at once: see `settle_opengl`."""

from rlsvc.envs.opengl import settle_opengl

settle_opengl()
