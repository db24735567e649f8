"""The table of plans: a model of 7 billion parameters on 64 GPUs of 80 GB with several degrees, rehearsed.

    python tests/planned_table.py                    every row, as a table
    python tests/planned_table.py --write docs/...   and into a page, between its two marks

No rank is started and no device used. A row takes 10 to 60 seconds.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from marked_pages import write_table
from planned_7b import Llama
from torch.utils.data import DataLoader

from phalanx import Trainer
from phalanx.framework.core.degrees import resolve_degrees

RANKS = 64


@dataclass(frozen=True)
class Case:
    """Degrees, the micro-batches of a step, and the tokens of a sequence."""

    strategy: str
    parallel: str = ""
    window: int = 1
    length: int = 4096

    @property
    def tokens(self) -> int:
        """The tokens of a step on all ranks."""
        layout = resolve_degrees(self.parallel or None).lay_out(RANKS)
        return layout.data_size * self.window * self.length


CASES = [
    Case("fsdp"),
    Case("fsdp", "tp=8"),
    Case("pipeline", "pp=4,dp_shard=16", 8),
    Case("pipeline", "pp=4,tp=8,dp_shard=2", 8),
    Case("fsdp", length=32_768),
    Case("fsdp", "cp=8", length=32_768),
    Case("fsdp", "cp=4,tp=8", length=32_768),
]
HEAD = [
    "| strategy and degrees | micro-batches x tokens per micro-batch | fits in 80 GB | peak memory use "
    "| memory for activations | memory for parameters, gradients and optimizer state | data sent per token |",
    "|---" * 7 + "|",
]


def row_of(case: Case) -> str:
    """Return a line of the table."""
    trainer = Trainer(
        strategy=case.strategy,
        devices=2,
        accelerator="cpu",
        precision="bf16-mixed",
        gradient_clip_val=1.0,
        accumulate_grad_batches=case.window,
        verbose=False,
    )
    tokens: Any = torch.zeros(512, case.length + 1, dtype=torch.long)
    options: dict[str, Any] = {"device_memory": "80GB", "parallel": case.parallel or None, "activation_bytes": 0}
    data: DataLoader[Any] = DataLoader(tokens, batch_size=1)
    plan = trainer.plan(Llama(), data, ranks=RANKS, rehearse=case.strategy, **options)
    row = plan[case.strategy]
    assert row.refusal is None, row.refusal
    needs, sent = row.needs.device, sum(each.sent for each in row.traffic)
    sizes = [f"{size / 1e9:.1f} GB" for size in (needs.total, needs.activations, needs.held)]
    name = f"`{case.strategy} {case.parallel}`".replace(" `", "`")
    return (
        f"| {name} | {case.window} x {case.length:,} | {'yes' if row.fits else 'no'} | {' | '.join(sizes)} | "
        f"{sent * RANKS / case.tokens / 1e6:.2f} MB |"
    )


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="a page whose part between the marks becomes the table")
    chosen = parser.parse_args()
    lines = list(HEAD)
    print("\n".join(lines), flush=True)
    for case in CASES:
        lines.append(row_of(case))
        print(lines[-1], flush=True)
    if chosen.write is not None:
        write_table(chosen.write, "planned table", "\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
