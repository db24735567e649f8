"""``phalanx eval``: evaluates the checkpoints of a run in a process of its own, and records the results in the run."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from importlib import import_module
from operator import itemgetter
from pathlib import Path
from threading import Event, Thread
from typing import Any, Literal, NoReturn

import torch

from ..framework.api.train_module import TrainModule
from ..framework.checkpoint.inspection import furthest, good_manifests
from ..framework.checkpoint.manifest import Manifest, run_of
from ..framework.checkpoint.reader import open_checkpoint
from ..framework.checkpoint.safetensors_export import validated_average
from ..framework.checkpoint.verify import first_incomplete, verify
from ..framework.core.accelerators import accelerator_type, num_devices
from ..framework.core.errors import CheckpointError, ConfigurationError, StorageError
from ..framework.core.interception import intercepting
from ..framework.core.progress import Progress
from ..framework.distributed.seed import seed_everything
from ..framework.huggingface.harness_tasks import HarnessTasks
from ..framework.report.evaluations import Evaluation, add_evaluation, current, named_results
from ..framework.report.finding import find_run, shown_path
from ..framework.report.finish import amend_report
from ..framework.report.run_files import RunFiles
from ..framework.report.values import mapping
from ..framework.storage.mirror import refresh_cached
from ..framework.trainer.trainer import Trainer
from .terminal_text import say_json, say_wrapped, shown_number
from .user_program import find_module, search_working_directory

_GOES_ON = ("running", "silent")


def evaluate_checkpoints(given: argparse.Namespace) -> int:
    """Evaluate the checkpoints that have no results yet, and with ``--watch`` those to come; return the exit code."""
    directory = find_run(given.given_run)
    if (given.tasks is None) == (given.function is None):
        raise ConfigurationError("give --tasks FILE or --function MODULE:NAME.")
    if not given.interval > 0:
        raise ConfigurationError(f"--interval {given.interval:g}: give a positive number of seconds.")
    if given.tasks is not None:
        tasks: Any = HarnessTasks.read(given.tasks)
        name = tasks.name
    else:
        tasks, name = _imported(given.function, "--function "), given.function
    module_class = None if given.module is None else _imported(given.module, "--module ")
    average: str | Literal[False] | None = given.average or (None if given.beside_fit else False)
    evaluator = RunEvaluator(directory, tasks, name, module_class, _device(given.device), average)
    made = _evaluate_all(evaluator, given)
    if given.json:
        say_json({"schema": 1, "path": str(directory), "evaluations": [vars(each) for each in made]})
    elif not made:
        say_wrapped(f"{shown_path(directory)} has no checkpoint without results of {name}.")
    return 0


def _evaluate_all(evaluator: RunEvaluator, given: argparse.Namespace) -> list[Evaluation]:
    made: list[Evaluation] = []
    seen = set() if given.again else evaluator.evaluated_steps()
    ended = _end_of_fit() if given.beside_fit else Event()
    while True:
        # Before the search: a checkpoint that is saved in between is found in the last round.
        goes_on = given.watch and not ended.is_set() and RunFiles(evaluator.directory).state in _GOES_ON
        for step, path, manifest in evaluator.checkpoints():
            if step in seen:
                continue
            seen.add(step)
            try:
                found = evaluator.evaluate(step, path, manifest)
            except (CheckpointError, StorageError) as error:
                # One that the run has deleted in the meantime is none of its checkpoints any more.
                if path.exists():
                    say_wrapped(f"{path.name} was not evaluated: {error}")
                continue
            made.append(found)
            if not given.json:
                numbers = ", ".join(f"{name} {shown_number(value)}" for name, value in found.values.items())
                say_wrapped(f"{path.name} (step {step:,}): {numbers}")
        if not goes_on:
            break
        ended.wait(given.interval)
    evaluator.amend_report(made)
    return made


def _end_of_fit() -> Event:
    """Return an event that is set once the fit that has started this process has saved its last checkpoint.

    The fit says so by a line on the standard input. If that is closed without it, the fit was killed, and this process
    ends at once.
    """
    ended = Event()

    def read() -> None:
        if not sys.stdin.readline():
            os._exit(1)
        ended.set()

    Thread(target=read, name="phalanx-end-of-fit", daemon=True).start()
    return ended


class _Imported:
    """Refuses to train in a program that is only imported."""

    def __init__(self, given: str) -> None:
        self._given = given

    def settings(self, given: Any) -> Any:
        return given

    def stage(self, session: Any, stage: str, request: Any) -> Any:
        self._refuse()

    def loop(self) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ConfigurationError(
            f"{self._given}: the program trains where it is imported: let it train under "
            "if __name__ == '__main__', or name a module of its own."
        )


def _imported(given: str, option: str) -> Any:
    """Return what an option names in a module, as ``find_module`` does, of a program that does not train there."""
    with intercepting(_Imported(f"{option}{given}")):
        return find_module(given, option)


class RunEvaluator:
    """Evaluates checkpoints of one run.

    Args:
        directory: the directory of the run.
        tasks: called with a Trainer and a module; returns numbers by name.
        name: the name of the tasks in the records.
        module_class: the class of the module; None for the one that a checkpoint names.
        device: the device of the module.
        average: the average of the weights to evaluate; False for the trained weights, None for the weights with which
            the run validates.
    """

    def __init__(
        self,
        directory: Path,
        tasks: Callable[..., Any],
        name: str,
        module_class: type[TrainModule] | None,
        device: torch.device,
        average: str | Literal[False] | None,
    ) -> None:
        self.directory = directory
        self._tasks, self._name, self._device, self._average = tasks, name, device, average
        self._class = module_class
        accelerator = "cpu" if device.type == "cpu" else "gpu"
        devices = 1 if device.index is None else [device.index]
        self._trainer = Trainer(
            accelerator=accelerator,
            devices=devices,
            strategy="single",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    def evaluated_steps(self) -> set[int]:
        """Return the steps that have results of these tasks."""
        files = RunFiles(self.directory)
        return {each.step for each in current(files.evaluations, files.events) if each.tasks == self._name}

    def checkpoints(self) -> list[tuple[int, Path, Manifest]]:
        """Return the complete checkpoints of the run in the order of their steps."""
        refresh_cached(self.directory)
        files, found = RunFiles(self.directory), []
        for path, manifest in good_manifests(files.checkpoint_directories):
            step, is_own = furthest(manifest)[0], run_of(manifest) in (None, files.identity)
            if step >= 0 and is_own and first_incomplete(path, manifest) is None:
                found.append((step, path, manifest))
        return sorted(found, key=itemgetter(0, 1))

    def evaluate(self, step: int, path: Path, manifest: Manifest) -> Evaluation:
        """Evaluate a checkpoint whose bytes are as they were written, and record the results.

        Raises:
            CheckpointError: it is damaged, or was deleted.
            ConfigurationError: the class of the module is not known.
            MetricError: the tasks returned something else than numbers by name.
        """
        if problems := verify(path):
            raise CheckpointError(f"{path.name} is damaged: {problems[0]}")
        module_class = self._class or _class_in(manifest)
        average = self._average
        if average is None:
            average = validated_average(open_checkpoint(path)) or False
        module = module_class.load_from_checkpoint(path, average=average).to(self._device).eval()
        module.trainer = self._trainer
        self._trainer.progress.load_state_dict(_progress_in(manifest))
        seed_everything(0)
        with torch.no_grad():
            values = named_results(self._tasks(self._trainer, module))
        found = Evaluation(step, path.name, self._name, values)
        add_evaluation(self.directory, found)
        return found

    def amend_report(self, made: list[Evaluation]) -> None:
        """Write the report of a run that has ended again, with the new results."""
        if made and RunFiles(self.directory).outcome:
            amend_report(self.directory, {})


def _device(given: str | None) -> torch.device:
    """Return the device to evaluate on.

    Raises:
        ConfigurationError: there is none of this name.
    """
    if given is None:
        return torch.device(accelerator_type() or "cpu")
    try:
        device = torch.device(given)
    except RuntimeError:
        raise ConfigurationError(f"--device {given}: give cpu, cuda or cuda:N.") from None
    known = 1 if device.type == "cpu" else num_devices(device.type)
    if (device.index or 0) >= known:
        raise ConfigurationError(f"--device {given}: this machine has {num_devices('cuda')} CUDA devices.")
    return device


def _class_in(manifest: Manifest) -> type[TrainModule]:
    """Return the class of the module that a checkpoint names.

    Raises:
        ConfigurationError: it was defined in the script that was run, or cannot be imported.
    """
    home, _, name = str(mapping(manifest.document).get("module", "")).rpartition(".")
    search_working_directory()
    try:
        found: type[TrainModule] = getattr(import_module(home), name)
    except (ImportError, AttributeError, ValueError):
        found = TrainModule
    if home == "__main__" or found is TrainModule:
        raise ConfigurationError(
            f"the class of the module, {home}.{name}, cannot be imported here: give --module MODULE:CLASS, such as "
            f"--module train:{name or 'Model'}."
        )
    return found


def _progress_in(manifest: Manifest) -> dict[str, Any]:
    progress = mapping(manifest.document).get("progress")
    return progress if isinstance(progress, dict) else Progress().state_dict()
