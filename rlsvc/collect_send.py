"""Episodes of a dataset on their way to the run that learns from them, while the robot goes on.

What the learner has is asked of the learner, so nothing is remembered here: after any interruption what it lacks is
sent. Episodes are packed by a process of their own, at low priority, away from the control loop.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx

from rlsvc.client.protocol import Address, ClientOptions
from rlsvc.core.errors import NotFoundError, UserError
from rlsvc.data.lerobot_meta import read_meta
from rlsvc.data.pack_episode import dataset_id

RETRY_S = 5.0
TIMEOUT = httpx.Timeout(30.0, connect=5.0)
PIECE = 2**18


class RefusedEpisodeError(UserError):
    """The learner does not take this episode, today or later."""


class EpisodeSender:
    """Sends, from a thread, what a learner lacks of a dataset."""

    def __init__(self, dataset: Path, url: str, key: str | None, say: Callable[[str], None]) -> None:
        """Start.

        Args:
            dataset: a LeRobot dataset, also one that has no episode yet.
            url: of the run.
            key: API key with the role record; None sends none.
            say: told of what is refused, and of a network that is gone or back.
        """
        self._dataset, self._say = dataset, say
        self._address = Address.parse(url).http
        self._headers = ClientOptions(key=key).headers
        self._wake, self._stop = threading.Event(), threading.Event()
        self._held: set[int] = set()
        self._refused: set[int] = set()
        self._unsent, self._silent = 0, False
        self._idle = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sender", daemon=True)
        self._thread.start()

    def notify(self) -> None:
        """There is another episode."""
        self._idle.clear()
        self._wake.set()

    def drain(self, timeout_s: float) -> int:
        """Wait until the learner has all, at most so long; how many it lacks."""
        self._idle.wait(timeout_s)
        return self._unsent

    def close(self) -> None:
        """End after the piece under way; what is unsent stays where it is."""
        self._stop.set()
        self._wake.set()
        self._thread.join(TIMEOUT.connect or 0.0)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.clear()
            if self._round():
                if not self._wake.is_set():
                    self._idle.set()
                self._wake.wait()
            else:
                self._wake.wait(RETRY_S)

    def _round(self) -> bool:
        """Send all that is lacking; False when it is to be tried again."""
        if not (self._dataset / "meta" / "info.json").exists():
            return True  # nothing was recorded yet
        try:
            there, identity = set(read_meta(self._dataset).episodes), dataset_id(self._dataset)
            self._unsent = len(there - self._held)
            with httpx.Client(
                base_url=self._address, headers=self._headers, timeout=TIMEOUT, trust_env=False
            ) as client:
                self._held = set(_checked(client.get(f"/v1/episodes/{identity}")).json()["held"])
                self._unsent = len(there - self._held)
                for number in sorted(there - self._held - self._refused):
                    if self._stop.is_set():
                        return False
                    self._send(client, identity, number)
                    self._unsent = len(there - self._held)
        except (httpx.HTTPError, KeyError, ValueError) as error:
            if isinstance(error, UserError) and not isinstance(error, _AwayError):
                self._say(f"episodes are not sent: {error}")
                return True
            if not self._silent:
                self._say(
                    f"the learner at {self._address} is away ({error or type(error).__name__}); recording goes on"
                )
            self._silent = True
            return False
        if self._silent:
            self._say(f"the learner at {self._address} is back")
        self._silent = False
        return True

    def _send(self, client: httpx.Client, identity: str, number: int) -> None:
        with tempfile.TemporaryDirectory(prefix="rlsvc-send-") as folder:
            file = Path(folder) / "episode.tar"
            command = [sys.executable, "-m", "rlsvc.data.pack_episode", str(self._dataset), str(number), str(file)]
            done = subprocess.run(["nice", "-n", "10", *command], capture_output=True, text=True, check=False)
            if done.returncode:
                last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
                self._refused.add(number)
                self._say(f"episode {number} cannot be packed: {last[0]}")
                return
            answer = client.put(f"/v1/episodes/{identity}/{number}", content=_pieces(file))
        try:
            _checked(answer)
            self._held.add(number)
        except RefusedEpisodeError as error:
            self._refused.add(number)
            self._say(f"episode {number}: {error}")


class _AwayError(UserError):
    """The server cannot take it now."""


def read_key(path: str | None) -> str | None:
    """The API key in a file; None without one.

    Raises:
        NotFoundError: there is no such file.
        UserError: others may read it, or it is empty.
    """
    if path is None:
        return None
    file = Path(path)
    try:
        if stat.S_IMODE(file.stat().st_mode) & 0o077:
            raise UserError(f"key_file: others may read {file}; chmod 600 {file}")
        key = file.read_text().strip()
    except FileNotFoundError as error:
        raise NotFoundError(f"key_file: {file} is not there; it holds what rlsvc keys add printed") from error
    except OSError as error:
        raise UserError(f"key_file: {file} cannot be read ({error.strerror})") from error
    if not key.isascii() or not key.isprintable() or not key:
        raise UserError(f"key_file: {file} holds no key; it is one line, which rlsvc keys add printed")
    return key


def send_all(dataset: Path, url: str, key: str | None, say: Callable[[str], None], timeout_s: float) -> int:
    """Send what a learner lacks of a dataset, and wait for it at most so long; how many it still lacks."""
    sender = EpisodeSender(dataset, url, key, say)
    try:
        return sender.drain(timeout_s)
    finally:
        sender.close()


def _checked(answer: httpx.Response) -> httpx.Response:
    if answer.is_success:
        return answer
    try:
        message = str(answer.json()["error"])
    except (ValueError, KeyError, TypeError):
        message = f"HTTP {answer.status_code}"
    if answer.status_code >= 500 or answer.status_code == 429:
        raise _AwayError(message)
    if answer.status_code in (401, 403, 404):
        raise UserError(message)
    raise RefusedEpisodeError(message)


def _pieces(file: Path) -> Iterator[bytes]:
    with file.open("rb") as data:
        os.posix_fadvise(data.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while piece := data.read(PIECE):
            yield piece
