"""Rules for the passes of accumulation windows in a user's own loop: what is refused, and the next step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from ..core.errors import ConfigurationError, LoopError
from ..core.wording import a_type
from ..parallel.sequence_part import SequencePart
from ..parallel.strategy import Strategy
from .engine import Engine
from .gradient_window import GradientWindow


def check_single_pass(strategy: Strategy, window: GradientWindow | None, verb: str) -> None:
    """Check that a verb for single micro-batches may be called.

    Raises:
        ConfigurationError: the strategy runs the passes of a window together, or a step of ``forward_backward`` runs.
    """
    if window is not None and window.inside and window.is_whole:
        raise ConfigurationError(
            f"{verb} was called in the step of forward_backward, which calls backward on the loss that the step "
            "returns: leave it out of the step."
        )
    if strategy.window_passes is not None:
        raise ConfigurationError(
            f"{verb} is for passes of one micro-batch, and strategy={strategy.name!r} runs those of several at a time: "
            "use fabric.forward_backward(step, micro_batches), with a list of the micro-batches of a window, and "
            "optimizer.step() after it. That trains under every strategy."
        )


def check_caller(engine: Engine, with_gradients: bool) -> None:
    """Check the call of a module whose strategy runs the passes of a window together.

    Raises:
        LoopError: the call is outside of a step of ``forward_backward`` and has gradients, or is inside the step of
            another module.
    """
    name, strategy = type(engine.module).__name__, engine.strategy.name
    if engine.runs_window:
        return
    if any(peer.runs_window for peer in engine.peers):
        raise LoopError(
            f"{name} was called in a step that trains another module, and strategy={strategy!r} runs the stages of one "
            "module at a time: compute its output before forward_backward, under torch.no_grad(), and pass it in the "
            "micro-batches, or use strategy='fsdp'."
        )
    if with_gradients:
        raise LoopError(
            f"{name} was called with gradients outside of a step of forward_backward, and strategy={strategy!r} runs "
            "the passes of several micro-batches at a time: call it in the function that fabric.forward_backward(step, "
            "micro_batches) is given, or, to evaluate, under torch.no_grad()."
        )


def check_part(parts: int, part: SequencePart, weight: Any, argument: str) -> None:
    """Check the call of a verb that is given the loss of a part of each sequence.

    Args:
        parts: the number of ranks that share a sequence.
        part: the part of this rank.
        weight: the weight of the loss, None if it was not given.
        argument: the argument for it, for messages.

    Raises:
        ConfigurationError: the weight is missing, or nothing was cut.
    """
    given = f"Fabric(parallel={{'cp': {parts}}})"
    if weight is None:
        raise ConfigurationError(
            f"{given} needs {argument}, the number of targets over which the loss of a part is averaged, as parts may "
            "have different numbers of them: pass it, or leave cp out."
        )
    if not part.was_used:
        raise ConfigurationError(
            f"{given} was given a loss, and no tensor was cut: pass every tensor that has a sequence dim through "
            "fabric.part, such as `tokens = fabric.part(tokens)`, or leave cp out."
        )


def check_micro_batches(step: Any, micro_batches: Any) -> list[Any]:
    """Return the micro-batches of a window in a list.

    Raises:
        ConfigurationError: ``step`` is not a function, or ``micro_batches`` are one batch and not several.
    """
    if not callable(step):
        raise ConfigurationError(
            f"forward_backward was given {a_type(step)} as its step: give a function of a micro-batch that returns the "
            "loss, and then the list of micro-batches."
        )
    if isinstance(micro_batches, (Tensor, Mapping, str)) or not isinstance(micro_batches, Iterable):
        raise ConfigurationError(
            f"forward_backward was given {a_type(micro_batches)} as the micro-batches of a window: give a list of "
            "them, such as one that fabric.windows yields, or [batch] for one."
        )
    return list(micro_batches)


def weights_in(weights: Any) -> list[float]:
    """Return the weights of micro-batches as numbers.

    Raises:
        ConfigurationError: they are not several numbers.
    """
    try:
        return [float(weight) for weight in weights]
    except (TypeError, ValueError, RuntimeError):
        raise ConfigurationError(
            f"forward_backward was given weights={weights!r}: give a list with a number for each micro-batch, such as "
            "how many items its loss is the mean over."
        ) from None


def loss_of(output: Any) -> Tensor:
    """Return the loss among the output of a user's step: the output itself, or its item ``"loss"``.

    Raises:
        LoopError: it is not a tensor with one element.
    """
    loss = output.get("loss") if isinstance(output, dict) else output
    if not isinstance(loss, Tensor):
        given = f"a dict with the keys {[*map(str, output)]}" if isinstance(output, dict) else a_type(output)
        raise LoopError(
            f"the step of forward_backward returned {given}: return the loss of the micro-batch, a scalar tensor, and "
            "give a micro-batch that is not to count the weight 0 in weights=."
        )
    if loss.numel() != 1:
        raise LoopError(
            f"the step of forward_backward returned a loss of shape {tuple(loss.shape)}: return a scalar, such as its "
            "mean()."
        )
    if not loss.requires_grad and not loss.is_meta:
        raise LoopError(
            "the step of forward_backward returned a loss that was computed without gradients: return it as the module "
            "has computed it, not detached, and call forward_backward outside of torch.no_grad()."
        )
    return loss
