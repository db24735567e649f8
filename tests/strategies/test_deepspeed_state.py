"""Canonical state of the DeepSpeed strategies: saved and loaded from any stage and world size to any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mixture import GLOBAL_BATCH, PLACES, loss_of, mixture, optimizer_of, rows_of
from models import Regressor, loader, silent_trainer
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx import TrainModule
from phalanx.callbacks import LambdaCallback
from phalanx.framework.checkpoint.reader import held
from phalanx.framework.checkpoint.write_plan import Shard
from phalanx.framework.core.optimizer_config import parameters_of
from phalanx.framework.core.precision import resolve_precision
from phalanx.strategies import DeepSpeedStrategy

NVME = {"stage": 3, "offload_optimizer": "nvme", "offload_parameters": "nvme"}


def started(place: dict[str, Any], net: nn.Module, kind: str = "adamw") -> tuple[Any, torch.optim.Optimizer]:
    """Return a strategy that holds a module, and its optimizer."""
    strategy = DeepSpeedStrategy(**place)
    strategy.connect("cpu", 1, resolve_precision("32-true"))
    strategy.to_device(net)
    (optimizer,) = strategy.setup(net, [optimizer_of(net, kind)], training=True)
    return strategy, optimizer


def updated(strategy: Any, optimizer: Any, net: nn.Module, steps: range) -> list[float]:
    """Train on this rank's part of global batches; return the mean losses."""
    step = strategy.route(lambda rows: loss_of(net, rows), True)
    losses = []
    for number in steps:
        part = rows_of(20 * GLOBAL_BATCH)[number * GLOBAL_BATCH : (number + 1) * GLOBAL_BATCH]
        size = GLOBAL_BATCH // strategy.world.size
        loss = step(part[strategy.world.rank * size : (strategy.world.rank + 1) * size])
        strategy.zero_grad(optimizer)
        strategy.backward(loss)
        assert strategy.step(optimizer)
        losses.append(float(strategy.world.all_reduce(loss.detach().clone(), "mean")))
    return losses


def joined(shards: dict[str, Shard], world: Any) -> dict[str, Tensor]:
    """Return the full tensors from the pieces of all ranks."""
    wholes: dict[str, Tensor] = {}
    own = {name: (shard.tensor.double(), shard.offsets, tuple(shard.shape)) for name, shard in shards.items()}
    for parts in world.all_gather_object(own):
        for name, (tensor, offsets, shape) in parts.items():
            whole = wholes.setdefault(name, torch.full(shape, torch.nan, dtype=torch.float64)).view(-1)
            if tuple(tensor.shape) == shape:
                whole[:] = tensor.reshape(-1)
            else:
                whole[offsets[0] : offsets[0] + tensor.numel()] = tensor
    return {name: whole.float() for name, whole in wholes.items()}


def taken(place: dict[str, Any], kind: str, path: str) -> None:
    """Train four steps; save the full state, and the losses of four more."""
    net = mixture()
    strategy, optimizer = started(place, net, kind)
    assert list(strategy.state.optimizer_state(optimizer)) == []
    assert strategy.state.shapes(net) == {name: tuple(one.shape) for name, one in mixture().state_dict().items()}
    updated(strategy, optimizer, net, range(4))
    names = {id(one): name for name, one in net.named_parameters()}
    model = joined(strategy.state.model_state(net), strategy.world)
    assert model.keys() == mixture().state_dict().keys()
    slots: dict[str, dict[str, Any]] = {}
    for parameter, found in strategy.state.optimizer_state(optimizer):
        shards = {slot: value for slot, value in found.items() if isinstance(value, Shard)}
        others = {slot: value for slot, value in found.items() if not isinstance(value, Shard)}
        slots[names[id(parameter)]] = {**joined(shards, strategy.world), **others}
    losses = updated(strategy, optimizer, net, range(4, 8))
    strategy.restore(net)
    strategy.teardown()
    if strategy.world.is_global_zero:
        torch.save((model, slots, losses), path)


def put_back(place: dict[str, Any], kind: str, path: str) -> list[float]:
    """Load that state into a new module and optimizer; return the losses of the same four steps."""
    model, slots, _ = torch.load(path)
    net = mixture()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(3.0)
    strategy, optimizer = started(place, net, kind)
    for group in optimizer.param_groups:
        group["lr"] = 5.0
    names = {id(one): name for name, one in net.named_parameters()}
    groups = [dict(group) for group in optimizer_of(mixture(), kind).param_groups]
    state = []
    for one in parameters_of(optimizer):
        found = slots.get(names[id(one)], {})
        tensors = held({slot: value for slot, value in found.items() if slot != "step"})
        state.append({**found, **tensors})
    strategy.state.load_model_state(net, held(model))
    strategy.state.load_optimizer_state(optimizer, state, groups)
    losses = updated(strategy, optimizer, net, range(4, 8))
    strategy.restore(net)
    strategy.teardown()
    return losses


def by_hand(kind: str) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]], list[float]]:
    """Train eight steps in one process; return the state after four of them, and the losses."""
    net = mixture()
    optimizer = optimizer_of(net, kind)
    names = {id(one): name for name, one in net.named_parameters()}
    losses, kept, slots = [], {}, {}
    for number in range(8):
        optimizer.zero_grad()
        loss = loss_of(net, rows_of(20 * GLOBAL_BATCH)[number * GLOBAL_BATCH : (number + 1) * GLOBAL_BATCH])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if number == 3:
            kept = {name: one.detach().clone() for name, one in net.state_dict().items()}
            slots = {
                names[id(one)]: {slot: value.detach().clone() for slot, value in found.items()}
                for one, found in optimizer.state.items()
            }
    return kept, slots, losses


def compare(path: Path, kind: str) -> None:
    """Compare the saved state with plain torch."""
    model, slots, losses = torch.load(path)
    expected, moments, all_losses = by_hand(kind)
    torch.testing.assert_close(model, expected, rtol=1e-4, atol=1e-5)
    assert slots.keys() == moments.keys()
    for name, found in slots.items():
        wanted = moments[name]
        assert found.keys() == wanted.keys()
        for slot, value in found.items():
            assert value.shape == wanted[slot].shape
            assert value.dtype == wanted[slot].dtype
            torch.testing.assert_close(value, wanted[slot], rtol=1e-3, atol=1e-6)
    assert losses == pytest.approx(all_losses[4:], rel=1e-5)


@pytest.mark.parametrize("place", [*PLACES, "zero3-nvme", "round robin"])
def test_state_equals_plain_torch_and_loads_anywhere(place: str, tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    others = {
        "zero3-nvme": {**NVME, "nvme_path": str(tmp_path)},
        "round robin": {"stage": 2, "round_robin_gradients": True},
    }
    given = {**PLACES, **others}[place]
    run_on_ranks(2, taken, given, "adamw", str(path))
    compare(path, "adamw")
    *_, losses = torch.load(path)
    # Offloaded state is stepped by DeepSpeed's Adam for the CPU, which rounds otherwise than torch's.
    for ranks, other, rel in ((2, given, 1e-6), (3, PLACES["zero3"], 1e-5)):
        for found in run_on_ranks(ranks, put_back, other, "adamw", str(path)):
            assert found == pytest.approx(losses, rel=rel)


@pytest.mark.parametrize("kind", ["sgd", "amsgrad"])
@pytest.mark.parametrize(("place", "other"), [("zero2", "zero3"), ("zero3", "zero1")])
def test_state_of_other_optimizers(kind: str, place: str, other: str, tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    run_on_ranks(2, taken, PLACES[place], kind, str(path))
    compare(path, kind)
    *_, losses = torch.load(path)
    for found in run_on_ranks(2, put_back, PLACES[other], kind, str(path)):
        assert found == pytest.approx(losses, rel=1e-6)


class Trained(TrainModule):
    """Trains a ``Mixture``."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mixture()
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = loss_of(self.net, batch[0])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return optimizer_of(self.net)


def resumed(ranks: int, strategy: str, steps: int, root: str, resume: str | None, save: str | None) -> list[float]:
    """Train up to a step, from a checkpoint and to one."""
    module = Trained()
    saver = LambdaCallback(on_train_end=lambda trainer, _: trainer.save_checkpoint(save) if save else None)
    trainer = silent_trainer(
        strategy=strategy, devices=ranks, max_steps=steps, callbacks=[saver], default_root_dir=root
    )
    data = DataLoader(TensorDataset(rows_of(20 * GLOBAL_BATCH)), batch_size=GLOBAL_BATCH // ranks)
    trainer.fit(module, data, ckpt_path=resume)
    return module.losses


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_a_checkpoint_with_odd_shapes_loads_in_one_process_and_back(strategy: str, tmp_path: Path) -> None:
    root, first, second = str(tmp_path), str(tmp_path / "first.ckpt"), str(tmp_path / "second.ckpt")
    losses = torch.tensor(run_on_ranks(2, resumed, 2, strategy, 3, root, None, first)).mean(0).tolist()
    losses += resumed(1, "single", 5, root, first, second)
    losses += torch.tensor(run_on_ranks(3, resumed, 3, strategy, 8, root, second, None)).mean(0).tolist()
    assert losses == pytest.approx(by_hand("adamw")[2], rel=1e-5)


def weights_by_step(strategy: str, root: str, resume: int | None, stop: int) -> dict[int, Tensor]:
    """Train to step ``stop``, from the start or from the checkpoint of a step; return the weights after each."""
    found: dict[int, Tensor] = {}

    def keep(trainer: Any, module: Any, *_: Any) -> None:
        found[trainer.global_step] = torch.cat([one.detach().flatten() for one in module.parameters()]).clone()
        if resume is None:
            trainer.save_checkpoint(f"{root}/{trainer.global_step}.ckpt")

    trainer = silent_trainer(
        devices=2, strategy=strategy, max_steps=stop, callbacks=[LambdaCallback(on_train_batch_end=keep)]
    )
    trainer.fit(Regressor(lr=0.01), loader(64, 4), ckpt_path=None if resume is None else f"{root}/{resume}.ckpt")
    return found


def resumed_at_each_step(strategy: str, root: str) -> list[int]:
    """Return the steps from which a resumed run differs in any bit from the uninterrupted one."""
    whole = weights_by_step(strategy, root, None, 8)
    different = []
    for step in range(1, 7):
        found = weights_by_step(strategy, root, step, step + 2)
        if not all(torch.equal(found[number], whole[number]) for number in (step + 1, step + 2)):
            different.append(step)
    return different


@pytest.mark.parametrize("strategy", ["zero2", "zero2-offload"])
def test_a_run_resumed_at_any_step_is_bit_identical(strategy: str, tmp_path: Path) -> None:
    # DeepSpeed's Adam for the processor multiplies the powers of its betas on from step to step.
    assert run_on_ranks(2, resumed_at_each_step, strategy, str(tmp_path)) == [[], []]
