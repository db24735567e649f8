"""A model that is trained by torchao's optimizers with 8-bit, 4-bit and fp8 state, and its data."""

from __future__ import annotations

from typing import Any

import torch
from models import silent_trainer, weights_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch_strategies import strategy_named

from phalanx import TrainModule
from phalanx.precisions.float8 import quiet_import

KINDS = ("AdamW8bit", "AdamW4bit", "AdamWFp8")
STEPS, ROWS = 4, 8
# One element of 64 x 128 or 128 x 64 in two shards of 4096, which torchao quantizes, and small vectors, which it does
# not. The third does not split into full blocks of elements: its state is quantized on one rank, and not on two.
WIDE = 4224


class QuantizedModel(TrainModule):
    """Three layers, trained by one of torchao's optimizers, with a schedule that changes the rate in place."""

    def __init__(self, kind: str, out: int = 2) -> None:
        super().__init__()
        self.kind = kind
        self.losses: list[float] = []
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.net = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 1))
            self.wide = nn.Linear(WIDE, out)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss, and note it."""
        x, y = batch
        repeated = x.repeat(1, WIDE // 64)
        loss = nn.functional.mse_loss(self.net(x) + 0.01 * self.wide(repeated).sum(1, keepdim=True), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        """Return the optimizer and its schedule."""
        optimizer = quantized(self.kind, self.parameters())
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]


def quantized(kind: str, parameters: Any) -> Any:
    """Return torchao's optimizer of this name."""
    with quiet_import():
        import torchao.optim
    return getattr(torchao.optim, kind)(parameters, lr=1e-2)


def data(batch_size: int) -> DataLoader[Any]:
    """Return ``STEPS * ROWS`` inputs of 64 features with a smooth target."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(STEPS * ROWS, 64, generator=generator)
    return DataLoader(TensorDataset(x, torch.sin(x.sum(1, keepdim=True))), batch_size=batch_size)


def trained(
    strategy: str, ranks: int, kind: str, folder: str, stop: int, ckpt: str | None, window: int = 1
) -> tuple[list[float], Tensor | None]:
    """Train until ``stop`` and save ``<folder>/<stop>.ckpt``; return the losses, and on rank 0 the weights."""
    module = QuantizedModel(kind)
    trainer = silent_trainer(
        devices=ranks,
        strategy=strategy_named(strategy),
        max_steps=stop,
        accumulate_grad_batches=window,
        default_root_dir=folder,
    )
    with torch.compiler.set_stance("force_eager"):
        trainer.fit(module, data(ROWS // ranks // window), ckpt_path=ckpt)
        trainer.save_checkpoint(f"{folder}/{stop}.ckpt")
    return module.losses, weights_of(module) if trainer.is_global_zero else None
