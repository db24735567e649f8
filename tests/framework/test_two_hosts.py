"""Two hosts that a cable joins: they train as one does, and end when it is cut."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from host_run import main
from ranks import run_on_ranks, wait_until
from two_hosts import ended, reason_against, two_hosts

SCRIPT = Path(__file__).parent.parent / "host_run.py"
STALL_SECONDS = 6.0


@pytest.fixture(scope="module", autouse=True)
def _needs_namespaces() -> None:
    if reason := reason_against():
        pytest.skip(reason)


def losses(folder: Path) -> dict[int, list[float]]:
    """Return the losses of each optimizer step that were written last, by rank."""
    found: dict[int, dict[int, float]] = {}
    for rank in range(2):
        for line in (folder / f"losses_{rank}.jsonl").read_text().splitlines():
            step, loss = json.loads(line)
            found.setdefault(step, {})[rank] = loss
    return {step: [by_rank[rank] for rank in sorted(by_rank)] for step, by_rank in found.items()}


def folders(root: Path) -> tuple[Path, Path]:
    """Make a folder for what two hosts do, and one for what one host does."""
    made = root / "apart", root / "together"
    for folder in made:
        folder.mkdir()
    return made


def on_one_host(folder: Path, strategy: str, steps: int) -> dict[int, list[float]]:
    run_on_ranks(2, main, folder, strategy, 2, 1, steps, timeout=60.0)
    return losses(folder)


def test_two_hosts_train_as_one_does(tmp_path: Path) -> None:
    apart, together = folders(tmp_path)
    with two_hosts() as hosts:
        codes = ended(hosts.start(SCRIPT, [str(apart), "zero2", "1", "2", "6"], apart), 90.0)
    assert codes == [0, 0], (apart / "host_0.txt").read_text()
    assert losses(apart) == on_one_host(together, "zero2", 6)


def test_a_cable_that_is_cut_ends_both_and_one_host_goes_on(tmp_path: Path) -> None:
    apart, together = folders(tmp_path)
    with two_hosts() as hosts:
        processes = hosts.start(SCRIPT, [str(apart), "ddp", "1", "2", "1000", "0.02"], apart)
        try:
            wait_until(lambda: list(apart.rglob("*step=8.ckpt")), seconds=60.0)
            hosts.cut()
            began = time.monotonic()
            # Twice that for a machine that is busy.
            codes = ended(processes, 2 * (STALL_SECONDS + 2.0))
        finally:
            for process in processes:
                process.kill()
                process.wait()
    assert 0 not in codes
    assert time.monotonic() - began > STALL_SECONDS / 2
    for number in range(2):
        assert "stalled" in (apart / f"host_{number}.txt").read_text()
    got_to = max(losses(apart))
    found = on_one_host(apart, "ddp", got_to + 4)
    assert found == on_one_host(together, "ddp", got_to + 4)
