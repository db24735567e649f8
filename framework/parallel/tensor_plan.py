"""Tensor-parallel plans that models bring along: the ``tp_plan`` of transformers, as styles of torch.

transformers names a style for each layer in a model's configuration and class; ``PreTrainedModel.post_init`` joins them
in ``model._tp_plan``. Layers outside of a plan are computed identically by all ranks of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import partial
from math import gcd
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.utils.weak import WeakTensorKeyDictionary

from ..core.degrees import divisors, listed
from ..core.errors import ConfigurationError, unknown

_COLUMNS = ("colwise", "colwise_rep", "colwise_gather_output", "embedding_colwise")
_ROWS = ("rowwise", "rowwise_rep", "rowwise_split_input", "embedding_rowwise")
# Parts of a configuration that are divided among the ranks of a group.
_HEADS = ("num_attention_heads", "num_key_value_heads")


class SummedGradients(ParallelStyle):
    """The style of layers that every rank applies to its own part of the features, such as norms of attention heads.

    Their parameters are equal on all ranks, and their gradients are added over the ranks of a group.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group, known = device_mesh.get_group(), WeakTensorKeyDictionary()

        def watch(part: nn.Module, _: Any) -> None:
            for parameter in part.parameters():
                # Sharded parameters are gathered into tensors of their own, which exist before the first forward pass.
                if parameter.requires_grad and parameter not in known:
                    known[parameter] = True
                    parameter.register_hook(partial(_summed, group=group))

        module.register_forward_pre_hook(watch)
        return module


class _Whole(ParallelStyle):
    """The style of layers that stay whole."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return module


def _summed(gradient: Tensor, group: dist.ProcessGroup) -> Tensor:
    gradient = gradient.clone()
    dist.all_reduce(gradient, group=group)
    return gradient


_STYLES: dict[str, Callable[[], ParallelStyle | None]] = {
    "colwise": ColwiseParallel,
    **dict.fromkeys(("colwise_rep", "colwise_gather_output", "embedding_colwise"), partial(
        ColwiseParallel, output_layouts=Replicate()
    )),
    "rowwise": RowwiseParallel,
    **dict.fromkeys(("rowwise_rep", "rowwise_split_input", "embedding_rowwise"), partial(
        RowwiseParallel, input_layouts=Replicate()
    )),
    "replicated_with_grad_allreduce": SummedGradients,
    "replicate": lambda: None,
}  # fmt: skip


def named_style(name: str) -> ParallelStyle:
    """Return a style of torch by the name that transformers gives it.

    Raises:
        UnknownNameError: there is none of this name.
    """
    if name not in _STYLES:
        raise unknown("style", name, list(_STYLES))
    return _STYLES[name]() or _Whole()


def has_own_plan(module: nn.Module) -> bool:
    """Whether a module is, or contains, a model with a plan."""
    return next(_models(module), None) is not None


def check_own_plan(module: nn.Module, degree: int) -> None:
    """Refuse the plans of the models in a module if they have an unknown style, or the degree does not divide layers.

    Raises:
        ConfigurationError: there is such a style or layer.
    """
    for _, model in _models(module):
        unknown = {style: name for name, style in model._tp_plan.items() if style not in _STYLES}
        if unknown:
            style, name = next(iter(unknown.items()))
            raise ConfigurationError(
                f"parallel={{'tp': {degree}}}: the plan of {type(model).__name__} splits {name} by style {style!r}, "
                f"which is not known. Known: {listed(sorted(_STYLES))}. Define configure_tensor_parallel(mesh) in the "
                "module, or leave tp out."
            )
        sizes = {name: size for name in _HEADS if isinstance(size := getattr(model.config, name, None), int)}
        sizes |= dict(_sizes(model))
        odd = [f"{name} is {size}" for name, size in sizes.items() if size % degree]
        if odd:
            raise ConfigurationError(
                f"parallel={{'tp': {degree}}} does not divide {type(model).__name__}, whose {odd[0]}. Use tp out of "
                f"{divisors(gcd(*sizes.values()))}."
            )


def own_plan(module: nn.Module) -> dict[str, ParallelStyle]:
    """Return the plans of the models in a module as torch's styles, by names of submodules.

    A layer whose weight another layer outside of the plan shares stays whole.
    """
    plan: dict[str, ParallelStyle] = {}
    for path, model in _models(module):
        for name in _matched(model):
            style = _STYLES[_style_of(model, name)]()
            if style is not None and not _is_shared(model, name):
                plan[f"{path}.{name}".lstrip(".")] = style
    return plan


def _models(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the outermost submodules with a plan, and their names."""
    taken: list[str] = []
    for name, part in module.named_modules():
        inside = any(name == each or name.startswith(f"{each}.") or not each for each in taken)
        if not inside and isinstance(getattr(part, "_tp_plan", None), Mapping) and part._tp_plan:
            taken.append(name)
            yield name, part


def _matched(model: Any) -> list[str]:
    names = [name for name, part in model.named_modules() if next(part.parameters(False), None) is not None]
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in model._tp_plan)]


def _style_of(model: Any, name: str) -> str:
    return next(str(style) for pattern, style in model._tp_plan.items() if fnmatchcase(name, pattern))


def _is_shared(model: nn.Module, name: str) -> bool:
    """Whether a layer has a parameter of another layer."""
    own = {id(parameter) for parameter in model.get_submodule(name).parameters()}
    return any(
        id(parameter) in own
        for other, part in model.named_modules()
        if other != name
        for parameter in part._parameters.values()
        if parameter is not None
    )


def _sizes(model: Any) -> Iterator[tuple[str, int]]:
    """Yield the sizes of the layers in a plan that are split."""
    for name in _matched(model):
        part, style = model.get_submodule(name), _style_of(model, name)
        weight = getattr(part, "weight", None)
        if not isinstance(weight, Tensor) or weight.dim() != 2 or _is_shared(model, name):
            continue
        # An embedding's rows are its entries, and may be split unevenly.
        if style in _COLUMNS and not isinstance(part, nn.Embedding):
            yield f"{name}.out_features", weight.shape[0]
        elif style in _ROWS and not isinstance(part, nn.Embedding):
            yield f"{name}.in_features", weight.shape[1]
