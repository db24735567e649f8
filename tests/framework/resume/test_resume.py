"""A run that stops and resumes is the run that never stopped, bit for bit."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Regressor, equal, loader, regression_data, silent_trainer, weights_of
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from phalanx import AccumulationSchedule, Trainer
from phalanx.callbacks import Callback, LambdaCallback, ModelCheckpoint
from phalanx.framework.system.atomic_files import hidden_sibling

# An epoch of one process has windows of 1, 2 and 3 batches, of which the last is cut, and ends within the cycle.
SAMPLES = 16


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """A map-style dataset that augments with all three global generators."""

    def __init__(self, count: int) -> None:
        self.x, self.y = regression_data(count).tensors

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] + 0.01 * torch.randn(6) + 0.01 * random.random(), self.y[index]


class Streamed(IterableDataset[tuple[Tensor, Tensor]]):
    """The same samples as a stream."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(*regression_data(SAMPLES).tensors, strict=True)


class Everything(Regressor):
    """Dropout, a validation that scores, a schedule by step and one by epoch, and figures that are logged."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)
        self.net.append(nn.BatchNorm1d(1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val", nn.functional.mse_loss(self(x), y))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        by_step = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        by_epoch = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [optimizer], [{"scheduler": by_step, "interval": "step"}, by_epoch]


class StopAfter(Callback):
    """Ends the process's run like a failure would, after a number of optimizer steps."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            raise KeyboardInterrupt


STARTS = ("on_fit_start", "on_train_start", "on_train_epoch_start")


def save_in(hook: str | None, path: str) -> Callback:
    """Draw random numbers in all hooks of a start; in one of them save, and end the run."""

    def drawing(name: str) -> Callable[..., None]:
        def draw(trainer: Trainer, module: Any) -> None:
            torch.rand(3)
            random.random()
            if name == hook:
                trainer.save_checkpoint(path)
                raise KeyboardInterrupt

        return draw

    return LambdaCallback(**{name: drawing(name) for name in STARTS})


def data(kind: str) -> DataLoader[Any]:
    if kind == "stream":
        return DataLoader(Streamed(), batch_size=2)
    workers = {"workers": 2}.get(kind, 0)
    return DataLoader(Augmented(SAMPLES), batch_size=2, shuffle=True, num_workers=workers)


def run(
    root: str,
    ranks: int,
    kind: str,
    stop: int | None,
    precision: str = "32-true",
    ckpt: str | None = "auto",
    more: Sequence[Callback] = (),
) -> dict[str, Any] | None:
    """Train two epochs; return what came out, or None where the run was stopped."""
    torch.manual_seed(11)
    random.seed(11)
    module = Everything()
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        precision=precision,
        max_epochs=2,
        default_root_dir=root,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=AccumulationSchedule.cycle([1, 2, 3]),
        val_check_interval=3,
        callbacks=[
            ModelCheckpoint(every_n_train_steps=1, save_top_k=2, monitor="loss", save_last=True),
            StopAfter(stop),
            *more,
        ],
    )
    try:
        trainer.fit(module, data(kind), loader(12, 5), ckpt_path=ckpt)
    except KeyboardInterrupt:
        return None
    return {
        "weights": weights_of(module),
        "buffers": [buffer.clone() for buffer in module.buffers()],
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "counters": (trainer.global_step, trainer.current_epoch, trainer.progress.global_batch),
        "random": (torch.rand(3), random.random()),
    }


@pytest.mark.parametrize("kind", ["plain", "stream"])
def test_resuming_at_every_step_of_one_process(tmp_path: Path, kind: str) -> None:
    # In fp16 the loss scaler is part of what resumes.
    precision = "16-mixed" if kind == "stream" else "32-true"
    expected = run(str(tmp_path / "whole"), 1, kind, None, precision)
    assert expected is not None
    for stop in range(1, expected["counters"][0]):
        root = str(tmp_path / str(stop))
        assert run(root, 1, kind, stop, precision) is None
        assert equal(run(root, 1, kind, None, precision), expected), stop


@pytest.mark.parametrize("kind", ["plain", "workers", "stream"])
def test_resuming_on_two_ranks(tmp_path: Path, kind: str) -> None:
    expected = run_on_ranks(2, run, str(tmp_path / "whole"), 2, kind, None)
    for stop in (2, 4):
        root = str(tmp_path / str(stop))
        assert run_on_ranks(2, run, root, 2, kind, stop) == [None, None]
        assert equal(run_on_ranks(2, run, root, 2, kind, None), expected), stop


def test_resuming_again_and_again_with_workers(tmp_path: Path) -> None:
    expected = run(str(tmp_path / "whole"), 1, "workers", None)
    root = str(tmp_path / "broken")
    for stop in (2, 5, 8):
        assert run(root, 1, "workers", stop) is None
    assert equal(run(root, 1, "workers", None), expected)


def saving_in(
    root: str, ranks: int, kind: str, stop: int | None, ckpt: str | None, hook: str | None, path: str
) -> dict[str, Any] | None:
    return run(root, ranks, kind, stop, "32-true", ckpt, [save_in(hook, path)])


@pytest.mark.parametrize(
    ("ranks", "kind", "hook"), [*((1, "plain", hook) for hook in STARTS), (2, "stream", "on_train_start")]
)
def test_what_is_saved_before_a_resumed_run_trains_resumes_too(
    tmp_path: Path, ranks: int, kind: str, hook: str
) -> None:
    def on(stop: int | None, ckpt: Path | None, hook: str | None, path: Path) -> Any:
        args = (str(tmp_path), ranks, kind, stop, str(ckpt) if ckpt else None, hook, str(path))
        return run_on_ranks(ranks, saving_in, *args) if ranks > 1 else saving_in(*args)

    began, again = tmp_path / "began.ckpt", tmp_path / "again.ckpt"
    expected = on(None, None, None, again)
    assert None not in (expected, *(expected if ranks > 1 else ()))
    on(None, None, "on_train_epoch_start", began)  # at the beginning of an epoch
    on(4, None, None, again)
    within = next(tmp_path.glob("**/last.ckpt")).resolve()
    for first in (began, within):
        on(None, first, hook, again)
        assert equal(on(None, again, None, again), expected), first
        shutil.rmtree(again)


def test_an_epoch_that_a_hook_has_cut_stays_cut(tmp_path: Path) -> None:
    def go(save: str | None, ckpt: str | None) -> list[tuple[int, int]]:
        seen = []

        class Cut(Regressor):
            def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
                return -1 if batch_idx == 2 else None

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                seen.append((self.current_epoch, batch_idx))
                return super().training_step(batch, batch_idx)

            def validation_step(self, batch: Any, batch_idx: int) -> None:
                if save is not None and self.current_epoch == 0:
                    self.trainer.save_checkpoint(save)

        silent_trainer(max_epochs=2, default_root_dir=tmp_path, num_sanity_val_steps=0).fit(
            Cut(), loader(16), loader(4), ckpt_path=ckpt
        )
        return seen

    saved = str(tmp_path / "cut.ckpt")
    assert go(saved, None) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert go(None, saved) == [(1, 0), (1, 1)]


# ---- onto another number of ranks ---------------------------------------


class Seen(Regressor):
    """Notes the samples it has trained on."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd", lr=0.01)
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += batch[0][:, 0].tolist()
        return super().training_step(batch, batch_idx)

    def batch_weight(self, batch: Any) -> int:
        return len(batch[0])


def part(
    root: str, ranks: int, batch_size: int, stop: int | None, hook: str | None = None, ckpt: str = "auto"
) -> tuple[list[float], Tensor]:
    torch.manual_seed(4)
    module = Seen()
    trainer = silent_trainer(
        devices=ranks,
        max_epochs=1,
        default_root_dir=root,
        callbacks=[
            ModelCheckpoint(every_n_train_steps=1, save_last=True),
            StopAfter(stop),
            save_in(hook, f"{root}/again.ckpt"),
        ],
        enable_checkpointing=True,
    )
    with suppress(KeyboardInterrupt):
        trainer.fit(module, loader(50, batch_size, shuffle=True), ckpt_path=ckpt)
    return module.seen, weights_of(module)


@pytest.mark.parametrize(("before", "after"), [((1, 4), (2, 2)), ((2, 2), (1, 4)), ((2, 4), (3, 3)), ((3, 2), (2, 5))])
def test_each_sample_is_seen_once_on_another_number_of_ranks(
    tmp_path: Path, before: tuple[int, int], after: tuple[int, int]
) -> None:
    def on(ranks: int, batch_size: int, stop: int | None) -> list[Any]:
        if ranks == 1:
            return [part(str(tmp_path), 1, batch_size, stop)]
        return run_on_ranks(ranks, part, str(tmp_path), ranks, batch_size, stop)

    first = on(*before, 4)
    second = on(*after, None)
    # The fourth step ended the run before its checkpoint was saved, so it is taken again.
    taken = 3 * before[0] * before[1]
    kept = [value for seen, _ in first for value in seen[: 3 * before[1]]]
    rest = [value for seen, _ in second for value in seen]
    assert len(kept) == taken
    assert sorted(kept + rest) == sorted(regression_data(50).tensors[0][:, 0].tolist())


def test_the_global_batches_stay_the_same_on_another_number_of_ranks(tmp_path: Path) -> None:
    torch.manual_seed(4)
    whole = part(str(tmp_path / "whole"), 1, 4, None)[1]
    part(str(tmp_path), 1, 4, 5)
    for _, weights in run_on_ranks(2, part, str(tmp_path), 2, 2, None):
        torch.testing.assert_close(weights, whole, rtol=1e-5, atol=1e-7)


def test_each_sample_is_seen_once_also_by_what_is_saved_before_a_run_on_other_ranks_trains(tmp_path: Path) -> None:
    # 12 samples are no whole number of the second run's global batches of 10, nor of the third's of 9.
    root = str(tmp_path)
    first, _ = part(root, 1, 4, 4)
    assert [seen for seen, _ in run_on_ranks(2, part, root, 2, 5, None, "on_train_start")] == [[], []]
    third = run_on_ranks(3, part, root, 3, 3, None, None, f"{root}/again.ckpt")
    rest = [value for seen, _ in third for value in seen]
    assert sorted(first[:12] + rest) == sorted(regression_data(50).tensors[0][:, 0].tolist())


def rates(root: str, ranks: int, epochs: int) -> list[float]:
    """Return the learning rate of each step of a fit that a second call continues, in global batches of 12."""
    found: list[float] = []

    class Scheduled(Everything):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            found.append(self.trainer.optimizers[0].param_groups[0]["lr"])
            return super().training_step(batch, batch_idx)

    trainer = silent_trainer(
        devices=ranks, max_epochs=epochs, default_root_dir=root, callbacks=ModelCheckpoint(), enable_checkpointing=True
    )
    trainer.fit(Scheduled(), loader(48, 12 // ranks), ckpt_path="auto")
    return found


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3)])
def test_schedules_go_on_where_they_were_on_another_number_of_ranks(tmp_path: Path, before: int, after: int) -> None:
    def on(ranks: int, epochs: int) -> list[float]:
        if ranks == 1:
            return rates(str(tmp_path), 1, epochs)
        found: list[float] = run_on_ranks(ranks, rates, str(tmp_path), ranks, epochs)[0]
        return found

    whole = rates(str(tmp_path / "whole"), 1, 4)
    assert on(before, 2) + on(after, 4) == whole
    assert len(set(whole)) == 16


# ---- where checkpoints are looked for ---------------------------------------


@pytest.mark.parametrize("given", [True, False], ids=["given", "own"])
@pytest.mark.parametrize("lost", ["nothing", "the name of the newest", "the run's directory"])
def test_auto_looks_where_a_run_saves(tmp_path: Path, lost: str, given: bool) -> None:
    root = tmp_path / "root"
    version = root / "phalanx_logs" / "version_0"
    kept = tmp_path / "kept" if given else version / "checkpoints"

    def fitted(steps: int) -> tuple[int, int, Path]:
        notes = Notes()
        callbacks = [ModelCheckpoint(kept if given else None, every_n_train_steps=1), notes]
        trainer = silent_trainer(
            max_steps=steps, max_epochs=-1, callbacks=callbacks, enable_checkpointing=True, default_root_dir=root
        )
        trainer.fit(Regressor(), loader(16, 4), ckpt_path="auto")
        return notes.steps[0], trainer.global_step, trainer.directory.path

    assert fitted(3) == (1, 3, version)
    if lost == "the name of the newest":
        # A save of the same name was killed between its two renames.
        (newest,) = kept.iterdir()
        newest.rename(hidden_sibling(newest, "old"))
    elif lost == "the run's directory":
        shutil.rmtree(root)
    there = given or lost != "the run's directory"
    assert fitted(5) == (4 if there else 1, 5, version)
    assert [path.name for path in kept.iterdir()] == ["epoch=1-step=5.ckpt"]


def test_what_a_run_left_that_never_got_to_its_first_checkpoint_goes_with_the_next(tmp_path: Path) -> None:
    killed = tmp_path / "phalanx_logs" / "version_0" / "checkpoints"
    killed.mkdir(parents=True)
    left = hidden_sibling(killed / "last.ckpt", "tmp")
    left.mkdir()
    trainer = silent_trainer(max_steps=1, default_root_dir=tmp_path, enable_checkpointing=True)
    trainer.fit(Regressor(), loader(16, 4), ckpt_path="auto")
    assert trainer.directory.version == 1
    assert not left.exists()


def test_auto_passes_over_what_other_runs_saved_into_the_same_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fitted(steps: int, resume: str | None) -> int:
        saver = ModelCheckpoint(tmp_path / "shared", every_n_train_steps=1, save_last=True)
        trainer = silent_trainer(
            max_steps=steps, callbacks=[saver], enable_checkpointing=True, default_root_dir=tmp_path / "root"
        )
        notes = Notes()
        trainer.callbacks.append(notes)
        trainer.fit(Regressor(), loader(64, 4), ckpt_path=resume)
        return notes.steps[0]

    assert fitted(6, None) == 1
    # Another run: its end is not that of the first, and what the first called its last stays.
    assert fitted(2, None) == 1
    assert sorted(path.name for path in (tmp_path / "shared").iterdir()) == [
        *("epoch=0-step=2.ckpt", "epoch=0-step=6.ckpt", "last-v1.ckpt", "last.ckpt"),
    ]
    capsys.readouterr()
    assert fitted(4, "auto") == 3
    assert "another run saved it" in capsys.readouterr().out


class Notes(Callback):
    """Notes the step at each batch's end."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps.append(trainer.global_step)


def ragged(root: str, samples: int) -> tuple[list[int], list[str]]:
    notes = Notes()
    saver = ModelCheckpoint(root, every_n_train_steps=1, save_top_k=-1)
    trainer = silent_trainer(
        devices=2, max_epochs=2, callbacks=[saver, notes], enable_checkpointing=True, default_root_dir=root
    )
    trainer.fit(Regressor(), loader(samples, 4))
    return notes.steps, sorted(path.name for path in Path(root).iterdir())


@pytest.mark.parametrize("samples", [1, 9])
def test_a_rank_without_data_saves_with_the_others(tmp_path: Path, samples: int) -> None:
    (first, names), (second, _) = run_on_ranks(2, ragged, str(tmp_path), samples)
    assert first == second == list(range(1, len(first) + 1))
    assert len([name for name in names if name.endswith(".ckpt")]) == len(first)


def told_on_resuming(root: Path, capsys: pytest.CaptureFixture[str], saved: Any, given: Any) -> str:
    saver = ModelCheckpoint(root, "middle", every_n_train_steps=5)
    silent_trainer(max_steps=5, callbacks=[saver], enable_checkpointing=True).fit(Regressor(), saved)
    capsys.readouterr()
    silent_trainer(max_steps=6).fit(Regressor(), given, ckpt_path=root / "middle.ckpt")
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("saved", "given", "said"),
    [
        ({}, {"count": 96}, "within an epoch of 64 samples, unshuffled; the data has 96 samples, unshuffled now"),
        ({}, {"shuffle": True}, "unshuffled; the data has 64 samples, shuffled now"),
        ({"shuffle": True}, {"batch_size": 2, "shuffle": True}, ""),
    ],
)
def test_resuming_within_an_epoch_of_other_data_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], saved: dict[str, Any], given: dict[str, Any], said: str
) -> None:
    told = told_on_resuming(tmp_path, capsys, loader(**saved), loader(**given))
    assert said in told
    assert ("The checkpoint was saved within" in told) == bool(said)
