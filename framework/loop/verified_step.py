"""``VerifiedStep``: optimizer steps that are computed twice, and compared bit for bit.

A processor or a memory that computes wrongly says nothing (Dixit et al., Silent Data Corruptions at Scale, 2021). In
every n-th optimizer step:

    all ranks compare the weights and optimizer states that they hold in common
    run the passes of the window; hash the losses, and the gradients before and after their reduction
    undo what the passes have changed; run them again, with the same random numbers; hash again, the weights too
    all ranks agree on whether anything differed
    if so: run them once more; the result that two runs have in common counts, and the ranks that differed are named
    compute the update of local tensors twice, and compare it likewise
    the hooks at the end of the batch, which may save

Weights that change while no update runs, or that differ between ranks, cannot be repaired here. The run ends, and a
restart continues from an earlier snapshot or checkpoint.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..core.errors import ConfigurationError, CorruptionError
from ..core.optimizer_config import parameters_of
from ..core.torch_internals import tree_map
from ..data.accumulation_window import MicroBatches
from ..distributed.seed import Generators
from ..parallel.compilation import is_compiled
from ..parallel.parameter_names import canonical_names, names_of
from ..run.run import Run
from ..state.state_hashes import Hashes, as_numbers, first_difference, folded, hash_of, state_hashes
from ..window.passes import Passes
from .automatic_step import AutomaticStep
from .window_state import OptimizerCopy, WindowState

_MOST_RUNS = 3
_RESUME = "max_restarts, or ckpt_path='auto', resumes the run from an earlier snapshot or checkpoint."


class VerifiedStep:
    """Calls a step, and verifies the first optimizer step of a fit and every n-th one.

    Args:
        step: the step.
        every: the number of optimizer steps.
    """

    def __init__(self, step: AutomaticStep, every: int) -> None:
        self._step, self._run, self._every = step, step.run, every
        self._weights: Hashes = {}
        """Hashes of the weights before the step."""
        self._evidence = Evidence(step.run)
        self._runs: list[Hashes] = []
        self._drawn: Generators
        """The random generators after the first run."""
        self._is_repeated, self._is_first = False, True
        self._micro_batch: int | None = None
        """The size of micro-batches that was found, before the step."""
        # An engine's update contains collectives, and keeps no gradients.
        self._repeats_update = not step.strategy.traits.takes_one_optimizer and step.scaler is None

    def __call__(self, batches: MicroBatches, size: int, samples: Sequence[float] | None = None) -> bool:
        """Run a window of micro-batches; return False at the end of the epoch. Collective. See ``AutomaticStep``.

        Raises:
            CorruptionError: on all ranks; no two computations of the step agree, weights have changed without an
                update, or they differ between ranks.
            ConfigurationError: on all ranks; the first step computes other numbers each time.
        """
        step = self._step
        if self._run.progress.steps_reached % self._every and not self._is_first:
            return step(batches, size, samples)
        self._weights = self.compare_ranks()
        held, self._runs = _Held(batches), []
        apply, is_short = step.apply, step.takes_single
        self._micro_batch = self._size()
        step.accepts, step.takes_single, step.guard.waits = self._accepts, False, True
        if self._repeats_update:
            step.apply = self._twice(apply)
        try:
            while True:
                state, self._is_repeated = WindowState(step), False
                self._evidence = Evidence(self._run)
                with self._evidence.collecting(step.passes):
                    continues = step(held, size, samples)
                if not self._is_repeated:
                    break
                state.restore()
                step.updater.discard(step.optimizer)
        finally:
            step.accepts, step.apply, step.takes_single, step.guard.waits = None, apply, is_short, False
        self._is_first = False
        return continues

    # ---- the passes -------------------------------------------------------------------------------------------------

    def _accepts(self) -> bool:
        """Return whether the gradients of the newest run count; otherwise the passes run again. Collective."""
        runs = self._runs
        if self._size() != self._micro_batch:
            # A rank has run out of memory: sums over other micro-batches are rounded differently.
            return True
        runs.append(self._evidence.read(self._run.optimizers))
        if len(runs) > 1:
            changed = first_difference(self._weights, _together(self._read()))
            self._check_unchanged(self._on_ranks(changed))
        else:
            # Later runs draw less: the first one may compile, which draws too.
            self._drawn = Generators()
        self._is_repeated = not self._is_confirmed(runs)
        if not self._is_repeated:
            self._drawn.put_back()
        return not self._is_repeated

    def _is_confirmed(self, results: Sequence[Hashes]) -> bool:
        """Return whether the newest result is the same as an earlier one on all ranks. Collective.

        Raises:
            CorruptionError: on all ranks; too many results differ.
            ConfigurationError: likewise, in the first step.
        """
        for before in results[:-1]:
            if not any(differences := self._on_ranks(first_difference(before, results[-1]))):
                if len(results) > 2 and not self._is_first:
                    self._report(self._on_ranks(first_difference(results[0], results[1])))
                return True
        if len(results) == _MOST_RUNS:
            self._refuse(differences)
        return False

    def _size(self) -> int | None:
        windows = self._step.coming_windows
        return None if windows is None else windows.found_size

    def _check_unchanged(self, changed: Sequence[str | None]) -> None:
        if not any(changed):
            return
        if self._is_first:
            what = next(name for name in changed if name)
            raise ConfigurationError(
                f"verify_every repeats the passes of a step, and they change {what}: change weights after the update, "
                "such as in on_train_batch_end, or leave verify_every out."
            )
        raise CorruptionError(
            f"weights have changed at optimizer step {self._run.progress.global_step} without an update: "
            f"{self._named(changed)}. {_RESUME}"
        )

    def _report(self, differences: Sequence[str | None]) -> None:
        self._run.note(
            f"Optimizer step {self._run.progress.global_step} was computed wrongly once, and then twice with the same "
            f"result, which counts: {self._named(differences)} differed. Test that host's memory and processors."
        )

    def _refuse(self, differences: Sequence[str | None]) -> None:
        if self._is_first:
            what = next(name for name in differences if name)
            raise ConfigurationError(
                f"verify_every compares a step that is computed twice, and each time {what} is another one: keep no "
                "values between steps in attributes of the module that are not buffers, draw random numbers from the "
                "global generators, use deterministic kernels (torch.use_deterministic_algorithms), or leave "
                "verify_every out."
            )
        raise CorruptionError(
            f"optimizer step {self._run.progress.global_step} was computed {_MOST_RUNS} times with as many results: "
            f"{self._named(differences)} differed. {_RESUME}"
        )

    # ---- the update -------------------------------------------------------------------------------------------------

    def _twice(self, apply: Callable[[], bool]) -> Callable[[], bool]:
        """Return a function that computes an update until two results agree, at most three times."""

        def update() -> bool:
            copy, results = OptimizerCopy(self._step.optimizer), list[Hashes]()
            # Hooks before the update may log, and they and the optimizer may draw random numbers.
            generators, log, drawn = Generators(), self._run.train_log, list[Generators]()
            while True:
                logged = log.record()
                applied = apply()
                drawn.append(Generators())
                results.append(_together(self._read()))
                if self._is_confirmed(results):
                    drawn[0].put_back()
                    return applied
                copy.restore()
                generators.put_back()
                log.go_back(logged)

        return update

    # ---- ranks ------------------------------------------------------------------------------------------------------

    def compare_ranks(self) -> Hashes:
        """Compare the weights and optimizer states of ranks that hold the same; return their hashes. Collective.

        Raises:
            CorruptionError: on all ranks; they differ.
        """
        parts = self._read()
        world = self._run.world
        rows = world.all_gather_object([(place, folded(hashes)) for place, hashes in parts])
        groups: dict[int, dict[int, list[int]]] = {}
        for rank, row in enumerate(rows):
            for place, value in row:
                groups.setdefault(place, {}).setdefault(value, []).append(rank)
        odd = {place: kinds for place, kinds in groups.items() if len(kinds) > 1}
        if not odd:
            return _together(parts)
        everyone = world.all_gather_object(dict(parts))
        differences: list[str | None] = [None] * world.size
        for place, kinds in odd.items():
            most, *others = sorted(kinds.values(), key=len, reverse=True)
            for ranks in others:
                what = first_difference(everyone[most[0]][place], everyone[ranks[0]][place])
                # Of two kinds of equally many ranks neither is known to be right.
                for rank in ranks if len(ranks) < len(most) else [*most, *ranks]:
                    differences[rank] = what
        raise CorruptionError(
            f"ranks that hold the same weights differ before optimizer step {self._run.progress.global_step}: "
            f"{self._named(differences)}. {_RESUME}"
        )

    def _read(self) -> list[tuple[int, Hashes]]:
        """Return the hashes of the weights and of the optimizer state. Collective."""
        return state_hashes(self._run.strategy, self._run.module, self._run.optimizers)

    def _on_ranks(self, difference: str | None) -> list[str | None]:
        """Return what differs on each rank. Collective."""
        return self._run.world.all_gather_object(difference)

    def _named(self, differences: Sequence[str | None]) -> str:
        """Return what differed, on which ranks and hosts. Collective.

        A wrong gradient of one rank makes the average wrong on all: only ranks with the earliest difference are named.
        """
        hosts = self._run.world.all_gather_object(socket.gethostname())
        first = min(_order(each) for each in differences if each)
        ranks = [rank for rank, each in enumerate(differences) if each and _order(each) == first]
        what = differences[ranks[0]]
        return f"{what} on " + " and ".join(f"rank {rank} (host {hosts[rank]})" for rank in ranks)


def _together(parts: Sequence[tuple[int, Hashes]]) -> Hashes:
    return {name: value for _, hashes in parts for name, value in hashes.items()}


def _order(difference: str) -> int:
    return next(number for number, kind in enumerate(("the loss", "this rank's", "")) if difference.startswith(kind))


class _Held:
    """The micro-batches of a window, which can be iterated over again with the same random numbers."""

    def __init__(self, batches: MicroBatches) -> None:
        self._batches = batches
        self._read: list[tuple[Any, Generators]] = []
        self._begun: Generators | None = None

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        if self._begun is None:
            self._begun = Generators()
            for batch in self._batches:
                # The step may change the batch in place.
                self._read.append((_copied(batch), Generators()))
                yield batch
            return
        self._begun.put_back()
        for batch, generators in self._read:
            generators.put_back()
            yield _copied(batch)


def _copied(batch: Any) -> Any:
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch)


class Evidence:
    """Collects hashes in the passes of a window: of losses, of the gradients of this rank, of reduced gradients."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._losses: list[Tensor] = []
        self._own: dict[str, Tensor] = {}
        self._hooked: set[int] = set()

    def _note_loss(self, loss: Tensor) -> None:
        self._losses.append(hash_of(loss))

    @contextmanager
    def collecting(self, passes: Passes) -> Iterator[None]:
        """Take the losses of passes, and the gradients that they compute on this rank, before they are reduced.

        Hooks are added where a layer uses its parameters: strategies that shard weights replace them for that time.
        """
        module, before = self._run.module, passes.before
        passes.before = (*before, self._note_loss)
        with ExitStack() as hooks:
            hooks.callback(setattr, passes, "before", before)
            # Hooks would make torch compile the module again.
            for prefix, part in () if any(map(is_compiled, module.modules())) else module.named_modules():
                hook = partial(self._hook, hooks, f"{prefix}." if prefix else "")
                hooks.callback(part.register_forward_pre_hook(hook).remove)
            yield

    def _hook(self, hooks: ExitStack, prefix: str, part: nn.Module, inputs: Any) -> None:
        for name, parameter in part._parameters.items():
            if parameter is None or id(parameter) in self._hooked:
                continue
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                self._hooked.add(id(parameter))
                hooks.callback(parameter.register_hook(partial(self._take, prefix + name)).remove)

    def _take(self, name: str, gradient: Tensor) -> None:
        value = hash_of(gradient)
        before = self._own.get(name)
        # Of several micro-batches: the order matters, so that equal ones do not cancel.
        self._own[name] = value if before is None else before * 3 + value

    def read(self, optimizers: Sequence[Any]) -> Hashes:
        """Return the hashes of the window. Collective."""
        module, strategy = self._run.module, self._run.strategy
        names = names_of(module)
        found = {f"the loss of micro-batch {number}": loss for number, loss in enumerate(self._losses)}
        canonical = canonical_names(module)
        found |= {f"this rank's gradient of {canonical(name)}": value for name, value in self._own.items()}
        for parameter in (each for optimizer in optimizers for each in parameters_of(optimizer)):
            is_shard = isinstance(parameter, DTensor)
            gradient = parameter.grad if is_shard else strategy.gradients.full(parameter)
            if gradient is not None:
                found[f"the averaged gradient of {names.get(id(parameter), 'a parameter')}"] = hash_of(gradient)
        return as_numbers(found)
