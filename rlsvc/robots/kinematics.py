"""Where points of an arm are.

Letters: A action dimensions, J joints of the model, P points.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Callable
from typing import Any

import numpy as np

from rlsvc.core.contract import Feature
from rlsvc.core.errors import UserError, nearest
from rlsvc.robots.guard import Sites
from rlsvc.spec.guard import WorkspaceSpec

Points = Callable[[np.ndarray], np.ndarray]
"""Joints [J], rad, to points [P, 3], m."""
FILES = {"so101": "virtual/so101.xml"}
"""Models that come with rlsvc."""


def make_sites(spec: WorkspaceSpec, action: Feature) -> Sites:
    """Forward kinematics of the points that a workspace names.

    Args:
        spec: the workspace.
        action: of the robot, [A], with names.

    Returns:
        A function of an action [A] to points [P, 3] in the frame of the arm's base, m.

    Raises:
        UserError: a model that is not there or cannot be read; a joint or a point that it does not have.
    """
    if lost := next((name for name in spec.without if name not in action.names), None):
        raise UserError(f"guard.workspace.without: the robot has no '{lost}'; it has: {', '.join(action.names)}")
    moved = [i for i, name in enumerate(action.names) if name not in spec.without]
    names = [action.names[i].removesuffix(".pos") for i in moved]
    points = _cr5(spec, names) if spec.model == "cr5" else _mujoco(spec, names)
    scale = np.pi / 180 if spec.unit == "deg" else 1.0
    return lambda joints: points(joints[moved] * scale)


def _cr5(spec: WorkspaceSpec, names: list[str]) -> Points:
    from rlsvc.robots.virtual.cr5_kinematics import forward

    if spec.sites != ("flange",) or len(names) != 6:
        raise UserError(
            f"guard.workspace: cr5 has six joints and the point flange, got {len(names)} joints and "
            f"{', '.join(spec.sites)}"
        )
    return lambda joints: forward(np.rad2deg(joints))[None, :3] / 1000


def _mujoco(spec: WorkspaceSpec, names: list[str]) -> Points:
    import mujoco as mj

    mujoco: Any = mj  # its stubs lack what comes from C
    own = importlib.resources.files("rlsvc.robots")
    file = str(own / FILES[spec.model]) if spec.model in FILES else spec.model
    try:
        model = mujoco.MjModel.from_xml_path(file)
    except ValueError as error:
        raise UserError(f"guard.workspace.model: '{spec.model}' cannot be read ({error})") from error
    data = mujoco.MjData(model)
    joints = {model.joint(i).name: int(model.jnt_qposadr[i]) for i in range(model.njnt)}
    where = {model.body(i).name: ("xpos", i) for i in range(model.nbody)}
    where |= {model.site(i).name: ("site_xpos", i) for i in range(model.nsite)}
    addresses = [_find(joints, name, "model: it has no joint") for name in names]
    found = [_find(where, name, "sites: the model has no point") for name in spec.sites]

    def points(angles: np.ndarray) -> np.ndarray:
        data.qpos[addresses] = angles
        mujoco.mj_kinematics(model, data)
        return np.array([getattr(data, kind)[i] for kind, i in found])

    return points


def _find[T](table: dict[str, T], name: str, what: str) -> T:
    if name not in table:
        guess = nearest(name, table)
        hint = f" (did you mean '{guess}'?)" if guess else ""
        raise UserError(f"guard.workspace.{what} '{name}'{hint}; it has: {', '.join(filter(None, table))}")
    return table[name]
