"""Ends of runs with kernels in progress: the exit code, the message, and the time until the end."""

from __future__ import annotations

import re
import signal
import sys
import time
from pathlib import Path

import pytest
from cuda_machine import needs_gpu, variables
from cuda_plugin import Measured
from ranks import completed, run_command, started_script, wait_until

# Three seconds on an H200 at its highest clock, longer on most others.
SPIN_CYCLES = 6_000_000_000
# For interpreters that have to end, and for the kernel.
LIMIT_SECONDS = 30.0

SCRIPT = """
import sys, time
import torch
from emulated_fits import Classifier, batches, emulated_trainer

kind, strategy, cycles = sys.argv[1], sys.argv[2], int(sys.argv[3])

def at_step(module, batch_idx):
    if kind == "signal":
        time.sleep(0.05)
    if batch_idx < 3 or (kind == "signal" and batch_idx > 3):
        return
    torch.cuda._sleep(cycles)
    print("at step 3", time.time(), flush=True)
    if kind == "exception":
        raise ValueError("a planned failure")
    if kind == "memory":
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")

trainer = emulated_trainer(1, strategy=strategy, max_steps=10 if kind != "signal" else 2000)
trainer.fit(Classifier(at_step=at_step), batches(12 if kind != "signal" else 2002))
"""
FAILURES = [
    ("exception", "a planned failure"),
    pytest.param("memory", "out of memory", marks=needs_gpu("limit of memory")),
]


def seconds_since_failure(output: str) -> float:
    found = re.search(r"at step 3 ([\d.]+)", output)
    assert found, output
    return time.time() - float(found.group(1))


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
@pytest.mark.parametrize(("kind", "message"), FAILURES)
@pytest.mark.timeout(120)
def test_a_failure_ends_the_run(strategy: str, kind: str, message: str, measured: Measured) -> None:
    with started_script(SCRIPT, kind, strategy, str(SPIN_CYCLES), is_new=True, device="cuda") as process:
        done = completed(process, 100.0)
    seconds = seconds_since_failure(done.stdout)
    measured(f"exit after {kind} with a kernel of 3 s, {strategy}", seconds, "s")
    assert done.returncode == 1, done.stdout
    assert message in done.stdout, done.stdout
    assert seconds < LIMIT_SECONDS


@pytest.mark.timeout(120)
def test_a_failure_ends_a_run_of_torchrun(tmp_path: Path, measured: Measured) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    command = [*launcher, str(script), "exception", "fsdp", str(SPIN_CYCLES)]
    # torchrun leaves a folder in the temporary one.
    done = run_command(command, tmp_path, {**variables(), "TMPDIR": str(tmp_path)}, timeout=100.0)
    seconds = seconds_since_failure(done.stdout)
    measured("exit of torchrun after exception with a kernel of 3 s, fsdp", seconds, "s")
    assert done.returncode == 1, done.stdout
    assert "a planned failure" in done.stdout, done.stdout
    assert seconds < LIMIT_SECONDS


# At SIGINT Python ends itself by the signal; a shell shows 130.
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, -signal.SIGINT)])
@pytest.mark.parametrize("strategy", ["single", "fsdp"])
@pytest.mark.timeout(120)
def test_a_signal_ends_the_run_after_its_step(
    strategy: str, signum: signal.Signals, code: int, tmp_path: Path, measured: Measured
) -> None:
    with started_script(SCRIPT, "signal", strategy, str(SPIN_CYCLES), is_new=True, device="cuda") as process:
        assert process.stdout is not None
        lines: list[str] = []

        def is_at_step() -> bool:
            assert process.stdout is not None
            line = process.stdout.readline()
            lines.append(line)
            assert line, f"the script ended early:\n{''.join(lines)}"
            return line.startswith("at step 3")

        wait_until(is_at_step, 90.0)
        began = time.monotonic()
        process.send_signal(signum)
        done = completed(process, 60.0)
    seconds = time.monotonic() - began
    measured(f"exit after {signum.name} with a kernel of 3 s, {strategy}", seconds, "s")
    assert done.returncode == code, "".join(lines) + done.stdout
    assert seconds < LIMIT_SECONDS
