"""DeepSpeed's ops: which ones a run needs, what is named before DeepSpeed builds them, and the type of device."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
from messages import refuses
from torch import nn

from phalanx.framework.core.errors import ConfigurationError, UnknownNameError
from phalanx.framework.distributed.world import World
from phalanx.framework.system import environment
from phalanx.framework.system.launcher_env import Placement
from phalanx.strategies.deepspeed import library, ops
from phalanx.strategies.deepspeed.arguments import resolve_options
from phalanx.strategies.deepspeed.engine import release_globals, use_local_device
from phalanx.strategies.deepspeed.flat_groups import Piece
from phalanx.strategies.deepspeed.library import require_deepspeed
from phalanx.strategies.deepspeed.ops import build_ops, check_build, missing_ops, needed_ops, op_folder
from phalanx.strategies.deepspeed.state_slots import filled_slots


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Move the folder of ops to a temporary one; create and return that of cpu_adam."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "ops"))
    folder = op_folder("cpu_adam")
    assert folder.is_relative_to(tmp_path / "ops")
    folder.mkdir(parents=True)
    return folder


# ---- building ------------------------------------------------------------------------------------------------------


class Builder:
    """Stands for DeepSpeed's, which takes half a minute."""

    def __init__(self, name: str) -> None:
        assert name == "CPUAdamBuilder"

    def load(self) -> None:
        """Build the op where torch builds extensions."""
        with open(Path(os.environ["TORCH_EXTENSIONS_DIR"], "cpu_adam", "cpu_adam.so"), "a") as file:
            file.write(os.environ["DS_ACCELERATOR"])


def test_a_missing_op_is_built_once_with_a_note(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(get_accelerator(), "create_op_builder", Builder)
    (folder / "lock").touch()
    monkeypatch.setattr(ops, "_LOADING_SECONDS", 0.1)
    for _ in range(2):
        build_ops(["cpu_adam"])
    assert (folder / "cpu_adam.so").read_text() == "cpu"
    assert missing_ops(["cpu_adam", "async_io"]) == ["async_io"]
    first, second, third = capsys.readouterr().err.splitlines()
    assert "builds cpu_adam" in first
    assert str(folder / "lock") in second
    # Of the op that is built, where no process holds it: DeepSpeed would wait for ever.
    assert f"{str(folder / 'lock')!r}: removed" in third
    assert not (folder / "lock").exists()


def test_an_unknown_op_is_refused() -> None:
    with refuses(UnknownNameError, "'cpu_adm'", "'cpu_adam'"):
        build_ops(["cpu_adm"])


def test_a_lock_left_by_a_killed_builder_is_named(folder: Path) -> None:
    lock = folder / "lock"
    lock.touch()
    check_build(["cpu_adam"])
    os.utime(lock, (0, 0))
    with pytest.raises(ConfigurationError, match="cpu_adam/lock"):
        check_build(["cpu_adam"])


@pytest.mark.parametrize("what", ["torch", "deepspeed", "processor", "CUDA", "installation"])
def test_an_op_built_for_something_else_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    (folder / "cpu_adam.so").touch()
    assert missing_ops(["cpu_adam"]) == []
    assert missing_ops(["cpu_adam"], "cuda") == ["cpu_adam"]
    if what == "torch":
        monkeypatch.setattr(torch, "__version__", "2.0.0")
    elif what == "deepspeed":
        monkeypatch.setattr(library, "version", lambda name: "0.19.9")
    elif what == "CUDA":
        monkeypatch.setattr(torch.version, "cuda", "12.9")
    elif what == "installation":
        # Of the same version, at the same place: its headers are newer than the op.
        monkeypatch.setattr(library, "_installation_time", lambda package: "2000000000")
    else:
        monkeypatch.setattr(library, "_processor", lambda: "another one")
    assert missing_ops(["cpu_adam"]) == ["cpu_adam"]


# ---- requirements --------------------------------------------------------------------------------------------------


def test_only_offloading_needs_ops(tmp_path: Path) -> None:
    assert needed_ops(resolve_options(stage=2)) == needed_ops(resolve_options(stage=3)) == []
    assert needed_ops(resolve_options(stage=2, offload_optimizer=True)) == ["cpu_adam"]
    nvme = resolve_options(stage=3, offload_optimizer="nvme", offload_parameters="nvme", nvme_path=tmp_path)
    assert needed_ops(nvme) == ["cpu_adam", "pin_memory", "async_io"]


def test_a_missing_compiler_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with refuses(ConfigurationError, "'no-such-compiler'", "g++"):
        check_build(["cpu_adam", "async_io"])
    (folder / "cpu_adam.so").touch()
    check_build(["cpu_adam"])


def test_library_environment_restores_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_THERE", "1")
    before = dict(os.environ)
    with environment.library_environment(PHALANX_THERE="2", PHALANX_NEW="3"):
        assert (os.environ["PHALANX_THERE"], os.environ["PHALANX_NEW"]) == ("2", "3")
        assert os.environ["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    assert dict(os.environ) == before


@pytest.mark.parametrize("found", ["0.19.7", "0.20.0"])
def test_an_unsupported_version_of_deepspeed_is_refused(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(library, "version", lambda name: found)
    with refuses(ConfigurationError, "strategy='zero2'", found):
        require_deepspeed("zero2")


@pytest.mark.parametrize("found", ["0.19.8", "0.19.12", "0.19.9+abc"])
def test_supported_versions_of_deepspeed_are_accepted(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(library, "version", lambda name: found)
    require_deepspeed("zero2")


def test_missing_deepspeed_is_reported_with_the_command_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(library, "version", missing)
    with refuses(ConfigurationError, "strategy='zero2'", "DeepSpeed"):
        require_deepspeed("zero2")


# ---- DeepSpeed's choice of a device --------------------------------------------------------------------------------

CHOOSES = """
import sys, torch
# A machine with a GPU, which the run does not use.
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
if sys.argv[1:]:
    import deepspeed
from phalanx.framework.core.errors import ConfigurationError
from phalanx.framework.distributed.world import World
from phalanx.strategies.deepspeed.engine import backend
try:
    with backend(World.single("cpu")):
        pass
except ConfigurationError as error:
    print(error)
except Exception:
    pass  # there is no process group
from deepspeed.accelerator import get_accelerator
print(get_accelerator().device_name())
"""


@pytest.mark.parametrize("imports_before", [False, True])
def test_deepspeed_uses_the_type_of_device_of_the_run(imports_before: bool) -> None:
    command = [sys.executable, "-c", CHOOSES, *(["before"] if imports_before else [])]
    variables = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=variables)
    *messages, chosen = done.stdout.strip().splitlines()
    assert chosen == ("cuda" if imports_before else "cpu")
    assert any("set DS_ACCELERATOR=cpu before the import" in line for line in messages) == imports_before


def test_forward_passes_of_stage_3_use_the_device_and_not_the_local_rank() -> None:
    from deepspeed.runtime.zero import utils

    world = World(Placement(rank=0, size=2, local_rank=0, local_size=2), torch.device("cuda", 3))
    use_local_device(world)
    assert utils.os.environ == {"LOCAL_RANK": "3"}
    release_globals()
    assert utils.os is os


@pytest.mark.parametrize(
    ("group", "device_type"),
    [({}, "cpu"), ({"fused": True}, "meta"), ({"capturable": True}, "meta"), ({"foreach": True}, "cpu")],
)
def test_a_restored_step_is_where_the_kernel_reads_it(group: dict[str, bool], device_type: str) -> None:
    # The meta device stands in for a GPU.
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adam([parameter])
    optimizer.param_groups[0].update(group)
    flat = torch.zeros(2, device="meta")
    piece = Piece(parameter, 0, 0, 2)
    filled = filled_slots([(piece, {"step": torch.tensor(3.0)})], flat, {}, optimizer)
    assert filled["step"].device.type == device_type
