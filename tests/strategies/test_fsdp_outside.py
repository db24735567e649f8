"""Use of a sharded module outside of its forward pass: its parts, its gradients, forward passes in hooks."""

from __future__ import annotations

import copy
import gc
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from models import silent_trainer
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_collectives import foreach_all_gather
from torch.utils.data import DataLoader, TensorDataset

from phalanx import Fabric, TrainModule

X = torch.linspace(-1, 1, 72).view(12, 6)


class Coder(nn.Module):
    """Parts that are called one by one, some of them inside units of their own."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.encoder = nn.Linear(6, 8)
            self.blocks: Any = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
            self.decoder = nn.Linear(8, 6)

    def encode(self, x: Tensor) -> Tensor:
        x = self.encoder(x)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.decoder(self.encode(x))
        return output


def by_parts(model: Any, x: Tensor) -> Tensor:
    """Return a loss of parts that are called outside of ``forward``, one of them inside a unit."""
    loss: Tensor = (model.decoder(model.encode(x)) - x).square().mean()
    inner: Tensor = model.blocks[1][0](model.encoder(x)).square().mean()
    return loss + inner


def trained_by_parts(model: Any, optimizer: Any, backward: Any, x: Tensor) -> list[Tensor]:
    outputs = []
    for _ in range(3):
        optimizer.zero_grad()
        backward(by_parts(model, x))
        optimizer.step()
        with torch.no_grad():
            outputs.append(model.encode(X))
        outputs.append(model(X).detach())
    return outputs


def coder_in_fabric(strategy: str) -> tuple[Fabric, Any, Any]:
    fabric = Fabric(accelerator="cpu", devices="auto", strategy=strategy)
    original = Coder()
    model, optimizer = fabric.setup(original, torch.optim.SGD(original.parameters(), lr=0.5))
    return fabric, model, optimizer


def parts_in_fabric(strategy: str) -> list[Tensor]:
    fabric, model, optimizer = coder_in_fabric(strategy)
    share = X.chunk(fabric.world_size)[fabric.global_rank]
    found = trained_by_parts(model, optimizer, fabric.backward, share)
    fabric.free_memory()
    # Without torch's hooks, a plain module of the same process is called as ever.
    nn.Linear(6, 8)(X)
    return found


@pytest.mark.parametrize(("strategy", "ranks"), [("fsdp", 3), ("hsdp", 2)])
def test_parts_of_a_sharded_module_can_be_called_and_trained(strategy: str, ranks: int) -> None:
    model = Coder()
    expected = trained_by_parts(model, torch.optim.SGD(model.parameters(), lr=0.5), lambda loss: loss.backward(), X)
    for found in run_on_ranks(ranks, parts_in_fabric, strategy):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def narrow_parts() -> tuple[torch.dtype, float]:
    fabric = Fabric(accelerator="cpu", devices="auto", strategy="fsdp", precision="bf16-mixed")
    original = Coder()
    model = fabric.setup(original)
    with torch.no_grad():
        encoded = model.encode(X)
    return encoded.dtype, encoded.sum().item()


def test_a_part_runs_in_the_dtype_of_its_gathered_parameters() -> None:
    with torch.no_grad():
        expected = Coder().encode(X).sum().item()
    for dtype, found in run_on_ranks(2, narrow_parts):
        assert dtype is torch.float32
        assert found == pytest.approx(expected, abs=0.1)


# ---- gradients -------------------------------------------------------------------------------------------------------


def dropped(model: Any, optimizer: Any, backward: Any, unreduced: Any, set_to_none: bool) -> list[Tensor]:
    """Reset gradients through the module, and clip them, while a forward pass has left parameters gathered."""
    outputs = []
    for _ in range(3):
        unreduced(lambda: backward(model(X).square().mean()))
        model(X)
        model.zero_grad(set_to_none)
        backward(model(X).square().mean())
        model(X)
        for parameter in model.decoder.parameters():
            parameter.grad = None
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        for twin in (copy.deepcopy(model.blocks[0][1]), pickle.loads(pickle.dumps(model.blocks[0][1]))):
            twin.zero_grad()
            assert not list(twin.parameters())
        optimizer.step()
        outputs.append(model(X).detach())
    return outputs


def dropped_in_fabric(strategy: str, set_to_none: bool) -> list[Tensor]:
    fabric, model, optimizer = coder_in_fabric(strategy)

    def unreduced(run: Any) -> None:
        with fabric.no_backward_sync(model):
            run()

    return dropped(model, optimizer, fabric.backward, unreduced, set_to_none)


@pytest.mark.parametrize(("strategy", "set_to_none"), [("fsdp", False), ("hsdp", True)])
def test_a_module_resets_and_clips_its_gradients_after_a_forward_pass(strategy: str, set_to_none: bool) -> None:
    model = Coder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    expected = dropped(model, optimizer, lambda loss: loss.backward(), lambda run: run(), set_to_none)
    for found in run_on_ranks(2, dropped_in_fabric, strategy, set_to_none):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def saved_state_dict(strategy: str, path: str) -> list[dict[str, Tensor]]:
    fabric, model, optimizer = coder_in_fabric(strategy)
    fabric.backward(model(X).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    model(X)
    state = model.state_dict()
    fabric.backward(model(X).square().mean())
    fabric.save(path, {"weights": state, "decoder": [model.decoder.state_dict()]})
    loaded = fabric.load(path)
    return [loaded["weights"], loaded["decoder"][0]]


def test_the_state_dict_of_a_sharded_module_can_be_saved(tmp_path: Path) -> None:
    model = Coder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(X).square().mean().backward()
    optimizer.step()
    expected = dict(model.state_dict()), dict(model.decoder.state_dict())
    for loaded in run_on_ranks(2, saved_state_dict, "hsdp", str(tmp_path / "state.ckpt")):
        torch.testing.assert_close(tuple(dict(each) for each in loaded), expected, rtol=1e-4, atol=1e-6)


# ---- hooks -----------------------------------------------------------------------------------------------------------


class Probed(TrainModule):
    """Calls itself and its parts in hooks, and drops gradients through a submodule under manual optimization."""

    def __init__(self, automatic: bool) -> None:
        super().__init__()
        self.automatic_optimization = automatic
        self.coder = Coder()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.coder(x)
        return output

    def loss(self, x: Tensor) -> Tensor:
        encoded: Tensor = self.coder.encode(x)
        loss: Tensor = (self.coder.decoder(encoded) - x).square().mean() + self(x).abs().mean()
        return loss

    def probe(self) -> None:
        self.seen.append(self(X).detach().clone())
        with torch.no_grad():
            self.seen.append(self.coder.encode(X).clone())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.automatic_optimization:
            return self.loss(batch[0])
        optimizer = self.optimizers()
        self.coder.decoder.zero_grad()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch[0]))
        self.manual_backward(self.loss(batch[0]))
        nn.utils.clip_grad_norm_(self.parameters(), 0.05)
        optimizer.step()
        self.probe()
        return None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self(batch[0])

    def on_train_start(self) -> None:
        self.probe()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.probe()

    def on_validation_epoch_end(self) -> None:
        self.probe()

    def on_train_epoch_end(self) -> None:
        self.probe()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def probed(strategy: str, ranks: int, automatic: bool) -> list[Tensor]:
    module = Probed(automatic)
    # All ranks compute the same batch: clipping within a step sees one rank's gradients under some strategies.
    loader = DataLoader(TensorDataset(X.repeat(ranks, 1).view(ranks, 2, 6, 6).transpose(0, 1).flatten(0, 2)), 6)
    trainer = silent_trainer(strategy=strategy, devices=ranks, max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(module, loader, loader)
    return module.seen


@pytest.mark.parametrize(("strategy", "ranks", "automatic"), [("fsdp", 2, True), ("fsdp", 3, False), ("hsdp", 2, True)])
def test_hooks_call_a_sharded_module_and_its_parts(strategy: str, ranks: int, automatic: bool) -> None:
    expected = probed("single", 1, automatic)
    for found in run_on_ranks(ranks, probed, strategy, ranks, automatic):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def part_of_a_unit_in_a_step() -> Tensor:
    _, model, _ = coder_in_fabric("fsdp")
    original = Coder.forward
    try:
        Coder.forward = lambda self, x: self.blocks[1][0](self.encoder(x))  # type: ignore[method-assign]
        output: Tensor = model(X)
    finally:
        Coder.forward = original  # type: ignore[method-assign]
    return output.detach()


def test_a_part_of_a_unit_runs_alone_in_a_forward_pass() -> None:
    model = Coder()
    for output in run_on_ranks(2, part_of_a_unit_in_a_step):
        torch.testing.assert_close(output, model.blocks[1][0](model.encoder(X)).detach())


def hooks_that_are_left() -> int:
    fabric = Fabric(accelerator="cpu", devices="auto", strategy="fsdp")
    before = len(torch.nn.modules.module._global_forward_pre_hooks)
    model = fabric.setup(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    model(torch.ones(1, 4)).sum().backward()
    assert len(torch.nn.modules.module._global_forward_pre_hooks) == before + 1
    # As the garbage of a program goes: in a reference cycle, with nobody to tear it down.
    model.itself = fabric.itself = [model, fabric]  # type: ignore[attr-defined]
    del model, fabric
    gc.collect()
    return len(torch.nn.modules.module._global_forward_pre_hooks) - before


class Twice(TrainModule):
    """Makes two updates in a step, and counts the gathers of each forward pass."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.net = Coder()
        self.gathers: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        for _ in range(2):
            with mock.patch.object(_fsdp_param_group, "foreach_all_gather", wraps=foreach_all_gather) as gather:
                loss = (self.net(batch[0]) - batch[0]).square().mean()
            self.gathers.append(gather.call_count)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def gathers_of_two_updates() -> list[int]:
    module = Twice()
    trainer = silent_trainer(strategy="fsdp", devices=2, max_steps=2)
    trainer.fit(module, DataLoader(TensorDataset(X), batch_size=3))
    return module.gathers


def test_a_forward_pass_after_an_update_in_the_same_step_gathers_each_unit_once() -> None:
    # Two blocks; what is outside of them is gathered already.
    assert run_on_ranks(2, gathers_of_two_updates)[0][1:] == [2, 2, 2]


def test_a_module_that_is_given_up_leaves_no_hook_on_the_calls_of_others() -> None:
    assert run_on_ranks(2, hooks_that_are_left) == [0, 0]
