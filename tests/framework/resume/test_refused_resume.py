"""A damaged checkpoint is never resumed from: an explicit path is refused on all ranks, ``"auto"`` falls back."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile import rewrite
from messages import refuses
from models import Regressor, loader, silent_trainer, weights_of
from ranks import run_on_ranks
from small_fits import Tiny, loader as rows, quiet_trainer

from phalanx import Fabric
from phalanx.callbacks import Callback, LambdaCallback, ModelCheckpoint
from phalanx.framework.core.errors import CheckpointError, ConfigurationError


class KeepsAll(ModelCheckpoint):
    """A checkpoint for each update."""

    def __init__(self) -> None:
        super().__init__(every_n_train_steps=1, save_top_k=-1, filename="{step}")


class WeightsAlone(Callback):
    """Saves weights beside the others, as the furthest of all."""

    def on_train_end(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(trainer.checkpoint_dir / "weights.ckpt", weights_only=True)


def fit(root: str, ranks: int, strategy: str, steps: int, ckpt_path: Any = "auto") -> tuple[list[float], list[str]]:
    """Train to a number of updates; return the weights and what was said."""
    torch.manual_seed(2)
    module, said = Regressor(), list[str]()
    trainer = silent_trainer(
        devices=ranks,
        strategy=strategy,
        max_steps=steps,
        default_root_dir=root,
        callbacks=[KeepsAll(), WeightsAlone()],
        enable_checkpointing=True,
    )
    trainer.note = said.append  # type: ignore[method-assign, assignment]
    trainer.fit(module, loader(64), ckpt_path=ckpt_path)
    return weights_of(module).tolist() if trainer.is_global_zero else [], said


def folder_of(root: Path) -> Path:
    return root / "phalanx_logs" / "version_0" / "checkpoints"


def flip(file: Path, offset: int) -> None:
    data = bytearray(file.read_bytes())
    data[offset] ^= 4
    # A file of its own: checkpoints may share theirs by hard links.
    file.unlink()
    file.write_bytes(data)


def refused(root: str, path: str) -> tuple[str, bool]:
    """Try to resume on this rank; return the message, and whether the module is untouched."""
    torch.manual_seed(2)
    module = Regressor()
    before = weights_of(module)
    trainer = silent_trainer(devices=2, strategy="fsdp", max_steps=9, default_root_dir=root)
    with pytest.raises(CheckpointError) as info:
        trainer.fit(module, loader(64), ckpt_path=path)
    return str(info.value), all(parameter.is_meta for parameter in module.parameters()) or bool(
        (weights_of(module) == before).all()
    )


@pytest.mark.parametrize(("rank", "section"), [(0, "optimizer"), (1, "model")])
def test_all_ranks_refuse_what_one_of_them_would_read(tmp_path: Path, rank: int, section: str) -> None:
    run_on_ranks(2, fit, str(tmp_path), 2, "fsdp", 2)
    path = folder_of(tmp_path) / "step=2.ckpt"
    file = path / f"{section}-{rank:05d}.safetensors"
    flip(file, -3)

    (first, untouched), (second, also) = run_on_ranks(2, refused, str(tmp_path / "other"), str(path))
    assert first == second
    assert f"'{file}' does not match its checksum" in first
    assert "is refused: tensor '" in first
    assert "ckpt_path='auto'" in first
    assert untouched
    assert also


def test_auto_goes_back_to_the_newest_good_one_and_says_why(tmp_path: Path) -> None:
    expected, _ = run_on_ranks(2, fit, str(tmp_path / "whole"), 2, "fsdp", 6)[0]
    run_on_ranks(2, fit, str(tmp_path), 2, "fsdp", 5)
    folder = folder_of(tmp_path)
    flip(folder / "step=5.ckpt" / "model-00001.safetensors", -3)
    flip(folder / "step=4.ckpt" / "manifest.json", 500)
    (folder / "step=3.ckpt" / "optimizer-00000.safetensors").unlink()
    saved_by_fabric(folder / "fabric.ckpt")
    shutil.copytree(folder / "step=1.ckpt", folder / "zero.ckpt", copy_function=shutil.copyfile)

    (found, said), _ = run_on_ranks(2, fit, str(tmp_path), 2, "fsdp", 6)
    assert found == expected
    skipped = {line.split()[1].rstrip(":"): line for line in said if line.startswith("Skipped ")}
    words = {
        "step=5.ckpt": "does not match its checksum",
        "step=4.ckpt": "manifest does not match its checksum",
        "step=3.ckpt": "optimizer-00000.safetensors' cannot be read",
        "weights.ckpt": "it holds only weights",
        "fabric.ckpt": "it was saved by Fabric",
    }
    assert set(skipped) == set(words)
    assert [name for name, text in words.items() if text not in skipped[name]] == []


def saved_by_fabric(path: Path) -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(torch.nn.Linear(2, 2), torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))
    fabric.save(path, {"model": model, "optimizer": optimizer, "step": 99})
    rewrite(path, lambda fields: fields["document"]["progress"].update(global_step=99))


@pytest.mark.parametrize("kind", ["weights", "fabric"])
def test_a_path_to_what_holds_no_training_is_refused_with_a_next_step(tmp_path: Path, kind: str) -> None:
    fit(str(tmp_path), 1, "single", 1)
    path = folder_of(tmp_path) / "weights.ckpt"
    if kind == "fabric":
        path = tmp_path / "fabric.ckpt"
        saved_by_fabric(path)
    with refuses(CheckpointError, "ckpt_path=", {"weights": "load_from_checkpoint", "fabric": "fabric.load"}[kind]):
        fit(str(tmp_path), 1, "single", 2, ckpt_path=path)


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        ({"max_epochs": 1, "max_steps": -1}, "max_epochs=1"),
        ({"max_epochs": -1, "max_steps": 5}, "max_steps=5"),
    ],
)
def test_a_limit_that_was_exceeded_is_refused(tmp_path: Path, limits: dict[str, int], name: str) -> None:
    saver = LambdaCallback(on_train_end=lambda trainer, _: trainer.save_checkpoint(tmp_path / "a.ckpt"))
    quiet_trainer(tmp_path, saver, max_epochs=2).fit(Tiny(), rows())
    module = Tiny()
    weight = module.layer.weight.detach().clone()
    with refuses(CheckpointError, name):
        quiet_trainer(tmp_path, [], **limits).fit(module, rows(), ckpt_path=tmp_path / "a.ckpt")
    # The limits are checked before anything is loaded.
    assert torch.equal(module.layer.weight, weight)
    # One that is just reached has nothing left to do.
    quiet_trainer(tmp_path, [], max_epochs=2).fit(Tiny(), rows(), ckpt_path=tmp_path / "a.ckpt")


def test_a_path_may_begin_at_home_and_may_not_be_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    saver = LambdaCallback(on_train_end=lambda trainer, _: trainer.save_checkpoint("~/a.ckpt"))
    quiet_trainer(tmp_path, saver, max_epochs=1).fit(Tiny(), rows())
    assert (tmp_path / "a.ckpt").is_dir()
    quiet_trainer(tmp_path, [], max_epochs=2).fit(Tiny(), rows(), ckpt_path="~/a.ckpt")
    assert Tiny.load_from_checkpoint("~/a.ckpt").layer.weight.shape == (1, 4)
    with refuses(CheckpointError, "average='ema'"):
        Tiny.load_from_checkpoint("~/a.ckpt", average="ema")
    with refuses(ConfigurationError, "ckpt_path=''"):
        quiet_trainer(tmp_path, []).fit(Tiny(), rows(), ckpt_path="")
