"""Foreign checkpoints run nothing of theirs unless the user trusts them, and reach no files but their own."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import pickle
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from messages import refuses
from torch import nn
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_saver import save

from phalanx import checkpoint
from phalanx.framework.checkpoint.convert.pickles import Pickles
from phalanx.framework.core.errors import CheckpointError, ConfigurationError


class Planted:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.marker,)


def lightning_content(extra: Any) -> dict[str, Any]:
    state = {"weight": torch.zeros(2, 2)}
    return {"pytorch-lightning_version": "2.6.0", "state_dict": state, "epoch": 0, "global_step": 1, "extra": extra}


def states(extra: Any) -> dict[str, Any]:
    return {"module": {"weight": torch.zeros(2)}, "param_shapes": [], "buffer_names": [], "extra": extra}


def sharded(folder: Path, extra: Any, file: str = "__0_0.distcp", top: str = "state_dict") -> None:
    """Write a folder as torch.distributed.checkpoint does, with ``extra`` in its index."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(torch.zeros(2), folder / "__0_0.distcp")
    length = (folder / "__0_0.distcp").stat().st_size
    name, size = f"{top}.weight", torch.Size([2])
    chunk = ChunkStorageMetadata(offsets=torch.Size([0]), sizes=size)
    metadata = Metadata(
        state_dict_metadata={name: TensorStorageMetadata(TensorProperties(), size, [chunk])},
        planner_data={name: (top, "weight"), **({"extra": extra} if extra is not None else {})},
        storage_data={MetadataIndex(name, torch.Size([0]), 0): _StorageInfo(file, 0, length)},
    )
    with (folder / ".metadata").open("wb") as target:
        pickle.dump(metadata, target)


def hostile(kind: str, folder: Path, extra: Any) -> Path:
    """Write a checkpoint of a format with ``extra`` in one of its pickles."""
    if kind.startswith("lightning-file"):
        archive = kind == "lightning-file"
        torch.save(lightning_content(extra), folder / "last.ckpt", _use_new_zipfile_serialization=archive)
        return folder / "last.ckpt"
    if kind == "lightning-sharded":
        sharded(folder, None)
        torch.save(lightning_content(extra), folder / "meta.pt")
    elif kind == "lightning-sharded-index":
        sharded(folder, extra)
        torch.save(lightning_content(None), folder / "meta.pt")
    elif kind == "lightning-deepspeed":
        (folder / "checkpoint").mkdir()
        torch.save(states(extra), folder / "checkpoint" / "mp_rank_00_model_states.pt")
    elif kind == "accelerate":
        torch.save({"weight": torch.zeros(2)}, folder / "pytorch_model.bin")
        torch.save({"state": {}, "param_groups": [], "extra": extra}, folder / "optimizer.bin")
    elif kind == "accelerate-sharded":
        save({"model": {"weight": torch.zeros(2), "extra": extra}}, checkpoint_id=folder / "pytorch_model_fsdp_0")
    elif kind == "accelerate-deepspeed":
        (folder / "pytorch_model").mkdir()
        torch.save(states(extra), folder / "pytorch_model" / "mp_rank_00_model_states.pt")
    else:
        (folder / "latest").write_text("global_step1")
        (folder / "global_step1").mkdir()
        torch.save(states(None), folder / "global_step1" / "mp_rank_00_model_states.pt")
        torch.save(
            {"optimizer_state_dict": extra}, folder / "global_step1" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
        )
    return folder


@pytest.mark.parametrize(
    "kind",
    [
        *("lightning-file", "lightning-file-legacy"),
        *("lightning-sharded", "lightning-sharded-index", "lightning-deepspeed"),
        *("accelerate", "accelerate-sharded", "accelerate-deepspeed", "deepspeed"),
    ],
)
def test_no_format_runs_what_a_pickle_names_unless_it_is_trusted(kind: str, tmp_path: Path) -> None:
    marker, folder = tmp_path / "run", tmp_path / "source"
    folder.mkdir()
    source = hostile(kind, folder, {"a": [{"b": (Planted(marker),)}]})

    with refuses(CheckpointError, str(source), "posix.mkdir", "trust=True"):
        checkpoint.convert(source, tmp_path / "out", note=lambda line: None)

    assert sorted(os.listdir(tmp_path)) == ["source"]

    try:
        checkpoint.convert(source, tmp_path / "out", trust=True, note=lambda line: None)
    except CheckpointError:
        # These hold no state of an optimizer, and that is seen after what they name has run.
        assert kind == "deepspeed"
    assert marker.exists()


def test_objects_of_a_class_are_left_out_or_trusted(tmp_path: Path) -> None:
    source, name = tmp_path / "last.ckpt", "torch.nn.modules.loss.MSELoss"
    hparams = {"lr": 0.1, "loss": nn.MSELoss(), "many": [nn.MSELoss(), 1]}
    torch.save({**lightning_content(None), "hyper_parameters": hparams}, source)

    with refuses(CheckpointError, name, "trust=True", "leave_out="):
        checkpoint.convert(source, tmp_path / "out")
    cases: tuple[tuple[str, dict[str, Any]], ...] = (("left out", {"leave_out": [name]}), ("trusted", {"trust": True}))
    for out, given in cases:
        notes: list[str] = []
        path = checkpoint.convert(source, tmp_path / out, note=notes.append, **given)
        content = checkpoint.load(path)
        assert (content["hparams"], content["unsaved_hparams"]) == ({"lr": 0.1, "many": [None, 1]}, ["loss"])
        assert f"left out: ['hyper_parameters']['loss'] ({name})" in notes
        assert f"left out: ['hyper_parameters']['many']['0'] ({name})" in notes


def test_harmless_classes_become_plain_values(tmp_path: Path) -> None:
    source = tmp_path / "last.ckpt"
    counts = defaultdict(int, a=2)
    hparams = {
        "namespace": argparse.Namespace(lr=0.1, sizes=[1, 2]),
        "counts": counts,
        "path": Path("data") / "train",
        "windows": pathlib.PureWindowsPath("data"),
        "scalar": numpy.float32(0.5),
        "time": datetime.timedelta(hours=1),
        "frozen": frozenset([3]),
    }
    arrays = {"big-endian": numpy.arange(3, dtype=">i4"), "fortran": numpy.asfortranarray([[1.0, 2.0], [3.0, 4.0]])}
    torch.save({**lightning_content(arrays), "hyper_parameters": hparams, "optimizer_states": []}, source)

    path = checkpoint.convert(source, tmp_path / "out", note=lambda line: None)

    expected = {**hparams, "namespace": {"lr": 0.1, "sizes": [1, 2]}, "counts": {"a": 2}}
    content = checkpoint.load(path)
    assert content["hparams"] == expected
    held = content["state"]["user"]["extra"]
    assert {name: array.tolist() for name, array in held.items()} == {
        name: array.tolist() for name, array in arrays.items()
    }
    assert held["big-endian"].dtype == numpy.int32


def test_arrays_of_objects_are_refused(tmp_path: Path) -> None:
    torch.save(lightning_content(numpy.array([{}], dtype=object)), tmp_path / "last.ckpt")
    with refuses(CheckpointError, "last.ckpt", "'O8'"):
        checkpoint.convert(tmp_path / "last.ckpt", tmp_path / "out")


# ---- folders --------------------------------------------------------------------------------------------------------


def outside(folder: Path) -> Path:
    """Put a good shard beside a folder, which nothing in it may reach."""
    path = folder.parent / "__0_0.distcp"
    torch.save(torch.ones(2), path)
    return path


def test_paths_that_lead_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "source"
    outside(folder)
    sharded(folder, None, file="../__0_0.distcp")
    outside(folder)
    torch.save(lightning_content(None), folder / "meta.pt")

    with refuses(CheckpointError, "'../__0_0.distcp'"):
        checkpoint.convert(folder, tmp_path / "out", note=lambda line: None)


def test_shards_that_are_links_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "source"
    sharded(folder, None)
    (folder / "__0_0.distcp").unlink()
    (folder / "__0_0.distcp").symlink_to(outside(folder))
    torch.save(lightning_content(None), folder / "meta.pt")

    with refuses(CheckpointError, "__0_0.distcp is a link"):
        checkpoint.convert(folder, tmp_path / "out", note=lambda line: None)


@pytest.mark.parametrize("tag", ["../elsewhere", "", "global_step2"])
def test_latest_names_a_folder_of_its_own_only(tag: str, tmp_path: Path) -> None:
    source, elsewhere = tmp_path / "source", tmp_path / "elsewhere"
    for folder in (source / "global_step1", elsewhere):
        folder.mkdir(parents=True)
        torch.save(states(None), folder / "mp_rank_00_model_states.pt")
    (source / "latest").write_text(tag)

    with refuses(CheckpointError, "latest", "global_step1"):
        checkpoint.convert(source, tmp_path / "out", note=lambda line: None)


def test_an_index_of_weights_names_files_of_the_folder_only(tmp_path: Path) -> None:
    torch.save({"state": {}, "param_groups": []}, tmp_path / "optimizer.bin")
    index = {"weight_map": {"weight": "../model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "optimizer.bin").unlink()

    with refuses(CheckpointError, "'../model.safetensors'"):
        checkpoint.convert(tmp_path, tmp_path / "out", note=lambda line: None)


def test_links_and_pipes_are_not_taken_for_files(tmp_path: Path) -> None:
    torch.save(lightning_content(None), tmp_path / "elsewhere")
    folder = tmp_path / "source"
    sharded(folder, None)
    (folder / "meta.pt").symlink_to(tmp_path / "elsewhere")
    with refuses(CheckpointError, "meta.pt", "'lightning-sharded'"):
        checkpoint.convert(folder, tmp_path / "out")
    os.mkfifo(tmp_path / "pipe.ckpt")
    with refuses(CheckpointError, "pipe.ckpt"):
        checkpoint.convert(tmp_path / "pipe.ckpt", tmp_path / "out")


def test_unknown_mixed_and_existing_folders_are_refused(tmp_path: Path) -> None:
    empty, mixed = tmp_path / "empty", tmp_path / "mixed"
    empty.mkdir()
    mixed.mkdir()
    hostile("deepspeed", mixed, None)
    torch.save({}, mixed / "pytorch_model.bin")
    with refuses(CheckpointError, "empty"):
        checkpoint.convert(empty, tmp_path / "out")
    with refuses(CheckpointError, "mixed", "format="):
        checkpoint.convert(mixed, tmp_path / "out")
    with refuses(ConfigurationError, "format='deepsped'", "'deepspeed'"):
        checkpoint.convert(mixed, tmp_path / "out", "deepsped")
    with refuses(CheckpointError, "mixed", "'lightning-sharded'", "'accelerate'"):
        checkpoint.convert(mixed, tmp_path / "out", "lightning-sharded")
    with refuses(ConfigurationError, "empty'"):
        checkpoint.convert(mixed, empty, "deepspeed")
    with refuses(CheckpointError, "nowhere"):
        checkpoint.convert(tmp_path / "nowhere", tmp_path / "out")


def test_of_getattr_only_members_of_enumerations_are_read(tmp_path: Path) -> None:
    # As Python 3.11 before 3.11.4 pickles them.
    module, name = metadata._MEM_FORMAT_ENCODING.__module__, metadata._MEM_FORMAT_ENCODING.__name__
    index = tmp_path / ".metadata"
    index.write_bytes(f"cbuiltins\ngetattr\n(c{module}\n{name}\nVTORCH_CONTIGUOUS_FORMAT\ntR.".encode())
    assert Pickles(False, []).index(index) is metadata._MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    for kind, attribute in ((f"{module}\n{name}", "__members__"), ("torch\nSize", "count")):
        index.write_bytes(f"cbuiltins\ngetattr\n(c{kind}\nV{attribute}\ntR.".encode())
        with refuses(CheckpointError, "builtins.getattr"):
            Pickles(False, []).index(index)
