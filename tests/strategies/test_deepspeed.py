"""The DeepSpeed strategies train what plain torch trains, and leave the module as it was."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from models import SILENT, silent_trainer
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from phalanx import AccumulationSchedule, Fabric, Trainer, TrainModule
from phalanx.framework.errors import ConfigurationError
from phalanx.strategies import DeepSpeedStrategy

STEPS, GLOBAL_BATCH, CLIP = 8, 6, 0.3
WINDOWS = (1, 2, 3, 1)
PLACES: dict[str, dict[str, Any]] = {
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3},
    "zero1-offload": {"stage": 1, "offload_optimizer": "cpu"},
    "zero2-offload": {"stage": 2, "offload_optimizer": "cpu"},
    "zero3-offload": {"stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
}


class Mixture(nn.Module):
    """Odd sizes, a tied weight, a frozen layer, parameters that nobody or nobody always uses, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.frozen = nn.Linear(7, 7)
        self.norm = nn.LayerNorm(7)
        self.widen, self.narrow = nn.Linear(7, 13), nn.Linear(13, 7)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.sometimes = nn.Linear(7, 7)
        self.never = nn.Parameter(torch.ones(3))
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.frozen.requires_grad_(False)
        self.register_buffer("shift", torch.linspace(-0.1, 0.1, 7))

    def forward(self, rows: Tensor) -> Tensor:
        """Return logits [batch, length, 11] of tokens [batch, length]; a first token of 0 uses all parameters."""
        x = self.embed(rows) + self.shift
        x = x + self.frozen(self.norm(x)) * self.scale
        x = x + self.narrow(torch.tanh(self.widen(x)))
        if int(rows[0, 0]) == 0:
            x = x + self.sometimes(x)
        logits: Tensor = self.head(x)
        return logits


def mixture() -> Mixture:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return Mixture()


def loss_of(net: nn.Module, rows: Tensor) -> Tensor:
    logits = net(rows)[:, :-1].flatten(0, 1).float()
    return nn.functional.cross_entropy(logits, rows[:, 1:].flatten())


def rows_of(count: int, uses_all: bool = True) -> Tensor:
    rows = torch.randint(0, 11, (count, 5), generator=torch.Generator().manual_seed(2))
    rows[:, 0] = 0
    if not uses_all:
        # Micro-batches of two, of which some use all parameters, on both of two ranks.
        rows[:, 0] = (torch.arange(count) // GLOBAL_BATCH) % 3
    return rows


def optimizer_of(net: nn.Module, kind: str = "adamw") -> torch.optim.Optimizer:
    """Return an optimizer with two groups; what must not be decayed, as some never get a gradient, is in the second."""
    names = dict(net.named_parameters())
    plain = [one for name, one in names.items() if one.dim() < 2 or "sometimes" in name]
    taken = {id(one) for one in plain}
    others = [one for one in names.values() if id(one) not in taken]
    groups: list[dict[str, Any]] = [{"params": others, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    if kind == "adam":
        return torch.optim.Adam(groups, lr=2e-2, eps=1e-4, betas=(0.8, 0.99))
    return torch.optim.AdamW(groups, lr=2e-2, eps=1e-4, amsgrad=kind == "amsgrad")


def scheduler_of(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


class Module(TrainModule):
    """Trains a ``Mixture``; notes losses, norms and a whole gradient."""

    def __init__(self, kind: str = "adamw", gradient_of: str | None = None) -> None:
        super().__init__()
        self.net = mixture()
        self.kind, self.gradient_of = kind, gradient_of
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.gradients: list[Tensor | None] = []
        self.predicted: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = loss_of(self.net, batch[0])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", loss_of(self.net, batch[0]), on_epoch=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0]).argmax(-1)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.gradient_of is not None:
            parameter = dict(self.net.named_parameters())[self.gradient_of]
            gradient = self.trainer.fabric.full_gradient(parameter)
            self.gradients.append(None if gradient is None else gradient.clone())

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        if gradient_clip_val is not None:
            norm = self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            self.norms.append(float(norm))

    def configure_optimizers(self) -> Any:
        optimizer = optimizer_of(self.net, self.kind)
        return [optimizer], [{"scheduler": scheduler_of(optimizer), "interval": "step"}]


def by_hand(
    net: nn.Module,
    rows: Tensor,
    kind: str = "adamw",
    windows: Sequence[int] = WINDOWS,
    clip: float | None = CLIP,
    steps: int = STEPS,
) -> tuple[list[float], list[float]]:
    """Train in one process; a parameter without gradient has one of zero. Return losses and norms."""
    optimizer = optimizer_of(net, kind)
    scheduler = scheduler_of(optimizer)
    losses, norms, position = [], [], 0
    for step in range(steps):
        optimizer.zero_grad()
        window = windows[step % len(windows)]
        total = 0.0
        for _ in range(window):
            loss = loss_of(net, rows[position : position + GLOBAL_BATCH])
            (loss / window).backward()
            total += loss.item() / window
            position += GLOBAL_BATCH
        for parameter in net.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), clip or float("inf"))))
        optimizer.step()
        scheduler.step()
        losses.append(total)
    return losses, norms


def trainer_of(ranks: int, strategy: Any, **arguments: Any) -> Trainer:
    settings: dict[str, Any] = {
        "devices": ranks,
        "max_steps": STEPS,
        "accumulate_grad_batches": AccumulationSchedule.cycle(WINDOWS),
        "gradient_clip_val": CLIP,
    }
    return silent_trainer(strategy=strategy, **{**settings, **arguments})


def loader_of(ranks: int, uses_all: bool = True, count: int = 20 * GLOBAL_BATCH) -> DataLoader[Any]:
    return DataLoader(TensorDataset(rows_of(count, uses_all)), batch_size=GLOBAL_BATCH // ranks)


def whole(module: nn.Module) -> dict[str, Tensor]:
    """Return weights and buffers, none of which may be on the meta device."""
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def attributes(module: nn.Module) -> list[Any]:
    """Return what a module and its parameters are and carry, as far as others could add to it."""
    parts = [
        (type(part), sorted(part.__dict__), type(part._parameters), len(part._forward_pre_hooks), len(part._forward_hooks))
        for part in module.modules()
    ]
    parameters = [
        (name, type(one), sorted(one.__dict__), tuple(one.shape), one.dtype, one.requires_grad, one.grad is None)
        for name, one in module.named_parameters()
    ]
    return [*parts, *parameters]


def trained(ranks: int, place: dict[str, Any], kind: str, uses_all: bool, nvme: str | None) -> Any:
    module = Module(kind)
    before = attributes(module.net)
    given = {**place, **({"nvme_path": nvme} if nvme else {})}
    trainer_of(ranks, DeepSpeedStrategy(**given)).fit(module, loader_of(ranks, uses_all))
    assert attributes(module.net) == before
    assert module.net.head.weight is module.net.embed.weight
    weights = None if module.net.never.is_meta else whole(module.net)
    return module.losses, module.norms, weights


def check(results: list[Any], expected: Mixture, losses: list[float], norms: list[float], ranks_whole: int) -> None:
    rows = torch.tensor([result[0] for result in results], dtype=torch.float64).mean(0)
    sizes = [WINDOWS[step % len(WINDOWS)] for step in range(STEPS)]
    assert [part.mean().item() for part in rows.split(sizes)] == pytest.approx(losses, rel=1e-5)
    for _, found, _ in results:
        assert found == pytest.approx(norms, rel=1e-5)
    held = [weights for _, _, weights in results if weights is not None]
    assert len(held) == ranks_whole
    for weights in held:
        torch.testing.assert_close(weights, whole(expected), rtol=1e-4, atol=1e-5)


def compare(ranks: int, place: dict[str, Any], kind: str = "adamw", uses_all: bool = True, nvme: Any = None) -> None:
    results = (
        [trained(1, place, kind, uses_all, nvme)]
        if ranks == 1
        else run_on_ranks(ranks, trained, ranks, place, kind, uses_all, nvme)
    )
    net = mixture()
    losses, norms = by_hand(net, rows_of(20 * GLOBAL_BATCH, uses_all), kind)
    check(results, net, losses, norms, 1 if place["stage"] == 3 else ranks)


@pytest.mark.parametrize("place", PLACES)
def test_losses_norms_and_weights_equal_plain_torch(place: str) -> None:
    compare(2, PLACES[place])


def test_a_disk_holds_what_memory_would(tmp_path: Path) -> None:
    place = {"stage": 3, "offload_optimizer": "nvme", "offload_parameters": "nvme"}
    compare(2, place, nvme=str(tmp_path / "swap"))
    assert list((tmp_path / "swap").iterdir()) == []


@pytest.mark.parametrize("place", ["zero1", "zero2", "zero3", "zero2-offload"])
def test_three_ranks(place: str) -> None:
    compare(3, PLACES[place])


@pytest.mark.parametrize("place", PLACES)
def test_parameters_that_some_micro_batches_leave_unused_have_a_gradient_of_zero(place: str) -> None:
    compare(2, PLACES[place], uses_all=False)


@pytest.mark.parametrize("place", ["zero1", "zero2", "zero3", "zero2-offload"])
@pytest.mark.parametrize("kind", ["sgd", "adam", "amsgrad"])
def test_other_optimizers(place: str, kind: str) -> None:
    compare(2, PLACES[place], kind)
