"""``StageShards``: the parameters that a rank of a pipeline holds, sharded over the ranks that hold the same stages.

Torch's ``fully_shard`` makes the shards, gathers them, and reduces gradients. Its hooks, which do so around each pass,
are removed: the passes of several micro-batches overlap, so that a stage is gathered once before the first pass of a
window, and its gradients, which add up in full, are reduced once after the last one. Between windows, while weights
are updated and saved, a rank holds its shards only.

Under tensor parallelism layers are split first, and the parts sharded.

Private names of torch's FSDP are used: the state of the outermost module, its groups of parameters, and the function
that ends a backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim import Optimizer

from ...framework.core.errors import ConfigurationError
from ...framework.core.split_optimizer import optimizers_in
from ...framework.core.torch_versions import fsdp_groups
from ...framework.parallel.strategy import StepAdapter
from ..fsdp.gathering import prepare_gathering
from ..fsdp.initial import Origins, Source, put_shard, take_away
from ..fsdp.state import shard_slots
from ..fsdp.tensor import split_layers, tie_again
from ..fsdp.undo import Footprint
from ..fsdp.units import check_parameters, without_shared
from ..limits import check_dense, updates_full_parameters
from .mesh import StageMesh


class StageShards:
    """The sharded parameters of a rank's stages, and of what is outside of the blocks. Constructing it is collective.

    Args:
        module: the user's module.
        optimizers: its optimizers, which get the shards.
        blocks: the blocks of this rank, each of which is gathered in one message.
        elsewhere: the parameters of stages that this rank does not hold. They remain on the meta device.
        mesh: the ranks.
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
        self._fill(sources, set(empty), optimizers, origins)
        state: Any = fully_shard.state(self._root)  # type: ignore[attr-defined]
        state._lazy_init()
        parts = [part for part in self._root.modules() if isinstance(part, FSDPModule)]
        prepare_gathering(parts)
        self._groups = [group for part in parts for group in fsdp_groups(part)]
        self._end_backward: Callable[[], None] = state._root_post_backward_final_callback
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
        own = [parameter for parameter in shared if parameter not in elsewhere]
        if own:
            # Parameters that only blocks share are not assigned to the outermost module otherwise.
            self._root.shared = places = nn.ParameterList(own)
            numbers = {id(parameter): str(number) for number, parameter in enumerate(own)}
            for source in sources:
                if id(source.now) in numbers:
                    source.owners.append((places, numbers[id(source.now)]))
        fully_shard(self._root, mesh=mesh.data, reshard_after_forward=False, ignored_params=elsewhere)

    @torch.no_grad()
    def _fill(
        self, sources: list[Source], elsewhere: set[str], optimizers: Sequence[Optimizer], origins: Origins
    ) -> None:
        """Give this rank its shards of rank 0's weights, one parameter at a time. Collective."""
        world = origins.world
        while sources:
            source = sources.pop(0)
            whole = origins.value(source.name, source.given)
            if source.name not in elsewhere:
                parameter = put_shard(source, whole, world.device, world)
                for optimizer in optimizers:
                    shard_slots(optimizer, source.given, parameter)
            del whole  # before the next one takes memory
            origins.release(source.given)

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
            group._init_mp_dtypes()

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
