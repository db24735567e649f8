"""The table of rehearsals: the peak memory and the collectives of a step, rehearsed in one process and on real ranks.

    python tests/rehearsal_table.py                    every row, as a table
    python tests/rehearsal_table.py --write docs/...   and into a page, between its two marks

Real ranks train two optimizer steps with clipping under a Trainer, while every operation of torch is watched.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from language_model import attention
from live_memory import LiveMemory
from marked_pages import write_table
from models import silent_trainer
from ranks import close_pools, over_gloo, run_on_ranks
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from phalanx import TrainModule
from phalanx.callbacks import LambdaCallback
from phalanx.framework.core.degrees import resolve_degrees
from phalanx.framework.core.precision import resolve_precision
from phalanx.framework.core.registry import STRATEGIES
from phalanx.framework.rehearsal.one_rank import Part, Rehearsed, rehearse

WORDS, WIDTH, HEADS, LENGTH, ROWS, BLOCKS = 64, 64, 4, 32, 4, 4
EXPERTS, EXPERT_ROWS = 8, 7
CLIP, TOLERANCE = 0.3, 0.05
# The kinds of collectives, by parts of the names of torch's operators.
_KINDS = {
    "reduce_scatter": "reduce-scatter", "allgather": "all-gather", "all_gather": "all-gather",
    "allreduce": "all-reduce", "all_reduce": "all-reduce", "alltoall": "all-to-all", "all_to_all": "all-to-all",
    "broadcast": "broadcast", "send": "send",
}  # fmt: skip


class Experts(nn.Module):
    """Perceptrons, stacked by expert."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.num_experts = count
        self.widen = nn.Parameter(torch.randn(count, WIDTH, 2 * WIDTH) / 8)
        self.narrow = nn.Parameter(torch.randn(count, 2 * WIDTH, WIDTH) / 11)

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        mixed = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            token, place = (index == expert).nonzero(as_tuple=True)
            narrowed = nn.functional.gelu(hidden[token] @ self.widen[expert]) @ self.narrow[expert]
            mixed = mixed.index_add(0, token, narrowed * weights[token, place, None])
        return mixed


class Mixture(nn.Module):
    """Two experts for each token: those of a pair, by its number among all pairs."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, experts, bias=False), Experts(experts)
        pairs = torch.combinations(torch.arange(experts))
        self.register_buffer("preferred", torch.zeros(len(pairs), experts).scatter(1, pairs, 100.0))

    def forward(self, x: Tensor, pairs: Tensor) -> Tensor:
        hidden, preferred = x.flatten(0, -2), self.get_buffer("preferred")
        scores = self.router(hidden) + preferred[pairs.flatten() % len(preferred)]
        chosen, index = scores.topk(2)
        mixed: Tensor = self.experts(hidden, index, chosen.softmax(-1))
        return mixed.view_as(x)


class Block(nn.Module):
    """Causal attention and a perceptron, or a mixture of them."""

    def __init__(self, experts: int = 0) -> None:
        super().__init__()
        self.norm, self.norm_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.project = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        if experts:
            self.mixture = Mixture(experts)
        else:
            self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, pairs: Tensor | None = None) -> Tensor:
        x = x + attention(self, self.norm(x), WIDTH // HEADS)
        normed = self.norm_mlp(x)
        if pairs is None:
            added: Tensor = self.narrow(nn.functional.gelu(self.widen(normed)))
        else:
            added = self.mixture(normed, pairs)
        return x + added


class Model(TrainModule):
    """Predicts the next token."""

    def __init__(self, experts: int = 0) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(experts) for _ in range(BLOCKS))
        self.head, self.experts = nn.Linear(WIDTH, WORDS), experts

    def cut_sequences(self, batch: Any, part: Any) -> Any:
        tokens, targets = batch
        return part(tokens), part(targets), part.positions(tokens)

    def batch_weight(self, batch: Any) -> int:
        return int(batch[1].numel())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets, positions = batch
        x = self.embed(tokens) + self.places(positions)
        # Every pair of experts equally often, also in the parts of sequences.
        pairs = (positions * len(tokens) + torch.arange(len(tokens))[:, None],) if self.experts else ()
        for block in self.blocks:
            x = block(x, *pairs)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())

    def configure_tensor_parallel(self, mesh: Any) -> dict[str, Any]:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        columns: tuple[str, ...] = ("query", "key", "value")
        rows: tuple[str, ...] = ("project",)
        if not self.experts:
            columns, rows = (*columns, "widen"), (*rows, "narrow")
        plan: dict[str, Any] = {f"blocks.*.{name}": ColwiseParallel() for name in columns}
        return plan | {f"blocks.*.{name}": RowwiseParallel() for name in rows}

    def configure_expert_parallel(self) -> list[str]:
        return ["blocks.*.mixture.experts"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def loader(batch_size: int = ROWS) -> DataLoader[Any]:
    """Return a loader over random tokens."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, WORDS, (16 * 16 * batch_size, LENGTH + 1), generator=generator)
    return DataLoader([(row[:-1], row[1:]) for row in rows], batch_size=batch_size)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Case:
    """A strategy on a number of ranks with degrees, and the micro-batches of a step."""

    strategy: str
    ranks: int
    parallel: str = ""
    window: int = 2
    experts: int = 0
    """The number of experts in each block."""

    def __str__(self) -> str:
        name = f"{self.strategy} {self.parallel}@{self.ranks}".replace(" @", "@")
        return f"{name}, {self.experts} experts" if self.experts else name

    @property
    def batch_size(self) -> int:
        """Sequences of a micro-batch; with experts a rank has every pair of them equally often, also with ``cp=2``."""
        return EXPERT_ROWS if self.experts else ROWS


CASES = [
    Case("ddp", 2),
    Case("fsdp", 2),
    Case("ddp", 2, "tp=2"),
    Case("fsdp", 2, "tp=2"),
    Case("ddp", 2, "cp=2"),
    Case("fsdp", 2, "cp=2"),
    Case("pipeline", 2, "pp=2", 4),
    Case("ddp", 4),
    Case("fsdp", 4),
    Case("hsdp", 4),
    Case("ddp", 4, "tp=2"),
    Case("fsdp", 4, "tp=2"),
    Case("fsdp", 4, "cp=2"),
    Case("fsdp", 4, "cp=2,tp=2"),
    Case("pipeline", 4, "pp=2", 4),
    Case("pipeline", 4, "pp=4", 4),
    Case("pipeline", 4, "pp=2,dp_shard=2", 4),
    Case("pipeline", 4, "pp=2,tp=2", 4),
    Case("ddp", 8),
    Case("fsdp", 8),
    Case("ddp", 8, "tp=2"),
    Case("fsdp", 8, "tp=4"),
    Case("fsdp", 8, "cp=2,tp=2"),
    Case("pipeline", 8, "pp=4", 4),
    Case("pipeline", 4, "pp=2,cp=2", 4),
    Case("ddp", 2, experts=EXPERTS),
    Case("fsdp", 2, experts=EXPERTS),
    Case("fsdp", 2, "ep=2", experts=EXPERTS),
    Case("fsdp", 2, "ep=2,cp=2", experts=EXPERTS),
    Case("fsdp", 4, "ep=2", experts=EXPERTS),
    Case("fsdp", 4, "ep=4", experts=EXPERTS),
    Case("fsdp", 4, "ep=2,cp=2", experts=EXPERTS),
    Case("fsdp", 4, "ep=2,tp=2", experts=EXPERTS),
    Case("fsdp", 8, "ep=4", experts=EXPERTS),
    Case("fsdp", 8, "ep=8", experts=EXPERTS),
]

Counts = dict[str, tuple[int, int]]
"""By the kind of collective, how often it ran and the bytes of its full tensors in all."""


class Watched(LiveMemory):
    """Counts collectives too, but for those of groups for control messages."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counts = {}
        self.counts_collectives = False
        self.trainer: Any = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = super().__torch_dispatch__(func, types, args, kwargs)
        name = func._schema.name
        kind = next((kind for part, kind in _KINDS.items() if part in name), None)
        if self.counts_collectives and kind is not None and "c10d" in name and self._is_counted(args):
            # The full tensors are the largest argument, or the result.
            parts = [*args, returned] if "functional" in name else args
            sizes = (sum(each.nbytes for each in tree_leaves(part) if isinstance(each, Tensor)) for part in parts)
            times, size = self.counts.get(kind, (0, 0))
            self.counts[kind] = times + 1, size + max(sizes)
        return returned

    def _is_counted(self, args: Any) -> bool:
        groups = [each for each in args if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type())]
        control = self.trainer.fabric.world._control
        names = {each.group_name for each in control}
        return not any(torch.distributed.ProcessGroup.unbox(each).group_name in names for each in groups)


def measured(case: Case) -> tuple[int, Counts]:
    """Train two steps; return the peak bytes of tensors, and the collectives of the second step. Runs on each rank."""
    starts: Counter[int] = Counter()
    memory, data = Watched(), loader(case.batch_size)

    def start(trainer: Any, *_: Any) -> None:
        if not starts:
            memory.begin()
        if trainer.global_step == 1 and not starts[1]:
            memory.counts_collectives = True
        starts[trainer.global_step] += 1

    def end(trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            memory.counts_collectives = False

    # As on several nodes and on GPUs, which the rehearsal is for.
    with over_gloo(), memory:
        trainer = silent_trainer(
            strategy=case.strategy,
            devices=case.ranks,
            parallel=case.parallel or None,
            max_steps=2,
            accumulate_grad_batches=case.window,
            gradient_clip_val=CLIP,
            callbacks=[LambdaCallback(on_train_batch_start=start, on_train_batch_end=end)],
            verbose=False,
        )
        memory.trainer = trainer
        trainer.fit(Model(case.experts), data)
        memory.stop()
    return memory.peak, memory.counts


def rehearsed(case: Case) -> Rehearsed:
    """Rehearse the same step in this process."""
    strategy = STRATEGIES.load(case.strategy)().with_degrees(resolve_degrees(case.parallel or None))
    precision = resolve_precision("32-true")
    strategy.check(case.ranks, "cpu", 1, precision)
    batch = next(iter(loader(case.batch_size)))
    return rehearse(strategy, Part(Model(case.experts), batch, precision, case.window, (CLIP, "norm")), case.ranks)


def counts_of(found: Rehearsed) -> Counts:
    """Return the collectives of a rehearsal."""
    counts: Counts = {}
    for each in found.traffic:
        times, size = counts.get(each.operation, (0, 0))
        counts[each.operation] = times + each.times, size + each.payload
    return counts


def are_close(counted: Counts, expected: Counts) -> bool:
    """Whether there are the same collectives, with the same bytes up to the tolerance.

    In pipelines of shards, ranks leave gradients out that no rank of their stage has, which a rehearsal does not know.
    """
    return counted.keys() == expected.keys() and all(
        counted[kind][0] == times and abs(counted[kind][1] - size) <= TOLERANCE * size
        for kind, (times, size) in expected.items()
    )


def main() -> int:
    """Print the table; return 1 if a row is beyond the tolerance."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="a page whose part between the marks becomes the table")
    parser.add_argument("--only", help="rows whose name contains this text")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    heads = [
        "peak memory in the dry run (KB)",
        "peak memory in the real run (KB)",
        "difference (dry run relative to real run)",
    ]
    heads += ["collectives in the dry run: calls x type (total size)", "collectives in the real run"]
    lines = ["| mesh | " + " | ".join(heads) + " |", "|---" * 6 + "|"]
    print("\n".join(lines), flush=True)
    good = True
    for case in CASES:
        if chosen.only and chosen.only not in str(case):
            continue
        found = rehearsed(case)
        real = run_on_ranks(case.ranks, measured, case, timeout=200.0)
        peak = max(each for each, _ in real)
        difference = found.peak.total / peak - 1
        expected, counted = real[found.rank][1], counts_of(found)
        good = good and abs(difference) <= TOLERANCE and are_close(counted, expected)
        lines.append(
            f"| `{case}` | {found.peak.total / 1e3:,.0f} | {peak / 1e3:,.0f} | {difference:+.2%} | {_text(counted)} | "
            f"{'same as in the dry run' if expected == counted else _text(expected)} |"
        )
        print(lines[-1], flush=True)
    close_pools()
    text = "\n".join(lines)
    if chosen.write is not None:
        write_table(chosen.write, "rehearsal table", text)
    return 0 if good else 1


def _text(counts: Counts) -> str:
    found = [
        (times, kind, f"{size / 1e3:,.1f} KB" if size >= 50 else "< 0.1 KB") for kind, (times, size) in counts.items()
    ]
    return ", ".join(f"{times} x {kind} ({size})" for times, kind, size in sorted(found, key=lambda each: each[1]))


if __name__ == "__main__":
    # Ranks find a function by the name of its module, which is not that of a program.
    import rehearsal_table

    sys.exit(rehearsal_table.main())
