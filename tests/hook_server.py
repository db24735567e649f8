"""A server on this machine that keeps the notifications that runs send to it."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

SECRET = "T0123-B4567-s3cret"


class HookServer:
    """A server within a context. ``url`` is its address, with a part that nobody else may see; ``bodies`` what came."""

    def __init__(self, status: int = 200) -> None:
        self.bodies: list[dict[str, Any]] = []
        bodies = self.bodies

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.path == f"/services/{SECRET}"
                assert self.headers["Content-Type"] == "application/json"
                bodies.append(json.loads(content))
                self.send_response(status)
                self.end_headers()

            def log_message(self, format: str, *arguments: object) -> None:
                """Print nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self.url = f"http://127.0.0.1:{self._server.server_port}/services/{SECRET}"

    @property
    def events(self) -> list[str]:
        """The names of the events that came."""
        return [body["event"] for body in self.bodies]

    def __enter__(self) -> HookServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
