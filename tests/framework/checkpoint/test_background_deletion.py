"""Old checkpoints are deleted on a thread: training does not wait, and nothing is lost, leaked or left running."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import started_script
from small_fits import Tiny, capturing, loader, quiet_trainer

from phalanx import checkpoint
from phalanx.callbacks import ModelCheckpoint
from phalanx.framework.checkpoint import deletion as checkpoint_deletion
from phalanx.framework.checkpoint.deletion import BackgroundDeletion
from phalanx.framework.checkpoint.write_plan import CheckpointContents, Shard
from phalanx.framework.checkpoint.writer import save
from phalanx.framework.core.errors import StorageError
from phalanx.framework.distributed.world import World
from phalanx.framework.system import atomic_directories

TOKEN = "0123456789abcdef"


def hidden(directory: Path, number: int, files: int = 2) -> Path:
    path = directory / f".{number}.ckpt.{TOKEN}.gone"
    path.mkdir()
    for index in range(files):
        (path / f"model-{index:05d}.safetensors").write_bytes(b"x" * 100)
    return path


def deleting_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "phalanx-delete"]


class Gate:
    """Holds up deletions until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.begun = threading.Event(), threading.Event()
        delete = atomic_directories.delete_hidden

        def gated(*args: Any) -> None:
            self.begun.set()
            assert self.opened.wait(30.0)
            delete(*args)

        monkeypatch.setattr(checkpoint_deletion, "delete_hidden", gated)


def test_all_are_deleted_and_no_thread_remains(tmp_path: Path) -> None:
    deletion = BackgroundDeletion()
    for number in range(12):
        deletion.add(hidden(tmp_path, number))
    assert deletion.wait(30.0)
    assert os.listdir(tmp_path) == []
    assert not deleting_threads()
    deletion.add(hidden(tmp_path, 0))
    # Another process has deleted this one.
    deletion.add(tmp_path / f".a.ckpt.{TOKEN}.gone")
    deletion.close()
    assert os.listdir(tmp_path) == []
    assert deletion.problems() == []
    assert not deleting_threads()


def test_a_full_queue_makes_the_next_one_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, deletion = Gate(monkeypatch), BackgroundDeletion()
    most = checkpoint_deletion._MOST_WAITING
    for number in range(most):
        deletion.add(hidden(tmp_path, number))
    added = threading.Thread(target=deletion.add, args=(hidden(tmp_path, most),))
    added.start()
    added.join(0.1)
    assert added.is_alive()
    gate.opened.set()
    added.join(30.0)
    assert not added.is_alive()
    assert deletion.wait(30.0)
    assert os.listdir(tmp_path) == []


def test_closing_early_leaves_hidden_directories_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, deletion = Gate(monkeypatch), BackgroundDeletion()
    for number in range(3):
        deletion.add(hidden(tmp_path, number))
    assert gate.begun.wait(30.0)
    threading.Timer(0.2, gate.opened.set).start()
    deletion.close(0.01)
    assert not deleting_threads()
    assert len(os.listdir(tmp_path)) == 3
    checkpoint.clean_leftovers(tmp_path)
    assert os.listdir(tmp_path) == []


def test_what_cannot_be_deleted_is_reported_and_does_not_stop_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubborn, other = hidden(tmp_path, 0), hidden(tmp_path, 1)
    delete = atomic_directories.delete_hidden

    def failing(path: Path, stopped: Any) -> None:
        if path == stubborn:
            raise StorageError("Permission denied")
        delete(path, stopped)

    monkeypatch.setattr(checkpoint_deletion, "delete_hidden", failing)
    deletion = BackgroundDeletion()
    deletion.add(stubborn)
    deletion.add(other)
    deletion.close()
    assert deletion.problems() == ["An old checkpoint was not deleted: Permission denied"]
    assert deletion.problems() == []
    assert os.listdir(tmp_path) == [stubborn.name]


def test_another_process_leaves_what_is_being_deleted_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, opened = threading.Event(), threading.Event()
    path, unlink = hidden(tmp_path, 0), os.unlink

    def slow(*args: Any, **kwargs: Any) -> None:
        reached.set()
        assert opened.wait(30.0)
        unlink(*args, **kwargs)

    monkeypatch.setattr(os, "unlink", slow)
    deletion = BackgroundDeletion()
    deletion.add(path)
    assert reached.wait(30.0)
    assert checkpoint.clean_leftovers(tmp_path, shared=True) == []
    opened.set()
    deletion.close()
    assert os.listdir(tmp_path) == []


def test_room_is_made_before_a_save_that_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, deletion = Gate(monkeypatch), BackgroundDeletion()
    deletion.add(hidden(tmp_path, 0))
    snapshot = CheckpointContents({"model": {"w": Shard.whole(torch.ones(3))}})
    save(tmp_path / "a.ckpt", snapshot, World.single(), deletion=deletion)
    assert len(os.listdir(tmp_path)) == 2
    monkeypatch.setattr(checkpoint_deletion, "free_bytes", lambda directory: 11)
    threading.Timer(0.2, gate.opened.set).start()
    save(tmp_path / "b.ckpt", snapshot, World.single(), deletion=deletion)
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "b.ckpt"]


def test_training_does_not_wait_for_deletions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    kept, steps = tmp_path / "kept", list[int]()

    class Watched(Tiny):
        def on_train_batch_end(self, *_: Any) -> None:
            steps.append(self.trainer.global_step)
            if len(steps) == 4:
                # All three saves so far have returned, with the first deletion still held up.
                visible = [name for name in os.listdir(kept) if not name.startswith(".")]
                assert visible == ["step=3.ckpt"]
                assert len(os.listdir(kept)) == 3
                gate.opened.set()

    saver = ModelCheckpoint(kept, filename="{step}", every_n_train_steps=1, save_top_k=1)
    trainer = quiet_trainer(tmp_path, saver, max_epochs=1)
    notes = capturing(trainer)
    trainer.fit(Watched(), loader(24))
    assert os.listdir(kept) == [f"step={steps[-1]}.ckpt"]
    assert not deleting_threads()
    assert not any("deleted" in note for note in notes)


KILLED = """
import sys, time, torch
from pathlib import Path
from phalanx.framework.checkpoint.deletion import BackgroundDeletion, hide
from phalanx.framework.checkpoint.write_plan import CheckpointContents, Shard
from phalanx.framework.checkpoint.writer import save
from phalanx.framework.distributed.world import World
value, deletion, before = 0, BackgroundDeletion(), None
while True:
    value += 1
    model = {str(index): Shard.whole(torch.full((20_000,), float(value))) for index in range(20)}
    path = Path(sys.argv[1]) / f"{value}.ckpt"
    snapshot = CheckpointContents({"model": model}, {"value": value})
    save(path, snapshot, World.single(), also=path.with_name("last.ckpt"), deletion=deletion)
    save(path.with_name("replaced.ckpt"), snapshot, World.single())
    if before is not None:
        deletion.add(hide(before))
    before = path
    if value == 2:
        print("ready", flush=True)
"""


def test_a_process_killed_while_it_saves_and_deletes_leaves_full_checkpoints_and_no_space_is_lost(
    tmp_path: Path,
) -> None:
    for attempt in range(6):
        with started_script(KILLED, str(tmp_path)) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            time.sleep(0.003 + attempt * 0.0077)
            process.send_signal(signal.SIGKILL)
            process.communicate()
        # A checkpoint that was being replaced is put back.
        checkpoint.clean_leftovers(tmp_path)
        visible = [tmp_path / name for name in os.listdir(tmp_path) if not name.startswith(".")]
        # The newest, perhaps its predecessor, its second name, and the one that is replaced each time.
        assert 3 <= len(visible) <= 4
        for path in visible:
            assert checkpoint.verify(path) == []
            found = checkpoint.load(path)
            assert all((tensor == found["value"]).all() for tensor in found["state_dict"].values())
        assert sorted(os.listdir(tmp_path)) == sorted(path.name for path in visible)
        for path in visible:
            checkpoint.remove(path)
        assert os.listdir(tmp_path) == []
