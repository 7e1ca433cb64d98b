"""One camera's video, encoded by a process of its own while its frames come.

A process and not a thread, since an encoder's thread holds the interpreter's lock now and then, and a control loop in
the same process would wait for it. Frames go over in shared memory that has no name, so that nothing is left of it
when this process is killed; the encoder ends when this process does.

Letters: H height, W width.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from rlsvc.data.video_encode import VideoFile

NICENESS = 10
"""Of the encoder: the control loop gets the core first."""
DEADLINE_S = 30.0
"""An encoder that gives no sign of life for this long is given up."""

MOST_SLOTS = 2000
"""So many commands fit into a pipe whose reader hangs: more would make `put` wait."""


class EncoderBehindError(Exception):
    """The memory for frames that wait for the encoder is full."""


class Encoder:
    """Encodes one camera's episodes, one after the other. For one thread.

    The process takes frames from `slots` places in memory and says when each is free again; it waits for nothing else.
    When it dies, the next call raises, and the next episode gets a new one.
    """

    def __init__(self, shape: tuple[int, ...], fps: float, slots: int) -> None:
        """Start the process; it is ready a moment later, and frames that come before wait.

        Args:
            shape: of the images, (H, W, 3).
            fps: frames a second.
            slots: most frames that may wait, up to MOST_SLOTS.
        """
        self._shape, self._fps, self._slots = shape, fps, slots
        self._memory = os.memfd_create("frames", os.MFD_CLOEXEC)
        os.ftruncate(self._memory, slots * int(np.prod(shape)))
        self._places = np.frombuffer(mmap.mmap(self._memory, 0), np.uint8).reshape(slots, *shape)
        self.path = Path()
        self._free: list[int] = []
        self._replies = b""
        self._result: dict[str, Any] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def begin(self, path: Path) -> None:
        """Begin a file. Raises OSError when the process is dead, which the next `begin` mends."""
        self.path = path
        # The slot that was freed last is taken first, so that only as much memory is touched as is needed.
        self._free = list(reversed(range(self._slots)))
        self._replies, self._result = b"", None
        if self._process is None or self._process.poll() is not None:
            self._start()
        self._say({"begin": str(path)})

    def put(self, frame: np.ndarray) -> None:
        """Hand over a frame [H, W, 3] uint8 RGB; it is copied, and nothing is waited for.

        Raises:
            EncoderBehindError: there is no room; the frame was not taken.
            OSError: an earlier frame could not be written (the disk is full), or the process died.
        """
        self._listen(0.0)
        if not self._free:
            raise EncoderBehindError
        slot = self._free.pop()
        self._places[slot] = frame
        self._say({"frame": slot})

    def finish(self) -> tuple[int, np.ndarray]:
        """Wait until the file is whole and on the disk.

        Returns:
            Its number of frames, and the histogram [3, 256] of `VideoFile`.

        Raises:
            OSError: as `put`.
        """
        self._say({"end": True})
        while self._result is None:
            if not self._listen(DEADLINE_S):
                self.abort()
                raise OSError(f"the encoder of {self.path.name} gave no sign of life for {DEADLINE_S:g} s")
        return self._result["frames"], np.array(self._result["histogram"], np.int64)

    def abort(self) -> None:
        """Give up the file, and be ready for another. Never raises."""
        self.close()
        with contextlib.suppress(OSError):
            self._start()

    def close(self) -> None:
        """End the process. Never raises."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()  # pyright: ignore[reportOptionalMemberAccess] - both are pipes
        self._process = None

    def __del__(self) -> None:
        """The memory goes with its last user."""
        self.close()
        os.close(self._memory)

    def _start(self) -> None:
        self.close()
        what = {"memory": self._memory, "shape": self._shape, "slots": self._slots, "fps": self._fps}
        package = str(Path(__file__).parents[2])
        paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rlsvc.data.encoder", json.dumps(what)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            pass_fds=[self._memory],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,  # Ctrl-C is for the one who records
        )

    def _say(self, command: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
        except BrokenPipeError:
            raise self._died() from None

    def _listen(self, wait_s: float) -> bool:
        """Take in replies; whether there were any within this time."""
        if self._process is None:
            raise OSError("the encoder is closed")
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        heard = False
        while select.select([pipe], [], [], 0.0 if heard else wait_s)[0]:
            data = os.read(pipe, 65536)
            if not data:
                raise self._died()
            heard = True
            *lines, self._replies = (self._replies + data).split(b"\n")
            for line in lines:
                self._take(json.loads(line))
        return heard

    def _died(self) -> OSError:
        assert self._process is not None
        return OSError(f"the encoder process of {self.path.name} ended ({self._process.wait()})")

    def _take(self, reply: dict[str, Any]) -> None:
        if "error" in reply:
            raise OSError(*reply["error"])
        if "frames" in reply:
            self._result = reply
        if "consumed" in reply:
            self._free.append(reply["consumed"])


def main() -> None:
    """The encoder's process: commands come on stdin, replies go to stdout, a JSON object a line."""
    what = json.loads(sys.argv[1])
    os.nice(NICENESS)
    places = np.frombuffer(mmap.mmap(what["memory"], 0), np.uint8).reshape(what["slots"], *what["shape"])
    video: VideoFile | None = None
    for line in sys.stdin:
        command = json.loads(line)
        reply: dict[str, Any] = {}
        try:
            if "begin" in command:
                video = VideoFile(Path(command["begin"]), what["fps"])
            elif "frame" in command:
                if video is not None:
                    video.add(places[command["frame"]])
                reply = {"consumed": command["frame"]}
            elif video is not None:
                video.close()
                reply = {"frames": video.frames, "histogram": video.histogram.tolist()}
        except OSError as error:
            reply, video = {"error": [error.errno or 0, error.strerror or str(error)]}, None
        if reply:
            sys.stdout.write(json.dumps(reply) + "\n")
            sys.stdout.flush()
    # Whoever records is gone: so is the episode.
    os._exit(0)


if __name__ == "__main__":
    main()
