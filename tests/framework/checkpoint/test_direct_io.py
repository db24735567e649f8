"""Files written past the page cache hold what was written, whatever the file system says."""

from __future__ import annotations

import errno
import fcntl
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from phalanx.framework.checkpoint import direct_io as direct_file
from phalanx.framework.checkpoint.direct_io import DirectFile

BUFFER = 1 << 16


@pytest.fixture(autouse=True)
def _small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_file, "_BUFFER_BYTES", BUFFER)


def is_direct(handle: int) -> bool:
    return bool(fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_DIRECT)


def written(path: Path, size: int, announced: int | None = None) -> bytes:
    """Write random bytes in pieces of random sizes; return them."""
    draw = random.Random(size)
    data = draw.randbytes(size)
    file = DirectFile(path, size if announced is None else announced)
    rest = memoryview(data)
    while rest:
        piece = draw.randrange(1, 2 * BUFFER)
        file.write(rest[:piece])
        rest = rest[piece:]
    assert file.size == size
    file.sync()
    file.close()
    return data


@pytest.mark.parametrize("size", [0, 1, 4096, BUFFER - 1, BUFFER, BUFFER + 1, 7 * BUFFER, 9 * BUFFER + 12345])
def test_a_file_holds_what_was_written(tmp_path: Path, size: int) -> None:
    data = written(tmp_path / "file", size)
    assert (tmp_path / "file").read_bytes() == data


@pytest.mark.parametrize("announced", [0, 1, 3 * BUFFER])
def test_more_may_be_written_than_was_announced(tmp_path: Path, announced: int) -> None:
    data = written(tmp_path / "file", 5 * BUFFER + 17, announced)
    assert (tmp_path / "file").read_bytes() == data


def patched(monkeypatch: pytest.MonkeyPatch, refuse: Callable[[int, int], int | None]) -> None:
    """Have ``os.pwrite`` fail with what ``refuse`` says of a handle and an offset."""
    pwrite = os.pwrite

    def called(handle: int, data: memoryview, offset: int) -> int:
        if code := refuse(handle, offset):
            raise OSError(code, os.strerror(code))
        # The kernel may take less than it was given.
        return pwrite(handle, data[: max(4096, len(data) // 2)], offset)

    monkeypatch.setattr(os, "pwrite", called)


def test_what_is_written_in_parts_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patched(monkeypatch, lambda handle, offset: None)
    data = written(tmp_path / "file", 6 * BUFFER + 5)
    assert (tmp_path / "file").read_bytes() == data


def test_a_file_system_that_takes_no_direct_writes_gets_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[int] = []

    def refuse(handle: int, offset: int) -> int | None:
        if is_direct(handle):
            refused.append(offset)
            return errno.EINVAL
        return None

    patched(monkeypatch, refuse)
    data = written(tmp_path / "file", 6 * BUFFER + 5)
    assert (tmp_path / "file").read_bytes() == data
    probe = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        fcntl.fcntl(probe, fcntl.F_SETFL, os.O_DIRECT)
    except OSError:
        assert not refused
    else:
        assert refused
    finally:
        os.close(probe)


@pytest.mark.parametrize("offset", [0, 2 * BUFFER, 6 * BUFFER])
def test_a_disk_that_fails_is_heard_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset: int) -> None:
    patched(monkeypatch, lambda handle, at: errno.ENOSPC if at >= offset else None)
    file = DirectFile(tmp_path / "file", 7 * BUFFER)

    def write() -> None:
        for _ in range(6):
            file.write(memoryview(bytes(BUFFER)))
        file.write(memoryview(b"the end"))
        file.sync()

    with pytest.raises(OSError, match="No space"):
        write()
    file.close()


def test_a_file_that_is_there_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError):
        DirectFile(tmp_path / "file", 3)
    assert (tmp_path / "file").read_text() == "mine"
