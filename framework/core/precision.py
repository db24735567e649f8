"""The ``Precision`` contract: the dtypes of parameters, computation and reduction, and the loss scale.

A precision is a class in ``precisions/``, exported there and named in the registry (see CONTRIBUTING.md). The rest of
phalanx reads its attributes and never asks for its name or class, so a precision that a user wrote works wherever a
built-in one does.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from .arguments import NamesArguments, names_arguments
from .errors import ConfigurationError
from .registry import PRECISIONS

_HALF = (torch.float16, torch.bfloat16)


class LossScaler:
    """Dynamic loss scaling (Micikevicius et al. 2018, "Mixed Precision Training").

    The loss is multiplied by ``scale`` before backward, and gradients are divided by it before they are clipped or
    applied. An update whose gradients are not finite is skipped and the scale halved; after ``growth_interval`` good
    updates in a row it doubles.

    The scale is a Python number, not a tensor on the device: it is part of the factor that each loss is multiplied by
    anyway, and whether an update was good must reach the host in any case, since counters and schedulers depend on it.
    """

    @names_arguments
    def __init__(
        self,
        scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        self.scale = scale
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self._good_updates = 0

    def update(self, finite: bool) -> None:
        """Adapt the scale after an update; ``finite``: whether its gradients were finite on all ranks."""
        if not finite:
            self.scale *= self.backoff_factor
            self._good_updates = 0
            return
        self._good_updates += 1
        if self._good_updates == self.growth_interval:
            self.scale *= self.growth_factor
            self._good_updates = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and the number of good updates in a row."""
        return {"scale": self.scale, "good_updates": self._good_updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state returned by ``state_dict``."""
        self.scale = float(state["scale"])
        self._good_updates = int(state["good_updates"])


class Precision(NamesArguments):
    """The dtypes of a run, and the four operations in which they take effect.

    The operations are the context of forward passes, the loss scale, and the conversions of modules and of batches. The
    defaults follow from the dtypes: a subclass that only sets them is complete. Every method is called at set-up
    except ``convert_batch``, which is called for each batch if ``converts_batch`` is true.

    Attributes:
        name: The name in checkpoints, reports and messages.
        parameter_dtype: The dtype of parameters, of their gradients and of the optimizer's state.
        replaces_layers: Whether ``convert_module`` changes how layers compute. Strategies that depend on the layers'
            own computation refuse such a precision: ``zero1`` to ``zero3``, pipelines and tensor parallelism. A
            Trainer evaluates it under ``torch.no_grad``, not in inference mode.
        libraries: Modules that every rank imports before its first step; importing them must not initialize an
            accelerator. The ranks of a script are forked from a process that has imported them.
    """

    name: str
    parameter_dtype: torch.dtype = torch.float32
    replaces_layers: bool = False
    libraries: tuple[str, ...] = ()

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of matrix products: ``parameter_dtype``, unless the precision is mixed."""
        return self.parameter_dtype

    @property
    def reduction_dtype(self) -> torch.dtype:
        """The dtype in which gradients are averaged over ranks, if the strategy can choose it: at least fp32.

        ``fsdp`` uses it. ``ddp`` reduces gradients in their own dtype.
        """
        return torch.promote_types(self.parameter_dtype, torch.float32)

    @property
    def is_mixed(self) -> bool:
        """Whether operations compute in a different dtype from the one that parameters are stored in."""
        return self.compute_dtype != self.parameter_dtype

    def check_device(self, device: torch.device) -> None:
        """Refuse a device that cannot compute in this precision. Called on every rank, before the module is set up.

        Raises:
            ConfigurationError: the device does not fit.
        """

    def forward_context(self, device_type: str) -> AbstractContextManager[Any] | None:
        """Return the context of forward passes, or None if they need none.

        It is entered and left once for each forward pass, so it must be reusable. By default it is ``torch.autocast``
        in ``compute_dtype`` if the precision is mixed, and else makes ``parameter_dtype`` the default dtype.
        """
        if self.is_mixed:
            return torch.autocast(device_type, dtype=self.compute_dtype)
        return DefaultDtype(self.parameter_dtype) if self.parameter_dtype != torch.float32 else None

    def loss_scaler(self) -> LossScaler | None:
        """Return a new loss scaler, or None if losses are not scaled.

        Strategies that scale fp16 losses themselves (``zero1`` to ``zero3``) take over its initial scale and its growth
        interval.
        """
        return None

    def convert_module(self, module: nn.Module) -> Callable[[], None] | None:
        """Convert a module in place, before its optimizers are set up.

        By default floating-point parameters and buffers are cast to ``parameter_dtype``. Complex ones get the same
        digits in fp64, and are unchanged otherwise: ``module.to(dtype)`` would drop their imaginary parts.

        Returns:
            A function that a Trainer calls after the run, such as one that gives layers their own computation back;
            None if there is nothing to undo.
        """
        # A fp32 run leaves modules as they are: a user may have made some parameters fp64 on purpose.
        if self.parameter_dtype != torch.float32:
            module._apply(self._cast)
        return None

    def convert_batch(self, batch: Any) -> Any:
        """Return the batch that is passed to the step methods. By default floating-point tensors are cast to
        ``parameter_dtype``."""
        # Imported only by precisions that convert batches: the import takes 20 ms.
        from lightning_utilities.core.apply_func import apply_to_collection

        return apply_to_collection(batch, Tensor, self._cast) if self.parameter_dtype != torch.float32 else batch

    @property
    def converts_batch(self) -> bool:
        """Whether ``convert_batch`` must be called. If False, it is skipped."""
        return self.parameter_dtype != torch.float32 or type(self).convert_batch is not Precision.convert_batch

    def _cast(self, tensor: Tensor) -> Tensor:
        if tensor.is_complex() and self.parameter_dtype == torch.float64:
            return tensor.to(torch.complex128)
        return tensor.to(self.parameter_dtype) if tensor.is_floating_point() else tensor


class DefaultDtype:
    """Context in which new floating-point tensors have the given dtype. Reusable, but must not be nested in itself."""

    __slots__ = ("_dtype", "_previous")

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._previous = torch.float32

    def __enter__(self) -> None:
        self._previous = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)

    def __exit__(self, *exception: object) -> None:
        torch.set_default_dtype(self._previous)


def resolve_precision(given: str | int | Precision | None) -> Precision:
    """Return the precision for a name, a short form (``32``, ``16``, ``"fp16"``, ``"bf16"``, ``64``) or an object.

    None stands for ``"32-true"``.

    Raises:
        UnknownNameError: the name is not known.
        ConfigurationError: the value is of another type.
    """
    if isinstance(given, Precision):
        return given
    if isinstance(given, bool) or not isinstance(given, (str, int, type(None))):
        hint = f" Pass an instance: {given.__name__}()." if isinstance(given, type) else ""
        raise ConfigurationError(
            f"precision={given!r} must be a name such as 'bf16-mixed', one of 32, 16 and 64, or a Precision.{hint}"
        )
    built: Precision = PRECISIONS.load("32-true" if given is None else str(given))()
    return built


def at_least_fp32(tensor: Tensor) -> Tensor:
    """Return a half-precision output in fp32, so that the loss computed from it is exact."""
    return tensor.float() if tensor.dtype in _HALF else tensor
