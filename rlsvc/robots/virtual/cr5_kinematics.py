"""Kinematics of the Dobot CR5: the flange's pose from the joints, and joints for a pose.

The frames are those of Dobot's own model (github.com/Dobot-Arm/DOBOT_6Axis_ROS2_V4 : dobot_rviz/urdf/cr5_robot.urdf),
written as modified Denavit-Hartenberg parameters (Craig). A pose is [x, y, z, rx, ry, rz], mm and degrees, in the frame
of the base, with R = Rz(rz) Ry(ry) Rx(rx), as GetPose gives it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

# twist alpha (deg), length a (mm), offset d (mm), angle at q = 0 (deg), joint after joint
DH = (
    (0.0, 0.0, 147.0, 0.0),
    (90.0, 0.0, 0.0, -90.0),
    (0.0, -427.0, 0.0, 0.0),
    (0.0, -357.0, 141.0, -90.0),
    (90.0, 0.0, 116.0, 0.0),
    (-90.0, 0.0, 105.0, 0.0),
)


def transform(q: Vector) -> Vector:
    """The flange's frame [4, 4] in the base's, mm, from joints [6], deg."""
    frame = np.eye(4)
    for angle, (alpha, a, d, zero) in zip(np.deg2rad(q), DH, strict=True):
        ca, sa = np.cos(np.deg2rad(alpha)), np.sin(np.deg2rad(alpha))
        ct, st = np.cos(angle + np.deg2rad(zero)), np.sin(angle + np.deg2rad(zero))
        frame = frame @ np.array(
            [[ct, -st, 0, a], [st * ca, ct * ca, -sa, -sa * d], [st * sa, ct * sa, ca, ca * d], [0, 0, 0, 1]]
        )
    return frame


def forward(q: Vector) -> Vector:
    """The pose [6] of joints [6], deg."""
    frame = transform(q)
    r = frame[:3, :3]
    ry = np.arctan2(-r[2, 0], np.hypot(r[0, 0], r[1, 0]))
    if abs(np.cos(ry)) < 1e-9:  # rx and rz turn about the same axis: rz is 0
        rx, rz = np.arctan2(-r[1, 2], r[1, 1]), 0.0
    else:
        rx, rz = np.arctan2(r[2, 1], r[2, 2]), np.arctan2(r[1, 0], r[0, 0])
    return np.concatenate([frame[:3, 3], np.rad2deg([rx, ry, rz])])


def rotation(angles: Vector) -> Vector:
    """Rotation [3, 3] of [rx, ry, rz], deg."""
    (cx, cy, cz), (sx, sy, sz) = np.cos(np.deg2rad(angles)), np.sin(np.deg2rad(angles))
    return np.array(
        [
            [cz * cy, cz * sy * sx - sz * cx, cz * sy * cx + sz * sx],
            [sz * cy, sz * sy * sx + cz * cx, sz * sy * cx - cz * sx],
            [-sy, cy * sx, cy * cx],
        ]
    )


def inverse(pose: Vector, near: Vector, steps: int = 200) -> Vector | None:
    """Joints [6], deg, that reach a pose, by damped least squares from `near` [6]; None when none were found.

    They are within 0.01 mm and 0.001 deg.
    """
    q, goal, scale = np.array(near, np.float64), rotation(pose[3:]), 300.0  # mm that count like a radian
    for _ in range(steps):
        frame = transform(q)
        error = np.concatenate([(pose[:3] - frame[:3, 3]) / scale, _turn(goal @ frame[:3, :3].T)])
        if np.abs(error[:3]).max() * scale < 0.01 and np.abs(error[3:]).max() < np.deg2rad(0.001):
            return near + (q - near + 180.0) % 360.0 - 180.0  # of the turns that reach it, the nearest
        jacobian = np.empty((6, 6))
        for j in range(6):
            moved = transform(q + np.eye(6)[j] * 1e-3)
            turn = _turn(moved[:3, :3] @ frame[:3, :3].T)
            jacobian[:, j] = np.concatenate([(moved[:3, 3] - frame[:3, 3]) / scale, turn]) / np.deg2rad(1e-3)
        step = jacobian.T @ np.linalg.solve(jacobian @ jacobian.T + 1e-4 * np.eye(6), error)
        q += np.rad2deg(step) * min(1.0, 0.5 / max(float(np.abs(step).max()), 1e-12))
    return None


def _turn(r: Vector) -> Vector:
    """The rotation vector [3], rad, of a rotation matrix."""
    axis = np.array([r[2, 1] - r[1, 2], r[0, 2] - r[2, 0], r[1, 0] - r[0, 1]])
    sine, cosine = np.linalg.norm(axis) / 2, (np.trace(r) - 1) / 2
    if sine > 1e-9:
        return axis / (2 * sine) * np.arctan2(sine, cosine)
    if cosine > 0:
        return axis / 2
    # Half a turn: the axis is the eigenvector of 1.
    i = int(np.argmax(np.diag(r)))
    column = r[:, i] + np.eye(3)[i]
    return np.pi * column / np.linalg.norm(column)
