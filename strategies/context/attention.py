"""Attention over sequences that are cut over a group of ranks, in place of torch's own.

A part of a sequence needs the keys and values of the others. Two ways of bringing them together are behind one call:

- ``HeadExchange``: all ranks exchange parts of the sequence for parts of the heads, so that each of them computes some
  heads over the full sequence, and back (Jacobs et al. 2023, "DeepSpeed Ulysses"). It runs with any backend.
- ``RingAttention``: keys and values travel around the ranks, which combine partial results (Liu et al. 2023, "Ring
  Attention with Blockwise Transformers"). Torch implements it for CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.overrides import TorchFunctionMode

from ...framework.core.degrees import Layout
from ...framework.core.errors import ConfigurationError
from ...framework.core.patches import patch
from ...framework.distributed.world import World
from ...framework.parallel.sequence_part import SequencePart
from ...framework.parallel.strategy import StepFunction

_ATTENTION = nn.functional.scaled_dot_product_attention
_BACKWARD = frozenset({Tensor.backward, torch.autograd.backward, torch.autograd.grad})
# Private: the function by which all backward passes enter the engine. torch has no public hook around one. Called with
# edges of the graph, which torch does not intercept, `backward` would keep no gradients of inputs that are no leaves.
_run_backward = torch.autograd.graph._engine_run_backward


class RoutedAttention(TorchFunctionMode):
    """A context in which ``scaled_dot_product_attention`` computes over the full sequence.

    It also holds for activations that a backward pass computes again.

    Args:
        compute: the function that is called in its place.
    """

    def __init__(self, compute: HeadExchange | RingAttention) -> None:
        super().__init__()
        self._compute = compute

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, or the replacement of attention."""
        if func is _ATTENTION:
            return self._compute(*args, **(kwargs or {}))
        if func in _BACKWARD:
            return self._backward(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _backward(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a backward pass in this context, which torch leaves while a function runs that it has intercepted."""

        def run(*given: Any, **options: Any) -> Any:
            with self:
                return _run_backward(*given, **options)

        with ExitStack() as patches:
            for home in (torch.autograd, torch.autograd.graph):
                patch(patches, home, "_engine_run_backward", run)
            return func(*args, **kwargs)


class HeadExchange:
    """Attention by all-to-all over heads.

    Args:
        group: the ranks that share the sequences, in the order of their parts.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._size = group, group.size()

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Return the attention of this rank's part; tensors are [batch, heads, positions of the part, width].

        Raises:
            ConfigurationError: there is a mask, or the number of heads is not divisible by that of ranks.
        """
        check_mask(attn_mask)
        heads = query.shape[1]
        if heads % self._size:
            raise ConfigurationError(
                f"attention over {heads} heads on cp={self._size} ranks, which share them: use cp out of the divisors "
                f"of {heads}, or another number of heads."
            )
        if key.shape[1] % self._size:
            # Fewer heads of keys than ranks: each query's head gets its own copy.
            key, value = (each.repeat_interleave(heads // each.shape[1], 1) for each in (key, value))
        query, key, value = (self._exchange(each, 1, 2) for each in (query, key, value))
        whole = _ATTENTION(
            query, key, value, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return self._exchange(whole, 2, 1)

    def _exchange(self, tensor: Tensor, split: int, join: int) -> Tensor:
        exchanged: Tensor = _Exchange.apply(tensor, self._group, split, join)  # type: ignore[no-untyped-call]
        return exchanged


class _Exchange(torch.autograd.Function):
    """Splits a tensor along one dim over the ranks, and joins what they send along another one."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup, split: int, join: int) -> Tensor:
        ctx.group, ctx.split, ctx.join = group, split, join
        ctx.carries_gradients_of_other_ranks = True
        return _exchanged(tensor, group, split, join)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(gradient, ctx.group, ctx.join, ctx.split), None, None, None


def _exchanged(tensor: Tensor, group: dist.ProcessGroup, split: int, join: int) -> Tensor:
    size = group.size()
    sent = torch.stack(tensor.chunk(size, split))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), join)


class _AfterRing(torch.autograd.Function):
    """Returns the output of ring attention unchanged, and marks its place in the graph of a loss.

    The backward pass of the ring brings gradients of other ranks' losses along. Where this rank's own loss does not
    count, phalanx sets the gradients in the graph to zero, except behind nodes with this attribute. The nodes of
    torch's ring have no such attribute.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.carries_gradients_of_other_ranks = True
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class RingAttention:
    """Attention by torch's ring of ranks, for CUDA.

    The module is private, and so are two of its names: the flag that it expects parts in order, not rearranged to
    balance the work of causal attention; and the function that lets attention of sharded tensors go around the ring.
    The public ``context_parallel`` does both, but it needs the tensors of a batch, which it resizes and cuts itself.

    Args:
        mesh: the ranks that share the sequences, in the order of their parts.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        from torch.distributed.tensor.experimental._context_parallel import _attention

        self._mesh = mesh
        _attention._cp_options.enable_load_balance = False
        _attention._enable_cp_dtensor_dispatcher()

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Return the attention of this rank's part; tensors are [batch, heads, positions of the part, width].

        Raises:
            ConfigurationError: there is a mask.
        """
        check_mask(attn_mask)
        if key.shape[1] != query.shape[1]:
            key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
        query, key, value = (
            DTensor.from_local(each, self._mesh, [Shard(2)], run_check=False) for each in (query, key, value)
        )
        mixed = _ATTENTION(query, key, value, dropout_p=dropout_p, is_causal=is_causal, scale=scale)
        assert isinstance(mixed, DTensor)
        output: Tensor = _AfterRing.apply(mixed.to_local())  # type: ignore[no-untyped-call]
        return output


def check_mask(mask: Tensor | None) -> None:
    """Refuse an attention mask, which covers a part of the sequence only.

    Raises:
        ConfigurationError: there is one.
    """
    if mask is not None:
        raise ConfigurationError(
            "scaled_dot_product_attention got attn_mask, and under parallel={'cp': ...} each rank has a part of the "
            "sequences: give is_causal=True, or no mask. Padding at the end needs none: let the loss ignore it."
        )


class ContextParallel:
    """The ranks that share sequences with this one. Constructing it is collective.

    Args:
        layout: the number of ranks along each axis.
    """

    def __init__(self, world: World, layout: Layout) -> None:
        names, sizes = ("others", "context", "tensor"), (world.size // (layout.cp * layout.tp), layout.cp, layout.tp)
        mesh = init_device_mesh(world.device.type, sizes, mesh_dim_names=names)["context"]
        self.part = SequencePart(mesh.get_local_rank(), layout.cp)
        ring = world.device.type == "cuda"
        self._compute = RingAttention(mesh) if ring else HeadExchange(mesh.get_group())

    def attention(self) -> AbstractContextManager[Any]:
        """Return a context in which attention covers full sequences, of which every rank has its part."""
        # Steps may compute full sequences on every rank, to compare: ``SequencePart.whole``.
        return RoutedAttention(self._compute) if self.part.size > 1 else nullcontext()

    def routed(self, step: StepFunction) -> StepFunction:
        """Return a step whose attention covers full sequences."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self.attention():
                return step(*args, **kwargs)

        return run
