"""``Trainer.export``: the weights alone, under every strategy, in a hook and afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refuses
from models import Regressor, loader, silent_trainer
from ranks import run_on_ranks
from safetensors.torch import load_file
from torch import Tensor, nn

from phalanx import Trainer
from phalanx.callbacks import Callback
from phalanx.framework.core.errors import ConfigurationError


class Tied(Regressor):
    """Odd sizes, a buffer, and two names for one tensor."""

    def __init__(self) -> None:
        super().__init__(optimizer="adamw")
        self.body = nn.Linear(6, 6, bias=False)
        self.again = self.body
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.net(self.norm(self.again(x)))
        return output


class Exports(Callback):
    """Exports in mid-training, in an accumulation window too, and at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            trainer.export(self.folder / "middle.safetensors")

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        trainer.export(self.folder / "end", max_shard_size="200B")


def fitted(folder: str, strategy: str, ranks: int) -> dict[str, Tensor]:
    """Train three updates of two micro-batches; return rank 0's weights afterwards."""
    torch.manual_seed(0)
    module = Tied()
    trainer = silent_trainer(
        strategy=strategy,
        devices=ranks,
        max_steps=3,
        accumulate_grad_batches=2,
        callbacks=[Exports(Path(folder))],
        default_root_dir=folder,
    )
    trainer.fit(module, loader(64))
    trainer.export(Path(folder) / "after.safetensors")
    with refuses(ConfigurationError, "dtype='bf17'", "'bf16'"):
        trainer.export(Path(folder) / "x", dtype="bf17")
    return {name: tensor.clone() for name, tensor in module.state_dict().items()} if trainer.is_global_zero else {}


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("fsdp", 2), ("zero2", 2), ("zero3", 2), ("zero3", 1)])
def test_what_is_exported_is_the_model(tmp_path: Path, strategy: str, ranks: int) -> None:
    expected = run_on_ranks(ranks, fitted, str(tmp_path), strategy, ranks)[0]

    after, end = load_file(tmp_path / "after.safetensors"), tmp_path / "end"
    index = json.loads((end / "model.safetensors.index.json").read_text())
    files = {name: load_file(end / name) for name in set(index["weight_map"].values())}
    sharded = {name: files[file][name] for name, file in index["weight_map"].items()}
    assert set(after) == set(sharded) == set(expected)
    assert len(files) > 2
    for name, tensor in expected.items():
        assert torch.equal(after[name], tensor), name
        assert torch.equal(sharded[name], tensor), name
    middle = load_file(tmp_path / "middle.safetensors")
    assert set(middle) == set(expected)
    assert middle["net.0.weight"].dtype == torch.float32
    assert not torch.equal(middle["net.0.weight"], expected["net.0.weight"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["after.safetensors", "end", "middle.safetensors"]


def test_a_run_that_is_repeated_replaces_what_it_exported(tmp_path: Path) -> None:
    trainer, module = silent_trainer(max_steps=1, default_root_dir=tmp_path), Tied()
    trainer.fit(module, loader(8))
    shards = tmp_path / "shards"
    for value in (1.0, 2.0):
        with torch.no_grad():
            module.state_dict()["net.0.weight"].fill_(value)
        trainer.export(tmp_path / "one.safetensors")
        trainer.export(shards, max_shard_size="200B" if value == 1.0 else "1KB")
    assert load_file(tmp_path / "one.safetensors")["net.0.weight"].unique().item() == 2.0
    home = json.loads((shards / "model.safetensors.index.json").read_text())["weight_map"]
    assert load_file(shards / home["net.0.weight"])["net.0.weight"].unique().item() == 2.0
    assert {path.name for path in shards.iterdir()} == {"model.safetensors.index.json", *home.values()}
    (shards / "notes.txt").write_text("mine")
    with refuses(ConfigurationError, "shards"):
        trainer.export(shards, max_shard_size="200B")


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    trainer = silent_trainer(max_steps=1, default_root_dir=tmp_path)
    with refuses(ConfigurationError, "export"):
        trainer.export(tmp_path / "a.safetensors")
    module = Tied()
    trainer.fit(module, loader(8))
    assert trainer.export(tmp_path / "half.safetensors", dtype="bf16") == tmp_path / "half.safetensors"
    found = load_file(tmp_path / "half.safetensors")
    assert torch.equal(found["net.0.weight"], module.state_dict()["net.0.weight"].bfloat16())
    assert found["norm.num_batches_tracked"].dtype == torch.int64
    (tmp_path / "notes.txt").write_text("mine")
    with refuses(ConfigurationError, "notes.txt"):
        trainer.export(tmp_path / "notes.txt")
    (tmp_path / "notes.txt").unlink()
    with torch.no_grad():
        module.state_dict()["net.0.weight"][0, 0] = 1e6
    with refuses(ConfigurationError, "'net.0.weight'", "1e+06"):
        trainer.export(tmp_path / "narrow.safetensors", dtype="float16")
    module.to("meta")
    with refuses(ConfigurationError, "'net.0.weight'"):
        trainer.export(tmp_path / "meta.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["half.safetensors"]
