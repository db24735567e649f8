"""All that a run is made of goes from one strategy to another: odd parameters, optimizers, schedules, precisions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from odd_runs import Recipe, along, by_hand, tensors_of, train

KINDS = {
    "sgd": "single@1 fsdp@2 zero2@2 ddp@2",
    "adagrad": "ddp@2 fsdp@2 single@1 hsdp@2",
    "rmsprop": "fsdp@2 ddp@2 zero1@2 single@1",
    "amsgrad": "zero3@2 fsdp@2 single@1 zero2@2",
    "nadam": "single@1 fsdp@2 ddp@2 fsdp@3",
    "adafactor": "single@1 ddp@2 single@1 ddp@2",
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_slot_of_an_optimizer_is_carried(kind: str, tmp_path: Path) -> None:
    recipe = Recipe(optimizer=kind)
    assert along(KINDS[kind], recipe, tmp_path) == pytest.approx(by_hand(recipe), rel=1e-5)


@pytest.mark.parametrize(
    ("scheduler", "chain"),
    [
        ("lambda", "zero1@2 single@1 fsdp@2 zero3@2"),
        ("onecycle", "fsdp@2 zero2@2 single@1 ddp@2"),
        ("plateau", "ddp@2 zero3@2 fsdp@2 single@1"),
        ("sequence", "single@1 zero2@2 ddp@2 fsdp@2"),
    ],
)
def test_schedules_continue(scheduler: str, chain: str, tmp_path: Path) -> None:
    # OneCycle moves the betas too, and sets other rates for each group.
    recipe = Recipe(scheduler=scheduler)
    assert along(chain, recipe, tmp_path) == pytest.approx(by_hand(recipe), rel=1e-5)


@pytest.mark.parametrize("chain", ["single@1 zero1@2 ddp@3 zero3@3", "zero2@3 ddp@2 zero3-offload@2 single@1"])
def test_parameters_without_dims(chain: str, tmp_path: Path) -> None:
    recipe = Recipe(scalar=True)
    assert along(chain, recipe, tmp_path) == pytest.approx(by_hand(recipe), rel=1e-5)


def test_empty_parameters(tmp_path: Path) -> None:
    # Those that split parameters refuse them.
    recipe = Recipe(empty=True)
    assert along("ddp@2 zero1@2 ddp@3 single@1", recipe, tmp_path) == pytest.approx(by_hand(recipe), rel=1e-5)


@pytest.mark.parametrize(
    "chain", ["single@1 fsdp@2 ddp_find_unused_parameters_true@2 fsdp@3", "fsdp@3 single@1 fsdp@2 single@1"]
)
def test_state_that_comes_to_be_later(chain: str, tmp_path: Path) -> None:
    # First used at step 5, after two resumptions in which it had no state.
    recipe = Recipe(late=5)
    assert along(chain, recipe, tmp_path) == pytest.approx(by_hand(recipe), rel=1e-5)


@pytest.mark.parametrize("chain", ["single@1 zero2@2 fsdp@2", "zero3@2 ddp@2 zero1@2", "fsdp@2 zero3@2 single@1"])
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
        ("ddp@2", "bf16-mixed", "fsdp@2", "32-true"),
        ("ddp@2", "32-true", "fsdp@2", "64-true"),
        ("fsdp@2", "16-mixed", "ddp@2", "32-true"),
        ("fsdp@2", "bf16-true", "zero3@2", "32-true"),
        ("fsdp@2", "32-true", "zero3@2", "bf16-mixed"),
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
