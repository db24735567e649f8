"""Checkpoints: what is saved comes back, whatever it is, however it was split and whoever killed whom."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile import rewrite
from messages import refuses
from ranks import run_on_ranks
from safetensors.torch import load_file
from torch import Tensor

from phalanx import checkpoint
from phalanx.framework.checkpoint import safetensors_io as tensor_bytes, verify as verification, writer
from phalanx.framework.checkpoint.write_plan import CheckpointContents, Shard
from phalanx.framework.checkpoint.writer import Save
from phalanx.framework.core.errors import CheckpointError, ConfigurationError, StorageError, UnknownNameError
from phalanx.framework.distributed.world import World
from phalanx.framework.system import atomic_files as atomic


def whole(tensors: dict[str, Tensor]) -> dict[str, Shard]:
    return {name: Shard.whole(tensor) for name, tensor in tensors.items()}


def saved(path: Path, model: dict[str, Tensor], document: Any = None, **sections: dict[str, Tensor]) -> Path:
    content = {"model": whole(model), **{name: whole(tensors) for name, tensors in sections.items()}}
    return checkpoint.save(path, CheckpointContents(content, document or {}), World.single())


def same(first: Tensor, second: Tensor) -> bool:
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    return bytes(tensor_bytes.bytes_of(first.contiguous())) == bytes(tensor_bytes.bytes_of(second.contiguous()))


@contextlib.contextmanager
def two_ranks() -> Iterator[World]:
    """The world of a warm rank; closed afterwards."""
    world = World.from_environment("cpu")
    try:
        yield world
    finally:
        world.close()


SHAPES: list[tuple[int, ...]] = [(), (1,), (7,), (3, 5), (0,), (0, 3), (3, 0, 2), (2, 3, 4, 1)]


@pytest.mark.parametrize("dtype", tensor_bytes.CODES, ids=str)
def test_every_dtype_and_shape_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    model = {}
    for index, shape in enumerate(SHAPES):
        size = dtype.itemsize * max(1, int(torch.Size(shape).numel()))
        data = torch.randint(0, 2 if dtype is torch.bool else 256, (size,), dtype=torch.uint8)
        model[f"t.{index}"] = data.view(dtype)[: torch.Size(shape).numel()].reshape(shape)
    path = saved(tmp_path / "a.ckpt", model)

    assert checkpoint.verify(path) == []
    found = checkpoint.weights(path)
    assert list(found) == list(model)
    assert all(same(found[name], tensor) for name, tensor in model.items())


@pytest.mark.filterwarnings("ignore:.*quantize")
@pytest.mark.parametrize("dtype", [torch.complex128, torch.quint8])
def test_a_dtype_that_safetensors_lacks_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = (
        torch.zeros(2, dtype=dtype) if dtype.is_complex else torch.quantize_per_tensor(torch.ones(2), 1.0, 0, dtype)
    )
    with refuses(ConfigurationError, "'weight'"):
        saved(tmp_path / "a.ckpt", {"weight": tensor})
    assert os.listdir(tmp_path) == []


def test_views_of_every_kind_come_back(tmp_path: Path) -> None:
    base = torch.randn(6, 4)
    complex_base = torch.randn(3, dtype=torch.complex64)
    model = {
        "transposed": base.t(),
        "strided": base[::2, 1:3],
        "overlapping": base[1:],
        "expanded": torch.ones(1).expand(5),
        "conjugate": complex_base.conj(),
        "imaginary": complex_base.conj().imag,
        "parameter": torch.nn.Parameter(base[0]),
    }
    found = checkpoint.weights(saved(tmp_path / "a.ckpt", model))

    assert all(torch.equal(found[name], tensor) for name, tensor in model.items())


def test_tied_tensors_are_written_once(tmp_path: Path) -> None:
    shared = torch.randn(100, 100)
    path = saved(tmp_path / "a.ckpt", {"embedding": shared, "other": torch.ones(2), "head": shared, "view": shared.t()})
    opened = checkpoint.open_checkpoint(path)
    found = checkpoint.weights(path)

    assert opened.aliases("model") == {"head": "embedding"}
    assert list(found) == opened.names("model") == ["embedding", "other", "head", "view"]
    assert found["head"] is found["embedding"]
    assert torch.equal(opened.read("model", "head"), shared)
    assert torch.equal(found["view"], shared.t())
    assert set(load_file(path / "model-00000.safetensors")) == {"embedding", "other", "view"}


def test_documents_and_sections_come_back(tmp_path: Path) -> None:
    document = {"progress": {"global_step": 3}, "text": "ü", "order": {"b": 1, "a": 2}}
    snapshot = CheckpointContents({"model": {}, "state": whole({"x": torch.ones(2)})}, document, [1, "own"])
    opened = checkpoint.open_checkpoint(checkpoint.save(tmp_path / "a.ckpt", snapshot, World.single()))

    assert opened.document == document
    assert list(opened.document["order"]) == ["b", "a"]
    assert opened.rank_documents == [[1, "own"]]
    assert opened.sections == ["model", "state", "ranks"]
    assert opened.read_section("model") == {}


@pytest.mark.parametrize("document", [{"x": float("nan")}, {1: 2}, {"x": (1,)}, {"x": {1}}])
def test_a_document_that_is_not_strict_json_is_refused(tmp_path: Path, document: Any) -> None:
    with refuses(ConfigurationError, "codec.encode", varies=r"(?<=JSON) \(.*?\)"):
        saved(tmp_path / "a.ckpt", {}, document)
    assert os.listdir(tmp_path) == []


def test_names_that_are_not_there_are_named(tmp_path: Path) -> None:
    opened = checkpoint.open_checkpoint(saved(tmp_path / "a.ckpt", {"weight": torch.ones(2, 3)}))

    with refuses(UnknownNameError, "'weigth'", "'weight'"):
        opened.read("model", "weigth")
    with refuses(UnknownNameError, "'modle'", "'model'"):
        opened.read_section("modle")
    for offsets, shape in [((0, 0), (3, 3)), ((-1, 0), (1, 1)), ((0,), (2,)), ((0, 0), (-1, 1))]:
        with refuses(ConfigurationError, "[2, 3]"):
            opened.read_slice("model", "weight", offsets, shape)
    with refuses(ConfigurationError, "'weight'", "6 elements"):
        opened.read_flat("model", "weight", 4, 3)


# ---- parts of several ranks -----------------------------------------------------------------------------------------


def pieces_by_rows(tensor: Tensor, rank: int, size: int) -> Shard:
    rows = (tensor.shape[0] + size - 1) // size
    start = min(rank * rows, tensor.shape[0])
    return Shard(tensor[start : start + rows], tuple(tensor.shape), (start, *(0,) * (tensor.dim() - 1)))


def pieces_by_columns(tensor: Tensor, rank: int, size: int) -> Shard:
    columns = (tensor.shape[1] + size - 1) // size
    start = min(rank * columns, tensor.shape[1])
    piece = tensor[:, start : start + columns]
    return Shard(piece, tuple(tensor.shape), (0, start, *(0,) * (tensor.dim() - 2)))


def pieces_flat(tensor: Tensor, rank: int, size: int) -> Shard:
    length = (tensor.numel() + size - 1) // size
    start = min(rank * length, tensor.numel())
    return Shard.flat(tensor.reshape(-1)[start : start + length], tuple(tensor.shape), start)


SPLITS: dict[str, Callable[[Tensor, int, int], Shard]] = {
    "rows": pieces_by_rows,
    "columns": pieces_by_columns,
    "flat": pieces_flat,
}


def tensors_to_split() -> dict[str, Tensor]:
    return {
        "a": torch.arange(35.0).reshape(7, 5),
        "b": torch.arange(24).reshape(2, 3, 4).bfloat16(),
        "c": torch.ones(1, 9),
    }


def save_split(path: Path, split: str, name: str = "model") -> list[str]:
    with two_ranks() as world:
        shards = {key: SPLITS[split](tensor, world.rank, world.size) for key, tensor in tensors_to_split().items()}
        shards["tied"] = shards["a"]
        shards["everywhere"] = Shard.whole(torch.full((3,), 7.0))
        shards["scalar"] = Shard.whole(torch.tensor(5))
        shards["empty"] = Shard.whole(torch.empty(0, 4))
        checkpoint.save(
            path, CheckpointContents({name: shards}, {"from": world.rank}, {"rank": world.rank}), world, sharded=True
        )
        return sorted(os.listdir(path))


@pytest.mark.parametrize("split", SPLITS)
def test_parts_of_ranks_are_assembled_under_any_slicing(tmp_path: Path, split: str) -> None:
    path = tmp_path / "a.ckpt"
    listings = run_on_ranks(2, save_split, path, split)

    # All ranks return after the checkpoint was published.
    assert (
        listings
        == [["manifest.json", "model-00000.safetensors", "model-00001.safetensors", "ranks-00000.safetensors"]] * 2
    )
    assert checkpoint.verify(path) == []
    opened = checkpoint.open_checkpoint(path)
    assert opened.document == {"from": 0}
    assert opened.rank_documents == [{"rank": 0}, {"rank": 1}]
    assert opened.aliases("model") == {"tied": "a"}
    expected = {
        **tensors_to_split(),
        "everywhere": torch.full((3,), 7.0),
        "scalar": torch.tensor(5),
        "empty": torch.empty(0, 4),
    }
    for name, tensor in expected.items():
        # Opened anew, so that the first read of a part, which checks it, is a slice as well.
        assert same(checkpoint.open_checkpoint(path).read("model", name), tensor)
        for offsets, shape in boxes(tuple(tensor.shape)):
            for reader in (opened, checkpoint.open_checkpoint(path)):
                found = reader.read_slice("model", name, offsets, shape)
                cut = tensor[tuple(slice(at, at + size) for at, size in zip(offsets, shape, strict=True))]
                assert same(found, cut)
        flat = tensor.reshape(-1)
        for start in range(0, flat.numel() + 1, 3):
            for length in range(0, flat.numel() - start + 1, 4):
                assert same(opened.read_flat("model", name, start, length), flat[start : start + length])


def boxes(shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """A few boxes within a shape: all, empty, halves of each dim, one element."""
    found = [((0,) * len(shape), shape), (shape, (0,) * len(shape))]
    for dim, size in enumerate(shape):
        for start, stop in ((0, size // 2), (size // 2, size), (size // 3, size - size // 3)):
            offsets, extent = [0] * len(shape), list(shape)
            offsets[dim], extent[dim] = start, max(0, stop - start)
            found.append((tuple(offsets), tuple(extent)))
    if 0 not in shape:
        found.append((tuple(size // 2 for size in shape), (1,) * len(shape)))
    return found


def save_what_both_hold(folder: Path) -> bool:
    with two_ranks() as world:
        model = whole({str(index): torch.full((1000,), float(index)) for index in range(10)})
        checkpoint.save(folder / "shared.ckpt", CheckpointContents({"model": model}), world, sharded=True)
        sections = {"model": model} if world.is_global_zero else {}
        checkpoint.save(folder / "zero.ckpt", CheckpointContents(sections, {"from": world.rank}, world.rank), world)
        return checkpoint.is_complete(folder / "zero.ckpt")


def test_what_several_ranks_hold_is_written_by_rank_zero_or_shared_out(tmp_path: Path) -> None:
    assert run_on_ranks(2, save_what_both_hold, tmp_path) == [True, True]

    path = tmp_path / "zero.ckpt"
    assert sorted(os.listdir(path)) == ["manifest.json", "model-00000.safetensors", "ranks-00000.safetensors"]
    assert checkpoint.open_checkpoint(path).rank_documents == [0, 1]
    sizes = [file.stat().st_size for file in sorted((tmp_path / "shared.ckpt").glob("*.safetensors"))]
    assert len(sizes) == 2
    assert abs(sizes[0] - sizes[1]) < 4000
    for each in (path, tmp_path / "shared.ckpt"):
        assert [tensor[0].item() for tensor in checkpoint.weights(each).values()] == list(range(10))


def save_and_fail(path: Path, failure: str) -> tuple[str, str]:
    """Save on two ranks of which rank 1 fails; return what was raised on this one."""
    with two_ranks() as world:
        shard = pieces_by_rows(torch.ones(4, 2), world.rank, world.size)
        if failure == "gap" and world.rank == 1:
            shard = Shard(shard.tensor[:1], shard.shape, shard.offsets)
        if failure == "dtype" and world.rank == 1:
            shard = Shard(shard.tensor.double(), shard.shape, shard.offsets)
        if failure == "meta" and world.rank == 1:
            shard = Shard(shard.tensor.to("meta"), shard.shape, shard.offsets)
        pending = Save(path, CheckpointContents({"model": {"w": shard}}), world, sharded=True)
        raised = OSError(errno.ENOSPC, "No space left on device") if failure == "disk" else RuntimeError("boom")

        def failing(*args: Any) -> Any:
            raise raised

        with pytest.MonkeyPatch.context() as patch:
            if failure in ("disk", "crash") and world.rank == 1:
                patch.setattr(writer, "write_tensor_file", failing)
            try:
                pending.begin()
                pending.write()
                pending.finish()
            except Exception as error:
                return type(error).__name__, str(error)
        return "", ""


@pytest.mark.parametrize(
    ("failure", "kind", "text"),
    [
        ("disk", "StorageError", "rank 1: writing .*No space left on device.*32 B are needed"),
        ("crash", "StorageError", "rank 1: RuntimeError: boom"),
        ("meta", "ConfigurationError", "rank 1: model tensor 'w' is not a dense tensor with data"),
        ("gap", "ConfigurationError", "'w' is not covered exactly once.* 6 of 8 elements"),
        ("dtype", "ConfigurationError", "'w' differs between ranks"),
    ],
)
def test_a_failure_on_one_rank_is_raised_on_all(tmp_path: Path, failure: str, kind: str, text: str) -> None:
    path = saved(tmp_path / "a.ckpt", {"w": torch.zeros(2)})
    outcomes = run_on_ranks(2, save_and_fail, path, failure)

    for name, message in outcomes:
        assert name == kind
        assert re.search(text, message), message
    assert torch.equal(checkpoint.weights(path)["w"], torch.zeros(2))
    assert os.listdir(tmp_path) == ["a.ckpt"]


# ---- publishing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_anything_but_a_checkpoint_is_neither_replaced_nor_removed(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "thesis"
    if kind == "file":
        path.write_text("mine")
    else:
        path.mkdir()
        (path / "notes.txt").write_text("mine")

    with refuses(ConfigurationError, "thesis"):
        saved(path, {"w": torch.ones(1)})
    with refuses(StorageError, "thesis"):
        checkpoint.remove(path)
    assert os.listdir(tmp_path) == ["thesis"]


@pytest.mark.parametrize(("call", "code"), [*enumerate([errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.ENOSPC])])
def test_a_disk_error_at_any_sync_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int, code: int
) -> None:
    path = saved(tmp_path / "a.ckpt", {"w": torch.zeros(2)})
    done = 0

    def failing(handle: int) -> None:
        nonlocal done
        done += 1
        if done == call + 1:
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", failing)
    with refuses(StorageError, "a.ckpt", varies=r"\d+ B(?= are needed)"):
        saved(path, {"w": torch.ones(2)})

    assert checkpoint.weights(path)["w"].tolist() == [0.0, 0.0]
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(writer, "write_tensor_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        saved(tmp_path / "a.ckpt", {"w": torch.ones(2)})
    assert os.listdir(tmp_path) == []


# ---- choosing and tidying -------------------------------------------------------------------------------------------


def progress(step: int, batch: int = 0) -> dict[str, Any]:
    return {"progress": {"global_step": step, "batch": batch}}


def test_the_newest_good_one_is_found_by_progress(tmp_path: Path) -> None:
    notes: list[str] = []
    good = {"w": torch.ones(2)}
    saved(tmp_path / "z.ckpt", good, progress(1, 9))
    middle = saved(tmp_path / "m.ckpt", good, progress(5, 20))
    saved(tmp_path / "k.ckpt", good, progress(5, 10))
    saved(tmp_path / "nan.ckpt", {"bad": torch.tensor([float("nan")])}, progress(7))
    flipped = saved(tmp_path / "flipped.ckpt", good, progress(8)) / "model-00000.safetensors"
    flipped.write_bytes(flipped.read_bytes()[:-1] + b"\x01")
    (saved(tmp_path / "half.ckpt", good, progress(9)) / "manifest.json").unlink()
    saved(tmp_path / f".tmp.ckpt.{'0' * 16}.tmp", good, progress(10))
    (tmp_path / "link.ckpt").symlink_to(middle)

    assert checkpoint.newest_good(tmp_path, notes.append) == middle
    assert [note.split()[1] for note in notes] == ["half.ckpt:", "flipped.ckpt:", "nan.ckpt:"]
    assert "'bad' is not finite" in notes[2]
    assert checkpoint.newest_good(tmp_path / "missing", notes.append) is None


def test_remove_deletes_a_checkpoint_and_of_a_link_only_the_link(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.ckpt", {"w": torch.ones(2)})
    (tmp_path / "best.ckpt").symlink_to(path)
    checkpoint.remove(tmp_path / "best.ckpt")
    assert checkpoint.verify(path) == []

    (path / "manifest.json").write_text("damaged")
    checkpoint.remove(path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("value", "dtype", "good"),
    [
        (float("nan"), torch.float32, False),
        (float("inf"), torch.bfloat16, False),
        (float("-inf"), torch.float64, False),
        (float("nan"), torch.float8_e4m3fn, False),
        (float("nan"), torch.complex64, False),
        (60000.0, torch.float16, True),
        (3e38, torch.float32, True),
        (7, torch.int64, True),
    ],
)
def test_nonfinite_tensors_are_named(value: float, dtype: torch.dtype, good: bool) -> None:
    tensors = {"fine": torch.ones(2), "empty": torch.empty(0), "suspect": torch.full((5,), value).to(dtype)}

    assert checkpoint.has_nonfinite(tensors) == (None if good else "suspect")


def test_the_manifest_records_whether_the_model_is_finite(tmp_path: Path) -> None:
    inf = {"x": torch.tensor([float("inf")])}

    assert checkpoint.open_checkpoint(saved(tmp_path / "a.ckpt", {"x": torch.ones(1)}, optimizer=inf)).finite
    assert not checkpoint.open_checkpoint(saved(tmp_path / "b.ckpt", inf)).finite


def test_load_gives_one_dict(tmp_path: Path) -> None:
    from phalanx.framework.checkpoint import codec

    document, tensors = codec.encode({"epoch": 3, "ema": {"decay": 0.9, "w": torch.ones(2)}})
    path = saved(tmp_path / "a.ckpt", {"w": torch.zeros(2)}, document, state=tensors, optimizer={"w": torch.ones(1)})
    found = checkpoint.load(path)

    assert sorted(found) == ["ema", "epoch", "optimizer_tensors", "state_dict"]
    assert found["epoch"] == 3
    assert found["ema"]["w"].tolist() == [1.0, 1.0]


def test_consolidate_writes_one_file_that_loads_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    run_on_ranks(2, save_split, path, "rows")
    out = checkpoint.consolidate(path, tmp_path / "model.safetensors")
    found, expected = load_file(out), checkpoint.weights(path)

    assert set(found) == set(expected)
    assert all(same(found[name], tensor) for name, tensor in expected.items())
    with refuses(ConfigurationError, "model.safetensors"):
        checkpoint.consolidate(path, out)
    (tmp_path / "dir").mkdir()
    assert checkpoint.consolidate(path, tmp_path / "dir") == tmp_path / "dir" / "model.safetensors"


def test_a_damaged_checkpoint_is_not_consolidated(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.ckpt", {"w": torch.ones(4)})
    file = path / "model-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    for size in (None, 100):
        with refuses(CheckpointError, "checksum", "'w'"):
            checkpoint.consolidate(path, tmp_path / "out", size)
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_an_interrupted_replacement_names_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path / "a.ckpt", {"w": torch.ones(1)})
    path.rename(atomic.hidden_sibling(path, "old"))
    with refuses(CheckpointError, "phalanx.checkpoint.clean_leftovers"):
        checkpoint.open_checkpoint(path)

    checkpoint.clean_leftovers(tmp_path)
    assert checkpoint.verify(path) == []


def test_what_is_replaced_while_it_is_read_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path / "a.ckpt", {"w": torch.zeros(8)})
    opened = checkpoint.open_checkpoint(path)
    saved(path, {"w": torch.ones(8)})
    with refuses(CheckpointError, "a.ckpt"):
        opened.read("model", "w")

    begun: list[str] = []
    check = verification.problems_of

    def replacing(*given: Any) -> list[str]:
        if not begun:
            begun.append("once")
            saved(path, {"w": torch.full((8,), 2.0)})
        return check(*given)

    monkeypatch.setattr(verification, "problems_of", replacing)
    assert checkpoint.verify(path) == []
    assert begun


def test_documents_of_ranks_in_the_manifest_of_an_older_version_are_read(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.ckpt", {"w": torch.ones(2)})
    assert checkpoint.inspect(path).format_version == 1
    rewrite(path, lambda fields: fields.update(rank_documents=[{"rank": 0}, {"rank": 1}]))
    assert checkpoint.open_checkpoint(path).rank_documents == [{"rank": 0}, {"rank": 1}]


def test_the_section_of_the_documents_of_ranks_is_taken(tmp_path: Path) -> None:
    with refuses(ConfigurationError, "section 'ranks' is the one of rank_document="):
        checkpoint.save(tmp_path / "a.ckpt", CheckpointContents({"ranks": {}}), World.single())
