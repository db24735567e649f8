"""Uploads, downloads and deletions with two machines, kills and concurrent training."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from phalanx.framework.storage.cached_folder import MANIFEST, CachedFolder, delete_unfinished, record_deletion, refresh
from phalanx.framework.storage.store import LocalStore

TENSORS = "model-00000.safetensors"


class Interrupted(Exception):
    """The process is killed."""


class Watched(LocalStore):
    """A store that does something before or after an object is written."""

    before: Callable[[str], None] = staticmethod(lambda name: None)
    after: Callable[[str], None] = staticmethod(lambda name: None)

    def put(self, name: str, source: bytes | Path) -> None:
        self.before(name)
        super().put(name, source)
        self.after(name)


@pytest.fixture
def store(tmp_path: Path) -> Watched:
    return Watched("file:///bucket", tmp_path / "bucket")


def save(folder: Path, name: str, number: int) -> str:
    """Write a checkpoint as training does, at once; return its checksum."""
    checksum, draft = f"{number:016x}", folder / f".{name}.draft"
    draft.mkdir(parents=True)
    (draft / TENSORS).write_text(f"tensors {number}")
    files = {TENSORS: {"size": (draft / TENSORS).stat().st_size}}
    (draft / MANIFEST).write_text(json.dumps({"checksum": checksum, "files": files}, separators=(",", ":")))
    if (folder / name).exists():
        (folder / name).rename(folder / f".{name}.{number}.old")
    draft.rename(folder / name)
    return checksum


def delete(folder: Path, name: str) -> None:
    record_deletion(folder / name)
    shutil.rmtree(folder / name)


def whole(store: LocalStore) -> dict[str, str]:
    """Return the checksum of each checkpoint in the bucket; fail if one lacks its tensors."""
    found = {}
    for name in store.list():
        if name.endswith(f"/{MANIFEST}"):
            checkpoint, checksum = name.rpartition("/")[0], json.loads(store.read(name))["checksum"]
            assert store.read(f"{checkpoint}/{checksum}/{TENSORS}").decode() == f"tensors {int(checksum, 16)}"
            found[checkpoint] = checksum
    return found


def test_a_checkpoint_is_deleted_after_a_newer_one_is_there(tmp_path: Path, store: Watched) -> None:
    here = tmp_path / "here"
    folder = CachedFolder(here, store, here)
    save(here, "1.ckpt", 1)

    def train(name: str) -> None:
        if name == f"1.ckpt/{MANIFEST}":
            save(here, "2.ckpt", 2)
            delete(here, "1.ckpt")

    store.after = train
    folder.upload()
    assert whole(store) == {"1.ckpt": f"{1:016x}"}
    folder.upload()
    folder.upload()
    assert whole(store) == {"2.ckpt": f"{2:016x}"}


def test_metrics_are_there_before_the_checkpoint_that_continues_them(tmp_path: Path, store: Watched) -> None:
    here = tmp_path / "here"
    (here / "checkpoints").mkdir(parents=True)
    metrics = CachedFolder(here, store, here)
    folder = CachedFolder(here / "checkpoints", store, here, before_manifest=metrics.upload_files)
    (here / "metrics.csv").write_text("1\n")
    metrics.upload()
    # Training saves while an upload is in progress.
    (here / "metrics.csv").write_text("1\n2\n")
    save(here / "checkpoints", "2.ckpt", 2)

    def look(name: str) -> None:
        if name.endswith(MANIFEST):
            assert store.read("metrics.csv") == b"1\n2\n"

    store.before = look
    folder.upload()
    assert list(whole(store)) == ["checkpoints/2.ckpt"]


def test_what_is_missing_is_not_deleted(tmp_path: Path, store: Watched) -> None:
    here = tmp_path / "here"
    folder = CachedFolder(here, store, here)
    checksum = save(here, "1.ckpt", 1)
    folder.upload()
    shutil.rmtree(here / "1.ckpt")
    folder.upload()
    assert whole(store) == {"1.ckpt": checksum}
    refresh(here, store)
    assert (here / "1.ckpt" / MANIFEST).exists()


def test_a_deletion_outlives_a_kill(tmp_path: Path, store: Watched) -> None:
    here = tmp_path / "here"
    save(here, "1.ckpt", 1)
    save(here, "2.ckpt", 2)
    CachedFolder(here, store, here).upload()
    delete(here, "1.ckpt")
    # Another process begins with what is recorded.
    refresh(here, store)
    assert not (here / "1.ckpt").exists()
    CachedFolder(here, store, here).upload()
    assert list(whole(store)) == ["2.ckpt"]


def test_the_tensors_of_a_newer_checkpoint_in_the_bucket_stay(tmp_path: Path, store: Watched) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    save(here, "last.ckpt", 1)
    CachedFolder(here, store, here).upload()
    refresh(there, store)
    save(there, "last.ckpt", 2)
    CachedFolder(there, store, there).upload()
    delete_unfinished(here, store)
    assert whole(store) == {"last.ckpt": f"{2:016x}"}


def interrupted(folder: Path, store: Watched, at: str, moment: str = "before") -> None:
    """Kill an upload before or after an object is written, which is then not recorded."""

    def kill(name: str) -> None:
        if name.endswith(at):
            raise Interrupted

    setattr(store, moment, kill)
    with pytest.raises(Interrupted):
        CachedFolder(folder, store, folder).upload()
    setattr(store, moment, lambda name: None)


@pytest.mark.parametrize("at", [TENSORS, MANIFEST])
def test_a_machine_that_was_killed_does_not_replace_what_another_has_saved(
    tmp_path: Path, store: Watched, at: str
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    save(here, "last.ckpt", 1)
    CachedFolder(here, store, here).upload()
    save(here, "last.ckpt", 2)
    interrupted(here, store, at)
    refresh(there, store)
    save(there, "last.ckpt", 3)
    CachedFolder(there, store, there).upload()
    refresh(here, store)
    delete_unfinished(here, store)
    CachedFolder(here, store, here).upload()
    assert whole(store) == {"last.ckpt": f"{3:016x}"}


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("at", [TENSORS, MANIFEST, "metrics.csv"])
def test_a_machine_that_was_killed_goes_on_with_its_own(tmp_path: Path, store: Watched, at: str, moment: str) -> None:
    here = tmp_path / "here"
    save(here, "last.ckpt", 1)
    CachedFolder(here, store, here).upload()
    save(here, "last.ckpt", 2)
    (here / "metrics.csv").write_text("1\n")
    interrupted(here, store, at, moment)
    save(here, "last.ckpt", 3)
    (here / "metrics.csv").write_text("1\n2\n")
    refresh(here, store)
    delete_unfinished(here, store)
    CachedFolder(here, store, here).upload()
    assert whole(store) == {"last.ckpt": f"{3:016x}"}
    assert store.read("metrics.csv") == b"1\n2\n"


def test_what_is_replaced_is_deleted_though_lists_are_old(tmp_path: Path, store: Watched) -> None:
    here, old = tmp_path / "here", store.list()
    store.list = lambda below="": dict(old)  # type: ignore[method-assign]
    folder = CachedFolder(here, store, here)
    for number in (1, 2, 3):
        save(here, "last.ckpt", number)
        folder.upload()
    delete(here, "last.ckpt")
    save(here, "best.ckpt", 4)
    folder.upload()
    assert sorted(LocalStore.list(store)) == [f"best.ckpt/{4:016x}/{TENSORS}", f"best.ckpt/{MANIFEST}"]


def test_tensors_that_are_not_uploaded_stay_on_the_disk(tmp_path: Path, store: Watched) -> None:
    here = tmp_path / "here"
    folder = CachedFolder(here, store, here)
    for number in (1, 2):
        save(here, f"{number}.ckpt", number)
    folder.upload()
    save(here, "1.ckpt", 3)
    folder.evict(0)
    assert (here / "1.ckpt" / TENSORS).exists()
    assert not (here / "2.ckpt" / TENSORS).exists()
