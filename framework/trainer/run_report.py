"""The summary of a fit on the console before the first and after the last step."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..api.callback import Callback, saved_by
from ..report.run_files import PAGE
from .resolved_settings import NEVER
from .run_documents import checkpoints

if TYPE_CHECKING:
    from ..data.accumulation_window import Windows
    from ..loop.fit_loop import FitLoop
    from ..loop.fit_plan import FitPlan
    from ..run.run import Run
    from ..system.run_directory import RunDirectory

_TENSORBOARD_FILES = "events.out.tfevents.*"


def box(title: str, lines: list[str]) -> str:
    """Return lines in a frame."""
    width = max(len(title) + 1, *(len(line) for line in lines))
    top = f"┌─ {title} " + "─" * (width - len(title) - 1) + "┐"
    body = [f"│ {line:<{width}} │" for line in lines]
    return "\n".join([top, *body, "└" + "─" * (width + 2) + "┘"])


def counted(number: int, what: str) -> str:
    """Return a number with its noun in singular or plural."""
    return f"{number} {what}" if number == 1 else f"{number} {what}{'es' if what.endswith('batch') else 's'}"


def start_lines(loop: FitLoop, log_dir: str | None, checkpoint_dir: Path | None) -> list[str]:
    """Return at most seven lines about the configuration of a fit."""
    run, plan, windows = loop.run, loop.plan, loop.windows
    world, fabric = run.world, run.fabric
    nodes = f" on {counted(world.num_nodes, 'node')}" if world.num_nodes > 1 else ""
    lines = [
        f"strategy   {fabric.strategy.name}, {counted(world.size, 'rank')}{nodes} on {world.device.type}, "
        f"precision {fabric.precision.name}",
        f"batch      {_global_batch(run, windows)}",
        f"length     {_length(plan, windows)}",
    ]
    if log_dir is not None:
        lines += [f"logs       {shortened(log_dir)}", *_logs_no_step(loop)]
    if checkpoint_dir is not None:
        lines.append(f"saves      {shortened(checkpoint_dir)}")
    if run.resumed is not None:
        progress = run.progress
        epoch, batch = (progress.epoch + 1, 0) if progress.epoch_ended else (progress.epoch, progress.batch_in_epoch)
        lines.append(
            f"resumes    {shortened(run.resumed[0])}: epoch {epoch}, batch {batch}, step {progress.global_step}"
        )
    return lines


def _logs_no_step(loop: FitLoop) -> list[str]:
    """Return a remark if the fit ends before the first step that is logged, unless the user asked for none."""
    steps, every = loop.estimated_steps(), loop.plan.log_every_n_steps
    if steps >= every or every == NEVER:
        return []
    return [f"           no values of steps: the fit has {steps}, and log_every_n_steps is {every}"]


def _global_batch(run: Run, windows: Windows) -> str:
    """Return the samples of an optimizer step as a product, or the micro-batches if their size is unknown."""
    size, ranks = windows.source.micro_batch_size, run.world.data_size
    if not run.module.automatic_optimization:
        each = counted(size, "sample") if size is not None else "one micro-batch"
        return f"{each} for each of {counted(ranks, 'rank')}; training_step steps the optimizers"
    factor = windows.schedule.constant
    unit = "sample" if size is not None else "micro-batch"
    if factor is None:
        return f"micro-batch x window x ranks: {size or 1} x ({windows.schedule}) x {ranks}"
    whole = counted((size or 1) * factor * ranks, unit)
    return f"micro-batch x window x ranks: {size or 1} x {factor} x {ranks} = {whole}"


def _length(plan: FitPlan, windows: Windows) -> str:
    full = windows.full
    epoch = "an epoch ends with its data"
    if full is not None:
        epoch = f"{counted(windows.schedule.windows(full, 0, 0), 'optimizer step')} an epoch"
    limits = []
    if plan.max_epochs is not None and plan.max_epochs >= 0:
        limits.append(counted(plan.max_epochs, "epoch"))
    if plan.max_steps >= 0:
        limits.append(counted(plan.max_steps, "step"))
    return f"{' or '.join(limits) or 'no limit'}, {epoch}"


def end_lines(run: Run, callbacks: list[Callback], log_dir: str | None, directory: RunDirectory) -> list[str]:
    """Return a few lines about the end of a fit and the next steps."""
    progress = run.progress
    reason = f": {run.stop_reason}" if run.stop_reason else ""
    steps, epochs = counted(progress.global_step, "optimizer step"), counted(progress.epoch, "epoch")
    nothing = run.resumed is not None and run.resumed[1] == progress.global_batch
    lines = [f"trained    {'nothing more: it had finished after ' if nothing else ''}{steps}, {epochs}{reason}"]
    best, last = checkpoints(run, callbacks)
    for saved in saved_by(callbacks):
        if saved.monitor is not None and saved.best_model_score is not None:
            lines.append(f"best       {saved.monitor} = {float(saved.best_model_score):.5g}")
            break
    if best or last:
        lines.append(f"checkpoint {shortened(best or last)}")
    # A callback that stopped the fit would stop it again.
    if last and not run.stop_reason:
        # "auto" searches the default directory of checkpoints.
        given = "auto" if Path(last).is_relative_to(directory.checkpoints) else shortened(last)
        lines.append(f'resume     fit(..., ckpt_path="{given}"), with a higher limit to train for longer')
    if log_dir is not None:
        lines += _curves(Path(log_dir))
    if directory.claimed and (page := directory.path / PAGE).exists():
        lines.append(f"report     {shortened(page)}")
    return lines


def _curves(directory: Path) -> list[str]:
    """Return the command to display curves, depending on the loggers."""
    if next(directory.glob(_TENSORBOARD_FILES), None) is not None:
        return [f"curves     {_tensorboard()} --logdir {shlex.quote(shortened(directory))}"]
    tables = (directory / name for name in ("metrics.csv", "metrics.jsonl"))
    return [f"metrics    {shortened(table)}" for table in tables if table.is_file()]


def _tensorboard() -> str:
    """Return a command that starts TensorBoard, whether or not the virtual environment is activated."""
    if shutil.which("tensorboard"):
        return "tensorboard"
    here = Path(sys.executable).with_name("tensorboard")
    if here.exists():
        return shlex.quote(shortened(here))
    return f"{shlex.quote(sys.executable)} -m tensorboard.main"


def shortened(path: str | Path) -> str:
    """Return a path relative to the working directory if it is below it."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return str(path)
