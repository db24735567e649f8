"""What must not grow with the number of ranks, or no faster than it."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import pytest
import torch
import torch.distributed as dist
from ranks import run_on_ranks

from phalanx import checkpoint
from phalanx.framework.checkpoint import reader as read
from phalanx.framework.checkpoint.manifest import Manifest, Part, TensorRecord
from phalanx.framework.checkpoint.safetensors_header import FileRecord, open_tensor_file
from phalanx.framework.checkpoint.verify import problems_of
from phalanx.framework.checkpoint.write_plan import CheckpointContents, Shard
from phalanx.framework.data.samplers import EvaluationSampler, TrainingSampler
from phalanx.framework.distributed import object_frames
from phalanx.framework.distributed.control import Triggers
from phalanx.framework.distributed.object_frames import frame_bytes
from phalanx.framework.distributed.world import Pending, World
from phalanx.framework.system.processes import allow_open_files


class Pretended(World):
    """One of many ranks, of which each says what this one says; sums are taken one rank after the other."""

    def __init__(self, size: int) -> None:
        super().__init__(World.single().placement, torch.device("cpu"))
        self.size = self.data_size = size

    def control_reduce(self, numbers: Sequence[float]) -> Pending:
        sums = own = torch.tensor(numbers, dtype=torch.float64)
        for _ in range(self.size - 1):
            sums = sums + own
        return World.single().control_reduce(sums.tolist())


@pytest.mark.parametrize("size", [1024, 4096, 8192])
def test_thousands_of_ranks_at_one_late_step_agree(size: int) -> None:
    """Squares of steps beyond a million, summed over thousands of ranks, are more than a float64 holds exactly."""
    for step in (0, 999_983, 1_600_001, 3_000_001, 2**31 + 1):
        triggers = Triggers(Pretended(size))
        triggers.launch(step, weight=1.0, batches=1)
        assert triggers.read().total_weight == size


# ---- messages -------------------------------------------------------------------------------------------------------


def test_the_buffers_of_all_ranks_stay_small_together() -> None:
    assert [frame_bytes(ranks) for ranks in (2, 64)] == [16 * 1024] * 2
    assert max(ranks * frame_bytes(ranks) for ranks in range(2, 2049)) <= 1 << 20
    assert frame_bytes(4096) == 512


def objects_in_small_buffers() -> list[bool]:
    world = World.from_environment("cpu")
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(object_frames, "frame_bytes", lambda ranks: 64)
        for length in (0, 40, 56, 57, 1000):
            mine = bytes(length if world.rank else 3)
            expected = [bytes(length if rank else 3) for rank in range(world.size)]
            found.append(world.all_gather_object(mine) == expected)
            gathered = world.gather_object(mine)
            found.append(gathered == (expected if world.is_global_zero else None))
    world.close()
    return found


def test_objects_travel_in_small_buffers_too() -> None:
    assert all(all(each) for each in run_on_ranks(3, objects_in_small_buffers))
    assert World.single().gather_object("mine") == ["mine"]


def bytes_in_a_save(path: Path, sharded: bool) -> int:
    """Save a tensor under many names, with a large document of each rank; return the bytes that came in here."""
    world = World.from_environment("cpu")
    received = 0
    all_gather, broadcast = dist.all_gather, dist.broadcast

    def counting_all_gather(tensors: list[torch.Tensor], tensor: torch.Tensor, **options: Any) -> Any:
        nonlocal received
        received += sum(each.nbytes for each in tensors) - tensor.nbytes
        return all_gather(tensors, tensor, **options)

    def counting_broadcast(tensor: torch.Tensor, src: int, **options: Any) -> Any:
        nonlocal received
        received += tensor.nbytes if world.rank != src else 0
        return broadcast(tensor, src, **options)

    # The exchanges that set up the control group are no part of a save.
    world.all_gather_object(None)
    tensors = {f"{number:04}": Shard.whole(torch.ones(2)) for number in range(1000)}
    snapshot = CheckpointContents({"model": tensors}, rank_document="x" * 200_000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather", counting_all_gather)
        patch.setattr(dist, "broadcast", counting_broadcast)
        checkpoint.save(path, snapshot, world, sharded)
    world.close()
    return received


def test_ranks_do_not_receive_data_that_only_rank_zero_needs(tmp_path: Path) -> None:
    assert max(run_on_ranks(2, bytes_in_a_save, tmp_path / "whole.ckpt", False)) < 70_000
    # Here each has to know what the others hold, and no more.
    assert max(run_on_ranks(2, bytes_in_a_save, tmp_path / "sharded.ckpt", True)) < 200_000
    for name in ("whole", "sharded"):
        opened = checkpoint.open_checkpoint(tmp_path / f"{name}.ckpt")
        assert opened.rank_documents == ["x" * 200_000] * 2


def test_a_rank_may_open_as_many_files_as_groups_need() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, limits[1]))
        allow_open_files(100)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 200
        allow_open_files(300)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 300
        if limits[1] != resource.RLIM_INFINITY:
            allow_open_files(limits[1] + 1)
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (limits[1], limits[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


# ---- checkpoints of many ranks --------------------------------------------------------------------------------------


class Looked(tuple[Part, ...]):
    """Parts that count how often somebody goes through them."""

    looks = 0

    def __iter__(self) -> Iterator[Part]:
        Looked.looks += 1
        return super().__iter__()


def test_all_files_are_verified_in_one_look_at_their_parts(tmp_path: Path) -> None:
    names = [f"model-{rank:05d}.safetensors" for rank in range(300)]
    parts = Looked(Part(name, 8, (row,), (1,), "0" * 16) for row, name in enumerate(names))
    record = TensorRecord("F32", (300,), parts)
    manifest = Manifest({"model": {"w": record}}, {name: FileRecord(12, 8, "0" * 16, "0" * 16) for name in names})
    Looked.looks = 0
    assert len(problems_of(tmp_path, manifest, names)) == 300
    assert Looked.looks == 1


def save_rows(path: Path, flat: bool) -> None:
    world = World.from_environment("cpu")
    tensor = torch.arange(24.0).reshape(6, 4)
    rows = 6 // world.size
    own = tensor[world.rank * rows : (world.rank + 1) * rows]
    offset = world.rank * rows
    shard = Shard.flat(own.reshape(-1), (6, 4), offset * 4) if flat else Shard(own, (6, 4), (offset, 0))
    checkpoint.save(path, CheckpointContents({"model": {"w": shard}}), world, sharded=True)
    world.close()


@pytest.mark.parametrize("flat", [False, True])
def test_a_rank_opens_only_the_files_that_it_reads_of(
    tmp_path: Path, flat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_on_ranks(3, save_rows, tmp_path / "a.ckpt", flat)
    opened: list[str] = []
    real = open_tensor_file

    def noting(path: Path, record: FileRecord) -> Any:
        opened.append(path.name)
        return real(path, record)

    monkeypatch.setattr(read, "open_tensor_file", noting)
    tensor = torch.arange(24.0).reshape(6, 4)
    at_once = checkpoint.open_checkpoint(tmp_path / "a.ckpt")
    assert torch.equal(at_once.read_slice("model", "w", (2, 1), (2, 2)), tensor[2:4, 1:3])
    assert at_once.read_flat("model", "w", 9, 6).tolist() == list(range(9, 15))
    assert at_once.read_slice("model", "w", (5, 0), (0, 4)).shape == (0, 4)
    assert opened == ["model-00001.safetensors"]
    assert torch.equal(at_once.read("model", "w"), tensor)
    assert sorted(set(opened)) == [f"model-{rank:05d}.safetensors" for rank in range(3)]


# ---- data -----------------------------------------------------------------------------------------------------------


class Copied(Sequence[int]):
    """Numbers that count how many of them were copied out."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.copied = 0

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        found = range(self.length)[index]
        self.copied += 1 if isinstance(found, int) else len(found)
        return found if isinstance(found, int) else list(found)


class Fixed:
    """An order that is a sequence as it stands."""

    def __init__(self, items: Copied) -> None:
        self._items = items

    def length(self) -> int:
        return len(self._items)

    def items(self, epoch: int) -> Copied:
        return self._items

    def described(self) -> str:
        return "fixed"

    def layout(self) -> dict[str, Any]:
        return {"kind": "fixed"}


def test_a_rank_copies_only_its_own_part_of_the_order() -> None:
    common: dict[str, Any] = {"drop_last": False, "whole": False, "seed": 0, "seeded": False}
    items = Copied(4096 * 4 * 3)
    training = list(TrainingSampler(None, Fixed(items), 4, rank=4000, size=4096, **common))
    assert training == [list(range(start, start + 4)) for start in (16_000, 32_384, 48_768)]
    evaluation = EvaluationSampler(None, Fixed(items), 4, **common)
    evaluation.first, evaluation.step = 4000, 4096
    assert list(evaluation) == training
    assert items.copied == 2 * 12
