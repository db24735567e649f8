"""``pipeline``: divides the repeated blocks of a model over ranks, which work on different micro-batches at a time.

The micro-batches of an accumulation window are those of the pipeline. The schedules are torch's
(``torch.distributed.pipelining``): Huang et al. 2019, "GPipe"; Narayanan et al. 2021, "Efficient Large-Scale Language
Model Training on GPU Clusters" (1F1B, interleaved); Qi et al. 2023, "Zero Bubble Pipeline Parallelism".

The blocks are divided into stages. All ranks of a pipeline hold what is outside of the blocks, such as embeddings and
heads, and sum its gradients, so that tied weights and parameters used on several stages are exact.

With ``dp_shard``, ranks that hold the same stages share their parameters, gradients and optimizer state, and with
``tp`` the computation of their layers: see ``shards.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ...framework.api.overriding import is_overridden
from ...framework.api.train_module import TrainModule
from ...framework.core.degrees import Degrees, Layout, divisors
from ...framework.core.errors import ConfigurationError, is_count
from ...framework.core.norms import BatchNorm
from ...framework.core.precision import Precision
from ...framework.core.quantized_state import quantizes
from ...framework.distributed.world import World
from ...framework.parallel.canonical_state import CanonicalState
from ...framework.parallel.compilation import has_compiled_call
from ...framework.parallel.deferred import Deferred
from ...framework.parallel.elsewhere import unguard
from ...framework.parallel.gradient_operations import GradientOperations
from ...framework.parallel.meta_device import supplied_names
from ...framework.parallel.strategy import Routed, StepFunction, Strategy, Traits
from ...framework.parallel.sync_batch_norm import is_collective
from ..context import ContextParallel
from ..context.sharing import sharing_sequences
from ..fsdp.initial import Origins, keeping, move_buffers
from ..fsdp.tensor_parallel import EqualResults, check_plan
from ..limits import check_independent
from .blocks import Stages, divide
from .calls import BlockCalls
from .evaluation import Evaluation
from .gradients import StagedGradients
from .mesh import StageMesh, build_mesh
from .other_stages import OfOtherStage, StateOfStages, check_hooks, mark_elsewhere
from .passes import HiddenStates, PipelinePasses
from .random_numbers import share_generators
from .schedules import Place, kind_named
from .shards import StageShards, check_sharded, fill_stages
from .state import StagedState


class PipelineStrategy(Strategy):
    """Divides the repeated blocks of a model over the ranks of a pipeline.

    Which blocks: those that the method ``configure_pipeline`` of the module returns, in the order of their calls, or
    else the largest list of repeated blocks. The number of ranks of a pipeline is ``parallel={"pp": ...}``; by default
    all ranks are one pipeline. With ``dp_replicate`` there are several, which average their gradients; with
    ``dp_shard`` there are several that share the state of each stage; with ``tp`` each layer has several ranks, and
    with ``cp`` each sequence. With ``cp``, ``training_step`` must also call the blocks for a part without targets, for
    which ``batch_weight`` returns 0. Micro-batches of one shape give the best throughput.

    Args:
        schedule: ``"gpipe"``, ``"1f1b"``, ``"interleaved-1f1b"``, ``"zero-bubble"`` or ``"zero-bubble-v"``.
        stages_per_rank: the number of stages of each rank; None for 1, or 2 under an interleaved or V schedule.
            ``v`` stages send ``v`` times as many messages as one.

    Raises:
        ConfigurationError: an argument is invalid.
    """

    name = "pipeline"
    axes = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
    degrees = Degrees(pp=-1)
    traits = Traits(shards_state=True)
    prevents_compiling = "runs on each rank the blocks of its stages alone: leave compile out"
    window_passes: PipelinePasses

    def __init__(self, schedule: str = "1f1b", *, stages_per_rank: int | None = None) -> None:
        self._kind = kind_named(schedule)
        self.schedule = schedule
        self.stages_per_rank = self._kind.per_rank if stages_per_rank is None else stages_per_rank
        if not is_count(self.stages_per_rank, 1):
            raise ConfigurationError(
                f"PipelineStrategy(stages_per_rank={stages_per_rank!r}): it must be a whole number of at least 1."
            )
        if self.stages_per_rank > 1 and not self._kind.takes_several:
            raise ConfigurationError(
                f"PipelineStrategy(schedule={schedule!r}, stages_per_rank={stages_per_rank}): this schedule has one "
                "stage on each rank. Use 'interleaved-1f1b' or 'zero-bubble', or leave stages_per_rank out."
            )
        if self._kind.is_v and self.stages_per_rank != 2:
            raise ConfigurationError(
                f"PipelineStrategy(schedule={schedule!r}, stages_per_rank={stages_per_rank}): this schedule has two "
                "stages on each rank. Leave stages_per_rank out."
            )
        self.window_passes = PipelinePasses()
        self._layout: Layout
        self._mesh: StageMesh
        self._place: Place
        self._deferred: Deferred
        self._supplied: Collection[str] = ()
        self._sequences: ContextParallel | None = None
        self._shards: StageShards | None = None
        self._calls: BlockCalls | None = None
        self._evaluation: Evaluation | None = None
        self._guards: list[RemovableHandle] = []

    # ---- before the process group exists --------------------------------------------------------------------------

    def clone(self) -> Strategy:
        cloned = super().clone()
        assert isinstance(cloned, PipelineStrategy)
        cloned.window_passes = copy.copy(self.window_passes)
        return cloned

    def with_degrees(self, degrees: Degrees) -> Strategy:
        """Return a strategy with the degrees of ``parallel=``; without ``pp``, it takes the ranks that others leave."""
        given = degrees.given
        if "pp" not in given and -1 not in given.values():
            degrees = Degrees(**given, pp=-1)
        changed = super().with_degrees(degrees)
        # Parameters are gathered for each step of an evaluation, and layers that are split communicate.
        together = "dp_shard" in degrees.used or "tp" in degrees.used
        changed.traits = Traits(shards_state=True, forward_has_collectives=together)
        return changed

    def check(self, world_size: int, device_type: str, num_nodes: int, precision: Precision) -> None:
        """Refuse a number of ranks that pipelines do not divide, and a precision that changes how layers compute."""
        self._lay_out(world_size)
        if precision.replaces_layers:
            raise ConfigurationError(
                f"precision={precision.name!r} changes how layers compute, which a pipeline does not support: use "
                "'bf16-mixed', or strategy='fsdp'."
            )

    def _lay_out(self, world_size: int) -> Layout:
        layout = self.degrees.lay_out(world_size, self.rest)
        if layout.pp < 2:
            way = f"parallel={{'pp': ...}} out of {divisors(world_size)}, but 1" if world_size > 1 else "devices=2"
            raise ConfigurationError(
                f"strategy='pipeline' with {layout.pp} rank in a pipeline: there is nothing to divide the model over. "
                f"Use {way}, or strategy='{'ddp' if world_size > 1 else 'single'}'."
            )
        self.window_passes.ranks = layout.pp
        return layout

    def check_module(self, module: nn.Module) -> None:
        """Refuse a module that is not trained by automatic optimization, or has too few blocks."""
        if isinstance(module, TrainModule) and not module.automatic_optimization:
            raise ConfigurationError(
                "strategy='pipeline' with automatic_optimization = False: a pipeline runs the passes of several "
                "micro-batches at a time, which training_step cannot order. Use automatic optimization, or "
                "strategy='fsdp'."
            )
        if "tp" in self.degrees.used:
            check_plan(module, self.degrees.tp or 1)
        if "tp" in self.degrees.used or "dp_shard" in self.degrees.used:
            check_sharded(module, ())
        if not is_overridden("configure_model", module, TrainModule):
            self._divide(module)

    def connect(self, device_type: str, num_nodes: int, precision: Precision) -> World:
        """Join the process group, select the device and build the groups of ranks. Collective."""
        world = super().connect(device_type, num_nodes, precision)
        self._layout = layout = self._lay_out(world.size)
        self._mesh = mesh = build_mesh(layout, world)
        self._place = Place(self._kind, layout.pp, self.stages_per_rank, dist.get_rank(mesh.pipeline))
        self._deferred = Deferred()
        self._sequences, self.part = sharing_sequences(world, layout)
        self.window_passes.connect(world, self._place, mesh.pipeline, self._sequences)
        return world

    # ---- a module and its optimizers ------------------------------------------------------------------------------

    def building(self) -> AbstractContextManager[Any]:
        """Return a context in which parameters are built without data; ``setup`` fills those of this rank's stages."""
        return self._deferred.recording()

    def to_device(self, module: nn.Module, supplied: Collection[str] = ()) -> None:
        """Move the buffers to the device; ``setup`` moves only the parameters of this rank's stages."""
        self._supplied = supplied
        move_buffers(module, self.world.device)
        self._deferred.keep(module)

    def _divide(self, module: nn.Module) -> Stages:
        ranks = self.window_passes.ranks
        argument = f"strategy='pipeline' with pp={ranks}"
        if self.stages_per_rank > 1:
            argument += f" and {self.stages_per_rank} stages on each rank"
        return divide(module, ranks * self.stages_per_rank, argument)

    def setup(
        self, module: nn.Module, optimizers: Sequence[Optimizer], training: bool, routed: Routed = Routed.LOSS
    ) -> list[Optimizer]:
        """Replace the calls of the blocks. Collective.

        Raises:
            ConfigurationError: the module or an optimizer cannot be divided.
        """
        self.check_module(module)
        for optimizer in optimizers:
            check_independent(optimizer, self.name)
            if quantizes(optimizer):
                raise ConfigurationError(
                    f"{type(optimizer).__name__} quantizes its state in blocks of a parameter, which checkpoints of a "
                    "pipeline do not hold: use torch.optim.AdamW, or strategy='fsdp'."
                )
        check_hooks(module.parameters(), module.modules())
        stages, place, mesh = self._divide(module), self._place, self._mesh
        self._check_layers(module, set(stages.blocks))
        held = {number for number in range(len(stages.blocks)) if stages.stage_of(number) in place.own}
        origins = Origins(module, self._deferred, self.world, supplied_names(module, self._supplied))
        with keeping(module):
            self._shards = shards = fill_stages(module, optimizers, stages, place, mesh, origins)
        equal = EqualResults(module, mesh.tensor) if mesh.tensor is not None and training else None
        if equal is not None:
            self._guards += [each.register_step_pre_hook(equal.check_gradients) for each in optimizers]
        owners = stages.owners(module, place)
        self._guards += mark_elsewhere(module, owners, place.rank)
        for each in optimizers:
            each.state = StateOfStages(dict, each.state)
        self._calls = calls = BlockCalls(stages, held)
        hidden = HiddenStates(module, calls, min(held))
        self.gradients = StagedGradients(self.world, mesh, owners, shards)
        self.state = StagedState(self.world, place, owners, mesh.stride, None if shards is None else shards.free)
        gathered = nullcontext if shards is None else shards.gathered
        if training and routed is Routed.FORWARD:
            share_generators(self.world)
        self._evaluation = Evaluation(self.world, place, mesh.pipeline, stages, calls, hidden, gathered)
        gather, check_loss = None if shards is None else shards.gather, None if equal is None else equal.check_loss
        self.window_passes.set_up(module, stages, calls, hidden, gather, check_loss)
        return list(optimizers)

    def _check_layers(self, module: nn.Module, blocks: set[nn.Module]) -> None:
        for name, part in module.named_modules():
            if has_compiled_call(part) and blocks & set(part.modules()):
                raise ConfigurationError(
                    f"{name or 'the module'} is compiled, and a pipeline decides in the calls of its blocks which rank "
                    "computes them: compile modules inside the blocks, or use strategy='fsdp' or 'ddp'."
                )
            if is_collective(part):
                raise ConfigurationError(
                    f"{name} computes statistics over all ranks in its passes, and the ranks of a pipeline run "
                    "different passes: leave sync_batchnorm out, or use another norm."
                )
            several = self.stages_per_rank > 1 and isinstance(part, BatchNorm)
            if several and part.track_running_stats:
                raise ConfigurationError(
                    f"{name} is {type(part).__name__} with running statistics, and with several stages on each rank "
                    "the step runs several times for a micro-batch: use schedule='1f1b', or another norm."
                )

    def route(self, step: StepFunction, training: bool) -> StepFunction:
        """Return the step itself for training, where ``window_passes`` runs it; else one that passes the stages."""
        if training or self._evaluation is None:
            return step
        return self._evaluation.route(step if self._sequences is None else self._sequences.routed(step))

    def trainability_changed(self, module: nn.Module) -> bool:
        """Apply changes of ``requires_grad`` since set-up; return False."""
        if self._shards is not None:
            self._shards.refresh()
        return False

    def zero_backward(self) -> None:
        """Do nothing: ``reduce_gradients`` takes zero for the gradients that this rank has not computed."""

    def reduce_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Average gradients over pipelines; sum those outside of the blocks over the stages. Collective."""
        if isinstance(self.gradients, StagedGradients):
            self.gradients.reduce(parameters)

    def sync_buffers(self, module: nn.Module) -> None:
        """Send the buffers of each block from the first rank that computes it, the others from rank 0's pipeline."""
        if isinstance(self.state, StagedState):
            self.state.share_buffers(module)

    # ---- the end --------------------------------------------------------------------------------------------------

    def restore(self, module: nn.Module) -> None:
        """Restore ``forward`` of the blocks, and gather full weights on rank 0. Collective."""
        state = self.state
        self.teardown()
        if isinstance(state, StagedState):
            state.gather(module)

    def teardown(self) -> None:
        """Restore ``forward`` of the blocks; the module keeps the weights of this rank's stages."""
        if self._calls is not None:
            self._calls.remove()
            unguard(self.window_passes.module, OfOtherStage)
            while self._guards:
                self._guards.pop().remove()
        if self._shards is not None:
            self._shards.take_off()
        self.window_passes.release()
        self._calls = self._evaluation = self._shards = None
        self.gradients, self.state = GradientOperations(), CanonicalState()
