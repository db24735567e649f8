"""The page on the checkpoint format suffices: the reader that is written in it, and knows nothing else, agrees."""

from __future__ import annotations

import ast
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bit_flips import saved
from ranks import run_on_ranks

import phalanx
from phalanx import checkpoint
from phalanx.framework.checkpoint.safetensors_io import CODES
from phalanx.framework.checkpoint.write_plan import CheckpointContents, Shard
from phalanx.framework.distributed.world import World

PAGE = Path(phalanx.__file__).parent / "docs" / "checkpoint-format.md"


@pytest.fixture(scope="module")
def reader() -> dict[str, Any]:
    """The names that the page's reader defines."""
    text = PAGE.read_text(encoding="utf-8").split("## A reader")[1]
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    definitions = code.partition("\nmanifest = open_manifest(path)")[0]
    loaded = {
        alias.name if isinstance(node, ast.Import) else node.module
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert loaded == {"json", "os", "re", "stat", "math", "numpy", "xxhash"}
    names: dict[str, Any] = {}
    exec(compile(definitions, str(PAGE), "exec", dont_inherit=True), names)
    return names


def agrees(reader: dict[str, Any], path: Path) -> int:
    """Assert that the page's reader and phalanx read the same; return how many tensors that were."""
    manifest, opened = reader["open_manifest"](path), checkpoint.open_checkpoint(path)
    assert list(manifest["sections"]) == opened.sections
    assert manifest["document"] == opened.document
    count = 0
    for section in opened.sections:
        found, expected = reader["read_section"](path, manifest, section), opened.read_section(section)
        assert list(found) == list(expected)
        for name, tensor in expected.items():
            wide = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
            # Of dtypes that numpy lacks the page gives bytes.
            lacks = tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point
            array = (wide.contiguous().view(torch.uint8) if lacks else wide).numpy()
            assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
            np.testing.assert_array_equal(found[name], array)
            count += 1
    return count


def test_it_reads_what_two_ranks_wrote(tmp_path: Path, reader: dict[str, Any]) -> None:
    assert agrees(reader, saved(tmp_path, "fsdp")) > 10
    (tmp_path / "flat").mkdir()
    assert agrees(reader, saved(tmp_path / "flat", "zero3")) > 10


def save_split(path: str) -> None:
    world = World.from_environment("cpu")
    generator = torch.Generator().manual_seed(1)
    shards = {}
    for dtype in CODES:
        tensor = torch.randint(0, 2, (4, 6), generator=generator).to(dtype)
        low = 3 * world.rank
        name = str(dtype).removeprefix("torch.")
        shards[f"{name}.columns"] = Shard(tensor[:, low : low + 3].contiguous(), (4, 6), (0, low))
        first, last = ((0, 5), (5, 24))[world.rank]
        shards[f"{name}.flat"] = Shard.flat(tensor.reshape(-1)[first:last], (4, 6), first)
        shards[f"{name}.scalar"] = Shard.whole(tensor[0, 0].clone())
        shards[f"{name}.empty"] = Shard.whole(tensor[:0])
    shards["tied"] = shards["float32.columns"]
    checkpoint.save(path, CheckpointContents({"model": shards}, {"a": [None, 1.5]}, world.rank), world, sharded=True)
    world.close()


def test_it_reads_every_dtype_and_every_kind_of_piece(tmp_path: Path, reader: dict[str, Any]) -> None:
    run_on_ranks(2, save_split, str(tmp_path / "a.ckpt"))
    assert agrees(reader, tmp_path / "a.ckpt") == 4 * len(CODES) + 3


def test_it_refuses_flipped_bits_and_links(tmp_path: Path, reader: dict[str, Any]) -> None:
    path, generator = saved(tmp_path), random.Random(5)
    contents = {file: file.read_bytes() for file in sorted(path.iterdir())}

    def read() -> None:
        manifest = reader["open_manifest"](path)
        for section in manifest["sections"]:
            reader["read_section"](path, manifest, section)

    for file, data in contents.items():
        for _ in range(8):
            flipped, bit = bytearray(data), generator.randrange(8 * len(data))
            flipped[bit // 8] ^= 1 << bit % 8
            file.write_bytes(flipped)
            with pytest.raises(reader["Damaged"]):
                read()
        file.write_bytes(data)
    read()
    file = path / "model-00001.safetensors"
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(reader["Damaged"]):
        read()
