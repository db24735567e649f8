"""``Lease``: one machine at a time writes a run in a bucket.

On one machine the lock of the run's directory tells who writes it, and ends with the process. A bucket has no locks:
the process that writes a run says so in an object, again every twenty seconds. What a machine that is gone has said
counts for 90 seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from ..core.errors import StorageError
from ..system.processes import is_running, process_space
from .store import Store

NAME = ".lease"
_RENEWED_SECONDS = 20.0
_COUNTS_SECONDS = 90.0
_POLL_SECONDS = 2.0
# Clocks of machines differ by less.
_OLD_SECONDS = 600.0


class Lease:
    """The right to write the objects of a store.

    Args:
        store: the objects of a run.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._own = {
            "host": socket.gethostname(),
            "machine": process_space() or socket.gethostname(),
            "pid": os.getpid(),
            "token": secrets.token_hex(8),
        }
        self._ended = threading.Event()
        self._is_lost = False
        self._thread = threading.Thread(target=self._renew, daemon=True, name="phalanx-lease")

    def acquire(self, note: Callable[[str], None], waits: bool = True) -> None:
        """Take the lease, and renew it on a thread until ``release``; wait for that of a machine that is gone.

        Args:
            note: called with a sentence before it waits.

        Raises:
            StorageError: another machine writes the objects, or the service does not answer.
        """
        found = self._read()
        if found is not None and self._counts(found):
            if not waits:
                raise self._refusal(found)
            note(
                f"{self._store.url} was written by {_holder(found)}: this waits up to {_COUNTS_SECONDS:.0f} s to see "
                "whether that still runs."
            )
            until = time.monotonic() + _COUNTS_SECONDS
            while time.monotonic() < until and (now := self._read()) is not None:
                if now != found:
                    raise self._refusal(now)
                time.sleep(_POLL_SECONDS)
        self._write()
        now = self._read()
        if now is not None and now.get("token") != self._own["token"]:
            raise self._refusal(now)
        self._thread.start()

    def check(self) -> None:
        """Raise a ``StorageError`` if another machine has taken the lease, as this one did not answer for a while."""
        if self._is_lost:
            raise StorageError(f"another machine writes {self._store.url} now.")

    def release(self) -> None:
        """Give the lease back. A service that does not answer forgets it after a while."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        with contextlib.suppress(OSError):
            if self._is_own():
                self._store.delete([NAME])

    def _refusal(self, found: dict[str, Any]) -> StorageError:
        return StorageError(
            f"{self._store.url} is being written by {_holder(found)}: wait for that run, end it, or give another "
            "default_root_dir."
        )

    def _counts(self, found: dict[str, Any]) -> bool:
        """Whether the process that wrote a lease may still run."""
        if found.get("machine") == self._own["machine"]:
            pid = found.get("pid")
            return isinstance(pid, int) and pid != self._own["pid"] and is_running(pid)
        said = found.get("time")
        return isinstance(said, float) and abs(time.time() - said) < _OLD_SECONDS

    def _renew(self) -> None:
        while not self._ended.wait(_RENEWED_SECONDS):
            with contextlib.suppress(OSError):
                if not self._is_own():
                    self._is_lost = True
                    return
                self._write()

    def _is_own(self) -> bool:
        found = self._read()
        return found is not None and found.get("token") == self._own["token"]

    def _write(self) -> None:
        self._store.put(NAME, json.dumps({**self._own, "time": time.time()}).encode())

    def _read(self) -> dict[str, Any] | None:
        try:
            found = json.loads(self._store.read(NAME))
        except (FileNotFoundError, ValueError):
            return None
        return found if isinstance(found, dict) else None


def _holder(found: dict[str, Any]) -> str:
    return f"process {found.get('pid')} on {found.get('host')}"
