"""Validation, test and prediction loops: every sample exactly once, on any number of ranks.

    for each loader:
        for each of this rank's batches:
            on_<stage>_batch_start -> <stage>_step -> on_<stage>_batch_end
    reduce metrics in one collective -> on_<stage>_epoch_end, which sees them -> on_<stage>_end

Ranks take full batches in turn, composed as one process would compose them, so that a metric has the same value for any
number of ranks. There are no collectives between batches, so ranks may have different numbers of batches. A rank that
has run out of batches answers the collectives that the user's code calls on the others. If the strategy's forward
passes contain collectives, it runs filler batches instead.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from ..data.common_stream import compare_streams
from ..data.evaluation_source import EvaluationSource, NumberedBatches
from ..diagnostics.isolated_step import isolated
from ..distributed.user_collectives import answer, varying
from ..metrics.metric_entry import Entry
from ..metrics.metric_log import MetricLog
from ..metrics.no_log import NoLog
from ..parallel.fresh_batches import fresh
from ..run.overrides import in_context, with_arity
from ..run.run import Run
from ..run.run_metrics import as_numbers
from .filler_batches import as_filler, in_rounds

_PREFIX = {"validate": "validation", "test": "test", "predict": "predict"}


@dataclass
class EvaluationPlan:
    """A stage, its loaders, and the number of batches of each loader, counted as in one process."""

    stage: str
    sources: Sequence[EvaluationSource]
    limits: Sequence[int | None]
    transfer: Callable[[Any, int], Any] | None
    """Moves a batch of a loader to the device; None if batches are not moved."""
    inference_mode: bool = True
    seen: dict[int, int] = field(default_factory=dict)
    """Batches of each loader that this rank has seen so far, in all evaluations of this plan."""

    noted: set[int | str] = field(default_factory=set)
    """The loaders that were reported as empty, and ``"ranks"`` once the ranks have compared their first batches."""

    @property
    def prefix(self) -> str:
        """The prefix of the names of the stage's hooks and step."""
        return _PREFIX[self.stage]


def evaluate(run: Run, plan: EvaluationPlan, evaluated: Callable[[], None] | None = None) -> list[dict[str, float]]:
    """Evaluate all loaders; return one dict of metrics per loader. Collective.

    ``evaluated`` is called once the metrics are known, before the hooks at the end.
    """
    log = MetricLog(plan.stage, run.world)
    several = len(plan.sources) > 1
    with run.heartbeat.section("evaluation"), evaluating(run, plan):
        with logging_to(run, log):
            _start(run, plan)
            for index, source in enumerate(plan.sources):
                log.loader = index if several else None
                log.in_step = True
                _run_loader(run, plan, source, index, metrics=StepMetrics(run, plan.seen, log, index))
                log.in_step = False
            log.loader = None
            _report_empty(run, plan)
            _compare_ranks(run, plan)
            run.heartbeat.mark_sync_point()
            reduced = run.metrics.publish_epoch(
                log, run.progress, run.hooks(f"on_{plan.prefix}_epoch_end"), run.sanity_checking
            )
        if evaluated is not None:
            evaluated()
        with logging_to(run, NoLog(f"on_{plan.prefix}_end", f"use on_{plan.prefix}_epoch_end")):
            before, after = run.hooks_around(f"on_{plan.prefix}_end")
            for hook in (*before, *after):
                hook()
    return [_of_loader(reduced, index) for index in range(len(plan.sources))]


def predict(run: Run, plan: EvaluationPlan, keep: bool = True) -> list[list[Any]]:
    """Predict over all loaders; return the outputs of all batches per loader, in the dataset's order. Collective.

    With ``keep`` False the outputs are released once the hooks have seen them.
    """
    outputs: list[list[tuple[int, Any]]] = [[] for _ in plan.sources]
    # One entry per loader: the dataset indices of this rank's newest batch, or None if they are unknown.
    run.batch_indices[:] = [None for _ in plan.sources]
    refusal = NoLog("predict", "return it from predict_step, or hand it to self.logger")
    with run.heartbeat.section("evaluation"), evaluating(run, plan), logging_to(run, refusal):
        _start(run, plan)
        for index, source in enumerate(plan.sources):
            source.record_indices()
            _run_loader(run, plan, source, index, outputs=outputs[index] if keep else None)
        run.heartbeat.mark_sync_point()
        _compare_ranks(run, plan)
        mine = outputs if run.world.counts_data else [[] for _ in plan.sources]
        results = _in_order(run.world.all_gather_object(mine)) if keep else [[] for _ in plan.sources]
        run.call("on_predict_epoch_end")
        run.call("on_predict_end")
    return results


def _in_order(ranks: list[list[list[tuple[int, Any]]]]) -> list[list[Any]]:
    """Return the outputs of each loader in the order of batch numbers, from the numbered outputs of all ranks."""
    loaders = [[item for rank in ranks for item in rank[index]] for index in range(len(ranks[0]))]
    return [[output for _, output in sorted(loader, key=itemgetter(0))] for loader in loaders]


def _start(run: Run, plan: EvaluationPlan) -> None:
    run.call(f"on_{plan.prefix}_start")
    run.call(f"on_{plan.prefix}_epoch_start")


def _run_loader(
    run: Run,
    plan: EvaluationPlan,
    source: EvaluationSource,
    index: int,
    metrics: StepMetrics | None = None,
    outputs: list[tuple[int, Any]] | None = None,
) -> None:
    """Run this rank's batches of a loader; record metrics and append the numbered outputs if these are given."""
    names = ("batch", "batch_idx", "dataloader_idx")
    # Like Lightning: a step that takes any arguments gets no dataloader_idx where there is one loader.
    given = len(names) - (len(plan.sources) == 1)
    context = run.fabric.forward_context()
    user_step = with_arity(getattr(run.module, f"{plan.prefix}_step"), names, given)
    step = run.strategy.route(in_context(user_step, context), training=False)
    batch_start = [with_arity(hook, names, given) for hook in run.hooks(f"on_{plan.prefix}_batch_start")]
    batch_end = [with_arity(hook, ("outputs", *names), given + 1) for hook in run.hooks(f"on_{plan.prefix}_batch_end")]
    numbered = source.start(epoch=run.progress.epoch, limit=plan.limits[index])
    fills = run.world.size > 1 and run.traits.forward_has_collectives
    if fills:
        numbered = in_rounds(
            numbered, _certain_count(source, plan.limits[index]), run.world, _idle_step(run, plan, step, index)
        )
    if metrics is None:
        numbered = _with_indices(run, source, index, numbered)
    phase = run.heartbeat.phase
    # ``batch_idx`` counts this rank's own batches, as the user's step expects.
    for batch_index, (place, batch) in enumerate(numbered):
        phase[0] += 1
        if plan.transfer is not None:
            batch = plan.transfer(batch, index)
        if metrics is not None:
            metrics.begin(batch)
        for hook in batch_start:
            hook(batch, batch_index, index)
        output = step(batch, batch_index, index)
        for hook in batch_end:
            hook(output, batch, batch_index, index)
        if metrics is not None:
            metrics.record()
        if outputs is not None:
            outputs.append((place, on_host(output)))
    if metrics is not None:
        metrics.flush()
    if run.world.size > 1 and not fills:
        run.heartbeat.mark_sync_point()
        answer(run.world)


def _compare_ranks(run: Run, plan: EvaluationPlan) -> None:
    """Report a loader from which the ranks read different batches, once. Collective."""
    if run.world.size == 1 or "ranks" in plan.noted:
        return
    plan.noted.add("ranks")
    for source in plan.sources:
        if source.first_batches():
            compare_streams(run.world, source, run.note)


def _report_empty(run: Run, plan: EvaluationPlan) -> None:
    """Report a loader without batches, once. Rank 0, which shows the message, evaluates the first batch of each."""
    for index, source in enumerate(plan.sources):
        if index in plan.noted or plan.seen.get(index) or (plan.limits[index] == 0 and source.len_batches()):
            continue
        plan.noted.add(index)
        run.note(
            f"{source.name} has no batches, so there are no {plan.prefix} steps and no metrics of it: check the length "
            "of the dataset, the batch size and drop_last."
        )


def _with_indices(run: Run, source: EvaluationSource, index: int, numbered: NumberedBatches) -> NumberedBatches:
    """Yield a rank's batches; before each, publish the dataset indices of its samples to the callbacks."""
    for item in numbered:
        run.batch_indices[index] = source.take_indices()
        yield item


def _certain_count(source: EvaluationSource, limit: int | None) -> int | None:
    """Return the number of batches of a rank, or None if only the loader's own length is known."""
    return source.len_local(limit) if source.counts_exactly else None


def _idle_step(run: Run, plan: EvaluationPlan, step: Callable[..., Any], index: int) -> Callable[[Any], None]:
    """Return a function that runs a step on a batch and discards its output and logs. Collective if the step is."""

    def idle(batch: Any) -> None:
        with as_filler(run), isolated(run.module):
            batch = fresh(batch)
            step(batch if plan.transfer is None else plan.transfer(batch, index), 0, index)

    return idle


def on_host(output: Any) -> Any:
    """Return the output of a step with its tensors moved to host memory, to be retained."""
    from lightning_utilities.core.apply_func import apply_to_collection

    return apply_to_collection(output, Tensor, _kept)


def _kept(tensor: Tensor) -> Tensor:
    """Return a tensor to store on the host, copied if it is a small view of a larger storage."""
    tensor = tensor.detach().cpu()
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def _of_loader(reduced: dict[Entry, float], index: int) -> dict[str, float]:
    """Return the metrics of one loader: those logged for it, and those that belong to no loader."""
    return {entry.epoch_name: value for entry, value in reduced.items() if entry.loader in (None, index)}


@contextmanager
def logging_to(run: Run, log: MetricLog | NoLog) -> Generator[None, None, None]:
    """Make ``self.log`` write to another log."""
    kept = run.module.log_to(log)
    if isinstance(log, MetricLog):
        run.metrics.include(log)
    try:
        yield
    finally:
        run.module.log_to(kept)
        if isinstance(log, MetricLog):
            run.metrics.exclude(log)


# Number of batches whose step values wait on the device before they are read for the loggers: each read synchronizes.
_STEPS_WAITING = 256


class StepMetrics:
    """Values logged with ``on_step=True`` in an evaluation, for the loggers, indexed by the number of batches seen.

    Values are read in groups, since reading a value from a device waits for the device.
    """

    def __init__(self, run: Run, seen: dict[int, int], log: MetricLog, loader: int) -> None:
        self._log = log
        self._run = run
        strategy = run.strategy
        self._part = strategy.part
        self._seen = seen
        self._loader = loader
        self._waiting: list[tuple[int, dict[str, Any]]] = []

    def begin(self, batch: Any) -> None:
        """Weight the values that the step logs by this batch."""
        self._log.begin_batch(batch, self._part.share)
        self._log.fed.add(self._log.loader)

    def record(self) -> None:
        """Record the step values of a batch."""
        seen = self._seen[self._loader] = self._seen.get(self._loader, 0) + 1
        if (values := self._log.step_values("logger")) and not self._run.sanity_checking:
            self._waiting.append((seen, values))
            if len(self._waiting) >= _STEPS_WAITING:
                self.flush()

    def flush(self) -> None:
        """Send the recorded values to the loggers."""
        for step, values in self._waiting:
            self._run.loggers.log_metrics({**as_numbers(values), "epoch": self._run.progress.epoch}, step)
        self._waiting = []


@contextmanager
def evaluating(run: Run, plan: EvaluationPlan) -> Generator[None, None, None]:
    """Prepare the module for evaluation: the buffers of one rank, and averaged weights if there are any."""
    run.strategy.sync_buffers(run.module)
    with varying(run.world), run.averages.evaluated(), in_evaluation_mode(run, plan.prefix, plan.inference_mode):
        yield


@contextmanager
def in_evaluation_mode(run: Run, prefix: str, inference_mode: bool) -> Generator[None, None, None]:
    """Put the module in evaluation mode without gradients; on exit restore the mode of each submodule."""
    modes = {part: part.training for part in run.module.modules()}
    own_eval = run.module_hook(f"on_{prefix}_model_eval")
    for hook in own_eval:
        hook()
    if not own_eval:
        run.module.eval()
    # A forward pass that gathers parameters leaves inference mode, and could not update the state of a metric that was
    # reset in it. Layers of a precision may not support it either: torchao's raise NotImplementedError.
    supported = not run.traits.forward_has_collectives and not run.precision.replaces_layers
    inference = inference_mode and supported
    context = torch.inference_mode() if inference else torch.no_grad()
    ordinary = [each for each in run.module.parameters() if not each.is_inference()] if inference else []
    run.evaluating = True
    try:
        with context:
            yield
    finally:
        if inference:
            _to_training(ordinary, run.module)
        run.evaluating = False
        own_train = run.module_hook(f"on_{prefix}_model_train")
        for hook in own_train:
            hook()
        if not own_train:
            for part, mode in modes.items():
                part.training = mode


def _to_training(parameters: Sequence[nn.Parameter], module: nn.Module) -> None:
    """Make ordinary tensors, which training can use, of data of parameters and buffers set in inference mode."""
    for parameter in parameters:
        if parameter.is_inference():
            parameter.data = parameter.detach().clone()
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_inference() and not buffer.is_meta:
                part._buffers[name] = buffer.clone()
