"""Losses and gradients that are not finite: seen by all ranks in their step, named, and their batch kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refuses
from models import ByHand, Regressor, loader, silent_trainer, weights_of
from ranks import run_on_ranks
from torch import Tensor, nn

from phalanx import Trainer, TrainModule
from phalanx.callbacks import ModelCheckpoint
from phalanx.framework.checkpoint.finite_check import all_finite
from phalanx.framework.checkpoint.inspection import newest_good
from phalanx.framework.checkpoint.reader import open_checkpoint
from phalanx.framework.core.errors import NonFiniteError
from phalanx.framework.core.optimizer_config import parameters_of
from phalanx.framework.diagnostics.batch_dump import keep_batch, read_batch
from phalanx.framework.diagnostics.nonfinite_guard import IN_A_ROW
from phalanx.framework.parallel.gradient_operations import gradients_of
from phalanx.framework.parallel.strategy import Traits
from phalanx.strategies import SingleDeviceStrategy

AT = 5


class SquareRoot(nn.Module):
    """NaN where an input is negative."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sqrt()


class Planted(Regressor):
    """Goes wrong on one rank in one batch: in a module's output, in the loss, or in its gradient alone."""

    def __init__(self, what: str, rank: int = 1, at: tuple[int, ...] = (AT,)) -> None:
        super().__init__()
        self.root = SquareRoot()
        self.counter: Tensor
        self.register_buffer("counter", torch.zeros(()))
        self.what, self.rank, self.at = what, rank, at

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.counter += 1
        self.log("seen", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")
        x, y = batch
        out = self.net(x)
        wrong = self.global_rank == self.rank and batch_idx in self.at
        if self.what == "module":
            out = out * self.root(torch.full((), -1.0 if wrong else 1.0))
        loss = nn.functional.mse_loss(out, y)
        if wrong and self.what == "loss":
            # The gradient of this one is finite.
            return loss + torch.inf
        if wrong and self.what == "gradient":
            return loss + (out * 0.0).abs().sqrt().sum()
        return loss


def fit(root: str, what: str, strategy: str, ranks: int, **arguments: Any) -> tuple[str, int, int, bool]:
    """Return the error, the steps, the calls that the module's buffer counted, and whether its weights are finite."""
    module = Planted(what, rank=ranks - 1)
    saver = ModelCheckpoint(every_n_train_steps=1, save_top_k=-1, filename="{step}")
    trainer = silent_trainer(
        devices=ranks,
        strategy=strategy,
        max_epochs=1,
        callbacks=[saver],
        enable_checkpointing=True,
        default_root_dir=root,
        **arguments,
    )
    message = ""
    try:
        trainer.fit(module, loader(80, 8 // ranks))
    except NonFiniteError as error:
        message = str(error)
    finite = all(bool(each.isfinite().all()) for each in module.parameters() if not each.is_meta)
    return message, trainer.global_step, int(module.counter), finite


def check(root: Path, what: str, results: list[Any], named: str) -> dict[str, Any]:
    """Check what all cases have in common; return what is told of the batch."""
    ranks = len(results)
    message = results[0][0]
    assert all(result == (message, AT, AT + 1, True) for result in results), results
    place = f" at optimizer step {AT} (epoch 0, batch {AT})"
    where = f" on rank {ranks - 1}" if ranks > 1 else ""
    assert f"{place}{where}: {named}" in message
    run = root / "phalanx_logs" / "version_0"
    newest = newest_good(run / "checkpoints", print)
    assert newest is not None
    assert open_checkpoint(newest).document["progress"]["global_step"] == AT
    told: dict[str, Any] = json.loads((run / "nonfinite" / f"step={AT}-rank={ranks - 1}.json").read_text())
    assert (told["optimizer_step"], told["batch_in_epoch"], told["rank"]) == (AT, AT, ranks - 1)
    assert str(run / "nonfinite" / f"step={AT}-rank={ranks - 1}.json") in message
    x, _ = read_batch(run / "nonfinite" / f"step={AT}-rank={ranks - 1}.json")
    rows = torch.cat([batch[0] for batch in loader(80, 8)])
    assert any(torch.equal(x, rows[start : start + len(x)]) for start in range(0, 80, len(x)))
    return told


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2"])
def test_a_nan_on_one_rank_stops_all_before_its_update(tmp_path: Path, strategy: str) -> None:
    results = run_on_ranks(2, fit, str(tmp_path), "module", strategy, 2)
    assert results[0][0].startswith("the loss is nan")
    told = check(tmp_path, "module", results, "the first non-finite output is that of root (SquareRoot)")
    assert told["loss"] == "nan"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_an_infinite_loss_with_finite_gradients_is_seen_too(tmp_path: Path, strategy: str) -> None:
    results = run_on_ranks(2, fit, str(tmp_path), "loss", strategy, 2)
    assert results[0][0].startswith("the loss is inf")
    check(tmp_path, "loss", results, "the outputs of all modules are finite")


def test_a_gradient_alone_is_seen_and_its_parameter_and_rank_named(tmp_path: Path) -> None:
    results = run_on_ranks(2, fit, str(tmp_path), "gradient", "ddp", 2)
    assert results[0][0].startswith("the loss is finite and its gradient is not")
    check(tmp_path, "gradient", results, "the gradient of net.0.weight is the first non-finite one")


@pytest.mark.parametrize("strategy", ["fsdp", "zero2"])
def test_a_gradient_alone_is_seen_where_gradients_are_split(tmp_path: Path, strategy: str) -> None:
    (first, *_), (second, *_) = results = run_on_ranks(2, fit, str(tmp_path), "gradient", strategy, 2)
    assert first == second
    assert f"at optimizer step {AT} (epoch 0, batch {AT}): the gradient of net.0.weight is the first" in first
    assert all(result[1:] == (AT, AT + 1, True) for result in results)


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("module", "the first non-finite output is"),
        ("loss", "the outputs of all modules"),
        ("gradient", "the gradient of net.0.weight"),
    ],
)
def test_one_process_stops_before_the_update(tmp_path: Path, what: str, named: str) -> None:
    check(tmp_path, what, [fit(str(tmp_path), what, "auto", 1)], named)


class Accumulating(Planted):
    """Is wrong in the first micro-batch of a window of three."""

    def __init__(self) -> None:
        super().__init__("loss", at=(3,))


def accumulated(strategy: str) -> tuple[str, int]:
    trainer = silent_trainer(devices=2, strategy=strategy, max_epochs=1, accumulate_grad_batches=3)
    with pytest.raises(NonFiniteError) as met:
        trainer.fit(Accumulating(), loader(96, 4))
    return str(met.value), trainer.global_step


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_micro_batch_within_a_window_is_named(strategy: str) -> None:
    for message, steps in run_on_ranks(2, accumulated, strategy):
        assert message.startswith("the loss is inf at optimizer step 1 (epoch 0, batch 3) on rank 1")
        assert steps == 1


class Manual(ByHand, Planted):
    """The same, by manual optimization."""


def by_hand(what: str, strategy: str) -> tuple[str, int]:
    trainer = silent_trainer(devices=2, strategy=strategy, max_epochs=1)
    with pytest.raises(NonFiniteError) as met:
        trainer.fit(Manual(what), loader(80, 4))
    return str(met.value), trainer.global_step


@pytest.mark.parametrize("what", ["loss", "gradient"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_manual_optimization_stops_in_the_same_step(what: str, strategy: str) -> None:
    (first, steps), other = run_on_ranks(2, by_hand, what, strategy)
    assert other == (first, steps) == (first, AT)
    assert f"at optimizer step {AT} (epoch 0, batch {AT})" in first


# ---- leaving updates out --------------------------------------------------------------------------------------------


def skipping(what: str, at: tuple[int, ...], strategy: str = "ddp") -> tuple[str, int, int, Tensor]:
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    module = Planted(what, rank=ranks - 1, at=at)
    trainer = silent_trainer(devices=ranks, strategy=strategy if ranks > 1 else "auto", max_epochs=1, nonfinite="skip")
    message = ""
    try:
        trainer.fit(module, loader(40 * ranks, 2))
    except NonFiniteError as error:
        message = str(error)
    return message, trainer.global_step, trainer.progress.steps_reached, weights_of(module)


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_skip_leaves_out_the_update_of_all_ranks(what: str) -> None:
    (message, steps, attempts, weights), other = run_on_ranks(2, skipping, what, (2, 3))
    assert (message, steps, attempts) == ("", 18, 20)
    assert other[:3] == (message, steps, attempts)
    assert torch.equal(weights, other[3])
    assert weights.isfinite().all()


def test_skip_gives_up_after_so_many_in_a_row() -> None:
    message, steps, attempts, _ = skipping("loss", tuple(range(3, 3 + IN_A_ROW)))
    assert f"This is the {IN_A_ROW}th skipped update in a row" in message
    assert (steps, attempts) == (3, 3 + IN_A_ROW - 1)
    # One that was applied in between starts the count anew.
    assert skipping("loss", (*range(3, 2 + IN_A_ROW), *range(3 + IN_A_ROW, 20)))[0] == ""


def test_skip_gives_up_after_so_many_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.framework.diagnostics.nonfinite_guard.IN_ALL", 4)
    message, steps, _, _ = skipping("gradient", (1, 3, 5, 7, 9))
    assert "Now 5 of 10 updates have been skipped" in message
    assert steps == 5


def test_ignore_applies_every_update() -> None:
    trainer = silent_trainer(devices=1, max_epochs=1, nonfinite="ignore")
    trainer.fit(Planted("gradient", rank=0), loader(40))
    assert trainer.global_step == 10


# ---- half precision -------------------------------------------------------------------------------------------------


class Overflowing(TrainModule):
    """Has a gradient that overflows for what ``kind`` says: the loss scale, or itself, whatever the scale."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.kind = kind

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.kind == "scale":
            # Times 2**16 beyond float32's range, times 2**12 within it.
            return (self.weight * 2.0**114).sum() * 1.0
        zero = (self.weight * 0.0).abs()
        return (zero.sqrt() if batch_idx >= 2 else zero).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def scaled(kind: str) -> Trainer:
    trainer = silent_trainer(devices=1, max_epochs=1, precision="16-mixed")
    trainer.fit(Overflowing(kind), loader(160, 4))
    return trainer


def test_an_overflow_of_the_loss_scale_raises_no_error() -> None:
    trainer = scaled("scale")
    assert trainer.fabric.scaler is not None
    assert 0 < trainer.global_step < trainer.progress.steps_reached == 40


def test_what_no_loss_scale_explains_is_one() -> None:
    with refuses(NonFiniteError, "step 2", "batch 18", "weight"):
        scaled("itself")


# ---- the pieces -----------------------------------------------------------------------------------------------------


class Poisoned(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.bad = nn.Parameter(torch.zeros(1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + self.bad.sum()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            with torch.no_grad():
                self.bad.fill_(torch.nan)


def test_a_weight_that_was_not_finite_before_is_named() -> None:
    with refuses(NonFiniteError, "step 3", "the weight bad"):
        silent_trainer(devices=1, max_epochs=1).fit(Poisoned(), loader())


def test_a_batch_with_nan_is_named() -> None:
    data = [[torch.zeros(2, 6), torch.zeros(2, 1)] for _ in range(4)]
    data[2][1][1] = torch.nan
    with refuses(NonFiniteError, "NaN", "'1'"):
        silent_trainer(devices=1, max_epochs=1).fit(Regressor(), data)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3),
        torch.ones(3, dtype=torch.complex64),
        torch.ones(()).expand(4),
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.float64) * 1e300,
        torch.eye(3).to_sparse(),
        torch.ones(2, requires_grad=True),
    ],
)
def test_gradients_of_all_kinds_are_looked_at(tensor: Tensor) -> None:
    before = tensor.detach().clone()
    assert all_finite([torch.zeros(2), tensor])
    assert torch.equal(tensor.detach().to_dense(), before.to_dense())
    assert not all_finite([torch.zeros(2), tensor.detach() * torch.nan])
    assert not all_finite([tensor, torch.tensor([torch.inf])])


class Odd:
    """What the codec does not know."""


def test_a_kept_batch_is_bounded_and_never_fails_for_what_is_in_it(tmp_path: Path) -> None:
    batch = {"x": torch.arange(6.0), "large": torch.zeros(1000), "name": "a", "n": 3}
    path = keep_batch(tmp_path / "kept", "one", batch, {"rank": 0}, limit_bytes=100)
    told = json.loads(path.read_text())
    assert told["left_out"] == ["large"]
    assert told["tensors"]["large"] == {"shape": [1000], "dtype": "float32", "finite": True}
    assert path.with_suffix(".safetensors").stat().st_size < 400
    del batch["large"]
    keep_batch(tmp_path / "kept", "one", batch, {})
    assert torch.equal(read_batch(path)["x"], torch.arange(6.0))
    assert [read_batch(path)[key] for key in ("name", "n")] == ["a", 3]
    keep_batch(tmp_path / "kept", "one", [Odd(), torch.ones(2)], {})
    assert [each.tolist() for each in read_batch(path)] == [[1.0, 1.0]]
    assert sorted(each.name for each in (tmp_path / "kept").iterdir()) == ["one.json", "one.safetensors"]


class ScalesItself(SingleDeviceStrategy):
    """Scales losses like the fp16 engine of DeepSpeed: an update that overflows is skipped, and halves the scale."""

    traits = Traits(owns_loss_scale=True)
    scale = 2.0**30

    def backward(self, loss: Tensor, **options: Any) -> None:
        super().backward(loss.float() * self.scale, **options)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        gradients = gradients_of(parameters_of(optimizer))
        if not all_finite(gradients):
            self.scale /= 2
            return False
        torch._foreach_mul_(gradients, 1 / self.scale)
        return super().step(optimizer)


@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_a_strategy_that_scales_fp16_losses_sees_every_overflow(policy: str) -> None:
    strategy = ScalesItself()
    silent_trainer(strategy=strategy, precision="16-true", max_steps=1, nonfinite=policy).fit(Regressor(), loader(512))
    # More overflows than a policy would accept in a row.
    assert strategy.scale < 2.0 ** (30 - IN_A_ROW)
