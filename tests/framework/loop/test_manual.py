"""Manual optimization: the user's step calls backward and the optimizers, on any number of ranks, as in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import plain_steps, silent_trainer, weights_of
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx import TrainModule
from phalanx.framework.core.errors import ConfigurationError
from phalanx.strategies.fsdp.strategy import FSDPStrategy

BATCH, BATCHES = 8, 6


def data(batch_size: int) -> DataLoader[Any]:
    """Return noise [batch, 3] and real samples [batch, 2]."""
    generator = torch.Generator().manual_seed(1)
    count = BATCH * BATCHES
    noise, real = torch.randn(count, 3, generator=generator), torch.randn(count, 2, generator=generator) + 1
    return DataLoader(TensorDataset(noise, real), batch_size=batch_size)


class Networks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(4)
            self.generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
            self.critic = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    def generator_loss(self, noise: Tensor) -> Tensor:
        return nn.functional.softplus(-self.critic(self.generator(noise))).mean()

    def critic_loss(self, noise: Tensor, real: Tensor) -> Tensor:
        fake = self.generator(noise).detach()
        return (nn.functional.softplus(self.critic(fake)) + nn.functional.softplus(-self.critic(real))).mean()


class Gan(TrainModule):
    """Steps the generator with each batch and the critic with every second one, on the gradients of both."""

    automatic_optimization = False

    def __init__(self, critic_every: int = 1, clip: float | None = None, toggles: bool = True) -> None:
        super().__init__()
        self.nets = Networks()
        self.critic_every = critic_every
        self.clip = clip
        self.toggles = toggles
        self.steps: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        noise, real = batch
        generator, critic = self.optimizers()
        if self.toggles:
            self.toggle_optimizer(generator)
            assert not any(parameter.requires_grad for parameter in self.nets.critic.parameters())
        generator.zero_grad()
        self.manual_backward(self.nets.generator_loss(noise))
        if self.clip is not None:
            self.clip_gradients(generator, gradient_clip_val=self.clip, gradient_clip_algorithm="norm")
        generator.step()
        if self.toggles:
            self.untoggle_optimizer(generator)
        with critic.toggle_model():
            if not self.toggles or batch_idx % self.critic_every == 0:
                critic.zero_grad()
            self.manual_backward(self.nets.critic_loss(noise, real) / self.critic_every)
            if (batch_idx + 1) % self.critic_every == 0:
                critic.step()
        self.steps.append(self.global_step)

    def on_train_epoch_end(self) -> None:
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self) -> Any:
        optimizers = [
            torch.optim.Adam(self.nets.generator.parameters(), lr=0.02),
            torch.optim.SGD(self.nets.critic.parameters(), lr=0.1),
        ]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in optimizers]


def by_hand(epochs: int, critic_every: int = 1, clip: float | None = None) -> Tensor:
    nets = Networks()
    generator = torch.optim.Adam(nets.generator.parameters(), lr=0.02)
    critic = torch.optim.SGD(nets.critic.parameters(), lr=0.1)
    for epoch in range(epochs):
        generator.param_groups[0]["lr"], critic.param_groups[0]["lr"] = 0.02 * 0.5**epoch, 0.1 * 0.5**epoch
        gathered: list[Tensor] = []
        for index, (noise, real) in enumerate(data(BATCH)):
            gradients = torch.autograd.grad(nets.generator_loss(noise), list(nets.generator.parameters()))
            for parameter, gradient in zip(nets.generator.parameters(), gradients, strict=True):
                parameter.grad = gradient
            if clip is not None:
                nn.utils.clip_grad_norm_(nets.generator.parameters(), clip)
            generator.step()
            loss = nets.critic_loss(noise, real) / critic_every
            gradients = torch.autograd.grad(loss, list(nets.critic.parameters()))
            gathered = list(gradients) if not gathered else [a + b for a, b in zip(gathered, gradients, strict=True)]
            if (index + 1) % critic_every == 0:
                for parameter, gradient in zip(nets.critic.parameters(), gathered, strict=True):
                    parameter.grad = gradient
                critic.step()
                gathered = []
    return weights_of(nets)


def trained(ranks: int, arguments: dict[str, Any], precision: str = "32-true") -> tuple[Tensor, int, list[int]]:
    module = Gan(**arguments)
    trainer = silent_trainer(devices=ranks, max_epochs=2, precision=precision)
    if trainer.fabric.scaler is not None:
        trainer.fabric.scaler.scale = 128.0
    trainer.fit(module, data(BATCH // ranks))
    return weights_of(module.nets), trainer.global_step, module.steps


@pytest.mark.parametrize(
    ("arguments", "ranks"), [({"critic_every": 2}, 1), ({}, 2), ({"critic_every": 2}, 2), ({"clip": 0.01}, 2)], ids=str
)
def test_a_gan_trains_as_in_plain_torch(arguments: dict[str, Any], ranks: int) -> None:
    results = run_on_ranks(ranks, trained, ranks, arguments)
    for weights, steps, seen in results:
        torch.testing.assert_close(weights, by_hand(2, **arguments), rtol=1e-5, atol=1e-6)
        # A batch in which optimizers stepped is one step, however many they were.
        assert steps == 2 * BATCHES
        assert seen == list(range(2 * BATCHES))


def test_a_gan_in_half_precision() -> None:
    for weights, steps, _ in run_on_ranks(2, trained, 2, {}, "16-mixed"):
        torch.testing.assert_close(weights, by_hand(2), rtol=2e-2, atol=2e-2)
        assert steps == 2 * BATCHES


class Accumulating(TrainModule):
    """Steps its one optimizer with every third batch."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.nets = Networks()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        loss = self.nets.generator_loss(batch[0])
        self.manual_backward(loss / 3)
        if (batch_idx + 1) % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.nets.generator.parameters(), lr=0.1)


def test_toggling_is_undone_where_the_step_raises() -> None:
    class Failing(Gan):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            generator, _ = self.optimizers()
            with generator.toggle_model():
                raise RuntimeError("in the step")

    module = Failing()
    with pytest.raises(RuntimeError, match="in the step"):
        silent_trainer(devices=1, max_epochs=1).fit(module, data(BATCH))
    assert all(parameter.requires_grad for parameter in module.parameters())


# ---- strategies whose backward passes average gradients ------------------------------------------------------------


def sharded_gan(arguments: dict[str, Any], least: int) -> tuple[list[Tensor], int]:
    module = Gan(**arguments)
    trainer = silent_trainer(devices=2, max_epochs=2, strategy=FSDPStrategy(units=least))
    trainer.fit(module, data(BATCH // 2))
    return [parameter.detach() for parameter in module.nets.parameters()], trainer.global_step


@pytest.mark.parametrize(
    ("arguments", "least"), [({"toggles": False}, 1), ({"critic_every": 2, "clip": 0.01}, 10**9)], ids=str
)
def test_a_sharded_gan_trains_as_in_plain_torch(arguments: dict[str, Any], least: int) -> None:
    expected = {name: value for name, value in arguments.items() if name != "toggles"}
    (weights, steps), _ = run_on_ranks(2, sharded_gan, arguments, least)
    torch.testing.assert_close(flat(weights), by_hand(2, **expected), rtol=1e-5, atol=1e-6)
    assert steps == 2 * BATCHES


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.double().flatten() for tensor in tensors])


class Twice(torch.optim.SGD):
    """Evaluates the loss before and after an update; each element is updated by itself."""

    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        super().step(closure)
        return closure()


class ByClosure(Accumulating):
    """Takes the loss from a closure."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.nets.generator_loss(batch[0])
            self.manual_backward(loss)
            return loss

        return optimizer.step(closure)

    def configure_optimizers(self) -> Any:
        return Twice(self.nets.generator.parameters(), lr=0.1)


def accumulated(strategy: str, kind: type[Accumulating]) -> tuple[list[Tensor], int]:
    module = kind()
    trainer = silent_trainer(devices=2, max_epochs=1, strategy=strategy)
    trainer.fit(module, data(BATCH // 2))
    return [parameter.detach() for parameter in module.nets.generator.parameters()], trainer.global_step


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1", "zero3"])
def test_accumulation_by_hand(strategy: str) -> None:
    nets = Networks()
    optimizer = torch.optim.SGD(nets.generator.parameters(), lr=0.1)
    plain_steps(optimizer, lambda batch: nets.generator_loss(batch[0]), data(3 * BATCH))
    (weights, steps), _ = run_on_ranks(2, accumulated, strategy, Accumulating)
    assert steps == BATCHES // 3
    torch.testing.assert_close(flat(weights), weights_of(nets.generator), rtol=1e-5, atol=1e-6)


def closure_of_many() -> None:
    with pytest.raises(ConfigurationError, match="Twice"):
        accumulated("fsdp", ByClosure)


def test_an_optimizer_that_moves_weights_between_losses_is_refused() -> None:
    run_on_ranks(2, closure_of_many)
