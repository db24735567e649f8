"""The schedules of pipelines beside torch's own use of them: what each rank computes and sends, and how long it waits.

    python tests/pipeline_table.py                    two ranks, windows of 8 micro-batches
    python tests/pipeline_table.py --ranks 4 --window 16
    python tests/pipeline_table.py --write docs/...   and into a page, between its two marks

For each schedule the same model is trained for two windows by ``PipelineStrategy``, and as torch's documentation shows:
a module for each stage, written by hand, and ``schedule.step``. In the second window both are observed: the actions of
each rank in their order, and the messages that it sends to other stages. From the actions follows the bubble, the part
of the time in which ranks wait, if each forward pass of a stage takes as long as the computation of the gradients of
its inputs, or of its weights. The bubble is computed by the published formulas too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from language_model import LENGTH, VOCABULARY, LanguageModel, token_loader, tokens
from marked_pages import write_table
from models import silent_trainer
from ranks import close_pools, run_on_ranks
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage, schedules as torch_schedules

from phalanx.strategies import PipelineStrategy

ROWS = 4
# Name here, class of torch, stages of each rank, whether they form a V.
SCHEDULES = {
    "gpipe": ("ScheduleGPipe", 1, False),
    "1f1b": ("Schedule1F1B", 1, False),
    "interleaved-1f1b": ("ScheduleInterleaved1F1B", 2, False),
    "zero-bubble": ("ScheduleInterleavedZeroBubble", 1, False),
    "zero-bubble-v": ("ScheduleZBVZeroBubble", 2, True),
}
Action = tuple[str, int, int]
"""Forward (F), backward (B), or the parts of a backward pass for inputs (I) and weights (W); stage; micro-batch."""


@dataclass
class Observed:
    """One rank in one window."""

    actions: list[Action] = field(default_factory=list)
    messages: int = 0
    sent_bytes: int = 0

    @property
    def first_stage(self) -> int:
        """The first stage of the rank, by which ranks are compared."""
        return min(stage for _, stage, _ in self.actions)


@contextmanager
def observed(seen: Observed) -> Iterator[None]:
    """Record what the stages of this rank do."""
    names = ["forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk", "get_fwd_send_ops"]
    plain = {name: getattr(PipelineStage, name) for name in [*names, "get_bwd_send_ops"]}

    def record(letter: str, name: str) -> Any:
        def call(stage: Any, number: int, *args: Any, **kwargs: Any) -> Any:
            part = letter if letter != "B" or kwargs.get("full_backward", True) else "I"
            seen.actions.append((part, stage.stage_index, number))
            return plain[name](stage, number, *args, **kwargs)

        return call

    def count(name: str) -> Any:
        def call(stage: Any, number: int) -> Any:
            operations = plain[name](stage, number)
            seen.messages += len(operations)
            seen.sent_bytes += sum(each.tensor.numel() * each.tensor.element_size() for each in operations)
            return operations

        return call

    changed = {name: record(letter, name) for letter, name in zip("FBW", names, strict=False)}
    changed |= {name: count(name) for name in ("get_fwd_send_ops", "get_bwd_send_ops")}
    for name, method in changed.items():
        setattr(PipelineStage, name, method)
    try:
        yield
    finally:
        for name, method in plain.items():
            setattr(PipelineStage, name, method)


# ---- the two ways of training --------------------------------------------------------------------------------------


class SecondWindow(LanguageModel):
    """Is observed from the start of its second window on."""

    def __init__(self, blocks: int, window: int, stack: Any, seen: Observed) -> None:
        super().__init__(blocks)
        # No attributes that hold what is observed, which would become those of the last stage on all ranks.
        self.window = window
        self.observe: Callable[[], Any] = lambda: stack.enter_context(observed(seen))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.window:
            self.observe()


def by_strategy(schedule: str, blocks: int, window: int) -> Observed:
    seen = Observed()
    with ExitStack() as stack:
        module = SecondWindow(blocks, window, stack, seen)
        strategy = PipelineStrategy(schedule)
        trainer = silent_trainer(
            devices=dist.get_world_size(), strategy=strategy, max_steps=2, accumulate_grad_batches=window
        )
        trainer.fit(module, token_loader(2 * window * ROWS, batch_size=ROWS))
    return seen


class HandStage(nn.Module):
    """A stage as one writes it for torch's schedules."""

    def __init__(self, model: LanguageModel, stage: int, stages: int) -> None:
        super().__init__()
        size = len(model.blocks) // stages
        self.blocks = nn.Sequential(*list(model.blocks)[stage * size : (stage + 1) * size])
        is_first, is_last = stage == 0, stage == stages - 1
        self.before = nn.ModuleList([model.embed, model.positions] if is_first else [])
        self.after = nn.ModuleList([model.norm, model.head] if is_last else [])

    def forward(self, x: Tensor) -> Tensor:
        if len(self.before):
            x = self.before[0](x) + self.before[1](torch.arange(LENGTH))
        x = self.blocks(x)
        for part in self.after:
            x = part(x)
        return x


def loss_of(logits: Tensor, rows: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), rows[:, 1:].reshape(-1))


def by_torch(schedule: str, blocks: int, window: int) -> Observed:
    name, per_rank, is_v = SCHEDULES[schedule]
    rank, ranks = dist.get_rank(), dist.get_world_size()
    count = ranks * per_rank
    own = [stage for stage in range(count) if _rank_of(stage, ranks, is_v) == rank]
    model, seen = LanguageModel(blocks), Observed()
    stages = [PipelineStage(HandStage(model, each, count), each, count, torch.device("cpu")) for each in own]
    made = getattr(pipelining, name, None) or getattr(torch_schedules, name)
    several = issubclass(made, torch_schedules.PipelineScheduleMulti)
    run = made(stages if several else stages[0], window, loss_fn=loss_of)
    for number, rows in enumerate(tokens(2 * window * ROWS).split(window * ROWS)):
        arguments = (rows,) if 0 in own else ()
        target = rows if count - 1 in own else None
        if number == 0:
            run.step(*arguments, target=target)
            continue
        with observed(seen):
            run.step(*arguments, target=target)
    return seen


def _rank_of(stage: int, ranks: int, is_v: bool) -> int:
    place = stage % ranks
    return ranks - 1 - place if is_v and stage // ranks else place


# ---- the bubble ----------------------------------------------------------------------------------------------------


def bubble(ranks: Sequence[Observed]) -> float:
    """Return the part of the time in which ranks wait, from their actions, by running them as early as possible."""
    lists = [list(each.actions) for each in ranks]
    last = max(stage for actions in lists for _, stage, _ in actions)
    done: dict[Action, float] = {}
    clocks, places = [0.0] * len(lists), [0] * len(lists)
    while any(place < len(actions) for place, actions in zip(places, lists, strict=True)):
        moved = False
        for rank, actions in enumerate(lists):
            while places[rank] < len(actions):
                action = actions[places[rank]]
                ready = _ready(action, last, done)
                if ready is None:
                    break
                kind, stage, number = action
                clocks[rank] = max(clocks[rank], ready) + (2.0 if kind == "B" else 1.0)
                done["G" if kind in "BI" else kind, stage, number] = clocks[rank]
                places[rank] += 1
                moved = True
        assert moved, "the actions wait for one another"
    busy = sum(2.0 if kind == "B" else 1.0 for actions in lists for kind, _, _ in actions)
    return 1.0 - busy / (len(lists) * max(clocks))


def _ready(action: Action, last: int, done: dict[Action, float]) -> float | None:
    """Return when the inputs of an action are there; None if not yet. ``G`` are gradients of inputs."""
    kind, stage, number = action
    if kind == "F":
        return 0.0 if stage == 0 else done.get(("F", stage - 1, number))
    if kind == "W":
        return done.get(("G", stage, number))
    return done.get(("F", stage, number)) if stage == last else done.get(("G", stage + 1, number))


def formula(schedule: str, ranks: int, window: int) -> float:
    """Return the bubble of the papers, in which a backward pass takes twice as long as a forward pass."""
    if schedule in ("gpipe", "1f1b"):
        return (ranks - 1) / (window + ranks - 1)
    if schedule == "interleaved-1f1b":
        return (ranks - 1) / (2 * window + ranks - 1)
    if schedule == "zero-bubble":
        # Of the 3 (p - 1) units that 1F1B waits, the gradients of weights fill 2 (p - 1).
        return (ranks - 1) / (3 * window + ranks - 1)
    # Only until the first hidden states arrive: a rank has two stages of 3 units for each micro-batch.
    return (ranks - 1) / (6 * window + ranks - 1)


@dataclass(frozen=True)
class Row:
    """A schedule in both ways: actions, messages and bytes of each rank, in the order of their first stages."""

    ours: list[Observed]
    torchs: list[Observed]


def measured(schedule: str, ranks: int, window: int) -> Row:
    """Return both ways of a schedule."""
    blocks = ranks * 2
    ours = sorted(run_on_ranks(ranks, by_strategy, schedule, blocks, window), key=lambda each: each.first_stage)
    torchs = sorted(run_on_ranks(ranks, by_torch, schedule, blocks, window), key=lambda each: each.first_stage)
    return Row(ours, torchs)


def table(ranks: int, window: int) -> str:
    """Return the table as Markdown."""
    lines = [
        f"Messages and bubbles in one optimizer step with {ranks} processes and {window} micro-batches:",
        "",
        "| schedule | messages in PyTorch | messages in phalanx "
        "| size of messages in PyTorch (KiB) | size of messages in phalanx (KiB) "
        "| bubble by formula | bubble in PyTorch | bubble in phalanx |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for schedule in SCHEDULES:
        row = measured(schedule, ranks, window)
        cells = [str(sum(each.messages for each in side)) for side in (row.torchs, row.ours)]
        cells += [f"{sum(each.sent_bytes for each in side) / 1024:.0f}" for side in (row.torchs, row.ours)]
        cells.append(f"{formula(schedule, ranks, window):.3f}")
        cells += [f"{bubble(side):.3f}" for side in (row.torchs, row.ours)]
        lines.append(f"| `{schedule}` | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--window", type=int, default=8)
    parser.add_argument("--write", type=Path, help="page to write the table into")
    chosen = parser.parse_args()
    try:
        text = table(chosen.ranks, chosen.window)
    finally:
        close_pools()
    print(text)
    if chosen.write is not None:
        write_table(chosen.write, "pipeline table", text)
    return 0


if __name__ == "__main__":
    # Ranks find a function by the name of its module, which is not that of a program.
    import pipeline_table

    sys.exit(pipeline_table.main())
