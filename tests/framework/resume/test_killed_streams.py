"""A run on the stream of a data library, killed in the middle of an epoch, sees each sample once after it resumes."""

from __future__ import annotations

from pathlib import Path

import pytest
from killed_streams import killed_and_resumed
from library_streams import COUNT


@pytest.mark.parametrize(
    ("kind", "ranks", "workers", "kill"),
    [
        ("parquet", 2, 2, 4),
        ("json+shuffled", 1, 2, 5),
        ("split:json", 2, 0, 3),
        ("tar+shuffled", 2, 0, 3),
    ],
)
def test_after_a_kill_each_sample_is_seen_once(tmp_path: Path, kind: str, ranks: int, workers: int, kill: int) -> None:
    variables = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    alike = (ranks, workers)
    before, after, output = killed_and_resumed(
        tmp_path, kind, kill, alike, alike, env=variables, libraries=("datasets", "webdataset")
    )
    assert "differs" not in output
    assert sorted(before + after) == list(range(COUNT))
