"""``Evaluate``: evaluates the module while it trains, by a function or by tasks of lm-evaluation-harness.

In the fit the training stops meanwhile; aside, a process of its own evaluates each checkpoint that the fit saves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ..framework.api.callback import Callback, saved_by
from ..framework.core.errors import ConfigurationError
from ..framework.core.intervals import Due, Interval
from ..framework.huggingface.harness_tasks import HarnessTasks
from ..framework.loop.detached_evaluation import evaluate_detached
from ..framework.report.evaluations import named_results
from .evaluation_process import EvaluationProcess, check_rebuilds, named_tasks

if TYPE_CHECKING:
    from ..framework.api.contracts import TrainerView
    from ..framework.api.train_module import TrainModule

    Tasks = Callable[[TrainerView, TrainModule], Mapping[str, float]] | str | os.PathLike[str]

_ENDS = ("on_fit_end", "on_exception", "teardown")
_TURN_SECONDS = 1.0


class Evaluate(Callback):
    """Evaluate the module at the end of optimizer steps or epochs, on all ranks, without effect on the training.

    The module is in evaluation mode, without gradients, and its weights stay sharded. It has the weights that a
    validation uses: an average, if a callback maintains one. Results are logged at the step as ``eval/<name>``;
    ``ModelCheckpoint`` and ``EarlyStopping`` may monitor them. Random generators, buffers and attributes of the module
    are restored, so that the training is bit for bit that without the callback.

    With ``aside=True`` the training goes on meanwhile: rank 0 starts a process that evaluates each checkpoint of the
    run, as ``phalanx eval --watch`` does, and ends with the fit. The fit waits for the results of its last checkpoint.
    Results are logged at the step of their checkpoint when the fit saves the next one, and at its end.
    ``ModelCheckpoint`` ranks by them afterwards, and retains a checkpoint until its result is known; ``EarlyStopping``
    cannot monitor them. The output of the process is ``evaluate.log`` in the run's directory. An error in it is
    reported, and the fit goes on without further results.

    Args:
        tasks: a function ``(trainer, module) -> {name: number}``, or the path of a YAML file that names tasks of
            lm-evaluation-harness. Collective: all ranks call the function, and under a strategy that shards weights
            they must run the same number of forward passes in it. The numbers of rank 0 are logged.
        every: the interval: a number of optimizer steps, or a text such as ``"2 epochs"``, ``"1e6 tokens"`` or
            ``"30 min"``; default: ``"1 epoch"``. Not with ``aside``.
        aside: evaluate each checkpoint in a process of its own. It imports the function and the class of the module,
            so that a script must call ``fit`` under ``if __name__ == "__main__"``. The function is called on one
            process, with a Trainer of one device.
        device: the device of that process, such as ``"cuda:1"``; default: ``"cpu"``.

    Raises:
        ConfigurationError: the interval is not known; there is no such file, one of its values is wrong, or lm_eval is
            not installed; ``aside`` is given with ``every``, or with a function that cannot be imported. At the start
            of the fit: with ``aside``, the Trainer saves no checkpoints, or the module cannot be built from one.
        MetricError: During the fit: the function returned something else than numbers by name.

    Example::

        def share_of_sevens(trainer, module):
            return {"sevens": (module(prompts).argmax(-1) == 7).float().mean().item()}

        saver = ModelCheckpoint(monitor="eval/sevens", mode="max", every_n_train_steps=500)
        Trainer(callbacks=[Evaluate(share_of_sevens, every=500), saver])
    """

    collective = True

    def __init__(
        self, tasks: Tasks, every: int | str | None = None, aside: bool = False, device: str | None = None
    ) -> None:
        if aside and every is not None:
            raise ConfigurationError(
                f"Evaluate(every={every!r}, aside=True): aside, each checkpoint is evaluated; leave every out, and "
                "give the interval to ModelCheckpoint."
            )
        if device is not None and not aside:
            raise ConfigurationError(f"Evaluate(device={device!r}): only with aside=True; the fit has its own devices.")
        every = "1 epoch" if every is None else every
        self._interval = Interval.parse(every, owner="Evaluate")
        self.counted_intervals = (self._interval,)
        self.aside = aside
        self.device = device or "cpu"
        self._due: Due | None = None
        if isinstance(tasks, str | os.PathLike):
            self.tasks: Callable[..., Any] = HarnessTasks.read(tasks)
        elif callable(tasks):
            self.tasks = tasks
        else:
            raise ConfigurationError(
                f"Evaluate(tasks={tasks!r}): give a function of a Trainer and a module, or the path of a YAML file."
            )
        self.every = every
        self._results: dict[str, float] = {}
        self._process: EvaluationProcess | None = None
        """Only with ``aside``, on rank 0, while the fit trains."""
        self._arguments: list[str] = []
        if aside:
            self._arguments = named_tasks(tasks)

    def wants(self, hook: str) -> bool:
        if self.aside:
            return hook in ("on_fit_start", "on_train_start", "on_train_epoch_end", *_ENDS)
        if hook in _ENDS:
            return False
        if hook in ("on_train_batch_end", "on_train_epoch_end"):
            return (self._interval.unit == "epochs") == (hook == "on_train_epoch_end")
        return super().wants(hook)

    def check(self, trainer: TrainerView, stage: str) -> None:
        saves = any(not saved.only_after_errors for saved in saved_by(trainer.callbacks))
        if self.aside and stage == "fit" and not saves and not trainer.fast_dev_run:
            raise ConfigurationError("Evaluate(aside=True) evaluates checkpoints: add a ModelCheckpoint to callbacks.")

    def on_fit_start(self, trainer: TrainerView, module: TrainModule) -> None:
        if self.aside:
            self._arguments = [*self._arguments[:2], "--module", check_rebuilds(module)]
        elif isinstance(self.tasks, HarnessTasks):
            self.tasks.load(trainer, module)

    def on_train_start(self, trainer: TrainerView, module: TrainModule) -> None:
        if self.aside:
            if trainer.is_global_zero and not trainer.fast_dev_run:
                self._process = EvaluationProcess(trainer.run_dir, self._arguments, self.device)
            return
        # A resumed fit counts from its step, which was evaluated before its checkpoint was saved.
        self._due = None if self._interval.unit == "epochs" else Due(self._interval, trainer, self.state_key)
        # Those of the checkpoint, for callbacks that read them before the next evaluation.
        metrics = trainer.run.metrics
        metrics.values["callback"].update(self._results)

    def on_train_batch_end(
        self, trainer: TrainerView, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._due is not None and self._due.reached():
            self._evaluate(trainer, module)

    def on_train_epoch_end(self, trainer: TrainerView, module: TrainModule) -> None:
        if self.aside:
            self._report_error(trainer)
        elif (trainer.current_epoch + 1) % self._interval.number == 0:
            self._evaluate(trainer, module)

    def on_fit_end(self, trainer: TrainerView, module: TrainModule) -> None:
        if self._process is not None:
            self._process.finish()
        heartbeat = trainer.run.heartbeat
        # All ranks wait in short turns: a single collective might exceed its limit on time.
        while not trainer.world.broadcast_object(self._process is None or self._process.ends_within(_TURN_SECONDS)):
            heartbeat.enter("evaluation")
        self._report_error(trainer)

    def on_exception(self, trainer: TrainerView, module: TrainModule, exception: BaseException) -> None:
        self._end()

    def teardown(self, trainer: TrainerView, module: TrainModule, stage: str) -> None:
        self._end()

    def state_dict(self) -> dict[str, Any]:
        return {"results": dict(self._results)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._results = dict(state["results"])

    def _evaluate(self, trainer: TrainerView, module: TrainModule) -> None:
        found = evaluate_detached(trainer.run, partial(self.tasks, trainer, module))
        # Every rank decides by the same numbers.
        self._results = named_results(trainer.world.broadcast_object(found))
        trainer.log_metrics(self._results)

    def _report_error(self, trainer: TrainerView) -> None:
        """Say so once if the process has failed."""
        if self._process is not None and (code := self._process.code):
            trainer.note(
                f"Evaluate: the process aside has failed with exit code {code} ({self._process.last_line}). Further "
                f"checkpoints are not evaluated. Its output is in {self._process.log}."
            )
            self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
