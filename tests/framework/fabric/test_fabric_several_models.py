"""Optimizers, modules and loaders that do not correspond one to one, beside plain torch on the global batch."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refuses, says
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx import Fabric
from phalanx.compat.accelerate import Accelerator
from phalanx.errors import CheckpointError, ConfigurationError

X = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
LIMIT = 0.1


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    # Odd sizes, so that shards are uneven.
    return nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1))


def loss_of(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = (3 * model(x) - 5).square().mean()
    return loss


def clipped_by_hand() -> tuple[list[float], list[Tensor]]:
    """Clip the first layer, then both by their joint norm, in two steps of plain torch."""
    model = two_layers()
    optimizer, norms = torch.optim.SGD(model.parameters(), lr=0.1), []
    for parameters in (model[0].parameters(), model.parameters()):
        loss_of(model, X).backward()
        norms.append(float(nn.utils.clip_grad_norm_(parameters, LIMIT)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, [parameter.detach() for parameter in model.parameters()]


def clipped(strategy: str, ranks: int, precision: Any) -> tuple[list[float], list[Tensor]]:
    fabric = Fabric(accelerator="cpu", strategy=strategy, devices=ranks, precision=precision)
    fabric.launch()
    model = two_layers()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    part, norms = X.chunk(ranks)[fabric.global_rank], []
    for layer in (model[0], model):
        fabric.backward(loss_of(model, part))
        norm = fabric.clip_grad_norm_(layer.parameters(), LIMIT)
        assert norm is not None
        norms.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
    return norms, list(fabric.full_state_dict(model).values())


@pytest.mark.parametrize(
    ("strategy", "ranks", "precision"),
    [
        ("single", 1, "32-true"),
        ("ddp", 2, "32-true"),
        ("fsdp", 2, "32-true"),
        ("zero1", 2, "bf16-mixed"),
        ("zero2", 2, "32-true"),
        ("zero3", 2, "32-true"),
    ],
)
def test_some_parameters_are_clipped_by_their_own_norm(strategy: str, ranks: int, precision: str) -> None:
    norms, weights = clipped_by_hand()
    near: Any = {"rtol": 0.03, "atol": 0.03} if precision == "bf16-mixed" else {"rtol": 1e-5, "atol": 1e-6}
    for own, found in run_on_ranks(ranks, clipped, strategy, ranks, precision, timeout=120):
        torch.testing.assert_close(torch.tensor(own), torch.tensor(norms), **near)
        for one, wanted in zip(found, weights, strict=bool(found)):
            torch.testing.assert_close(one.cpu(), wanted, **near)


def test_parameters_of_several_optimizers_are_clipped_by_their_joint_norm() -> None:
    fabric, model = Fabric(accelerator="cpu"), two_layers()
    first, one = fabric.setup(model[0], torch.optim.SGD(model[0].parameters(), lr=0.1))
    last, two = fabric.setup(model[2], torch.optim.SGD(model[2].parameters(), lr=0.1))
    fabric.backward(loss_of(lambda x: last(torch.tanh(first(x))), X))
    norm = fabric.clip_grad_norm_(chain(first.parameters(), last.parameters()), LIMIT, norm_type=1.0)
    expected = two_layers()
    loss_of(expected, X).backward()
    assert norm is not None
    assert float(norm) == pytest.approx(float(nn.utils.clip_grad_norm_(expected.parameters(), LIMIT, 1.0)))
    one.step()
    two.step()
    for own, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        assert wanted.grad is not None
        torch.testing.assert_close(own.grad, wanted.grad)


def test_a_gradient_that_no_optimizer_uses_is_not_clipped_in_silence() -> None:
    fabric, model = Fabric(accelerator="cpu"), two_layers()
    model, _ = fabric.setup(model, torch.optim.SGD(model[0].parameters(), lr=0.1))
    fabric.backward(loss_of(model, X))
    with refuses(ConfigurationError, "optimizer", "(1, 3)"):
        fabric.clip_grad_norm_(model.parameters(), LIMIT)


# ---- one optimizer of two modules ------------------------------------------------------------------------------------


def trained_together(strategy: str, ranks: int) -> list[Tensor]:
    accelerator = Accelerator(cpu=True, strategy=strategy, devices=ranks)
    model = two_layers()
    first, last = model[0], model[2]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    first, last, optimizer = accelerator.prepare(first, last, optimizer)
    for _ in range(2):
        part = X.chunk(ranks)[accelerator.process_index]
        accelerator.backward(loss_of(lambda x: last(torch.tanh(first(x))), part))
        accelerator.clip_grad_norm_([*first.parameters(), *last.parameters()], LIMIT)
        optimizer.step()
        optimizer.zero_grad()
    return [*accelerator.get_state_dict(first).values(), *accelerator.get_state_dict(last).values()]


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("fsdp", 2)])
def test_one_optimizer_of_two_modules_updates_both(strategy: str, ranks: int) -> None:
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        loss_of(model, X).backward()
        nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        optimizer.step()
        optimizer.zero_grad()
    for found in run_on_ranks(ranks, trained_together, strategy, ranks, timeout=120):
        for own, wanted in zip(found, model.parameters(), strict=bool(found)):
            torch.testing.assert_close(own.cpu(), wanted.detach(), rtol=1e-5, atol=1e-6)


def refused() -> str:
    fabric, model = Fabric(accelerator="cpu", strategy="zero2", devices=2), two_layers()
    fabric.launch()
    with refuses(ConfigurationError, "zero2") as caught:
        fabric.setup(model[0], torch.optim.SGD(model.parameters(), lr=0.1))
    return str(caught.value)


def test_an_engine_with_one_optimizer_refuses_that_of_two_modules() -> None:
    says(run_on_ranks(2, refused), "zero2", "SGD", "ModuleDict")


# ---- loaders that are read together ----------------------------------------------------------------------------------


def zipped(ranks: int, longer_first: bool) -> tuple[int, list[Tensor]]:
    fabric = Fabric(accelerator="cpu", strategy="ddp" if ranks > 1 else "single", devices=ranks, accumulate=2)
    fabric.launch()
    model = two_layers()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    rows = torch.arange(60.0).reshape(12, 5) / 60
    short, long = (DataLoader(TensorDataset(rows[:count]), batch_size=2) for count in (10, 12))
    short, long = fabric.setup_dataloaders(short, long)
    for batches in zip(*((long, short) if longer_first else (short, long)), strict=False):
        with fabric.accumulate(model):
            fabric.backward(sum(loss_of(model, x) for (x,) in batches))  # type: ignore[arg-type]
            optimizer.step()
            optimizer.zero_grad()
    return optimizer.applied, list(fabric.full_state_dict(model).values())


def zipped_by_hand() -> list[Tensor]:
    model, rows = two_layers(), torch.arange(60.0).reshape(12, 5) / 60
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = rows[:10].split(2)
    for window in (batches[number : number + 2] for number in range(0, len(batches), 2)):
        for x in window:
            (2 * loss_of(model, x) / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize(("ranks", "longer_first"), [(1, True), (2, False)])
def test_the_last_window_of_zipped_loaders_ends_with_the_shorter(ranks: int, longer_first: bool) -> None:
    for applied, found in run_on_ranks(ranks, zipped, ranks, longer_first):
        assert applied == (3 if ranks == 1 else 2)
        # On two ranks the shorter loader has other rows beside those of the longer one.
        for own, wanted in zip(found, zipped_by_hand(), strict=True) if ranks == 1 else ():
            torch.testing.assert_close(own, wanted)


def test_an_inner_loop_does_not_end_its_window_with_the_outer_one() -> None:
    fabric = Fabric(accelerator="cpu", accumulate=2)
    model = two_layers()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    outer, inner = fabric.setup_dataloaders(*(DataLoader(X, batch_size=2) for _ in range(2)))  # type: ignore[arg-type]
    for _ in outer:
        for x in inner:
            with fabric.accumulate(model):
                fabric.backward(loss_of(model, x))
                optimizer.step()
                optimizer.zero_grad()
    assert optimizer.applied == 2


# ---- states of registered objects ------------------------------------------------------------------------------------


class Meter:
    def state_dict(self) -> dict[str, int]:
        return {"value": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take nothing."""


def test_a_state_of_more_registered_objects_is_refused(tmp_path: Path) -> None:
    first, second = Accelerator(cpu=True), Accelerator(cpu=True)
    first.prepare(nn.Linear(2, 1))
    first.register_for_checkpointing(Meter(), Meter())
    first.save_state(tmp_path / "state")
    second.prepare(nn.Linear(2, 1))
    second.register_for_checkpointing(Meter())
    with refuses(CheckpointError, "2 registered objects", "register_for_checkpointing"):
        second.load_state(tmp_path / "state")


# ---- a module of two Fabrics -----------------------------------------------------------------------------------------


def updated(model: nn.Module, optimizer: torch.optim.Optimizer, backward: Any, x: Tensor) -> list[float]:
    losses = []
    for _ in range(3):
        loss = loss_of(model, x)
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def set_up_twice(strategy: str) -> tuple[str, list[float]]:
    """Return why a second Fabric refuses a module, and the losses once the first one has released it."""
    module, told = two_layers(), ""
    first, second = (Fabric(accelerator="cpu", strategy=strategy, devices="auto") for _ in range(2))
    model, optimizer = first.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    losses = updated(model, optimizer, first.backward, X)
    try:
        second.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    except ConfigurationError as error:
        told = str(error)
    first.free_memory()
    model, optimizer = second.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    losses += updated(model, optimizer, second.backward, X)
    second.free_memory()
    return told, losses


def test_a_module_in_the_engine_of_another_fabric_is_refused() -> None:
    """The hooks of the first engine would take the gradients of the second."""
    ((told, losses),) = run_on_ranks(1, set_up_twice, "zero1")
    says(told, "zero1", "free_memory")
    model = two_layers()
    expected = [updated(model, torch.optim.SGD(model.parameters(), lr=0.1), Tensor.backward, X) for _ in range(2)]
    assert losses == pytest.approx(list(chain(*expected)))
