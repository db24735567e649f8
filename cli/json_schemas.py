"""The JSON that commands print with ``--json``, as JSON Schemas: ``phalanx schema COMMAND`` prints one.

Keys may be added to what a command prints; a key that is removed, or means something else, changes ``schema``.
``checkpoint list`` prints a plain list without it.
"""

from __future__ import annotations

import argparse
from typing import Any

from ..framework.core.errors import unknown
from .terminal_text import say, say_json

_DRAFT = "https://json-schema.org/draft/2020-12/schema"


def _expanded(given: Any) -> dict[str, Any]:
    """Return the schema of a short form.

    A text is the name of a type, or of several as in ``"string|null"``; an integer is that number; a list with one item
    is an array of it; a tuple is any of its items; a dict is an object with all these keys; ``"any"`` is anything.
    """
    if isinstance(given, str):
        names = given.split("|")
        return {} if given == "any" else {"type": names[0] if len(names) == 1 else names}
    if isinstance(given, int):
        return {"const": given}
    if isinstance(given, list):
        return {"type": "array", "items": _expanded(given[0])}
    if isinstance(given, tuple):
        return {"anyOf": [_expanded(each) for each in given]}
    keys = {name: _expanded(value) for name, value in given.items()}
    return {"type": "object", "properties": keys, "required": [*keys]}


# Each may be null.
_WHOLE, _NUMBER, _TEXT, _FLAG, _OBJECT = "integer|null", "number|null", "string|null", "boolean|null", "object|null"
_WHY = {"sentence": "string", "step": _WHOLE, "lost_steps": _WHOLE, "lost": _TEXT, "resume": _TEXT}
# By name: the values of both runs.
_PAIRS = "object"
_CHECKPOINT = {
    "path": "string", "status": "string", "kind": _TEXT, "step": _WHOLE, "epoch": _WHOLE, "metric": "array|null",
    "bytes": _WHOLE, "saved_at": _NUMBER, "problem": _TEXT,
}  # fmt: skip
_VERIFIED = {"schema": 1, "path": "string", "good": "boolean", "problems": ["string"]}
_TRIAL = {
    "number": "integer", "state": "string", "value": _NUMBER, "seconds": _NUMBER, "parameters": "object",
    "reason": _TEXT, "run": _TEXT, "command": "string",
}  # fmt: skip
_WRITTEN = {"schema": 1, "path": "string"}

SCHEMAS: dict[str, Any] = {
    "runs": {
        "schema": 1, "count": "integer",
        "runs": [{
            "path": "string", "state": "string", "exit_code": _WHOLE, "step": _WHOLE, "epochs": _WHOLE,
            "best_score": _OBJECT, "metrics": "object", "strategy": _TEXT, "world_size": _WHOLE, "began": _TEXT,
            "duration_seconds": _NUMBER, "total_seconds": _NUMBER, "stopped": _TEXT, "problems": ["string"],
        }],
    },
    "top": {
        "schema": 1, "path": "string", "state": "string", "progress": "object", "metrics": _OBJECT, "memory": "object",
        "why": _WHY,
    },
    "report": {
        "schema": 1, "run": "string", "path": "string", "state": "string", "exit_code": _WHOLE, "stopped": _TEXT,
        "traceback": _TEXT, "began": _TEXT, "ended": _TEXT, "duration_seconds": _NUMBER, "epochs": _WHOLE,
        "optimizer_steps": _WHOLE, "best_checkpoint": _TEXT, "best_score": _OBJECT, "last_checkpoint": _TEXT,
        "metrics": _OBJECT, "throughput": _OBJECT, "command": _TEXT, "directory": _TEXT, "host": _TEXT,
        "git_commit": _TEXT, "git_dirty": _FLAG, "versions": _OBJECT, "machine": _OBJECT, "why": _WHY,
        "resume_from": _OBJECT, "progress": "object", "settings": "object", "model": _OBJECT, "memory": "object",
        "curves": "object", "curves_left_out": "integer", "attempts": ["object"], "restarts": "integer",
        "went_on": ["string"], "goodput": _NUMBER, "total_seconds": _NUMBER, "repeated_steps": "integer",
        "redone_seconds": "number", "waited_seconds": "number", "paused_seconds": "number", "rewinds": ["object"],
        "checkpoints": ["object"], "checkpoints_count": "integer", "warnings": ["string"], "problems": ["string"],
        "page": _TEXT,
    },
    "why": {
        "schema": 1, "run": "string", "path": "string", "state": "string", "exit_code": _WHOLE, "stopped": _TEXT,
        "began": _TEXT, "ended": _TEXT, "duration_seconds": _NUMBER, "why": _WHY, "resume_from": _OBJECT,
        "restarts": "integer", "total_seconds": _NUMBER, "went_on": ["string"], "rewinds": ["object"],
        "problems": ["string"],
    },
    "data": {
        "schema": 1, "path": "string",
        "windows": [{
            "step": _WHOLE, "epoch": "integer", "batches": ["integer"], "applied": "boolean", "unit": "string",
            "positions": ["integer"], "order": "string",
            "ranks": (["object"], "null"),
        }],
    },
    "eval": {
        "schema": 1, "path": "string",
        "evaluations": [{
            "step": "integer", "checkpoint": "string", "tasks": "string", "values": "object", "time": "number",
        }],
    },
    "compare": {
        "schema": 1, "runs": ["string"], "settings": _PAIRS, "results": _PAIRS, "metrics": _PAIRS,
    },
    "plan": {
        "schema": 1, "target": "string", "model": "string", "parameters": "integer", "frozen": "integer",
        "precision": "string", "strategy": "string", "ranks": "integer", "ranks_per_node": _WHOLE,
        "parallel": "any", "fits": "boolean", "refusal": _TEXT, "rehearsed_rank": _WHOLE, "shortage": "any",
        "batch": _OBJECT, "reserved": "any", "available": "any", "needs": "any", "communication": ["object"],
        "strategies": [{"name": "string", "fits": "boolean", "refusal": _TEXT, "needs": "any"}], "instead": "any",
        "saves": "any", "notes": ["string"],
    },
    "doctor": {
        "schema": 1, "good": "boolean",
        "checks": [{"group": "string", "name": "string", "good": "boolean", "found": "string", "advice": "string"}],
        "provenance": _OBJECT,
    },
    "selftest": {
        "schema": 1, "good": "boolean", "device": "string", "seconds": "number", "strategies": ["object"],
    },
    "sweep": {
        "schema": 1, "directory": "string", "study": "string", "metric": "string", "mode": "string",
        "trials": [_TRIAL], "best": (_TRIAL, "null"), "page": "string",
    },
    "try": {
        "schema": 1, "program": "string", "command": "string", "commit": _TEXT, "dirty": _FLAG, "metric": "string",
        "mode": "string", "value": _NUMBER, "seconds": "number", "steps": _WHOLE, "peak_memory_bytes": _WHOLE,
        "status": "string", "why": _TEXT, "verdict": _TEXT, "difference": _NUMBER, "noise": _NUMBER,
        "because": "string", "against": ({"value": "number", "commit": _TEXT, "runs": ["string"]}, "null"),
        "runs": [{
            "run": _TEXT, "seed": _WHOLE, "status": "string", "why": _TEXT, "value": _NUMBER, "seconds": "number",
            "steps": _WHOLE, "peak_memory_bytes": _WHOLE,
        }],
    },
    "checkpoint list": [_CHECKPOINT],
    "checkpoint inspect": {
        "schema": 1, "path": "string", "format_version": "integer", "phalanx": _TEXT, "saved_at": _NUMBER,
        "kind": "string", "module": _TEXT, "strategy": _TEXT, "precision": _TEXT, "world_size": _WHOLE,
        "sharded": "boolean", "epoch": _WHOLE, "batch": _WHOLE, "step": _WHOLE, "finite": _FLAG, "nonfinite": "any",
        "sections": "object", "files": "object", "bytes": "integer", "optimizers": "array", "hparams": "object",
        "unsaved_hparams": ["string"], "metrics": "any",
    },
    # A list for several checkpoints.
    "checkpoint verify": (_VERIFIED, [_VERIFIED]),
    "checkpoint diff": {"schema": 1, "equal": "boolean", "sections": "object", "documents": "any"},
    "checkpoint consolidate": _WRITTEN,
    "checkpoint convert": {**_WRITTEN, "notes": ["string"]},
    "export": {**_WRITTEN, "checkpoint": "string"},
    "new": {**_WRITTEN, "kind": "string", "files": ["string"], "missing": "any"},
    "rewind": {**_WRITTEN, "resume": _TEXT},
    "clean": {"schema": 1, "dry_run": "boolean", "deleted": ["object"], "left": ["string"]},
    "migrate": {"schema": 1, "written": "boolean", "files": ["object"]},
    "launch": {
        "schema": 1, "platform": "string", "name": "string", "file": _TEXT, "text": "string", "submit": "any",
        "submitted": "boolean", "answer": _TEXT,
    },
}  # fmt: skip
"""The schema of each command in a short form, see ``_expanded``."""


def schema_of(command: str) -> dict[str, Any]:
    """Return the JSON Schema of what a command prints with ``--json``.

    Args:
        command: its name, such as ``"why"`` or ``"checkpoint list"``.

    Raises:
        UnknownNameError: it has none; the message has the closest name.
    """
    if command not in SCHEMAS:
        raise unknown("command", command, SCHEMAS)
    return {"$schema": _DRAFT, "title": f"phalanx {command} --json", **_expanded(SCHEMAS[command])}


def show_schema(given: argparse.Namespace) -> int:
    """Print the JSON Schema of a command, or the commands that have one; return the exit code."""
    if given.of:
        say_json(schema_of(" ".join(given.of)))
    else:
        for command in SCHEMAS:
            say(command)
    return 0
