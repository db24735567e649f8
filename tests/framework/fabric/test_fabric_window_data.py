"""Windows of different lengths on different ranks, of loaders, and those that add up or resume elsewhere."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from language_model import LanguageModel, adamw, tokens
from models import plain_steps, silent_trainer
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx import Fabric

MESHES = [("ddp", 2, None), ("fsdp", 2, None), ("pipeline", 4, "pp=2"), ("fsdp", 4, "pp=2,dp_shard=2")]


class Tower(nn.Module):
    """A plain module of repeated blocks, with dropout-free layers, a weight around them and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(4)
            self.first = nn.Linear(3, 6)
            self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))
            self.last = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, 1] for [batch, 3]."""
        y: Tensor = self.last(self.layers(self.first(x)))
        return y


def pairs(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(count, 3, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def sgd(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.9)


def built(strategy: str, ranks: int, parallel: str | None, **settings: Any) -> tuple[Fabric, nn.Module, Any, Any]:
    """Return a Fabric, a module and an optimizer that it has set up, and a step."""
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy=strategy, parallel=parallel, **settings)
    fabric.launch()
    module = Tower()
    model, optimizer = fabric.setup(module, sgd(module))
    return fabric, model, optimizer, lambda pair: nn.functional.mse_loss(model(pair[0]), pair[1])


def full(fabric: Fabric, model: nn.Module) -> dict[str, Tensor]:
    weights = dict(fabric.full_state_dict(model))
    fabric.free_memory()
    return weights


# ---- different numbers of micro-batches ------------------------------------------------------------------------------

LENGTHS = [(3, 1), (0, 2), (2, 2), (1, 0), (0, 0), (2, 3)]
"""For each window the numbers of micro-batches of the two shards of the data."""


def shares() -> list[tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]]:
    x, y = pairs(40).tensors
    coming = zip(x.split(2), y.split(2), strict=True)
    return [tuple(list(itertools.islice(coming, count)) for count in counts) for counts in LENGTHS]  # type: ignore[misc]


def trained_unevenly(strategy: str, ranks: int, parallel: str | None) -> tuple[list[list[float]], list[bool], Any]:
    fabric, model, optimizer, step = built(strategy, ranks, parallel)
    losses, applied = [], []
    for parts in shares():
        mine = parts[fabric.world.data_rank]
        losses.append(fabric.forward_backward(step, mine, [1.0 + number for number in range(len(mine))]).tolist())
        optimizer.step()
        optimizer.zero_grad()
        applied.append(not optimizer.step_was_skipped)
    return losses, applied, full(fabric, model)


@pytest.mark.parametrize(("strategy", "ranks", "parallel"), MESHES)
def test_ranks_may_have_different_numbers_of_micro_batches_or_none(
    strategy: str, ranks: int, parallel: str | None
) -> None:
    module, wanted = Tower(), []
    optimizer = sgd(module)
    for parts in shares():
        weights = [1.0 + number for part in parts for number in range(len(part))]
        losses = [[nn.functional.mse_loss(module(x), y) for x, y in part] for part in parts]
        wanted.append([[loss.item() for loss in part] for part in losses])
        if weights:
            optimizer.zero_grad()
            values = torch.stack([*losses[0], *losses[1]])
            ((values * torch.tensor(weights)).sum() / sum(weights)).backward()
            optimizer.step()
    results = run_on_ranks(ranks, trained_unevenly, strategy, ranks, parallel)
    for rank, (losses, applied, _) in enumerate(results):
        shard = rank * 2 // ranks
        assert [pytest.approx(each[shard], rel=1e-5) for each in wanted] == losses
        assert applied == [any(counts) for counts in LENGTHS]
    for name, weight in module.state_dict().items():
        torch.testing.assert_close(results[0][2][name], weight, rtol=1e-5, atol=1e-6, msg=name)


# ---- the windows of a loader -----------------------------------------------------------------------------------------


def trained_on_a_loader(strategy: str, ranks: int, parallel: str | None, size: int | None) -> tuple[list[int], Any]:
    fabric, model, optimizer, step = built(strategy, ranks, parallel, accumulate=3)
    loader = fabric.setup_dataloaders(DataLoader(pairs(17), batch_size=2))
    lengths = []
    for window in fabric.windows(loader, size):
        lengths.append(len(window))
        fabric.forward_backward(step, window, [len(x) for x, _ in window])
        optimizer.step()
        optimizer.zero_grad()
    return lengths, full(fabric, model)


@pytest.mark.parametrize(("strategy", "ranks", "parallel"), MESHES)
def test_the_windows_of_a_loader_cover_its_samples_once(strategy: str, ranks: int, parallel: str | None) -> None:
    results = run_on_ranks(ranks, trained_on_a_loader, strategy, ranks, parallel, 2)
    # The last round has one row, so the second shard has a filler, which is left out.
    assert [lengths for lengths, _ in results] == [[2, 2, 1]] * (ranks // 2) + [[2, 2, 0]] * (ranks // 2)
    module = Tower()
    batches = [pairs(17)[:8], pairs(17)[8:16], pairs(17)[16:]]
    plain_steps(sgd(module), lambda batch: nn.functional.mse_loss(module(batch[0]), batch[1]), batches)
    for name, weight in module.state_dict().items():
        torch.testing.assert_close(results[0][1][name], weight, rtol=1e-5, atol=1e-6, msg=name)


def test_without_a_size_windows_have_that_of_the_fabric() -> None:
    assert trained_on_a_loader("single", 1, None, None)[0] == [3, 3, 3]


# ---- windows that add up ---------------------------------------------------------------------------------------------


def added_up(strategy: str, ranks: int, parallel: str | None) -> Any:
    fabric, model, optimizer, step = built(strategy, ranks, parallel)
    x, y = (part.chunk(fabric.world.data_size)[fabric.world.data_rank] for part in pairs(16).tensors)
    for rows in (slice(0, 4), slice(4, None)):
        fabric.forward_backward(step, list(zip(x[rows].split(2), y[rows].split(2), strict=True)))
    optimizer.step()
    return full(fabric, model)


@pytest.mark.parametrize(("strategy", "ranks", "parallel"), MESHES[1:])
def test_gradients_of_two_windows_add_up_without_zero_grad(strategy: str, ranks: int, parallel: str | None) -> None:
    found = run_on_ranks(ranks, added_up, strategy, ranks, parallel)[0]
    module, (x, y) = Tower(), pairs(16).tensors
    first = [*range(4), *range(8, 12)]
    for rows in (first, [row for row in range(16) if row not in first]):
        nn.functional.mse_loss(module(x[rows]), y[rows]).backward()
    sgd(module).step()
    for name, weight in module.state_dict().items():
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6, msg=name)


# ---- the Trainer, and checkpoints ------------------------------------------------------------------------------------


def language_loop(
    strategy: str, ranks: int, parallel: str | None, start: int, stop: int, load: str = "", save: str = ""
) -> tuple[list[float], Any]:
    """Train from one update to another; return the mean loss of each window on this rank, and the weights."""
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy=strategy, parallel=parallel)
    fabric.launch()
    module = LanguageModel(blocks=4)
    model, optimizer = fabric.setup(module, adamw(module, 1e-2))
    state = {"model": model, "optimizer": optimizer, "updates": 0}
    if load:
        fabric.load(load, state)
        assert state["updates"] == start
    found = []
    for rows in tokens(64).split(8)[start:stop]:
        window = [[batch] for batch in rows.chunk(4)]
        found.append(fabric.forward_backward(lambda batch: model.training_step(batch, 0), window).mean().item())
        optimizer.step()
        optimizer.zero_grad()
    if save:
        fabric.save(save, {**state, "updates": stop})
    weights = dict(fabric.full_state_dict(model))
    fabric.free_memory()
    return found, weights


def trainer_fit(strategy: str) -> dict[str, Tensor]:
    module = LanguageModel(blocks=4)
    trainer = silent_trainer(devices="auto", strategy=strategy, max_steps=8, accumulate_grad_batches=4)
    trainer.fit(module, DataLoader(TensorDataset(tokens(64)), batch_size=2))
    return module.state_dict()


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("pipeline", 2)])
def test_the_weights_are_those_of_a_fit_bit_for_bit(strategy: str, ranks: int) -> None:
    fitted = run_on_ranks(ranks, trainer_fit, strategy)[0]
    found = run_on_ranks(ranks, language_loop, strategy, ranks, None, 0, 8)[0][1]
    assert [name for name, weight in fitted.items() if not torch.equal(found[name], weight)] == []


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("pipeline", 2, None), ("single", 1, None)),
        (("single", 1, None), ("pipeline", 2, None)),
        (("fsdp", 4, "pp=2,tp=2"), ("pipeline", 2, None)),
    ],
)
def test_a_checkpoint_continues_under_another_strategy(
    first: tuple[str, int, str | None], second: tuple[str, int, str | None], tmp_path: Path
) -> None:
    path = str(tmp_path / "loop.ckpt")
    whole, _ = language_loop("single", 1, None, 0, 8)
    before = run_on_ranks(first[1], language_loop, *first, 0, 4, "", path)
    after = run_on_ranks(second[1], language_loop, *second, 4, 8, path)
    for (start, _), (end, _) in itertools.product(before, after):
        assert [*start, *end] == pytest.approx(whole, rel=1e-4)
