"""Foreign checkpoints that attack whoever reads them: at worst they fail, and nothing of theirs is run."""

from __future__ import annotations

import builtins
import json
import os
import pickle
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refuses
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.serialization import safe_globals

from phalanx import checkpoint
from phalanx.framework.checkpoint.convert.pickle_reader import read_inert
from phalanx.framework.checkpoint.convert.placeholder_objects import allowed, as_plain
from phalanx.framework.checkpoint.convert.unpickle_process import Refused, unpickled
from phalanx.framework.core.errors import CheckpointError, ConfigurationError


class Calls:
    """Pickles as a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def payloads(marker: Path) -> dict[str, Any]:
    """Return objects that make ``marker`` when a pickle of them is run."""
    command = f"touch {marker}"
    return {
        "system": Calls(os.system, command),
        "popen": Calls(subprocess.Popen, ["touch", str(marker)]),
        "exec": Calls(builtins.exec, f"open({str(marker)!r}, 'w')"),
        "eval": Calls(builtins.eval, f"open({str(marker)!r}, 'w')"),
        "attribute": Calls(getattr, Path, "unlink"),
        "module": Calls(__import__, "os"),
        "nested": OrderedDict(a=[{"b": (Calls(os.system, command),)}]),
        "key": {Calls(os.system, command): 1},
        "load": Calls(torch.load, str(marker)),
    }


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
    if kind == "lightning":
        torch.save(lightning_content(extra), folder / "last.ckpt")
        return folder / "last.ckpt"
    if kind == "lightning-sharded":
        sharded(folder, None)
        torch.save(lightning_content(extra), folder / "meta.pt")
    elif kind == "lightning-deepspeed":
        (folder / "checkpoint").mkdir()
        torch.save(states(extra), folder / "checkpoint" / "mp_rank_00_model_states.pt")
    elif kind == "accelerate":
        torch.save({"weight": torch.zeros(2)}, folder / "pytorch_model.bin")
        torch.save({"state": {}, "param_groups": [], "extra": extra}, folder / "optimizer.bin")
    elif kind == "accelerate-sharded":
        sharded(folder / "pytorch_model_fsdp_0", None, top="model")
        torch.save(extra, folder / "pytorch_model_fsdp_0" / "__0_0.distcp")
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
        *("lightning", "lightning-sharded", "lightning-deepspeed"),
        *("accelerate", "accelerate-sharded", "accelerate-deepspeed", "deepspeed"),
    ],
)
def test_no_format_runs_what_a_pickle_names(kind: str, tmp_path: Path) -> None:
    marker, folder = tmp_path / "run", tmp_path / "source"
    folder.mkdir()
    source = hostile(kind, folder, payloads(marker)["nested"])

    with refuses(CheckpointError, str(source)):
        checkpoint.convert(source, tmp_path / "out", kind, note=lambda line: None)

    assert not marker.exists()
    assert sorted(os.listdir(tmp_path)) == ["source"]


@pytest.mark.parametrize("name", sorted(payloads(Path("marker"))))
@pytest.mark.parametrize("archive", [True, False], ids=["archive", "legacy"])
def test_no_payload_runs(name: str, archive: bool, tmp_path: Path) -> None:
    marker, file = tmp_path / "run", tmp_path / "file"
    torch.save({"x": payloads(marker)[name]}, file, _use_new_zipfile_serialization=archive)

    with safe_globals(allowed([])), file.open("rb") as opened, pytest.raises((Refused, pickle.UnpicklingError)):
        unpickled(opened, [])

    assert not marker.exists()


@pytest.mark.parametrize("name", sorted(payloads(Path("marker"))))
@pytest.mark.parametrize("protocol", [2, 4])
def test_an_inert_reader_calls_nothing(name: str, protocol: int, tmp_path: Path) -> None:
    marker = tmp_path / "run"

    # What it does not know it refuses.
    with suppress(ValueError):
        read_inert(pickle.dumps({"x": payloads(marker)[name]}, protocol))

    assert not marker.exists()


def test_the_index_of_a_sharded_folder_runs_nothing(tmp_path: Path) -> None:
    marker, folder = tmp_path / "run", tmp_path / "source"
    sharded(folder, payloads(marker)["system"])
    torch.save(lightning_content(None), folder / "meta.pt")

    with pytest.raises(CheckpointError):
        checkpoint.convert(folder, tmp_path / "out", note=lambda line: None)

    assert not marker.exists()


def test_a_class_that_is_left_out_is_never_looked_up(tmp_path: Path) -> None:
    class_in_pickle = nn.MSELoss()
    source = tmp_path / "last.ckpt"
    torch.save(lightning_content(class_in_pickle), source)

    with safe_globals(allowed([])), source.open("rb") as opened, refuses(Refused, "leave_out="):
        unpickled(opened, [])
    names = ["torch.nn.modules.loss.MSELoss"]
    left: list[str] = []
    with safe_globals(allowed(names)), source.open("rb") as opened:
        content = as_plain(unpickled(opened, names), "", left)

    assert "extra" not in content
    assert left == ["['extra'] (torch.nn.modules.loss.MSELoss)"]


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

    with refuses(CheckpointError, "__0_0.distcp'"):
        checkpoint.convert(folder, tmp_path / "out", note=lambda line: None)


@pytest.mark.parametrize("tag", ["../elsewhere", "/tmp", "..", "", "global_step1/../../elsewhere", "a\0b"])
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


# ---- the process ----------------------------------------------------------------------------------------------------

CONFINED = """
import os, socket, subprocess, sys, tempfile
from phalanx.framework.checkpoint.convert.sandbox import confine
confine(200 << 20, 60, 1 << 20)
def refused(function, *errors):
    try:
        function()
    except errors:
        return True
    return False
checks = {
    "memory": refused(lambda: bytearray(400 << 20), MemoryError),
    "file": refused(lambda: open(sys.argv[1], "wb").write(b"0" * (2 << 20)), OSError),
    "socket": refused(socket.socket, PermissionError),
    "program": refused(lambda: os.execv("/bin/true", ["true"]), PermissionError),
}
print(sorted(name for name, held in checks.items() if not held))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="calls are barred on Linux")
def test_the_process_is_confined(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CONFINED, str(tmp_path / "large")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_a_bomb_is_ended(tmp_path: Path) -> None:
    bomb: Any = "boom"
    for _ in range(40):
        bomb = [bomb] * 4
    torch.save(lightning_content(bomb), tmp_path / "last.ckpt")

    with pytest.raises(CheckpointError, match=r"longer than 4 seconds|memory|signal|too deep|nested"):
        checkpoint.convert(tmp_path / "last.ckpt", tmp_path / "out", timeout=4)

    assert os.listdir(tmp_path) == ["last.ckpt"]
