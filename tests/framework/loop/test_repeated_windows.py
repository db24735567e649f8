"""A window that is repeated because a rank ran out of memory leaves no trace of its first attempt."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from exhausted import Exhausted
from models import Regressor, regression_data, silent_trainer, weights_of
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader

from phalanx import Callback
from phalanx.framework.loop.window_state import update_or_repeat

ROWS = 16


def fit(module: Any, *callbacks: Callback, ranks: int = 1, micro: int | str = "auto", **settings: Any) -> Any:
    """Train on global batches of ``ROWS`` samples in order; return the Trainer."""
    trainer = silent_trainer(
        devices=ranks,
        strategy="ddp" if ranks > 1 else "single",
        global_batch_size=ROWS,
        micro_batch_size=micro,
        callbacks=[*callbacks],
        **{"max_epochs": 1, **settings},
    )
    trainer.fit(module, DataLoader(regression_data(3 * ROWS), batch_size=4))
    return trainer


class LatestLosses(Callback):
    """Notes the newest loss as each micro-batch starts."""

    def __init__(self) -> None:
        self.seen: list[float | None] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(trainer.latest_loss)


def test_the_latest_loss_is_that_before_the_window() -> None:
    latest = LatestLosses()

    # The second window fails in its backward pass, when its loss is known.
    fit(Exhausted("backward", 0, 8, at=1), latest, max_steps=2)

    assert len(latest.seen) == 4
    before, failed, repeated, second = latest.seen
    assert before is None
    assert repeated == failed
    assert second != repeated


class FirstAttempt(Exhausted):
    """The loss of the pass that runs out of memory is NaN, and no other."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if self._is_short(len(batch[0])) else loss


def test_a_loss_that_is_not_finite_is_forgotten() -> None:
    module, plain = FirstAttempt("backward", 0, 8, at=1), Exhausted("forward", 99, 8)

    trainer = fit(module, nonfinite="skip")
    fit(plain, micro=8)

    assert module.raised == 1
    assert trainer.global_step == 3
    torch.testing.assert_close(weights_of(module), weights_of(plain), rtol=1e-5, atol=1e-6)


class Spiking(Regressor):
    """Runs out of memory in the backward pass of one call, and has a loss that is far above the others in another."""

    def __init__(self, fails: int, rises: int) -> None:
        super().__init__(lr=0.0)
        self.fails, self.rises, self.calls = fails, rises, 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        loss = super().training_step(batch, batch_idx)
        if self.calls == self.fails:
            loss.register_hook(self.run_out)
        return loss + 1000.0 if self.calls == self.rises else loss

    def run_out(self, _: Tensor) -> None:
        raise torch.OutOfMemoryError("injected")


@pytest.mark.parametrize(("rises", "is_noted"), [(201, False), (202, True)])
def test_the_losses_of_the_first_attempt_do_not_count_for_spikes(
    rises: int, is_noted: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    # Spikes are noted after 200 losses. Call 200 fails, so that call 201 has loss 200 and call 202 loss 201.
    fit(Spiking(200, rises), max_epochs=-1, max_steps=201)

    text = "".join(capfd.readouterr())
    assert "out of memory" in text
    assert ("The loss rose to" in text) == is_noted


def test_samples_and_operations_count_once() -> None:
    found = fit(Exhausted("backward", 0, 5)).throughput
    expected = fit(Exhausted("forward", 99, 5), micro=4).throughput

    assert found.count == expected.count == 3 * ROWS
    assert found.flops_per_unit == expected.flops_per_unit is not None


class Asking(Callback):
    """Asks for a validation on rank 1 as the first micro-batch starts, and notes the steps after which one runs."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.asks = True

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if self.asks and trainer.global_rank == 1:
            trainer.raise_trigger("validate")
        self.asks = False

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.steps.append(trainer.global_step)


class Validated(Exhausted):
    def val_dataloader(self) -> Any:
        return DataLoader(regression_data(4), batch_size=4)

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...


def validations(largest: int) -> tuple[list[int], int]:
    module, asking = Validated("forward", 0, largest), Asking()
    fit(module, asking, ranks=2, val_check_interval=timedelta(hours=10), num_sanity_val_steps=0)
    return asking.steps, module.raised


def test_a_signal_of_the_first_attempt_is_obeyed_after_the_window() -> None:
    found = run_on_ranks(2, validations, 4)

    assert found == [([1], 1), ([1], 0)]


class Replacing(torch.optim.SGD):
    """Runs out of memory in its second step, after it has replaced its state."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        if self.steps == 2:
            for parameter, slots in self.state.items():
                slots["momentum_buffer"] = torch.full_like(parameter, 7.0)
                slots["new"] = 1
            raise torch.OutOfMemoryError("injected")
        return super().step(closure)


def stepped(kind: type[torch.optim.SGD]) -> tuple[Tensor, list[set[str]]]:
    """Return the weights after two updates, and the names of the state."""
    layer = nn.Linear(3, 1)
    nn.init.ones_(layer.weight)
    optimizer = kind(layer.parameters(), lr=0.1, momentum=0.9)

    def step() -> bool:
        optimizer.step()
        return True

    for _ in range(2):
        optimizer.zero_grad()
        layer(torch.ones(2, 3)).sum().backward()
        update_or_repeat(optimizer, step, lambda: None)
    return layer.weight.detach(), [set(slots) for slots in optimizer.state.values()]


def test_state_that_was_replaced_is_put_back() -> None:
    weights, names = stepped(Replacing)

    expected, expected_names = stepped(torch.optim.SGD)
    assert torch.equal(weights, expected)
    assert names == expected_names
