"""``fsdp``: shards parameters, gradients and optimizer state over ranks; layers are gathered only while they compute.

Torch's ``fully_shard`` does the work (Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data
Parallel"). ``hsdp`` shards within groups of ranks and replicates across groups. ``SplitReplicas`` is ``ddp`` for layers
that are split over ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ...framework.core.arguments import check_names
from ...framework.core.degrees import Degrees, Layout
from ...framework.core.errors import ConfigurationError, LoopError
from ...framework.core.precision import Precision
from ...framework.core.split_optimizer import optimizers_in
from ...framework.distributed.world import World
from ...framework.parallel.deferred import Deferred
from ...framework.parallel.meta_device import share_buffers
from ...framework.parallel.step_flags import OrderFlags
from ...framework.parallel.strategy import MemoryLayout, Routed, StepFunction, Strategy, Traits
from ..context import ContextParallel
from ..context.sharing import attention_of, sharing_sequences
from ..limits import KnownParameters, check_dense, check_independent
from ..pipeline import PipelineStrategy
from .arguments import ELSEWHERE, check_arguments, check_flags, check_precision, mixed_policy, why_not_compiled
from .experts import ExpertMeshes, check_experts
from .full_semantics import FullSemantics
from .gradients import ShardedGradients
from .initial import move_buffers
from .mesh import Replicas, as_arguments, build_mesh, data_part, lay_out, own_degrees
from .model import ShardedModel, Sharding
from .quantized import check_blocks
from .recovery import ShardedRecovery, recovery_of_shards
from .state import ShardedState
from .tensor_parallel import EqualResults, check_plan
from .units import Checkpointed, Units, check_checkpointing, check_units


class FSDPStrategy(Strategy):
    """Shards parameters, gradients and optimizer state over ranks.

    An optimizer that needs full parameters, such as Muon or one with ``updates_full_parameters = True``, transfers in
    each step three times as many elements as its parameters have.

    Args:
        units: submodules that are gathered and freed together: a class, a tuple of classes, the least number of
            parameters of a unit, or a function from a module to a bool. Default: None, the repeated blocks of the
            model.
        reshard_after_forward: whether a unit is freed after its forward pass and gathered again for backward. This
            saves memory and costs one more all-gather.
        replicas: the number of groups of ranks that each hold one full model, sharded within the group.
        tensor_parallel: the number of ranks that share each layer's computation, see
            ``TrainModule.configure_tensor_parallel``.
        cpu_offload: keep shards, gradients and optimizer state in the CPU's memory.
        activation_checkpointing: recompute activations in backward: True for all units, classes, or a function.
        prefetch: the number of units to gather ahead explicitly; 0 leaves prefetching to torch.
        reduce_dtype: the dtype in which gradients are averaged. Default: at least float32.
        gather_weights: the ranks that get full weights after a fit: ``"rank_zero"``, ``"all"`` or ``"none"``.
        accumulate_shards: reduce gradients in the backward pass of every micro-batch of a window, and accumulate shards
            of them: less memory and more communication than reducing the full gradients once.

    Raises:
        ConfigurationError: an argument is invalid.
    """

    name = "fsdp"
    axes: tuple[str, ...] = ("dp_replicate", "dp_shard", "cp", "tp", "ep")
    rest = "dp_shard"

    def __init__(
        self,
        units: Units = None,
        *,
        reshard_after_forward: bool = True,
        replicas: Replicas = 1,
        tensor_parallel: int = 1,
        cpu_offload: bool = False,
        activation_checkpointing: Checkpointed = False,
        prefetch: int = 0,
        reduce_dtype: torch.dtype | None = None,
        gather_weights: Literal["rank_zero", "all", "none"] = "rank_zero",
        accumulate_shards: bool = False,
        **others: Any,
    ) -> None:
        known = [name for name in signature(FSDPStrategy).parameters if name != "others"]
        check_names("FSDPStrategy", others, known, ELSEWHERE)
        check_units(units)
        check_checkpointing(activation_checkpointing)
        check_arguments(replicas, tensor_parallel, prefetch, reduce_dtype, gather_weights)
        check_flags(
            reshard_after_forward=reshard_after_forward, cpu_offload=cpu_offload, accumulate_shards=accumulate_shards
        )
        self.units = units
        self.reshard_after_forward = reshard_after_forward
        self.replicas = replicas
        self.cpu_offload = cpu_offload
        self.activation_checkpointing = activation_checkpointing
        self.prefetch = prefetch
        self.reduce_dtype = reduce_dtype
        self.gather_weights = gather_weights
        self.accumulate_shards = accumulate_shards
        self.traits = Traits(
            shards_state=True, forward_has_collectives=True, backward_has_collectives=True, reduces_in_backward=True
        )
        self.memory_layout: MemoryLayout | None = None
        if not cpu_offload:
            self.memory_layout = MemoryLayout(
                splits_parameters=True, splits_gradients=True, splits_state=True, within_node=replicas == "node"
            )
        self._use(own_degrees(replicas, tensor_parallel))
        self._sequences: ContextParallel | None = None
        self._layout: Layout
        self._mesh: DeviceMesh
        self._experts: ExpertMeshes | None = None
        self._deferred: Deferred
        self._supplied: Collection[str] = ()
        self._sharded: ShardedModel | None = None
        self._routed = Routed.LOSS
        self._stop_hooks: list[Any] = []
        self._pauses: dict[Optimizer, RemovableHandle] = {}
        self._known: KnownParameters | None = None
        self._equal: EqualResults | None = None

    # ---- before the process group exists --------------------------------------------------------------------------

    def with_degrees(self, degrees: Degrees) -> Strategy:
        """Return a strategy with the degrees of ``parallel=`` and of its own arguments: with ``pp``, a pipeline."""
        degrees = degrees.joined(self.degrees, f"FSDPStrategy({as_arguments(self.degrees)})")
        if "pp" in degrees.used:
            return _sharded_stages(self, degrees)
        changed = super().with_degrees(degrees)
        assert isinstance(changed, FSDPStrategy)
        changed._use(changed.degrees)
        return changed

    def _use(self, degrees: Degrees) -> None:
        self.degrees = degrees
        self.prevents_compiling = why_not_compiled(self.activation_checkpointing, degrees)
        # A rank can join the collectives of the others with its shards alone.
        can_join = not set(degrees.used) - {"dp_shard", "dp_replicate"}
        self.recovery, self.prevents_recovery = recovery_of_shards(can_join)

    def check(self, world_size: int, device_type: str, num_nodes: int, precision: Precision) -> None:
        """Refuse a number of ranks that cannot be divided into the requested groups, and a precision that fits none."""
        layout = lay_out(world_size, num_nodes, self.degrees, self.rest, self.replicas == "node")
        check_precision(precision, layout)

    def check_module(self, module: nn.Module) -> None:
        """Refuse sparse gradients, and a module without the plan or the layers that the degrees need."""
        check_dense(module, self.name)
        if "tp" in self.degrees.used:
            check_plan(module, self.degrees.tp or 1)
        if "ep" in self.degrees.used:
            check_experts(module, self.degrees.ep or 1)

    def connect(self, device_type: str, num_nodes: int, precision: Precision) -> World:
        """Join the process group, select the device and build the mesh. Collective."""
        self.precision = precision
        self.world = world = World.from_environment(device_type, num_nodes, grouped=True)
        self._layout = lay_out(world.size, world.num_nodes, self.degrees, self.rest, self.replicas == "node")
        self._mesh = build_mesh(self._layout, world, self.rest)
        if self._mesh["shard"].size() == 1 < world.size:
            # torch skips the collectives of a group of one rank, by which another rank could follow the pass.
            self.recovery = None
            self.prevents_recovery = "whose replicas have one rank each here"
        self._experts = ExpertMeshes.build(self._layout, world)
        self.filling = nullcontext if self._experts is None else self._experts.sending.stopped
        self._sequences, self.part = sharing_sequences(world, self._layout)
        self._attention = attention_of(self._sequences)
        self._deferred = Deferred()
        self.gradients, self.state = ShardedGradients(world), ShardedState(world)
        world.share_data(self._layout)
        return world

    # ---- a module and its optimizers ------------------------------------------------------------------------------

    def building(self) -> AbstractContextManager[Any]:
        """Return a context in which parameters are built without data; ``setup`` gives each rank its shard."""
        return self._deferred.recording()

    def to_device(self, module: nn.Module, supplied: Collection[str] = ()) -> None:
        """Move the buffers to the device; ``setup`` moves only each rank's shards of the parameters."""
        self._supplied = supplied
        move_buffers(module, self.world.device)
        self._deferred.keep(module)

    def setup(
        self, module: nn.Module, optimizers: Sequence[Optimizer], training: bool, routed: Routed = Routed.LOSS
    ) -> list[Optimizer]:
        """Shard a module in place, with rank 0's weights, and bind the optimizers to the shards. Collective.

        Raises:
            ConfigurationError: the module or an optimizer cannot be split.
        """
        layout, mesh = self._layout, data_part(self._mesh)
        check_dense(module, self.name)
        if layout.tp > 1:
            check_plan(module, layout.tp)
        for optimizer in optimizers:
            check_independent(optimizer, self.name)
            check_blocks(optimizer, module, mesh, layout)
        sharding = Sharding(
            self.units,
            mesh,
            self._mesh["tensor"] if layout.tp > 1 else None,
            mixed_policy(self.precision, self.reduce_dtype),
            self.reshard_after_forward,
            self.cpu_offload,
            self.prefetch,
            self.activation_checkpointing if training else False,
            self._context,
            training and routed is Routed.STEP,
            self._experts,
            routed is Routed.REPEATED or self.accumulate_shards,
        )
        self._routed = routed
        self._sharded = sharded = ShardedModel(module, optimizers, self.world, sharding, self._deferred, self._supplied)
        if routed is Routed.REPEATED:
            self.recovery = ShardedRecovery(sharded)
        self.state = ShardedState(self.world, sharded.reshard, sharded.full_updates)
        self.flags = OrderFlags(self.world, sharded.checks) if training and self.world.size > 1 else None
        self.sync_buffers(module)
        self._stop_hooks = [each.register_step_pre_hook(self._before_update) for each in optimizers]
        if layout.tp > 1 and training:
            self._equal = EqualResults(module, self._mesh["tensor"])
            self._stop_hooks += [each.register_step_pre_hook(self._equal.check_gradients) for each in optimizers]
        self._known, self._pauses = KnownParameters(module, optimizers), {}
        for each in filter(_computes_on_shards, optimizers):
            self._pauses[each] = each.register_step_pre_hook(_switch_off)
            resume = each.register_step_post_hook(_switch_on)
            # Before those of the user's code, for which torch has no public argument.
            after: Any = each._optimizer_step_post_hooks
            after.move_to_end(resume.id, last=False)
            self._stop_hooks.append(resume)
        for each in optimizers if routed is Routed.STEP else ():
            self._stop_hooks.append(each.register_step_post_hook(self._after_update))
        return list(optimizers)

    def _context(self) -> AbstractContextManager[Any] | None:
        return self.precision.forward_context(self.world.device.type) if self.precision.is_mixed else None

    def _before_update(self, *_: Any) -> None:
        """Free parameters that a forward pass without backward has left gathered, as they would miss the update."""
        if self._sharded is not None:
            self._sharded.reshard()

    def _after_update(self, *_: Any) -> None:
        """Gather parameters again that the rest of the step may use. Collective."""
        if self._sharded is not None:
            self._sharded.root.unshard()

    def route(self, step: StepFunction, training: bool) -> StepFunction:
        """Return a call of ``step`` inside the hooks that gather the model's outermost parameters."""
        step = step if self._sequences is None else self._sequences.routed(step)
        if self._sharded is None:
            return step
        # Under manual optimization no backward pass follows: gathered parameters are freed, as in an evaluation.
        direct = training and self._routed is not Routed.STEP
        return partial(self._sharded.train if direct else self._sharded.evaluate, step)

    def sync_gradients(self, enabled: bool) -> None:
        """Reduce-scatter gradients in the next backward pass, or accumulate full gradients locally."""
        if self._sharded is not None:
            self._sharded.sync_gradients(enabled)

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Compute gradients, which are reduced during the backward pass. Collective.

        Raises:
            ConfigurationError: the loss differs between ranks that split layers.
        """
        if self._equal is not None:
            self._equal.check_loss(loss)
        with self._attention():
            if self._sharded is None:
                loss.backward(**options)
            else:
                self._sharded.backward(loss, options)

    def step(self, optimizer: Optimizer) -> bool:
        """Apply the update. Collective.

        Raises:
            ConfigurationError: the optimizer has parameters whose gradients are not averaged, state that is an ordinary
                tensor, or an operation that shards lack.
        """
        if self._known is not None:
            self._known.check(optimizer)
        if self._sharded is not None:
            self._sharded.check_reduced()
            self._sharded.unused.settle()
        pause = self._pauses.get(optimizer)
        if pause is not None:
            # Registered again to be the last one, as the hooks of the user's code compute with full tensors.
            pause.remove()
            self._pauses[optimizer] = optimizer.register_step_pre_hook(_switch_off)
        try:
            return super().step(optimizer)
        except RuntimeError as error:
            if (sentence := _of_shards(optimizer, str(error))) is None:
                raise
            raise ConfigurationError(sentence) from error
        finally:
            if pause is not None:
                FullSemantics.switch_on()

    def trainability_changed(self, module: nn.Module) -> bool:
        """Apply changes of ``requires_grad`` since set-up; return False. Collective."""
        if self._sharded is not None:
            self._sharded.reshard()
            self._sharded.refresh()
            self._sharded.adopt()
            assert self._known is not None
            self._known.add(module.parameters())
            if self._routed is Routed.STEP:
                # The root stays gathered within a step that toggles parameters.
                self._sharded.root.unshard()
        return False

    def zero_backward(self) -> None:
        """Raise, as every rank must run a real backward pass."""
        raise LoopError(
            f"strategy={self.name!r} reduces gradients in the backward pass itself, which every rank must run: give "
            "a batch without loss a batch_weight of 0 instead."
        )

    def reduce_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Do nothing: the backward pass has averaged the gradients."""

    def zero_grad(self, optimizer: Optimizer) -> None:
        """Drop gradients, also those that no backward pass has reduced yet."""
        super().zero_grad(optimizer)
        if self._sharded is not None:
            self._sharded.drop_unreduced(optimizer)
            self._sharded.unused.forget()

    def sync_buffers(self, module: nn.Module) -> None:
        """Broadcast rank 0's buffers. Collective."""
        share_buffers(module, self.world)

    def restore(self, module: nn.Module) -> None:
        """Remove the hooks, and gather full weights on rank 0 or all ranks, or leave them sharded. Collective."""
        sharded = self._sharded
        self.teardown()
        if sharded is not None and self.gather_weights != "none" and self.world.size > 1:
            sharded.gather(everywhere=self.gather_weights == "all")

    def teardown(self) -> None:
        """Remove torch's hooks and classes from the module; on a single rank its weights are ordinary again."""
        sharded, self._sharded = self._sharded, None
        for hook in (*self._stop_hooks, *self._pauses.values()):
            hook.remove()
        self._stop_hooks, self._pauses, self.flags, self._known, self._equal = [], {}, None, None, None
        if sharded is not None:
            self.state = ShardedState(self.world)
            sharded.take_off()
            if self.world.size == 1:
                sharded.gather(everywhere=True)


class SplitReplicas(FSDPStrategy):
    """Replicates a model over groups of ranks that split its layers.

    Torch's ``fully_shard`` with one rank in each group of shards does it: parameters that are split over a group and
    those that are not become tensors of one kind, which optimizers and checkpoints take, and gradients are averaged
    over replicas while the backward pass runs. Compared with ``DistributedDataParallel``, parameters are copied once
    in each pass, and there are no buckets.
    """

    name = "ddp"
    axes = ("dp_replicate", "cp", "tp")
    rest = "dp_replicate"

    def __init__(self) -> None:
        # Every rank has full weights after a fit, as with ``ddp`` alone.
        super().__init__(gather_weights="all")
        self.memory_layout = MemoryLayout(replicates=True)


def hsdp(units: Units = None, *, replicas: Replicas = "node", **arguments: Any) -> FSDPStrategy:
    """Return ``fsdp`` with full replicas of the model: one per node, and two on a single node."""
    strategy = FSDPStrategy(units, replicas=replicas, **arguments)
    strategy.name = "hsdp"
    return strategy


def fsdp_offload(units: Units = None, **arguments: Any) -> FSDPStrategy:
    """Return ``fsdp`` with shards, gradients and optimizer state in the CPU's memory."""
    strategy = FSDPStrategy(units, cpu_offload=True, **arguments)
    strategy.name = "fsdp-offload"
    return strategy


def _sharded_stages(strategy: FSDPStrategy, degrees: Degrees) -> Strategy:
    """Return a pipeline for degrees with ``pp``; the ranks that they leave share the state of stages.

    Args:
        strategy: the strategy, whose arguments other than degrees must be the defaults.
        degrees: the degrees of ``parallel=`` and of its arguments.

    Raises:
        ConfigurationError: there are other arguments.
    """
    own = signature(type(strategy)).parameters
    given = [name for name, each in own.items() if getattr(strategy, name, each.default) != each.default]
    if others := [name for name in given if degrees.dp_replicate is None or name != "replicas"]:
        raise ConfigurationError(
            f"{degrees} with FSDPStrategy({', '.join(f'{name}=...' for name in others)}): stages of a pipeline are "
            "sharded by block, without these arguments. Leave them out, or leave pp out."
        )
    if -1 not in degrees.given.values() and degrees.dp_shard is None:
        degrees = Degrees(**{**degrees.given, "dp_shard": -1})
    return PipelineStrategy().with_degrees(degrees)


def _switch_off(*_: Any) -> None:
    FullSemantics.switch_off()


def _switch_on(*_: Any) -> None:
    FullSemantics.switch_on()


def _computes_on_shards(optimizer: Optimizer) -> bool:
    """Whether the step is one of torch's, which may compute on shards; one of the user's code may read any number."""
    kinds = {type(part).step.__module__.partition(".")[0] for part in optimizers_in(optimizer)}
    return kinds <= {"torch", "torchao"}


def _of_shards(optimizer: Optimizer, error: str) -> str | None:
    """Return a sentence for an error of torch's about shards in the step of an optimizer; None for another error."""
    name = type(optimizer).__name__
    if "got mixed torch.Tensor and DTensor" in error:
        return (
            f"{name} has state that is an ordinary tensor, and its parameters are sharded: change state in place, as "
            "with copy_ or zero_, or make it with torch.zeros_like(parameter)."
        )
    if "Sharding propagation failed" in error:
        return (
            f"{name} runs an operation in its step that torch does not have for shards: set its attribute "
            "updates_full_parameters = True before the fit, or use another optimizer."
        )
    return None
