"""Where points of an arm are, by a MuJoCo model of it.

Letters: A joints, P points.
"""

from __future__ import annotations

import importlib.resources
from typing import Any

import numpy as np

from rlsvc.core.contract import Feature
from rlsvc.core.errors import UserError, nearest
from rlsvc.robots.guard import Sites
from rlsvc.spec.guard import WorkspaceSpec

MODELS = {"so101": "virtual/so101.xml"}
"""Models that come with rlsvc, by name."""


def make_sites(spec: WorkspaceSpec, action: Feature) -> Sites:
    """Forward kinematics of the points that a workspace names.

    Args:
        spec: the workspace.
        action: of the robot; its names, without a suffix such as ".pos", are the model's joints, its unit is deg or
            rad.

    Returns:
        A function of joints [A], in the unit of the action, to points [P, 3] in the model's world, m.

    Raises:
        UserError: a model that is not there or cannot be read, a joint or point that it does not have, another unit.
    """
    import mujoco as mj

    mujoco: Any = mj  # its stubs lack what comes from C

    if action.unit not in ("deg", "rad"):
        raise UserError(
            f"guard.workspace: the robot's joints are in '{action.unit or 'no unit'}', and kinematics need deg or rad"
        )
    own = importlib.resources.files("rlsvc.robots")
    file = str(own / MODELS[spec.model]) if spec.model in MODELS else spec.model
    try:
        model = mujoco.MjModel.from_xml_path(file)
    except ValueError as error:
        raise UserError(f"guard.workspace.model: '{spec.model}' cannot be read ({error})") from error
    data = mujoco.MjData(model)
    addresses = [_joint(model, name.removesuffix(".pos")) for name in action.names]
    points = [_point(model, name) for name in spec.sites]
    scale = np.pi / 180 if action.unit == "deg" else 1.0

    def sites(joints: np.ndarray) -> np.ndarray:
        data.qpos[addresses] = joints * scale
        mujoco.mj_kinematics(model, data)
        return np.array([(data.site_xpos if is_site else data.xpos)[i] for is_site, i in points])

    return sites


def _joint(model: Any, name: str) -> int:
    names = {model.joint(i).name: int(model.jnt_qposadr[i]) for i in range(model.njnt)}
    if name not in names:
        guess = nearest(name, names)
        hint = f" (did you mean '{guess}'?)" if guess else ""
        raise UserError(f"guard.workspace.model: it has no joint '{name}'{hint}; it has: {', '.join(names)}")
    return names[name]


def _point(model: Any, name: str) -> tuple[bool, int]:
    sites = {model.site(i).name: (True, i) for i in range(model.nsite)}
    bodies = {model.body(i).name: (False, i) for i in range(model.nbody)}
    found = bodies | sites
    if name not in found:
        raise UserError(f"guard.workspace.sites: the model has no '{name}'; it has: {', '.join(found)}")
    return found[name]
