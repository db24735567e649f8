"""``verify_every``: steps that are computed twice end as those that are not, and what differs is found and named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flip_trials
import pytest
import torch
from models import Regressor, loader, regression_data, silent_trainer
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from phalanx.callbacks import Callback, ModelCheckpoint
from phalanx.framework.core.errors import ConfigurationError, CorruptionError


class Drawing(Dataset[Any]):
    """Draws random numbers where samples are read."""

    def __init__(self) -> None:
        self.data = regression_data(24)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        x, y = self.data[index]
        return x + 0.1 * torch.rand(6), y


class Varied(Regressor):
    """Has what a repetition must undo: dropout, statistics, a batch changed in place, schedules, logged values."""

    def __init__(self) -> None:
        super().__init__(dropout=0.2)
        self.norm = nn.BatchNorm1d(6)
        self.calls = 0
        self.seen = set[int]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        x, y = batch
        x.mul_(0.9)
        loss = nn.functional.mse_loss(self.net(self.norm(x)), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("updates", 1.0, on_epoch=True, reduce_fx="sum")
        self.log("drawn", torch.rand(()), on_epoch=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.trainer is not None
        # A set: hooks of a micro-batch that is not the last are called for each computation.
        if "mine" in self.trainer.fired_triggers:
            self.seen.add(self.trainer.global_step)
        if batch_idx == 1:
            self.trainer.raise_trigger("mine")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def trained(strategy: str, ranks: int, verify_every: int | None, arguments: dict[str, Any]) -> Any:
    torch.manual_seed(5)
    module = Varied()
    trainer = silent_trainer(
        **({"strategy": strategy, "devices": ranks} | arguments), max_epochs=2, verify_every=verify_every
    )
    trainer.fit(module, DataLoader(Drawing(), 4, shuffle=True))
    tensors = {name: value for name, value in module.state_dict().items() if value.device.type != "meta"}
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    tensors = {name: value.clone() for name, value in tensors.items()}
    return tensors, (logged, module.seen), module.calls, torch.rand(3)


PLAIN: dict[str, Any] = {}
CLIPPED = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
HALF = {"precision": "16-mixed"}
FOUND = {"global_batch_size": 8, "micro_batch_size": "auto"}


@pytest.mark.parametrize(
    ("strategy", "arguments"),
    [
        *(("auto", each) for each in (PLAIN, CLIPPED, HALF, FOUND)),
        *(("ddp", each) for each in (PLAIN, FOUND)),
        *(("fsdp", each) for each in (CLIPPED, HALF)),
        ("zero1", {"precision": "bf16-mixed"}),
        ("zero2", FOUND),
        ("zero3", CLIPPED),
    ],
)
def test_a_verified_run_ends_as_one_that_is_not(strategy: str, arguments: dict[str, Any]) -> None:
    ranks = 1 if strategy == "auto" else 2
    plain, *found = (run_on_ranks(ranks, trained, strategy, ranks, every, arguments) for every in (None, 1, 3))
    for verified in found:
        for (one, logged, calls, drawn), (other, also, again, same) in zip(plain, verified, strict=True):
            assert all(torch.equal(value, other[name]) for name, value in one.items())
            assert logged == also
            assert logged[1], "no signal has fired"
            assert torch.equal(drawn, same)
            assert again > calls


def test_a_compiled_model_and_stages_of_a_pipeline() -> None:
    # Compilation draws random numbers, and a rank of a pipeline lacks the weights of the others.
    # In its own thread, as others would outlive the test.
    options = {"compile_threads": 1, "cpp_cache_precompile_headers": False}
    for strategy, ranks, arguments in (("auto", 1, {"compile": {"options": options}}), ("pipeline", 2, {})):
        plain, verified = (
            run_on_ranks(ranks, dropped_out, strategy, ranks, every, arguments, timeout=120.0) for every in (None, 1)
        )
        assert plain == verified


class Blocks(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2)) for _ in range(4))
        self.net = nn.Sequential()
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        output: Tensor = self.head(x)
        return output


def dropped_out(strategy: str, ranks: int, verify_every: int | None, arguments: dict[str, Any]) -> list[float]:
    torch.manual_seed(3)
    trainer = silent_trainer(strategy=strategy, devices=ranks, max_steps=6, verify_every=verify_every, **arguments)
    module = Blocks()
    trainer.fit(module, loader(32))
    return [float(value.double().sum()) for value in module.state_dict().values() if value.device.type != "meta"]


@pytest.mark.parametrize(
    ("strategy", "place"),
    [
        *(("ddp", place) for place in flip_trials.PLACES),
        *(("fsdp", place) for place in ("gradients", "update")),
        *(("zero2", place) for place in ("replica", "messages")),
    ],
)
def test_a_flipped_bit_is_found_named_and_not_saved(strategy: str, place: str) -> None:
    clean = flip_trials.clean_run(strategy)
    assert flip_trials.verdict(strategy, place, 7, clean) == "found"


class Halves(Regressor):
    """Two layers of which each rank holds one in ZeRO's partitions."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))


def halves_trained(strategy: str) -> int:
    trainer = silent_trainer(strategy=strategy, devices=2, max_steps=3, verify_every=1)
    trainer.fit(Halves(), loader(24))
    return int(trainer.global_step)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_ranks_with_other_parts_of_one_size_are_not_compared(strategy: str) -> None:
    assert run_on_ranks(2, halves_trained, strategy) == [3, 3]


class BeforeSaves(Callback):
    """Changes a weight of one rank between an update and the save after it."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 4 and trainer.global_rank == 1:
            with torch.no_grad():
                next(module.parameters()).view(torch.int32)[0, 0] ^= 1


def saved_after_a_flip(root: str) -> tuple[str, list[str]]:
    saves = ModelCheckpoint(every_n_train_steps=2, save_top_k=-1)
    trainer = silent_trainer(
        strategy="ddp", devices=2, max_steps=8, verify_every=100, callbacks=[BeforeSaves(), saves],
        enable_checkpointing=True, default_root_dir=root,
    )  # fmt: skip
    with pytest.raises(CorruptionError) as error:
        trainer.fit(Regressor(), loader(64))
    return str(error.value), sorted(path.name for path in Path(root).rglob("*.ckpt"))


def test_ranks_that_differ_are_not_saved(tmp_path: Path) -> None:
    for message, saved in run_on_ranks(2, saved_after_a_flip, str(tmp_path)):
        assert "net.0.weight on rank 0 (host" in message
        assert "and rank 1 (host" in message
        assert saved == ["epoch=0-step=2.ckpt"]


class Remembers(Regressor):
    """Computes with the output of the step before."""

    memory: Tensor | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        output = self(x) if self.memory is None else self(x) + 0.1 * self.memory
        self.memory = output.detach()
        return nn.functional.mse_loss(output, y)


class Clamps(Regressor):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        with torch.no_grad():
            next(self.parameters()).mul_(0.99)
        return loss


class Manual(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (Remembers, "each time the loss of micro-batch 0 is another one"),
        (Clamps, "they change net.0.weight"),
        (Manual, "automatic_optimization = False"),
    ],
)
def test_programs_whose_steps_cannot_be_repeated_are_refused(module: type[Regressor], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        silent_trainer(max_steps=2, verify_every=1).fit(module(), loader(16))
