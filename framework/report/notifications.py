"""``Notifier``: sends what happens to a run to the user's own servers, one POST of a small JSON object for each event.

    {"event": "end", "run": "phalanx_logs/version_3", "host": "node-1", "state": "finished", "step": 1200,
     "sentence": "finished at step 1,200 after 4 min", "time": "2026-01-31T12:00:00.000+00:00",
     "text": "phalanx_logs/version_3 finished at step 1,200 after 4 min"}

``event`` is one of ``EVENTS``; only an end has a ``state``, one of ``run_files.STATES``. ``text`` is for servers that
show a text in a chat. Requests are made by a thread, once each: a server that does not answer costs a run a warning.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..core.errors import ConfigurationError
from ..system.environment import hiding_secrets, library_variable
from ..system.redaction import MASK, without_path
from .values import timestamp

EVENTS = ("end", "stall", "loss_spike", "preemption", "restart")
"""All events."""
VARIABLE = "env:"
"""Followed by the name of an environment variable that has an address."""
_ANSWER_SECONDS = 5.0
_CLOSE_SECONDS = 6.0
# Events beyond this many wait for a server that does not answer, and are dropped.
_CAPACITY = 100


def check_addresses(name: str, value: Any) -> tuple[str, ...]:
    """Check the argument that has the addresses, and return them as a tuple.

    Args:
        name: the name of the argument.
        value: an address, several, or None.

    Raises:
        ConfigurationError: one of them is no address of HTTP, or in a variable that is not set. The message shows
            nothing of it but its beginning.
    """
    if value is None:
        return ()
    given = [value] if isinstance(value, str) or not isinstance(value, Sequence) else list(value)
    for each in given:
        if not isinstance(each, str):
            raise ConfigurationError(
                f"{name} has a value of type {type(each).__name__}: give 'https://...', or a list of these."
            )
        address, shown = each, without_path(each)
        if each.startswith(VARIABLE):
            shown = each
            address = library_variable(each.removeprefix(VARIABLE)) or ""
            if not address:
                variable = each.removeprefix(VARIABLE)
                raise ConfigurationError(
                    f"{name}={each!r}: the environment variable {variable!r} is not set: set it to an address."
                )
        if MASK in address:
            raise ConfigurationError(
                f"{name}={shown!r} lacks its secret part, which phalanx does not write: give the whole address, or "
                f"'{VARIABLE}NAME' for that in a variable."
            )
        if not _is_address(address):
            raise ConfigurationError(
                f"{name}={shown!r} must be an address that begins with 'https://' or 'http://' and has a host, without "
                f"a user, or '{VARIABLE}NAME' for that in a variable."
            )
    return tuple(given)


def shown_addresses(value: Any) -> Any:
    """Return the argument that has the addresses without what may be secret in them."""
    if isinstance(value, str):
        return value if value.startswith(VARIABLE) else without_path(value)
    return [shown_addresses(each) for each in value] if isinstance(value, Sequence) else value


def without_addresses(text: str, value: Any) -> str:
    """Return a text without what may be secret in the addresses of the argument that has them."""
    for each in [value] if isinstance(value, str) else value or ():
        text = text.replace(each, shown_addresses(each))
    return text


def resolved(addresses: Sequence[str]) -> list[str]:
    """Return addresses, with those of variables in their place."""
    found = (library_variable(each.removeprefix(VARIABLE)) if each.startswith(VARIABLE) else each for each in addresses)
    return list(filter(None, found))


def _is_address(text: str) -> bool:
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(text)
        has_host = bool(parts.hostname) and "@" not in parts.netloc and parts.port != 0
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and has_host and text.isascii() and text.isprintable() and " " not in text


class Notifier:
    """Sends the events of one fit to addresses.

    Args:
        addresses: where to send them.
        run: the name of the run.
        warn: called with a sentence if an event could not be delivered, once; in the thread that calls a method.
        claims: the path of a file without its ending, beside which processes of one launch record which events of the
            fit have been sent, so that none is sent twice; None if there is only this process.
    """

    def __init__(
        self, addresses: Sequence[str], run: str, warn: Callable[[str], None], claims: Path | None = None
    ) -> None:
        self._lines = [_Line(address) for address in resolved(addresses)]
        self._run = run
        self._warn = warn
        self._claims = claims
        self._sent: set[str] = set()
        self._has_warned = False

    def send(
        self, event: str, sentence: str, step: int | None = None, state: str | None = None, key: str | None = None
    ) -> None:
        """Send an event, without waiting for it.

        Args:
            event: one of ``EVENTS``.
            sentence: what has happened. That of an end continues the name of the run.
            step: the optimizer step.
            state: the state of the run, after its end.
            key: what tells the event from others of the fit: the same one is not sent again. By default that is the
                event itself.
        """
        self._report_problem()
        if not self._lines or not self._is_first(key or event):
            return
        sentence = hiding_secrets()(sentence)
        body: dict[str, Any] = {"event": event, "run": self._run, "host": socket.gethostname()}
        if state is not None:
            body["state"] = state
        between = " " if event == "end" else ": "
        body |= {"step": step, "sentence": sentence, "time": timestamp(time.time())}
        body["text"] = f"{self._run}{between}{sentence}"
        for line in self._lines:
            line.put(json.dumps(body).encode())

    def close(self) -> None:
        """Wait a few seconds for the events that are on their way."""
        until = time.monotonic() + _CLOSE_SECONDS
        for line in self._lines:
            line.finish()
        for line in self._lines:
            line.join(max(0.0, until - time.monotonic()))
        self._report_problem()

    def _is_first(self, key: str) -> bool:
        """Record that an event is sent; return whether it has not been before, by any process of the launch."""
        if key in self._sent:
            return False
        self._sent.add(key)
        if self._claims is None:
            return True
        try:
            os.close(os.open(f"{self._claims}.{key}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return False
        except OSError:
            # The directory is gone, or its disk is full: rather twice than not at all.
            return True
        return True

    def _report_problem(self) -> None:
        problem = next((line.problem for line in self._lines if line.problem), None)
        if problem is not None and not self._has_warned:
            self._has_warned = True
            self._warn(f"A notification was not delivered: {problem}. The run is not affected.")


class _Line:
    """An address, the events that wait for it, and the thread that sends them."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._shown = without_path(address)
        self._bodies: queue.Queue[bytes | None] = queue.Queue(_CAPACITY)
        self._thread: threading.Thread | None = None
        self.problem = ""
        """Why an event was not delivered, the first time."""

    def put(self, body: bytes | None) -> None:
        """Have the thread send a body."""
        if self._thread is None:
            # A daemon thread: a server that hangs must not keep the process from ending.
            self._thread = threading.Thread(target=self._run, name="phalanx-notifications", daemon=True)
            self._thread.start()
        try:
            self._bodies.put_nowait(body)
        except queue.Full:
            self._failed("it answers too slowly")

    def finish(self) -> None:
        """End the thread once it has sent everything."""
        if self._thread is not None:
            self.put(None)

    def join(self, seconds: float) -> None:
        """Wait for the thread, at most ``seconds``."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(seconds)
            if thread.is_alive():
                self._failed("it has not answered in time")

    def _run(self) -> None:
        while (body := self._bodies.get()) is not None:
            try:
                _post(self._address, body)
            except Exception as error:
                # Not the error's message, which may have the address.
                code, reason = getattr(error, "code", None), getattr(error, "reason", None)
                what = type(error).__name__ if code is None else f"HTTP {code}"
                self._failed(f"{what}: {reason}" if reason else what)

    def _failed(self, reason: str) -> None:
        self.problem = self.problem or f"{self._shown} was not reached ({reason})"


def _post(address: str, body: bytes) -> None:
    # Of 20 ms, which a program without notifications would pay at its start.
    from urllib.error import HTTPError
    from urllib.request import HTTPRedirectHandler, Request, build_opener

    class NoRedirects(HTTPRedirectHandler):
        """Refuses redirects, after which a request would be another one, without the body."""

        def redirect_request(self, *args: Any, **kwargs: Any) -> None:
            return None

    headers = {"Content-Type": "application/json", "User-Agent": "phalanx"}
    try:
        with build_opener(NoRedirects).open(Request(address, body, headers), timeout=_ANSWER_SECONDS) as answer:
            answer.read(1)
    except HTTPError as error:
        error.close()
        raise
