"""Search for the source of a non-finite value: weights, batch, output of a module, or gradient.

Each function returns a clause of the error message, such as "the weight net.weight was non-finite before the update".
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.codec import encode
from ..checkpoint.finite_check import has_nonfinite, is_finite
from ..core.errors import ConfigurationError
from ..parallel.compilation import uncompiled
from ..parallel.strategy import StepFunction
from ..parallel.zero_backward import tensors_in
from ..run.run import Run
from .isolated_step import isolated


def first_weight(run: Run) -> str:
    """Describe the first parameter that was non-finite before the update; empty if there is none. Collective."""
    parameters = {name for name, _ in run.module.named_parameters()}
    state = run.strategy.state
    shards = state.model_state(run.module)
    mine = has_nonfinite({name: shard.tensor for name, shard in shards.items() if name in parameters})
    found = next((name for name in run.world.all_gather_object(mine) if name is not None), None)
    return "" if found is None else f"the weight {found} was non-finite before the update"


def first_gradient(run: Run) -> str:
    """Describe the first parameter whose full gradient is non-finite; empty if there is none. Collective."""
    gradients = run.strategy.gradients
    for name, parameter in run.module.named_parameters():
        gradient = gradients.full(parameter)
        if gradient is not None and not all(run.world.all_gather_object(is_finite(gradient.detach()))):
            return f"the gradient of {name} is the first non-finite one"
    return ""


def in_batch(batch: Any) -> str | None:
    """Describe the first tensor of a batch that contains NaN, or return None. Infinities may be masks: allowed."""
    try:
        tensors = encode(batch)[1]
    except ConfigurationError:
        tensors = {str(number): tensor for number, tensor in enumerate(tensors_in(batch))}
    found = next((name for name, tensor in tensors.items() if _has_nan(tensor)), None)
    return None if found is None else f"the batch contains NaN in {found!r}"


def first_module(run: Run, step: StepFunction, batch: Any, index: int) -> str:
    """Run a step again and describe the first module with a non-finite output. Collective if the step is.

    Random generators, buffers, metrics and logs are not changed.
    """
    met: list[tuple[str, bool]] = []
    handles = []
    for name, part in run.module.named_modules():
        if name:
            label = f"{name} ({type(part).__name__})"
            handles.append(part.register_forward_hook(_looker(label, met)))
    try:
        with isolated(run.module), uncompiled(run.module), torch.no_grad():
            step(batch, index)
    except Exception as error:
        return f"running its step again raised {type(error).__name__}"
    finally:
        for handle in handles:
            handle.remove()
    if not met:
        return "the outputs of all modules are finite, so the computation of the loss produced it"
    first = met[0][0]
    with_nan = next((label for label, has_nan in met if has_nan), first)
    clause = f"the first non-finite output is that of {first}"
    return clause if with_nan == first else f"{clause}, and the first output with NaN is that of {with_nan}"


def local_gradient(run: Run, step: StepFunction, batch: Any, index: int) -> bool:
    """Run a step again and return whether the gradients of its loss on only this rank are finite."""
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
