"""When averages are updated and with what, what is in the module when, and what is refused: in one process."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging as LightningEMA
from messages import refuses
from models import Regressor, loader, network, silent_trainer, weights_of
from ranks import run_on_ranks
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from phalanx import Trainer, TrainModule
from phalanx.callbacks import Callback, EMAWeightAveraging, LambdaCallback, StochasticWeightAveraging, WeightAveraging
from phalanx.checkpoint import consolidate, load, open_checkpoint
from phalanx.framework.core.errors import ConfigurationError, UnknownNameError


def fitted(*callbacks: Callback, module: TrainModule | None = None, **arguments: Any) -> Any:
    """Train in one process; return the module."""
    module = Regressor() if module is None else module
    given = {"strategy": "single", "devices": 1, "barebones": False, "callbacks": list(callbacks), **arguments}
    validates = type(module).validation_step is not TrainModule.validation_step
    silent_trainer(**given).fit(module, loader(32), loader(8) if validates else None)
    return module


class History(Callback):
    """Keeps the live weights after each optimizer step."""

    def __init__(self) -> None:
        self.weights: list[Tensor] = []

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step > len(self.weights):
            self.weights.append(weights_of(module))


def ema_of(weights: list[Tensor], decays: list[float]) -> Tensor:
    """Average by hand; of the decays the first is not used."""
    average = weights[0].clone()
    for tensor, decay in zip(weights[1:], decays[1:], strict=True):
        average = decay * average + (1 - decay) * tensor
    return average


# ---- when, and with what ------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*LeafSpec")
@pytest.mark.parametrize(
    "arguments",
    [
        {"decay": 0.7, "update_every_n_steps": 2, "update_starting_at_step": 5},
        {"decay": 0.7, "update_every_n_steps": 0, "update_starting_at_epoch": 1},
    ],
)
def test_it_is_what_lightning_has(arguments: dict[str, Any]) -> None:
    class Ported(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.05)

    theirs = Ported()
    lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=3, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[LightningEMA(**arguments)],
    ).fit(theirs, loader(32))  # fmt: skip
    ours = fitted(EMAWeightAveraging(**arguments), max_epochs=3)
    torch.testing.assert_close(weights_of(ours), weights_of(theirs), rtol=1e-6, atol=1e-7)


def test_decay_may_warm_up_and_may_be_a_function() -> None:
    history, ema = History(), EMAWeightAveraging(decay=0.95, warmup=True)
    module = fitted(history, ema, max_steps=12)
    decays = [min(0.95, (1 + n) / (10 + n)) for n in range(12)]
    torch.testing.assert_close(weights_of(module), ema_of(history.weights, decays), rtol=1e-5, atol=1e-7)
    history, counts = History(), []

    def decay(count: int) -> float:
        counts.append(count)
        return 1 - 1 / (count + 2)

    module = fitted(history, EMAWeightAveraging(decay=decay), max_steps=6)
    assert counts == [1, 2, 3, 4, 5]
    expected = ema_of(history.weights, [1 - 1 / (n + 2) for n in range(6)])
    torch.testing.assert_close(weights_of(module), expected, rtol=1e-5, atol=1e-7)


def test_an_epoch_may_begin_it() -> None:
    history = History()
    module = fitted(history, EMAWeightAveraging(decay=0.5, update_starting_at_epoch=1), max_epochs=2)
    assert len(history.weights) == 16
    torch.testing.assert_close(weights_of(module), ema_of(history.weights[8:], [0.5] * 8), rtol=1e-5, atol=1e-7)


def test_it_counts_applied_updates_whatever_the_window() -> None:
    class Poisoned(Regressor):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            # Windows of two: the second brings no loss, the third one that is not finite.
            return None if batch_idx in (2, 3) else loss * torch.inf if batch_idx == 4 else loss

    history, ema = History(), EMAWeightAveraging(decay=0.5)
    counts: list[int] = []
    counter = LambdaCallback(on_train_end=lambda *_: counts.append(ema.updates))
    module = fitted(history, ema, counter, module=Poisoned(), max_epochs=1, accumulate_grad_batches=2, nonfinite="skip")
    assert counts == [2]
    assert len(history.weights) == 2
    torch.testing.assert_close(weights_of(module), ema_of(history.weights, [0.5] * 2), rtol=1e-6, atol=1e-7)


def test_functions_of_torch_and_rules_of_the_users() -> None:
    class Odd(WeightAveraging):
        def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
            return step_idx is not None and step_idx % 2 == 1

    history = History()
    module = fitted(history, Odd(multi_avg_fn=get_ema_multi_avg_fn(0.5)), max_steps=8)
    expected = ema_of(history.weights[1::2], [0.5] * 4)
    torch.testing.assert_close(weights_of(module), expected, rtol=1e-6, atol=1e-7)
    module = fitted(history := History(), WeightAveraging(), max_steps=8)
    torch.testing.assert_close(weights_of(module), torch.stack(history.weights).mean(0), rtol=1e-5, atol=1e-7)
    module = fitted(history := History(), WeightAveraging(avg_fn=lambda a, w, n: torch.maximum(a, w)), max_steps=8)
    assert torch.equal(weights_of(module), torch.stack(history.weights).amax(0))


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_it_is_at_least_fp32(precision: str) -> None:
    kept: list[dict[str, Tensor]] = []
    ema = EMAWeightAveraging(decay=0.9)
    keep = LambdaCallback(on_train_end=lambda *_: kept.append(ema.averaged_state_dict()))
    module = fitted(history := History(), ema, keep, precision=precision, max_steps=10)
    own = torch.cat([tensor.double().flatten() for tensor in kept[0].values()])
    wide = torch.float64 if precision == "64-true" else torch.float32
    assert {tensor.dtype for tensor in kept[0].values()} == {wide}
    tolerance = 1e-12 if precision == "64-true" else 1e-6
    torch.testing.assert_close(own, ema_of(history.weights, [0.9] * 10), rtol=tolerance, atol=tolerance)
    assert {parameter.dtype for parameter in module.parameters()} == {
        getattr(torch, {"bf16-true": "bfloat16"}.get(precision, "float64"))
    }


class Normed(Regressor):
    """Has batch norm, a frozen layer, and a buffer that is replaced by another tensor in each step."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__(optimizer="sgd", lr=0.01)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.net[0].requires_grad_(False)
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.training and torch.is_grad_enabled():
            self.seen = self.seen + batch[0].mean()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[1]), batch_size=len(batch[0]))


@pytest.mark.parametrize("use_buffers", [True, False])
def test_buffers_are_averaged_or_the_modules_own(use_buffers: bool) -> None:
    torch.manual_seed(0)
    module = Normed()
    average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=use_buffers)
    hand = LambdaCallback(on_train_batch_end=lambda trainer, module, *_: average.update_parameters(module))
    ema = EMAWeightAveraging(decay=0.8, use_buffers=use_buffers)
    fitted(ema, hand, module=module, max_steps=6)
    for name, tensor in average.module.state_dict().items():
        if tensor.is_floating_point():
            torch.testing.assert_close(module.state_dict()[name], tensor, rtol=1e-6, atol=1e-7)


def test_what_is_unfrozen_joins(tmp_path: Path) -> None:
    class Thawed(Normed):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.net[0].requires_grad_(True)

    history: list[Tensor] = []
    watch = LambdaCallback(on_train_batch_end=lambda t, m, *_: history.append(m.net[0].weight.detach().clone()))
    saves = LambdaCallback(on_train_epoch_end=lambda t, m: t.save_checkpoint(tmp_path / f"{t.current_epoch}.ckpt"))
    module = fitted(EMAWeightAveraging(decay=0.5), watch, saves, module=Thawed(), max_epochs=2)
    names = [set(open_checkpoint(tmp_path / f"{epoch}.ckpt").names("averages")) for epoch in (0, 1)]
    assert names[1] - names[0] == {"ema/net.0.weight", "ema/net.0.bias"}
    expected = history[7]
    for weight in history[8:]:
        expected = 0.5 * expected + 0.5 * weight
    torch.testing.assert_close(module.net[0].weight, expected, rtol=1e-6, atol=1e-7)


# ---- in the module ------------------------------------------------------------------------------------------------


def test_a_validation_that_raises_leaves_the_live_weights() -> None:
    class Failing(Regressor):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.inside = weights_of(self)
            raise RuntimeError("no")

    history = History()
    module = Failing()
    with pytest.raises(RuntimeError, match="no"):
        fitted(history, EMAWeightAveraging(decay=0.5), module=module, max_epochs=1, num_sanity_val_steps=0)
    assert torch.equal(weights_of(module), history.weights[-1])
    torch.testing.assert_close(module.inside, ema_of(history.weights, [0.5] * 8), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("stays", [True, False])
def test_after_a_fit_the_module_holds_the_average_unless_disabled(stays: bool, tmp_path: Path) -> None:
    class Telling(Regressor):
        def on_train_end(self) -> None:
            self.at_end = weights_of(self)
            self.trainer.save_checkpoint(tmp_path / "end.ckpt")

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_loss", nn.functional.mse_loss(self(batch[0]), batch[1]), batch_size=len(batch[0]))

    history, ema = History(), EMAWeightAveraging(decay=0.5, average_at_end=stays)
    module = Telling()
    trainer = silent_trainer(strategy="single", devices=1, max_steps=6, callbacks=[history, ema])
    trainer.fit(module, loader(32))
    average = ema_of(history.weights, [0.5] * 6)
    wanted = average if stays else history.weights[-1]
    torch.testing.assert_close(weights_of(module), wanted, rtol=1e-6, atol=1e-7)
    assert torch.equal(module.at_end, weights_of(module))
    # Whatever the module holds, the checkpoint has both under their own names.
    saved = load(tmp_path / "end.ckpt")
    assert torch.equal(torch.cat([t.double().flatten() for t in saved["state_dict"].values()]), history.weights[-1])
    averages = torch.cat([t.double().flatten() for t in saved["averages_tensors"].values()])
    torch.testing.assert_close(averages, average, rtol=1e-6, atol=1e-7)
    # A test of the checkpoint is a test of the average, as validations were.
    (of_average,) = trainer.test(Telling(), loader(16), ckpt_path=tmp_path / "end.ckpt", verbose=False)
    with torch.no_grad():
        x, y = next(iter(loader(16, 16)))
        start = 0
        for parameter in module.parameters():
            parameter.copy_(average[start : start + parameter.numel()].view_as(parameter))
            start += parameter.numel()
        assert of_average["test_loss"] == pytest.approx(nn.functional.mse_loss(module(x), y).item(), rel=1e-5)


def saves(step: int, path: Path) -> LambdaCallback:
    """Return a callback that saves after a step."""

    def save(trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == step:
            trainer.save_checkpoint(path)

    return LambdaCallback(on_train_batch_end=save)


def test_a_checkpoint_without_it_begins_it_and_one_with_it_needs_no_callback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    stages: list[tuple[list[Callback], int, Path | None]] = [([], 3, None), ([EMAWeightAveraging()], 5, tmp_path / "3"),
                                                          ([], 6, tmp_path / "5")]  # fmt: skip
    for callbacks, step, resume in stages:
        trainer = silent_trainer(
            strategy="single", devices=1, max_steps=step, callbacks=[*callbacks, saves(step, tmp_path / str(step))]
        )
        monkeypatch.setattr(trainer, "note", notes.append)
        trainer.fit(Regressor(), loader(32), ckpt_path=resume)
    assert sum("holds no average 'ema': starting a new average" in note for note in notes) == 1
    assert open_checkpoint(tmp_path / "5").document["averages"]["ema"]["count"] == 2
    assert sum("holds the averages ema, which no callback maintains" in note for note in notes) == 1
    assert "averages" not in open_checkpoint(tmp_path / "6").sections


# ---- SWA ----------------------------------------------------------------------------------------------------------


class Epochs(Callback):
    """Keeps the live state at the end of each epoch, and the learning rate in it."""

    def __init__(self) -> None:
        self.states: list[dict[str, Tensor]] = []
        self.rates: list[float] = []

    def on_train_epoch_end(self, trainer: Trainer, module: Any) -> None:
        self.states.append({name: tensor.clone() for name, tensor in module.state_dict().items()})
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


class Decaying(Regressor):
    """Has a schedule."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


@pytest.mark.parametrize(("strategy", "epochs"), [("cos", 3), ("linear", 3), ("cos", 0)])
def test_swa_goes_to_its_learning_rate_as_torchs_does(strategy: Any, epochs: int) -> None:
    seen = Epochs()
    swa = StochasticWeightAveraging(0.05, 0.4, annealing_epochs=epochs, annealing_strategy=strategy)
    module = fitted(swa, seen, module=Decaying(), max_epochs=10)
    assert swa.swa_start == 3
    assert seen.rates[:3] == [0.1, 0.05, 0.025]
    optimizer = torch.optim.SGD(network().parameters(), lr=0.0125)
    scheduler = SWALR(optimizer, swa_lr=0.05, anneal_epochs=epochs, anneal_strategy=strategy)
    expected = []
    for _ in range(7):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert seen.rates[3:] == pytest.approx(expected, rel=1e-6)
    average = torch.stack([torch.cat([t.flatten() for t in state.values()]) for state in seen.states[3:]]).mean(0)
    torch.testing.assert_close(weights_of(module).float(), average, rtol=1e-5, atol=1e-6)


def recomputed(module: Normed) -> None:
    """Compute batch statistics by hand."""
    module.eval()
    norm: Any = module.net[1]
    norm.reset_running_stats()
    norm.momentum = None
    norm.train()
    with torch.no_grad():
        for x, _ in loader(32):
            module(x)


def test_swa_computes_batch_statistics_for_the_average(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Epochs()
    start = Normed()
    fitted(plain, module=copy.deepcopy(start), max_epochs=4)
    torch.manual_seed(0)
    start = Normed()
    seen, swa = Epochs(), StochasticWeightAveraging([0.01], 3, annealing_epochs=0)
    validated: list[float] = []
    watch = LambdaCallback(
        on_validation_end=lambda t, m: validated.append(t.callback_metrics["val_loss"].item()),
        on_fit_end=lambda t, m: t.save_checkpoint(tmp_path / "end.ckpt"),
    )
    module = fitted(swa, seen, watch, module=start, max_epochs=4, num_sanity_val_steps=0)
    # The training went on as if nothing had been: losses of batches, statistics, and what dropout drew.
    for own, other in zip(seen.states, plain.states, strict=True):
        assert all(torch.equal(own[name], tensor) for name, tensor in other.items())
    hand = Normed()
    hand.load_state_dict({n: torch.stack([s[n].double() for s in seen.states[2:]]).mean(0) for n in seen.states[0]})
    recomputed(hand)
    for key in ("running_mean", "running_var", "weight", "bias"):
        torch.testing.assert_close(getattr(module.net[1], key), getattr(hand.net[1], key), rtol=1e-5, atol=1e-6)
    hand.eval()
    x, y = next(iter(loader(8, 8)))
    assert validated[-1] == pytest.approx(nn.functional.mse_loss(hand(x), y).item(), rel=1e-5)
    checkpoint = open_checkpoint(tmp_path / "end.ckpt")
    torch.testing.assert_close(checkpoint.read("averages", "swa/net.1.running_var"), hand.net[1].running_var)
    assert torch.equal(checkpoint.read("model", "net.1.running_var"), seen.states[-1]["net.1.running_var"])


def statistics_on_ranks(strategy: str, ranks: int) -> tuple[dict[str, Tensor], list[float]]:
    """Train with SWA; return the average's state on rank 0, and the validation losses."""
    torch.manual_seed(0)
    module, kept, validated = Normed(), dict[str, Tensor](), list[float]()
    module.net[2] = nn.Identity()
    swa = StochasticWeightAveraging(0.01, 1, annealing_epochs=0)
    watch = LambdaCallback(
        on_validation_end=lambda t, m: validated.append(t.callback_metrics["val_loss"].item()),
        on_train_end=lambda t, m: kept.update(swa.averaged_state_dict()),
    )
    trainer = silent_trainer(
        strategy=strategy, devices=ranks, max_epochs=2, callbacks=[swa, watch], num_sanity_val_steps=0
    )
    trainer.fit(module, loader(32, 4), loader(8, 4))
    return kept, validated


@pytest.mark.parametrize("strategy", ["fsdp", "zero3"])
def test_batch_statistics_are_those_over_all_ranks(strategy: str) -> None:
    found, validated = run_on_ranks(2, statistics_on_ranks, strategy, 2)[0]
    assert found["net.1.running_var"].isfinite().all()
    module = Normed()
    module.net[2] = nn.Identity()
    module.load_state_dict(found)
    recomputed(module)
    for key in ("running_mean", "running_var"):
        torch.testing.assert_close(found[f"net.1.{key}"], getattr(module.net[1], key), rtol=1e-5, atol=1e-6)
    module.load_state_dict(found)
    module.eval()
    x, y = next(iter(loader(8, 8)))
    assert validated[-1] == pytest.approx(nn.functional.mse_loss(module(x), y).item(), rel=1e-5)


def test_swa_resumes_to_the_bit(tmp_path: Path) -> None:
    def run(resume: Path | None, *more: Callback) -> tuple[Any, Epochs]:
        torch.manual_seed(0)
        seen = Epochs()
        swa = StochasticWeightAveraging(0.02, 2, annealing_epochs=3)
        module = Normed()
        trainer = silent_trainer(strategy="single", devices=1, max_epochs=5, callbacks=[swa, seen, *more])
        trainer.fit(module, loader(32), loader(8), ckpt_path=resume)
        return module, seen

    whole, seen = run(None, saves(27, tmp_path / "amid"), saving_at_validation(3, tmp_path / "validating"))
    for name, epochs in (("amid", 2), ("validating", 2)):
        again, rest = run(tmp_path / name)
        assert rest.rates == seen.rates[-epochs:]
        for key, tensor in whole.state_dict().items():
            assert torch.equal(again.state_dict()[key], tensor), (name, key)


def saving_at_validation(epoch: int, path: Path) -> LambdaCallback:
    """Return a callback that saves while an epoch is validated."""

    def save(trainer: Trainer, *_: Any) -> None:
        if trainer.current_epoch == epoch and not path.exists():
            trainer.save_checkpoint(path)

    return LambdaCallback(on_validation_batch_end=save)


# ---- refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (lambda: EMAWeightAveraging(decay=1.5), "decay=1.5"),
        (lambda: EMAWeightAveraging(decay=True), "decay=True"),
        (lambda: EMAWeightAveraging(update_every_n_steps=-1), "update_every_n_steps=-1"),
        (lambda: EMAWeightAveraging(use_buffers=1), "use_buffers=1"),  # type: ignore[arg-type]
        (lambda: EMAWeightAveraging(name="a/b"), "name='a/b'"),
        (lambda: WeightAveraging(avg_fn=max, multi_avg_fn=max), "multi_avg_fn"),
        (lambda: WeightAveraging(avg_fn=3), "3"),  # type: ignore[arg-type]
        (lambda: StochasticWeightAveraging(0.0), "swa_lrs=0.0"),
        (lambda: StochasticWeightAveraging([]), "swa_lrs=[]"),
        (lambda: StochasticWeightAveraging(0.1, 0), "swa_epoch_start=0"),
        (lambda: StochasticWeightAveraging(0.1, 1.5), "swa_epoch_start=1.5"),
        (lambda: StochasticWeightAveraging(0.1, annealing_epochs=-1), "annealing_epochs=-1"),
        (lambda: StochasticWeightAveraging(0.1, annealing_strategy="cosine"), "'cos'"),  # type: ignore[arg-type]
    ],
)
def test_arguments_that_break_a_rule(build: Any, told: str) -> None:
    with refuses(ConfigurationError, told):
        build()


@pytest.mark.parametrize(
    ("callbacks", "arguments", "name"),
    [
        ([EMAWeightAveraging(), EMAWeightAveraging(decay=0.9)], {}, "'EMAWeightAveraging[ema]'"),
        ([EMAWeightAveraging(), WeightAveraging(name="ema")], {}, "'ema'"),
        ([EMAWeightAveraging(), WeightAveraging()], {}, "evaluate=False"),
        ([EMAWeightAveraging(), WeightAveraging(evaluate=False)], {}, "average_at_end=False"),
        ([StochasticWeightAveraging(0.1)], {"max_epochs": -1, "max_steps": 3}, "max_epochs="),
        ([StochasticWeightAveraging([0.1, 0.2], 1)], {"max_epochs": 1}, "swa_lrs"),
    ],
)
def test_combinations_that_break_a_rule(callbacks: list[Callback], arguments: dict[str, Any], name: str) -> None:
    with refuses(ConfigurationError, name):
        fitted(*callbacks, **arguments)


def test_batch_statistics_of_data_that_cannot_be_read_twice() -> None:
    batches = list(loader(32))
    trainer = silent_trainer(strategy="single", devices=1, max_epochs=1, callbacks=[StochasticWeightAveraging(0.1, 1)])
    with refuses(ConfigurationError, "statistics_batches=0"):
        trainer.fit(Normed(), iter(batches))


def test_two_averages_side_by_side(tmp_path: Path) -> None:
    first = EMAWeightAveraging(decay=0.5)
    second = EMAWeightAveraging(decay=0.9, name="slow", evaluate=False, average_at_end=False)
    module = fitted(History(), first, second, saves(6, tmp_path / "a"), max_steps=6)
    checkpoint = open_checkpoint(tmp_path / "a")
    assert {name.split("/")[0] for name in checkpoint.names("averages")} == {"ema", "slow"}
    own = torch.cat([checkpoint.read("averages", f"ema/{name}").double().flatten() for name in module.state_dict()])
    assert torch.equal(own, weights_of(module))
    assert not torch.equal(checkpoint.read("averages", "slow/net.0.weight"), module.net[0].weight)


def test_either_is_taken_from_a_checkpoint(tmp_path: Path) -> None:
    ema = EMAWeightAveraging(decay=0.5, use_buffers=False)
    module = fitted(ema, saves(6, tmp_path / "a"), module=Normed(), max_steps=6)
    with pytest.warns(UserWarning, match="average='ema'") as warned:
        live = Normed.load_from_checkpoint(tmp_path / "a")
    assert warned[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        averaged = Normed.load_from_checkpoint(tmp_path / "a", average="ema")
        trained = Normed.load_from_checkpoint(tmp_path / "a", average=False)
    assert torch.equal(live.get_parameter("net.3.weight"), trained.get_parameter("net.3.weight"))
    consolidate(tmp_path / "a", tmp_path / "ema.safetensors", section="averages/ema")
    for name, tensor in load_file(tmp_path / "ema.safetensors").items():
        assert torch.equal(tensor, averaged.state_dict()[name])
        assert torch.equal(tensor, module.state_dict()[name])
    assert averaged.state_dict().keys() == load_file(tmp_path / "ema.safetensors").keys()
    assert not torch.equal(live.get_parameter("net.3.weight"), averaged.get_parameter("net.3.weight"))
    with refuses(UnknownNameError, "average='eam'", "'ema'"):
        Normed.load_from_checkpoint(tmp_path / "a", average="eam")
