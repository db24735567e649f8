"""The summary of a fit on the console before the first and after the last step."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..api.callback import Callback
from ..core.wording import counted
from ..report.finding import shown_path
from ..report.run_files import PAGE
from ..report.verdicts import shortened_command, with_checkpoint
from ..system.console import folded
from ..system.entry_script import can_rerun_script
from ..system.environment import script_overrides
from ..system.provenance import own_command
from ..system.run_directory import CONFIGURATION
from .resolved_settings import NEVER
from .run_documents import best_score, checkpoints

if TYPE_CHECKING:
    from ..data.accumulation_window import Windows
    from ..loop.fit_loop import FitLoop
    from ..loop.fit_plan import FitPlan
    from ..run.run import Run
    from ..system.run_directory import RunDirectory

_INDENT = " " * len("checkpoint ")
_LEAST_COLUMNS = 20
_TENSORBOARD_FILES = "events.out.tfevents.*"
# The programs that a command may begin with, and what their interpreter is given to do the same.
_OF_ENVIRONMENT = {"python": [], "phalanx": ["-m", "phalanx"], "tensorboard": ["-m", "tensorboard.main"]}


def box(title: str, lines: list[str], columns: int | None = None) -> str:
    """Return lines in a frame, folded to the width of a terminal; ``columns`` None: no line is folded."""
    if columns is not None:
        inner = max(columns - len("│ ") - len(" │"), _LEAST_COLUMNS)
        lines = [part for line in lines for part in folded(line, inner, _INDENT)]
    width = max(len(title) + 1, *(len(line) for line in lines))
    top = f"┌─ {title} " + "─" * (width - len(title) - 1) + "┐"
    body = [f"│ {line:<{width}} │" for line in lines]
    return "\n".join([top, *body, "└" + "─" * (width + 2) + "┘"])


def start_lines(loop: FitLoop, log_dir: str | None, checkpoint_dir: Path | None) -> list[str]:
    """Return at most eight lines about the configuration of a fit."""
    run, plan, windows = loop.run, loop.plan, loop.windows
    world, fabric = run.world, run.fabric
    nodes = f" on {counted(world.num_nodes, 'node')}" if world.num_nodes > 1 else ""
    resources = fabric.resources
    axes = f" ({resources.layout})" if resources.degrees.used else ""
    lines = [
        f"strategy   {fabric.strategy.name}, {counted(world.size, 'rank')}{axes}{nodes} on {world.device.type}, "
        f"precision {fabric.precision.name}",
        f"batch      {_global_batch(run, windows)}",
        f"length     {_length(plan, windows)}",
    ]
    if (overrides := script_overrides()) is not None and overrides.trainer:
        given = ", ".join(f"{name}={value!r}" for name, value in overrides.trainer.items())
        lines.append(f"overrides  {given}, instead of the script's")
    if log_dir is not None:
        lines += [f"logs       {shown_path(Path(log_dir))}", *_logs_no_step(loop)]
    if checkpoint_dir is not None:
        lines.append(f"saves      {shown_path(checkpoint_dir)}")
    if run.resumed is not None:
        progress = run.progress
        epoch, batch = (progress.epoch + 1, 0) if progress.epoch_ended else (progress.epoch, progress.batch_in_epoch)
        origin = run.resumed.name if run.resumed.is_snapshot else shown_path(run.resumed.checkpoint)
        lines.append(f"resumes    {origin}: epoch {epoch}, batch {batch}, step {progress.global_step}")
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
    if (samples := windows.source.global_batch_size) is not None:
        most = "" if windows.found_size is None else "at most "
        return f"{counted(samples, 'sample')}, in micro-batches of {most}{size} on {counted(ranks, 'rank')}"
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
    if plan.max_units is not None:
        limits.append(str(plan.max_units))
    return f"{' or '.join(limits) or 'no limit'}, {epoch}"


def end_lines(run: Run, callbacks: list[Callback]) -> list[str]:
    """Return a few lines about the end of a fit."""
    progress = run.progress
    reason = f": {run.stop_reason}" if run.stop_reason else ""
    steps, epochs = counted(progress.global_step, "optimizer step"), counted(progress.epoch, "epoch")
    nothing = run.resumed is not None and run.resumed.batches == progress.global_batch
    lines = [f"trained    {'nothing more: it had finished after ' if nothing else ''}{steps}, {epochs}{reason}"]
    if (best := best_score(callbacks)) is not None:
        lines.append(f"best       {best['name']} = {best['value']:.5g}")
    return lines


def next_lines(run: Run, callbacks: list[Callback], log_dir: str | None, directory: RunDirectory) -> list[str]:
    """Return the paths of what a fit has written, and the commands that use them. They are not framed: to be copied."""
    lines = []
    best, last = checkpoints(run, callbacks)
    if best or last:
        lines.append(f"checkpoint {quoted(best or last)}")
    if directory.claimed and (page := directory.path / PAGE).exists():
        lines.append(f"report     {quoted(page)}")
    # A callback that stopped the fit would stop it again.
    if last and not run.stop_reason:
        # "auto" searches the default directory of checkpoints.
        given = "auto" if Path(last).is_relative_to(directory.checkpoints) else shown_path(Path(last))
        command, call = _command(run), f'fit(..., ckpt_path="{given}") '
        if command and directory.claimed and (directory.path / CONFIGURATION).exists():
            command, call = with_checkpoint(command, given), ""
        lines.append(f"resume     {call}with a higher limit{':' if command else ''}")
        lines += [f"{_INDENT}{command}"] if command else []
    if log_dir is not None:
        lines += _curves(Path(log_dir))
    return [f"  {line}" for line in lines]


def _command(run: Run) -> str | None:
    """Return the command that starts this fit again; None in a notebook, and under a launcher other than phalanx."""
    resources = run.fabric.resources
    if not can_rerun_script() or resources.place.launcher not in (None, "phalanx"):
        return None
    first, *rest = shlex.split(shortened_command(own_command(), str(Path.cwd())))
    if first in _OF_ENVIRONMENT:
        return f"{_program(first)} {shlex.join(rest)}"
    return shlex.join([first, *rest])


def _curves(directory: Path) -> list[str]:
    """Return the command to display curves, depending on the loggers."""
    if next(directory.glob(_TENSORBOARD_FILES), None) is not None:
        return [f"curves     {_program('tensorboard')} --logdir {shlex.quote(_relative(directory))}"]
    if any((directory / name).is_file() for name in ("metrics.csv", "metrics.jsonl")):
        return [f"curves     {_program('phalanx')} report {quoted(directory)}"]
    return []


def _program(name: str) -> str:
    """Return a command that starts a program of this environment, whether or not the environment is activated."""
    here, found = Path(sys.executable).parent / name, shutil.which(name)
    if found is not None and Path(found).parent == here.parent:
        return name
    if here.exists():
        return quoted(here)
    return shlex.join([sys.executable, *_OF_ENVIRONMENT[name]])


def quoted(path: str | Path) -> str:
    """Return a path as it can be given to a shell, relative to the working directory if it is below it."""
    return shlex.quote(shown_path(Path(path)))


def _relative(path: str | Path) -> str:
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return str(path)
