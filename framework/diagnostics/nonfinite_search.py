"""Where a number that is not finite began: in the weights, in the batch, in a module's output, in a gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..checkpoint.codec import encode
from ..checkpoint.finite_check import has_nonfinite, is_finite
from ..core.errors import ConfigurationError
from ..parallel.zero_backward import tensors_in
from .isolated_step import isolated

if TYPE_CHECKING:
    from ..parallel.strategy import StepFunction
    from ..run.run import Run


def first_weight(run: Run) -> str:
    """Return a clause on the first parameter that is not finite before the update, or nothing. Collective."""
    parameters = {name for name, _ in run.module.named_parameters()}
    shards = run.fabric.strategy.model_state(run.module)
    mine = has_nonfinite({name: shard.tensor for name, shard in shards.items() if name in parameters})
    found = next((name for name in run.world.all_gather_object(mine) if name is not None), None)
    return "" if found is None else f"the weight {found} was not finite before it"


def first_gradient(run: Run) -> str:
    """Return a clause on the first parameter whose whole gradient is not finite, or nothing. Collective."""
    for name, parameter in run.module.named_parameters():
        gradient = run.fabric.strategy.full_gradient(parameter)
        if gradient is not None and not all(run.world.all_gather_object(is_finite(gradient.detach()))):
            return f"the gradient of {name} is the first that is not finite"
    return ""


def in_batch(batch: Any) -> str | None:
    """Return a clause on the first tensor of a batch with a NaN in it, or None. Infinities may be masks."""
    try:
        tensors = encode(batch)[1]
    except ConfigurationError:
        tensors = {str(number): tensor for number, tensor in enumerate(tensors_in(batch))}
    found = next((name for name, tensor in tensors.items() if _has_nan(tensor)), None)
    return None if found is None else f"the batch itself holds NaN, in {found!r}"


def first_module(run: Run, step: StepFunction, batch: Any, index: int) -> str:
    """Run a step once more and return a clause on the first module with an output that is not finite, or nothing.

    Collective where the step is. Generators, buffers, metrics and logs stay as they are.
    """
    met: list[tuple[str, bool]] = []
    handles = []
    for name, part in run.module.named_modules():
        if name:
            label = f"{name} ({type(part).__name__})"
            handles.append(part.register_forward_hook(_looker(label, met)))
    try:
        with isolated(run.module), torch.no_grad():
            step(batch, index)
    except Exception as error:
        return f"run once more, its step raised {type(error).__name__}"
    finally:
        for handle in handles:
            handle.remove()
    if not met:
        return "no module's output shows it, so it began in the loss itself"
    first = met[0][0]
    with_nan = next((label for label, has_nan in met if has_nan), first)
    clause = f"the first output that is not finite is that of {first}"
    return clause if with_nan == first else f"{clause}, the first with NaN that of {with_nan}"


def local_gradient(run: Run, step: StepFunction, batch: Any, index: int) -> bool:
    """Run a step once more; return whether the gradients of its loss, this rank's alone, are finite."""
    trained = [parameter for parameter in run.module.parameters() if parameter.requires_grad]
    try:
        with isolated(run.module):
            output = step(batch, index)
            loss = output["loss"] if isinstance(output, dict) else output
            gradients = torch.autograd.grad(loss, trained, allow_unused=True)
    except Exception:
        return True
    return all(is_finite(gradient) for gradient in gradients if gradient is not None)


def _looker(label: str, met: list[tuple[str, bool]]) -> Any:
    def look(part: nn.Module, inputs: Any, output: Any) -> None:
        for tensor in tensors_in(output):
            if not is_finite(tensor.detach()):
                met.append((label, _has_nan(tensor)))
                return

    return look


def _has_nan(tensor: Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and bool(tensor.detach().isnan().any())
