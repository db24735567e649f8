"""A fit in which one bit of one number is flipped; see ``flip_trials``."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from models import Regressor, loader, silent_trainer
from torch import Tensor
from torch.distributed.tensor import DTensor

from phalanx.callbacks import Callback, ModelCheckpoint
from phalanx.framework.core.errors import CorruptionError

STEPS, RANKS = 8, 2


def flip(tensor: Tensor, chosen: random.Random) -> None:
    """Flip one bit of one element of this rank's part of a tensor."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()).view(-1)
    if local.numel():
        bits = local.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[local.element_size()])
        bits[chosen.randrange(len(bits))] ^= 1 << chosen.randrange(8 * local.element_size() - 1)


class Flipped(Regressor):
    """Flips one bit in one of its steps."""

    def __init__(self, place: str, seed: int, rank: int) -> None:
        super().__init__(dropout=0.1)
        self.place, self.rank = place, rank
        self.chosen = random.Random(seed)
        self.at = self.chosen.randrange(1, STEPS)
        self.run_number = self.chosen.randrange(2)
        self.runs = 0
        self.flipped = False

    def is_now(self) -> bool:
        """Whether this is the step, the rank and the moment; true once."""
        trainer = self.trainer
        assert trainer is not None
        now = trainer.global_step == self.at and trainer.global_rank == self.rank and not self.flipped
        self.flipped = self.flipped or now
        return now

    def weight(self) -> Tensor:
        trainer = self.trainer
        assert trainer is not None
        held: list[Tensor] = [
            each
            for group in trainer.optimizers[0].param_groups
            for each in group["params"]
            if (each.to_local() if isinstance(each, DTensor) else each).numel()
        ]
        return held[self.chosen.randrange(len(held))]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        trainer = self.trainer
        assert trainer is not None
        if trainer.global_step == self.at:
            self.runs += 1
        if self.place == "weights" and self.is_run() and self.is_now():
            flip(self.weight(), self.chosen)
        hidden = self.net[1](self.net[0](x))
        if self.place == "gradients" and self.is_run() and self.is_now():
            hidden.register_hook(self._flipped_gradient)
        output = self.net[3](self.net[2](hidden))
        return torch.nn.functional.mse_loss(output, y)

    def _flipped_gradient(self, gradient: Tensor) -> Tensor:
        changed = gradient.clone()
        flip(changed, self.chosen)
        return changed

    def on_after_backward(self) -> None:
        if self.place == "messages" and self.is_run() and self.is_now():
            gradient = self.weight().grad
            assert gradient is not None
            flip(gradient, self.chosen)

    def is_run(self) -> bool:
        """Whether the passes of the step are run for the first or second time, whichever was drawn."""
        return self.runs == self.run_number + 1


class Between(Callback):
    """Flips a bit of a weight between two steps, or in the update."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if module.place == "replica" and module.is_now():
            flip(module.weight(), module.chosen)

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        def flip_once(*given: Any) -> None:
            flip(module.weight(), module.chosen)
            handle.remove()

        if module.place == "update" and module.is_now():
            handle = optimizer.register_step_post_hook(flip_once)


@contextmanager
def wrong_reductions(module: Flipped) -> Iterator[None]:
    """Flip a bit in the result of a reduction that an engine calls in a backward pass."""
    names = ("all_reduce", "reduce", "reduce_scatter_tensor")
    real = {name: getattr(dist, name) for name in names}

    def wrong(name: str) -> Any:
        def call(*given: Any, **options: Any) -> Any:
            work = real[name](*given, **options)
            result = given[0] if given else options.get("tensor", options.get("output"))
            if isinstance(result, Tensor) and result.numel() > 4 and module.is_run() and module.is_now():
                if work is not None:
                    work.wait()
                flip(result, module.chosen)
            return work

        return call

    try:
        for name in names:
            setattr(dist, name, wrong(name))
        yield
    finally:
        for name, function in real.items():
            setattr(dist, name, function)


def trial(root: str, strategy: str, place: str, seed: int, steps: int = STEPS) -> dict[str, Any]:
    """Run one fit on this rank; return how it ended."""
    torch.manual_seed(0)
    rank = random.Random(-seed).randrange(RANKS)
    inside = (strategy, place) == ("zero2", "messages")
    module = Flipped("reductions" if inside else place, seed, rank)
    saves = ModelCheckpoint(every_n_train_steps=1, save_top_k=-1, save_last=False)
    arguments: dict[str, Any] = {"logger": "csv", "enable_checkpointing": True, "callbacks": [Between(), saves]}
    trainer = silent_trainer(
        **(arguments if steps == STEPS else {}), strategy=strategy, devices=RANKS, max_steps=steps, verify_every=1,
        default_root_dir=root,
    )  # fmt: skip
    error = ""
    with wrong_reductions(module) if inside else nullcontext():
        try:
            trainer.fit(module, loader(count=64, batch_size=4))
        except CorruptionError as met:
            error = str(met)
    return {"error": error, "rank": rank, "flipped": module.flipped, "at": module.at, "run": str(trainer.run_dir)}
