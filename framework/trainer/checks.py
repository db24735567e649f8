"""Checks of the module, its hooks and the data before any process starts, and of the ranks before a stage."""

from __future__ import annotations

import inspect
from dataclasses import fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import nn

from ..api.data_module import DataModule
from ..api.train_module import TrainModule
from ..core.errors import ConfigurationError
from ..core.intervals import Interval
from ..core.wording import a_type
from ..loop.recovering_step import check_strategy
from ..parallel.resources import Resources
from ..parallel.strategy import Strategy
from ..parallel.strategy_checks import check_algorithm, check_placed
from ..run.overrides import is_overridden, unit_of, with_arity
from ..system.environment import num_ranks_may_change
from .data_sources import ARGUMENTS, check_given
from .hook_names import check_names
from .script_ranks import finds_by_restarts
from .settings import OF_ONE_RANK, TrainerSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..api.callback import Callback
    from .resolved_settings import Settings
    from .session import Session, StageRequest

_WITH_TEXT = (str, int, float, timedelta)
_STEPS = {"fit": "training_step", "validate": "validation_step", "test": "test_step"}


def check_fit(session: Session, request: StageRequest) -> None:
    """Check the arguments of ``fit``.

    Raises:
        ConfigurationError: the module, the data or their combination with the Trainer's settings breaks a rule.
    """
    module, settings, resources = request.module, session.settings, session.resources
    check_module(module, "fit")
    check_manual(module, settings)
    if settings.verify_every is not None and not module.automatic_optimization:
        raise ConfigurationError(
            "verify_every computes a step again before its update, and with automatic_optimization = False "
            "training_step makes the updates: leave verify_every out."
        )
    check_devices(module)
    check_backward(module, resources.strategy)
    check_placed(resources.strategy, module, training=True)
    resources.strategy.check_module(module)
    check_sequences(module, "fit", resources)
    if settings.memory is not None and not is_overridden("configure_model", module):
        settings.memory.words_of(module)
    value, algorithm = settings.clipping
    if value is not None:
        check_algorithm(resources.strategy, algorithm)
    if settings.global_batch is not None:
        settings.global_batch.check_ranks(resources.data_size)
        if settings.global_batch.is_found and not finds_by_restarts(settings, resources):
            check_strategy(resources.strategy)
    elif num_ranks_may_change():
        raise ConfigurationError(
            "With --nodes MIN:MAX the run goes on with fewer ranks when a node is lost, and steps would then have "
            "fewer samples: give Trainer(global_batch_size=...), which any number of ranks keeps."
        )
    check_given(session, "train", request, required=True, global_batch=settings.global_batch)
    if is_overridden("validation_step", module):
        check_given(session, "validate", request, required=False)


def check_ranks(session: Session, stage: str, request: StageRequest) -> None:
    """Refuse ranks that call different stages, or with other arguments: they would wait for one another. Collective.

    Raises:
        ConfigurationError: on all ranks; the message names the first difference between rank 0 and another one.
    """
    world = session.fabric.world
    if world.size == 1:
        return
    names = [each.name for each in fields(TrainerSettings) if each.name not in OF_ONE_RANK]
    given = {name: getattr(session.settings.given, name) for name in names}
    given["callbacks"] = [callback.common_key for callback in session.callbacks if callback.collective]
    loaders = {ARGUMENTS[each]: None if value is None else type(value) for each, value in request.given.items()}
    calls = [
        f"Trainer.{stage}(...)",
        *(f"Trainer({name}={_comparable(value)})" for name, value in given.items()),
        *(f"{stage}({name}={_comparable(value)})" for name, value in loaders.items()),
    ]
    first, *others = world.all_gather_object(calls)
    for rank, theirs in enumerate(others, start=1):
        for own, other in zip(first, theirs, strict=False):
            if own != other:
                raise ConfigurationError(
                    f"{own} on rank 0 and {other} on rank {rank}: ranks wait for one another in every step, so each "
                    "must make the same calls with the same arguments. Look for a condition on the rank."
                )


def _comparable(value: Any) -> str:
    """Return a text that is the same on all ranks for the same value: of objects, which need not have one, the type."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_comparable(each)}" for key, each in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_comparable, value))}]"
    if isinstance(value, type):
        return value.__name__
    return repr(value) if value is None or isinstance(value, _WITH_TEXT) else type(value).__name__


def check_units(module: Any, settings: Settings, callbacks: Sequence[Callback]) -> None:
    """Check that a run of the module counts the tokens or samples in which its limits and intervals are given.

    Raises:
        ConfigurationError: it does not.
    """
    unit = unit_of(module)
    for name, each in (("duration", settings.max_units), ("val_check_interval", settings.val_check_interval)):
        if isinstance(each, Interval):
            each.check_unit(unit, f"{name}={str(each)!r}")
    for callback in callbacks:
        for each in callback.counted_intervals:
            each.check_unit(unit, f"the interval {str(each)!r} of {type(callback).__name__}")


def check_plan(session: Session, request: StageRequest, activation_bytes: int | None) -> None:
    """Check the arguments of ``plan``; data is required if activations are measured.

    Raises:
        ConfigurationError: the module or the data breaks a rule.
    """
    check_module(request.module, "fit")
    check_devices(request.module)
    check_given(session, "train", request, required=activation_bytes is None)


def check_evaluation(session: Session, stage: str, request: StageRequest) -> None:
    """Check the arguments of ``validate``, ``test`` or ``predict``.

    Raises:
        ConfigurationError: the module or the data breaks a rule.
    """
    check_module(request.module, stage)
    check_placed(session.resources.strategy, request.module, training=False)
    check_sequences(request.module, stage, session.resources)
    check_given(session, stage, request, required=True)


def split_datamodule(loaders: Any, datamodule: Any) -> tuple[Any, DataModule | None]:
    """Return loaders and DataModule separately: a DataModule may be passed in place of the loaders.

    Raises:
        ConfigurationError: both were given, or ``datamodule`` is not a DataModule.
    """
    # Every data module has this hook, one of another library too.
    if hasattr(type(loaders), "train_dataloader"):
        loaders, datamodule = None, datamodule or loaders
    if datamodule is None:
        return loaders, None
    if not isinstance(datamodule, DataModule):
        raise ConfigurationError(
            f"datamodule is {_described(datamodule)}; it must be a phalanx.DataModule: "
            f"{_how_to_fix(datamodule, DataModule)}."
        )
    if loaders is not None:
        raise ConfigurationError("both loaders and a datamodule were given: leave one of them out.")
    check_names(type(datamodule), DataModule)
    return None, datamodule


def check_module(module: Any, stage: str) -> None:
    """Check that a module can be trained or evaluated.

    Raises:
        ConfigurationError: it is not a TrainModule, lacks a step, or has a hook whose name is misspelled.
        LoopError: a step does not accept the arguments that it is called with.
    """
    if not isinstance(module, TrainModule):
        raise ConfigurationError(
            f"Trainer.{stage} got {_described(module)}; it takes a phalanx.TrainModule: "
            f"{_how_to_fix(module, TrainModule)}."
        )
    name = type(module).__name__
    if "_own_run" not in module.__dict__:
        raise ConfigurationError(f"{name}.__init__ did not call super().__init__(): do so before anything else.")
    check_names(type(module), TrainModule)
    needed = _STEPS.get(stage)
    _refuse_iterator_steps(module)
    if needed is not None and not is_overridden(needed, module):
        raise ConfigurationError(f"{name} has no {needed}, which Trainer.{stage} calls: define it.")
    if stage == "predict" and not is_overridden("predict_step", module) and type(module).forward is nn.Module.forward:
        raise ConfigurationError(
            f"{name} has neither predict_step nor forward, which Trainer.predict calls: define one."
        )
    if stage == "fit":
        with_arity(module.training_step, ("batch", "batch_idx"))
        if not is_overridden("configure_optimizers", module):
            raise ConfigurationError(f"{name} has no configure_optimizers, so nothing would be trained: define it.")


def _refuse_iterator_steps(module: TrainModule) -> None:
    for step in ("training_step", "validation_step", "test_step", "predict_step"):
        if is_overridden(step, module) and "dataloader_iter" in inspect.signature(getattr(module, step)).parameters:
            raise ConfigurationError(
                f"{type(module).__name__}.{step} takes dataloader_iter, but steps receive a batch, as batches are "
                "distributed over ranks and counted for checkpoints before the step: take (batch, batch_idx)."
            )


def check_backward(module: TrainModule, strategy: Strategy) -> None:
    """Refuse an overridden ``backward`` under a strategy that computes gradients itself.

    Raises:
        ConfigurationError: the strategy does not call the hook.
    """
    if is_overridden("backward", module) and strategy.traits.reduces_in_backward:
        raise ConfigurationError(
            f"{type(module).__name__} overrides backward, but strategy={strategy.name!r} computes gradients itself: "
            "use on_before_backward or on_after_backward, or strategy='ddp'."
        )


def check_devices(module: nn.Module) -> None:
    """Refuse a module on several devices, since a strategy moves all of it to one device.

    Raises:
        ConfigurationError: its parameters are on more than one device.
    """
    homes = {str(parameter.device): name for name, parameter in module.named_parameters() if not parameter.is_meta}
    if len(homes) > 1:
        where = ", ".join(f"{name} on {device}" for device, name in homes.items())
        raise ConfigurationError(
            f"{type(module).__name__} has parameters on {len(homes)} devices ({where}): leave all on one, such as "
            "the CPU; the strategy moves them."
        )


def check_manual(module: TrainModule, settings: Settings) -> None:
    """Refuse settings that require automatic optimization.

    Raises:
        ConfigurationError: manual optimization with clipping or accumulation by the Trainer.
    """
    if module.automatic_optimization:
        return
    value = settings.clipping[0]
    if value is not None:
        raise ConfigurationError(
            f"gradient_clip_val={value} with automatic_optimization = False: call self.clip_gradients(optimizer, "
            f"gradient_clip_val={value}) in training_step before the step, and leave it out of the Trainer."
        )
    if settings.global_batch is not None:
        raise ConfigurationError(
            f"{settings.global_batch} with automatic_optimization = False, where training_step gets a batch of the "
            "loader and decides when to step: set the batch size in the loader."
        )
    if settings.accumulation.constant != 1:
        raise ConfigurationError(
            f"accumulate_grad_batches={settings.accumulation} with automatic_optimization = False: call the "
            "optimizer's step in training_step when enough gradients have accumulated, and leave it out of the Trainer."
        )


def check_sequences(module: TrainModule, stage: str, resources: Resources) -> None:
    """Refuse a module that does not state how its batches are cut, where ranks share sequences.

    Raises:
        ConfigurationError: a hook is missing, or the stage or the kind of optimization is not possible with parts.
    """
    degree = resources.layout.cp
    if degree == 1:
        return
    given, name = f"parallel={{'cp': {degree}}}", type(module).__name__
    if stage == "predict":
        raise ConfigurationError(
            f"{given} with predict: each rank would predict a part of each sequence. Leave cp out of the degrees."
        )
    if not module.automatic_optimization:
        raise ConfigurationError(
            f"{given} with automatic_optimization = False: losses of parts are weighted before they are "
            f"differentiated, which {name}.training_step does itself. Use automatic optimization, or leave cp out."
        )
    if not is_overridden("cut_sequences", module):
        raise ConfigurationError(
            f"{given} needs {name}.cut_sequences(batch, part), which returns the part of a batch that a rank computes: "
            "define it, such as `return part(tokens), part(targets), part.positions(tokens)`, or leave cp out."
        )
    if not is_overridden("batch_weight", module):
        raise ConfigurationError(
            f"{given} needs {name}.batch_weight(batch), the number of targets over which the loss of a part is "
            "averaged, as parts may have different numbers of them: define it, or leave cp out."
        )


def _described(given: Any) -> str:
    return f"{given.__name__}, a class" if isinstance(given, type) else a_type(given)


def _how_to_fix(given: Any, wanted: type) -> str:
    if isinstance(given, type):
        return f"create an object of it, {given.__name__}(...)"
    foreign = next((cls for cls in type(given).__mro__ if cls.__name__.startswith("Lightning")), None)
    if foreign is not None:
        return f"let {type(given).__name__} derive from phalanx.{wanted.__name__} instead of {foreign.__name__}"
    if isinstance(given, nn.Module) and wanted is TrainModule:
        return "subclass phalanx.TrainModule instead of nn.Module, or hold the network in one"
    if isinstance(given, (TrainModule, DataModule)):
        return "check the order of the arguments"
    return f"pass an object of a class that derives from phalanx.{wanted.__name__}"
