"""Two hosts that a cable joins: they train as one does, and end when it is cut."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import pytest
from host_run import ENOUGH, main
from ranks import run_on_ranks, wait_until
from two_hosts import ended, reason_against, two_hosts

SCRIPT = Path(__file__).parents[2] / "host_run.py"
STALL_SECONDS = 6.0


@pytest.fixture(scope="module", autouse=True)
def _needs_namespaces() -> None:
    if reason := reason_against():
        pytest.skip(reason)


def kept(folder: Path) -> dict[int, list[tuple[float, list[float]]]]:
    """Return the loss and the samples of each optimizer step that were written last, by rank."""
    found: dict[int, dict[int, tuple[float, list[float]]]] = {}
    sizes: dict[int, int] = {}
    for rank in range(2):
        for line in (folder / f"losses_{rank}.jsonl").read_text().splitlines():
            step, loss, size, samples = json.loads(line)
            if rank == 0:
                sizes[step] = size
            found.setdefault(step, {})[rank] = loss, samples
    return {step: [found[step][rank] for rank in range(sizes[step])] for step in sizes}


def losses(folder: Path) -> dict[int, list[float]]:
    """Return the losses of each optimizer step that were written last, by rank."""
    return {step: [loss for loss, _ in by_rank] for step, by_rank in kept(folder).items()}


def saved(folder: Path, step: int) -> list[Path]:
    # Elsewhere below the folder things come and go, which a search through all of it would stumble over.
    return list(folder.glob(f"phalanx_logs/*/checkpoints/*step={step}.ckpt"))


def steps_begun(folder: Path) -> int:
    return len((folder / "losses_0.jsonl").read_text().splitlines())


def listening(pid: int) -> set[str]:
    """Return the addresses that are listened on in a process's network, as the kernel writes them."""
    tables = [Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    fields = [line.split() for lines in tables for line in lines]
    return {field[1].partition(":")[0] for field in fields if field[3] == "0A"}


def folders(root: Path) -> tuple[Path, Path]:
    """Make a folder for what two hosts do, and one for what one host does."""
    made = root / "apart", root / "together"
    for folder in made:
        folder.mkdir()
    return made


def on_one_host(folder: Path, strategy: str, steps: int) -> dict[int, list[float]]:
    run_on_ranks(2, main, folder, strategy, 2, 1, steps, timeout=60.0)
    return losses(folder)


def test_two_hosts_listen_on_the_cable_alone_and_train_as_one_does_though_it_is_pulled_or_slow(tmp_path: Path) -> None:
    apart, together = folders(tmp_path)
    with two_hosts() as hosts:
        arguments = [str(apart), "zero2", "1", "2", "40", "0.02"]
        processes = hosts.start_as_slurm(SCRIPT, arguments, apart, libraries=("deepspeed",))
        wait_until(lambda: saved(apart, 4), seconds=60.0)
        # 10.213.7.1 and .2: the store's and gloo's.
        assert [listening(process.pid) for process in processes] == [{"0107D50A"}, {"0207D50A"}]
        hosts.cut()
        time.sleep(0.2)
        stood = steps_begun(apart)
        time.sleep(1.0)
        assert steps_begun(apart) == stood
        hosts.heal()
        if hosts.slow():
            slowed_at = steps_begun(apart)
            wait_until(lambda: steps_begun(apart) > slowed_at + 2, seconds=30.0)
            hosts.speed_up()
        codes = ended(processes, 60.0)
    assert codes == [0, 0], printed_by_host_0(apart)
    assert losses(apart) == on_one_host(together, "zero2", 40)


@pytest.mark.timeout(240)
def test_hosts_come_and_go(tmp_path: Path) -> None:
    folder, _ = folders(tmp_path)
    arguments = [str(folder), "ddp", "0", "1", "100000", "0.02"]

    def printed() -> str:
        return "\n".join(file.read_text() for file in sorted(folder.glob("host_*.txt")))

    with two_hosts() as hosts:
        processes = [hosts.start_elastic(number, SCRIPT, arguments, folder) for number in range(2)]
        wait_until(lambda: saved(folder, 8), 60.0, printed)
        # torchrun alone: its rank goes with it.
        processes[1].kill()
        processes[1].wait()
        wait_until(lambda: printed_by_host_0(folder).count("1 rank on cpu") == 1, 60.0, printed)
        processes[1] = hosts.start_elastic(1, SCRIPT, arguments, folder)
        wait_until(lambda: printed_by_host_0(folder).count("2 ranks on 2 nodes") == 2, 60.0, printed)
        (folder / ENOUGH).touch()
        codes = ended(processes, 60.0)
    assert codes == [0, 0], printed_by_host_0(folder)
    # What the second host's coming has interrupted was saved.
    assert "SIGTERM came: stopped after optimizer step" in printed_by_host_0(folder)
    found = kept(folder)
    assert sorted(found) == [*range(len(found))]
    sizes = [len(found[step]) for step in range(len(found))]
    assert [size for size, _ in itertools.groupby(sizes)] == [2, 1, 2]
    # Every sample of an epoch once, however many ranks shared it out.
    seen = [sample for step in range(len(found)) for _, samples in found[step] for sample in samples]
    epochs = [seen[start : start + 96] for start in range(0, len(seen), 96)]
    assert len(epochs) > 1
    assert all(len(set(epoch)) == len(epoch) for epoch in epochs)


def printed_by_host_0(folder: Path) -> str:
    return (folder / "host_0.txt").read_text()


def test_a_cut_cable_ends_both_hosts_and_one_host_resumes(tmp_path: Path) -> None:
    apart, together = folders(tmp_path)
    with two_hosts() as hosts:
        processes = hosts.start_as_slurm(SCRIPT, [str(apart), "ddp", "1", "2", "1000", "0.02"], apart)
        try:
            wait_until(lambda: saved(apart, 8), seconds=60.0)
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
    got_to = steps_begun(apart)
    found = on_one_host(apart, "ddp", got_to + 4)
    assert found == on_one_host(together, "ddp", got_to + 4)
