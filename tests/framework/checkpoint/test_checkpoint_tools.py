"""``inspect``, ``checkpoints``, ``diff`` and ``consolidate``: what a user does with checkpoints on a disk."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from messages import refuses
from models import Regressor, loader, silent_trainer
from ranks import run_on_ranks, run_script
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from phalanx import checkpoint
from phalanx.callbacks import ModelCheckpoint
from phalanx.framework.checkpoint import safetensors_export as plain_files
from phalanx.framework.checkpoint.write_plan import CheckpointContents, Shard
from phalanx.framework.core.errors import CheckpointError, ConfigurationError
from phalanx.framework.distributed.world import World


def saved(path: Path, model: dict[str, Tensor], document: Any = None, **sections: dict[str, Tensor]) -> Path:
    content = {"model": model, **sections}
    shards = {name: {key: Shard.whole(tensor) for key, tensor in each.items()} for name, each in content.items()}
    return checkpoint.save(path, CheckpointContents(shards, document or {}), World.single())


def fit(root: str, strategy: str, ranks: int, precision: str = "32-true") -> None:
    """Train two epochs, with a checkpoint of each."""
    torch.manual_seed(1)

    class Logs(Regressor):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss)
            return loss

    trainer = silent_trainer(
        strategy=strategy,
        devices=ranks,
        precision=precision,
        max_epochs=2,
        default_root_dir=root,
        callbacks=[ModelCheckpoint(monitor="loss", save_top_k=-1, filename="{epoch}")],
        enable_checkpointing=True,
    )
    trainer.fit(Logs(lr=0.125), loader(16))


def folder_of(root: Path) -> Path:
    return root / "phalanx_logs" / "version_0" / "checkpoints"


# ---- inspect and checkpoints --------------------------------------------------------------------------------------


def test_inspect_describes_the_checkpoint_of_a_fit(tmp_path: Path) -> None:
    run_on_ranks(2, fit, str(tmp_path), "fsdp", 2, "bf16-mixed")
    path = folder_of(tmp_path) / "epoch=1.ckpt"
    told = checkpoint.inspect(path)

    assert (told.kind, told.strategy, told.precision, told.world_size) == ("trainer", "fsdp", "bf16-mixed", 2)
    assert told.sharded
    assert (told.epoch, told.step, told.finite, told.nonfinite) == (1, 4, True, None)
    expected = sum(parameter.numel() for parameter in Regressor().parameters())
    model = told.sections["model"]
    assert (model.tensors, model.tied, model.elements, model.bytes) == (4, 0, expected, 4 * expected)
    assert model.bytes_by_dtype == {"F32": 4 * expected}
    assert told.sections["optimizer"].elements == 2 * expected
    (optimizer,) = told.optimizers
    assert (optimizer.kind, optimizer.groups[0]["parameters"], optimizer.groups[0]["lr"]) == ("AdamW", 4, 0.125)
    assert told.hparams == {"lr": 0.125, "dropout": 0.0, "optimizer": "adamw"}
    assert set(told.metrics) == {"loss"}
    assert told.files == {file.name: file.stat().st_size for file in path.glob("*.safetensors")}
    assert told.bytes == sum(told.files.values())
    assert told.format_version == 3


def test_inspect_copes_with_what_is_not_recorded(tmp_path: Path) -> None:
    tied = torch.ones(2, dtype=torch.int64)
    told = checkpoint.inspect(saved(tmp_path / "a.ckpt", {"w": tied, "v": tied, "x": torch.ones(3).half()}, [1]))
    assert (told.kind, told.strategy, told.step, told.hparams, told.optimizers) == ("other", None, None, {}, [])
    assert (told.sections["model"].tensors, told.sections["model"].tied) == (2, 1)
    assert told.sections["model"].bytes_by_dtype == {"I64": 16, "F16": 6}
    nan = checkpoint.inspect(saved(tmp_path / "b.ckpt", {"w": torch.tensor([float("nan")])}))
    assert (nan.finite, nan.nonfinite) == (False, "w")


def test_checkpoints_are_listed_by_progress(tmp_path: Path) -> None:
    fit(str(tmp_path), "single", 1)
    folder = folder_of(tmp_path)
    file = folder / "epoch=0.ckpt" / "optimizer-00000.safetensors"
    data = bytearray(file.read_bytes())
    (folder / "link.ckpt").symlink_to(folder / "epoch=1.ckpt")
    (folder / "half.ckpt").mkdir()
    (folder / f".epoch=2.ckpt.{'0' * 16}.tmp").mkdir()
    (folder / "foreign.ckpt").write_bytes(b"a file")

    cheap = checkpoint.checkpoints(folder)
    assert [(one.path.name, one.status, one.step, one.epoch) for one in cheap] == [
        ("half.ckpt", "damaged", None, None),
        ("epoch=0.ckpt", "complete", 4, 0),
        ("epoch=1.ckpt", "complete", 8, 1),
    ]
    newest = cheap[-1]
    assert newest.metric is not None
    assert newest.metric[0] == "loss"
    assert newest.bytes == sum(file.stat().st_size for file in newest.path.iterdir())
    assert "manifest.json" in str(cheap[0].problem)

    data[-1] ^= 1
    file.unlink()
    file.write_bytes(data)
    assert [one.status for one in checkpoint.checkpoints(folder)] == ["damaged", "complete", "complete"]
    thorough = checkpoint.checkpoints(folder, verify=True)
    assert [one.status for one in thorough] == ["damaged", "damaged", "good"]
    assert "does not match its checksum" in str(thorough[1].problem)


def test_what_cannot_be_listed_gets_a_sentence(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.ckpt", {"w": torch.ones(1)})
    for given in (path, tmp_path / "no"):
        with refuses(CheckpointError, str(given)):
            checkpoint.checkpoints(given)
    with refuses(CheckpointError, "'a.ckpt'"):
        checkpoint.inspect(tmp_path / "b.ckpt")
    with refuses(CheckpointError, "x" * 50):
        checkpoint.inspect(tmp_path / ("x" * 300))


# ---- diff ---------------------------------------------------------------------------------------------------------


def test_the_same_state_is_equal_however_it_is_split(tmp_path: Path) -> None:
    run_on_ranks(2, save_split, str(tmp_path))
    paths = sorted(tmp_path.iterdir())
    assert len(paths) == 3
    assert len({len(list(path.iterdir())) for path in paths}) == 2
    for path in paths[1:]:
        found = checkpoint.diff(paths[0], path)
        assert found.equal
        assert found.sections["model"].same == 3


def save_split(folder: str) -> None:
    world = World.from_environment("cpu")
    whole = {"a": torch.arange(24.0).reshape(4, 6), "b": torch.arange(10), "c": torch.ones(()).bfloat16()}
    first, last = world.rank * 2, world.rank * 3
    rows = Shard(whole["a"][first : first + 2], (4, 6), (first, 0))
    columns = Shard(whole["a"][:, last : last + 3].contiguous(), (4, 6), (0, last))
    for name, part in (("rows", rows), ("columns", columns), ("whole", Shard.whole(whole["a"]))):
        model = {**{key: Shard.whole(tensor) for key, tensor in whole.items()}, "a": part}
        snapshot = CheckpointContents({"model": model}, {"x": 1}, 0)
        checkpoint.save(Path(folder) / name, snapshot, world, sharded=name != "whole")
    world.close()


def test_differences_are_listed(tmp_path: Path) -> None:
    nan = float("nan")
    one = saved(
        tmp_path / "a.ckpt",
        {
            "same": torch.tensor([1.0, nan, -0.0]),
            "values": torch.arange(5_000_000, dtype=torch.float32),
            "shape": torch.ones(2, 3),
            "dtype": torch.tensor([1.0, 2.0]),
            "nan": torch.tensor([nan, 1.0]),
            "large": torch.tensor([1 << 60, 5]),
            "gone": torch.ones(1),
        },
        {"lr": 1, "list": [1, 2, {"a": None}], "kept": True},
    )
    values = torch.arange(5_000_000, dtype=torch.float32)
    values[3] += 2
    values[4_999_999] -= 0.5
    other = saved(
        tmp_path / "b.ckpt",
        {
            "same": torch.tensor([1.0, nan, 0.0]),
            "values": values,
            "shape": torch.ones(3, 2),
            "dtype": torch.tensor([1.0, 2.5]).half(),
            "nan": torch.tensor([1.0, 1.0]),
            "large": torch.tensor([(1 << 60) + 1, 5]),
            "new": torch.ones(1),
        },
        {"lr": 1.0, "list": [1, 2, {"a": 0, "b": 1}], "more": "x"},
        averages={"ema/w": torch.ones(1)},
    )
    found = checkpoint.diff(one, other)
    model = found.sections["model"]

    assert not found.equal
    assert (model.only_in_first, model.only_in_second, model.same) == (["gone"], ["new"], 1)
    assert model.shapes == {"shape": ([2, 3], [3, 2])}
    assert model.dtypes == {"dtype": ("float32", "float16")}
    told = {name: (value.different, value.max_abs) for name, value in model.values.items()}
    assert told == {"values": (2, 2.0), "dtype": (1, 0.5), "nan": (1, float("inf")), "large": (1, 0.0)}
    assert found.sections["averages"].only_in_second == ["ema/w"]
    assert set(found.documents) == {
        ("document/lr", "1", "1.0"),
        ("document/list/2/a", "null", "0"),
        ("document/list/2/b", "(not there)", "1"),
        ("document/kept", "true", "(not there)"),
        ("document/more", "(not there)", '"x"'),
    }
    assert checkpoint.diff(one, one).equal


# ---- consolidate --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        *((name, torch.bfloat16) for name in ("BF16", "torch.bfloat16", torch.bfloat16)),
        *(("half", torch.float16), (16, torch.float16), ("float64", torch.float64), (None, torch.float32)),
    ],
    ids=str,
)
def test_consolidate_writes_in_a_dtype(tmp_path: Path, given: Any, dtype: torch.dtype) -> None:
    weight, count = torch.randn(7, 5), torch.tensor(3)
    path = saved(tmp_path / "a.ckpt", {"weight": weight, "count": count, "mask": torch.tensor([True])})
    found = load_file(checkpoint.consolidate(path, tmp_path / "out.safetensors", dtype=given))
    assert torch.equal(found["weight"], weight.to(dtype))
    assert (found["weight"].dtype, found["count"].dtype, found["mask"].dtype) == (dtype, torch.int64, torch.bool)


def test_a_number_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.ckpt", {"w": torch.tensor([1.0, float("inf"), 7e4])})
    with refuses(ConfigurationError, "'w'", "torch.float16"):
        checkpoint.consolidate(path, tmp_path / "out.safetensors", dtype="float16")
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt"]
    # An infinity that was saved, as masks have, is one afterwards.
    found = load_file(checkpoint.consolidate(path, tmp_path / "out.safetensors", dtype="bf16"))
    assert found["w"].tolist()[1] == float("inf")


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"dtype": "bflaot16"}, "'bfloat16'"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"section": "modle"}, "'model'"),
        ({"section": "averages/emma"}, "'averages/ema'"),
    ],
)
def test_wrong_arguments_get_a_sentence(tmp_path: Path, arguments: dict[str, Any], name: str) -> None:
    path = saved(tmp_path / "a.ckpt", {"w": torch.ones(1)}, averages={"ema/w": torch.ones(1)})
    with refuses(ConfigurationError, name):
        checkpoint.consolidate(path, tmp_path / "out", **arguments)
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt"]


def test_averages_are_consolidated_under_the_models_names(tmp_path: Path) -> None:
    sections = {"averages": {"ema/w": torch.full((2,), 5.0), "swa/w": torch.zeros(2)}}
    path = saved(tmp_path / "a.ckpt", {"w": torch.ones(2)}, **sections)
    (tmp_path / "out").mkdir()
    out = checkpoint.consolidate(path, tmp_path / "out", section="averages/ema")
    assert out.name == "model.safetensors"
    assert {name: tensor.tolist() for name, tensor in load_file(out).items()} == {"w": [5.0, 5.0]}
    assert set(load_file(checkpoint.consolidate(path, tmp_path / "all.st", section="averages"))) == {"ema/w", "swa/w"}


def split(folder: str) -> None:
    world = World.from_environment("cpu")
    whole, shape = torch.arange(120, dtype=torch.float32).reshape(3, 5, 8), (3, 5, 8)
    bounds = (((0, 2), (2, 3)), ((0, 2), (2, 5)), ((0, 4), (4, 8)), ((0, 47), (47, 120)))
    row, middle, column, flat = (each[world.rank] for each in bounds)
    shards = {
        "rows": Shard(whole[slice(*row)], shape, (row[0], 0, 0)),
        "middle": Shard(whole[:, slice(*middle)].contiguous(), shape, (0, middle[0], 0)),
        "columns": Shard(whole[:, :, slice(*column)].contiguous(), shape, (0, 0, column[0])),
        "flat": Shard.flat(whole.reshape(-1)[slice(*flat)], shape, flat[0]),
    }
    checkpoint.save(Path(folder) / "a.ckpt", CheckpointContents({"model": shards}), world, sharded=True)
    world.close()


def test_slices_of_any_length_put_split_tensors_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_on_ranks(2, split, str(tmp_path))
    whole = torch.arange(3 * 5 * 8, dtype=torch.float32).reshape(3, 5, 8)
    for slice_bytes in (4, 28, 52, 160, 164, 1 << 20):
        monkeypatch.setattr(plain_files, "SLICE_BYTES", slice_bytes)
        found = load_file(checkpoint.consolidate(tmp_path / "a.ckpt", tmp_path / f"out-{slice_bytes}"))
        assert sorted(found) == ["columns", "flat", "middle", "rows"]
        for name, tensor in found.items():
            assert torch.equal(tensor, whole), f"{name} in slices of {slice_bytes} bytes"


BOUNDED = """
import json, sys
from pathlib import Path
import torch
from phalanx import checkpoint

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

torch.ones(8).bfloat16().isfinite().all()
checkpoint.consolidate(sys.argv[1], sys.argv[3], dtype="bf16")
Path("/proc/self/clear_refs").write_text("5")
before = peak()
checkpoint.consolidate(sys.argv[2], sys.argv[3] + ".large", dtype="bf16")
print("PEAK", peak() - before)
"""


def test_a_tensor_far_larger_than_what_is_held_at_once_is_consolidated(tmp_path: Path) -> None:
    # One row, so that no slice along the first dim would do; 200 MB, of which 8 MB and their conversion are held.
    size = 50_000_000
    small, large = saved(tmp_path / "s.ckpt", {"w": torch.ones(4)}), tmp_path / "l.ckpt"
    saved(large, {"w": (torch.arange(size, dtype=torch.int32) % 256).float().reshape(1, size)})
    done = run_script(BOUNDED, str(small), str(large), str(tmp_path / "out.safetensors"))
    held = int(done.stdout.split("PEAK")[1])
    # The result takes 100 MB. Pages of libraries that are used for the first time count too: up to 90 MB in all were
    # measured with Python 3.10 and torch's build for CUDA.
    assert held < 100_000_000, done.stdout
    with safe_open(tmp_path / "out.safetensors.large", "pt") as file:
        part = file.get_slice("w")
        assert part.get_shape() == [1, size]
        for start in (0, 33_333_248, size - 256):
            expected = torch.from_numpy(np.arange(start, start + 256) % 256).bfloat16()
            assert torch.equal(part[0:1, start : start + 256][0], expected)


def test_the_index_is_that_of_hugging_face(tmp_path: Path) -> None:
    model = {str(index): torch.full((250,), float(index)) for index in range(7)}
    out = checkpoint.consolidate(saved(tmp_path / "a.ckpt", model), tmp_path / "out", "1.25KB", dtype="bf16")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 3500
    assert set(index["weight_map"].values()) == {f"model-0000{number}-of-00004.safetensors" for number in range(1, 5)}
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(out / file)[name], model[name].bfloat16())
    for size in ("big", 0, "5XB", -1):
        with refuses(ConfigurationError, "max_shard_size"):
            checkpoint.consolidate(tmp_path / "a.ckpt", tmp_path / "other", size)
