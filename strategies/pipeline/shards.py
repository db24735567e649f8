"""The parameters of the stages that a rank of a pipeline holds: in full, or sharded over the ranks that hold the same.

Torch's ``fully_shard`` makes the shards, gathers them, and reduces gradients. Its hooks, which do so around each pass,
are removed: the passes of several micro-batches overlap, so that a stage is gathered once before the first pass of a
window, and its gradients, which add up in full, are reduced once after the last one. Between windows, while weights
are updated and saved, a rank holds its shards only.

Under tensor parallelism layers are split first, and the parts sharded.

``_root_post_backward_final_callback`` is private in torch's FSDP: it ends a backward pass for all groups, which torch
does by its hooks alone.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from ...framework.core.errors import ConfigurationError
from ...framework.core.split_optimizer import optimizers_in
from ...framework.parallel.meta_device import share_buffers
from ...framework.parallel.strategy import StepAdapter
from ..fsdp.initial import Origins, Source, allocate_buffers, check_buffers, fill, put_shard, take_away
from ..fsdp.state import carry_slots, shard_slots
from ..fsdp.tensor_parallel import split_layers, tie_again
from ..fsdp.torch_fsdp import Footprint, groups_of, initialize, prepare_gathering, state_of
from ..fsdp.units import check_parameters, leave_to_root, without_shared
from ..limits import check_dense, updates_full_parameters
from .blocks import Stages
from .mesh import StageMesh
from .schedules import Place


class StageShards:
    """The sharded parameters of a rank's stages, and of what is outside of the blocks. Constructing it is collective.

    Args:
        module: the user's module.
        optimizers: its optimizers, which get the shards.
        blocks: the blocks of this rank, each of which is gathered in one message.
        elsewhere: the parameters of stages that this rank does not hold. They remain on the meta device.
        origins: the values.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        blocks: list[nn.Module],
        elsewhere: set[nn.Parameter],
        mesh: StageMesh,
        origins: Origins,
    ) -> None:
        self._module = module
        self._tensor_plan = Footprint(module)
        self._root: Any = StepAdapter(module)
        sources = take_away(module, optimizers)
        empty = {source.name: source.now for source in sources if source.given in elsewhere}
        if mesh.tensor is not None:
            split_layers(module, mesh.tensor)
        self._tensor_plan.close()
        for source in sources:
            source.put(empty[source.name] if source.name in empty else tie_again(source.name, source.owners))
        hooks = Footprint(self._root)
        self._shard(blocks, sources, set(empty.values()), mesh)

        def put(source: Source, whole: Tensor | None) -> None:
            if source.name not in empty:
                parameter = put_shard(source, whole, origins.world.device, origins.world)
                for optimizer in optimizers:
                    shard_slots(optimizer, source.given, parameter)

        fill(sources, origins, put)
        parts = initialize(self._root)
        prepare_gathering(parts)
        self._groups = [group for part in parts for group in groups_of(part)]
        self._end_backward: Callable[[], None] = state_of(self._root)._root_post_backward_final_callback
        hooks.close()
        hooks.undo()
        self._numbers = {id(parameter): number for number, parameter in enumerate(module.parameters())}
        self._records = [
            (self.number_of(each.sharded_param), each) for group in self._groups for each in group.fsdp_params
        ]
        self.is_gathered = False

    # ---- building --------------------------------------------------------------------------------------------------

    def _shard(
        self, blocks: list[nn.Module], sources: list[Source], elsewhere: set[nn.Parameter], mesh: StageMesh
    ) -> None:
        units, left, shared = without_shared(self._module, blocks)
        for unit in units:
            fully_shard(unit, mesh=mesh.data, reshard_after_forward=False, ignored_params=left[unit])
        leave_to_root(self._root, [parameter for parameter in shared if parameter not in elsewhere], sources)
        fully_shard(self._root, mesh=mesh.data, reshard_after_forward=False, ignored_params=elsewhere)

    # ---- in use ----------------------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Gather the parameters of this rank's stages for the passes of a window. Collective."""
        for group in self._groups:
            group.unshard()
            group.wait_for_unshard()
        for _, record in self._records:
            # Of a window that was interrupted.
            record.unsharded_param.grad = None
        self.is_gathered = True

    def free(self) -> None:
        """Free gathered parameters, so that the module holds the shards that optimizers update."""
        for group in self._groups:
            group.reshard()
        self.is_gathered = False

    @contextmanager
    def gathered(self) -> Generator[None, None, None]:
        """Return a context in which the parameters are gathered. Collective."""
        if self.is_gathered:
            yield
            return
        self.gather()
        try:
            yield
        finally:
            self.free()

    @property
    def count(self) -> int:
        """The number of parameters of the module, those of other stages included."""
        return len(self._numbers)

    def number_of(self, parameter: Tensor) -> int:
        """Return the number of a parameter in ``module.parameters()``."""
        return self._numbers[id(parameter)]

    @property
    def present(self) -> list[int]:
        """The numbers of the parameters for which this rank has a gradient."""
        return [number for number, record in self._records if record.unsharded_param.grad is not None]

    def reduce(self, wanted: Iterable[int]) -> None:
        """Average the gradients of parameters over the ranks that read other data, and free the parameters. Collective.

        Args:
            wanted: the numbers of the parameters for which some of these ranks have a gradient.
        """
        chosen = set(wanted)
        for number, record in self._records:
            gathered = record.unsharded_param
            if number in chosen and gathered.grad is None:
                gathered.grad = torch.zeros_like(gathered)
        self._end_backward()
        self.is_gathered = False

    def refresh(self) -> None:
        """Apply changes of ``requires_grad`` to the gathered parameters."""
        for _, record in self._records:
            record.unsharded_param.requires_grad_(record.sharded_param.requires_grad)
        for group in self._groups:
            group.lazy_init()

    def take_off(self) -> None:
        """Remove the hooks of tensor parallelism; the parameters stay sharded."""
        self.free()
        self._tensor_plan.undo()


def check_sharded(module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Refuse modules and optimizers whose parameters cannot be sharded.

    Raises:
        ConfigurationError: there is such a parameter or optimizer.
    """
    check_dense(module, "pipeline")
    check_parameters(module)
    for part in [each for optimizer in optimizers for each in optimizers_in(optimizer)]:
        if updates_full_parameters(part):
            raise ConfigurationError(
                f"{type(part).__name__} needs full parameters, and dp_shard and tp leave each rank of a pipeline parts "
                "of them: use AdamW, parallel={'pp': ..., 'dp_replicate': ...}, or strategy='fsdp'."
            )


def fill_stages(
    module: nn.Module, optimizers: Sequence[Optimizer], stages: Stages, place: Place, mesh: StageMesh, origins: Origins
) -> StageShards | None:
    """Give this rank rank 0's values of the tensors that it holds, or its shards of them. Collective.

    The parameters of other ranks' stages are on the meta device afterwards.

    Args:
        module: the user's module.
        optimizers: its optimizers, which get the new parameters.
        stages: the division of the module.
        place: the stages of this rank.
        origins: the values.

    Returns:
        The shards; None if this rank holds its stages in full.
    """
    if mesh.data is not None:
        check_sharded(module, optimizers)
    owners = stages.owners(module, place)
    elsewhere = {parameter for parameter in module.parameters() if owners[id(parameter)] not in (None, place.rank)}
    computed = allocate_buffers(module, origins.world, origins.supplied)
    shards = None
    if mesh.data is None:
        _fill_in_full(module, optimizers, elsewhere, origins)
    else:
        own = [block for number, block in enumerate(stages.blocks) if stages.stage_of(number) in place.own]
        shards = StageShards(module, optimizers, own, elsewhere, mesh, origins)
    check_buffers(computed)
    share_buffers(module, origins.world)
    return shards


def _fill_in_full(
    module: nn.Module, optimizers: Sequence[Optimizer], elsewhere: set[nn.Parameter], origins: Origins
) -> None:
    def put(source: Source, whole: Tensor | None) -> None:
        given = source.given
        if given in elsewhere:
            return
        if whole is None:
            whole = torch.empty(given.shape, dtype=given.dtype, device=origins.world.device)
        parameter = nn.Parameter(whole, requires_grad=given.requires_grad)
        source.put(parameter)
        for optimizer in optimizers:
            carry_slots(optimizer, given, parameter)

    fill(take_away(module, optimizers), origins, put)
