"""The end of a run in words: why it ended, at which step, what was lost, and how to resume it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from ..core.errors import CheckpointError, ConfigurationError
from ..core.wording import counted
from .values import span_text

_RESUMABLE = {"failed", "preempted", "stalled", "interrupted", "killed", "silent"}


def explain(found: dict[str, Any], ckpt_path: str | None, is_configured: bool = False) -> dict[str, Any]:
    """Return why a run ended, from the other parts of its report.

    Args:
        found: the report so far, with ``state``, ``optimizer_steps``, ``resume_from``, ``restarts``, ``from_step`` of
            the first attempt, and what describes the end.
        ckpt_path: the argument of ``fit`` that names the checkpoint to resume from.
        is_configured: whether the program takes this argument as an option.
    """
    step, state = found["optimizer_steps"], found["state"]
    newest = found["resume_from"]
    if state in ("killed", "silent") and newest is not None:
        # The process recorded its step up to a second before.
        step = max(step or 0, newest["step"] or 0)
        found = {**found, "optimizer_steps": step}
    lost = None
    if state in _RESUMABLE and step is not None:
        lost = max(0, step - ((found["from_step"] if newest is None else newest["step"]) or 0))
    return {
        "sentence": sentence_of(found),
        "step": step,
        "lost_steps": lost,
        "lost": _lost(found, lost),
        "resume": _resume(found, ckpt_path, is_configured),
    }


def how_to_resume(report: dict[str, Any], was_launched: bool = False) -> str | None:
    """Return the last line of the messages of a failed fit; None if there is no checkpoint to resume from.

    A launcher, after whose message no traceback follows, also says how to start a run again that has saved nothing.
    """
    why, newest = report["why"], report["resume_from"]
    if not why["resume"] or (newest is None and not (was_launched and why["lost_steps"])):
        return None
    if newest is None:
        return f"{why['lost']}. To start again: {why['resume'].partition('   (')[0]}"
    return f"{why['lost']}. To resume: {why['resume']}"


def went_on(attempt: dict[str, Any], following: dict[str, Any]) -> str:
    """Return why an attempt ended, from where the next one went on, and what it trained again."""
    code, again = attempt["exit_code"], attempt["lost_steps"]
    ended = f"it ended at step {attempt['to_step']:,}" + ("" if code is None else f" with exit code {code}")
    origin = "from the beginning" if following["checkpoint"] is None else f"from {Path(following['checkpoint']).name}"
    repeated = f"{counted(again, 'step')} trained again" if again else "no step trained again"
    where = f", step {following['from_step']:,}" if following["from_step"] else ""
    return f"{attempt['stopped'] or ended}; went on {origin}{where}, {repeated}"


def headline(stopped: str | None) -> str:
    """Return the first line of a message, with the error at the end of a traceback that follows it; the last of a
    stall's."""
    lines = [line.strip() for line in (stopped or "").splitlines() if line.strip()]
    if not lines:
        return ""
    if len(lines) > 1 and any(line.startswith("Traceback") for line in lines):
        head = "" if lines[0].startswith("Traceback") else f"{lines[0].rstrip(':')}: "
        return f"{head}{_error_line(stopped or '') or lines[-1]}"
    if lines[0].startswith("the run has stalled."):
        # The stacks of the ranks follow, and then the sentence that names those at fault.
        return lines[-1]
    # A process that no supervisor watches records the class of the error.
    return lines[0].removeprefix("Preempted: ")


def _error_line(stopped: str) -> str:
    """Return the line of a traceback that names the error: the first one that is not indented after the frames."""
    seen = False
    for line in stopped.splitlines():
        if line.startswith("Traceback"):
            seen = True
        elif seen and line and not line[0].isspace():
            return line.strip()
    return ""


def sentence_of(found: dict[str, Any]) -> str:
    """Return how a run ended, to follow its name; ``found`` is as for ``explain``."""
    state, step, code = found["state"], found["optimizer_steps"], found["exit_code"]
    took = found["duration_seconds"]
    after = "" if took is None else f" after {span_text(took)}"
    if found["restarts"]:
        after = f" after {span_text(found['total_seconds'])} in {found['restarts'] + 1} attempts"
    # It is the end of a clause, which the reader of the sentence completes.
    reason = headline(found["stopped"]).rstrip(".")
    where = "before training began" if step is None else f"at step {step:,}"
    # The reason of a supervisor has the position, with the epoch and the batch.
    where = "" if re.search(r"\bstep \d", reason) else f" {where}"
    because = f": {reason}" if reason else ""
    if state == "running":
        return f"is training, at step {step or 0:,}{after}"
    if state == "silent":
        return f"has shown no sign of life since step {step or 0:,}{after}; its host cannot be asked from here"
    if state == "unknown":
        return "has left no record of a fit"
    if state == "finished":
        stopped = f", stopped early: {reason}" if reason else ""
        return f"finished{where}{after}{stopped}"
    if state == "pruned":
        return f"was {reason}{where}{after}"
    if state == "killed":
        return (
            f"was killed at about step {step or 0:,}{after} and could not record why: by SIGKILL, as when memory runs "
            "out, or by a crash"
        )
    coded = "" if code is None else f", exit code {code}"
    return f"ended{where}{after}{coded}{because}"


def _lost(found: dict[str, Any], lost: int | None) -> str:
    newest = found["resume_from"]
    if lost is None:
        return ""
    if newest is None:
        since = found["from_step"]
        if not lost:
            return "no checkpoint to resume from"
        where = f"no checkpoint has been saved since step {since:,}" if since else "there is no checkpoint"
        return f"{'1 step is' if lost == 1 else f'all {lost:,} steps are'} lost: {where}"
    about = "about " if found["state"] == "killed" else ""
    steps = f"{about}1 step is lost" if lost == 1 else f"{about}{lost:,} steps are lost"
    return f"{'nothing lost' if not lost else steps}: {newest['name']} (step {newest['step'] or 0:,}) is good"


def _resume(found: dict[str, Any], ckpt_path: str | None, is_configured: bool) -> str | None:
    """Return the command that resumes a run; None for one that need not or cannot be resumed."""
    command = found["command"]
    if found["state"] not in _RESUMABLE or not command:
        return None
    text = shortened_command(command, found["directory"])
    if found["exit_code"] == ConfigurationError.exit_code:
        return f"{text}   (once the setting is corrected)"
    if found["exit_code"] == CheckpointError.exit_code:
        return None
    if found["resume_from"] is None:
        return f"{text}   (from the beginning)"
    if ckpt_path == "auto":
        return text
    return with_checkpoint(text, "auto") if is_configured else f'{text}   (with fit(..., ckpt_path="auto"))'


def with_checkpoint(command: str, given: str) -> str:
    """Return the command of a program with configuration files, with this ``--ckpt_path`` in place of its own."""
    others = re.sub(r"\s--ckpt_path(=|\s+)\S+", "", command)
    return f"{others} --ckpt_path {shlex.quote(given)}"


def shortened_command(command: str, directory: str | None = None) -> str:
    """Return a command with ``python`` in place of an interpreter's path, and paths relative to its directory."""
    try:
        first, *others = shlex.split(command)
    except ValueError:
        return command
    name = Path(first).name
    if name.startswith("python") and others and Path(others[0]).name == "phalanx":
        # The command of the same name is a script, which its interpreter runs.
        first, name, others = "phalanx", "phalanx", others[1:]
    prefix = f"{directory}/" if directory else "\0"
    others = [each.removeprefix(prefix) for each in others]
    return shlex.join(["python" if name.startswith("python") else first, *others])
