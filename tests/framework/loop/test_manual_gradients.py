"""Manual optimization: gradients that the user's code reads are averages, and every update counts, on any rank."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from messages import refuses, says
from models import silent_trainer, weights_of
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx import TrainModule
from phalanx.callbacks import ModelCheckpoint
from phalanx.framework.core.errors import ConfigurationError, LoopError

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
        loss: Tensor = (self.net(batch[0]) - batch[1]).square().mean()
        return loss

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
    hooks = [parameter._post_accumulate_grad_hooks for parameter in module.parameters()]
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
    for found, seen, steps in run_on_ranks(2, trained, kind, 2):
        torch.testing.assert_close(found, weights, rtol=1e-6, atol=1e-6)
        assert seen == pytest.approx(norms, rel=1e-5)
        assert steps == 2 * ROWS // STEP


def test_updates_in_hooks_count_for_limits_and_checkpoints(tmp_path: Any) -> None:
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    trainer = silent_trainer(max_steps=4, max_epochs=9, callbacks=[saving], enable_checkpointing=True)
    trainer.fit(Clipping("late"), data(STEP))
    assert trainer.global_step == 4
    assert {path.name for path in tmp_path.glob("*.ckpt")} == {"step=2.ckpt", "step=4.ckpt"}


class Adversary(TrainModule):
    """Two models, of which one is trained in every second batch; ``plain`` leaves ``manual_backward`` out."""

    automatic_optimization = False

    def __init__(self, plain: bool = False) -> None:
        super().__init__()
        self.net, self.critic, self.plain = net(), nn.Linear(1, 1), plain
        nn.init.constant_(self.critic.weight, 0.5)
        self.norm, self.tracked = nn.BatchNorm1d(4, affine=False), 0
        self.batches, self.seen = 0, set[float]()

    def losses(self, batch: Any) -> tuple[Tensor, Tensor]:
        made = self.net(batch[0])
        return (made - batch[1]).square().mean(), (self.critic(made.detach()) - batch[1]).abs().mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        net_optimizer, critic_optimizer = self.optimizers()
        loss, critic_loss = self.losses(batch)
        if self.trainer.world_size > 1:
            self.seen |= set(self.all_gather(batch[0][:, 0]).flatten().tolist())
        self.log("loss", loss, on_epoch=True)
        self.norm(batch[0].repeat(2, 1))
        self.batches += 1
        backward = Tensor.backward if self.plain else self.manual_backward
        if self.batches % 2:
            backward(critic_loss)
            critic_optimizer.step()
            critic_optimizer.zero_grad()
        backward(loss)
        net_optimizer.step()
        net_optimizer.zero_grad()

    def on_train_epoch_end(self) -> None:
        assert self.norm.num_batches_tracked is not None
        self.tracked = int(self.norm.num_batches_tracked)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.net.parameters(), lr=0.05), torch.optim.SGD(self.critic.parameters(), lr=0.1)]


def uneven(num_ranks: int, rows: int, strategy: str, plain: bool = False) -> tuple[Tensor, int, set[float], float]:
    trainer = silent_trainer(devices=num_ranks, strategy=strategy, max_epochs=2)
    module = Adversary(plain)
    trainer.fit(module, data(2, rows))
    own = -(-(rows - 2 * trainer.global_rank) // (2 * num_ranks)) if rows % (2 * num_ranks) == 1 else None
    assert own is None or module.tracked == 2 * own
    return weights_of(module), trainer.global_step, module.seen, float(trainer.callback_metrics["loss"])


def uneven_by_hand(num_ranks: int, rows: int) -> tuple[Tensor, int, set[float], float]:
    """Train with the mean over the batches of all ranks that have one."""
    data_set: Any = data(2, rows).dataset
    x, y = data_set.tensors
    module = Adversary()
    optimizers, steps = module.configure_optimizers(), 0
    for _ in range(2):
        logged = []
        for start in range(0, rows, 2 * num_ranks):
            group = torch.arange(start, min(start + 2 * num_ranks, rows))
            parts = [part for part in group.tensor_split(num_ranks) if len(part)]
            losses = [module.losses((x[part], y[part])) for part in parts]
            logged += [(loss.item(), len(part)) for (loss, _), part in zip(losses, parts, strict=True)]
            for number in (1, 0) if steps % 2 == 0 else (0,):
                torch.stack([each[number] for each in losses]).mean().backward(retain_graph=True)
                optimizers[number].step()
                optimizers[number].zero_grad()
            steps += 1
    mean = sum(loss * count for loss, count in logged) / sum(count for _, count in logged)
    return weights_of(module), steps, set(x[:, 0].tolist()), mean


# Without a last batch: one rank of two or three, or two of three; in the last case of three, without any batch.
@pytest.mark.parametrize(
    ("num_ranks", "rows", "strategy"), [(2, 9, "ddp"), (2, 5, "fsdp"), (3, 13, "fsdp"), (3, 14, "ddp"), (3, 2, "ddp")]
)
def test_batches_that_not_every_rank_has(num_ranks: int, rows: int, strategy: str) -> None:
    weights, steps, seen, loss = uneven_by_hand(num_ranks, rows)
    found = run_on_ranks(num_ranks, uneven, num_ranks, rows, strategy)
    torch.testing.assert_close(found[0][0], weights, rtol=1e-5, atol=1e-6)
    for each in found:
        assert each[1:3] == (found[0][1], seen)
        assert each[3] == pytest.approx(loss, rel=1e-5)
    assert found[0][1] == steps


class Direct(Clipping):
    """Calls ``backward`` of the loss."""

    def update(self, batch: Any, optimizer: Any) -> None:
        self.loss(batch).backward()
        optimizer.step()


def unweighed() -> None:
    with refuses(LoopError, "manual_backward"):
        silent_trainer(devices=2, strategy="fsdp", max_epochs=2).fit(Direct("usual"), data(2, 9))


def test_repeated_batches_need_manual_backward() -> None:
    run_on_ranks(2, unweighed)


class Starting(TrainModule):
    """Drops gradients, or trains, where a batch starts; or steps by a closure; ``kind`` says which."""

    automatic_optimization = False

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.kind, self.losses = net(), kind, list[float]()

    def loss(self, batch: Any) -> Tensor:
        loss: Tensor = (self.net(batch[0]) - batch[1]).square().mean()
        return loss

    def update(self, batch: Any) -> None:
        self.manual_backward(self.loss(batch))
        self.optimizers().step()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.optimizers().zero_grad()
        if self.kind == "trains":
            self.update(batch)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if self.kind == "drops":
            self.update(batch)
        elif self.kind == "closure":
            self.losses.append(float(self.optimizers().step(lambda: self.closure(batch))))

    def closure(self, batch: Any) -> Tensor:
        self.optimizers().zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        return loss.detach()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def started(kind: str) -> tuple[Tensor, list[float]]:
    module = Starting(kind)
    silent_trainer(devices=2, strategy="ddp", max_epochs=2).fit(module, data(2, 9))
    return weights_of(module), module.losses


@pytest.mark.parametrize("kind", ["drops", "trains", "closure"])
def test_hooks_and_closures_of_batches_that_not_every_rank_has(kind: str) -> None:
    module, losses = Starting(kind), list[float]()
    optimizer, data_set = module.configure_optimizers(), cast("Any", data(2, 9).dataset)
    x, y = data_set.tensors
    for _ in range(2):
        for parts in ((slice(0, 2), slice(2, 4)), (slice(4, 6), slice(6, 8)), (slice(8, 9),)):
            optimizer.zero_grad()
            loss = torch.stack([module.loss((x[part], y[part])) for part in parts]).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    for weights, found in run_on_ranks(2, started, kind):
        torch.testing.assert_close(weights, weights_of(module), rtol=1e-5, atol=1e-6)
        assert found == (pytest.approx(losses, rel=1e-5) if kind == "closure" else [])


def direct() -> None:
    with refuses(ConfigurationError, "manual_backward"):
        uneven(2, 8, "fsdp", plain=True)


def test_sharded_gradients_of_loss_backward_that_are_not_averaged() -> None:
    run_on_ranks(2, direct)


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
