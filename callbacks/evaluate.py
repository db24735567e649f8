"""``Evaluate``: evaluates the module while it trains, by a function or by tasks of lm-evaluation-harness."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ..framework.api.callback import Callback
from ..framework.core.errors import ConfigurationError
from ..framework.core.intervals import Due, Interval
from ..framework.huggingface.harness_tasks import HarnessTasks
from ..framework.loop.detached_evaluation import evaluate_detached
from ..framework.report.evaluations import named_results

if TYPE_CHECKING:
    from ..framework.api.contracts import TrainerView
    from ..framework.api.train_module import TrainModule

    Tasks = Callable[[TrainerView, TrainModule], Mapping[str, float]] | str | os.PathLike[str]


class Evaluate(Callback):
    """Evaluate the module at the end of optimizer steps or epochs, on all ranks, without effect on the training.

    The module is in evaluation mode, without gradients, and its weights stay sharded. It has the weights that a
    validation uses: an average, if a callback maintains one. Results are logged at the step as ``eval/<name>``;
    ``ModelCheckpoint`` and ``EarlyStopping`` may monitor them. Random generators, buffers and attributes of the module
    are restored, so that the training is bit for bit that without the callback.

    To evaluate the checkpoints of a run in another process instead, use ``phalanx eval``.

    Args:
        tasks: a function ``(trainer, module) -> {name: number}``, or the path of a YAML file that names tasks of
            lm-evaluation-harness. Collective: all ranks call the function, and under a strategy that shards weights
            they must run the same number of forward passes in it. The numbers of rank 0 are logged.
        every: the interval: a number of optimizer steps, or a text such as ``"2 epochs"``, ``"1e6 tokens"`` or
            ``"30 min"``.

    Raises:
        ConfigurationError: the interval is not known; there is no such file, one of its values is wrong, or lm_eval is
            not installed.
        MetricError: During the fit: the function returned something else than numbers by name.

    Example::

        def share_of_sevens(trainer, module):
            return {"sevens": (module(prompts).argmax(-1) == 7).float().mean().item()}

        saver = ModelCheckpoint(monitor="eval/sevens", mode="max", every_n_train_steps=500)
        Trainer(callbacks=[Evaluate(share_of_sevens, every=500), saver])
    """

    def __init__(self, tasks: Tasks, every: int | str = "1 epoch") -> None:
        self._interval = Interval.parse(every, owner="Evaluate")
        self.counted_intervals = (self._interval,)
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

    def wants(self, hook: str) -> bool:
        if hook in ("on_train_batch_end", "on_train_epoch_end"):
            return (self._interval.unit == "epochs") == (hook == "on_train_epoch_end")
        return super().wants(hook)

    def on_fit_start(self, trainer: TrainerView, module: TrainModule) -> None:
        if isinstance(self.tasks, HarnessTasks):
            self.tasks.load(trainer, module)

    def on_train_start(self, trainer: TrainerView, module: TrainModule) -> None:
        # It begins at the step of a resumed fit, which was evaluated before its checkpoint was saved.
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
        if (trainer.current_epoch + 1) % self._interval.number == 0:
            self._evaluate(trainer, module)

    def state_dict(self) -> dict[str, Any]:
        return {"results": dict(self._results)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._results = dict(state["results"])

    def _evaluate(self, trainer: TrainerView, module: TrainModule) -> None:
        found = evaluate_detached(trainer.run, partial(self.tasks, trainer, module))
        # Every rank decides by the same numbers.
        self._results = named_results(trainer.world.broadcast_object(found))
        trainer.log_metrics(self._results)
