"""Parameters of ZeRO stage 3: whatever user code does with one, it does with the full parameter.

DeepSpeed leaves a parameter without elements wherever its module does not run. Here an operation on it gathers it
first, on all ranks, which call the same operations. What an operation has changed is written to the pieces of the
ranks, and the parameter is released again, unless a tensor that shares its memory was returned (``parameter.data``, a
view), or a backward pass will need it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...framework.core.errors import ConfigurationError, LoopError
from ...framework.core.torch_internals import is_in_backward, version_of
from ...framework.distributed.world import World
from ...framework.parallel.step_flags import RunOrder
from .access import engine_runs
from .flat_groups import copy_unequal, full_shape, is_split, local_piece, partition_of

# What is the same for a parameter with and without elements.
_SHAPES = {
    Tensor.shape.__get__,  # type: ignore[attr-defined]
    Tensor.ndim.__get__,  # type: ignore[attr-defined]
    Tensor.size,
    Tensor.numel,
    Tensor.nelement,
    Tensor.dim,
    Tensor.ndimension,
    Tensor.stride,
    Tensor.__len__,
}
_ATTRIBUTES = {"__get__", "__set__", "__delete__"}
_OF_VALUES = {Tensor.data, Tensor.T, Tensor.mT, Tensor.H, Tensor.mH, Tensor.real, Tensor.imag}
_WITHOUT_VALUES = {
    Tensor.requires_grad_,
    Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.element_size,
    Tensor.retain_grad,
    Tensor.__hash__,
}
# In DeepSpeed's set of the modules that use a parameter: one that it does not release before the update.
_UNTIL_UPDATE = "the backward pass"


class ShardedParameter(nn.Parameter):
    """A parameter that is gathered where an operation outside of DeepSpeed needs it."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation on full parameters. Collective if one of them is not here."""
        kwargs = kwargs or {}
        with engine_runs:
            if func in _WITHOUT_VALUES or _is_attribute(func):
                return func(*args, **kwargs)
            if func in _SHAPES:
                return func(_with_shape(args[0]), *args[1:], **kwargs)
            return _run(func, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return an ordinary parameter with the full values. Collective."""
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        copied: nn.Parameter = memo[id(self)]
        return copied


class Gathering:
    """The parameters of one module that are gathered for user code.

    Args:
        module: the user's module.
        offload: DeepSpeed's object that gathers the parameters of modules.
    """

    def __init__(self, module: nn.Module, world: World, offload: Any) -> None:
        self._world = world
        # Private to DeepSpeed, which has no public way to wait for one parameter that it gathers ahead of its module:
        # ``GatheredParameters`` takes such a parameter for one that is here.
        self._coming = offload.module.ds_inflight_param_registry
        self._persistent = {id(one) for one in offload.persistent_parameters}
        self._lent: dict[int, Any] = {}
        self.order = RunOrder()
        """The order in which parameters are gathered for modules and for user code."""
        with_parameters = [part for part in module.modules() if any(True for _ in part.parameters(recurse=False))]
        self._numbers = {id(part): number for number, part in enumerate(with_parameters, 1)}
        self._parameters = [one for one in module.parameters() if type(one) is nn.Parameter]
        for parameter in self._parameters:
            # No ordinary way: the user's objects, which optimizers and modules hold, must become guarded ones.
            parameter.__class__ = ShardedParameter
            _GATHERING[id(parameter)] = self
        self._before_forward = self._quiet(offload.pre_sub_module_forward_function)
        offload.pre_sub_module_forward_function = self._begin_forward
        offload.post_sub_module_forward_function = self._quiet(offload.post_sub_module_forward_function)
        offload.post_sub_module_backward_function = self._quiet(offload.post_sub_module_backward_function)
        self._before_backward = self._quiet(offload.pre_sub_module_backward_function)
        offload.pre_sub_module_backward_function = self._begin_backward

    def stop(self) -> None:
        """Make the parameters ordinary ones again."""
        for parameter in self._parameters:
            _GATHERING.pop(id(parameter), None)
            if type(parameter) is ShardedParameter:
                # No ordinary way: the user's objects get their own class back.
                parameter.__class__ = nn.Parameter  # type: ignore[assignment]

    def _quiet(self, function: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
        def run(module: nn.Module) -> None:
            if self._lent:
                self.take_back()
            with engine_runs:
                function(module)

        return run

    def _begin_forward(self, module: nn.Module) -> None:
        # Not in a backward pass, which runs checkpointed modules again.
        if (number := self._numbers.get(id(module))) is not None and not is_in_backward():
            self.order.note(number)
        self._before_forward(module)

    def _begin_backward(self, module: nn.Module) -> None:
        self._before_backward(module)
        if torch.is_grad_enabled():
            # create_graph=True: the pass through this pass needs the parameters again.
            for parameter in module.parameters(recurse=False):
                hold(parameter)

    def is_whole(self, parameter: Any) -> bool:
        """Whether all elements of a parameter are here."""
        if parameter in self._coming:
            return False
        with torch._C.DisableTorchFunctionSubclass():
            return tuple(parameter.shape) == full_shape(parameter)

    def gather(self, parameter: Any) -> bool:
        """Gather a parameter; return whether no module is using it, so that nothing keeps it here. Collective."""
        if parameter in self._coming:
            # Perhaps together with others.
            self._coming.pop(parameter).wait()
            return True
        if self.is_whole(parameter):
            return False
        parameter.all_gather()
        return True

    def lend(self, parameter: Any) -> None:
        """Leave a parameter gathered, as the user has a tensor that shares its memory, until DeepSpeed's next call."""
        self._lent[id(parameter)] = parameter

    def is_lent(self, parameter: Any) -> bool:
        """Whether the user may have a tensor that shares the parameter's memory."""
        return id(parameter) in self._lent

    def take_back(self) -> None:
        """Write lent parameters to the pieces of the ranks, and release those that no module is using."""
        lent = list(self._lent.values())
        self._lent.clear()
        with engine_runs:
            for parameter in lent:
                if self.is_whole(parameter):
                    self.write(parameter)
                    self.release(parameter)

    @torch.no_grad()
    def write(self, parameter: Any) -> None:
        """Write the values of a gathered parameter to this rank's pieces of it."""
        from deepspeed.utils import safe_get_local_fp32_param, safe_set_local_fp32_param

        piece, start = local_piece(parameter, self._world)
        mine = parameter.data.reshape(-1).narrow(0, min(start, parameter.data.numel()), piece.numel())
        # With a copy, since DeepSpeed returns the tensor itself where it can.
        master = safe_get_local_fp32_param(parameter) if parameter.requires_grad else None
        if master is not None:
            copy_unequal(master.narrow(0, 0, piece.numel()), mine)
            safe_set_local_fp32_param(parameter, master)
        piece.copy_(mine)
        # ZeRO++'s second copy inside a node, which DeepSpeed makes again. Private to DeepSpeed, whose public
        # ``invalidate_secondary_tensor`` leaves out frozen parameters.
        parameter.ds_secondary_tensor = None
        if partition_of(parameter).final_location is not None and not _users(parameter):
            # On a disk: DeepSpeed writes it there when it is split again.
            parameter.partition(has_been_updated=True)

    def release(self, parameter: Any) -> None:
        """Release a parameter, unless a module or a backward pass needs it or it is small and always here."""
        in_use = _users(parameter) or id(parameter) in self._persistent
        if self.is_whole(parameter) and not in_use:
            parameter.partition()


_GATHERING: dict[int, Gathering] = {}


def _users(parameter: Any) -> set[Any]:
    """Return DeepSpeed's set of what uses a gathered parameter, which it does not release as long as there is any."""
    # Private to DeepSpeed. ``register_external_parameter`` ties a parameter to the passes of one module, and the graph
    # of an operation may need it in any pass until the update.
    users: set[Any] = parameter.ds_active_sub_modules
    return users


def hold(parameter: Any) -> None:
    """Leave a parameter gathered until the next update."""
    _users(parameter).add(_UNTIL_UPDATE)


def _is_attribute(func: Any) -> bool:
    return func.__name__ in _ATTRIBUTES and func not in _SHAPES and func.__self__ not in _OF_VALUES


def _run(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    used = [(one, _GATHERING[id(one)]) for one in _sharded(args) if id(one) in _GATHERING]
    used += [(one, _GATHERING[id(one)]) for one in _sharded(kwargs.values()) if id(one) in _GATHERING]
    fetched = [gathering.gather(parameter) for parameter, gathering in used]
    versions = [version_of(parameter) for parameter, _ in used]
    result = func(*args, **kwargs)
    outputs = list(_tensors(result))
    for (parameter, gathering), was_absent, version in zip(used, fetched, versions, strict=True):
        others = [one for one in outputs if one is not parameter]
        if was_absent and parameter.requires_grad and any(_is_in_graph(one) for one in others):
            hold(parameter)
        if any(_shares(one, parameter) for one in others):
            gathering.lend(parameter)
        if version_of(parameter) != version:
            gathering.write(parameter)
        if was_absent and not gathering.is_lent(parameter):
            gathering.release(parameter)
    return result


def _is_in_graph(one: Tensor) -> bool:
    # A view of a parameter requires gradients under torch.no_grad too.
    return torch.is_grad_enabled() and one.requires_grad


def _shares(one: Tensor, parameter: Tensor) -> bool:
    if _is_in_graph(one) and not one._is_view():
        return False
    return one.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr() != 0


def _sharded(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if type(value) is ShardedParameter:
            yield value
        elif type(value) in (list, tuple):
            yield from _sharded(value)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


def _with_shape(parameter: Any) -> Tensor:
    return torch.empty(full_shape(parameter), dtype=parameter.dtype, device="meta")


# ---- refusals of what a module cannot do while its parameters are sharded ------------------------------------------


def refuse_empty_state(module: nn.Module, is_whole: Callable[[Any], bool]) -> list[RemovableHandle]:
    """Let ``state_dict`` raise while a parameter is sharded: it would hold tensors without elements.

    Args:
        is_whole: whether all elements of a parameter are here.

    Returns:
        The handles of the hooks, one for each part of the module that has parameters.
    """

    def check(part: nn.Module, prefix: str, keep_vars: bool) -> None:
        # With keep_vars the parameters themselves are asked for, by code that knows them to be sharded.
        for name, parameter in () if keep_vars else part._parameters.items():
            if parameter is not None and is_split(parameter) and not is_whole(parameter):
                raise ConfigurationError(
                    f"state_dict() of {type(part).__name__} would hold '{prefix}{name}' without elements: the strategy "
                    "shards parameters over the ranks: save the module itself, with fabric.save(path, {'model': "
                    "model}) or fabric.save_model(model, directory), and in a Trainer with "
                    "trainer.save_checkpoint(path)."
                )

    return [part.register_state_dict_pre_hook(check) for part in module.modules() if part._parameters]


def no_copy(part: nn.Module) -> Callable[[Any], Any]:
    """Return the ``__deepcopy__`` of a module whose layers gather their parameters."""

    def refuse(memo: Any) -> Any:
        raise ConfigurationError(
            f"copy.deepcopy of {type(part).__name__} is not possible under ZeRO stage 3, whose engine is in the hooks "
            "of the layers: copy the module before the set-up, or copy single parameters."
        )

    return refuse


def explained(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``step`` with errors of its own for those of DeepSpeed about what user code does to layers."""

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return step(*args, **kwargs)
        except RuntimeError as error:
            if not str(error).startswith("Detected a disagreement on list contents"):
                raise
            raise LoopError(
                "the ranks ran different layers in the last step, and ZeRO stage 3 gathers the weights of each layer "
                "on all of them: run the same layers on all ranks, or use strategy='zero2'."
            ) from error
        except AttributeError as error:
            if "has no attribute 'ds_" not in str(error):
                raise
            raise ConfigurationError(
                "a layer has a parameter that it did not have at the set-up, as torch.func.functional_call or an "
                "assignment puts it there, and ZeRO stage 3 gathers those of the set-up: change parameters in place, "
                "or use strategy='zero2'."
            ) from error

    return run
