"""Files of pretrained weights: what is read of them, and what is refused in one sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refuses
from safetensors.torch import load_file, save_file

from phalanx.checkpoint import fingerprint
from phalanx.framework.core.errors import CheckpointError
from phalanx.framework.pretrained.weight_folder import INDEX, SINGLE, open_weights


@pytest.fixture
def tensors() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a.weight": torch.randn(7, 5, 3, generator=generator),
        "b": torch.arange(11, dtype=torch.int64),
        "c": torch.randn(4, 6, generator=generator).bfloat16(),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
    }


@pytest.fixture
def folder(tmp_path: Path, tensors: dict[str, Any]) -> Path:
    """A folder of two files and an index."""
    names = list(tensors)
    files = {"model-00001-of-00002.safetensors": names[:2], "model-00002-of-00002.safetensors": names[2:]}
    path = tmp_path / "model"
    path.mkdir()
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, path / file)
    index = {"metadata": {}, "weight_map": {name: file for file, held in files.items() for name in held}}
    (path / INDEX).write_text(json.dumps(index))
    return path


def test_every_part_of_a_tensor_is_read_alone(folder: Path, tensors: dict[str, Any]) -> None:
    weights = open_weights(folder)
    assert weights.tensors.keys() == tensors.keys()
    for name, expected in tensors.items():
        stored = weights.tensors[name]
        assert (stored.shape, stored.dtype) == (tuple(expected.shape), expected.dtype)
        assert torch.equal(stored.read(), expected)
        assert torch.equal(stored.read_flat(0, 0), expected.reshape(-1)[:0])
    cube = tensors["a.weight"]
    stored = weights.tensors["a.weight"]
    assert torch.equal(stored.read_flat(8, 41), cube.reshape(-1)[8:49])
    for offsets, shape in (
        ((2, 0, 0), (3, 5, 3)),
        ((0, 1, 0), (7, 2, 3)),
        ((1, 2, 1), (5, 3, 2)),
        ((6, 4, 2), (1, 1, 1)),
    ):
        box = cube
        for dim, (start, size) in enumerate(zip(offsets, shape, strict=True)):
            box = box.narrow(dim, start, size)
        assert torch.equal(stored.read_slice(offsets, shape), box)


def test_a_slice_reads_few_bytes_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.framework.pretrained.weight_folder._ROWS_BYTES", 60)
    stored = open_weights(folder).tensors["a.weight"]
    assert torch.equal(stored.read_slice((1, 2, 0), (5, 2, 3)), stored.read()[1:6, 2:4])


def test_files_behind_links_are_read(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "snapshot"
    cache.mkdir()
    for path in folder.iterdir():
        (cache / path.name).symlink_to(path)
    assert torch.equal(open_weights(cache).tensors["b"].read(), torch.arange(11))


def with_header(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def of_one_tensor(shape: list[int], offsets: list[int]) -> bytes:
    return json.dumps({"a.weight": {"dtype": "F32", "shape": shape, "data_offsets": offsets}}).encode()


@pytest.mark.parametrize(
    ("damaged", "name"),
    [
        (lambda data: data[:-1], "bytes"),
        (lambda data: data + b"\0", "bytes"),
        (lambda data: data[:40], "header"),
        (lambda data: b"", "header"),
        (lambda data: (1 << 40).to_bytes(8, "little") + b"{}", "header"),
        (lambda data: with_header(b"{'a': 1}"), "Expecting"),
        (lambda data: with_header(of_one_tensor([9], [0, 4]), b"\0" * 4), "[9]"),
        (lambda data: with_header(of_one_tensor([1], [-4, 0])), "[1]"),
    ],
    ids=["truncated", "longer", "short header", "empty", "huge header", "not json", "wrong size", "into the header"],
)
def test_damaged_files_are_refused(damaged: Callable[[bytes], bytes], name: str, folder: Path) -> None:
    first = folder / "model-00001-of-00002.safetensors"
    first.write_bytes(damaged(first.read_bytes()))
    with refuses(CheckpointError, "00001-of-00002", name):
        open_weights(folder)


def test_a_missing_file_is_refused(folder: Path) -> None:
    (folder / "model-00001-of-00002.safetensors").unlink()
    with refuses(CheckpointError, "00001-of-00002", "No such file"):
        open_weights(folder)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", "model.bin", ""])
def test_an_index_names_files_of_its_own_folder_alone(name: str, folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["b"] = name
    (folder / INDEX).write_text(json.dumps(index))
    with refuses(CheckpointError, "model.safetensors.index.json"):
        open_weights(folder)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("{", "Expecting"),
        ("[]", "object"),
        ('{"weight_map": [1]}', "weight_map"),
        ('{"weight_map": {"a": 1}}', "weight_map"),
        ('{"weight_map": {"z": "model-00001-of-00002.safetensors"}}', "'z'"),
        ('{"a": 1, "a": 2}', "twice"),
    ],
)
def test_a_damaged_index_is_refused(text: str, name: str, folder: Path) -> None:
    (folder / INDEX).write_text(text)
    with refuses(CheckpointError, name):
        open_weights(folder)


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with refuses(CheckpointError, "huggingface_hub.snapshot_download"):
        open_weights("gpt2-that-is-not-here")
    with refuses(CheckpointError, "model.safetensors.index.json"):
        open_weights(tmp_path)
    torch.save({"a": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    with refuses(CheckpointError, "pytorch_model.bin"):
        open_weights(tmp_path)
    with refuses(CheckpointError, "pytorch_model.bin"):
        open_weights(tmp_path / "pytorch_model.bin")
    save_file({"a": torch.zeros(1)}, tmp_path / SINGLE)
    (tmp_path / "config.json").write_text('{"quantization_config": {"bits": 4}}')
    with refuses(CheckpointError, "quantized", "config.json"):
        open_weights(tmp_path)


def test_a_file_that_is_replaced_in_between_is_refused(folder: Path, tmp_path: Path) -> None:
    weights = open_weights(folder)
    save_file({"b": torch.zeros(3)}, folder / "model-00001-of-00002.safetensors")
    with refuses(CheckpointError, "model-00001-of-00002.safetensors"):
        weights.tensors["b"].read()


def test_fingerprints_are_those_of_the_contents(folder: Path, tmp_path: Path) -> None:
    copied = tmp_path / "another name"
    shutil.copytree(folder, copied)
    (copied / "config.json").write_text("{}")
    assert fingerprint(copied) == fingerprint(folder)
    assert fingerprint(copied, contents=False) == fingerprint(folder, contents=False)
    assert fingerprint(folder) != fingerprint(folder, contents=False)
    changed = load_file(copied / "model-00002-of-00002.safetensors")
    changed["c"][0, 0] += 1
    save_file(changed, copied / "model-00002-of-00002.safetensors")
    assert fingerprint(copied) != fingerprint(folder)
    assert fingerprint(copied, contents=False) == fingerprint(folder, contents=False)
    save_file({"other": torch.zeros(2)}, tmp_path / "one.safetensors")
    shutil.copy(tmp_path / "one.safetensors", tmp_path / "two.safetensors")
    assert fingerprint(tmp_path / "one.safetensors") == fingerprint(tmp_path / "two.safetensors")
