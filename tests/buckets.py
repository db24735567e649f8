"""A bucket on this machine: moto's S3 server, with the faults that services have.

with Bucket() as bucket:
    # This process, and those that it starts, find it by their environment.
    Trainer(default_root_dir="s3://runs/exp")
    bucket.names("exp/")
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from s3fs import S3FileSystem
from werkzeug.serving import BaseWSGIServer, make_server
from werkzeug.wrappers import Response

NAME = "runs"
_SLOW_DOWN = (
    '<?xml version="1.0"?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>'
)


@dataclass
class Faults:
    """Faults that are injected into requests.

    Args:
        failing: the share of requests that are answered with 503.
        latency: the seconds that each request takes in addition.
        old_lists: the seconds for which a list of objects may be repeated.
        outages: begin and end of times without any answer, in seconds after the server began.
    """

    failing: float = 0.0
    latency: float = 0.0
    old_lists: float = 0.0
    outages: tuple[tuple[float, float], ...] = ()
    seed: int = 0


class Bucket:
    """One bucket, called ``runs``, on a free port of this machine."""

    def __init__(self, faults: Faults | None = None) -> None:
        self.faults = faults or Faults()
        self.requests = 0
        self._choice = random.Random(self.faults.seed)
        self._application = DomainDispatcherApplication(create_backend_app)
        self._lists: dict[str, tuple[float, Response]] = {}
        self._began = time.monotonic()
        self._patch = pytest.MonkeyPatch()
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server: BaseWSGIServer = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which a process finds the bucket."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._server.port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "NO_PROXY": "127.0.0.1",
        }

    def __enter__(self) -> Bucket:
        self._thread.start()
        for name, value in self.environment.items():
            self._patch.setenv(name, value)
        self.client.create_bucket(Bucket=NAME)
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        # The next bucket has another port, which is not among the arguments by which clients are kept.
        S3FileSystem.clear_instance_cache()
        self._patch.undo()

    @property
    def client(self) -> Any:
        """A client of boto3."""
        import boto3

        variables = self.environment
        return boto3.client(
            "s3",
            endpoint_url=variables["AWS_ENDPOINT_URL"],
            aws_access_key_id="key",
            aws_secret_access_key="secret",
            region_name="us-east-1",
        )

    def names(self, prefix: str = "") -> list[str]:
        """Return the names of its objects, as they are now."""
        faults, self.faults = self.faults, Faults()
        try:
            pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=NAME, Prefix=prefix)
            return [each["Key"] for page in pages for each in page.get("Contents", ())]
        finally:
            self.faults = faults

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        faults, now = self.faults, time.monotonic() - self._began
        self.requests += 1
        if any(begin <= now < end for begin, end in faults.outages):
            # The connection ends without an answer.
            environ["werkzeug.socket"].close()
            return []
        if faults.latency:
            time.sleep(faults.latency)
        if self._choice.random() < faults.failing:
            return Response(_SLOW_DOWN, 503, mimetype="application/xml")(environ, start)
        if faults.old_lists and environ["REQUEST_METHOD"] == "GET" and "list-type=2" in environ["QUERY_STRING"]:
            key = environ["PATH_INFO"] + "?" + environ["QUERY_STRING"]
            known = self._lists.get(key)
            if known is None or now - known[0] > faults.old_lists:
                known = self._lists[key] = now, Response.from_app(self._application, environ, buffered=True)
            return known[1](environ, start)
        found: Iterable[bytes] = self._application(environ, start)
        return found
