"""Saves that fail: what is older stays, the run goes on, and it ends where nothing can be saved any more."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refuses
from ranks import run_on_ranks
from small_fits import Tiny, capturing, loader, quiet_trainer

from phalanx import checkpoint
from phalanx.callbacks import Callback, ModelCheckpoint
from phalanx.framework.core.errors import ConfigurationError, NonFiniteError, StorageError
from phalanx.framework.core.size_text import size_text
from phalanx.framework.system.atomic_directories import HiddenDirectory

BOTH = pytest.mark.parametrize("asynchronous", [False, True], ids=["here", "behind"])


class At(Callback):
    """Does something once an optimizer step is done, before checkpoints are saved."""

    def __init__(self, actions: Mapping[int, Callable[[], object]]) -> None:
        self.actions = actions

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        # What was begun before is over: the test says what fails.
        trainer.finish_saves()
        self.actions.get(trainer.global_step, lambda: None)()


class Wide(Tiny):
    """Has weights of 400 kB."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Linear(1000, 100)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + 0 * self.wide.weight.sum()


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def verified(directory: Path) -> list[str]:
    """Return the checkpoints of a directory, each of which is good."""
    for name in names(directory):
        assert checkpoint.verify(directory / name) == []
    return names(directory)


def every_step(directory: Path, **settings: Any) -> ModelCheckpoint:
    return ModelCheckpoint(directory, filename="{step}", every_n_train_steps=1, **{"save_top_k": -1, **settings})


def remove_all(directory: Path) -> None:
    """Delete a directory in which the run may be deleting an old checkpoint at the same time."""
    while directory.exists():
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", place], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip("only root may mount a small disk here; a limit for each file stands in for it in another test")
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


def test_a_full_disk_costs_the_saves_that_fell_into_it(small_disk: Path) -> None:
    kept = small_disk / "kept"
    ballast = small_disk / "ballast"

    def fill() -> None:
        with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
            deque((file.write(bytes(4096)) for _ in count()), maxlen=0)

    saver = every_step(kept, asynchronous=True, save_last=True)
    # The run's own directory lies on the same disk.
    trainer = quiet_trainer(small_disk, [At({3: fill, 5: ballast.unlink}), saver], max_epochs=1)
    notes = capturing(trainer)
    trainer.fit(Wide(), loader(24))

    assert trainer.state.finished
    assert verified(kept) == ["last.ckpt", "step=1.ckpt", "step=2.ckpt", "step=5.ckpt", "step=6.ckpt"]
    told = [note for note in notes if "was not saved" in note]
    assert len(told) == 2
    needed = 4 * sum(p.numel() for p in Wide().parameters())
    for note in told:
        assert f"{size_text(needed)} are needed, " in note
        assert " are free" in note
        assert str(kept / "step=") in note
    assert checkpoint.open_checkpoint(kept / "last.ckpt").document["progress"]["global_step"] == 6


def test_a_limit_of_file_size_leaves_older_checkpoints_and_records(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    saver = every_step(kept, save_top_k=1, keep_last=2)
    seen: list[dict[str, Any]] = []

    def lift() -> None:
        seen.append(saver.state_dict())
        limit(before[0])

    actions = {2: lambda: limit(100_000), 3: lambda: seen.append(saver.state_dict()), 4: lift}
    trainer = quiet_trainer(tmp_path, [At(actions), saver], max_epochs=1)
    notes = capturing(trainer)
    try:
        trainer.fit(Wide(), loader(16))
    finally:
        limit(before[0])

    # Steps 2 and 3 fell into it; the records were as after step 1 each time.
    assert [state["newest"] for state in seen] == [str(kept / "step=1.ckpt")] * 2
    assert [state["due"] for state in seen] == [1, 1]
    assert len([note for note in notes if "File too large" in note]) == 2
    assert verified(kept) == ["step=1.ckpt", "step=4.ckpt"]


def test_a_directory_that_was_removed_is_made_again(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    saver = every_step(root / "kept", save_top_k=1, save_last=True)
    trainer = quiet_trainer(root, [At({3: lambda: remove_all(root)}), saver], max_epochs=1)
    trainer.fit(Tiny(), loader())

    assert trainer.state.finished
    assert verified(root / "kept") == ["last.ckpt", "step=4.ckpt"]


def test_a_directory_removed_while_a_save_is_under_way_ends_nothing(tmp_path: Path) -> None:
    kept = tmp_path / "kept"

    class Removing(Callback):
        runs_last = True

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 2:
                shutil.rmtree(kept, ignore_errors=True)

    saver = every_step(kept, asynchronous=True)
    trainer = quiet_trainer(tmp_path, [saver, Removing()], max_epochs=1)
    trainer.fit(Wide(), loader())

    assert trainer.state.finished
    # step=2.ckpt may be there with a part of its files: it was deleted by the test while it was published.
    for step in (3, 4):
        assert checkpoint.verify(kept / f"step={step}.ckpt") == []


def fail_three_times(directory: Path, asynchronous: bool) -> tuple[str, int, int]:
    """Fit where nothing can be saved from step 2 on; return the error, its exit code, and the steps done."""

    def block() -> None:
        if torch.distributed.get_rank() == 0:
            shutil.rmtree(directory)
            directory.write_text("in the way")

    saver = every_step(directory, asynchronous=asynchronous)
    trainer = quiet_trainer(directory.parent, [At({2: block}), saver], max_epochs=1, devices=2, strategy="ddp")
    with pytest.raises(StorageError) as caught:
        trainer.fit(Tiny(), loader(64))
    return str(caught.value), caught.value.exit_code, trainer.global_step


@BOTH
def test_the_third_failure_in_a_row_ends_the_run_on_all_ranks(tmp_path: Path, asynchronous: bool) -> None:
    first, second = run_on_ranks(2, fail_three_times, tmp_path / "kept", asynchronous)
    assert first == second
    text, code, steps = first
    assert code == 74
    assert "third save in a row" in text
    assert str(tmp_path / "kept" / "step=4.ckpt") in text
    # Behind the training it is known at the next step at the latest.
    assert steps in ((4,) if not asynchronous else (4, 5))


def test_a_failure_is_forgotten_after_a_save_that_went_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync
    saver = every_step(tmp_path / "kept")
    trainer = quiet_trainer(tmp_path, saver, max_epochs=1)

    def failing(handle: int) -> None:
        if trainer.global_step % 3:
            raise OSError(5, "Input/output error")
        fsync(handle)

    notes = capturing(trainer)
    monkeypatch.setattr(os, "fsync", lambda handle: failing(handle) if trainer.run and trainer.global_step else None)
    trainer.fit(Tiny(), loader(36))
    assert verified(tmp_path / "kept") == ["step=3.ckpt", "step=6.ckpt", "step=9.ckpt"]
    assert sum("(1 of 3 in a row)" in note for note in notes) == 3
    assert sum("(2 of 3 in a row)" in note for note in notes) == 3


@BOTH
def test_a_run_whose_last_save_failed_does_not_end_well(tmp_path: Path, asynchronous: bool) -> None:
    kept = tmp_path / "kept"

    def block() -> None:
        shutil.rmtree(kept)
        kept.write_text("in the way")

    saver = ModelCheckpoint(kept, filename="{step}", asynchronous=asynchronous)
    trainer = quiet_trainer(tmp_path, [At({4: block}), saver], max_epochs=1)
    with refuses(StorageError, "step=4"):
        trainer.fit(Tiny(), loader(16))
    assert trainer.global_step == 4


@BOTH
def test_a_save_that_a_user_asked_for(tmp_path: Path, asynchronous: bool) -> None:
    """Here it raises at once; behind the training it is told of at the next step."""
    (tmp_path / "file").write_text("in the way")
    raised: list[StorageError] = []

    class Asking(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                try:
                    trainer.save_checkpoint(tmp_path / "file" / "a.ckpt", asynchronous=asynchronous)
                except StorageError as error:
                    raised.append(error)

    trainer = quiet_trainer(tmp_path, Asking(), max_epochs=1)
    notes = capturing(trainer)
    # Nothing came after it that would make up for it.
    with refuses(StorageError, "a.ckpt") if asynchronous else nullcontext():
        trainer.fit(Tiny(), loader())
    told = [note for note in notes if str(tmp_path / "file" / "a.ckpt") in note]
    assert (len(raised), len(told)) == ((0, 1) if asynchronous else (1, 0))


def saves_after_an_error(root: str) -> list[str]:
    class Saves(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            raise ValueError("the cause")

        def on_exception(self, trainer: Any, *_: Any) -> None:
            trainer.save_checkpoint(Path(root) / "late.ckpt")

    trainer = quiet_trainer(Path(root), Saves(), max_epochs=1, devices=2, strategy="ddp")
    notes = capturing(trainer)
    with pytest.raises(ValueError, match="the cause"):
        trainer.fit(Tiny(), loader())
    return notes


def test_after_an_error_no_rank_waits_for_others_in_a_save(tmp_path: Path) -> None:
    for notes in run_on_ranks(2, saves_after_an_error, str(tmp_path)):
        assert notes[-1].startswith(
            "Saves.on_exception failed: ConfigurationError: save_checkpoint was called after an"
        )


def test_non_finite_weights_are_not_saved_asynchronously(tmp_path: Path) -> None:
    saver = every_step(tmp_path / "kept", asynchronous=True, save_top_k=1)
    module = Tiny()

    def spoil() -> None:
        module.layer.weight.data[0, 0] = float("inf")

    trainer = quiet_trainer(tmp_path, [At({4: spoil}), saver], max_epochs=1)
    notes = capturing(trainer)
    trainer.fit(module, loader())
    assert verified(tmp_path / "kept") == ["step=3.ckpt"]
    assert saver.best_model_path == str(tmp_path / "kept" / "step=3.ckpt")
    assert any("layer.weight is not finite at optimizer step 4, so step=4.ckpt was not saved" in note for note in notes)


# ---- before the first step -------------------------------------------------------------------------------------------


def test_a_directory_that_cannot_be_written_is_refused_before_the_first_step(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_text("in the way")
    module = Tiny()
    before = module.layer.weight.clone()
    with refuses(StorageError, "kept'"):
        quiet_trainer(tmp_path, ModelCheckpoint(place / "kept"), max_epochs=1).fit(module, loader())
    assert torch.equal(module.layer.weight, before)


def test_too_little_disk_space_is_reported_before_the_first_step(small_disk: Path, tmp_path: Path) -> None:
    class Huge(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.huge = torch.nn.Linear(1000, 1000)

    trainer = quiet_trainer(tmp_path, ModelCheckpoint(small_disk / "kept", every_n_epochs=5, save_last=True))
    notes = capturing(trainer)
    module = Huge()
    trainer.settings.max_epochs = 0
    trainer.fit(module, loader())
    assert any("A checkpoint takes about 4.0 MB" in note and "are free" in note for note in notes)


def probe_where_rank_one_cannot_write(directory: Path) -> str:
    def failing(path: Path, data: bytes) -> None:
        raise OSError(30, "Read-only file system")

    with pytest.MonkeyPatch.context() as patch:
        if torch.distributed.get_rank() == 1:
            patch.setattr("phalanx.framework.resume.save_directory.write_synced", failing)
        trainer = quiet_trainer(directory, ModelCheckpoint(directory / "kept"), devices=2, strategy="fsdp")
        with pytest.raises(StorageError) as caught:
            trainer.fit(Tiny(), loader())
    return str(caught.value)


def test_all_ranks_hear_of_one_that_cannot_write(tmp_path: Path) -> None:
    for text in run_on_ranks(2, probe_where_rank_one_cannot_write, tmp_path):
        assert "rank 1: " in text
        assert "Read-only file system" in text
    assert names(tmp_path / "kept") == []


# ---- leftovers -------------------------------------------------------------------------------------------------------

TOKEN = "0123456789abcdef"


def leftover(directory: Path, name: str, kind: str = "tmp", file: str = "model-00000.safetensors") -> str:
    path = directory / f".{name}.{TOKEN}.{kind}"
    path.mkdir(parents=True)
    (path / file).write_text("half")
    return path.name


def test_what_killed_saves_left_is_deleted_at_the_next_start(tmp_path: Path) -> None:
    saver = ModelCheckpoint(save_last=True)
    quiet_trainer(tmp_path, saver, max_epochs=1).fit(Tiny(), loader())
    kept = Path(saver.last_model_path).parent
    before = names(kept)
    leftover(kept, "epoch=7-step=9.ckpt")
    leftover(kept, "anything.ckpt", "gone")
    (kept.parent / f".report.json.{TOKEN}.tmp").write_text("half")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (kept / f".link.ckpt.{TOKEN}.tmp").symlink_to(elsewhere)
    foreign = leftover(kept, "notes", file="diary.txt")
    quiet_trainer(tmp_path, ModelCheckpoint(save_last=True), max_epochs=1).fit(Tiny(), loader())
    # Another version of the run: not its directory.
    assert len(names(kept)) == len(before) + 4
    quiet_trainer(tmp_path, ModelCheckpoint(save_last=True), max_epochs=1)
    shutil.rmtree(tmp_path / "phalanx_logs" / "version_1")
    quiet_trainer(tmp_path, ModelCheckpoint(save_last=True), max_epochs=1).fit(Tiny(), loader(), ckpt_path="auto")
    assert set(names(kept)) - set(before) == {f".link.ckpt.{TOKEN}.tmp", foreign}
    assert not (kept.parent / f".report.json.{TOKEN}.tmp").exists()


def test_in_a_shared_directory_only_what_is_dead_and_could_be_ours_is_deleted(tmp_path: Path) -> None:
    kept = tmp_path / "shared"
    dead = leftover(kept, "epoch=0-step=4.ckpt")
    leftover(kept, "epoch=3-step=16-v2.ckpt")
    leftover(kept, "last.ckpt", "gone")
    other = leftover(kept, "other-run.ckpt")
    alive = HiddenDirectory(kept / "epoch=1-step=8.ckpt")
    try:
        quiet_trainer(tmp_path, ModelCheckpoint(kept), max_epochs=1).fit(Tiny(), loader())
        assert names(kept) == sorted([other, alive.path.name, "epoch=0-step=4.ckpt"])
        assert dead not in names(kept)
    finally:
        alive.release()


def test_a_save_holds_its_directory_until_it_is_over(tmp_path: Path) -> None:
    """Another run that starts in the middle of a save leaves it alone."""
    kept = tmp_path / "kept"
    fsync, cleaned = os.fsync, list[Path]()

    def cleaning(handle: int) -> None:
        cleaned.extend(checkpoint.clean_leftovers(kept, shared=True))
        fsync(handle)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", cleaning)
        quiet_trainer(tmp_path, ModelCheckpoint(kept), max_epochs=1).fit(Tiny(), loader())
    assert cleaned == []
    assert verified(kept) == ["epoch=0-step=4.ckpt"]


def test_an_interrupt_gives_an_asynchronous_save_time_to_finish(tmp_path: Path) -> None:
    class Interrupting(Callback):
        runs_last = True

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 2:
                raise KeyboardInterrupt

    trainer = quiet_trainer(tmp_path, [every_step(tmp_path / "kept", asynchronous=True), Interrupting()])
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(Wide(), loader())
    assert verified(tmp_path / "kept") == ["step=1.ckpt", "step=2.ckpt"]


def test_nonfinite_weights_raise_where_a_user_saves(tmp_path: Path) -> None:
    module = Tiny()
    module.layer.weight.data[0, 0] = float("nan")

    class Asking(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            with refuses(NonFiniteError, "layer.weight"):
                trainer.save_checkpoint(tmp_path / "a.ckpt")
            trainer.should_stop = True

    quiet_trainer(tmp_path, Asking(), max_epochs=1, nonfinite="ignore").fit(module, loader())
    assert not (tmp_path / "a.ckpt").exists()


def test_what_is_not_a_checkpoint_is_not_replaced_and_costs_that_save(tmp_path: Path) -> None:
    kept = tmp_path / "kept"

    def litter() -> None:
        (kept / "last.ckpt" / ".DS_Store").write_bytes(b"")

    def tidy() -> None:
        (kept / "last.ckpt" / ".DS_Store").unlink()

    trainer = quiet_trainer(tmp_path, [At({3: litter, 5: tidy}), every_step(kept, save_last=True)], max_epochs=1)
    notes = capturing(trainer)
    trainer.fit(Tiny(), loader(24))
    assert trainer.state.finished
    assert len([note for note in notes if "is not a checkpoint of phalanx" in note]) == 2
    assert "last.ckpt" in verified(kept)


def test_an_old_checkpoint_that_cannot_be_looked_at_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(path: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("phalanx.callbacks.model_checkpoint.hide", refusing)
    trainer = quiet_trainer(tmp_path, [every_step(tmp_path / "kept", save_top_k=1)], max_epochs=1)
    notes = capturing(trainer)
    trainer.fit(Tiny(), loader(8))
    assert trainer.state.finished
    assert any("An old checkpoint was not deleted" in note for note in notes)


class Unsaved(Callback):
    """Has a state that no checkpoint can hold."""

    def state_dict(self) -> dict[str, Any]:
        return {"where": object()}


def test_a_state_that_cannot_be_saved_is_refused_before_the_first_step(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, [Unsaved(), every_step(tmp_path / "kept")], max_epochs=1)
    with refuses(ConfigurationError, "['where']"):
        trainer.fit(Tiny(), loader(8))
    assert trainer.global_step == 0
