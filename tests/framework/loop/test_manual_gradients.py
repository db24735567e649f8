"""Manual optimization: gradients that the user's code reads are averages, and every update counts, on any rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from messages import refuses, says
from models import silent_trainer, weights_of
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx import TrainModule
from phalanx.callbacks import ModelCheckpoint
from phalanx.framework.core.errors import DataError

ROWS, STEP = 24, 8


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


def data(batch_size: int, rows: int = ROWS) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(ROWS, 4, generator=generator), 3 * torch.randn(ROWS, 1, generator=generator)
    return DataLoader(TensorDataset(x[:rows], y[:rows]), batch_size=batch_size)


class Sharpness(torch.optim.SGD):
    """Steps twice for an update, by methods of its own, as sharpness-aware minimization does."""

    @torch.no_grad()
    def climb(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(parameter.grad, alpha=0.05)

    @torch.no_grad()
    def descend(self, gradients: list[Tensor]) -> None:
        for parameter, gradient in zip(self.param_groups[0]["params"], gradients, strict=True):
            parameter.sub_(gradient, alpha=0.05)
        self.step()


class Clipping(TrainModule):
    """Clips with torch's own function, between two backward passes and after them."""

    automatic_optimization = False

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.kind, self.norms = net(), kind, list[float]()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if self.kind != "late":
            self.update(batch, self.optimizers())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.kind == "late":
            self.update(batch, self.optimizers())

    def backward_of(self, loss: Tensor) -> None:
        if self._run is not None and self.kind != "plain":
            self.manual_backward(loss)
        else:
            loss.backward()

    def loss(self, batch: Any) -> Tensor:
        return (self.net(batch[0]) - batch[1]).square().mean()

    def update(self, batch: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        self.backward_of(self.loss(batch))
        if self.kind == "sharpness":
            first = [parameter.grad.clone() for parameter in self.parameters() if parameter.grad is not None]
            optimizer.climb()
            optimizer.zero_grad()
            self.backward_of(self.loss(batch))
            optimizer.descend(first)
            return
        self.norms.append(float(nn.utils.clip_grad_norm_(self.parameters(), 0.5)))
        self.backward_of(self.loss(batch) * 0.5)
        self.norms.append(float(nn.utils.clip_grad_norm_(self.parameters(), 0.7)))
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return (Sharpness if self.kind == "sharpness" else torch.optim.SGD)(self.parameters(), lr=0.1)


def trained(kind: str, ranks: int) -> tuple[Tensor, list[float], int]:
    module = Clipping(kind)
    trainer = silent_trainer(devices=ranks, strategy="ddp" if ranks > 1 else "single", max_epochs=2)
    trainer.fit(module, data(STEP // ranks))
    hooks = [parameter._post_accumulate_grad_hooks for parameter in module.parameters()]  # type: ignore[attr-defined]
    assert not any(hooks)
    return weights_of(module), module.norms, trainer.global_step


def by_hand(kind: str) -> tuple[Tensor, list[float]]:
    module = Clipping(kind)
    optimizer = module.configure_optimizers()
    for _ in range(2):
        for batch in data(STEP):
            module.update(batch, optimizer)
    return weights_of(module), module.norms


@pytest.mark.parametrize("kind", ["usual", "plain", "late", "sharpness"])
def test_gradients_between_backward_and_update_are_those_of_the_global_batch(kind: str) -> None:
    weights, norms = by_hand(kind)
    for found, seen, steps in [trained(kind, 1), *run_on_ranks(2, trained, kind, 2)]:
        torch.testing.assert_close(found, weights, rtol=1e-6, atol=1e-6)
        assert seen == pytest.approx(norms, rel=1e-5)
        assert steps == 2 * ROWS // STEP


def test_updates_in_hooks_count_for_limits_and_checkpoints(tmp_path: Any) -> None:
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    trainer = silent_trainer(max_steps=4, max_epochs=9, callbacks=[saving], enable_checkpointing=True)
    trainer.fit(Clipping("late"), data(STEP))
    assert trainer.global_step == 4
    assert {path.name for path in tmp_path.glob("*.ckpt")} == {"step=2.ckpt", "step=4.ckpt"}


def dropping(rows: int) -> str:
    notes: list[str] = []
    trainer = silent_trainer(devices=2, strategy="ddp", max_epochs=2)
    module = Clipping("usual")
    module.on_fit_start = lambda: setattr(module._run, "note", notes.append)
    trainer.fit(module, data(2, rows))
    return "\n".join(notes)


def test_batches_that_not_every_rank_has() -> None:
    says([each for each in run_on_ranks(2, dropping, 5) if each], "last batch")


def refusing() -> None:
    with refuses(DataError, "1 batch"):
        dropping(1)


def test_data_of_which_not_every_rank_has_a_batch() -> None:
    run_on_ranks(2, refusing)


class Forgetful(Clipping):
    """Forgets the backward pass, or the update."""

    def update(self, batch: Any, optimizer: Any) -> None:
        if self.kind == "steps":
            optimizer.step()


@pytest.mark.parametrize(("kind", "name"), [("steps", "manual_backward"), ("passes", "no optimizer step")])
def test_manual_optimization_without_a_gradient_or_an_update(
    kind: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    silent_trainer(max_epochs=2, verbose=True).fit(Forgetful(kind), data(STEP))
    (line,) = [line for line in "".join(capsys.readouterr()).splitlines() if name in line]
    says(line, name)
