"""Runs that stop and continue, bit for bit: deterministic or not, with the fused optimizer, and killed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_fits import whole_and_resumed
from ranks import run_on_ranks, run_script, started_script, wait_until
from safetensors.torch import load_file

CASES: dict[str, dict[str, Any]] = {
    "deterministic": {"deterministic": True},
    "fused": {"optimizer": "fused"},
    "fused-bf16": {"optimizer": "fused", "precision": "bf16-mixed"},
}
STEPS = 30

SCRIPT = """
import sys, time
from pathlib import Path
from emulated_fits import Classifier, SaveAt, batches, emulated_trainer, whole_weights
from safetensors.torch import save_file
from phalanx import seed_everything

root, steps, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
saved = sorted(root.glob("step=*.ckpt"), key=lambda path: int(path.stem.partition("=")[2]))
print("resumes", saved[-1:], flush=True)
seed_everything(5)
module = Classifier(dropout=0.2, at_step=lambda module, batch_idx: time.sleep(seconds))
trainer = emulated_trainer(
    1, max_steps=steps, callbacks=[SaveAt(str(root))], default_root_dir=root, enable_checkpointing=None,
    deterministic=True,
)
trainer.fit(module, batches(steps + 5), ckpt_path=saved[-1] if saved else None)
save_file(whole_weights(module), root / "weights.safetensors")
"""


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp", pytest.param("zero2", marks=pytest.mark.deepspeed)])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.timeout(200)
def test_a_resumed_run_is_the_run_that_never_stopped(strategy: str, case: str, tmp_path: Path) -> None:
    ((whole, resumed),) = run_on_ranks(
        1, whole_and_resumed, strategy, 1, str(tmp_path), CASES[case], device="cuda", timeout=180.0
    )
    differing = [name for name, weight in whole.items() if not torch.equal(weight, resumed[name])]
    assert whole
    assert differing == []


@pytest.mark.timeout(200)
def test_a_killed_run_continues_bit_for_bit(tmp_path: Path) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    for folder in (killed, whole):
        folder.mkdir()
    with started_script(SCRIPT, str(killed), str(STEPS), "0.2", is_new=True, device="cuda") as process:
        wait_until((killed / "step=6.ckpt").exists, 90.0)
        time.sleep(0.3)
        process.kill()
    assert not (killed / "weights.safetensors").exists()
    again = run_script(SCRIPT, str(killed), str(STEPS), "0", is_new=True, device="cuda", timeout=60.0)
    assert again.returncode == 0, again.stdout
    assert "step=" in again.stdout
    alone = run_script(SCRIPT, str(whole), str(STEPS), "0", is_new=True, device="cuda", timeout=60.0)
    assert alone.returncode == 0, alone.stdout
    found, expected = (load_file(folder / "weights.safetensors") for folder in (killed, whole))
    assert [name for name, weight in expected.items() if not torch.equal(weight, found[name])] == []
