"""Streams of the data libraries over shards in a folder, and the order in which a source of phalanx reads them.

Samples are the numbers 0, 1, 2, ..., in shards of different sizes. Each library is imported when its stream is made.
"""

from __future__ import annotations

import copy
import functools
import importlib
import io
import json
import os
import sys
import tarfile
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.utils.data import DataLoader

from phalanx.framework.checkpoint.codec import decode, encode_inline
from phalanx.framework.data.combined_source import prepare_training
from phalanx.framework.data.training_source import NO_BATCH, TrainingSource

SIZES = (5, 7, 4, 10)
COUNT = sum(SIZES)
BATCH_SIZE = 2
Make = Callable[[int, int], Any]
"""Return a loader for a rank and a number of ranks. Loaders that do not shard themselves ignore both."""


def prepare_libraries() -> None:
    """Import ``datasets`` and WebDataset outside of a test: they set variables, and progress bars leave a thread."""
    import datasets
    import tqdm
    import webdataset  # noqa: F401

    tqdm.tqdm.monitor_interval = 0
    list(datasets.IterableDataset.from_generator(read_lines, gen_kwargs={"files": [os.devnull]}))


def shards(root: Path, kind: str, write: Callable[[Path, list[int]], None]) -> list[str]:
    """Write the numbers into files of several sizes, once for each folder; return the paths."""
    root.mkdir(parents=True, exist_ok=True)
    paths, first = [], 0
    for number, size in enumerate(SIZES):
        path = root / f"shard-{number}.{kind}"
        if not path.exists():
            write(path, list(range(first, first + size)))
        paths.append(str(path))
        first += size
    return paths


def write_json(path: Path, numbers: list[int]) -> None:
    """Write one JSON object for each number, and one number for each line."""
    path.write_text("".join(json.dumps({"id": number}) + "\n" for number in numbers))


def write_parquet(path: Path, numbers: list[int]) -> None:
    """Write row groups of 3 rows."""
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"id": numbers}), path, row_group_size=3)


def write_tar(path: Path, numbers: list[int]) -> None:
    """Write a file for each number, as WebDataset reads them."""
    with tarfile.open(path, "w") as tar:
        for number in numbers:
            content = str(number).encode()
            member = tarfile.TarInfo(f"{number:04}.txt")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def read_lines(files: list[str]) -> Iterator[dict[str, int]]:
    """Yield the objects of files of JSON lines: a generator for ``datasets``."""
    for file in files:
        for line in Path(file).read_text().splitlines():
            yield json.loads(line)


def hugging_face(root: Path, kind: str) -> Any:
    """Return a streaming dataset: ``"generator"``, ``"json"`` or ``"parquet"``, shuffled after a plus sign."""
    name, _, shuffle = kind.partition("+")
    data = copy.deepcopy(_opened(root, name))
    return data.shuffle(seed=3, buffer_size=6) if shuffle else data


@functools.lru_cache(maxsize=8)
def _opened(root: Path, name: str) -> Any:
    import datasets

    if name == "generator":
        files = shards(root / "json", "jsonl", write_json)
        return datasets.IterableDataset.from_generator(read_lines, gen_kwargs={"files": files})
    paths = shards(root / name, name, write_parquet if name == "parquet" else write_json)
    options = {"split": "train", "streaming": True, "cache_dir": str(root / "cache")}
    return datasets.load_dataset(name, data_files=paths, **options)


def split_by_node(root: Path, kind: str, rank: int, size: int) -> Any:
    """Return the part of a rank of a streaming dataset."""
    from datasets.distributed import split_dataset_by_node

    return split_dataset_by_node(hugging_face(root, kind), rank=rank, world_size=size)


def take_text(sample: dict[str, bytes]) -> int:
    """Return the number in a sample of WebDataset."""
    return int(sample["txt"])


def all_shards(urls: Iterator[Any]) -> Iterator[Any]:
    """Give each rank all shards, of which phalanx gives it its batches: a ``nodesplitter``."""
    return urls


def web_dataset(root: Path, is_shuffled: bool) -> Any:
    """Return a WebDataset whose shards and samples are shuffled by a seed and the epoch, if ``is_shuffled``."""
    import webdataset

    urls = shards(root / "tar", "tar", write_tar)
    shuffle: dict[str, Any] = {"shardshuffle": 4, "detshuffle": True, "seed": 5} if is_shuffled else {}
    data = webdataset.WebDataset(urls, nodesplitter=all_shards, **{"shardshuffle": False, **shuffle})
    if is_shuffled:
        data = data.compose(webdataset.detshuffle(bufsize=6, initial=6, seed=5))
    return data.map(take_text)


def source(make: Make, rank: int, size: int, shard: bool = True) -> TrainingSource:
    """Return the training source of a rank."""
    return prepare_training(make(rank, size), rank=rank, size=size, seed=1, shard=shard)


def read_by_ranks(given: Any, size: int, epoch: int = 0, position: dict[str, Any] | None = None) -> list[Any]:
    """Return the batches of a loader that ``size`` ranks read, in the order of one process."""
    parts = [list(prepare_training(given, rank=rank, size=size, seed=3).start(epoch, position)) for rank in range(size)]
    assert len({len(part) for part in parts}) == 1
    return [batch for row in zip(*parts, strict=True) for batch in row if batch is not NO_BATCH]


def ids(batch: Any) -> list[int]:
    """Return the numbers in a batch."""
    found = batch["id"] if isinstance(batch, dict) else batch
    return [int(each) for each in found]


def loader(data: Any, workers: int = 0) -> DataLoader[Any]:
    """Return a DataLoader with the batch size of the tests."""
    return DataLoader(data, batch_size=BATCH_SIZE, num_workers=workers)


def read(given: TrainingSource, epoch: int, position: dict[str, Any] | None = None) -> list[list[int]]:
    """Return the batches of a source; an empty list for a rank without a batch."""
    return [[] if batch is NO_BATCH else ids(batch) for batch in given.start(epoch, position)]


def interrupted(sources: Sequence[TrainingSource], epoch: int, steps: int) -> tuple[dict[str, Any], list[Any]]:
    """Read some batches of all ranks; return the position and the states, as a checkpoint holds them."""
    states = []
    for each in sources:
        batches = each.start(epoch)
        for _ in range(steps):
            next(batches)
        states.append(decode(json.loads(json.dumps(encode_inline(each.state_after(steps))))))
        # Threads of MosaicML streaming end with the epoch only.
        for _ in batches:
            pass
    return sources[0].position_after(steps), states


def resumed(
    make: Make, size: int, epoch: int, position: dict[str, Any], states: list[Any], *, shard: bool = True
) -> tuple[list[list[list[int]]], list[str]]:
    """Return the remaining batches of each of ``size`` ranks, and the messages of rank 0."""
    rows: list[list[list[int]]] = []
    notes: list[str] = []
    for rank in range(size):
        given = source(make, rank, size, shard)
        if rank == 0:
            given.announce_by(notes.append)
        own = len(states) == size
        given.restore([states[rank]] if own else states, own)
        rows.append(read(given, epoch, position))
    return rows, notes


def in_turn(rows: list[list[list[int]]]) -> list[list[int]]:
    """Return the batches of all ranks in the order of one process."""
    most = max(len(row) for row in rows)
    return [row[step] for step in range(most) for row in rows if step < len(row) and row[step]]


def seen_after(steps: int, rows: list[list[list[int]]]) -> list[int]:
    """Return the samples of all ranks' first batches, sorted."""
    return sorted(sample for row in rows for batch in row[:steps] for sample in batch)


def kept_state(states: list[Any]) -> bool:
    """Whether the library's own state is in the checkpoint."""
    return all(state is not None and "state" in state for state in states)


def numbers_of(rows: list[list[list[int]]]) -> list[int]:
    """Return all samples of all ranks, sorted."""
    return seen_after(len(max(rows, key=len)), rows)


def replace_torchvision() -> None:
    """Let MosaicML streaming be imported without torchvision, of which its datasets of images need two names.

    The builds of torchvision in the package index are for CUDA, and cannot be imported beside a torch without.
    """
    members: dict[str, dict[str, Any]] = {
        "": {},
        ".datasets": {"VisionDataset": object},
        ".transforms": {},
        ".transforms.functional": {"to_tensor": None},
    }
    for name, values in members.items():
        module = ModuleType(f"torchvision{name}")
        module.__spec__ = ModuleSpec(module.__name__, None)
        vars(module).update(values)
        sys.modules.setdefault(module.__name__, module)


def mosaic(root: Path, is_shuffled: bool, workers: int) -> Any:
    """Return a loader of MosaicML streaming, which shards itself by rank."""
    replace_torchvision()
    # Not an import statement: a recipe of the cookbook has this name too.
    streaming = importlib.import_module("streaming")
    local = root / "mosaic"
    if not local.exists():
        with streaming.MDSWriter(out=str(local), columns={"id": "int"}, size_limit=60, progress_bar=False) as writer:
            for number in range(COUNT):
                writer.write({"id": number})
    data = streaming.StreamingDataset(
        local=str(local), batch_size=BATCH_SIZE, shuffle=is_shuffled, shuffle_seed=3, num_canonical_nodes=1
    )
    return streaming.StreamingDataLoader(data, batch_size=BATCH_SIZE, num_workers=workers)


def litdata(root: Path, is_shuffled: bool, workers: int) -> Any:
    """Return a loader of litdata, which shards itself by rank."""
    import litdata as library
    from litdata.streaming.cache import Cache

    folder = root / "litdata"
    if not folder.exists():
        cache = Cache(str(folder), chunk_size=5)
        for number in range(COUNT):
            cache[number] = {"id": number}
        cache.done()
        cache.merge()
    data = library.StreamingDataset(str(folder), shuffle=is_shuffled, seed=3, drop_last=False)
    return library.StreamingDataLoader(data, batch_size=BATCH_SIZE, num_workers=workers)


def stateful_loader(root: Path, kind: str, workers: int) -> Any:
    """Return a ``StatefulDataLoader`` of torchdata over a streaming dataset of Hugging Face."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(hugging_face(root, kind), batch_size=BATCH_SIZE, num_workers=workers)
