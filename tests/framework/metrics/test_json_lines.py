"""``JsonLines``: whole lines alone, whatever happens to the process or the disk."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
import torch

from phalanx.framework.metrics.json_lines import JsonLines, read_lines, whole_bytes


def test_lines_are_read_back_with_their_ends(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "a.jsonl")
    for number in range(3):
        lines.append({"step": number, "text": "ä\n"})
    lines.close()
    found = list(read_lines(lines.path))
    assert [record for _, record in found] == [{"step": number, "text": "ä\n"} for number in range(3)]
    assert found[-1][0] == lines.size == lines.path.stat().st_size
    assert list(read_lines(lines.path, found[0][0])) == found[1:]


def test_numbers_that_json_lacks_are_text(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "a.jsonl")
    lines.append({"nan": float("nan"), "deep": [{"inf": float("-inf")}], "tensor": torch.tensor(2), "path": Path("x")})
    lines.close()

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    assert json.loads(lines.path.read_text(), parse_constant=refuse) == {
        "nan": "nan", "deep": [{"inf": "-inf"}], "tensor": 2, "path": "x"
    }  # fmt: skip


@pytest.mark.parametrize("torn", [b'{"step": 1', b"x" * 100_000])
def test_a_line_that_a_kill_cut_off_is_removed_by_the_next_one(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"step": 0}\n' + torn)
    assert whole_bytes(path) == 12
    assert [record for _, record in read_lines(path)] == [{"step": 0}]
    lines = JsonLines(path)
    lines.append({"step": 2})
    lines.close()
    assert path.read_text() == '{"step": 0}\n{"step":2}\n'


def test_keep_drops_lines_and_appends_after_them(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "a.jsonl")
    lines.append({"step": 0})
    size = lines.size
    lines.append({"step": 1})
    lines.keep(size)
    lines.keep(10**6)
    lines.append({"step": 2})
    lines.close()
    assert [record["step"] for _, record in read_lines(lines.path)] == [0, 2]


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "a.jsonl")
    lines.append({"step": 0})
    size = lines.size
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, limit[1]))
    try:
        with pytest.raises(OSError, match="jsonl"):
            lines.append({"text": "x" * 100})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert lines.path.stat().st_size == size
    lines.append({"step": 1})
    lines.close()
    assert [record["step"] for _, record in read_lines(lines.path)] == [0, 1]


def test_a_file_that_does_not_exist_has_no_lines(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "none" / "a.jsonl")
    lines.keep(10)
    assert lines.size == 0
    assert list(read_lines(lines.path)) == []
