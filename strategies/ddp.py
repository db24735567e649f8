"""``ddp``: every rank holds the full model and processes its part of the batch; gradients are averaged.

Torch's ``DistributedDataParallel`` does the averaging, overlapped with backward (Li et al. 2020, "PyTorch Distributed:
Experiences on Accelerating Data Parallel Training").
"""

from __future__ import annotations

import gc
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..framework.core.arguments import keywords_of, unknown_argument
from ..framework.core.errors import ConfigurationError
from ..framework.parallel.meta_device import share_buffers
from ..framework.parallel.parameter_names import state_tensors
from ..framework.parallel.step_flags import StepFlags
from ..framework.parallel.strategy import Routed, StepAdapter, StepFunction, Strategy
from ..framework.parallel.zero_backward import zero_loss

_TAKEN = ("module", "device_ids", "output_device", "process_group", "device_mesh")


class DDPStrategy(Strategy):
    """Replicates the model and averages gradients.

    Keyword arguments go to ``torch.nn.parallel.DistributedDataParallel`` (``find_unused_parameters``,
    ``bucket_cap_mb``, ``gradient_as_bucket_view``, ``static_graph``, ``broadcast_buffers``, ...).

    Raises:
        ConfigurationError: an argument that phalanx sets itself is given.
    """

    name = "ddp"

    def __init__(self, **ddp_arguments: Any) -> None:
        taken = [name for name in _TAKEN if name in ddp_arguments]
        if taken:
            raise ConfigurationError(f"DDPStrategy({', '.join(taken)}=...) is set by phalanx itself; leave it out.")
        known = [name for name in keywords_of(nn.parallel.DistributedDataParallel.__init__) if name not in _TAKEN]
        for name, value in ddp_arguments.items():
            if name not in known:
                raise unknown_argument("DDPStrategy", name, value, known)
        self._arguments = ddp_arguments
        self._ddp: _Replica | None = None
        self._trainable: list[bool] = []
        self._routed = Routed.LOSS
        self._syncs = True
        self._awaits_backward = False
        # Whether DDP reduces the next backward pass: it prepares for one of them in a forward pass.
        self._reduces_next = False

    def setup(
        self, module: nn.Module, optimizers: Sequence[Optimizer], training: bool, routed: Routed = Routed.LOSS
    ) -> list[Optimizer]:
        """Make all ranks start from rank 0's weights; when training, wrap an adapter around the module. Collective."""
        self._trainable = [parameter.requires_grad for parameter in module.parameters()]
        self._routed = routed
        if self.world.size > 1 and training and any(self._trainable):
            adapter = StepAdapter(module)
            if routed is Routed.LOSS:
                adapter = flagged = _FlaggedAdapter(module, self.world.device)
                self.flags = _GradientFlags(flagged.participation)
            try:
                self._ddp = _Replica(adapter, **self._arguments)
            except TypeError as error:
                raise ConfigurationError(f"DDPStrategy: DistributedDataParallel refuses an argument: {error}") from None
        elif self.world.size > 1:
            for tensor in state_tensors(module).values():
                self.world.broadcast(tensor.detach())
        return list(optimizers)

    def route(self, step: StepFunction, training: bool) -> StepFunction:
        """Return a call of ``step`` through DDP when training; evaluation needs no communication."""
        ddp = self._ddp
        if not training or ddp is None:
            return step

        def routed(*args: Any, **kwargs: Any) -> Any:
            self._awaits_backward = True
            self._reduces_next = self._syncs
            return ddp(step, *args, **kwargs)

        return routed

    def sync_gradients(self, enabled: bool) -> None:
        """Set what DDP's ``no_sync`` sets, without entering a context in every micro-batch."""
        if self._ddp is not None and enabled != self._syncs:
            # Only on a change: setting an attribute of a module takes a microsecond, in every micro-batch.
            self._ddp.require_backward_grad_sync = self._syncs = enabled

    def trainability_changed(self, module: nn.Module) -> bool:
        """Wrap the module again if parameters were frozen or unfrozen: DDP's set of them is fixed. Collective."""
        if self._ddp is None or self._trainable == [parameter.requires_grad for parameter in module.parameters()]:
            return False
        self.teardown()
        # The hooks of the old wrapper are removed with its last reference, which a reference cycle holds.
        gc.collect()
        self.setup(module, [], training=True, routed=self._routed)
        return True

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Compute gradients; DDP reduces them during the backward pass, or they are reduced after it. Collective."""
        loss.backward(**options)
        self._awaits_backward = False
        if self._ddp is not None and self._syncs:
            if self._routed is Routed.FORWARD and not self._reduces_next:
                # A second backward pass of a forward pass, or one of a part of the module. The gradients that were
                # reduced before are equal on all ranks, so the average over ranks leaves them as they are.
                self.reduce_gradients([each for each in self._ddp.module.parameters() if each.requires_grad])
            self._reduces_next = False

    def zero_backward(self) -> None:
        """Run DDP's forward and backward with a loss of zero that depends on every parameter. Collective."""
        ddp = self._ddp
        if ddp is not None:
            self.sync_gradients(True)
            if self._awaits_backward:
                # DDP broadcasts buffers before the first forward of a window. A second broadcast here would have no
                # peer on the other ranks.
                ddp.require_forward_param_sync = False
            self._reduces_next = True
            # In a list, so that the adapter does not treat it as a loss of the user.
            (loss,) = ddp(lambda: [zero_loss(ddp.module.parameters())])
            self.backward(loss)

    def reduce_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Average gradients in one flat reduction for each dtype. Collective.

        A parameter without gradient on this rank counts as zero if another rank has a gradient, and stays without one
        if no rank has one. The same reduction carries the flags for this.
        """
        if self.world.size == 1:
            return
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for parameter in parameters:
            # Parameters that require no gradient now are included: they may have one from before toggle_optimizer.
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

    def sync_buffers(self, module: nn.Module) -> None:
        """Broadcast rank 0's buffers unless ``broadcast_buffers`` is False, as DDP does in forward. Collective."""
        if self._arguments.get("broadcast_buffers", True):
            share_buffers(module, self.world)

    def teardown(self) -> None:
        """Drop the wrapper, which removes its hooks from the parameters."""
        self._ddp = self.flags = None
        self._syncs, self._awaits_backward, self._reduces_next = True, False, False


class _Replica(nn.parallel.DistributedDataParallel):
    """``DistributedDataParallel`` with a fixed order of reduction, and a readable error about unused parameters.

    Torch reduces the first backward pass in one bucket, and divides later ones by the order in which gradients arrived
    in the first. The sum of three or more ranks depends on that division, so the first step of a resumed run would be
    rounded differently than in an uninterrupted run. Here the buckets of all steps follow the reversed order of
    registration, which is the order of arrival if modules are registered in the order of their use.
    """

    def __init__(self, module: nn.Module, **arguments: Any) -> None:
        # Otherwise torch reverses the buckets itself.
        self._is_reversed = bool(arguments.get("static_graph") or not arguments.get("find_unused_parameters"))
        super().__init__(module, **arguments)
        if not self._delay_all_reduce_all_params:
            # What torch itself does for a rank that has run out of data. No effect if the buckets are fixed already, as
            # with find_unused_parameters.
            self.reducer._push_all_rebuilt_params()
            self.reducer._rebuild_buckets()

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        """Return the parameters in the order of reduction, and whether the gradient of each is sparse."""
        parameters, is_sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        if self._is_reversed:
            parameters.reverse()
            is_sparse.reverse()
        return parameters, is_sparse

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the step.

        Raises:
            ConfigurationError: parameters were unused in the previous step.
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
        """Return the names of the parameters whose indices are in torch's message."""
        match = re.search(r"did not receive grad for rank \d+: ([\d ]+)", message)
        names = [name.removeprefix("module.module.") for name, one in self.named_parameters() if one.requires_grad]
        order = range(len(names))[:: -1 if self._is_reversed else 1]
        found = [names[index] for index in sorted(order[int(number)] for number in match[1].split())] if match else []
        return ", ".join(found[:10]) + (f" and {len(found) - 10} more" if len(found) > 10 else "") or "some"


class _FlaggedAdapter(StepAdapter):
    """Adds to every loss a parameter that is 0 and stays 0, whose reduced gradient carries the flags of a step.

    Without it, ranks whose steps returned None could not tell "no rank had a loss, so there is no update" from
    "another rank had one whose gradient is zero" unless they exchanged one more message in every step.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        super().__init__(module)
        self.participation = nn.Parameter(torch.zeros((), device=device))

    def forward(self, step: StepFunction, *args: Any, **kwargs: Any) -> Any:
        """Call ``step`` and let the parameter feed its loss."""
        output = step(*args, **kwargs)
        if output.__class__ is Tensor:
            return output + self.participation if output.numel() == 1 else output
        if isinstance(output, Mapping) and isinstance(output.get("loss"), Tensor):
            return {**output, "loss": output["loss"] + self.participation}
        return output


class _GradientFlags(StepFlags):
    """The flags of a step in one gradient: positive where any rank had a loss, NaN where one was not finite."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter
        self._has_loss = False
        self._poison: Any = None

    def reset(self) -> None:
        """Drop the gradient, and what made it NaN."""
        self._parameter.grad = None
        if self._poison is not None:
            self._poison.remove()
            self._poison = None

    def send(self, has_loss: bool, nonfinite: bool) -> None:
        """Make the flag's gradient NaN in the window's last backward pass, which DDP reduces, for ``nonfinite``."""
        self._has_loss = has_loss
        if nonfinite and self._poison is None:
            self._poison = self._parameter.register_hook(_not_a_number)

    def read(self, checks_losses: bool) -> tuple[bool, bool]:
        """Return the flags; read the reduced gradient only if needed, since reading waits for the device."""
        gradient = self._parameter.grad
        if gradient is None or (self._has_loss and not checks_losses):
            return self._has_loss, False
        value = gradient.item()
        return self._has_loss or value > 0, math.isnan(value)


def _not_a_number(gradient: Tensor) -> Tensor:
    return torch.full_like(gradient, math.nan)


def find_unused_parameters(**ddp_arguments: Any) -> DDPStrategy:
    """Return ``ddp`` for models that leave parameters unused in a step."""
    return DDPStrategy(find_unused_parameters=True, **ddp_arguments)
