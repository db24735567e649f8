"""All that a run is made of goes from one strategy to another: odd parameters, optimizers, schedules, precisions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from odd_runs import Recipe, along, by_hand, tensors_of, train


@pytest.mark.parametrize(
    ("recipe", "chain"),
    [
        (Recipe("sgd", "lambda"), "single@1 fsdp@2 zero2@2 ddp@2"),
        (Recipe("adagrad"), "ddp@2 fsdp@2 single@1 hsdp@2"),
        (Recipe("rmsprop", "plateau"), "fsdp@2 ddp@2 zero1@2 single@1"),
        (Recipe("amsgrad", "sequence"), "zero3@2 fsdp@2 single@1 zero2@2"),
        # OneCycle moves the betas too, and sets other rates for each group.
        (Recipe("nadam", "onecycle"), "single@1 fsdp@2 ddp@2 fsdp@3"),
        (Recipe("adafactor"), "single@1 ddp@2"),
        (Recipe(scheduler="onecycle", scalar=True), "zero2@3 ddp@2 zero3-offload@2 single@1"),
        # Strategies that split parameters refuse empty ones.
        (Recipe(scalar=True, empty=True), "single@1 zero1@2 ddp@3"),
        # First used at step 5, after two resumptions in which it had no state.
        (Recipe(late=5), "single@1 fsdp@2 ddp_find_unused_parameters_true@2 fsdp@3"),
    ],
    ids=["sgd", "adagrad", "rmsprop", "amsgrad", "nadam", "adafactor", "without dims", "empty", "late"],
)
def test_optimizers_schedules_and_odd_parameters_continue(recipe: Recipe, chain: str, tmp_path: Path) -> None:
    losses = along(chain, recipe, tmp_path)
    assert losses == pytest.approx(by_hand(recipe)[: len(losses)], rel=1e-5)


@pytest.mark.parametrize("chain", ["single@1 zero2@2 fsdp@2", "zero3@2 ddp@2 zero1@2"])
def test_saved_before_the_first_step(chain: str, tmp_path: Path) -> None:
    recipe = Recipe(scheduler="lambda")
    first = tmp_path / "first.ckpt"
    before, *rest = chain.split()
    assert train(before, recipe, tmp_path, 0, None, first) == []
    assert not [name for name in tensors_of(first) if name.startswith("optimizer")]
    losses, saved = [], first
    for number, layout in enumerate(rest):
        losses += train(layout, recipe, tmp_path, 2 * number + 2, saved, saved := tmp_path / f"{number}.ckpt")
    assert losses == pytest.approx(by_hand(recipe, 4), rel=1e-5)


ROUND = "ddp@2 fsdp@2 zero1@2 zero3@2 hsdp@2 zero2@3 fsdp@3 zero3-offload@2 zero1-offload@2 single@1"


def test_no_tensor_changes_a_bit_on_the_way_around(tmp_path: Path) -> None:
    recipe, saved = Recipe(optimizer="amsgrad"), tmp_path / "first.ckpt"
    train("single@1", recipe, tmp_path, 3, None, saved)
    wanted = tensors_of(saved)
    assert len(wanted) > 20
    for number, layout in enumerate(ROUND.split()):
        saved, before = tmp_path / f"{number}.ckpt", saved
        assert train(layout, recipe, tmp_path, 3, before, saved) == []
        found = tensors_of(saved)
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert found[name].dtype == tensor.dtype, f"{layout}: {name}"
            assert torch.equal(found[name], tensor), f"{layout}: {name}"


@pytest.mark.parametrize(
    ("one", "first", "other", "second"),
    [
        ("ddp@2", "32-true", "fsdp@2", "64-true"),
        ("fsdp@2", "16-mixed", "ddp@2", "32-true"),
        ("fsdp@2", "bf16-true", "zero3@2", "32-true"),
        ("zero2@2", "bf16-mixed", "single@1", "32-true"),
        ("zero2@2", "bf16-true", "single@1", "bf16-mixed"),
    ],
)
def test_another_precision_takes_over_all_there_is(
    one: str, first: str, other: str, second: str, tmp_path: Path
) -> None:
    saved, taken = tmp_path / "saved.ckpt", tmp_path / "taken.ckpt"
    train(one, Recipe(precision=first), tmp_path, 3, None, saved)
    train(other, Recipe(precision=second), tmp_path, 3, saved, taken)
    found, wanted = tensors_of(taken), tensors_of(saved)
    for name, tensor in wanted.items():
        assert torch.equal(found[name].double(), tensor.double()), name
    narrow = torch.bfloat16 if first == "bf16-true" and "zero" not in one else torch.float32
    assert wanted["model: net.first.weight"].dtype == narrow
    assert len(train(other, Recipe(precision=second), tmp_path, 5, saved, None)) == 2
