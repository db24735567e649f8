"""Hints for errors of torch and Python in the user's code: the step at which one was raised, and the usual cause."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from ..core.errors import CheckpointError, ConfigurationError, add_hint
from ..diagnostics.out_of_memory import is_out_of_memory
from ..run.overrides import is_overridden
from .memory_hints import memory_hint

if TYPE_CHECKING:
    from ..run.run import Run

_BACKWARD = (
    "If training_step calls loss.backward(), leave the call out: phalanx calls backward on the loss that training_step "
    "returns, unless self.automatic_optimization = False. If it uses a tensor of an earlier step, detach() that tensor."
)
_PICKLE = (
    "Worker processes that are spawned receive the dataset and the functions of a DataLoader by pickling: define them "
    "at the top level of a module, not as a lambda or inside a function, or use multiprocessing_context='fork'."
)


def add_hints(error: BaseException, stage: str, run: Run | None, is_alone: bool) -> None:
    """Add what a user needs to find the cause of an error that a stage raised.

    Args:
        error: the error.
        stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        run: the run of the stage; None before it begins.
        is_alone: whether no launcher reports the position of this rank.
    """
    if run is None or not isinstance(error, Exception) or isinstance(error, (ConfigurationError, CheckpointError)):
        return
    if hint := _hint(error, stage, run):
        add_hint(error, hint)
    if is_alone and stage == "fit":
        progress = run.progress
        add_hint(
            error, f"Raised at step {progress.global_step} (epoch {progress.epoch}, batch {progress.batch_in_epoch})."
        )


def _hint(error: Exception, stage: str, run: Run) -> str | None:
    if is_out_of_memory(error):
        return memory_hint(run)
    text = str(error)
    module = run.module
    if isinstance(error, RuntimeError) and "backward through the graph a second time" in text:
        return _BACKWARD if stage == "fit" and module.automatic_optimization else None
    if "optimizer got an empty parameter list" in text and not any(True for _ in module.parameters()):
        held = [name for name, value in vars(module).items() if _holds_modules(value)]
        where = f": its {', '.join(held)} is a list or dict of Python" if held else ""
        return (
            f"{type(module).__name__} has no parameters{where}. Assign layers to attributes, or put them into "
            "nn.ModuleList or nn.ModuleDict."
        )
    refuses_pickle = type(error).__name__ == "PicklingError" or isinstance(error, AttributeError | TypeError)
    if refuses_pickle and "pickle" in text.lower():
        return _PICKLE
    calls_forward = stage == "predict" and not is_overridden("predict_step", module)
    if calls_forward and isinstance(error, TypeError | AttributeError | IndexError):
        name = type(module).__name__
        return (
            f"{name} has no predict_step, so its forward received the whole batch: if the batch is not just the input, "
            "define predict_step(self, batch, batch_idx), for example to return self(batch[0])."
        )
    return None


def _holds_modules(value: object) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return any(isinstance(part, nn.Module) for part in parts)
