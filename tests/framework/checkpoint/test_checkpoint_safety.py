"""A damaged or hostile checkpoint is refused with a sentence: it never loads, crashes, or reaches outside."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hostile import read_all, rewrite, write_manifest
from messages import refuses

from phalanx import checkpoint
from phalanx.framework.checkpoint.safetensors_io import bytes_of
from phalanx.framework.checkpoint.write_plan import CheckpointContents, Shard
from phalanx.framework.core.errors import CheckpointError
from phalanx.framework.distributed.world import World

NUM_FLIPS = 400


@pytest.fixture
def path(tmp_path: Path) -> Path:
    model = {"weight": torch.randn(3, 4), "bias": torch.randn(4).bfloat16(), "count": torch.tensor(3)}
    sections = {
        "model": {name: Shard.whole(tensor) for name, tensor in model.items()},
        "optimizer": {"weight.exp_avg": Shard.whole(torch.randn(3, 4))},
    }
    sections["model"]["tied"] = sections["model"]["weight"]
    document = {"progress": {"global_step": 3}, "lr": 1e-05, "text": "\u00e9", "none": None}
    return checkpoint.save(tmp_path / "a.ckpt", CheckpointContents(sections, document, {"seed": 1}), World.single())


def refused(path: Path) -> str:
    """Assert that nothing accepts the checkpoint; return the message."""
    assert checkpoint.verify(path) != []
    with pytest.raises(CheckpointError) as info:
        read_all(path)
    assert checkpoint.newest_good(path.parent, lambda text: None) is None
    return str(info.value)


def test_no_flipped_bit_is_accepted(path: Path) -> None:
    generator = random.Random(0)
    files = sorted(path.iterdir())
    content = {file: file.read_bytes() for file in files}
    bits = [(file, bit) for file, data in content.items() for bit in range(8 * len(data))]
    # The first bytes of each file tell how to read the rest: all of their bits, and a sample of the others.
    chosen = [(file, bit) for file, bit in bits if bit < 8 * 8] + generator.sample(bits, NUM_FLIPS)
    for file, bit in chosen:
        data = bytearray(content[file])
        data[bit // 8] ^= 1 << bit % 8
        file.write_bytes(data)

        assert checkpoint.verify(path) != [], (file, bit)
        with pytest.raises(CheckpointError):
            read_all(path)
        file.write_bytes(content[file])
    assert checkpoint.verify(path) == []


def test_no_truncated_or_longer_file_is_accepted(path: Path) -> None:
    for file in sorted(path.iterdir()):
        data = file.read_bytes()
        for other in (b"", data[:-1], data[: len(data) // 2], data + b"\0"):
            file.write_bytes(other)
            refused(path)
            assert not checkpoint.is_complete(path)
        file.write_bytes(data)
    assert checkpoint.is_complete(path)


def test_a_missing_file_is_refused(path: Path) -> None:
    for file in sorted(path.iterdir()):
        data = file.read_bytes()
        file.unlink()
        assert file.name in refused(path)
        file.write_bytes(data)


def test_anything_but_a_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path, name in [(tmp_path, "manifest"), (tmp_path / "file", "file"), (tmp_path / "no", "no")]:
        with refuses(CheckpointError, name, str(path)):
            checkpoint.load(path)
        assert checkpoint.verify(path) != []


def test_a_newer_format_is_refused_by_name(path: Path) -> None:
    rewrite(path, lambda fields: fields.update(version=3, phalanx="9.9"))
    assert "version 3, written by phalanx '9.9'" in refused(path)


@pytest.mark.parametrize("name", ["manifest.json", "model-00000.safetensors"])
def test_links_and_pipes_in_it_are_refused(path: Path, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    shutil.move(path / name, outside)
    (path / name).symlink_to(outside)
    assert "is a link" in refused(path)
    (path / name).unlink()
    os.mkfifo(path / name)
    assert "not a regular file" in refused(path)


HOSTILE_NAMES = ["../outside-00000.safetensors", "/etc/passwd", "model-00000.safetensors/..", "", "a\0b", ".", "..", 3]


@pytest.mark.parametrize("name", HOSTILE_NAMES, ids=repr)
def test_file_names_cannot_lead_outside(path: Path, tmp_path: Path, name: Any) -> None:
    shutil.copy(path / "model-00000.safetensors", tmp_path / "outside-00000.safetensors")

    def redirect(fields: dict[str, Any]) -> None:
        fields["files"][name] = fields["files"].pop("model-00000.safetensors")
        for record in fields["sections"]["model"].values():
            for part in record.get("parts", []):
                part["file"] = name

    rewrite(path, redirect)
    refused(path)


def weight(fields: dict[str, Any]) -> Any:
    return fields["sections"]["model"]["weight"]


HUGE = 2**63
CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "huge shape": lambda fields: weight(fields).update(shape=[HUGE, HUGE]),
    "huge shape with nothing in it": lambda fields: weight(fields).update(shape=[0, HUGE // 2, HUGE // 2], parts=[]),
    "huge tensor": lambda fields: (
        weight(fields).update(shape=[1 << 40, 4]) or weight(fields)["parts"][0].update(shape=[1 << 40, 4])
    ),
    "negative shape": lambda fields: weight(fields).update(shape=[-3, -4]),
    "no shape": lambda fields: weight(fields).update(shape=12),
    "float shape": lambda fields: weight(fields).update(shape=[3.0, 4]),
    "bool shape": lambda fields: weight(fields).update(shape=[True, 12]),
    "many dims": lambda fields: weight(fields).update(shape=[1] * 1000),
    "gap": lambda fields: weight(fields).update(shape=[4, 4]),
    "no parts": lambda fields: weight(fields).update(parts=[]),
    "parts twice": lambda fields: weight(fields)["parts"].append(weight(fields)["parts"][0]),
    "offset beyond": lambda fields: weight(fields)["parts"][0].update(offsets=[1, 0]),
    "negative offset": lambda fields: weight(fields)["parts"][0].update(offsets=[-1, 0]),
    "start before": lambda fields: weight(fields)["parts"][0].update(start=0),
    "start beyond": lambda fields: weight(fields)["parts"][0].update(start=10**9),
    "start negative": lambda fields: weight(fields)["parts"][0].update(start=-8),
    "other section's file": lambda fields: weight(fields)["parts"][0].update(file="optimizer-00000.safetensors"),
    "unknown file": lambda fields: weight(fields)["parts"][0].update(file="model-00009.safetensors"),
    "dtype": lambda fields: weight(fields).update(dtype="I32"),
    "unknown dtype": lambda fields: weight(fields).update(dtype="PICKLE"),
    "dtype of another size": lambda fields: weight(fields).update(dtype="F64"),
    "checksum": lambda fields: weight(fields)["parts"][0].update(xxh3_64="0" * 16),
    "checksum is no text": lambda fields: weight(fields)["parts"][0].update(xxh3_64=7),
    "alias of nothing": lambda fields: fields["sections"]["model"].update(tied={"alias": "nothing"}),
    "alias of itself": lambda fields: fields["sections"]["model"].update(tied={"alias": "tied"}),
    "alias circle": lambda fields: fields["sections"]["model"].update(tied={"alias": "u"}, u={"alias": "tied"}),
    "reserved name": lambda fields: fields["sections"]["model"].update(__metadata__={"alias": "weight"}),
    "section name": lambda fields: fields["sections"].update({"../x": {}}),
    "sections": lambda fields: fields.update(sections=[1]),
    "files": lambda fields: fields.update(files=None),
    "header size": lambda fields: fields["files"]["model-00000.safetensors"].update(header_size=0),
    "size": lambda fields: fields["files"]["model-00000.safetensors"].update(size=HUGE * 4),
    "format": lambda fields: fields.update(format="other"),
    "version": lambda fields: fields.update(version="1"),
    "world size": lambda fields: fields.update(world_size=None),
    "no document": lambda fields: fields.pop("document"),
    "rank documents": lambda fields: fields.update(rank_documents={}),
    "renamed": lambda fields: fields["sections"]["model"].update(other=fields["sections"]["model"].pop("bias")),
}
# Only seen beside the header of the file: a plain reader of safetensors would read something else.
ONLY_VERIFY = {"dtype", "renamed"}


@pytest.mark.parametrize("change", CHANGES)
def test_a_hostile_manifest_is_refused(path: Path, change: str) -> None:
    rewrite(path, CHANGES[change])
    if change in ONLY_VERIFY:
        assert "contradicts the manifest" in checkpoint.verify(path)[0]
    else:
        refused(path)


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"version": 1, "version": 1}',
        '{"format": NaN}',
        '{"format": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"format": ' + "9" * 10_000 + "}",
        '{"format": "phalanx-checkpoint", "version": 1',
    ],
    ids=["empty", "duplicate", "NaN", "deep", "long number", "cut"],
)
def test_hostile_json_is_refused(path: Path, text: str) -> None:
    write_manifest(path, text)
    refused(path)


def test_a_key_that_appears_twice_is_refused(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    text = "{" + text[31:].replace('"sharded":false', '"sharded":false,\n"sharded":true')
    write_manifest(path, text)
    assert "twice" in refused(path)


def test_a_pickle_in_its_place_is_never_executed(path: Path) -> None:
    (path / "model-00000.safetensors").write_bytes(b"cos\nsystem\n(S'touch /tmp/executed'\ntR.")
    refused(path)
