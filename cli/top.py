"""``phalanx top``: a live view of a run, from the files that it writes while it trains."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import sys
import termios
import time
import tty
from pathlib import Path
from typing import Any

from ..framework.core.size_text import size_text
from ..framework.core.wording import counted
from ..framework.report.document import build_report
from ..framework.report.finding import find_run, shown_path
from ..framework.report.run_files import RunFiles
from ..framework.report.series import OWN_PREFIX
from ..framework.report.values import as_number, listed, mapping, rows, span_text, text, whole
from ..framework.system.console import encodable, printable
from .commands import LEAST_INTERVAL_SECONDS
from .terminal_text import line_width, painted, say, say_json, shortened, shown_number, spark, state_color

_MOST_METRICS, _MOST_RANKS = 8, 8
_CLEAR = "\x1b[H\x1b[J"
_SECOND_SCREEN, _FIRST_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_LIVE = ("running", "silent")


class Keys:
    """A context in which the terminal passes each key on at once. Its modes are restored on exit."""

    def __enter__(self) -> Keys:
        self._descriptor = sys.stdin.fileno()
        self._before = termios.tcgetattr(self._descriptor)
        # Ctrl-C still raises KeyboardInterrupt.
        tty.setcbreak(self._descriptor)
        self.draw(_SECOND_SCREEN)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.draw(_FIRST_SCREEN)
        termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._before)

    def draw(self, text: str) -> None:
        """Write text to the terminal at once."""
        sys.stdout.write(text)
        sys.stdout.flush()

    def wait(self, seconds: float) -> str:
        """Wait for a key; return it, or an empty text if none was pressed. The end of the input counts as ``q``."""
        ready, _, _ = select.select([self._descriptor], [], [], seconds)
        if not ready:
            return ""
        return os.read(self._descriptor, 1).decode("ascii", "replace").lower() or "q"


def watch_run(given: argparse.Namespace) -> int:
    """Show a run while it trains; return the exit code."""
    if not given.interval >= LEAST_INTERVAL_SECONDS:
        given.parser.error(f"--interval {given.interval:g}: give {LEAST_INTERVAL_SECONDS} seconds or more")
    directory = find_run(given.given_run)
    try:
        if given.once or given.json or not (sys.stdin.isatty() and sys.stdout.isatty()):
            _print_views(directory, given)
        else:
            _show_live(directory, given.interval)
    except KeyboardInterrupt:
        # The way to end a view.
        return 0
    return 0


def _print_views(directory: Path, given: argparse.Namespace) -> None:
    """Print a view, or lines until the run ends."""
    while True:
        report = build_report(RunFiles(directory))
        if given.json:
            say_json(
                {name: report[name] for name in ("schema", "path", "state", "progress", "metrics", "memory", "why")}
            )
        elif given.once:
            print("\n".join(view(report, directory)))
        else:
            say(line_of(report))
        sys.stdout.flush()
        if given.once or report["state"] not in _LIVE:
            return
        time.sleep(given.interval)


def _show_live(directory: Path, interval: float) -> None:
    """Redraw the view on the terminal's second screen; the last one stays on the first."""
    with Keys() as keys:
        while True:
            report = build_report(RunFiles(directory))
            lines = view(report, directory)
            keys.draw(_CLEAR + "\r\n".join([*lines, painted("q ends the view, not the run", "faint")]))
            if report["state"] not in _LIVE or keys.wait(interval) == "q":
                break
    print("\n".join(lines))


def view(report: dict[str, Any], directory: Path) -> list[str]:
    """Return the lines of a view, each of which fits the terminal."""
    width, progress, state = line_width(), mapping(report["progress"]), text(report["state"])
    resolved = mapping(mapping(report["settings"]).get("resolved"))
    ranks = counted(whole(resolved.get("world_size")) or 1, "rank")
    how = f"{text(resolved.get('strategy'))}, {ranks} on {text(report['host'])}"
    name = printable(shown_path(directory))
    head = f"{painted(name, 'bold')}  {painted(state, state_color(state))}  {printable(how)}"
    plain = shortened(printable(f"{name}  {state}  {how}"), width)
    lines = [head if len(f"{name}  {state}  {how}") <= width else plain]
    lines += [_position(progress, min(20, width // 4), state in _LIVE), _pace(report, progress)]
    lines += _metric_lines(report)
    lines += [_rank_line(each) for each in rows(progress.get("ranks"))[:_MOST_RANKS]]
    if state not in _LIVE:
        lines.append(report["why"]["sentence"])
    return [lines[0], *(encodable(shortened(printable(line), width), sys.stdout) for line in lines[1:] if line)]


def line_of(report: dict[str, Any]) -> str:
    """Return a view in one line, for a pipe."""
    progress, state = mapping(report["progress"]), text(report["state"])
    metrics = mapping(report["metrics"])
    parts = [state, *_counts(progress)]
    if (rate := as_number(progress.get("steps_per_second"))) is not None and state == "running":
        parts.append(f"{shown_number(rate)} steps/s")
    parts += [f"{name} {shown_number(value)}" for name, value in list(metrics.items())[:4]]
    return ", ".join(parts) if state in _LIVE else f"{state}: {report['why']['sentence']}"


def _counts(progress: dict[str, Any]) -> list[str]:
    step, steps = whole(progress.get("step")), whole(progress.get("steps"))
    epoch, epochs = whole(progress.get("epoch")), whole(progress.get("max_epochs"))
    parts = []
    if step is not None:
        parts.append(f"step {step:,}" + (f" of {steps:,}" if steps else ""))
    if epoch is not None:
        parts.append(f"epoch {epoch}" + (f" of {epochs}" if epochs and epochs > 0 else ""))
    return parts


def _position(progress: dict[str, Any], width: int, is_live: bool) -> str:
    """Return the progress with a bar; the position within the epoch is that of a run that trains."""
    step, steps = whole(progress.get("step")), whole(progress.get("steps"))
    batch, batches = whole(progress.get("batch")), whole(progress.get("batches"))
    parts = _counts(progress)
    if is_live and batch is not None and batches:
        parts.append(f"batch {batch} of {batches}")
    if is_live and (section := text(progress.get("section"))):
        parts.append(f"in {section}")
    bar = ""
    if step is not None and steps:
        done = min(width, width * step // steps)
        bar = f"[{'=' * done}{' ' * (width - done)}] {100 * step // steps} %  "
    return bar + ", ".join(parts)


def _pace(report: dict[str, Any], progress: dict[str, Any]) -> str:
    rate, left = as_number(progress.get("steps_per_second")), as_number(progress.get("seconds_left"))
    updated, memory = as_number(progress.get("updated")), mapping(mapping(report["memory"]).get("measured"))
    parts = []
    if rate is not None:
        parts.append(f"{shown_number(rate)} steps/s")
    if left is not None:
        parts.append(f"{span_text(left)} left")
    if (used := whole(memory.get("used"))) is not None:
        parts.append(f"{size_text(used)} of memory")
    if report["state"] in _LIVE and updated is not None:
        parts.append(f"sign of life {span_text(max(0.0, time.time() - updated))} ago")
    return ", ".join(parts)


def _metric_lines(report: dict[str, Any]) -> list[str]:
    curves = {name: value for name, value in mapping(report["curves"]).items() if not name.startswith(OWN_PREFIX)}
    metrics = mapping(report["metrics"])
    names = list(dict.fromkeys([*curves, *metrics]))[:_MOST_METRICS]
    if not names:
        return []
    length = max(map(len, names))
    found = []
    for name in names:
        values = listed(mapping(curves.get(name)).get("value"))
        last = metrics.get(name, values[-1] if values else None)
        found.append(f"{name:<{length}}  {shown_number(last):>10}  {spark(values)}")
    return found


def _rank_line(rank: dict[str, Any]) -> str:
    return f"rank {text(rank.get('rank'))}  pid {text(rank.get('pid'))}  {text(rank.get('where'))}"
