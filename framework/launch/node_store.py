"""``NodeStore``: the store in which the launchers of several nodes meet, with a limit on the time of each call.

A connection that is cut answers nothing, and torch's client would wait for the operating system to give it up, which
takes a quarter of an hour. So the calls run in a thread, which is left behind if it does not return.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, TimeoutError as TooLate
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from . import liveness
from .launch_context import NodePlace

_KNOCK_SECONDS = 1.0

_Call = tuple[Callable[[], Any], Future[Any]]


class StoreLost(ConnectionError):
    """The store does not answer."""


class NodeStore:
    """A connection to the store. Every method raises ``StoreLost`` if there is no answer, and from then on at once."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._is_lost = False
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="phalanx-node-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, once the calls that were begun have returned."""
        self._calls.put(None)

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        self._call(self._store.set, key, value)

    def get(self, key: str) -> str:
        """Return a value that exists."""
        return str(self._call(self._store.get, key).decode())

    def get_all(self, keys: Sequence[str]) -> list[str]:
        """Return values that exist."""
        return [value.decode() for value in self._call(self._store.multi_get, list(keys))]

    def has(self, *keys: str) -> bool:
        """Whether all of the keys have values."""
        return bool(self._call(self._store.check, list(keys)))

    def add(self, key: str, amount: int) -> int:
        """Increase a counter and return it."""
        return int(self._call(self._store.add, key, amount))

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if self._is_lost:
            raise StoreLost
        answer: Future[Any] = Future()
        self._calls.put((partial(function, *arguments), answer))
        try:
            return answer.result(liveness.SILENT_SECONDS)
        except (TooLate, dist.DistError) as error:
            self._is_lost = True
            raise StoreLost from error

    def _run(self) -> None:
        while (pending := self._calls.get()) is not None:
            call, answer = pending
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)


def connect(place: NodePlace, listening: int | None) -> NodeStore | None:
    """Return the store, or None if node 0 does not serve it yet, or still serves that of an earlier start.

    ``listening``: on node 0, the descriptor of the socket on which this process serves the store.
    """
    serving: dict[str, Any] = {"is_master": False}
    if listening is not None:
        serving = {"is_master": True, "master_listen_fd": listening}
    try:
        if place.rank != 0:
            # The store itself would wait for an answer, in which no signal is handled.
            socket.create_connection((place.host, place.port), _KNOCK_SECONDS).close()
        limit = timedelta(seconds=liveness.SILENT_SECONDS)
        store = dist.TCPStore(place.host, place.port, timeout=limit, wait_for_workers=False, **serving)  # type: ignore[attr-defined]
        # A scheduler may start this node again before the launchers of its last start have ended.
        return NodeStore(store) if store.add(f"came/{place.rank}", 1) == 1 else None
    except (OSError, dist.DistError):
        return None
