"""An ASGI application that a thread of this process serves."""

from __future__ import annotations

import socket
import threading
from typing import Any

from rlsvc.core.errors import BusyError


class ThreadServer:
    """Serves until it is closed.

    Attributes:
        address: host:port.
    """

    def __init__(self, app: Any, host: str, port: int, what: str, **options: Any) -> None:
        """Listen.

        Args:
            app: ASGI application.
            host: address of this machine.
            port: 0 takes a free one.
            what: is served, for messages and as the thread's name.
            options: of uvicorn.

        Raises:
            BusyError: the port is in use, or the host is not one of this machine.
        """
        import uvicorn

        try:
            listener = socket.create_server((host, port))
        except OSError as error:
            raise BusyError(
                f"{what}: {host}:{port} cannot be listened on ({error.strerror}); choose another port"
            ) from error
        self.address = f"{host}:{listener.getsockname()[1]}"
        # Logging is the program's: uvicorn would close its handlers.
        self._server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", **options))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, name=what, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End, whoever is connected; waits at most 5 s."""
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join(5)
