"""``ddp``: every rank holds the full model and processes its part of the batch; gradients are averaged.

Torch's ``DistributedDataParallel`` does the averaging, overlapped with backward (Li et al. 2020, "PyTorch Distributed:
Experiences on Accelerating Data Parallel Training"). Communication hooks average a bucket of gradients in their own
way: in fp16 or bf16, or as products of low rank (Vogels et al. 2019, "PowerSGD: Practical Low-Rank Gradient
Compression for Distributed Optimization").
"""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from inspect import signature
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.optim import Optimizer

from ..framework.core.arguments import check_names
from ..framework.core.degrees import Degrees
from ..framework.core.errors import ConfigurationError, RankError
from ..framework.core.precision import Precision
from ..framework.core.wording import first_of
from ..framework.distributed.world import World
from ..framework.parallel.gradient_operations import FullGradients, GradientOperations, average_gradients
from ..framework.parallel.meta_device import check_same_parameters, share_buffers, share_tensors
from ..framework.parallel.strategy import MemoryLayout, Recovery, Routed, StepAdapter, StepFunction, Strategy, Traits
from ..framework.parallel.zero_backward import zero_loss
from .context import ContextParallel
from .context.sharing import NO_COMPILING, sharing_sequences
from .fsdp import SplitReplicas
from .limits import KnownParameters

Hook = Callable[[Any, Any], torch.futures.Future[Tensor]]
Wrapper = Callable[[Hook], Hook]

_REQUIRES_GRAD = attrgetter("requires_grad")
_TAKEN = ("module", "device_ids", "output_device", "process_group", "device_mesh")
# What PowerSGDState holds of earlier steps, by the index of a bucket.
_MEMORIES = ("error_dict", "p_memory_dict", "q_memory_dict")
# Arguments of other frameworks, and their equivalents.
_ELSEWHERE = {
    "timeout": "use Trainer(stall_timeout=...), which limits every wait of a rank",
    "process_group_backend": "leave it out, ranks use gloo on CPUs and NCCL on GPUs",
    "mixed_precision": "use Trainer(precision=...)",
    "model_averaging_period": "use phalanx.compat.accelerate.local_sgd.LocalSGD, with an Accelerator",
    "start_method": "leave it out, a script's ranks run the script and a notebook's are forked",
    "accelerator": "give it to the Trainer or the Fabric",
    "parallel_devices": "use Trainer(devices=...)",
    "cluster_environment": "leave it out, the launcher's variables are read",
    "checkpoint_io": "leave it out, see docs/checkpoint-format.md",
    "precision_plugin": "use Trainer(precision=...)",
}


class DDPStrategy(Strategy):
    """Replicates the model and averages gradients.

    Processes on the CPUs of one machine average buckets of gradients through shared memory, which takes up to 32 MiB on
    the machine, and larger buckets over Gloo. The processes of several nodes average over Gloo, and GPUs over NCCL.

    Keyword arguments go to ``torch.nn.parallel.DistributedDataParallel`` (``find_unused_parameters``,
    ``bucket_cap_mb``, ``gradient_as_bucket_view``, ``static_graph``, ``broadcast_buffers``, ...).

    Args:
        ddp_comm_hook: averages gradients in place of DDP under automatic optimization and in a Fabric, such as the
            hooks of ``torch.distributed.algorithms.ddp_comm_hooks``: ``hook(state, bucket)`` returns a future. It must
            return the same values on all ranks. PowerSGD compresses only after ``start_powerSGD_iter`` steps.
        ddp_comm_state: the first argument of the hook, or a function without arguments that returns one for each
            module. Checkpoints do not hold it.
        ddp_comm_wrapper: makes another hook of the hook, such as torch's ``fp16_compress_wrapper``.

    Raises:
        ConfigurationError: an argument is not known, or phalanx sets it itself.
    """

    name = "ddp"
    memory_layout = MemoryLayout(replicates=True)
    axes = ("dp_replicate", "cp", "tp")
    recovery: Recovery | None = Recovery()

    def __init__(
        self,
        *,
        ddp_comm_hook: Hook | None = None,
        ddp_comm_state: Any = None,
        ddp_comm_wrapper: Wrapper | None = None,
        **ddp_arguments: Any,
    ) -> None:
        check_arguments(ddp_arguments)
        self._arguments = ddp_arguments
        given = (ddp_comm_hook, ddp_comm_state, ddp_comm_wrapper)
        self._hook = CommunicationHook(*given) if any(each is not None for each in given) else None
        self._ddp: Replica | None = None
        self._supplied: Collection[str] = ()
        self._parameters: list[Tensor] = []
        self._trainable: list[bool] = []
        self._adapter: StepAdapter | None = None
        self._known: KnownParameters | None = None
        self._routed = Routed.LOSS
        self._syncs = True
        self._awaits_backward = False
        # Whether DDP reduces the next backward pass: it prepares for one of them in a forward pass.
        self._reduces_next = False
        self._sequences: ContextParallel | None = None

    def with_degrees(self, degrees: Degrees) -> Strategy:
        """Return a strategy with degrees; one that splits layers is another one, without DDP's arguments."""
        changed = super().with_degrees(degrees)
        assert isinstance(changed, DDPStrategy)
        if "cp" in degrees.used:
            changed._share_sequences()
        if "tp" not in degrees.used:
            return changed
        given = [*self._arguments, *["ddp_comm_hook"] * (self._hook is not None)]
        if given:
            raise ConfigurationError(
                f"{degrees} with DDPStrategy({', '.join(given)}=...): beside tensor parallelism gradients are averaged "
                "without DistributedDataParallel, which has these arguments. Leave them out, or leave tp out."
            )
        return SplitReplicas().with_degrees(degrees)

    def _share_sequences(self) -> None:
        # Ranks that share sequences exchange parts of them in every pass.
        self.traits = Traits(forward_has_collectives=True, backward_has_collectives=True)
        self.prevents_compiling, self.recovery = NO_COMPILING, None

    def connect(self, device_type: str, num_nodes: int, precision: Precision) -> World:
        """Join the process group, take the device, and find the ranks that share sequences. Collective."""
        world = super().connect(device_type, num_nodes, precision)
        self._sequences, self.part = sharing_sequences(world, self.degrees.lay_out(world.size, self.rest))
        return world

    def to_device(self, module: nn.Module, supplied: Collection[str] = ()) -> None:
        self._supplied = supplied
        super().to_device(module, supplied)

    def setup(
        self, module: nn.Module, optimizers: Sequence[Optimizer], training: bool, routed: Routed = Routed.LOSS
    ) -> list[Optimizer]:
        """Make all ranks start from rank 0's weights; when training, wrap an adapter around the module. Collective."""
        self._parameters = list(module.parameters())
        self._trainable = list(map(_REQUIRES_GRAD, self._parameters))
        self._routed = routed
        trains = self.world.size > 1 and training and any(self._trainable)
        self._known = KnownParameters(module, optimizers) if trains else None
        if trains:
            self._check_hook(routed)
        # The passes of windows that may be repeated do not communicate: DDP would only take memory for its buckets.
        if trains and routed is not Routed.REPEATED:
            self._wrap(module, routed)
        elif self.world.size > 1:
            share_tensors(module, self.world, self._supplied)
        return list(optimizers)

    def _check_hook(self, routed: Routed) -> None:
        if self._hook is not None and routed in (Routed.STEP, Routed.REPEATED):
            raise ConfigurationError(
                "DDPStrategy(ddp_comm_hook=...) acts in the backward pass, and under manual optimization and with "
                "micro_batch_size='auto' gradients are averaged after it: leave the hook out."
            )

    def _wrap(self, module: nn.Module, routed: Routed) -> None:
        hook = self._hook
        if self._adapter is None:
            finds = routed is Routed.LOSS and self._arguments.get("find_unused_parameters")
            self._adapter = _UsedAdapter(module, self.world.device) if finds else StepAdapter(module)
        if self._arguments.get("init_sync", True):
            # torch's own way copies 250 MiB of the weights at a time into a buffer, also those that are loaded later.
            check_same_parameters(module, self.world)
            share_tensors(module, self.world, self._supplied)
        self._ddp = Replica(self._adapter, **{**self._arguments, "init_sync": False})
        if hook is not None:
            self.gradients = hook.register(self._ddp, module)
        elif self.world.sums_in_memory:
            self._ddp.average_by(self.world)

    def route(self, step: StepFunction, training: bool) -> StepFunction:
        """Return a call of ``step`` through DDP when training; evaluation needs no communication."""
        step = step if self._sequences is None else self._sequences.routed(step)
        if not training or self._ddp is None:
            return step

        def routed(*args: Any, **kwargs: Any) -> Any:
            self._wrap_again()
            self._awaits_backward = True
            self._reduces_next = self._syncs
            return step(*args, **kwargs) if self._ddp is None else self._ddp(step, *args, **kwargs)

        return routed

    def sync_gradients(self, enabled: bool) -> None:
        """Set what DDP's ``no_sync`` sets, without entering a context in every micro-batch."""
        if self._ddp is not None and enabled != self._syncs:
            # Only on a change: setting an attribute of a module takes a microsecond, in every micro-batch.
            self._ddp.require_backward_grad_sync = self._syncs = enabled

    def trainability_changed(self, module: nn.Module) -> bool:
        """Wrap the module again if parameters were added, frozen or unfrozen. Collective."""
        self._parameters = list(module.parameters())
        return self._wrap_again()

    def _wrap_again(self) -> bool:
        """Wrap the module again if DDP's set of trained parameters, which is fixed, is another one now. Collective."""
        if self._ddp is None or self._trainable == list(map(_REQUIRES_GRAD, self._parameters)):
            return False
        module, known, syncs = self._ddp.module.module, self._known, self._syncs
        assert known is not None
        self._unwrap()
        # The hooks of the old wrapper are removed with its last reference, which a reference cycle holds.
        gc.collect()
        self.setup(module, known.optimizers, training=True, routed=self._routed)
        self.sync_gradients(syncs)
        return True

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Compute gradients; DDP reduces them during the backward pass, or they are reduced after it. Collective."""
        try:
            if self._sequences is None:
                loss.backward(**options)
            else:
                with self._sequences.attention():
                    loss.backward(**options)
        except BaseException as error:
            if self._ddp is not None and self._syncs:
                self._ddp.interruption = type(error).__name__
            raise
        self._awaits_backward = False
        if self._ddp is not None and self._syncs:
            if self._routed is Routed.FORWARD and not self._reduces_next:
                # A second backward pass of a forward pass, or one of a part of the module. The gradients that were
                # reduced before are equal on all ranks, so the average over ranks leaves them as they are.
                self.reduce_gradients(_trained(self._ddp.module))
            self._reduces_next = False

    def step(self, optimizer: Optimizer) -> bool:
        """Apply the update. Collective.

        Raises:
            ConfigurationError: the optimizer has parameters whose gradients are not averaged.
            RankError: an exception has ended the backward pass, and the gradients are this rank's own.
        """
        if self._ddp is not None and self._ddp.interruption:
            raise self._ddp.interrupted()
        if self._known is not None:
            self._known.check(optimizer)
        optimizer.step()
        return True

    def zero_backward(self) -> None:
        """Run DDP's forward and backward with a loss of zero that depends on every parameter. Collective.

        Where DDP finds unused parameters the loss depends on none of the user's: a gradient of zero from this rank
        would have parameters updated that no rank has used.
        """
        self._wrap_again()
        ddp = self._ddp
        if ddp is not None:
            self.sync_gradients(True)
            if self._awaits_backward:
                # DDP broadcasts buffers before the first forward of a window. A second broadcast here would have no
                # peer on the other ranks.
                ddp.require_forward_param_sync = False
            self._reduces_next = True
            adapter, reached = self._adapter, list(ddp.module.parameters())
            if isinstance(adapter, _UsedAdapter):
                reached = [adapter.used]
            # In a list, so that the adapter does not treat it as a loss of the user.
            (loss,) = ddp(lambda: [zero_loss(reached)])
            self.backward(loss)

    def reduce_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Average gradients in one flat reduction for each dtype. Collective."""
        average_gradients(self.world, parameters)

    def sync_buffers(self, module: nn.Module) -> None:
        """Broadcast rank 0's buffers unless ``broadcast_buffers`` is False, as DDP does in forward. Collective."""
        if self._arguments.get("broadcast_buffers", True):
            share_buffers(module, self.world)

    def teardown(self) -> None:
        """Drop the wrapper, which removes its hooks from the parameters."""
        self._unwrap()
        self._adapter = self._known = None

    def _unwrap(self) -> None:
        if self._hook is not None and self._ddp is not None:
            self._hook.release(self._ddp.module.module)
        self._ddp = None
        self.gradients = FullGradients()
        self._syncs, self._awaits_backward, self._reduces_next = True, False, False


# ---- the wrapper ----------------------------------------------------------------------------------------------------


class Replica(nn.parallel.DistributedDataParallel):
    """``DistributedDataParallel`` with a fixed order of reduction, and a readable error about unused parameters.

    Torch reduces the first backward pass in one bucket, and divides later ones by the order in which gradients arrived
    in the first. The sum of three or more ranks depends on that division, so the first step of a resumed run would be
    rounded differently than in an uninterrupted run. Here the buckets of all steps follow the reversed order of
    registration, which is the order of arrival if modules are registered in the order of their use.
    """

    def __init__(self, module: nn.Module, **arguments: Any) -> None:
        # Otherwise torch reverses the buckets itself.
        self._is_reversed = bool(arguments.get("static_graph") or not arguments.get("find_unused_parameters"))
        self.interruption = ""
        """The class of an exception that has ended a backward pass, such as one of a signal handler or of a hook."""
        super().__init__(module, **arguments)
        # Of those that DDP waits for, whatever is frozen later.
        self._names = [n.removeprefix("module.module.") for n, one in self.named_parameters() if one.requires_grad]
        # There is no reducer if all gradients are delayed.
        if hasattr(self, "reducer"):
            # What torch itself does for a rank that has run out of data. No effect if the buckets are fixed already, as
            # with find_unused_parameters. These names and the next one are private: torch has no argument for an order.
            self.reducer._push_all_rebuilt_params()
            self.reducer._rebuild_buckets()

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        """Return the parameters in the order of reduction, and whether the gradient of each is sparse."""
        parameters, is_sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        if self._is_reversed:
            parameters.reverse()
            is_sparse.reverse()
        self._has_sparse = any(is_sparse)
        return parameters, is_sparse

    def average_by(self, world: World) -> None:
        """Average buckets through the memory that the ranks share."""
        if hasattr(self, "reducer") and not self._has_sparse:
            self.register_comm_hook(world, _average_in_memory)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the step.

        Raises:
            ConfigurationError: parameters were unused in the previous step.
            RankError: an exception has ended an earlier backward pass.
        """
        if self.interruption:
            raise self.interrupted()
        try:
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if "Expected to have finished reduction" not in str(error):
                raise
            raise ConfigurationError(
                f"strategy='ddp' waits for the gradient of every parameter, and {self._unused(str(error))} had no part "
                "in the loss: use strategy='ddp_find_unused_parameters_true', or freeze what is not trained."
            ) from None

    def interrupted(self) -> RankError:
        """Return the error for what follows an interrupted backward pass.

        Torch's reducer is left between two states, and other ranks wait for the gradients that it has not reduced.
        """
        return RankError(
            f"{self.interruption} has ended a backward pass of this rank, so its gradients are not averaged "
            "over the ranks: end the program, and resume from the last checkpoint."
        )

    def _unused(self, message: str) -> str:
        """Return the names of the parameters whose indices are in torch's message."""
        match = re.search(r"did not receive grad for rank \d+: ([\d ]+)", message)
        names = self._names
        order = range(len(names))[:: -1 if self._is_reversed else 1]
        found = [names[index] for index in sorted(order[int(number)] for number in match[1].split())] if match else []
        return first_of(found) or "some"


# Without annotations: torch compares those of a hook with types, and in this file they are strings.
def _average_in_memory(world, bucket):  # type: ignore[no-untyped-def]
    """Average a bucket of gradients through shared memory, or over gloo, as without a hook, where it is too large."""
    gradients = bucket.buffer()
    if not world.sum_in_memory(gradients, 1.0 / world.size):
        return allreduce_hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(gradients)
    return done


# ---- communication hooks, which compress gradients before they are sent ----------------------------------------------


class CommunicationHook:
    """A hook, its state and its wrapper, for all modules that a strategy and its clones set up.

    Args:
        hook: averages a bucket: ``hook(state, bucket)`` returns a future.
        state: the first argument of the hook, or a function without arguments that returns one for each module.
        wrapper: makes another hook of the hook, such as torch's ``fp16_compress_wrapper``.

    Raises:
        ConfigurationError: there is no hook, an argument is not callable, or the hook leaves gradients different on the
            ranks.
    """

    def __init__(self, hook: Hook | None, state: Any, wrapper: Wrapper | None) -> None:
        if hook is None:
            raise ConfigurationError(
                "DDPStrategy was given ddp_comm_state or ddp_comm_wrapper without ddp_comm_hook: give the hook too."
            )
        for name, value in (("ddp_comm_hook", hook), ("ddp_comm_wrapper", wrapper)):
            if value is not None and not callable(value):
                raise ConfigurationError(
                    f"DDPStrategy({name}={value!r}) must be a function, such as those of "
                    "torch.distributed.algorithms.ddp_comm_hooks."
                )
        if "PostLocalSGDState" in {kind.__name__ for kind in type(state).__mro__}:
            raise ConfigurationError(
                "DDPStrategy(ddp_comm_state=PostLocalSGDState(...)) lets gradients differ between ranks, and all ranks "
                "must apply the same update: use phalanx.compat.accelerate.local_sgd.LocalSGD, "
                "with an Accelerator."
            )
        if getattr(hook, "__name__", "") == "batched_powerSGD_hook" and not _takes_one_matrix(hook):
            raise ConfigurationError(
                f"DDPStrategy(ddp_comm_hook=batched_powerSGD_hook) fails in torch {torch.__version__}, whose hook "
                "gives one matrix to a function that takes only a batch of them: use powerSGD_hook, and "
                "PowerSGDState(batch_tensors_with_same_shape=True)."
            )
        self._hook = _plain(hook if wrapper is None else wrapper(hook))
        self._state = state
        self._module: nn.Module | None = None
        # A module that is wrapped again, because parameters were unfrozen, keeps its state.
        self._made: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()

    def register(self, ddp: nn.parallel.DistributedDataParallel, module: nn.Module) -> GradientOperations:
        """Let a wrapper use this hook; return the operations on the gradients that it averages.

        The memory of earlier steps is dropped: it belongs to the buckets of an earlier wrapper.

        Raises:
            ConfigurationError: another module uses the state.
        """
        state = self._state
        if callable(state):
            if module not in self._made:
                self._made[module] = state()
            state = self._made[module]
        elif state is not None:
            if self._module is not None and self._module is not module:
                raise ConfigurationError(
                    f"a {type(module).__name__} and a {type(self._module).__name__} cannot share one ddp_comm_state: "
                    "give DDPStrategy a function that returns a new state for each module."
                )
            self._module = module
        ddp.register_comm_hook(state, self._hook)
        gradients = HookedGradients(state)
        gradients.discard()
        return gradients

    def release(self, module: nn.Module) -> None:
        """Let another module use the state."""
        if self._module is module:
            self._module = None


def _takes_one_matrix(hook: Hook) -> bool:
    """Whether the function that makes columns orthogonal, in the module of a PowerSGD hook, takes a single matrix."""
    try:
        sys.modules[hook.__module__]._orthogonalize(torch.eye(2))
    except AssertionError:
        return False
    return True


def _plain(hook: Hook) -> Hook:
    """Return a function for any callable: torch reads the name and the annotations of what it registers."""

    def average(state, bucket):  # type: ignore[no-untyped-def]
        return hook(state, bucket)

    return average


class HookedGradients(FullGradients):
    """The operations on gradients that a hook with a memory of earlier steps averages."""

    def __init__(self, state: Any) -> None:
        self._memories = [getattr(state, name) for name in _MEMORIES if isinstance(getattr(state, name, None), dict)]

    def discard(self) -> None:
        """Drop the memory: the error of a gradient that is not finite would make all later gradients non-finite."""
        for memory in self._memories:
            memory.clear()


# ---- ranks without a loss -----------------------------------------------------------------------------------------


class _UsedAdapter(StepAdapter):
    """Adds to every loss a parameter that is 0 and stays 0, so that each backward pass uses at least one parameter.

    A rank without a loss joins the reduction by it alone: DDP ends a reduction in the backward pass of a parameter.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        super().__init__(module)
        self.used = nn.Parameter(torch.zeros((), device=device))

    def forward(self, step: StepFunction, *args: Any, **kwargs: Any) -> Any:
        """Call ``step`` and let the parameter feed its loss."""
        output = step(*args, **kwargs)
        if isinstance(output, Tensor):
            return output + self.used if output.numel() == 1 else output
        if isinstance(output, Mapping) and isinstance(output.get("loss"), Tensor):
            return {**output, "loss": output["loss"] + self.used}
        return output


def _trained(module: nn.Module) -> list[Tensor]:
    return [each for each in module.parameters() if each.requires_grad]


def check_arguments(given: Mapping[str, Any]) -> None:
    """Refuse arguments that torch's ``DistributedDataParallel`` does not have, and those that phalanx sets.

    Raises:
        ConfigurationError: there is such an argument.
    """
    taken = [name for name in _TAKEN if name in given]
    if taken:
        raise ConfigurationError(f"DDPStrategy({', '.join(taken)}=...) is set by phalanx itself; leave it out.")
    own = [name for name in signature(DDPStrategy).parameters if name != "ddp_arguments"]
    theirs = [n for n in signature(nn.parallel.DistributedDataParallel).parameters if n not in {*_TAKEN, *_ELSEWHERE}]
    check_names("DDPStrategy", given, [*own, *theirs], _ELSEWHERE)


def find_unused_parameters(**ddp_arguments: Any) -> DDPStrategy:
    """Return ``ddp`` for models that leave parameters unused in a step."""
    return DDPStrategy(find_unused_parameters=True, **ddp_arguments)
