"""Stop a Dobot from another process: plain sockets, no arrays (rlsvc/robots/supervisor.py)."""

from __future__ import annotations

from rlsvc.core.errors import UserError
from rlsvc.robots.api import ConnectionLost, Torque
from rlsvc.robots.dobot_wire import ask, dashboard

COMMANDS = {"hold": ("ResetRobot()",), "release": ("ResetRobot()", "DisableRobot()")}


def stop(host: str, port: int, timeout_s: float, *, torque: Torque) -> None:
    """Stop the arm where it is, over a dashboard connection of its own.

    Args:
        host: of the controller.
        port: its dashboard.
        timeout_s: for each of connecting and every reply.
        torque: hold: the motors keep the position. release: the arm is disabled, its motors have no current; a CR arm
            does not fall then, its brakes hold the joints.

    Raises:
        ConnectionLost: the controller does not answer or refuses.
    """
    try:
        with dashboard(host, port, timeout_s) as connection:
            for command in COMMANDS[torque]:
                reply = ask(connection, command)
                if reply.error:
                    raise ConnectionLost(f"Dobot at {host}:{port}: {reply}")
    except UserError as error:
        raise ConnectionLost(str(error)) from error
