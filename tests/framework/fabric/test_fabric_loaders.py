"""Loaders of a user's own loop: even rounds, positions, and metrics over every sample once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from messages import refuses
from ranks import run_on_ranks
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from phalanx import Fabric
from phalanx.framework.core.errors import ConfigurationError


def numbers(count: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(torch.arange(count), **options)  # type: ignore[arg-type]


def told(fabric: Fabric, loader: Any) -> list[tuple[list[int], bool, bool, float]]:
    return [(batch.tolist(), loader.filler, loader.end, loader.share) for batch in loader]


def read(options: dict[str, Any], count: int, batch_size: int) -> tuple[int, list[tuple[list[int], bool, bool, float]]]:
    fabric = Fabric(accelerator="cpu")
    loader = fabric.setup_dataloaders(numbers(count, batch_size=batch_size), **options)
    return len(loader), told(fabric, loader)


@pytest.mark.parametrize("options", [{}, {"dispatch_batches": True}])
def test_a_rank_without_samples_repeats_its_last_batch_as_a_filler(options: dict[str, Any]) -> None:
    first, second = run_on_ranks(2, read, options, 5, 2)
    assert first == (2, [([0, 1], False, False, 1.0), ([4], False, True, 2.0)])
    assert second == (2, [([2, 3], False, False, 1.0), ([2, 3], True, True, 0.0)])


def test_a_rank_without_any_sample_gets_the_batch_of_another() -> None:
    for rank, (length, rounds) in enumerate(run_on_ranks(3, read, {}, 2, 4)):
        assert length == 1
        assert rounds == [([min(rank, 1)] if rank < 2 else [0], rank == 2, True, 0.0 if rank == 2 else 1.5)]


def test_without_even_batches_each_rank_has_what_it_has() -> None:
    first, second = run_on_ranks(2, read, {"even_batches": False}, 5, 2)
    assert first == (2, [([0, 1], False, False, 1.0), ([4], False, True, 1.0)])
    assert second == (1, [([2, 3], False, False, 1.0)])


@pytest.mark.parametrize("dispatch", [False, True])
def test_split_batches_takes_the_loaders_batch_for_the_global_one(dispatch: bool) -> None:
    options = {"split_batches": True, "dispatch_batches": dispatch}
    first, second = run_on_ranks(2, read, options, 9, 4)
    assert first == (3, [([0, 1], False, False, 1.0), ([4, 5], False, False, 1.0), ([8], False, True, 2.0)])
    assert second == (3, [([2, 3], False, False, 1.0), ([6, 7], False, False, 1.0), ([6, 7], True, True, 0.0)])


def refuse_odd_split() -> None:
    fabric = Fabric(accelerator="cpu")
    with pytest.raises(ConfigurationError, match="batch_size=3"):
        fabric.setup_dataloaders(numbers(9, batch_size=3), split_batches=True)


def test_a_batch_that_cannot_be_split_is_refused() -> None:
    run_on_ranks(2, refuse_odd_split)


class Stream(IterableDataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(self.count))


def read_stream(count: int, batch_size: int, options: dict[str, Any]) -> list[tuple[list[int], bool, bool, float]]:
    fabric = Fabric(accelerator="cpu")
    loader = fabric.setup_dataloaders(DataLoader(Stream(count), batch_size=batch_size), **options)
    return told(fabric, loader)


def test_streams_without_length_are_evened_out_too() -> None:
    first, second = run_on_ranks(2, read_stream, 5, 2, {})
    assert first == [([0, 1], False, False, 1.0), ([4], False, True, 2.0)]
    assert second == [([2, 3], False, False, 1.0), ([2, 3], True, True, 0.0)]
    first, second = run_on_ranks(2, read_stream, 5, 4, {"split_batches": True})
    assert first == [([0, 1], False, False, 1.0), ([4], False, True, 2.0)]
    assert second == [([2, 3], False, False, 1.0), ([2, 3], True, True, 0.0)]
    assert read_stream(3, 2, {}) == [([0, 1], False, False, 1.0), ([2], False, True, 1.0)]


def read_own_share(joined: bool) -> list[tuple[list[int], bool]]:
    fabric = Fabric(accelerator="cpu")
    mine = numbers(1 + 2 * fabric.global_rank, batch_size=1)
    loader = fabric.setup_dataloaders(mine, use_distributed_sampler=False, even_batches=not joined)
    if not joined:
        return [(batch.tolist(), loader.filler) for batch in loader]
    with fabric.join_uneven_inputs([], even_batches=False):
        return [(batch.tolist(), loader.filler) for batch in loader]


@pytest.mark.parametrize("joined", [False, True])
def test_ranks_with_data_of_their_own_are_evened_out(joined: bool) -> None:
    first, second = run_on_ranks(2, read_own_share, joined)
    assert first == [([0], False), ([0], True), ([0], True)]
    assert second == [([0], False), ([1], False), ([2], False)]


# ---- passes and positions --------------------------------------------------------------------------------------------


def test_each_pass_is_a_new_epoch_of_the_permutation() -> None:
    fabric = Fabric(accelerator="cpu")
    fabric.seed_everything(4)
    loader = fabric.setup_dataloaders(numbers(32, batch_size=8, shuffle=True))
    passes = [torch.cat(list(loader)).tolist() for _ in range(3)]
    assert passes[0] != passes[1] != passes[2]
    assert all(sorted(each) == list(range(32)) for each in passes)
    loader.set_epoch(1)
    assert torch.cat(list(loader)).tolist() == passes[1]
    assert torch.cat(list(loader)).tolist() == passes[2]


def test_a_loader_shows_the_attributes_of_the_original() -> None:
    fabric = Fabric(accelerator="cpu")
    original = numbers(8, batch_size=4)
    loader = fabric.setup_dataloaders(original)
    assert loader.dataset is original.dataset
    assert loader.batch_sampler is original.batch_sampler
    assert (loader.batch_size, len(loader)) == (4, 2)
    with refuses(ConfigurationError, "setup_dataloaders"):
        fabric.setup_dataloaders(loader)


def resume_loader() -> list[Any]:
    """Return what two passes read, without a stop and with one after each of the batches of the first."""

    def fresh() -> Any:
        fabric = Fabric(accelerator="cpu")
        fabric.seed_everything(1)
        return fabric.setup_dataloaders(numbers(13, batch_size=2, shuffle=True))

    def seen(loader: Any) -> Any:
        # What a filler repeats is no data: after a resume it may be another rank's batch.
        return ("filler" if loader.filler else batch.tolist() for batch in loader)

    whole = fresh()
    passes = [[*seen(whole), *seen(whole)]]
    for stop in range(1, 5):
        stopped, resumed = fresh(), fresh()
        reading = seen(stopped)
        begun = [next(reading) for _ in range(stop)]
        resumed.load_state_dict(stopped.state_dict())
        passes.append([*begun, *seen(resumed), *seen(resumed)])
    return passes


def test_a_loader_resumes_in_the_middle_of_a_pass() -> None:
    for wanted, *resumed in run_on_ranks(2, resume_loader):
        assert resumed == [wanted] * 4


def skip() -> list[list[int]]:
    fabric = Fabric(accelerator="cpu")
    loader = fabric.setup_dataloaders(numbers(13, batch_size=2))
    rest = fabric.skip_first_batches(loader, 2)
    assert len(rest) == 2
    return [batch.tolist() for batch in rest]


def test_first_batches_are_skipped() -> None:
    assert run_on_ranks(2, skip) == [[[8, 9], [12]], [[10, 11], [10, 11]]]
    fabric = Fabric(accelerator="cpu")
    plain = fabric.skip_first_batches([1, 2, 3], 2)
    assert (list(plain), len(plain)) == ([3], 1)


# ---- metrics ---------------------------------------------------------------------------------------------------------


class Named(Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"number": torch.tensor(index), "row": torch.full((2,), index), "name": f"sample {index}"}


COUNTS = (1, 5, 7, 22)
"""The numbers of samples."""


def evaluate(options: dict[str, Any]) -> list[list[tuple[int, list[int], str, dict[str, int]]]]:
    """Return for each number of samples what was gathered of each of them."""
    fabric = Fabric(accelerator="cpu")
    found = []
    for count in COUNTS:
        rows: list[tuple[int, list[int], str, dict[str, int]]] = []
        for batch in fabric.setup_dataloaders(DataLoader(Named(count), batch_size=2), **options):
            # Gathered as tensors in a nested collection, as names, and as objects of any kind.
            gathered = fabric.gather_for_metrics({"pair": (batch["number"], batch["row"]), "name": batch["name"]})
            given = [{"id": int(number)} for number in batch["number"]]
            objects = fabric.gather_for_metrics(given, use_gather_object=True)
            tensors = (part.tolist() for part in gathered["pair"])
            rows.extend(zip(*tensors, gathered["name"], objects, strict=True))
        found.append(rows)
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"dispatch_batches": True}], ids=["sharded", "dispatched"])
def test_gathered_metrics_hold_every_sample_once(ranks: int, options: dict[str, Any]) -> None:
    samples = [(number, [number] * 2, f"sample {number}", {"id": number}) for number in range(max(COUNTS))]
    wanted = [samples[:count] for count in COUNTS]
    assert run_on_ranks(ranks, evaluate, options) == [wanted] * ranks


def evaluate_inside_training() -> tuple[list[int], list[int]]:
    fabric = Fabric(accelerator="cpu")
    train = fabric.setup_dataloaders(numbers(5, batch_size=2))
    evaluation = fabric.setup_dataloaders(numbers(4, batch_size=2))
    inner: list[int] = []
    outer: list[int] = []
    for batch in train:
        for each in evaluation:
            inner += fabric.gather_for_metrics(each).tolist()
        outer += fabric.gather_for_metrics(batch).tolist()
    return inner, outer


def test_an_evaluation_inside_the_training_loop_has_fillers_of_its_own() -> None:
    assert run_on_ranks(2, evaluate_inside_training) == [([0, 1, 2, 3] * 2, [0, 1, 2, 3, 4])] * 2
