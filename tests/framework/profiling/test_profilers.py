"""Profilers: the sections of a fit on every rank, traces, and sections of the user."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from messages import refuses
from models import ByHand
from ranks import run_on_ranks
from small_fits import Tiny, capturing, loader, quiet_trainer

from phalanx.callbacks import LambdaCallback, ModelCheckpoint
from phalanx.framework.core.errors import ConfigurationError
from phalanx.framework.profiling.profiler import SECTIONS
from phalanx.profilers import AdvancedProfiler, PassThroughProfiler, Profiler, PyTorchProfiler, SimpleProfiler


class Evaluated(Tiny):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("value", 1.0)


class Stepping(ByHand, Tiny):
    """Steps its optimizer itself."""


def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace the clock of the profiler by a list with the time."""
    now = [0.0]
    monkeypatch.setattr(
        "phalanx.framework.profiling.simple_profiler.time", SimpleNamespace(perf_counter=lambda: now[0])
    )
    return now


def test_nested_sections_have_their_own_seconds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now = clock(monkeypatch)
    profiler = SimpleProfiler()
    profiler.begin(tmp_path, 1)
    with profiler.profile("outer"):
        now[0] += 1.0
        with profiler.profile("inner"):
            now[0] += 4.0
        now[0] += 1.0
    now[0] += 2.0
    assert list(profiler.profile_iterable([1, 2], "items")) == [1, 2]
    profiler.end()
    assert {name: section.seconds for name, section in profiler.sections.items()} == {
        "outer": 2.0, "inner": 4.0, "items": 0.0,
    }  # fmt: skip
    assert profiler.sections["items"].calls == 3
    assert profiler.shares() == {"outer": 0.25, "inner": 0.5, "items": 0.0, "(other)": 0.25}
    assert (tmp_path / "fit-rank_1.txt").read_text() == profiler.summary() + "\n"
    table = [line.split() for line in profiler.summary().splitlines()]
    assert ["inner", "1", "4.000", "50.0", "%"] in table
    assert table[-1] == ["all", "8.000", "100.0", "%"]


def test_an_error_in_a_section_does_not_mix_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    now = clock(monkeypatch)
    profiler = SimpleProfiler()
    profiler.begin(None, 0)
    profiler.start("outer")
    profiler.start("left open")
    now[0] += 1.0
    profiler.stop("outer")
    now[0] += 1.0
    profiler.stop("outer")
    profiler.end()
    assert profiler.shares() == {"outer": 0.0, "left open": 0.5, "(other)": 0.5}


def counted(root: Path, module: Tiny, **settings: Any) -> dict[str, int]:
    profiler = SimpleProfiler(root)
    callbacks = [ModelCheckpoint(root / "saved"), LambdaCallback(on_train_batch_end=lambda *_: None)]
    trainer = quiet_trainer(
        root, callbacks, max_epochs=2, profiler=profiler, log_every_n_steps=1, num_sanity_val_steps=1, **settings
    )
    trainer.fit(module, loader(20), loader(4))
    assert trainer.profiler is profiler
    assert 0.0 <= profiler.shares()["(other)"] < 1.0
    return {name: section.calls for name, section in profiler.sections.items()}


def test_the_sections_of_a_fit(tmp_path: Path) -> None:
    found = counted(tmp_path, Evaluated())
    assert {name: found[name] for name in ("data", "forward", "backward", "optimizer", "validation")} == {
        "data": 12,  # ten batches, and the end of each epoch
        "forward": 10,
        "backward": 10,
        "optimizer": 10,
        "validation": 3,  # one of them the sanity check
    }
    assert min(found[name] for name in ("callbacks", "logging", "checkpoints")) >= 2
    assert set(found) <= set(SECTIONS)


def test_the_sections_of_manual_optimization(tmp_path: Path) -> None:
    found = counted(tmp_path, Stepping())
    assert (found["forward"], found["backward"], found["optimizer"]) == (10, 10, 10)


def on_ranks(root: str) -> tuple[dict[str, int], list[str]]:
    found = counted(Path(root), Evaluated(), devices=2, strategy="ddp")
    return found, sorted(path.name for path in Path(root).glob("*.txt"))


def test_every_rank_has_its_own_profile(tmp_path: Path) -> None:
    (first, _), (second, files) = run_on_ranks(2, on_ranks, str(tmp_path))
    assert first["forward"] == second["forward"] == 6
    assert min(found["communication"] for found in (first, second)) >= 6
    # Rank 0 may not have written its own when rank 1 lists the files.
    assert "fit-rank_1.txt" in files


def test_the_table_is_shown_and_written_also_after_an_error(tmp_path: Path) -> None:
    def fail(trainer: Any, module: Any, batch: Any, index: int) -> None:
        with trainer.profiler.profile("my section"):
            if index == 2:
                raise RuntimeError("broken")

    trainer = quiet_trainer(
        tmp_path, LambdaCallback(on_train_batch_start=fail), max_epochs=1, profiler="simple", logger="csv"
    )
    notes = capturing(trainer)
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit(Tiny(), loader())
    (shown,) = [note for note in notes if note.startswith("Profile of the fit, rank 0 of 1:\n")]
    assert "\nmy section " in shown
    assert (trainer.run_dir / "profile" / "fit-rank_0.txt").read_text().strip() in shown


def test_a_fit_without_a_profiler_is_not_measured(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, [], max_epochs=1)
    assert type(trainer.profiler) is PassThroughProfiler
    seen: list[dict[str, Any]] = []
    watch = LambdaCallback(on_train_start=lambda trainer, module: seen.append(dict(vars(trainer.loop.windows))))
    trainer.callbacks = [*trainer.callbacks, watch]
    trainer.fit(Tiny(), loader())
    assert "take" not in seen[0]
    with trainer.profiler.profile("anything") as name:
        assert name == "anything"


def test_traces_have_the_sections_of_the_traced_steps(tmp_path: Path) -> None:
    profiler = PyTorchProfiler(tmp_path / "traces", row_limit=3)
    trainer = quiet_trainer(tmp_path, [], max_epochs=2, profiler=profiler)
    notes = capturing(trainer)
    trainer.fit(Tiny(), loader(16))
    (path,) = profiler.traces
    assert path == tmp_path / "traces" / "fit-rank_0-step_5.pt.trace.json"
    events = json.loads(path.read_text())["traceEvents"]
    names = [event.get("name") for event in events]
    assert [names.count(name) for name in ("forward", "backward", "optimizer")] == [3, 3, 3]
    assert "aten::addmm" in names
    assert "Self CPU" in next(note for note in notes if note.startswith("Profile of the fit"))


def test_functions_are_listed(tmp_path: Path) -> None:
    profiler = AdvancedProfiler(tmp_path, "mine", line_count_restriction=1.0, dump_stats=True)
    quiet_trainer(tmp_path, [], max_epochs=1, profiler=profiler).fit(Tiny(), loader())
    assert "training_step" in (tmp_path / "mine-rank_0.txt").read_text()
    assert (tmp_path / "mine-rank_0.prof").stat().st_size > 0


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (None, PassThroughProfiler),
        ("simple", SimpleProfiler),
        ("advanced", AdvancedProfiler),
        ("torch", PyTorchProfiler),
        ("pytorch", PyTorchProfiler),
    ],
)
def test_profilers_by_name(name: str | None, kind: type[Profiler], tmp_path: Path) -> None:
    assert type(quiet_trainer(tmp_path, [], profiler=name).profiler) is kind


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("simpel", "'simpel'"),
        (3, "profiler=3"),
        (SimpleProfiler, "profiler="),
    ],
)
def test_other_profilers_are_refused(given: Any, name: str, tmp_path: Path) -> None:
    with refuses(ConfigurationError, name):
        quiet_trainer(tmp_path, [], profiler=given)


def test_wrong_arguments_are_refused() -> None:
    with refuses(ConfigurationError, "SimpleProfiler", "dirpath=3"):
        SimpleProfiler(3)  # type: ignore[arg-type]
    with refuses(ConfigurationError, "PyTorchProfiler", "on_trace_ready="):
        PyTorchProfiler(on_trace_ready=print)
