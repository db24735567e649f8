"""A model sharded in place by torch's ``fully_shard``, filled with rank 0's weights, and unsharded after the fit.

The model is sharded on the meta device and filled one parameter at a time. Besides the weights that rank 0 holds, at
most one full parameter is in memory, so a model that does not fit into the memory of one rank can be sharded.

torch's FSDP divides gradients by the number of ranks in the mesh when it reduces them in the backward pass. No other
code averages the gradients of sharded parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ...framework.core.errors import ConfigurationError
from ...framework.core.norms import BatchNorm
from ...framework.core.optimizer_config import parameters_of
from ...framework.core.split_optimizer import optimizers_in
from ...framework.distributed.world import World
from ...framework.parallel.compilation import has_compiled_call
from ...framework.parallel.deferred import Deferred
from ...framework.parallel.full_tensors import device_of_whole
from ...framework.parallel.gradient_operations import average_gradients
from ...framework.parallel.meta_device import replace_tensors, supplied_names
from ...framework.parallel.strategy import StepAdapter, StepFunction
from ..limits import updates_full_parameters
from .experts import ExpertMeshes, divide, expert_layers, shard_placement
from .full_semantics import FullSemantics, full_value
from .full_updates import FullUpdates
from .gradient_hooks import GradientHooks
from .in_place_changes import carry_writes
from .initial import Origins, Source, allocate_buffers, check_buffers, fill, keeping, put_shard, take_away
from .local_shards import local_of, whole_of_parts
from .module_gradients import ModuleGradients
from .outside_calls import Context, OutsideCalls
from .passes import PassChecks, UnusedParameters
from .state import carry_slots, shard_slots
from .tensor_parallel import split_layers, tie_again
from .torch_fsdp import Footprint, groups_of, initialize, prepare_gathering, state_of
from .units import (
    Checkpointed,
    Units,
    check_parameters,
    check_renormalized,
    checkpoint_forward,
    checkpointed_parts,
    find_units,
    leave_to_root,
    modules_of_other_dtypes,
    prefetch,
    without_shared,
)


@dataclass
class Sharding:
    """The arguments of ``fully_shard`` for a model; ``FSDPStrategy`` describes those that users give."""

    units: Units
    mesh: DeviceMesh
    tensor_mesh: DeviceMesh | None
    policy: MixedPrecisionPolicy
    reshard_after_forward: bool | int
    cpu_offload: bool
    prefetch: int
    checkpointed: Checkpointed
    context: Callable[[], Context]
    """Returns the context of forward passes in the gathered parameters' dtype, None if they need none."""
    backward_inside: bool = False
    """Whether the model runs again after a backward pass before its outermost call returns (manual optimization)."""
    experts: ExpertMeshes | None = None
    """The ranks that hold different experts, and those that hold the same ones."""
    is_uniform: bool = False
    """Whether all passes call the same collectives: every backward pass reduces its gradients.

    Otherwise ranks also agree on unused parameters at the end of a backward pass, and not only in the update. A
    parameter that no rank has used has a gradient of zeros until they have agreed; code that runs before the update
    then finds None, as in one process. In a uniform model a rank that runs out of memory does not get to the end of
    the pass."""


class ShardedModel:
    """A module with its adapter, sharded. Constructing it is collective."""

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        world: World,
        sharding: Sharding,
        deferred: Deferred,
        supplied: Collection[str] = (),
    ) -> None:
        self.module = module
        self.world = world
        self.sharding = sharding
        self.root: Any = StepAdapter(module)
        self._optimizers = list(optimizers)
        parts = [part for optimizer in optimizers for part in optimizers_in(optimizer)]
        full = [part for part in parts if updates_full_parameters(part)]
        self._keep_full = {id(parameter) for part in full for parameter in parameters_of(part)}
        check_parameters(module)
        if world.size > 1 and optimizers:
            check_renormalized(module)
        self.units = find_units(module, sharding.units)
        meshes = sharding.experts
        self._experts = [] if meshes is None else list(expert_layers(module, meshes.group.size()).values())
        self.checkpointed = checkpointed_parts(module, self.units, sharding.checkpointed)
        later = supplied_names(module, supplied)
        origins = Origins(module, deferred, world, later)
        computed = allocate_buffers(module, world, later)
        adapter: Any = self.root
        self._footprint = Footprint(adapter)
        self.hooks = GradientHooks()
        self._split_layers: list[tuple[nn.Module, str, nn.Module]] = []
        with keeping(module):
            sources = take_away(module, self._optimizers)
            if sharding.tensor_mesh is not None:
                self._split(sources, sharding.tensor_mesh)
            undos = [] if meshes is None else divide(self._experts, meshes)
            self._shard(sources)
            fill(sources, origins, self._put)
        check_buffers(computed)
        self.full_updates = [FullUpdates(part, world) for part in full]
        self.parts = initialize(self.root)
        groups = [group for part in self.parts for group in groups_of(part)]
        if groups:
            # All groups have the same context.
            self.hooks.wait_with(groups[0].comm_ctx)
        self._footprint.close()
        self._footprint.allow_copies()
        prefetch(self.root, list(self.units), sharding.prefetch)
        self._plain_forwards = [*(checkpoint_forward(part) for part in self.checkpointed), *undos]
        self.syncs = True
        self._unreduced = False
        self._trainable = self._trainables()
        self._added: list[Tensor] = []
        prepare_gathering(self.parts)
        carry_writes(self.parts, adapter, any(map(has_compiled_call, module.modules())))
        self.unused = UnusedParameters(self.parts, world)
        self.checks = PassChecks(self.root, self.parts, self.unused.ran)
        shards = [each for each in module.parameters() if isinstance(each, DTensor)]
        self._semantics = FullSemantics({each.device_mesh for each in shards}, world, sharding.tensor_mesh)
        self.outside = OutsideCalls(self.root, sharding.context, self.reshard)
        self.gradients = ModuleGradients(module, self.parts, self._in_forward, self.reshard)

    # ---- building -------------------------------------------------------------------------------------------------

    def _split(self, sources: list[Source], mesh: DeviceMesh) -> None:
        """Split layers over the ranks of a tensor-parallel group; tied parameters stay tied. Collective."""
        split_layers(self.module, mesh)
        self._split_layers = [
            (parent, name, part)
            for parent in self.module.modules()
            for name, part in parent._modules.items()
            if part is not None and any(isinstance(each, DTensor) for each in part._parameters.values())
        ]
        for source in sources:
            source.put(tie_again(source.name, source.owners))

    def _shard(self, sources: list[Source]) -> None:
        sharding = self.sharding
        inside = {part for layer in self._experts for part in layer.modules()}
        units = [unit for unit in self.units if unit not in inside]
        others = modules_of_other_dtypes(self.module, [*units, *self._experts])
        units, left, shared = without_shared(self.module, [*units, *self._experts, *others])
        units = [unit for unit in units if unit not in inside]
        self.units = [unit for unit in units if unit not in others]
        pinned = self.world.device.type == "cuda"
        arguments: dict[str, Any] = {
            "mesh": sharding.mesh,
            "offload_policy": CPUOffloadPolicy(pin_memory=pinned) if sharding.cpu_offload else OffloadPolicy(),
        }
        narrow = sharding.policy.param_dtype is not None
        norms = [part for part in self.module.modules() if isinstance(part, BatchNorm) and narrow]
        for part in norms:
            # The running statistics are fp32, and torch's kernels require weights of the same dtype.
            if part not in units and any(True for _ in part.parameters()):
                fully_shard(part, reshard_after_forward=sharding.reshard_after_forward, **arguments)
        arguments["mp_policy"] = sharding.policy
        if sharding.experts is not None:
            mesh, ranks = sharding.experts.data, sharding.experts.data["shard"].size()
            place = partial(shard_placement, ranks=ranks)
            for layer in self._experts:
                fully_shard(
                    layer,
                    reshard_after_forward=sharding.reshard_after_forward,
                    shard_placement_fn=place,
                    **{**arguments, "mesh": mesh},
                )
        for unit in reversed(units):
            fully_shard(
                unit, reshard_after_forward=sharding.reshard_after_forward, ignored_params=left[unit], **arguments
            )
        leave_to_root(self.root, shared, sources)
        fully_shard(self.root, **arguments)

    def _put(self, source: Source, whole: Tensor | None) -> None:
        """Put this rank's shard of rank 0's weights in place of a parameter."""
        device = torch.device("cpu") if self.sharding.cpu_offload else self.world.device
        parameter = put_shard(source, whole, device, self.world)
        with FullSemantics.off():
            self.hooks.carry(source.given, parameter)
        for optimizer in self._optimizers:
            if id(source.given) in self._keep_full:
                carry_slots(optimizer, source.given, parameter)
            else:
                shard_slots(optimizer, source.given, parameter)

    # ---- in use ---------------------------------------------------------------------------------------------------

    def sync_gradients(self, enabled: bool) -> None:
        """Reduce gradients in the next backward passes, or only accumulate them locally."""
        enabled = enabled or self.sharding.is_uniform or bool(self.hooks)
        if enabled != self.syncs:
            self.syncs = enabled
            for part in self.parts:
                part.set_requires_gradient_sync(enabled, recurse=False)

    def backward(self, loss: Tensor, options: dict[str, Any]) -> None:
        """Compute gradients, also within the outermost call, whose parameters then stay gathered. Collective.

        Raises:
            ConfigurationError: gradients of chosen parameters are requested.
        """
        if options.get("inputs") is not None:
            raise ConfigurationError(
                "backward(inputs=...) names parameters, and forward passes use gathered copies of those that are "
                "sharded: set requires_grad = False on the others before the forward pass."
            )
        inside = self.sharding.backward_inside
        if inside and loss.requires_grad:
            # Otherwise gradients of the root are reduced only if a unit takes part. torch registers this private hook
            # on outputs of the outermost module, which has not returned yet.
            loss.register_hook(state_of(self.root)._pre_backward)
        self.unused.begin_pass()
        with FullSemantics.off():
            if self.hooks:
                self.hooks.begin()
            loss.backward(**options)
            if self.hooks:
                self.hooks.end()
            if self._added and self.syncs:
                average_gradients(self.world, self._added)
        self.checks.forget()
        if not self.sharding.is_uniform:
            self.unused.settle()
        self._unreduced = not self.syncs
        if inside:
            self.root.unshard()

    def check_reduced(self) -> None:
        """Refuse an update after a pass that was not run by ``backward`` and computed gradients of the root alone.

        Raises:
            ConfigurationError: such gradients are there.
        """
        if not (self.sharding.backward_inside and self.syncs):
            return
        if any(each.unsharded_param.grad is not None for each in self.gradients.parameters()):
            raise ConfigurationError(
                "Gradients of sharded weights were computed by loss.backward(), which does not average them over "
                "ranks here: call self.manual_backward(loss)."
            )

    def drop_unreduced(self, optimizer: Optimizer) -> None:
        """Drop unreduced gradients of a window that was interrupted."""
        if self._unreduced:
            self.gradients.drop_unreduced(parameters_of(optimizer))

    def _in_forward(self) -> bool:
        # Gradients are those of the previous step, unless this one runs backward passes itself.
        return self.outside.routing and not self.sharding.backward_inside

    def refresh(self) -> None:
        """Apply changes of ``requires_grad`` to sharded parameters and to those that are gathered now."""
        for each in self.gradients.parameters():
            if each.unsharded_param.requires_grad != each.sharded_param.requires_grad:
                each.unsharded_param.requires_grad_(each.sharded_param.requires_grad)
        now = self._trainables()
        if now != self._trainable:
            self._trainable = now
            for part in self.parts:
                for group in groups_of(part):
                    # Finds the dtype of trained parameters again; the rest of it is done once only.
                    group.lazy_init()

    @torch.no_grad()
    def adopt(self) -> None:
        """Take over parameters that were added since set-up: every rank holds them in full. Collective if there are.

        The module must hold its sharded parameters.

        Raises:
            ConfigurationError: a layer that was split over ranks was replaced: the other one would get a part of what
                it takes.
        """
        here = set(self.module.modules())
        for parent, name, part in self._split_layers:
            if parent in here and parent._modules.get(name) is not part:
                raise ConfigurationError(
                    f"{name} of a {type(parent).__name__} was replaced after its {type(part).__name__} was split over "
                    "the ranks of a group (tp): replace layers in configure_model, or leave this one out of "
                    "configure_tensor_parallel."
                )
        known = set(self._added)
        self._added = [each for each in self.module.parameters() if not isinstance(each, DTensor)]
        for each in self._added:
            if each not in known:
                self.world.broadcast(each)

    def _trainables(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self.module.parameters()]

    def train(self, *arguments: Any, **options: Any) -> Any:
        """Run a step that a backward pass follows."""
        self.outside.begin_step()
        self.unused.begin_step()
        try:
            # A closure of an optimizer runs the step within the update, which computes on shards.
            with FullSemantics.on():
                return full_value(self.root(*arguments, **options))
        finally:
            self.outside.end_step()

    def evaluate(self, step: StepFunction, *arguments: Any, **options: Any) -> Any:
        """Run a step without a backward pass after it; free the parameters that it has gathered."""
        if self.outside.routing:
            return step(*arguments, **options)
        try:
            return self.train(step, *arguments, **options)
        finally:
            self.reshard()

    def reshard(self) -> None:
        """Free gathered parameters, so that the module holds the sharded parameters that optimizers update."""
        for part in self.parts:
            part.reshard()
        self.checks.forget()
        self.outside.watch()  # what runs later in the same step gathers its parameters again

    def take_off(self) -> None:
        """Remove all of torch's hooks and classes; the parameters stay sharded."""
        self.reshard()
        self.outside.ignore()
        self.gradients.release()
        self._semantics.release()
        self.hooks.release()
        for updates in self.full_updates:
            updates.release()
        for restore in self._plain_forwards:
            restore()
        self._footprint.undo()

    @torch.no_grad()
    def gather(self, everywhere: bool) -> None:
        """Give the module full parameters, on rank 0 or ``everywhere``; elsewhere on the meta device. Collective.

        A rank whose device cannot hold them moves the module to the CPU.
        """
        keeps = everywhere or self.world.rank == 0
        gathered = self.module.parameters() if keeps and self.world.size > 1 else ()
        sizes = [each.numel() * each.element_size() for each in gathered if isinstance(each, DTensor)]
        device = device_of_whole(sizes, self.world.device)
        is_moved = device != self.world.device

        def whole(_: str, tensor: Tensor) -> Tensor | None:
            if not isinstance(tensor, DTensor):
                return None
            if self.world.size == 1:
                return local_of(tensor.detach())
            full = whole_of_parts(tensor)
            if not keeps:
                return full.to("meta")
            return full.to(device) if is_moved else full

        before = dict(self.module.named_parameters())
        replace_tensors(self.module, whole)
        if is_moved:
            self.module.to(device)
        self.hooks.give_back(before, dict(self.module.named_parameters()))
