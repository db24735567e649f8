"""One loop with ``forward_backward`` trains as plain torch on the global batch, under every strategy and schedule."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import long_sequences
import pytest
import torch
from language_model import LanguageModel, adamw, token_loader, tokens
from models import silent_trainer
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader

from phalanx import Fabric
from phalanx.strategies import PipelineStrategy

STEPS, ROWS, CLIP = 3, 8, 0.5
SCHEDULES = ("interleaved-1f1b", "zero-bubble-v")


def sgd(module: nn.Module) -> torch.optim.SGD:
    # Adam would blow up the rounding of gradients that are zero.
    return torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.9)


def built(strategy: str, ranks: int, parallel: str | None, blocks: int = 4, **settings: Any) -> tuple[Any, ...]:
    """Return a Fabric, a model and an optimizer that it has set up, and a step."""
    kind: Any = PipelineStrategy(strategy) if strategy in SCHEDULES else strategy
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy=kind, parallel=parallel, **settings)
    fabric.launch()
    module = LanguageModel(blocks=blocks)
    model, optimizer = fabric.setup(module, sgd(module))

    def step(rows: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(rows)[:, :-1].flatten(0, 1), rows[:, 1:].flatten())

    return fabric, model, optimizer, step


def full(fabric: Fabric, model: nn.Module) -> dict[str, Tensor]:
    """Return the weights, on rank 0."""
    weights = dict(fabric.full_state_dict(model))
    fabric.free_memory()
    return weights


def by_hand(
    windows: Sequence[Sequence[tuple[Tensor, float]]], clip: float | None = None, blocks: int = 4
) -> tuple[list[list[float]], LanguageModel]:
    """Train in one process with plain torch.

    Args:
        windows: the micro-batches of each global batch, with their weights.
        clip: the largest norm of the gradients.
        blocks: the number of blocks of the model.

    Returns:
        The losses of each window, and the trained model.
    """
    module = LanguageModel(blocks=blocks)
    optimizer, found = sgd(module), []
    for window in windows:
        losses = [module.loss(rows) for rows, _ in window]
        found.append([loss.item() for loss in losses])
        if not window:
            continue
        weights = torch.tensor([weight for _, weight in window])
        optimizer.zero_grad()
        ((torch.stack(losses) * weights).sum() / weights.sum()).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
    return found, module


def check_weights(found: dict[str, Tensor], module: nn.Module, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    assert found.keys() == module.state_dict().keys()
    for name, weight in module.state_dict().items():
        torch.testing.assert_close(found[name], weight, rtol=rtol, atol=atol, msg=name)


# ---- every strategy and schedule -------------------------------------------------------------------------------------


def weight_of(step: int, number: int) -> float:
    """Return the weight of a micro-batch in the global order."""
    return 1.0 + (3 * step + 5 * number) % 4


def trained(strategy: str, ranks: int, parallel: str | None, window: int, blocks: int) -> tuple[Tensor, Any]:
    """Train some updates; return the losses that this rank was given, [steps, window], and on rank 0 the weights."""
    fabric, model, optimizer, step = built(strategy, ranks, parallel, blocks)
    world, found = fabric.world, []
    for number, rows in enumerate(tokens(STEPS * ROWS).split(ROWS)):
        mine = list(enumerate(rows.chunk(window * world.data_size)))[world.data_rank :: world.data_size]
        weights = [weight_of(number, position) for position, _ in mine]
        found.append(fabric.forward_backward(step, [batch for _, batch in mine], weights))
        assert fabric.clip_gradients(model, optimizer, max_norm=CLIP) is not None
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(found), full(fabric, model)


@pytest.mark.parametrize(
    ("strategy", "ranks", "parallel", "shards", "window", "blocks"),
    [
        ("single", 1, None, 1, 4, 4),
        ("ddp", 2, None, 2, 1, 4),
        ("zero2", 2, None, 2, 4, 4),
        ("fsdp", 2, "tp=2", 1, 4, 4),
        ("interleaved-1f1b", 2, "pp=2", 1, 4, 4),
        ("zero-bubble-v", 2, "pp=2", 1, 1, 5),
        ("pipeline", 4, "pp=2,dp_replicate=2", 2, 2, 4),
        ("fsdp", 4, "pp=2,dp_shard=2", 2, 1, 4),
        ("pipeline", 4, "pp=2,tp=2", 1, 4, 4),
    ],
)
def test_one_loop_trains_as_one_process_under_every_strategy(
    strategy: str, ranks: int, parallel: str | None, shards: int, window: int, blocks: int
) -> None:
    results = run_on_ranks(ranks, trained, strategy, ranks, parallel, window, blocks, timeout=120.0)
    windows = [
        [(batch, weight_of(number, position)) for position, batch in enumerate(rows.chunk(shards * window))]
        for number, rows in enumerate(tokens(STEPS * ROWS).split(ROWS))
    ]
    losses, module = by_hand(windows, CLIP, blocks)
    for rank, (found, _) in enumerate(results):
        wanted = torch.tensor(losses)[:, rank // (ranks // shards) :: shards]
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    check_weights(results[0][1], module, rtol=1e-6)


# ---- different numbers of micro-batches ------------------------------------------------------------------------------

LENGTHS = [(3, 1), (0, 2), (2, 2), (1, 0), (0, 0), (2, 3)]
"""For each window the numbers of micro-batches of the two shards of the data."""


def shares() -> list[list[list[tuple[Tensor, float]]]]:
    """Return for each window the micro-batches of the two shards, with their weights."""
    coming = iter(tokens(40).split(2))
    return [[[(next(coming), 1.0 + number) for number in range(count)] for count in counts] for counts in LENGTHS]


def trained_unevenly(strategy: str, ranks: int, parallel: str | None) -> tuple[list[list[float]], list[bool], Any]:
    fabric, model, optimizer, step = built(strategy, ranks, parallel)
    losses, applied = [], []
    for parts in shares():
        mine = parts[fabric.world.data_rank]
        losses.append(fabric.forward_backward(step, [rows for rows, _ in mine], [each for _, each in mine]).tolist())
        optimizer.step()
        optimizer.zero_grad()
        applied.append(not optimizer.step_was_skipped)
    return losses, applied, full(fabric, model)


@pytest.mark.parametrize(("strategy", "ranks", "parallel"), [("fsdp", 2, None), ("pipeline", 4, "pp=2")])
def test_ranks_may_have_different_numbers_of_micro_batches_or_none(
    strategy: str, ranks: int, parallel: str | None
) -> None:
    wanted, module = by_hand([[*first, *second] for first, second in shares()])
    results = run_on_ranks(ranks, trained_unevenly, strategy, ranks, parallel)
    for rank, (losses, applied, _) in enumerate(results):
        is_first = rank < ranks // 2
        of_shard = [
            each[:count] if is_first else each[count:] for each, (count, _) in zip(wanted, LENGTHS, strict=True)
        ]
        assert losses == [pytest.approx(each, rel=1e-5) for each in of_shard]
        assert applied == [any(counts) for counts in LENGTHS]
    check_weights(results[0][2], module)


# ---- the windows of a loader -----------------------------------------------------------------------------------------


def trained_on_a_loader(strategy: str, ranks: int, parallel: str | None, size: int | None) -> tuple[list[int], Any]:
    fabric, model, optimizer, step = built(strategy, ranks, parallel, accumulate=3)
    loader = fabric.setup_dataloaders(DataLoader(tokens(17), batch_size=2))  # type: ignore[arg-type]
    lengths = []
    for window in fabric.windows(loader, size):
        lengths.append(len(window))
        fabric.forward_backward(step, window, [len(rows) for rows in window])
        optimizer.step()
        optimizer.zero_grad()
    return lengths, full(fabric, model)


@pytest.mark.parametrize(("strategy", "ranks", "parallel"), [("ddp", 2, None), ("fsdp", 4, "pp=2,dp_shard=2")])
def test_the_windows_of_a_loader_cover_its_samples_once(strategy: str, ranks: int, parallel: str | None) -> None:
    results = run_on_ranks(ranks, trained_on_a_loader, strategy, ranks, parallel, 2)
    # The last round has one row, so the second shard has a filler, which is left out.
    assert [lengths for lengths, _ in results] == [[2, 2, 1]] * (ranks // 2) + [[2, 2, 0]] * (ranks // 2)
    _, module = by_hand([[(rows, 1.0)] for rows in tokens(17).split(8)])
    check_weights(results[0][1], module)


def test_without_a_size_windows_have_that_of_the_fabric() -> None:
    assert trained_on_a_loader("single", 1, None, None)[0] == [3, 3, 3]


# ---- windows that add up ---------------------------------------------------------------------------------------------


def added_up(strategy: str, ranks: int, parallel: str | None) -> Any:
    fabric, model, optimizer, step = built(strategy, ranks, parallel)
    mine = tokens(16).chunk(fabric.world.data_size)[fabric.world.data_rank]
    for rows in (mine[:4], mine[4:]):
        fabric.forward_backward(step, rows.split(2))
    optimizer.step()
    return full(fabric, model)


@pytest.mark.parametrize(("strategy", "ranks", "parallel"), [("fsdp", 2, None), ("pipeline", 4, "pp=2")])
def test_gradients_of_two_windows_add_up_without_zero_grad(strategy: str, ranks: int, parallel: str | None) -> None:
    found = run_on_ranks(ranks, added_up, strategy, ranks, parallel)[0]
    module = LanguageModel(blocks=4)
    first, second = tokens(16).view(2, 2, 4, -1).unbind(1)
    for rows in (first, second):
        module.loss(rows.flatten(0, 1)).backward()
    sgd(module).step()
    check_weights(found, module)


# ---- ranks that share the sequences of their micro-batches -----------------------------------------------------------


def trained_on_parts(strategy: str, ranks: int, parallel: str) -> tuple[list[list[tuple[float, float]]], Any]:
    """Return the loss of each micro-batch with its number of targets, for each step, and on rank 0 the weights."""
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy=strategy, parallel=parallel)
    fabric.launch()
    module = long_sequences.LongModel(blocks=4)
    model, optimizer = fabric.setup(module, module.configure_optimizers())
    model.mark_forward_method("loss")
    found, world = [], fabric.world
    micro_batches = [*long_sequences.loader(2, count=STEPS * 4)]
    for number in range(STEPS):
        batches = [
            (fabric.part(rows), fabric.part(targets), fabric.part.positions(rows))
            for rows, targets in micro_batches[2 * number : 2 * number + 2]
        ][world.data_rank :: world.data_size]
        weights = [float((targets != long_sequences.IGNORED).sum()) for _, targets, _ in batches]
        losses = fabric.forward_backward(model.loss, batches, weights).tolist()
        fabric.clip_gradients(model, optimizer, max_norm=CLIP)
        optimizer.step()
        optimizer.zero_grad()
        pairs = [(loss if weight else 0.0, weight) for loss, weight in zip(losses, weights, strict=True)]
        found.append(pairs if world.counts_data else [])
    return found, full(fabric, model)


@pytest.mark.parametrize(("strategy", "ranks", "parallel"), [("ddp", 2, "cp=2"), ("fsdp", 4, "pp=2,cp=2")])
def test_parts_train_as_full_sequences(strategy: str, ranks: int, parallel: str) -> None:
    results = run_on_ranks(ranks, trained_on_parts, strategy, ranks, parallel, timeout=120.0)
    expected, module = long_sequences.by_hand(2, CLIP, STEPS, 2, blocks=4)
    for step, loss in enumerate(expected):
        pairs = [pair for found, _ in results for pair in found[step]]
        mean = sum(loss * count for loss, count in pairs) / sum(count for _, count in pairs)
        assert mean == pytest.approx(loss, rel=1e-6)
    check_weights(results[0][1], module, atol=1e-5)


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
    return found, full(fabric, model)


def trainer_fit(strategy: str) -> dict[str, Tensor]:
    module = LanguageModel(blocks=4)
    trainer = silent_trainer(devices="auto", strategy=strategy, max_steps=8, accumulate_grad_batches=4)
    trainer.fit(module, token_loader(64, batch_size=2))
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
