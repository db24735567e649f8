"""The planned memory of each layout beside the peak of the allocator."""

from __future__ import annotations

import json

import pytest
from cuda_machine import needs_gpu
from cuda_plugin import Measured
from ranks import run_script

# A process for each case: what an earlier one left in the allocator, or in the libraries' workspaces, does not count.
SCRIPT = """
import json, sys
import torch
from torch import nn
from emulated_fits import emulated_trainer
from phalanx import TrainModule

strategy, precision, fused = sys.argv[1], sys.argv[2], sys.argv[3] == "fused"
WIDTH, LAYERS, ROWS = 2048, 12, 4096

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))

class Large(TrainModule):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.peaks = []

    def training_step(self, batch, batch_idx):
        self.peaks.append(torch.cuda.max_memory_allocated())
        if batch_idx == 2:
            torch.cuda.reset_peak_memory_stats()
        return self.blocks(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True if fused else None)

data = [(torch.randn(ROWS, WIDTH),) for _ in range(6)]
arguments = {"strategy": strategy, "precision": precision, "max_steps": 5}
plan = emulated_trainer(1, **arguments).plan(Large(), data)
print(plan, flush=True)
before = torch.cuda.memory_allocated()
module = Large()
emulated_trainer(1, **arguments).fit(module, data)
free, total = torch.cuda.mem_get_info()
print("found", json.dumps({
    "planned": plan[strategy].needs.device.total,
    "activations": plan.activations.kept if plan.activations else 0,
    "before": before,
    "peak": module.peaks[-1],
    "first": max(module.peaks[:3]),
    "reserved": torch.cuda.max_memory_reserved(),
    "device": total - free,
}))
"""
CASES = [
    ("single", "32-true", "fused"),
    ("single", "32-true", "foreach"),
    ("single", "bf16-mixed", "fused"),
    ("single", "bf16-true", "fused"),
    ("ddp", "32-true", "fused"),
    ("ddp", "bf16-mixed", "fused"),
    ("fsdp", "32-true", "fused"),
    ("fsdp", "bf16-mixed", "fused"),
    pytest.param("zero1", "bf16-mixed", "fused", marks=pytest.mark.deepspeed),
    pytest.param("zero2", "bf16-mixed", "fused", marks=pytest.mark.deepspeed),
    pytest.param("zero3", "bf16-mixed", "fused", marks=pytest.mark.deepspeed),
    pytest.param("zero2-offload", "bf16-mixed", "fused", marks=pytest.mark.deepspeed),
]
# The docs name the temporary memory of an optimizer that is not fused: 4 bytes for each parameter.
UNPLANNED = {"foreach": 4 * 12 * 2 * 2048 * 4096}


@pytest.mark.alone
@needs_gpu("allocator with blocks and workspaces")
@pytest.mark.parametrize(("strategy", "precision", "optimizer"), CASES)
@pytest.mark.timeout(200)
def test_a_plan_is_within_a_tenth_of_the_peak(
    strategy: str, precision: str, optimizer: str, measured: Measured
) -> None:
    done = run_script(SCRIPT, strategy, precision, optimizer, is_new=True, device="cuda", timeout=150.0)
    line = next((line for line in done.stdout.splitlines() if line.startswith("found ")), None)
    assert line is not None, done.stdout
    found = json.loads(line.removeprefix("found "))
    case = f"{strategy}, {precision}, {optimizer}"
    for name, value in found.items():
        measured(f"memory, {case}: {name}", value / 2**20, "MiB")
    planned = found["planned"] + UNPLANNED.get(optimizer, 0)
    measured(f"memory, {case}: planned / peak", planned / found["peak"], "")
    assert planned == pytest.approx(found["peak"], rel=0.1), f"{found}\n{done.stdout}"
