"""Quantized optimizer state of sharded parameters: each rank quantizes its shard in blocks of consecutive elements.

A block never crosses the border of a shard, so the shards of codes and scales are those of one tensor, which any
strategy can load.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard as Sharded
from torch.optim import Optimizer

from ...framework.checkpoint.write_plan import Shard, part_at
from ...framework.core.degrees import Layout
from ...framework.core.errors import ConfigurationError
from ...framework.core.optimizer_config import parameters_of
from ...framework.core.quantized_state import LOOKUP, description_of, parts_of, quantizes, rebuild
from .local_shards import like, local_of, shape_and_offsets

# torchao leaves smaller shards in full precision.
_LEAST = 4096


def check_blocks(optimizer: Optimizer, module: nn.Module, mesh: DeviceMesh, layout: Layout) -> None:
    """Refuse an optimizer with quantized state if some ranks would quantize their shard of a parameter, others not.

    Args:
        optimizer: any optimizer.
        module: the module, before it is sharded.
        mesh: the ranks that hold a model; the last dim shards it.
        layout: the degrees; with ``tp`` or ``ep`` shards are not consecutive elements, or differ between parameters.

    Raises:
        ConfigurationError: there is such a parameter; the message names it.
    """
    if not quantizes(optimizer):
        return
    name = type(optimizer).__name__
    for axis, degree in (("tensor_parallel", layout.tp), ("ep", layout.ep)):
        if degree > 1:
            raise ConfigurationError(
                f"{name} quantizes blocks of consecutive elements, which {axis} spreads over ranks: use "
                f"torch.optim.AdamW, or leave {axis} out."
            )
    ranks, block = mesh.size(mesh.ndim - 1), int(getattr(optimizer, "block_size", 1))
    mine = set(map(id, parameters_of(optimizer)))
    for parameter_name, parameter in module.named_parameters():
        if id(parameter) not in mine:
            continue
        rows = parameter.shape[0] if parameter.dim() else 1
        row, chunk = parameter.numel() // max(rows, 1), -(-rows // ranks)
        sizes = {chunk * row, (rows % chunk if chunk else 0) * row} - {0}
        if len({size >= _LEAST and size % block == 0 for size in sizes}) > 1:
            raise ConfigurationError(
                f"{name} would quantize its state of {parameter_name}, of shape {list(parameter.shape)}, on some of "
                f"{ranks} ranks only, as their shards have {' and '.join(map(str, sorted(sizes)))} elements: use "
                "torch.optim.AdamW, another number of ranks, or strategy='ddp'."
            )


def quantized_shards(slot: str, value: DTensor) -> dict[str, Any]:
    """Return the description of a quantized state, and this rank's shards of its plain tensors, by slot."""
    local = local_of(value)
    shape, offsets = shape_and_offsets(value)
    start, count = _flat_range(shape, offsets)
    found: dict[str, Any] = {slot: description_of(local, value.shape)}
    for name, part in parts_of(local).items():
        if name == LOOKUP:
            shard = Shard.whole(part)
        elif tuple(part.shape) == shape:
            shard = Shard(part, tuple(value.shape), offsets)
        else:
            ratio = count // part.numel()
            shard = Shard(part, (value.numel() // ratio,), (start // ratio,))
        found[f"{slot}.{name}"] = shard
    return found


def quantized_from_store(parameter: DTensor, description: Mapping[str, Any], parts: Mapping[str, Any]) -> DTensor:
    """Return a parameter's quantized state, of which this rank reads its blocks.

    Where the shards of this number of ranks do not consist of full blocks, the state is in full precision.
    """
    shape, offsets = shape_and_offsets(parameter)
    start, count = _flat_range(shape, offsets)
    device = local_of(parameter).device
    full = parameter.numel()
    if _blocks_fit(parameter, full // parts["scale"].shape[0]) and count:
        read = {}
        for name, part in parts.items():
            if name == LOOKUP:
                held = part.read()
            elif tuple(part.shape) == tuple(parameter.shape):
                held = part.read_slice(offsets, shape)
            else:
                ratio = full // part.shape[0]
                held = part.read_slice((start // ratio,), (count // ratio,))
            read[name] = held.to(device, copy=True)
        return like(parameter, rebuild(description, read, shape))
    whole = rebuild(description, {name: part.read() for name, part in parts.items()}, parameter.shape)
    local: Tensor = part_at(whole.dequantize(), shape, offsets)
    return like(parameter, local.to(device, local_of(parameter).dtype, copy=True))


def _flat_range(shape: tuple[int, ...], offsets: tuple[int, ...]) -> tuple[int, int]:
    """Return the first element and the number of elements of a shard that consists of rows."""
    return offsets[0] * prod(shape[1:]), prod(shape)


def _blocks_fit(parameter: DTensor, block: int) -> bool:
    """Whether the shards of all ranks consist of full blocks."""
    ranks = prod(
        parameter.device_mesh.size(dim) for dim, kind in enumerate(parameter.placements) if isinstance(kind, Sharded)
    )
    chunk = -(-parameter.shape[0] // ranks)
    return chunk * prod(parameter.shape[1:]) % block == 0
