"""One rank of the fits that ``sharded.py`` measures; rank 0 prints the results. Run under torchrun."""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import phalanx.strategies
from phalanx import Trainer, TrainModule

from .gpt import GPT, batches, next_token_loss
from .ranks import communication

WARM_UP = 3
Fit = Callable[[int, list[float]], None]


class Task(TrainModule):
    """The small GPT. Records the start time of each step."""

    def __init__(self, marks: list[float]) -> None:
        super().__init__()
        self.gpt = GPT()
        self.marks = marks

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the loss."""
        self.marks.append(time.perf_counter())
        return next_token_loss(self.gpt, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(strategy: str, steps: int, marks: list[float], window: int = 1) -> None:
    """Train with a Trainer."""
    with TemporaryDirectory() as directory:
        trainer = Trainer(
            strategy=_built(strategy, Path(directory)),
            devices=2,
            max_steps=steps,
            accumulate_grad_batches=window,
            barebones=True,
        )
        trainer.fit(Task(marks), batches(2 * steps * window))


def _built(strategy: str, directory: Path) -> Any:
    if strategy != "zero3-nvme":
        return strategy
    return phalanx.strategies.DeepSpeedStrategy(
        stage=3, offload_optimizer="nvme", offload_parameters="nvme", nvme_path=directory
    )


def fsdp_by_hand(steps: int, marks: list[float]) -> None:
    """Train with ``fully_shard``, as in its documentation."""
    from torch.distributed.fsdp import fully_shard

    model = GPT()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in batches(2 * steps)[dist.get_rank() :: 2]:
        marks.append(time.perf_counter())
        optimizer.zero_grad()
        next_token_loss(model, batch).backward()
        optimizer.step()


def zero2_by_hand(steps: int, marks: list[float]) -> None:
    """Train with DeepSpeed's engine, with the config and the optimizer that phalanx passes to it."""
    import deepspeed

    from phalanx.framework.core.precision import resolve_precision
    from phalanx.strategies.deepspeed.arguments import resolve_options
    from phalanx.strategies.deepspeed.config import engine_config

    options = resolve_options(stage=2)
    model = GPT()
    elements = sum(parameter.numel() for parameter in model.parameters())
    config = engine_config(options, resolve_precision("32-true"), 2, elements)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    for batch in batches(2 * steps)[dist.get_rank() :: 2]:
        marks.append(time.perf_counter())
        engine.backward(next_token_loss(engine, batch))
        engine.step()
    engine.destroy()


def timed(run: Fit, steps: int) -> float:
    """Return the median seconds of a step."""
    marks: list[float] = []
    run(steps, marks)
    marks = marks[WARM_UP:]
    return statistics.median(after - before for before, after in itertools.pairwise(marks))


@contextmanager
def _quiet() -> Iterator[None]:
    """Send what libraries print to stderr, so that stdout has only the result."""
    kept, sys.stdout = sys.stdout, sys.stderr
    try:
        yield
    finally:
        sys.stdout = kept


def main() -> None:
    what, rounds, steps, *names = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    with _quiet():
        if what == "count":
            for name in names:
                fit(name, 2, [])
                found[name] = [
                    communication(partial(fit, name, count, [], window)) for window in (1, 4) for count in (2, 6)
                ]
        else:
            hand = {"fsdp": fsdp_by_hand, "zero2": zero2_by_hand}
            for name in names:
                sides: tuple[Fit, Fit] = (hand[name], partial(fit, name))
                found[name] = [[timed(side, int(steps)) for side in sides] for _ in range(int(rounds))]
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
