"""The benchmarks on one GPU: their arithmetic, the order of their phases, and all of it on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import phalanx

ROOT = Path(phalanx.__file__).parent

# The checkout is the package, so its benchmarks are found in it.
cells: Any = import_module("phalanx.benchmarks.cuda.cells")
clock: Any = import_module("phalanx.benchmarks.cuda.clock")
cohort: Any = import_module("phalanx.benchmarks.cuda.cohort")
device: Any = import_module("phalanx.benchmarks.cuda.device")
groups: Any = import_module("phalanx.benchmarks.cuda.groups")
measures: Any = import_module("phalanx.benchmarks.cuda.measures")
model: Any = import_module("phalanx.benchmarks.cuda.model")
report: Any = import_module("phalanx.benchmarks.cuda.report")
results: Any = import_module("phalanx.benchmarks.cuda.results")
saves: Any = import_module("phalanx.benchmarks.cuda.saves")
trace: Any = import_module("phalanx.benchmarks.cuda.trace")

TINY = cells.size_of("350m", True)


def test_utilization_is_six_operations_for_each_parameter_and_token() -> None:
    assert measures.model_flops_utilization(1_000_000_000, 50_000, 600e12) == pytest.approx(0.5)


def test_sides_are_compared_round_by_round() -> None:
    reference, own = [1.0, 2.0, 1.0], [1.1, 2.2, 2.0]
    assert measures.speed_ratio(reference, own) == pytest.approx(1 / 1.1)
    assert measures.added_microseconds(reference, own) == pytest.approx(0.2e6)
    assert measures.spread([1.0, 2.0, 1.5]) == pytest.approx(1 / 1.5)
    assert measures.tokens_per_second(100, [1.0, 4.0, 2.0]) == 50


@pytest.mark.parametrize(
    ("intervals", "share"),
    [
        ([(0, 10), (20, 30)], 1 / 3),
        ([(20, 30), (0, 10)], 1 / 3),
        ([(0, 30), (5, 10), (20, 25)], 0.0),
        ([(0, 10), (5, 20), (30, 40)], 1 / 4),
        ([(100, 110), (120, 130)], 1 / 3),
        ([], None),
        ([(5, 5)], None),
    ],
)
def test_the_device_is_idle_where_nothing_runs(intervals: list[tuple[float, float]], share: float | None) -> None:
    assert trace.idle_share(intervals) == (share if share is None else pytest.approx(share))


def test_a_trace_is_summed_up() -> None:
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
    events = [{"cat": cat, "name": name, "ts": ts, "dur": dur} for cat, name, ts, dur in planted]
    found = trace.summary(events, 2)
    assert found["idle_share"] == pytest.approx(10 / 40)
    assert found["waits"] == {"cudaStreamSynchronize": 0.5}
    assert found["kernels"] == 1
    assert found["pageable_copies"] == 0.5
    assert found["longest_kernels"][0] == ("gemm", pytest.approx(0.01))


def test_only_events_with_a_duration_are_read(tmp_path: Path) -> None:
    events = [{"ph": "X", "name": "kernel"}, {"ph": "M", "name": "process_name"}]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    assert trace.read(tmp_path / "trace.json") == events[:1]


def test_sizes_have_the_parameters_that_they_say() -> None:
    made = model.LanguageModel(TINY)
    assert TINY.elements == sum(parameter.numel() for parameter in made.parameters())
    assert cells.SIZES["350m"].elements == pytest.approx(355e6, rel=0.01)
    assert cells.SIZES["1.3b"].elements == pytest.approx(1.315e9, rel=0.01)


@pytest.mark.parametrize("room", [1, 3, 5, 40])
def test_sides_are_divided_with_their_references(room: int) -> None:
    names = [*cells.SIDES, *cells.SETTINGS]
    divided = cells.cohorts(names, room)
    for group in divided:
        assert group[0] == "raw"
        assert len(group) == len(set(group)) <= max(room, 3)
    for name in names:
        assert any({name, cells.ALL_SIDES[name].reference} <= set(group) for group in divided)
    assert {name for group in divided for name in group} == set(names)


def test_the_number_of_processes_fits_into_memory() -> None:
    size = cells.SIZES["1.3b"]
    count = groups.room(size, 139e9)
    assert 2 <= count < groups.room(cells.SIZES["350m"], 139e9)
    assert count * size.resident_bytes + size.temporary_bytes <= 139e9
    assert groups.abreast(size, count, 139e9) >= 1


def test_batches_are_those_of_the_phases() -> None:
    planned = cells.phases(TINY, False)
    batches = list(model.Batches(TINY, planned, False))
    assert len(batches) == sum(phase.steps + (phase.kind != "losses") * cells.LEAD for phase in planned) + 1
    assert len({id(batch) for batch in batches[: planned[0].steps]}) == 1
    short = [index for index, batch in enumerate(batches) if batch.shape == TINY.short]
    before = sum(
        phase.steps + (phase.kind != "losses") * cells.LEAD
        for phase in planned
        if phase.kind in ("losses", "round", "waits")
    )
    assert short == list(range(before, before + cells.LEAD + 12))


def test_the_clock_measures_phases_in_order_and_waits_between_them(tmp_path: Path) -> None:
    planned = cells.phases(TINY, False)
    events: list[Any] = []
    timer = clock.Clock(
        device.Device("cpu"),
        planned,
        lambda result: events.append(set(result)),
        lambda: events.append("wait"),
        tmp_path,
    )
    batches = model.Batches(TINY, planned, False)
    at = []
    for index, _ in enumerate(batches):
        timer.step()
        timer.keep(import_module("torch").tensor(float(index)))
        at.append(len(events))
    rounds = [{"seconds", "peak_bytes"}, "wait"] * TINY.rounds
    assert events == [{"losses"}, "wait", *rounds, {"waits"}, "wait", {"host_us"}, "wait", {"profile"}]
    # The losses of six steps, of which the seventh ends the phase.
    assert at[5] == 0
    assert at[6] == 2


def test_losses_are_those_of_the_raw_loop_within_the_tolerance() -> None:
    raw = [6.0, 5.5, 5.0]
    assert not cohort.difference(raw, [6.0, 5.52, 4.98])
    assert "not those" in cohort.difference(raw, [6.0, 5.5, 5.2])
    assert "not those" in cohort.difference(raw, [6.0, 5.5])
    assert "not those" in cohort.difference(raw, [6.0, float("nan"), 5.0])
    assert "failed" in cohort.difference([], raw)
    assert cohort.falls(raw)
    assert not cohort.falls([6.0, 5.9, 5.8])


def record(side: str, size: str, seconds: Sequence[float], **values: Any) -> Any:
    """Return a record whose rounds took some seconds. Sides of one size have taken turns."""
    return cohort.Record(side, size, False, len(size), seconds=list(seconds), **values)


def planted_results() -> Any:
    """Return results of four cells, one of which breaks a bar."""
    found = results.Results(machine={"matmul_flops": 800e12})
    waiting = {"idle_share": 0.25, "waits": {"cudaStreamSynchronize": 2.0}}
    found.records = [
        record("raw", "350m", [1.0, 1.0], waits=0.0),
        record("phalanx", "350m", [1.0, 1.01], waits=0.0, peak_bytes=2e9, host_us=[10.0, 30.0, 20.0]),
        record("phalanx Fabric", "350m", [1.02, 1.02], waits=0.0, profile=waiting),
        cohort.Record("lightning", "350m", False, problem="it is not installed"),
    ]
    small = [("raw", 1e-3), ("phalanx", 1.02e-3), ("phalanx Fabric", 1.04e-3)]
    found.records += [record(side, "small", [seconds] * 2) for side, seconds in small]
    return found


def test_bars_are_passed_or_not() -> None:
    found = {bar.title: (bar.passes, bar.value) for bar in results.bars(planted_results())}
    assert found["350m, phalanx: speed of raw"] == (True, pytest.approx(0.995, abs=1e-3))
    assert found["350m, phalanx Fabric: speed of raw"][0] is False
    assert found["350m, phalanx: waits of the host in a step"] == (True, 0)
    assert found["350m, phalanx Fabric: waits of the host in a step"] == (False, 2)
    assert found["small, phalanx: µs of a step over raw"] == (True, pytest.approx(20))
    assert found["small, phalanx Fabric: µs of a step over raw"] == (False, pytest.approx(40))
    judged_by_nobody = planted_results()
    judged_by_nobody.is_judged = False
    assert {bar.passes for bar in results.bars(judged_by_nobody)} == {None}


def test_only_sides_that_took_turns_are_compared() -> None:
    found = planted_results()
    found.records[1].cohort = 1
    bar = next(bar for bar in results.bars(found) if bar.title == "350m, phalanx: speed of raw")
    assert bar.value is None


def test_tables_have_a_row_for_each_side_and_the_reasons_of_the_others() -> None:
    text = report.markdown(planted_results(), False)
    rows = {
        cells[1].strip(): [cell.strip() for cell in cells[2:-1]]
        for line in text.splitlines()
        if len(cells := line.split("|")) > 9
    }
    assert rows["phalanx"][1:3] == ["raw", "0.995"]
    assert rows["phalanx"][5:] == ["2.0", "-", "0.0", "20", "1.0"]
    assert rows["phalanx Fabric"][6:8] == ["25.0", "2.0"]
    assert "- 350m, lightning: it is not installed" in text
    assert json.loads(json.dumps(planted_results().as_json()))["bars"][0]["passes"] is True


def test_a_stall_is_the_time_that_steps_take_longer_after_a_save() -> None:
    marks = [float(step) for step in range(20)]
    # The step that saves takes 3 s more, the next one 1 s more; writing ends 10 s after the last step.
    marks += [marks[-1] + 4.0 + (1.0 if step else 0.0) + step for step in range(19)]
    marks.append(marks[-1] + 10.0)
    found = saves.stall(marks)
    assert found["step_ms"] == 1000
    assert found["stall_ms"] == 4000
    assert found["longest_ms"] == 3000
    assert found["until_written"] == marks[-1] - 19.0


def test_saves_that_do_not_fit_are_refused() -> None:
    assert not saves.affordable(10, 64e9, 100e9)
    assert "disk" in saves.affordable(60, 64e9, 1000e9)
    assert "memory" in saves.affordable(10, 64e9, 20e9)
    assert saves.available_bytes("MemTotal: 9 kB\nMemAvailable:    2 kB\n") == 2048


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
