"""The methods of ``Trainer`` that search for hyperparameters in trials, which leave no trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..api.data_module import DataModule
from ..api.train_module import TrainModule
from ..core.arguments import names_arguments
from ..core.errors import ConfigurationError
from ..core.interception import current_interceptor
from ..loop.recovering_step import check_strategy
from . import BatchSizeTest, LearningRateTest, plan_memory, run_batch_size_search, run_range_test, start_of_search
from .actions import TrainerActions
from .checks import check_fit, split_datamodule
from .plan_target import PlanTarget
from .script_ranks import start_script_ranks
from .session import StageRequest

if TYPE_CHECKING:
    from .batch_sizes import BatchSizes
    from .learning_rates import LearningRates


class TrainerSearches(TrainerActions):
    """The side of ``Trainer`` that searches for hyperparameters."""

    @names_arguments
    def find_lr(
        self,
        model: TrainModule,
        train_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        *,
        min_lr: float = 1e-8,
        max_lr: float = 1.0,
        num_training: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
    ) -> LearningRates:
        """Train a copy of a module with growing learning rates; return the losses, averaged over ranks. Collective.

        The module, generators, callbacks, loggers and files are unchanged. Callbacks and schedulers take no part.

        Args:
            model: the module, with automatic optimization.
            train_dataloaders: a loader, or a list or dict of loaders whose batches are combined.
            datamodule: provides the loaders instead.
            min_lr: the first learning rate.
            max_lr: the last one.
            num_training: optimizer steps.
            mode: ``"exponential"`` for a constant ratio of consecutive rates, ``"linear"`` for a constant difference.
            early_stop_threshold: end when the smoothed loss exceeds its minimum by this factor; None: do not.

        Raises:
            ConfigurationError: an argument is invalid, the strategy is a pipeline, or several ranks would have to be
                started without a script.
        """
        test = LearningRateTest(min_lr, max_lr, num_training, mode, early_stop_threshold)
        test.check()
        strategy = self.fabric.resources.strategy
        if strategy.window_passes is not None:
            raise ConfigurationError(
                f"find_lr reads the loss of each micro-batch before its backward pass, and strategy={strategy.name!r} "
                "runs the passes of a window together: search with strategy='fsdp' or 'ddp' and the same global batch."
            )
        train_dataloaders, datamodule = self._start_search("find_lr", model, train_dataloaders, datamodule)
        return run_range_test(type(self), self._session.requested, test, model, train_dataloaders, datamodule)

    @names_arguments
    def find_batch_size(
        self,
        model: TrainModule,
        train_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        *,
        mode: str = "binsearch",
        steps_per_trial: int = 3,
        init_val: int | None = None,
        max_trials: int = 25,
        max_val: int | None = None,
    ) -> BatchSizes:
        """Return the largest micro-batch with which a step fits into the memory of all ranks. Collective.

        Each trial trains a copy of the module; a rank that runs out of memory in the forward pass, the backward pass or
        the update makes the size too large for all ranks. The module, generators, callbacks, loggers and files are
        unchanged. Callbacks and schedulers take no part.

        Args:
            model: the module, with automatic optimization.
            train_dataloaders: a ``DataLoader`` over a map-style dataset. Its batch size is not used.
            datamodule: provides the loader instead.
            mode: ``"binsearch"`` for the largest size; ``"power"`` for the largest of those that doubling or halving
                gives, in fewer trials.
            steps_per_trial: optimizer steps of a trial, at least 2.
            init_val: the first size; None: the one that ``plan`` estimates, or 2.
            max_trials: the most sizes to try.
            max_val: the largest size to try; None: the samples of an epoch of one rank.

        Raises:
            ConfigurationError: an argument is invalid, no size that was tried fits, or the data, the strategy or a
                layer does not allow ranks to continue after one has run out of memory.
            OutOfMemoryError: torch's, on a rank for which one sample is too large; other ranks raise ``LoopError``.
        """
        test = BatchSizeTest(mode, steps_per_trial, init_val, max_trials, max_val)
        test.check()
        resources = self.fabric.resources
        check_strategy(resources.strategy, "find_batch_size", "compare short fits")
        train_dataloaders, datamodule = self._start_search("find_batch_size", model, train_dataloaders, datamodule)
        request = StageRequest(model, {"train": train_dataloaders}, datamodule)
        plan = plan_memory(self._session, request, None, PlanTarget())
        ranks, name = resources.data_size, plan.chosen if resources.auto else resources.strategy.name
        samples, guess = start_of_search(plan, name, resources.precision, ranks, init_val)
        first, requested = self._least(guess), self._session.requested
        return run_batch_size_search(
            type(self), requested, test, first, samples, ranks, model, train_dataloaders, datamodule
        )

    def _least(self, guess: int) -> int:
        """Return the smallest guess of the ranks, since the memory that is free differs between them. Collective."""
        resources = self.fabric.resources
        if resources.world_size == 1 or resources.must_launch:
            return guess
        world = self.fabric.world
        try:
            return min(world.all_gather_object(guess))
        finally:
            world.close()

    def _start_search(
        self, name: str, model: TrainModule, train_dataloaders: Any, datamodule: DataModule | None
    ) -> tuple[Any, DataModule | None]:
        """Check the arguments of a search, and start the ranks. Return the loaders and the DataModule."""
        train_dataloaders, datamodule = split_datamodule(train_dataloaders, datamodule)
        resources = self.fabric.resources
        check_fit(model, {"train": train_dataloaders}, datamodule, self.settings, resources)
        if not model.automatic_optimization:
            raise ConfigurationError(
                f"{name} tries optimizer steps, and with automatic_optimization = False training_step decides when to "
                "step: compare short fits."
            )
        if iter_once(train_dataloaders):
            raise ConfigurationError(
                f"{name} got an iterator, which can be read only once, so that nothing would be left for the fit: give "
                "a DataLoader or a list."
            )
        if current_interceptor() is None and resources.launched is None:
            start_script_ranks(self._session, self.writes)
            if resources.must_launch:
                raise ConfigurationError(
                    f"{name} starts {resources.world_size} ranks by running the script again, and there is none here: "
                    "use devices=1, or a script."
                )
        return train_dataloaders, datamodule


def iter_once(loaders: Any) -> bool:
    """Whether ``loaders`` is an iterator, which can be read only once."""
    return hasattr(loaders, "__next__")
