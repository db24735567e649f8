"""``ddp``: every rank holds the whole model and works on its part of the batch; gradients are averaged.

Torch's ``DistributedDataParallel`` does the averaging, overlapped with backward (Li et al. 2020, "PyTorch Distributed:
Experiences on Accelerating Data Parallel Training").
"""

from __future__ import annotations

import gc
import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..framework.core.errors import ConfigurationError
from ..framework.parallel.meta_device import share_buffers
from ..framework.parallel.parameter_names import state_tensors
from ..framework.parallel.strategy import StepAdapter, StepFunction, Strategy, Traits

_TAKEN = ("module", "device_ids", "output_device", "process_group", "device_mesh")


class DDPStrategy(Strategy):
    """Replicates the model and averages gradients.

    Keyword arguments go to ``torch.nn.parallel.DistributedDataParallel`` (``find_unused_parameters``,
    ``bucket_cap_mb``, ``gradient_as_bucket_view``, ``static_graph``, ``broadcast_buffers``, ...).

    Raises:
        ConfigurationError: an argument that phalanx sets itself is given.
    """

    name = "ddp"
    traits = Traits(carries_flags=True)

    def __init__(self, **ddp_arguments: Any) -> None:
        taken = [name for name in _TAKEN if name in ddp_arguments]
        if taken:
            raise ConfigurationError(f"DDPStrategy({', '.join(taken)}=...) is set by phalanx itself; leave it out.")
        self._arguments = ddp_arguments
        self._ddp: _Replica | None = None
        self._adapter: _Adapter | None = None
        self._flagged: _LossAdapter | None = None
        self._trainable: list[bool] = []

    def setup(self, module: nn.Module, optimizers: Sequence[Optimizer], training: bool) -> list[Optimizer]:
        """Make all ranks start from rank 0's weights; when training, wrap an adapter around the module. Collective."""
        self._trainable = [parameter.requires_grad for parameter in module.parameters()]
        if self.world.size > 1 and training and any(self._trainable):
            if self.routes_losses:
                self._adapter = self._flagged = _LossAdapter(module, self.world.device)
            else:
                self._adapter = _Adapter(module)
            try:
                self._ddp = _Replica(self._adapter, **self._arguments)
            except TypeError as error:
                raise ConfigurationError(f"DDPStrategy: DistributedDataParallel refuses an argument: {error}") from None
        elif self.world.size > 1:
            for tensor in state_tensors(module).values():
                self.world.broadcast(tensor.detach())
        return list(optimizers)

    def route(self, step: StepFunction, training: bool) -> StepFunction:
        """Return a call of ``step`` through DDP when training; evaluation needs no communication."""
        return partial(self._ddp, step) if training and self._ddp is not None else step

    def sync_gradients(self, enabled: bool) -> None:
        """What DDP's ``no_sync`` sets, without a generator context in every micro-batch."""
        if self._ddp is not None:
            self._ddp.__dict__["require_backward_grad_sync"] = enabled

    def refresh(self, module: nn.Module) -> bool:
        """Wrap anew where parameters were frozen or unfrozen: DDP reduces those that it saw at first. Collective."""
        if self._ddp is None or self._trainable == [parameter.requires_grad for parameter in module.parameters()]:
            return False
        self.teardown()
        # The old wrapper's hooks go with its last reference, which a circle holds.
        gc.collect()
        self.setup(module, [], training=True)
        return True

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Compute gradients; DDP reduces them as they come."""
        loss.backward(**options)
        if self._adapter is not None:
            self._adapter.__dict__["waiting"] = False

    def idle_backward(self) -> None:
        """Run DDP's forward and backward on a loss of zero that every parameter feeds. Collective."""
        if self._ddp is not None and self._adapter is not None:
            self.sync_gradients(True)
            if self._adapter.waiting:
                # DDP broadcasts buffers before the first forward of a window. Other ranks run no second one.
                self._ddp.__dict__["require_forward_param_sync"] = False
            (loss,) = self._ddp(partial(_zero_loss, self._adapter))
            self.backward(loss)

    def contributed(self) -> bool:
        """Read the reduced gradient of the participation flag: positive when any rank had a loss."""
        gradient = self._flagged.participation.grad if self._flagged is not None else None
        return gradient is not None and bool(gradient > 0)

    def mark_nonfinite(self) -> None:
        """Have the coming backward pass bring a flag of NaN, which the reduction carries to all ranks."""
        if self._flagged is not None:
            self._flagged.spoil()

    def met_nonfinite(self) -> bool:
        """Read whether the flag is NaN."""
        gradient = self._flagged.participation.grad if self._flagged is not None else None
        return gradient is not None and math.isnan(gradient.item())

    def reduce_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Average gradients in one flat reduction for each dtype. Collective.

        A parameter without gradient on this rank counts as zero where another rank has one, and stays without where
        none has: which ones exist travels in the same reduction.
        """
        if self.world.size == 1:
            return
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for parameter in parameters:
            # Also one that needs no gradient now: it may have one from before another optimizer was toggled.
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for group in by_dtype.values():
            self._reduce_group(group)

    def _reduce_group(self, parameters: list[Tensor]) -> None:
        present = [float(parameter.grad is not None) for parameter in parameters]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flags = torch.tensor(present, dtype=gradients[0].dtype, device=gradients[0].device)
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients] + [flags])
        self.world.all_reduce(flat, "mean")
        sizes = [gradient.numel() for gradient in gradients] + [len(present)]
        *parts, anywhere = flat.split(sizes)
        for parameter, gradient, part, exists in zip(parameters, gradients, parts, anywhere.tolist(), strict=True):
            if exists > 0:
                parameter.grad = part.view_as(gradient)

    def zero_grad(self, optimizer: Optimizer) -> None:
        """Drop gradients, the flag's too."""
        optimizer.zero_grad()
        self.forget_losses()

    def forget_losses(self) -> None:
        """Drop the flag's gradient."""
        if self._flagged is not None:
            self._flagged.participation.grad = None
            self._flagged.mend()

    def sync_buffers(self, module: nn.Module) -> None:
        """Broadcast rank 0's buffers, as DDP does before each forward, unless it was told not to. Collective."""
        if self._arguments.get("broadcast_buffers", True):
            share_buffers(module, self.world)

    def teardown(self) -> None:
        """Drop the wrapper, which takes its hooks off the parameters."""
        self._ddp = None
        self._adapter = self._flagged = None


class _Replica(nn.parallel.DistributedDataParallel):
    """Says what to do about parameters that took no part in a step, where torch counts them."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the step.

        Raises:
            ConfigurationError: parameters took no part in the step before.
        """
        try:
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if "Expected to have finished reduction" not in str(error):
                raise
            raise ConfigurationError(
                f"strategy='ddp' waits for the gradient of every parameter, and {self._unused(str(error))} had no part "
                "in the loss: use strategy='ddp_find_unused_parameters_true', or freeze what is not trained."
            ) from None

    def _unused(self, message: str) -> str:
        """Return the names of the parameters whose numbers torch tells."""
        told = re.search(r"did not receive grad for rank \d+: ([\d ]+)", message)
        names = [name.removeprefix("module.module.") for name, one in self.named_parameters() if one.requires_grad]
        found = [names[int(number)] for number in told[1].split()] if told else []
        return ", ".join(found[:10]) + (f" and {len(found) - 10} more" if len(found) > 10 else "") or "some"


class _Adapter(StepAdapter):
    """Remembers whether a forward pass still waits for its backward."""

    waiting = False

    def forward(self, step: StepFunction, *args: Any, **kwargs: Any) -> Any:
        """Call ``step`` inside DDP's hooks."""
        self.__dict__["waiting"] = True
        return step(*args, **kwargs)


class _LossAdapter(_Adapter):
    """Adds to every loss a parameter that is 0 and stays 0: its reduced gradient says whether any rank had a loss.

    Without it, ranks whose steps returned None could not tell "nobody had a loss, so there is no update" from
    "another rank had one whose gradient is zero" unless they exchanged one more message in every step.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        super().__init__(module)
        self.participation = nn.Parameter(torch.zeros((), device=device))
        self._spoiling: Any = None

    def spoil(self) -> None:
        """Make the flag's gradient NaN from here on."""
        if self._spoiling is None:
            self._spoiling = self.participation.register_hook(_not_a_number)

    def mend(self) -> None:
        """Let the flag have its own gradient again."""
        if self._spoiling is not None:
            self._spoiling.remove()
            self._spoiling = None

    def forward(self, step: StepFunction, *args: Any, **kwargs: Any) -> Any:
        """Call ``step`` and let the flag feed its loss."""
        output = super().forward(step, *args, **kwargs)
        if output.__class__ is Tensor:
            return output + self.participation if output.numel() == 1 else output
        if isinstance(output, Mapping) and isinstance(output.get("loss"), Tensor):
            return {**output, "loss": output["loss"] + self.participation}
        return output


def _not_a_number(gradient: Tensor) -> Tensor:
    return torch.full_like(gradient, math.nan)


def _zero_loss(adapter: nn.Module) -> list[Tensor]:
    """Return a loss of zero that every parameter feeds, through one of its elements.

    In a list, so that ``_LossAdapter`` does not take it for a loss of the user's.
    """
    parts = [parameter.flatten()[:1].sum() for parameter in adapter.parameters() if parameter.requires_grad]
    return [torch.stack([part.float() for part in parts]).nan_to_num().sum() * 0.0]


def find_unused_parameters(**ddp_arguments: Any) -> DDPStrategy:
    """Return ``ddp`` for models that leave parameters unused in a step."""
    return DDPStrategy(find_unused_parameters=True, **ddp_arguments)
