"""Processes that measure: the parent sends commands, one line each, and the process answers with JSON lines."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from ..tables import ROOT

_MARK = "RESULT "


class ChildError(Exception):
    """A process failed, or took too long; the message ends with the last lines of its errors."""


class Child:
    """A process that measures. ``end`` ends all that it has started.

    Args:
        module: the module to run.
        argument: its one argument, a JSON object.
        log: the file for its output.
        variables: environment variables to set.
    """

    def __init__(self, module: str, argument: Mapping[str, Any], log: Path, variables: Mapping[str, str]) -> None:
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, json.dumps(argument)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
                env={**os.environ, **variables},
                start_new_session=True,
            )
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_MARK):
                self._messages.put(json.loads(line.removeprefix(_MARK)))
        self._messages.put(None)

    def ask(self, command: str, seconds: float) -> dict[str, Any]:
        """Send a command; return the answer.

        Raises:
            ChildError: the process ended, or sent no answer in time.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `answer` reports why the process has ended
            self._process.stdin.write(f"{command}\n")
            self._process.stdin.flush()
        found = self.answer(seconds)
        if found is None:
            raise ChildError("it ended without an answer")
        return found

    def answer(self, seconds: float) -> dict[str, Any] | None:
        """Return the next answer; None if the process has ended after its last one.

        Raises:
            ChildError: it failed, or sent no answer in time.
        """
        try:
            message = self._messages.get(timeout=max(seconds, 0.001))
        except queue.Empty:
            raise ChildError(f"no answer within {seconds:.0f} s") from None
        if message is None and (code := self._process.wait()):
            lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
            raise ChildError(f"exit code {code}: {' | '.join(lines[-3:])[-600:] or 'no output'}")
        return message

    def end(self) -> None:
        """End the process and all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError, ValueError):
                    stream.close()


class Parent:
    """The parent, seen from the child. Anything else that is printed goes to stderr from now on."""

    def __init__(self) -> None:
        self._results: IO[str] = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        self._commands: IO[str] = os.fdopen(os.dup(sys.stdin.fileno()))
        sys.stdout.flush()
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def send(self, result: Mapping[str, Any]) -> None:
        """Send an answer."""
        self._results.write(f"{_MARK}{json.dumps(result)}\n")
        self._results.flush()

    def commands(self) -> Iterator[str]:
        """Yield the commands until the parent has ended."""
        while command := self._commands.readline():
            yield command.strip()
