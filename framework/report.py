"""What a person sees of a run before the first step and after the last, and the files that say the same."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .callback import Callback
from .run import Run

if TYPE_CHECKING:
    from .training import FitPlan
    from .windows import Windows

_WIDTH = 100


def box(title: str, lines: list[str]) -> str:
    """Return lines in a frame."""
    width = min(_WIDTH, max(len(title) + 4, *(len(line) for line in lines)))
    top = f"┌─ {title} " + "─" * max(0, width - len(title) - 1) + "┐"
    body = [f"│ {line:<{width}} │" for line in lines]
    return "\n".join([top, *body, "└" + "─" * (width + 2) + "┘"])


def start_lines(
    run: Run, plan: FitPlan, windows: Windows, run_dir: Path | None, checkpoint_dir: Path | None, resumed: Path | None
) -> list[str]:
    """Return at most six lines on how a fit is set up."""
    world, fabric = run.world, run.fabric
    ranks = f"{world.size} rank{'s' if world.size > 1 else ''}"
    nodes = f" on {world.num_nodes} nodes" if world.num_nodes > 1 else ""
    schedule = windows.schedule
    micro = micro_batch_size(windows)
    if schedule.constant is not None and micro is not None:
        whole = f"{micro} x {schedule.constant} x {world.size} = {micro * schedule.constant * world.size} samples"
    elif schedule.constant is not None:
        whole = f"1 x {schedule.constant} x {world.size} = {schedule.constant * world.size} micro-batches"
    else:
        whole = f"{micro or 1} x ({schedule}) x {world.size}"
    lines = [
        f"strategy   {fabric.strategy.name}, {ranks}{nodes} on {world.device.type}, precision {fabric.precision.name}",
        f"batch      micro-batch x window x ranks: {whole}",
        f"length     {_length(plan, windows)}",
    ]
    if run_dir is not None:
        lines.append(f"logs       {run_dir}")
    if checkpoint_dir is not None:
        lines.append(f"saves      {checkpoint_dir}")
    if resumed is not None:
        lines.append(
            f"resumes    {resumed.name}: epoch {run.progress.epoch}, batch {run.progress.batch_in_epoch}, "
            f"step {run.progress.global_step}"
        )
    return lines


def micro_batch_size(windows: Windows) -> int | None:
    """Return the samples of a full micro-batch on one rank, where the loader tells."""
    size = getattr(windows.source, "micro_batch_size", None)
    return int(size) if size is not None else None


def _length(plan: FitPlan, windows: Windows) -> str:
    end = windows.end
    if end is None:
        epoch = "epochs of unknown length"
    else:
        steps = windows.schedule.windows(end, 0, 0)
        epoch = f"{steps} optimizer step{'s' if steps != 1 else ''} an epoch"
    limits = []
    if plan.max_epochs is not None and plan.max_epochs >= 0:
        limits.append(f"{plan.max_epochs} epoch{'s' if plan.max_epochs != 1 else ''}")
    if plan.max_steps >= 0:
        limits.append(f"{plan.max_steps} steps")
    return f"{' or '.join(limits) or 'no limit'}, {epoch}"


def end_lines(run: Run, callbacks: list[Callback], log_dir: str | None) -> list[str]:
    """Return a few lines on how a fit ended and what to do next."""
    progress = run.progress
    reason = f": {run.stop_reason}" if run.stop_reason else ""
    lines = [f"trained    {progress.global_step} optimizer steps, {progress.epoch} epochs{reason}"]
    saver = next((c for c in callbacks if getattr(c, "best_model_path", "") or getattr(c, "last_model_path", "")), None)
    if saver is not None:
        monitor, score = getattr(saver, "monitor", None), getattr(saver, "best_model_score", None)
        if monitor is not None and score is not None:
            lines.append(f"best       {monitor} = {float(score):.5g}")
        path = getattr(saver, "best_model_path", "") or getattr(saver, "last_model_path", "")
        lines.append(f"checkpoint {shortened(path)}")
        lines.append('resume     run the same command with ckpt_path="auto"')
    if log_dir is not None:
        lines.append(f"curves     tensorboard --logdir {shortened(log_dir)}")
    return lines


def report(run: Run, callbacks: list[Callback]) -> dict[str, Any]:
    """Return how a fit ended, for the report in the run's directory."""
    progress = run.progress
    best = next((str(path) for c in callbacks if (path := getattr(c, "best_model_path", ""))), None)
    return {
        "epochs": progress.epoch,
        "optimizer_steps": progress.global_step,
        "stopped": run.stop_reason,
        "best_checkpoint": best,
        "metrics": {name: float(value) for name, value in run.metric_view("callback").items()},
    }


def shortened(path: str | Path) -> str:
    """Return a path relative to the working directory where it lies below it."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def say(text: str) -> None:
    """Print one line, or one block of lines, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
