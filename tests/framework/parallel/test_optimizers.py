"""What configure_optimizers may return, when schedulers step, and the hooks that take over a part of the update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Regressor, loader, network, regression_data, silent_trainer, weights_of
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from phalanx import TrainModule
from phalanx.strategies import FSDPStrategy

BATCHES = 6


class Trained(Regressor):
    """Takes its optimizers from a function of the module; notes the learning rate of each batch."""

    def __init__(self, make: Callable[[TrainModule], Any]) -> None:
        super().__init__()
        self.make = make
        self.rates: list[float] = []
        self.counts: list[tuple[int, int]] = []

    def configure_optimizers(self) -> Any:
        return self.make(self)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)

    def on_train_start(self) -> None:
        self.counts.append((len(self.trainer.optimizers), len(self.trainer.lr_schedulers)))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", float(1 + self.current_epoch))


def sgd(module: nn.Module, lr: float = 1.0) -> SGD:
    return SGD(module.parameters(), lr=lr)


def rates(make: Callable[[TrainModule], Any], epochs: int = 3, batches: int = 2, **arguments: Any) -> list[float]:
    module = Trained(make)
    trainer = silent_trainer(devices=1, max_epochs=epochs, nonfinite="ignore", **arguments)
    trainer.fit(module, loader(4 * batches), loader(4))
    return [round(rate, 6) for rate in module.rates]


def halving(optimizer: Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda count: 0.5**count)


@pytest.mark.parametrize(
    ("make", "counts"),
    [
        (sgd, (1, 0)),
        (lambda m: [sgd(m)], (1, 0)),
        (lambda m: (sgd(m),), (1, 0)),
        (lambda m: {"optimizer": sgd(m)}, (1, 0)),
        (lambda m: ([o := sgd(m)], [halving(o)]), (1, 1)),
        (lambda m: ([o := sgd(m)], [halving(o), {"scheduler": halving(o), "interval": "step"}]), (1, 2)),
        (lambda m: ([sgd(m)], []), (1, 0)),
        (lambda m: {"optimizer": (o := sgd(m)), "lr_scheduler": halving(o)}, (1, 1)),
        (lambda m: {"optimizer": (o := sgd(m)), "lr_scheduler": {"scheduler": halving(o), "name": "half"}}, (1, 1)),
        (lambda m: [{"optimizer": (o := sgd(m)), "lr_scheduler": {"scheduler": halving(o)}}], (1, 1)),
        (lambda m: {"optimizer": (o := sgd(m)), "lr_scheduler": ReduceLROnPlateau(o), "monitor": "val_loss"}, (1, 1)),
    ],
)
def test_every_form_of_configure_optimizers(make: Callable[[TrainModule], Any], counts: tuple[int, int]) -> None:
    module = Trained(make)
    silent_trainer(devices=1, max_steps=2, nonfinite="ignore").fit(module, loader(8), loader(4))
    assert module.counts == [counts]


def scheduled(schedule: Callable[[Optimizer], Any], **config: Any) -> Callable[[TrainModule], Any]:
    """Return a function that makes an optimizer and its schedule."""

    def make(module: TrainModule) -> Any:
        optimizer = sgd(module)
        return [optimizer], [{"scheduler": schedule(optimizer), **config}]

    return make


def plateau(optimizer: Optimizer) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=0)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, [1, 1, 0.5, 0.5, 0.25, 0.25]),
        ({"interval": "epoch", "frequency": 2}, [1, 1, 1, 1, 0.5, 0.5]),
        ({"interval": "step"}, [1, 0.5, 0.25, 0.125, 0.0625, 0.03125]),
        ({"interval": "step", "frequency": 3}, [1, 1, 1, 0.5, 0.5, 0.5]),
    ],
)
def test_a_scheduler_steps_by_its_interval_and_frequency(config: dict[str, Any], expected: list[float]) -> None:
    assert rates(scheduled(halving, **config)) == expected


def test_a_step_is_an_optimizer_step() -> None:
    # Windows of two of five batches: the last one of an epoch is short, and a step as well.
    found = rates(scheduled(halving, interval="step"), epochs=2, batches=5, accumulate_grad_batches=2)
    assert found == [1, 1, 0.5, 0.5, 0.25, 0.125, 0.125, 0.0625, 0.0625, 0.03125]


def test_reduce_on_plateau_follows_its_metric() -> None:
    # val_loss is 1, 2, 3: worse from the second epoch on.
    found = rates(scheduled(plateau, monitor="val_loss"), epochs=4)
    assert found == [1, 1, 1, 1, 0.5, 0.5, 0.25, 0.25]


def test_reduce_on_plateau_by_step_reads_what_the_step_logged() -> None:
    class Logging(Trained):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("figure", float(batch_idx))
            return super().training_step(batch, batch_idx)

    module = Logging(scheduled(plateau, monitor="figure", interval="step"))
    silent_trainer(devices=1, max_epochs=1, nonfinite="ignore").fit(module, loader(16))
    assert module.rates == [1, 1, 0.5, 0.25]


def test_a_monitor_that_is_not_strict_may_be_missing() -> None:
    assert rates(scheduled(plateau, monitor="missing", strict=False), epochs=1) == [1, 1]


# ---- taking over a part of the update -----------------------------------------------------------------------------


def by_hand(change: Callable[[int, nn.Module, Optimizer], None], steps: int = BATCHES) -> Tensor:
    """Train in plain torch; ``change`` is called with gradients in place, before each step."""
    x, y = regression_data(8 * steps).tensors
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    for step in range(steps):
        rows = slice(8 * step, 8 * step + 8)
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x[rows]), y[rows]).backward()
        change(step, net, optimizer)
        optimizer.step()
    return weights_of(net)


class WarmedUp(Regressor):
    """Written for Lightning: the learning rate grows over the first steps."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Optimizer, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * min(1.0, (self.trainer.global_step + 1) / 4)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


class KeptGradients(Regressor):
    """Sets gradients to zero instead of dropping them."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)


class ClippedByHand(Regressor):
    """Clips twice as hard as the Trainer was asked to."""

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        assert gradient_clip_val is not None
        self.clip_gradients(
            optimizer, gradient_clip_val=gradient_clip_val / 2, gradient_clip_algorithm=gradient_clip_algorithm
        )


def warm_up(step: int, net: nn.Module, optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.05 * min(1.0, (step + 1) / 4)


def clip_hard(step: int, net: nn.Module, optimizer: Optimizer) -> None:
    nn.utils.clip_grad_norm_(net.parameters(), 0.05)


def clip_values(step: int, net: nn.Module, optimizer: Optimizer) -> None:
    nn.utils.clip_grad_value_(net.parameters(), 0.01)


def nothing(step: int, net: nn.Module, optimizer: Optimizer) -> None:
    pass


def fitted(kind: type[Regressor], strategy: str, ranks: int, arguments: dict[str, Any]) -> tuple[Tensor, int]:
    module = kind()
    given = FSDPStrategy(gather_weights="all") if strategy == "fsdp" else strategy
    trainer = silent_trainer(strategy=given, devices=ranks, max_epochs=1, **arguments)
    trainer.fit(module, loader(8 * BATCHES, 8 // ranks))
    return weights_of(module), trainer.global_step


VALUES = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}


@pytest.mark.parametrize(
    ("strategy", "ranks", "kind", "arguments", "change"),
    [
        ("single", 1, WarmedUp, {}, warm_up),
        ("fsdp", 2, WarmedUp, {}, warm_up),
        ("ddp", 2, KeptGradients, {}, nothing),
        ("fsdp", 2, KeptGradients, {}, nothing),
        ("ddp", 2, ClippedByHand, {"gradient_clip_val": 0.1}, clip_hard),
        ("fsdp", 2, ClippedByHand, {"gradient_clip_val": 0.1}, clip_hard),
        ("ddp", 2, Regressor, VALUES, clip_values),
        ("fsdp", 2, Regressor, VALUES, clip_values),
    ],
)
def test_overrides_do_what_they_do_in_plain_torch(
    strategy: str, ranks: int, kind: type[Regressor], arguments: dict[str, Any], change: Any
) -> None:
    for weights, steps in run_on_ranks(ranks, fitted, kind, strategy, ranks, arguments):
        assert steps == BATCHES
        torch.testing.assert_close(weights, by_hand(change), rtol=1e-5, atol=1e-6)


def test_the_closure_of_optimizer_step_returns_the_loss() -> None:
    seen: list[float] = []

    class Closing(Regressor):
        def optimizer_step(
            self, epoch: int, batch_idx: int, optimizer: Optimizer, optimizer_closure: Callable[[], Any] | None = None
        ) -> None:
            assert optimizer_closure is not None
            seen.append(float(optimizer_closure()))
            optimizer.step()

    module = Closing()
    silent_trainer(devices=1, max_epochs=1).fit(module, loader(16))
    assert seen == pytest.approx(module.losses)


def test_hooks_around_the_update_see_unscaled_gradients() -> None:
    norms: dict[str, list[float]] = {}

    class Looking(Regressor):
        def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
            gradients = [parameter.grad.float() for parameter in self.parameters() if parameter.grad is not None]
            norms.setdefault(self.trainer.precision, []).append(nn.utils.get_total_norm(gradients).item())

    for precision in ("32-true", "16-mixed"):
        trainer = silent_trainer(devices=1, max_steps=1, precision=precision)
        if trainer.fabric.scaler is not None:
            trainer.fabric.scaler.scale = 256.0
        trainer.fit(Looking(), loader(4))
    assert norms["16-mixed"] == pytest.approx(norms["32-true"], rel=1e-2)


def test_the_number_of_steps_is_known_in_configure_optimizers() -> None:
    seen: list[float] = []

    def make(module: TrainModule) -> Any:
        seen.append(module.trainer.estimated_stepping_batches)
        return sgd(module)

    rates(make, epochs=3, batches=5, accumulate_grad_batches=2)
    rates(make, epochs=3, batches=5, accumulate_grad_batches={1: 5})
    rates(make, epochs=3, batches=5, limit_train_batches=2)
    rates(make, epochs=3, batches=5, max_steps=4)
    rates(make, epochs=3, batches=5, limit_train_batches=0.4)
    assert seen == [9, 7, 6, 4, 6]
