"""Micro-batches that are found: after a rank ran out of memory, training continues as with small ones before."""

from __future__ import annotations

import functools
from datetime import timedelta
from pathlib import Path
from typing import Any

import memory_run
import memory_trials
import pytest
import torch
from exhausted import FSDP_RECOVERS, Exhausted, strategy_of
from messages import refuses
from models import Regressor, regression_data, silent_trainer, weights_of
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from phalanx import Callback
from phalanx.callbacks import ModelCheckpoint
from phalanx.framework.core.errors import ConfigurationError, LoopError
from phalanx.framework.loop.window_state import update_or_repeat


class Curve(Callback):
    """Notes the epoch's mean loss and number of rows, which are reduced over the ranks."""

    monitors = True

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.values += [float(trainer.callback_metrics[name]) for name in ("loss_epoch", "rows")]


Result = tuple[list[float], Tensor, int, int, int | None]


def made(*place: Any) -> Exhausted:
    torch.manual_seed(1)
    return Exhausted(*place)


def fitted(
    ranks: int, micro: int | str, *place: Any, workers: int = 0, strategy: str | None = None, **settings: Any
) -> Result:
    """Return the curve, the weights, the optimizer steps, the errors that were raised, and the size found."""
    module, curve = made(*place), Curve()
    trainer = silent_trainer(
        max_epochs=2,
        devices=ranks,
        strategy=strategy_of(strategy or ("ddp" if ranks > 1 else "single")),
        global_batch_size=16,
        micro_batch_size=micro,
        callbacks=curve,
        **settings,
    )
    # The last of three global batches has one sample, so that one rank has none.
    data = DataLoader(regression_data(33), batch_size=4, shuffle=True, num_workers=workers)
    trainer.fit(module, data)
    assert trainer.progress.global_batch == settings.get("max_steps", 6)
    assert trainer.throughput is None or trainer.throughput.count > 0
    return curve.values, weights_of(module), trainer.global_step, module.raised, trainer.micro_batch_size


def fitted_under(strategy: str, micro: int | str, *place: Any) -> Result:
    return fitted(2, micro, *place, strategy=strategy)


NEVER = ("forward", 99, 0)


@functools.cache
def never_exhausted(ranks: int, strategy: str, micro: int) -> list[Result]:
    """Return what each rank has of a fit with a given size, in which memory suffices."""
    return run_on_ranks(ranks, fitted_under, strategy, micro, *NEVER) if ranks > 1 else [fitted(1, micro, *NEVER)]


@pytest.mark.parametrize(("place", "at"), [("forward", 0), ("backward", 2), ("update", 2)])
def test_one_rank_continues_with_smaller_micro_batches(place: str, at: int) -> None:
    values, weights, steps, raised, size = fitted(1, "auto", place, 0, 5, at)

    ((expected, by_hand, expected_steps, _, _),) = never_exhausted(1, "single", 16)
    assert raised == (1 if place == "update" else 2)
    assert size == (8 if place == "update" else 4)
    assert steps == expected_steps
    assert values == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(weights, by_hand, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("strategy", "rank", "place"),
    [
        ("ddp", 0, "forward"),
        ("ddp", 1, "backward"),
        ("ddp", 1, "update"),
        pytest.param("fsdp", 1, "update", marks=FSDP_RECOVERS),
        ("zero1", 0, "backward"),
        ("zero2", 1, "forward"),
    ],
)
def test_all_ranks_agree_on_smaller_micro_batches(strategy: str, rank: int, place: str) -> None:
    results = run_on_ranks(2, fitted_under, strategy, "auto", place, rank, 3, 1)

    expected = never_exhausted(2, strategy, 8)
    for (values, weights, steps, raised, size), (curve, by_hand, expected_steps, _, _) in zip(
        results, expected, strict=True
    ):
        assert size == (4 if place == "update" else 2)
        assert steps == expected_steps
        assert values == pytest.approx(curve, rel=1e-6)
        torch.testing.assert_close(weights, by_hand, rtol=1e-5, atol=1e-6)
        assert raised in (0, 1, 2)
    assert [result[3] > 0 for result in results] == [rank == 0, rank == 1]


def in_bf16(strategy: str, micro: int | str, *place: Any) -> tuple[Tensor, Tensor]:
    """Return how the weights have changed, and the number of errors."""
    before = weights_of(made(*place))
    _, weights, _, raised, _ = fitted(2, micro, *place, strategy=strategy, precision="bf16-mixed", max_steps=4)
    return weights - before, torch.tensor(raised)


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_gradients_of_a_lower_dtype_are_kept_and_reduced_once(strategy: str) -> None:
    (first, raised), (second, _) = run_on_ranks(2, in_bf16, strategy, "auto", "backward", 0, 3)

    (by_hand, _), _ = run_on_ranks(2, in_bf16, strategy, 2, *NEVER)
    assert raised == 2
    assert torch.equal(first, second)
    assert (first - by_hand).norm() < 0.05 * by_hand.norm()


# Memory is short in a forward pass, in a backward pass, and in an update.
@pytest.mark.parametrize(
    ("strategy", "seed"), [("ddp", 3), pytest.param("fsdp", 4, marks=FSDP_RECOVERS), ("zero2", 5), ("zero3", 1)]
)
def test_random_fits_continue_with_the_same_losses(strategy: str, seed: int) -> None:
    problem, raised = memory_trials.problem_of(memory_run.drawn(seed, strategy))

    assert not problem
    assert raised > 0


# ---- nothing of a failed attempt remains --------------------------------------------------------------------------


class Augmented(Dataset[Any]):
    """Rows with noise from the global generator, as augmentation draws it."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        x, y = regression_data(40)[index]
        return x + 0.1 * torch.randn(6), y


def random_fit(
    micro: int | str, place: str, root: Path, ckpt_path: str | None = None, steps: int = 6, workers: int = 0
) -> tuple[Exhausted, Tensor, Tensor]:
    """Train a model with dropout, batch norm and random data; return its weights and statistics."""
    torch.manual_seed(1)
    module = Exhausted(place, 0, 5, at=0 if micro == "auto" else 999, dropout=0.5, norm=True)
    saves = ModelCheckpoint(dirpath=root, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = silent_trainer(
        max_epochs=2, max_steps=steps, devices=1, global_batch_size=16, micro_batch_size=micro, callbacks=saves,
        enable_checkpointing=None,
    )  # fmt: skip
    trainer.fit(module, DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=workers), ckpt_path=ckpt_path)
    mean = module.norm.running_mean
    assert isinstance(mean, Tensor)
    return module, weights_of(module), mean


@pytest.mark.parametrize(("workers", "place"), [(0, "forward"), (2, "backward")])
def test_random_numbers_and_buffers_are_those_of_small_micro_batches(workers: int, place: str, tmp_path: Path) -> None:
    _, by_hand, expected = random_fit(4, "forward", tmp_path / "given", workers=workers)

    module, weights, mean = random_fit("auto", place, tmp_path / "found", workers=workers)

    assert module.raised == 2
    assert torch.equal(weights, by_hand)
    assert torch.equal(mean, expected)


def test_a_resumed_fit_begins_with_the_size_that_was_found(tmp_path: Path) -> None:
    _, weights, mean = random_fit("auto", "forward", tmp_path / "whole")
    random_fit("auto", "forward", tmp_path, steps=2)

    module, resumed, resumed_mean = random_fit("auto", "forward", tmp_path / "resumed", str(tmp_path / "step=2.ckpt"))

    assert module.raised == 0
    assert torch.equal(weights, resumed)
    assert torch.equal(mean, resumed_mean)


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


# ---- what cannot be healed ----------------------------------------------------------------------------------------


def test_a_sample_that_does_not_fit_raises_the_error() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="injected") as raised:
        fitted(1, "auto", "forward", 0, 0)
    hints = " ".join(getattr(raised.value, "__notes__", []))
    assert "1 of 1 rank ran out of memory with micro-batches of one sample, the smallest: shorten the samples" in hints


def exhausted_for_good() -> str:
    try:
        fitted(2, "auto", "backward", 1, 0)
    except (LoopError, torch.OutOfMemoryError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_all_ranks_end_where_a_sample_does_not_fit() -> None:
    first, second = run_on_ranks(2, exhausted_for_good)

    assert "1 of 2 ranks ran out of memory with micro-batches of one sample" in first
    assert "injected" in second


def test_other_errors_are_raised() -> None:
    class Broken(Exhausted):
        def raise_error(self, *_: Any) -> None:
            raise ValueError("broken")

    trainer = silent_trainer(max_epochs=1, devices=1, global_batch_size=16, micro_batch_size="auto")
    with pytest.raises(ValueError, match="broken"):
        trainer.fit(Broken("forward", 0, 5), DataLoader(regression_data(40), batch_size=4))


def test_a_strategy_with_collectives_in_passes_is_refused() -> None:
    trainer = silent_trainer(max_epochs=1, devices=1, strategy="zero3", global_batch_size=16, micro_batch_size="auto")

    with refuses(ConfigurationError, "strategy='ddp'", "'fsdp'", "'zero2'"):
        trainer.fit(Exhausted("forward", 0, 5), DataLoader(regression_data(40), batch_size=4))


class Halfway(torch.optim.SGD):
    """Runs out of memory in one of its steps: after it has replaced state, or after it has also changed a weight."""

    def __init__(self, parameters: Any, fails_at: int, changes: bool = False) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.param_groups[0]["steps"] = 0
        self.fails_at, self.changes, self.calls = fails_at, changes, 0

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["steps"] += 1
        self.calls += 1
        if self.calls == self.fails_at:
            first = self.param_groups[0]["params"][0]
            self.state[first] |= {"momentum_buffer": torch.full_like(first, 7.0), "new": 1}
            if self.changes:
                with torch.no_grad():
                    first.add_(1.0)
            raise torch.OutOfMemoryError("injected")
        return super().step(closure)


def updated(optimizer: torch.optim.Optimizer, layer: nn.Linear) -> tuple[Tensor, list[set[str]], list[int]]:
    """Make two updates; return the weights, the names of the state, and the notes."""
    nn.init.ones_(layer.weight)
    notes: list[int] = []

    def step() -> bool:
        optimizer.step()
        return True

    for _ in range(2):
        optimizer.zero_grad()
        layer(torch.ones(2, 3)).sum().backward()
        assert update_or_repeat(optimizer, step, lambda: notes.append(1))
    return layer.weight.detach(), [set(slots) for slots in optimizer.state.values()], notes


# In the first update the state is created, in the second it is replaced.
@pytest.mark.parametrize("fails_at", [1, 2])
def test_an_update_that_has_changed_nothing_is_repeated_exactly(fails_at: int) -> None:
    plain, layer = nn.Linear(3, 1), nn.Linear(3, 1)
    expected, names, _ = updated(torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), plain)

    optimizer = Halfway(layer.parameters(), fails_at)
    weights, found, notes = updated(optimizer, layer)

    assert torch.equal(weights, expected)
    assert found == names
    assert optimizer.param_groups[0]["steps"] == 2
    assert notes == [1]


def test_an_update_that_has_changed_a_weight_raises() -> None:
    layer = nn.Linear(3, 1)

    with refuses(LoopError, "foreach=False"):
        updated(Halfway(layer.parameters(), 1, changes=True), layer)
