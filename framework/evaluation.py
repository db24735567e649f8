"""Validation, test and prediction: every sample exactly once, on any number of ranks.

    for each loader:
        for each of this rank's batches:
            on_<stage>_batch_start -> <stage>_step -> on_<stage>_batch_end
    on_<stage>_epoch_end; metrics are reduced in one exchange; on_<stage>_end

Ranks take whole batches in turn, composed as one process would compose them, so that a metric is the same number
however many ranks there are. Nothing is exchanged between batches, so ranks may have different numbers of them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from .evaluation_loaders import EvaluationSource
from .log import MetricLog
from .run import Run
from .steps import in_context, with_arity

_PREFIX = {"validate": "validation", "test": "test", "predict": "predict"}


@dataclass
class EvaluationPlan:
    """What to evaluate: a stage, its loaders and how many batches of each, counted as in one process."""

    stage: str
    sources: Sequence[EvaluationSource]
    limits: Sequence[int | None]
    transfer: Callable[[Any, int], Any] | None
    inference_mode: bool = True

    @property
    def prefix(self) -> str:
        """How the stage's hooks and step are named."""
        return _PREFIX[self.stage]


def evaluate(run: Run, plan: EvaluationPlan) -> list[dict[str, float]]:
    """Evaluate all loaders; return one dict of metrics for each. Collective."""
    log = MetricLog(plan.stage, run.world)
    reduced: dict[str, float] = {}
    with evaluating(run, plan), logging_to(run, log):
        _start(run, plan)
        for index, source in enumerate(plan.sources):
            several = len(plan.sources) > 1
            log.suffix = f"/dataloader_idx_{index}" if several else ""
            log.in_step = True
            _run_loader(run, plan, source, index, log)
            log.in_step = False
        log.suffix = ""
        run.call(f"on_{plan.prefix}_epoch_end")
        reduced = run.publish_epoch(log)
        before, after = run.hooks_around(f"on_{plan.prefix}_end")
        for hook in (*before, *after):
            hook()
    return [_of_loader(reduced, index, len(plan.sources)) for index in range(len(plan.sources))]


def predict(run: Run, plan: EvaluationPlan) -> list[list[Any]]:
    """Predict over all loaders; return for each the outputs of all batches, in the dataset's order. Collective."""
    results: list[list[Any]] = []
    with evaluating(run, plan), logging_to(run, None):
        _start(run, plan)
        for index, source in enumerate(plan.sources):
            outputs: list[tuple[int, Any]] = []
            _run_loader(run, plan, source, index, None, outputs)
            gathered = [item for rank in run.world.all_gather_object(outputs) for item in rank]
            results.append([output for _, output in sorted(gathered, key=lambda item: item[0])])
        run.call("on_predict_epoch_end")
        run.call("on_predict_end")
    return results


def _start(run: Run, plan: EvaluationPlan) -> None:
    run.call(f"on_{plan.prefix}_start")
    run.call(f"on_{plan.prefix}_epoch_start")


def _run_loader(
    run: Run,
    plan: EvaluationPlan,
    source: EvaluationSource,
    index: int,
    log: MetricLog | None,
    outputs: list[tuple[int, Any]] | None = None,
) -> None:
    names = ("batch", "batch_idx", "dataloader_idx")
    context = run.fabric.precision.context(run.world.device.type)
    user_step = with_arity(getattr(run.module, f"{plan.prefix}_step"), names)
    step = run.fabric.strategy.route(in_context(user_step, context), training=False)
    batch_start = [with_arity(hook, names) for hook in run.hooks(f"on_{plan.prefix}_batch_start")]
    batch_end = [with_arity(hook, ("outputs", *names)) for hook in run.hooks(f"on_{plan.prefix}_batch_end")]
    # By position of the rank's own batches, as the user's step would count them.
    for batch_index, (place, batch) in enumerate(source.start(limit=plan.limits[index])):
        if plan.transfer is not None:
            batch = plan.transfer(batch, index)
        if log is not None:
            log.batch, log.items = batch, None
            log.batches += 1
        for hook in batch_start:
            hook(batch, batch_index, index)
        output = step(batch, batch_index, index)
        for hook in batch_end:
            hook(output, batch, batch_index, index)
        if outputs is not None:
            outputs.append((place, apply_to_collection(output, Tensor, lambda tensor: tensor.detach().cpu())))


def _of_loader(reduced: dict[str, float], index: int, count: int) -> dict[str, float]:
    """Return the metrics of one loader: those with its suffix, and those that belong to none."""
    if count == 1:
        return reduced
    mine = f"/dataloader_idx_{index}"
    return {name: value for name, value in reduced.items() if name.endswith(mine) or "/dataloader_idx_" not in name}


@contextmanager
def evaluating(run: Run, plan: EvaluationPlan) -> Generator[None, None, None]:
    """Put the module in evaluation mode without gradients; afterwards each part is in the mode it was in."""
    modes = {part: part.training for part in run.module.modules()}
    run.fabric.strategy.sync_buffers(run.module)
    own_eval = run.module_hook(f"on_{plan.prefix}_model_eval")
    for hook in own_eval:
        hook()
    if not own_eval:
        run.module.eval()
    context = torch.inference_mode() if plan.inference_mode else torch.no_grad()
    run.evaluating = True
    try:
        with context:
            yield
    finally:
        run.evaluating = False
        own_train = run.module_hook(f"on_{plan.prefix}_model_train")
        for hook in own_train:
            hook()
        if not own_train:
            for part, mode in modes.items():
                part.training = mode


@contextmanager
def logging_to(run: Run, log: MetricLog | None) -> Generator[None, None, None]:
    """Let ``self.log`` write to another log; None lets nothing be logged."""
    kept = run.module.__dict__["_metric_log"]
    run.module.__dict__["_metric_log"] = log
    try:
        yield
    finally:
        run.module.__dict__["_metric_log"] = kept
