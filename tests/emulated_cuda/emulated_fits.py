"""A small model, its data and its fits, for tests that run on CUDA devices, emulated or real."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from models import silent_trainer
from torch import Tensor, nn

from phalanx import TrainModule, seed_everything
from phalanx.callbacks import ModelCheckpoint
from phalanx.checkpoint import open_checkpoint

BATCH_SIZE = 4


class Block(nn.Module):
    """A residual block of two layers."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, 16] for [batch, 16]."""
        out: Tensor = x + self.layers(x)
        return out


class Classifier(TrainModule):
    """Three blocks and a head. ``at_step`` is called with the module and the index of the batch, before it is used."""

    def __init__(
        self,
        dropout: float = 0.0,
        logs: bool = False,
        optimizer: str = "adamw",
        at_step: Callable[[Classifier, int], None] = lambda module, batch_idx: None,
    ) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(3)
            self.blocks = nn.Sequential(*(Block(dropout) for _ in range(3)))
            self.head = nn.Linear(16, 2)
        self.logs = logs
        self.optimizer_name = optimizer
        self.at_step = at_step
        self.kept: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss, which is kept on its device: reading it would make the host wait."""
        self.at_step(self, batch_idx)
        loss = nn.functional.cross_entropy(self.head(self.blocks(batch[0])), batch[1])
        self.kept.append(loss.detach().clone())
        if self.logs:
            self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        """Return AdamW in its default or its fused form, or SGD with momentum."""
        if self.optimizer_name == "sgd":
            return torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=self.optimizer_name == "fused" or None)

    def losses(self) -> list[float]:
        """Return the loss of each micro-batch so far."""
        return [float(loss) for loss in self.kept]


def batches(count: int, pins: bool = False) -> list[tuple[Tensor, Tensor]]:
    """Return micro-batches of inputs [4, 16] and labels [4]; ranks take turns."""
    generator = torch.Generator().manual_seed(1)
    made = [
        (torch.randn(BATCH_SIZE, 16, generator=generator), torch.randint(0, 2, (BATCH_SIZE,), generator=generator))
        for _ in range(count)
    ]
    return [(x.pin_memory(), y.pin_memory()) for x, y in made] if pins else made


def emulated_trainer(devices: Any, **arguments: Any) -> Any:
    """Return a silent Trainer on CUDA devices."""
    return silent_trainer(**{"accelerator": "cuda", "devices": devices, "stall_timeout": False, **arguments})


def rank_of() -> int:
    """Return the rank of this process, 0 where it is alone."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def whole_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return the weights on the host; empty on ranks that a strategy left without them."""
    found = module.state_dict()
    return {} if any(each.is_meta for each in found.values()) else {name: each.cpu() for name, each in found.items()}


class SaveAt(ModelCheckpoint):
    """Saves each third step, on a thread."""

    def __init__(self, folder: str, asynchronous: bool = True) -> None:
        super().__init__(
            dirpath=folder, filename="{step}", every_n_train_steps=3, save_top_k=-1, asynchronous=asynchronous
        )


def trained(
    strategy: str,
    devices: Any,
    folder: str,
    steps: int,
    ckpt_path: str | None,
    optimizer: str = "adamw",
    **arguments: Any,
) -> dict[str, Tensor]:
    """Train with dropout, from a checkpoint if one is given, and save each third step; return the weights."""
    seed_everything(5)
    module = Classifier(dropout=0.2, optimizer=optimizer)
    trainer = emulated_trainer(
        devices,
        strategy=strategy,
        max_steps=steps,
        callbacks=[SaveAt(folder)],
        default_root_dir=folder,
        enable_checkpointing=None,
        **arguments,
    )
    trainer.fit(module, batches(20), ckpt_path=ckpt_path)
    return whole_weights(module)


def whole_and_resumed(
    strategy: str, devices: int, root: str, arguments: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights of a run of 6 steps, and of one that was resumed after 3."""
    whole = trained(strategy, devices, f"{root}/whole", 6, None, **arguments)
    trained(strategy, devices, f"{root}/first", 3, None, **arguments)
    return whole, trained(strategy, devices, f"{root}/second", 6, f"{root}/first/step=3.ckpt", **arguments)


def assert_same_checkpoints(one: Path, other: Path) -> None:
    """Compare all that two checkpoints hold, bit for bit."""
    late, early = open_checkpoint(one), open_checkpoint(other)
    assert late.sections == early.sections
    for section in late.sections:
        torch.testing.assert_close(late.read_section(section), early.read_section(section), rtol=0, atol=0)


class Manual(Classifier):
    """The same model, with a loop of its own."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Make an optimizer step."""
        self.at_step(self, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(nn.functional.cross_entropy(self.head(self.blocks(batch[0])), batch[1]))
        optimizer.step()
