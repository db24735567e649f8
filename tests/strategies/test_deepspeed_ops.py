"""Building ops: once, by one process, with errors shown. Files and processes are real."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
from messages import refuses
from torch import nn
from torch.utils import cpp_extension

from phalanx.framework.core.errors import ConfigurationError, UnknownNameError
from phalanx.framework.distributed.world import World
from phalanx.framework.system import environment
from phalanx.framework.system.launcher_env import Placement
from phalanx.strategies.deepspeed import ops
from phalanx.strategies.deepspeed.arguments import resolve_options
from phalanx.strategies.deepspeed.engine import release_globals, use_local_device
from phalanx.strategies.deepspeed.ops import (
    check_toolchain,
    ensure_ops,
    missing_ops,
    missing_tools,
    needed_ops,
    op_folder,
    require_deepspeed,
)
from phalanx.strategies.deepspeed.pieces import Piece
from phalanx.strategies.deepspeed.state_slots import filled_slots, reads_step_on_device

BUILDS = "import pathlib; open('builds', 'a').write('x'); pathlib.Path('cpu_adam.so').write_text('')"
PlantBuild = Callable[[str], None]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Move the folder of ops to a temporary one; return that of cpu_adam."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "ops"))
    return op_folder("cpu_adam")


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> PlantBuild:
    """Return a function that replaces DeepSpeed's build by a short program."""

    def put(program: str) -> None:
        monkeypatch.setattr(ops, "build_program", lambda name: program)

    return put


def failure() -> str:
    """Return the error message of a build of cpu_adam."""
    with pytest.raises(ConfigurationError) as raised:
        ensure_ops(["cpu_adam"], silent)
    return str(raised.value)


def silent(text: str) -> None:
    """Discard a note."""


# ---- building ------------------------------------------------------------------------------------------------------


def test_a_missing_op_is_built_once_with_a_note(folder: Path, plant: PlantBuild) -> None:
    plant(BUILDS)
    notes: list[str] = []
    ensure_ops(["cpu_adam"], notes.append)
    assert [note.split(" (")[0] for note in notes[:1]] == ["Building DeepSpeed's cpu_adam"]
    assert "about 35 s" in notes[0]
    assert "cpu_adam is ready" in notes[1]
    assert missing_ops(["cpu_adam", "async_io"]) == ["async_io"]
    begun = time.perf_counter()
    ensure_ops(["cpu_adam"], notes.append)
    assert time.perf_counter() - begun < 0.5
    assert len(notes) == 2
    assert (folder / "builds").read_text() == "x"


def test_torch_extensions_dir_moves_the_folder(tmp_path: Path, folder: Path) -> None:
    assert folder.is_relative_to(tmp_path / "ops")
    assert folder.name == "cpu_adam"


def test_a_failed_build_shows_its_last_lines(folder: Path, plant: PlantBuild) -> None:
    plant("print('first line\\n' + 'x\\n' * 50); print('it is raining'); raise SystemExit(1)")
    told = failure()
    assert told.splitlines()[0].startswith(f"Building DeepSpeed's cpu_adam in '{folder}' failed")
    assert told.splitlines()[-1] == "    it is raining"
    assert "first line" not in told
    assert missing_ops(["cpu_adam"]) == ["cpu_adam"]


def test_a_build_without_a_result_is_a_failure(folder: Path, plant: PlantBuild) -> None:
    plant("pass")
    assert "failed" in failure()


def test_an_unknown_op_is_refused() -> None:
    with refuses(UnknownNameError, "'cpu_adm'", "'cpu_adam'"):
        ensure_ops(["cpu_adm"], print)


# ---- locks ---------------------------------------------------------------------------------------------------------


def test_a_lock_left_by_a_killed_builder_is_removed(folder: Path, plant: PlantBuild) -> None:
    plant(f"import os; assert not os.path.exists('lock'); {BUILDS}")
    (folder / "lock").touch()
    (folder / "cpu_adam.so").touch()
    ensure_ops(["cpu_adam"], silent)
    assert (folder / "builds").read_text() == "x"


BUILDS_SLOWLY = f"""
from phalanx.strategies.deepspeed import ops
ops.build_program = lambda name: {f"import time; time.sleep(0.5); {BUILDS}"!r}
ops.ensure_ops(["cpu_adam"], print)
"""


def test_two_concurrent_processes_build_once(folder: Path) -> None:
    both = [subprocess.Popen([sys.executable, "-c", BUILDS_SLOWLY], stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [each.wait(120) for each in both] == [0, 0]
    assert (folder / "builds").read_text() == "x"
    assert missing_ops(["cpu_adam"]) == []


@pytest.mark.parametrize("what", ["torch", "deepspeed", "processor"])
def test_an_op_built_for_something_else_is_not_used(
    folder: Path, plant: PlantBuild, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    plant(BUILDS)
    ensure_ops(["cpu_adam"], silent)
    with monkeypatch.context() as changed:
        if what == "torch":
            changed.setattr(torch, "__version__", "2.0.0")
        elif what == "deepspeed":
            changed.setattr(ops, "version", lambda name: "0.19.9")
        else:
            changed.setattr(ops, "_processor", lambda: "another one")
        assert missing_ops(["cpu_adam"]) == ["cpu_adam"]
    assert missing_ops(["cpu_adam"]) == []


# ---- requirements --------------------------------------------------------------------------------------------------


def test_only_offloading_needs_ops(tmp_path: Path) -> None:
    assert needed_ops(resolve_options(stage=2)) == needed_ops(resolve_options(stage=3)) == []
    assert needed_ops(resolve_options(stage=2, offload_optimizer=True)) == ["cpu_adam"]
    nvme = resolve_options(stage=3, offload_optimizer="nvme", offload_parameters="nvme", nvme_path=tmp_path)
    assert needed_ops(nvme) == ["cpu_adam", "pin_memory", "async_io"]


def test_one_message_names_all_missing_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    check_toolchain([])
    with pytest.raises(ConfigurationError) as raised:
        check_toolchain(["cpu_adam", "async_io"])
    told = str(raised.value)
    for package in ("Debian: g++", "pip install ninja", "python3-dev"):
        assert package in told
    assert "\n" not in told


def test_libaio_is_detected_by_compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "refusing"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert any("libaio-dev" in each for each in missing_tools(["async_io"]))
    assert not any("libaio-dev" in each for each in missing_tools(["cpu_adam"]))


def test_ninja_of_an_inactive_virtual_environment_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    ninja = tmp_path / "bin" / "ninja"
    ninja.write_text("#!/bin/sh\n")
    ninja.chmod(0o755)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    assert not any("ninja" in each for each in missing_tools([]))
    assert os.environ["PATH"] == "/nowhere"


def test_library_environment_restores_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_THERE", "1")
    before = dict(os.environ)
    with environment.library_environment(PHALANX_THERE="2", PHALANX_NEW="3"):
        assert (os.environ["PHALANX_THERE"], os.environ["PHALANX_NEW"]) == ("2", "3")
        assert os.environ["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    assert dict(os.environ) == before


@pytest.mark.parametrize("found", ["0.18.9", "0.19.7", "0.20.0", "1.0"])
def test_an_unsupported_version_of_deepspeed_is_refused(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(ops, "version", lambda name: found)
    with refuses(ConfigurationError, "strategy='zero2'", found):
        require_deepspeed("zero2")


@pytest.mark.parametrize("found", ["0.19.8", "0.19.12", "0.19.9+abc"])
def test_supported_versions_of_deepspeed_are_accepted(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(ops, "version", lambda name: found)
    require_deepspeed("zero2")


def test_missing_deepspeed_is_reported_with_the_command_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(ops, "version", missing)
    with refuses(ConfigurationError, "strategy='zero2'", "DeepSpeed"):
        require_deepspeed("zero2")


# ---- loading -------------------------------------------------------------------------------------------------------

MODULE = """
#include <Python.h>
static struct PyModuleDef def = {PyModuleDef_HEAD_INIT, "cpu_adam", "built here", -1, NULL};
PyMODINIT_FUNC PyInit_cpu_adam(void) { return PyModule_Create(&def); }
"""
LOADS = """
from phalanx.strategies.deepspeed.ops import load_ops
load_ops(["cpu_adam", "async_io"])
from deepspeed.accelerator import get_accelerator
print(get_accelerator().create_op_builder("CPUAdamBuilder").load().__doc__)
"""


def test_deepspeed_finds_the_built_op_loaded(folder: Path, plant: PlantBuild) -> None:
    (folder / "module.c").write_text(MODULE)
    compiler, _ = environment.build_tools()
    headers = sysconfig.get_path("include")
    command = [compiler, "-x", "c", "module.c", "-shared", "-fPIC", f"-I{headers}", "-o", "cpu_adam.so"]
    plant(f"import subprocess; subprocess.run({command!r}, check=True)")
    ensure_ops(["cpu_adam"], silent)
    done = subprocess.run(
        [sys.executable, "-c", LOADS], capture_output=True, text=True, timeout=60, check=True, cwd=folder
    )
    assert "built here" in done.stdout
    assert not (folder / "build.ninja").exists()


# ---- CUDA ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def cuda_build(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch look like a build for CUDA 13.0, on a machine with one model of GPU."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(ops, "_gpus", lambda: "H200")


def test_an_op_built_for_a_cpu_is_not_taken_for_cuda(
    cuda_build: None, plant: PlantBuild, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant("import os, pathlib; pathlib.Path('cpu_adam.so').write_text(os.environ['DS_ACCELERATOR'])")
    for device_type in ("cpu", "cuda"):
        ensure_ops(["cpu_adam"], silent, device_type)
    built = {kind: (op_folder("cpu_adam", kind) / "cpu_adam.so").read_text() for kind in ("cpu", "cuda")}
    assert built == {"cpu": "cpu", "cuda": "cuda"}
    assert missing_ops(["cpu_adam"]) == missing_ops(["cpu_adam"], "cuda") == []
    # It is compiled for the GPUs of the machine, and against torch's version of CUDA.
    monkeypatch.setattr(ops, "_gpus", lambda: "L40")
    assert missing_ops(["cpu_adam"], "cuda") == ["cpu_adam"]
    monkeypatch.setattr(ops, "_gpus", lambda: "H200")
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    assert missing_ops(["cpu_adam"], "cuda") == ["cpu_adam"]
    assert missing_ops(["cpu_adam"]) == []


def test_listed_architectures_count_instead_of_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0 ")
    assert ops._gpus() == "9.0"


def test_nvme_on_cuda_needs_the_toolkit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    assert any("set CUDA_HOME" in each for each in missing_tools(["async_io"], "cuda"))
    assert not any("CUDA_HOME" in each for each in missing_tools(["async_io"]))


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
    with backend(World.single("cpu"), []):
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
    fused = reads_step_on_device(optimizer)
    filled = filled_slots([(piece, {"step": torch.tensor(3.0)})], flat, {}, ints=False, fused=fused)
    assert filled["step"].device.type == device_type
