"""Points of arms that the guard keeps in a box."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlsvc.core.contract import Feature
from rlsvc.core.errors import UserError
from rlsvc.robots.kinematics import make_sites
from rlsvc.spec.guard import WorkspaceSpec

MODEL = """
<mujoco>
  <worldbody>
    <body name="upper">
      <joint name="shoulder" type="hinge" axis="0 0 1"/>
      <geom size="0.01"/>
      <body name="fore" pos="0.3 0 0">
        <joint name="elbow" type="hinge" axis="0 0 1"/>
        <geom size="0.01"/>
        <site name="tool" pos="0.2 0 0"/>
      </body>
    </body>
  </worldbody>
</mujoco>
"""
ACTION = Feature((3,), "float32", "", ("gripper.pos", "shoulder.pos", "elbow.pos"))


@pytest.fixture
def model(tmp_path) -> str:
    file = tmp_path / "arm.xml"
    file.write_text(MODEL)
    return str(file)


def box(model: str, **changes) -> WorkspaceSpec:
    given = {
        "sites": ("tool", "fore"),
        "low": (-1, -1, -1),
        "high": (1, 1, 1),
        "unit": "deg",
        "without": ("gripper.pos",),
    }
    return WorkspaceSpec(model=model, **{**given, **changes})


def test_points_follow_joints_by_name_in_their_unit_and_the_gripper_moves_none(model):
    sites = make_sites(box(model), ACTION)
    # Shoulder at 90 degrees, elbow back by 90: up 0.3 m, then along x 0.2 m.
    for gripper in (0.0, 77.0):
        points = sites(np.array([gripper, 90.0, -90.0]))
        assert points == pytest.approx(np.array([[0.2, 0.3, 0.0], [0.0, 0.3, 0.0]]), abs=1e-9)


def test_a_cr5_stands_upright_at_zero():
    names = tuple(f"joint_{i}" for i in range(6))
    sites = make_sites(box("cr5", sites=("flange",), unit="rad", without=()), Feature((6,), "float32", "rad", names))
    (x, _, z), turned = sites(np.zeros(6))[0], sites(np.array([np.pi, 0, 0, 0, 0, 0]))[0]
    assert 0.9 < z < 1.2
    assert turned == pytest.approx(np.array([-x, -sites(np.zeros(6))[0][1], z]), abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sites": ("tol",)}, r"no point 'tol' \(did you mean 'tool'\?\)"),
        ({"without": ()}, "it has no joint 'gripper'"),
        ({"without": ("wrist",)}, "the robot has no 'wrist'; it has: gripper.pos"),
    ],
)
def test_names_that_there_are_not_are_refused(model, changes, message):
    with pytest.raises(UserError, match=message):
        make_sites(box(model, **changes), ACTION)


def test_a_model_that_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"'.*gone\.xml' cannot be read"):
        make_sites(box(str(tmp_path / "gone.xml")), ACTION)
