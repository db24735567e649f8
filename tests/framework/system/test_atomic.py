"""A file or directory is there whole, or as it was before."""

from __future__ import annotations

import errno
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
from messages import refuses

from phalanx.checkpoint import clean_leftovers
from phalanx.framework.core.errors import StorageError
from phalanx.framework.system import atomic_directories, atomic_files as atomic, file_lock

TOKEN = "0123456789abcdef"


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def filled(path: Path, text: str) -> Path:
    path.mkdir()
    (path / "file").write_text(text)
    return path


def test_a_file_is_written_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "file.txt"
    atomic.write_text(path, "one")
    atomic.write_text(path, "zwei äöü\n")
    atomic.write_bytes(tmp_path / "raw", b"\x00\xff")

    assert path.read_bytes() == "zwei äöü\n".encode()
    assert (tmp_path / "raw").read_bytes() == b"\x00\xff"
    assert names(path.parent) == ["file.txt"]


def test_a_full_disk_leaves_the_old_file_and_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    atomic.write_text(path, "old")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with refuses(StorageError, "file'", "No space") as info:
        atomic.write_text(path, "x" * 1000)

    assert info.value.errno == errno.ENOSPC
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_an_interrupt_leaves_no_temporary_file(tmp_path: Path) -> None:
    def interrupted() -> None:
        with atomic.new_file(tmp_path / "file") as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()

    assert names(tmp_path) == []


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_directory_is_published_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    if not can_exchange:
        monkeypatch.setattr(atomic_directories, "_exchange", lambda first, second: False)
    target = tmp_path / "target"
    for text in ("first", "second"):
        atomic_directories.replace_directory(filled(tmp_path / ".new", text), target)

        assert (target / "file").read_text() == text
        assert names(tmp_path) == ["target"]


def test_a_failed_second_rename_puts_the_old_directory_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, new = filled(tmp_path / "target", "old"), filled(tmp_path / ".new", "new")
    rename = os.rename

    def failing(source: Any, goal: Any) -> None:
        if Path(source) == new:
            raise OSError(errno.EIO, "Input/output error")
        rename(source, goal)

    monkeypatch.setattr(atomic_directories, "_exchange", lambda first, second: False)
    monkeypatch.setattr(os, "rename", failing)
    with refuses(StorageError, "target'"):
        atomic_directories.replace_directory(new, target)

    assert (target / "file").read_text() == "old"


@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize("is_there", [True, False])
def test_a_publication_that_cannot_be_synced_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool, is_there: bool
) -> None:
    target, new = tmp_path / "target", filled(tmp_path / ".new", "new")
    if is_there:
        filled(target, "old")
    if not can_exchange:
        monkeypatch.setattr(atomic_directories, "_exchange", lambda first, second: False)

    def failing(path: Path) -> None:
        if path == tmp_path:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(atomic_directories, "sync_directory", failing)
    with refuses(StorageError, "target'"):
        atomic_directories.replace_directory(new, target)

    assert (new / "file").read_text() == "new"
    assert names(tmp_path) == ([".new", "target"] if is_there else [".new"])
    assert not is_there or (target / "file").read_text() == "old"


def test_a_link_is_replaced_itself(tmp_path: Path) -> None:
    other = filled(tmp_path / "other", "precious")
    target = tmp_path / "target"
    target.symlink_to(other)
    atomic_directories.replace_directory(filled(tmp_path / ".new", "new"), target)

    assert not target.is_symlink()
    assert (other / "file").read_text() == "precious"
    assert names(tmp_path) == ["other", "target"]


def test_deleting_never_follows_links(tmp_path: Path) -> None:
    precious = filled(tmp_path / "precious", "x")
    doomed = filled(tmp_path / "doomed", "y")
    (doomed / "link").symlink_to(precious)
    (tmp_path / "alias").symlink_to(precious)
    atomic_directories.remove_tree(doomed)
    for remove in (atomic_directories.remove_tree, atomic_directories.hide_directory):
        with refuses(StorageError, "alias'"):
            remove(tmp_path / "alias")
        with pytest.raises(StorageError):
            remove(precious / "file")

    assert names(tmp_path) == ["alias", "precious"]
    assert names(precious) == ["file"]


def test_leftovers_are_cleaned_and_nothing_else(tmp_path: Path) -> None:
    precious = filled(tmp_path / "precious", "x")
    filled(tmp_path / f".a.ckpt.{TOKEN}.tmp", "half")
    filled(tmp_path / f".a.ckpt.{TOKEN}.gone", "half")
    (tmp_path / f".report.json.{TOKEN}.tmp").write_text("half")
    keep = [".git", ".a.ckpt.tmp", f".a.ckpt.{TOKEN}", f"a.ckpt.{TOKEN}.tmp"]
    for name in keep:
        filled(tmp_path / name, "mine")
    (tmp_path / f".link.{TOKEN}.tmp").symlink_to(precious)

    assert len(clean_leftovers(tmp_path)) == 3
    assert names(tmp_path) == sorted([*keep, f".link.{TOKEN}.tmp", "precious"])
    assert names(precious) == ["file"]
    assert clean_leftovers(tmp_path / "missing") == []


def test_an_interrupted_replacement_is_put_back(tmp_path: Path) -> None:
    filled(tmp_path / f".a.ckpt.{TOKEN}.old", "previous")
    filled(tmp_path / "b.ckpt", "newer")
    filled(tmp_path / f".b.ckpt.{TOKEN}.old", "older")
    clean_leftovers(tmp_path)

    assert (tmp_path / "a.ckpt" / "file").read_text() == "previous"
    assert (tmp_path / "b.ckpt" / "file").read_text() == "newer"
    assert names(tmp_path) == ["a.ckpt", "b.ckpt"]


@pytest.mark.parametrize("inherited", [False, True])
def test_a_released_lock_is_free_for_all(tmp_path: Path, inherited: bool) -> None:
    handle, other = (os.open(tmp_path, os.O_RDONLY) for _ in range(2))
    fork = multiprocessing.get_context("fork")
    over = fork.Event()
    # As a worker of a loader, which is forked with all that is open.
    process = fork.Process(target=over.wait, args=(30.0,))
    try:
        assert file_lock.lock(handle) is True
        assert file_lock.lock(other) is False
        if inherited:
            process.start()
        file_lock.unlock(handle)
        assert file_lock.lock(other) is True
    finally:
        os.close(other)
        over.set()
        if inherited:
            process.join()
