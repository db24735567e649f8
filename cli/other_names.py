"""Names of commands in other tools, each with the command of phalanx that does the same."""

from __future__ import annotations

from collections.abc import Iterable

from ..framework.core.errors import did_you_mean

# Of Accelerate, Lightning, torch, DeepSpeed, Hugging Face and TensorBoard, and what people try first.
OTHER_NAMES = {
    "estimate-memory": "plan",
    "estimate": "plan",
    "memory": "plan",
    "dry-run": "plan",
    "merge-weights": "checkpoint consolidate",
    "zero_to_fp32": "checkpoint consolidate",
    "consolidate": "checkpoint consolidate",
    "convert": "checkpoint convert",
    "inspect": "checkpoint inspect",
    "verify": "checkpoint verify",
    "diff": "checkpoint diff",
    "checkpoints": "checkpoint list",
    "env": "doctor",
    "collect-env": "doctor",
    "ds_report": "doctor",
    "check": "doctor",
    "info": "doctor",
    "self-test": "selftest",
    "config": "new",
    "init": "new",
    "create": "new",
    "quickstart": "demo",
    "example": "demo",
    "train": "fit",
    "run": "fit",
    "finetune": "fit",
    "eval": "validate",
    "evaluate": "validate",
    "infer": "predict",
    "generate": "predict",
    "torchrun": "launch",
    "start": "launch",
    "submit": "launch",
    "ls": "runs",
    "list": "runs",
    "experiments": "runs",
    "watch": "top",
    "status": "top",
    "monitor": "top",
    "tensorboard": "report",
    "show": "report",
    "logs": "report",
    "explain": "why",
    "to-fsdp2": "migrate",
    "upgrade": "migrate",
    "fix": "migrate",
}


def suggestion(given: str, known: Iterable[str]) -> str:
    """Return a sentence with the command that an unknown one stands for, or the closest known one, or nothing."""
    names = list(known)
    meant = OTHER_NAMES.get(given.lower(), "")
    if meant.partition(" ")[0] in names:
        return f" Here it is 'phalanx {meant}'."
    return did_you_mean(given, names)
