"""Files whose bytes are sent to the disk while they are written hold exactly what was written."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from phalanx.framework.checkpoint import safetensors_io
from phalanx.framework.checkpoint.safetensors_io import StreamedFile

STEP = 1 << 16


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_io, "_SYNC_BYTES", STEP)


def written(path: Path, size: int, announced: int | None = None) -> bytes:
    """Write random bytes in pieces of random sizes; return them."""
    draw = random.Random(size)
    data = draw.randbytes(size)
    file = StreamedFile(path, size if announced is None else announced)
    rest = memoryview(data)
    while rest:
        piece = draw.randrange(1, 2 * STEP)
        file.write(rest[:piece])
        rest = rest[piece:]
    assert file.size == size
    file.sync()
    file.close()
    return data


@pytest.mark.parametrize("size", [0, 1, STEP - 1, STEP, STEP + 1, 9 * STEP + 12345])
def test_a_file_holds_what_was_written(tmp_path: Path, size: int) -> None:
    data = written(tmp_path / "file", size)
    assert (tmp_path / "file").read_bytes() == data


@pytest.mark.parametrize("announced", [0, 3 * STEP])
def test_more_may_be_written_than_was_announced(tmp_path: Path, announced: int) -> None:
    data = written(tmp_path / "file", 5 * STEP + 17, announced)
    assert (tmp_path / "file").read_bytes() == data


def patch_write(monkeypatch: pytest.MonkeyPatch, refuse: Callable[[int], int | None]) -> None:
    """Have ``os.write`` take half of what it is given, and fail with the code that ``refuse`` returns at an offset."""
    write = os.write

    def called(handle: int, data: memoryview) -> int:
        if code := refuse(os.lseek(handle, 0, os.SEEK_CUR)):
            raise OSError(code, os.strerror(code))
        return write(handle, data[: max(4096, len(data) // 2)])

    monkeypatch.setattr(os, "write", called)


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patch_write(monkeypatch, lambda offset: None)
    data = written(tmp_path / "file", 6 * STEP + 5)
    assert (tmp_path / "file").read_bytes() == data


@pytest.mark.parametrize("offset", [0, 6 * STEP])
def test_a_full_disk_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset: int) -> None:
    patch_write(monkeypatch, lambda at: errno.ENOSPC if at >= offset else None)
    with pytest.raises(OSError, match="No space"):
        written(tmp_path / "file", 7 * STEP)


def test_an_existing_file_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError):
        StreamedFile(tmp_path / "file", 3)
    assert (tmp_path / "file").read_text() == "mine"
