"""Restarts of a run, and the time that they have cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .event_log import Attempt
from .times import timestamp


def summarize_attempts(attempts: Sequence[Attempt]) -> dict[str, Any]:
    """Return the attempts of a run and the time lost between them, as JSON values.

    ``redone_seconds`` is the time in which steps were trained that a later attempt has trained again.
    ``waited_seconds`` is the time between two attempts of the same launch, in which ranks were started again. Time
    between two launches, in which the run waited for its user or its queue, is ``paused_seconds``. ``goodput``
    is the share of the time without pauses that was not lost in the other two ways.
    """
    rows: list[dict[str, Any]] = []
    redone = waited = paused = 0.0
    repeated = 0
    for number, attempt in enumerate(attempts):
        end = attempt.ended if attempt.ended is not None else attempt.seen
        following = attempts[number + 1] if number + 1 < len(attempts) else None
        lost_steps = 0 if following is None else max(0, attempt.reached - following.step)
        lost_seconds = 0.0
        if following is not None:
            lost_seconds = max(0.0, end - _reached(attempt, following.step, end))
            gap = max(0.0, following.began - end)
            waited += gap if following.attempt else 0.0
            paused += 0.0 if following.attempt else gap
        redone, repeated = redone + lost_seconds, repeated + lost_steps
        rows.append({
            "began": timestamp(attempt.began),
            "ended": None if attempt.ended is None and following is None else timestamp(end),
            "from_step": attempt.step,
            "to_step": attempt.reached,
            "checkpoint": attempt.checkpoint,
            "exit_code": attempt.exit_code,
            "host": attempt.host,
            "restart": attempt.attempt,
            "lost_steps": lost_steps,
            "lost_seconds": round(lost_seconds, 3),
        })  # fmt: skip
    first, last = (attempts[0], attempts[-1]) if attempts else (None, None)
    end = 0.0 if last is None else last.ended if last.ended is not None else last.seen
    total = 0.0 if first is None else end - first.began - paused
    return {
        "attempts": rows,
        "goodput": round(max(0.0, 1 - (redone + waited) / total), 4) if total > 0 else None,
        "restarts": max(0, len(rows) - 1),
        "repeated_steps": repeated,
        "redone_seconds": round(redone, 3),
        "waited_seconds": round(waited, 3),
        "paused_seconds": round(paused, 3),
    }


def _reached(attempt: Attempt, step: int, end: float) -> float:
    """Return the time at which an attempt had trained ``step`` steps, as far as it is known."""
    before = [(at, seconds) for at, seconds in attempt.passed.items() if at <= step]
    return max(before)[1] if before and step < attempt.reached else end
