"""``phalanx metrics``: the state and the newest values of a run, for Prometheus."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
from functools import partial
from typing import Any

from ..framework.report.finding import find_run, shown_path
from ..framework.report.prometheus import MetricsServer, check_endpoint, exposition, values_of_files
from .terminal_text import say


def serve_metrics(given: argparse.Namespace) -> int:
    """Serve the values of a run until the command is ended, or print them once; return the exit code."""
    check_endpoint("metrics", given.port, given.addr)
    directory = find_run(given.given_run)
    read = partial(values_of_files, directory)
    if given.once:
        sys.stdout.write(exposition(read))
        return 0
    ended = threading.Event()
    server = MetricsServer(read, given.port, given.addr)
    with contextlib.closing(server), _ending(ended):
        say(f"{server.url} has the metrics of {shown_path(directory)}; Ctrl-C ends it")
        sys.stdout.flush()
        ended.wait()
    return 0


@contextlib.contextmanager
def _ending(ended: threading.Event) -> Any:
    """Set the event at a signal that asks this process to end, within the context."""
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(each, lambda *_: ended.set()) for each in signals]
    try:
        yield
    finally:
        for each, handler in zip(signals, before, strict=True):
            signal.signal(each, handler)
