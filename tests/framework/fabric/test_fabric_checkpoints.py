"""Saving and loading from a user's own loop: canonical, in place, and bit-identical when continued."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refuses
from models import Regressor, loader, silent_trainer, weights_of
from ranks import run_on_ranks
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from phalanx import Callback, Fabric, Trainer, TrainModule, checkpoint
from phalanx.framework.core.errors import CheckpointError, ConfigurationError, NonFiniteError


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(26, 4, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


class Loop:
    """All that a training loop is made of, with dropout and shuffled data."""

    def __init__(self, precision: str | None = None, seed: int = 5, dropout: float = 0.3) -> None:
        self.fabric = Fabric(accelerator="cpu", precision=precision, accumulate=2)
        self.fabric.seed_everything(5)
        torch.manual_seed(seed)
        network = nn.Sequential(nn.Linear(4, 8), nn.Dropout(dropout), nn.Linear(8, 1))
        plain = torch.optim.AdamW(network.parameters(), lr=0.05)
        self.model, self.optimizer = self.fabric.setup(network, plain)
        self.scheduler = self.fabric.setup_scheduler(torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9))
        self.loader = self.fabric.setup_dataloaders(DataLoader(dataset(), batch_size=3, shuffle=True))
        self.losses: list[float] = []

    def run(self, batches: int, on_last: Callable[[], object] = lambda: None) -> None:
        """Train on some batches; ``on_last`` is called in the middle of a pass."""
        for number, (inputs, targets) in enumerate(chain.from_iterable(repeat(self.loader)), 1):
            with self.fabric.accumulate(self.model):
                loss = mse_loss(self.model(inputs), targets)
                self.losses.append(loss.item())
                self.fabric.backward(loss, weight=len(inputs))
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            if number == batches:
                on_last()
                break

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "loader": self.loader,
            "note": {"epochs": [1, 2]},
        }


def continue_loop(path: str, precision: str | None, everything: bool) -> None:
    # The generators are part of everything alone: without them, the losses must not depend on them.
    dropout = 0.3 if everything else 0.0
    straight, saving = Loop(precision, dropout=dropout), Loop(precision, dropout=dropout)
    torch.manual_seed(9)
    straight.run(8)
    torch.manual_seed(9)
    saving.run(4, lambda: saving.fabric.save_state(path) if everything else saving.fabric.save(path, saving.state()))
    resumed = Loop(precision, seed=6, dropout=dropout)
    torch.manual_seed(10)
    if everything:
        resumed.fabric.load_state(path)
    else:
        state = {**resumed.state(), "note": None}
        assert resumed.fabric.load(path, state) == {}
        assert state["note"] == {"epochs": [1, 2]}
    resumed.run(4)
    assert resumed.losses == straight.losses[4:]
    assert torch.equal(weights_of(resumed.model), weights_of(straight.model))
    assert resumed.scheduler.get_last_lr() == straight.scheduler.get_last_lr()
    assert resumed.optimizer.applied == straight.optimizer.applied
    if precision is not None:
        assert resumed.fabric.scaler is not None
        assert straight.fabric.scaler is not None
        assert resumed.fabric.scaler.state_dict() == straight.fabric.scaler.state_dict()


@pytest.mark.parametrize("everything", [False, True])
def test_a_loop_in_half_precision_continues_bit_identically(tmp_path: Path, everything: bool) -> None:
    continue_loop(str(tmp_path / "a.ckpt"), "16-mixed", everything)


@pytest.mark.parametrize("everything", [False, True])
def test_a_loop_on_two_ranks_continues_bit_identically(tmp_path: Path, everything: bool) -> None:
    run_on_ranks(2, continue_loop, str(tmp_path / "a.ckpt"), None, everything)
    # What two ranks wrote, one reads.
    loop = Loop()
    rest = loop.fabric.load(tmp_path / "a.ckpt")
    assert set(rest) == (
        {"module_0", "optimizer_0", "scheduler_0", "loader_0"}
        if everything
        else {"model", "optimizer", "scheduler", "loader", "note"}
    )


def stepped(seed: int = 0) -> tuple[Fabric, nn.Module, Any]:
    fabric = Fabric(accelerator="cpu")
    torch.manual_seed(seed)
    plain = nn.Linear(2, 1)
    model, optimizer = fabric.setup(plain, torch.optim.AdamW(plain.parameters(), lr=0.1))
    fabric.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    return fabric, model, optimizer


def test_a_checkpoint_holds_canonical_names(tmp_path: Path) -> None:
    fabric, model, optimizer = stepped()
    fabric.save(tmp_path / "a.ckpt", {"model": model, "optimizer": optimizer, "step": 3})
    assert not checkpoint.verify(tmp_path / "a.ckpt")
    assert sorted(checkpoint.weights(tmp_path / "a.ckpt")) == ["bias", "weight"]
    rest = fabric.load(tmp_path / "a.ckpt")
    assert rest["step"] == 3
    assert sorted(rest["model"]) == ["bias", "weight"]
    assert sorted(rest["optimizer"]["state"]["weight"]) == ["exp_avg", "exp_avg_sq", "step"]
    assert rest["optimizer"]["param_groups"][0]["params"] == ["weight", "bias"]


def test_several_modules_are_kept_apart(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu")
    first, second = fabric.setup(nn.Linear(1, 1)), nn.Linear(2, 1)
    fabric.save(tmp_path / "a.ckpt", {"first": first, "second": second})
    assert sorted(checkpoint.weights(tmp_path / "a.ckpt")) == [
        *("first.bias", "first.weight", "second.bias", "second.weight")
    ]
    fresh = {"second": nn.Linear(2, 1)}
    rest = fabric.load(tmp_path / "a.ckpt", fresh)
    assert torch.equal(fresh["second"].weight, second.weight)
    assert torch.equal(rest["first"]["weight"], first.weight)


def test_what_does_not_fit_is_refused_and_nothing_has_changed(tmp_path: Path) -> None:
    fabric, model, optimizer = stepped()
    fabric.save(tmp_path / "a.ckpt", {"model": model, "optimizer": optimizer, "step": 3})
    other = nn.Linear(3, 1)
    before = other.weight.clone()
    with refuses(CheckpointError, "weight: (1, 2)", "(1, 3)"):
        fabric.load(tmp_path / "a.ckpt", {"model": other})
    assert torch.equal(other.weight, before)
    with refuses(CheckpointError, "'modle'", "'model'"):
        fabric.load(tmp_path / "a.ckpt", {"modle": model})
    with refuses(CheckpointError, "AdamW", "SGD"):
        fabric.load(tmp_path / "a.ckpt", {"optimizer": torch.optim.SGD(model.parameters(), lr=1.0)})
    with pytest.warns(UserWarning, match="holds no 'epoch' of that kind"):
        rest = fabric.load(tmp_path / "a.ckpt", {"epoch": 1}, strict=False)
    assert set(rest) == {"model", "optimizer", "step"}
    with refuses(ConfigurationError, "['thing']"):
        fabric.save(tmp_path / "b.ckpt", {"thing": object()})
    assert not (tmp_path / "b.ckpt").exists()


def test_part_of_a_module_is_saved_through_a_filter(tmp_path: Path) -> None:
    fabric, model, _ = stepped()
    fabric.save(tmp_path / "a.ckpt", {"model": model}, filter={"model": lambda name, value: name == "bias"})
    assert list(checkpoint.weights(tmp_path / "a.ckpt")) == ["bias"]
    fresh = nn.Linear(2, 1)
    weight = fresh.weight.clone()
    with refuses(CheckpointError, "weight"):
        fabric.load(tmp_path / "a.ckpt", fresh)
    with pytest.warns(UserWarning, match="weight: missing in the checkpoint"):
        fabric.load(tmp_path / "a.ckpt", fresh, strict=False)
    assert torch.equal(fresh.bias, model.bias)  # type: ignore[arg-type]
    assert torch.equal(fresh.weight, weight)
    with refuses(ConfigurationError, "'modle'", "'model'"):
        fabric.save(tmp_path / "a.ckpt", {"model": model}, filter={"modle": lambda name, value: True})


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_registered_objects_are_part_of_the_state(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu")
    counter = Counter()
    fabric.register_for_checkpointing(counter)
    counter.count = 7
    fabric.save_state(tmp_path / "state")
    drawn = torch.rand(1)
    counter.count = 0
    fabric.load_state(tmp_path / "state")
    assert counter.count == 7
    assert torch.equal(torch.rand(1), drawn)
    with refuses(ConfigurationError, "register_for_checkpointing", "state_dict"):
        fabric.register_for_checkpointing(object())


def test_weights_are_written_for_other_programs(tmp_path: Path) -> None:
    run_on_ranks(2, write_model, str(tmp_path))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
                     "model.safetensors.index.json"]  # fmt: skip
    table = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(table["weight_map"]) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    fabric = Fabric(accelerator="cpu")
    fresh = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fabric.load_raw(tmp_path, fresh)
    assert torch.equal(weights_of(fresh), weights_of(wide_model()))


def wide_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def write_model(directory: str) -> None:
    fabric = Fabric(accelerator="cpu")
    model = fabric.setup(wide_model())
    fabric.save_model(model, directory)
    assert (Path(directory) / "model.safetensors").exists()
    fabric.barrier()
    if fabric.is_main_process:
        (Path(directory) / "config.json").write_text("{}")
    fabric.save_model(model, directory, max_shard_size=300)


def test_a_trainers_checkpoint_is_read(tmp_path: Path) -> None:
    class Saver(Callback):
        def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
            trainer.save_checkpoint(tmp_path / "a.ckpt")

    trained = Regressor()
    silent_trainer(default_root_dir=tmp_path, max_epochs=1, callbacks=[Saver()]).fit(trained, loader(4))
    fabric = Fabric(accelerator="cpu")
    fresh = Regressor()
    model, optimizer = fabric.setup(fresh, fresh.configure_optimizers())
    fabric.load(tmp_path / "a.ckpt", {"model": model, "optimizer": optimizer})
    assert torch.equal(weights_of(model), weights_of(trained))
    assert optimizer.state[model.net[0].weight]["step"] == 1


def test_raw_weights_are_read_from_checkpoints_and_files(tmp_path: Path) -> None:
    fabric, model, _ = stepped()
    fabric.save(tmp_path / "a.ckpt", {"model": model})
    fabric.save_model(model, tmp_path / "out")
    for path in (tmp_path / "a.ckpt", tmp_path / "out", tmp_path / "out" / "model.safetensors"):
        assert torch.equal(fabric.load_raw(path)["weight"], model.weight)  # type: ignore[arg-type]
    with refuses(CheckpointError, "Linear", "weight"):
        fabric.load_raw(tmp_path / "out", nn.Linear(3, 1))
    with refuses(CheckpointError, "nothing'"):
        fabric.load_raw(tmp_path / "nothing")
    torch.save(model.state_dict(), tmp_path / "pickle.pt")
    with refuses(CheckpointError, "pickle.pt'"):
        fabric.load_raw(tmp_path / "pickle.pt")
    with refuses(ConfigurationError, "safe_serialization=False"):
        fabric.save_model(model, tmp_path / "out", safe_serialization=False)


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    loop = Loop()
    loop.model.register_buffer("mask", torch.tensor([-torch.inf]))
    good = tmp_path / "good"
    loop.fabric.save(good, {"model": loop.model})
    with torch.no_grad():
        loop.model[2].weight[0, 0] = torch.nan
    with refuses(NonFiniteError, "2.weight", "not finite"):
        loop.fabric.save(good, {"model": loop.model})
    with refuses(NonFiniteError, "2.weight", "not finite"):
        loop.fabric.save_state(good)
    with refuses(NonFiniteError, "2.weight", "not finite"):
        loop.fabric.save_model(loop.model, tmp_path)
    assert torch.isfinite(loop.fabric.load(good)["model"]["2.weight"]).all()
    assert [each.name for each in tmp_path.iterdir()] == ["good"]
