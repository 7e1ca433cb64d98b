"""A virtual Dobot CR5 on loopback: dashboard, motion and feedback ports in one thread, and faults on request.

It speaks protocol V3 (rlsvc/robots/dobot_wire.py), so that the real driver runs against it without a robot:

    python -m rlsvc.robots.virtual.cr5 --enabled
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np

from rlsvc.robots.dobot_feedback import PERIOD_S
from rlsvc.robots.dobot_wire import DASHBOARD_PORT, FEEDBACK_PORT, MOTION_PORT, NOT_TCP, OCCUPIED
from rlsvc.robots.virtual.cr5_arm import CR5Arm
from rlsvc.robots.virtual.cr5_commands import execute

HOST = "127.0.0.1"
MAX_COMMAND = 4096
MAX_WAITING = 65536
"""Bytes of feedback that wait for a slow client; more are not sent."""
PORTS = ("dashboard", "motion", "feedback")


class VirtualCR5:
    """A context manager. Each port takes one client, as the real controller does, and refuses others with its notice.

    Attributes:
        arm: the arm; take `lock` to change it.
        ports: by name of PORTS, the port numbers.
        latency_s: time that a command waits before it is carried out.
        tcp_mode: False answers every command with the controller's notice of another control mode.
        silent_motion: the motion port gives no replies, as controllers before V3.5.5.
        commands: by port, how many were carried out or refused so far.
    """

    def __init__(
        self,
        q: np.ndarray | None = None,
        *,
        enabled: bool = False,
        ports: tuple[int, int, int] = (0, 0, 0),
        time_scale: float = 1.0,
    ) -> None:
        """Nothing listens yet.

        Args:
            q: joints [6] where it stands, deg.
            enabled: begin as after EnableRobot.
            ports: of PORTS, 0 for a free one.
            time_scale: seconds of the arm in a second; with 0 its time stands still, but for `pass_time`.
        """
        self.arm, self.lock = CR5Arm(q, enabled=enabled), threading.Lock()
        self.ports, self.time_scale = {name: ports[i] for i, name in enumerate(PORTS)}, time_scale
        self.latency_s, self.tcp_mode, self.silent_motion = 0.0, True, False
        self.commands: dict[str, int] = dict.fromkeys(PORTS, 0)
        self._clients: dict[str, asyncio.StreamWriter] = {}
        self._torn: list[int] = []
        self._flowing = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._up, self._down = threading.Event(), asyncio.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="virtual CR5", daemon=True)

    def __enter__(self) -> VirtualCR5:
        self._thread.start()
        self._up.wait()
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._call(self._down.set)
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def pass_time(self, seconds: float) -> None:
        """Let time of the arm pass, at once."""
        with self.lock:
            # In small steps, so that the way does not depend on how much passes at a time.
            count = max(1, round(seconds / PERIOD_S))
            for _ in range(count if seconds > 0 else 0):
                self.arm.advance(seconds / count)

    def drop(self, port: str) -> None:
        """End the connection of a port's client, if there is one, as a controller that restarts."""
        self._call(lambda: self._clients[port].transport.abort() if port in self._clients else None)

    def freeze(self) -> None:
        """Say and hear nothing, and keep the connections: what a peer that is gone looks like (half-open)."""
        self._call(self._flowing.clear)

    def thaw(self) -> None:
        """Go on after `freeze`."""
        self._call(self._flowing.set)

    def tear(self, keep: int) -> None:
        """Send only the first `keep` bytes of the next feedback packet."""
        self._torn.append(keep)

    def _call(self, function: Callable[[], object]) -> None:
        assert self._loop is not None
        done = threading.Event()
        with contextlib.suppress(RuntimeError):  # it has ended by a failure, which is raised on the way out
            self._loop.call_soon_threadsafe(lambda: (function(), done.set()))
            done.wait(5)

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._failure = error
        finally:
            self._up.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._failed)
        self._flowing.set()
        async with contextlib.AsyncExitStack() as stack:
            for name in PORTS:

                async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str = name) -> None:
                    await self._client(name, reader, writer)

                server = await asyncio.start_server(client, HOST, self.ports[name])
                self.ports[name] = server.sockets[0].getsockname()[1]
                stack.callback(server.close)
            feedback = asyncio.create_task(self._feedback())
            down = asyncio.create_task(self._down.wait())
            self._up.set()
            await asyncio.wait({feedback, down}, return_when=asyncio.FIRST_COMPLETED)
            self._flowing.set()
            for writer in list(self._clients.values()):
                writer.transport.abort()
            if feedback.done():
                feedback.result()
            feedback.cancel()

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if isinstance(context.get("exception"), asyncio.CancelledError):
            return  # a client that was waiting for its answer when all ended
        self._failure = context.get("exception") or RuntimeError(context["message"])
        self._down.set()

    async def _client(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if name in self._clients:
            writer.write(OCCUPIED.encode())
        else:
            self._clients[name] = writer
            with contextlib.suppress(ConnectionError):
                await self._listen(name, reader, writer)
            del self._clients[name]
        writer.close()

    async def _listen(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        text = ""
        while True:
            await self._flowing.wait()
            chunk = await reader.read(MAX_COMMAND)
            await self._flowing.wait()
            if not chunk:
                return
            if name == "feedback":
                continue
            text += chunk.decode("latin-1")
            while ")" in text:
                command, _, text = text.partition(")")
                await self._command(name, command + ")", writer)
            if len(text) > MAX_COMMAND:
                text = ""

    async def _command(self, name: str, command: str, writer: asyncio.StreamWriter) -> None:
        if self.latency_s:
            await asyncio.sleep(self.latency_s)
        if not self.tcp_mode:
            writer.write(NOT_TCP.encode())
            return
        with self.lock:
            reply = execute(self.arm, command, motion=name == "motion")
            self.commands[name] += 1
        while command.strip().lower().startswith("sync(") and self.arm.moving and not self.arm.alarms:
            await asyncio.sleep(PERIOD_S)
        if name == "dashboard" or not self.silent_motion:
            writer.write(reply.encode())

    async def _feedback(self) -> None:
        before = due = time.monotonic()
        while True:
            due = max(due + PERIOD_S, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            now = time.monotonic()
            self.pass_time((now - before) * self.time_scale)
            before = now
            with self.lock:
                packet = self.arm.packet()
            writer = self._clients.get("feedback")
            if writer is not None and self._flowing.is_set() and writer.transport.get_write_buffer_size() < MAX_WAITING:
                writer.write(packet[: self._torn.pop(0)] if self._torn else packet)


def main() -> None:
    """Serve until Ctrl-C, at Dobot's own ports."""
    parser = argparse.ArgumentParser(description="A virtual Dobot CR5 on loopback (protocol V3).")
    parser.add_argument("--enabled", action="store_true", help="begin enabled, as after EnableRobot()")
    parser.add_argument("--ports", type=int, nargs=3, default=(DASHBOARD_PORT, MOTION_PORT, FEEDBACK_PORT))
    parser.add_argument("--joints", type=float, nargs=6, default=[0.0] * 6, help="where it stands, deg")
    options = parser.parse_args()
    arm = VirtualCR5(np.array(options.joints), enabled=options.enabled, ports=tuple(options.ports))
    with arm, contextlib.suppress(KeyboardInterrupt):
        print(f"virtual CR5 at {HOST}: {arm.ports}", flush=True)  # noqa: T201 - it is a program
        threading.Event().wait()


if __name__ == "__main__":
    main()
