"""The benchmarks on one GPU: their arithmetic, their bars, and all of it on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import phalanx

ROOT = Path(phalanx.__file__).parent

# The checkout is the package, so its benchmarks are found in it.
device: Any = import_module("phalanx.benchmarks.cuda.device")
main: Any = import_module("phalanx.benchmarks.cuda.__main__")
results: Any = import_module("phalanx.benchmarks.cuda.results")
saves: Any = import_module("phalanx.benchmarks.cuda.saves")
task: Any = import_module("phalanx.benchmarks.task")


@pytest.mark.parametrize(
    ("intervals", "share"),
    [
        ([(0, 10), (20, 30)], 1 / 3),
        ([(20, 30), (0, 10)], 1 / 3),
        ([(0, 30), (5, 10), (20, 25)], 0.0),
        ([(0, 10), (5, 20), (30, 40)], 1 / 4),
        ([], None),
        ([(5, 5)], None),
    ],
)
def test_the_device_is_idle_where_nothing_runs(intervals: list[tuple[float, float]], share: float | None) -> None:
    assert device.idle_share(intervals) == (share if share is None else pytest.approx(share))


def test_a_trace_is_summed_up(tmp_path: Path) -> None:
    planted = [
        ("cuda_runtime", "cudaDeviceSynchronize", 0, 1),
        ("cuda_runtime", "cudaLaunchKernel", 2, 1),
        ("cuda_runtime", "cudaStreamSynchronize", 5, 1),
        ("cuda_runtime", "cudaStreamIsCapturing", 6, 1),
        ("cuda_runtime", "cudaLaunchKernelExC", 8, 1),
        ("cuda_runtime", "cudaDeviceSynchronize", 9, 40),
        ("kernel", "gemm", 10, 10),
        ("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 20, 10),
        ("kernel", "gemm", 40, 10),
        ("gpu_user_annotation", "step", 0, 100),
    ]
    events = [{"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur} for cat, name, ts, dur in planted]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [*events, {"ph": "M", "name": "process_name"}]}))
    found = device.summary(device.read(tmp_path / "trace.json"), 2)
    assert found["idle_share"] == pytest.approx(10 / 40)
    assert found["waits"] == {"cudaStreamSynchronize": 0.5}
    assert found["kernels"] == 1
    assert found["pageable_copies"] == 0.5
    assert found["longest_kernels"][0] == ("gemm", pytest.approx(0.01))


def test_utilization_and_sizes_have_the_parameters_that_they_say() -> None:
    assert results.utilization(1_000_000_000, 50_000, 600e12) == pytest.approx(0.5)
    made = task.build(task.Job(1, model="tiny"))
    assert task.SIZES["tiny"].elements == sum(parameter.numel() for parameter in made.parameters())
    assert task.SIZES["350m"].elements == pytest.approx(355e6, rel=0.01)
    assert task.SIZES["1.3b"].elements == pytest.approx(1.315e9, rel=0.01)


def test_references_are_among_the_sides_of_a_group() -> None:
    for group in (main.SIDES, main.ZERO):
        assert "raw" in group
        assert {side.reference for side in group.values()} <= group.keys()


def test_losses_are_those_of_the_raw_loop_within_the_tolerance() -> None:
    raw = [6.0, 5.5, 5.0]
    assert not results.difference(raw, [6.0, 5.52, 4.98])
    for other in ([6.0, 5.5, 5.2], [6.0, 5.5], [6.0, float("nan"), 5.0]):
        assert "not those" in results.difference(raw, other)
    assert "failed" in results.difference([], raw)
    assert "do not fall" in results.difference([6.0, 5.9, 5.8], raw)


def planted_results() -> Any:
    """Return results of some sides, one of which breaks each bar."""
    found = results.Results(machine={"matmul_flops": 800e12})

    def add(group: str, side: str, seconds: list[float], **values: Any) -> None:
        found.records.append(results.Record(group, side, "raw", group, seconds=seconds, **values))

    waiting = {"idle_share": 0.25, "waits": {"cudaStreamSynchronize": 2.0}}
    add("350m", "raw", [1.0, 1.0], waits=0.0)
    add("350m", "phalanx", [1.0, 1.01], waits=0.0, peak_bytes=2e9)
    add("350m", "phalanx Fabric", [1.02, 1.02], waits=0.0, profile=waiting)
    add("350m", "Lightning", [], problem="it is not installed")
    for side, seconds in (("raw", 1e-3), ("phalanx", 1.02e-3), ("phalanx Fabric", 1.04e-3)):
        add("small", side, [seconds] * 2)
    return found


def test_bars_are_passed_or_not() -> None:
    found = {bar.title: (bar.passes, bar.value) for bar in planted_results().bars()}
    assert found["350m, phalanx: speed of raw"] == (True, pytest.approx(0.995, abs=1e-3))
    assert found["350m, phalanx Fabric: speed of raw"][0] is False
    assert found["350m, phalanx: waits of the host"] == (True, 0)
    assert found["350m, phalanx Fabric: waits of the host"] == (False, 2)
    assert found["small, phalanx: µs over raw"] == (True, pytest.approx(20))
    assert found["small, phalanx Fabric: µs over raw"] == (False, pytest.approx(40))
    judged_by_nobody = planted_results()
    judged_by_nobody.is_judged = False
    assert {bar.passes for bar in judged_by_nobody.bars()} == {None}


def test_tables_have_a_row_for_each_side_and_the_reasons_of_the_others() -> None:
    text = planted_results().markdown()
    rows = {
        cells[1].strip(): [cell.strip() for cell in cells[2:-1]]
        for line in text.splitlines()
        if len(cells := line.split("|")) > 9
    }
    assert rows["phalanx Fabric"][1:3] == ["raw", "0.962"]
    assert "- 350m, Lightning: it is not installed" in text
    assert json.loads(json.dumps(planted_results().as_json()))["bars"][0]["passes"] is True


def test_a_stall_is_the_time_that_steps_take_longer_after_a_save() -> None:
    marks = [float(step) for step in range(20)]
    # The step that saves takes 3 s more, the next one 1 s more; writing ends 10 s after the last step.
    marks += [marks[-1] + 4.0 + (1.0 if step else 0.0) + step for step in range(19)]
    marks.append(marks[-1] + 10.0)
    found = saves.stall(marks)
    assert (found["step_ms"], found["stall_ms"], found["longest_ms"]) == (1000, 4000, 3000)
    assert found["until_written"] == marks[-1] - 19.0


def test_saves_that_do_not_fit_are_refused() -> None:
    memory = "MemTotal: 9 kB\nMemAvailable:    {} kB\n"
    assert not saves.affordable(10, 64e9, memory.format(100_000_000))
    assert "disk" in saves.affordable(60, 64e9, memory.format(1_000_000_000))
    assert "memory" in saves.affordable(10, 64e9, memory.format(20_000_000))


def test_it_runs_on_a_cpu(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--tiny", "--quick", "--only", "350m", "--side", "raw", "--side", "phalanx"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.cuda", *options, "--out", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "results.json").read_text())
    raw, own = found["records"]
    assert (raw["side"], own["side"]) == ("raw", "phalanx")
    assert not raw["problem"] + own["problem"]
    assert own["losses"] == pytest.approx(raw["losses"], rel=1e-3)
    assert len(own["seconds"]) == 1
    assert "| phalanx |" in (tmp_path / "results.md").read_text()
