"""The last save of a preempted run, and its exit with the code that means "run the same command again".

A run ends at the boundaries between the parts of a fit, at which ranks exchange signals.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from ..checkpoint import read_manifest
from ..checkpoint.save_request import SaveRequest
from ..core.errors import CheckpointError, NonFiniteError, Preempted, StorageError
from ..launch.slurm import NEAR_END, requeue
from ..launch.spot_notice import NOTICE
from ..run.run import Run
from ..storage.cached_url import local_place, portable
from ..system.environment import current_job

_PREEMPTED, RESCUED = "preempted", "rescued"
_CHECKPOINTS = re.compile(rf"({_PREEMPTED}|{RESCUED})(-v\d+)?\.ckpt")


def is_name(name: str) -> bool:
    """Whether ``name`` is a possible name of a checkpoint of a run that was preempted or has failed."""
    return _CHECKPOINTS.fullmatch(name) is not None


def own_path(directory: Path, kind: str, identity: str | None) -> Path:
    """Return the path of this run's checkpoint, which may exist already; checkpoints of other runs are not replaced."""
    version = 0
    while True:
        path = directory / f"{kind}{f'-v{version}' if version else ''}.ckpt"
        if not os.path.lexists(path):
            return path
        with suppress(CheckpointError, StorageError):
            if read_manifest(path).document.get("run") == identity is not None:
                return path
        version += 1


def leave(run: Run, directory: Path | None) -> NoReturn:
    """Save a preempted run between two optimizer steps, and end it. Collective.

    Raises:
        Preempted: always, except after a SIGINT.
        KeyboardInterrupt: after a SIGINT.
        StorageError: the checkpoint could not be saved.
    """
    assert run.preempted_by is not None
    rank, name = run.preempted_by
    step = run.progress.global_step
    where = f"rank {rank} got {name}" if run.world.size > 1 else f"{name} came"
    if name == NEAR_END:
        where = "the job's time is nearly up"
    elif name == NOTICE:
        where = "the machine is about to be taken back"
    if name != "SIGINT":
        sentence = f"{where}: the run stops after optimizer step {step}, saves if it can, and ends"
        run.context.notify("preemption", sentence, step, None)
    message = f"{where}: stopped after optimizer step {step}, {_saved(run, directory)}"
    if name == "SIGINT":
        # The end of the process, or the notebook, shows the message. The user may continue with this module, in a
        # notebook or after an ``except`` clause. All ranks are here.
        run.restore_module()
        raise KeyboardInterrupt(message)
    job = current_job()
    if job is not None and run.context.requeue and run.world.is_global_zero and (sentence := requeue(job, name)):
        run.note(sentence)
    raise Preempted(message)


def _saved(run: Run, directory: Path | None) -> str:
    """Save a run and return the second half of the message about it. Collective."""
    if run.progress.global_batch == 0:
        return "before there was anything to save; run the same command again."
    begun = run.resumed
    if begun is not None and not begun.is_snapshot and begun.batches == run.progress.global_batch:
        # The state, which may be large, is on the disk already.
        return f"with nothing new since {begun.checkpoint}; run the same command again."
    if directory is None:
        return "and saved nothing, since this run keeps no checkpoints."
    identity = run.directory.identity
    own = own_path(directory, _PREEMPTED, identity) if run.world.is_global_zero else ""
    path = local_place(run.world.broadcast_object(portable(own)))
    try:
        run.saver.save(SaveRequest(path, tolerant=False))
    except NonFiniteError as error:
        return f"and saved nothing: {error}"
    return f"and saved {portable(path)}; the same command with ckpt_path='auto' continues from there."


def exchange_signals(run: Run) -> None:
    """Exchange signals that callbacks have raised at a boundary outside the batches. Collective."""
    run.triggers.agree()
    run.triggers.handle()
    leave_if_preempted(run)


def leave_if_preempted(run: Run) -> None:
    """Save and end the run if it is preempted, which is the same on all ranks. Collective if it is."""
    if run.preempted_by is not None:
        leave(run, run.context.preemption_directory())
