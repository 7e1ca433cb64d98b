"""The CR5's kinematics against the examples that Dobot publishes in its protocol's guide."""

from __future__ import annotations

import numpy as np
import pytest

from rlsvc.robots.virtual.cr5_kinematics import forward, inverse, transform


@pytest.mark.parametrize(
    ("joints", "pose"),
    [
        # PositiveSolution and GetPose, with the joints of GetAngle, sections 3.31, 3.37 and 3.38 of the guide.
        ([0, 0, -90, 0, 90, 0], [473, -141, 469, 180, 0, -90]),
        ([0, 0, 90, 0, -90, 0], [-473, -141, 469, 180, 0, 90]),
        # Stretched upwards: 147 + 427 + 357 + 116 mm high, 141 + 105 mm to the side.
        ([0, 0, 0, 0, 0, 0], [0, -246, 1047, -90, 0, 180]),
        # Turned at the base by a right angle: x becomes y.
        ([90, 0, 0, 0, 0, 0], [246, 0, 1047, -90, 0, -90]),
    ],
)
def test_forward_kinematics_gives_the_published_poses(joints: list[float], pose: list[float]):
    got = forward(np.array(joints, float))
    np.testing.assert_allclose(got[:3], pose[:3], atol=1e-6)
    np.testing.assert_allclose((got[3:] - pose[3:] + 180) % 360 - 180, 0, atol=1e-6)


def test_inverse_kinematics_finds_the_nearest_joints_that_reach_the_pose():
    rng = np.random.default_rng(0)
    for _ in range(20):
        joints = rng.uniform(-170, 170, 6)
        # Away from the singularities of a stretched elbow and of wrist axes in line.
        joints[[2, 4]] = rng.choice([-1, 1], 2) * rng.uniform(30, 150, 2)
        found = inverse(forward(joints), joints + rng.uniform(-3, 3, 6))
        assert found is not None
        np.testing.assert_allclose(transform(found), transform(joints), atol=0.02)
        assert np.abs(found - joints).max() < 90


def test_a_pose_out_of_reach_has_no_joints():
    assert inverse(np.array([1500.0, 0, 300, 180, 0, 0]), np.array([0.0, 10, -80, 0, 90, 0])) is None
