"""On macOS, where functions of Linux are missing, every module is imported and a fit runs. Linux stands in for it."""

from __future__ import annotations

import json
from pathlib import Path

from ranks import run_script

# torch itself is imported before: its own builds for macOS differ.
WITHOUT_LINUX = """
import builtins, ctypes, importlib, io, json, mmap, os, pkgutil, selectors, signal, socket, sys, sysconfig
import multiprocessing, asyncio, torch, torch.distributed, torch.utils.data

sysconfig.get_config_vars()
sys.platform = "darwin"
selectors.DefaultSelector = selectors.PollSelector
for module, names in {
    os: "sched_getaffinity sched_setaffinity memfd_create eventfd pidfd_open pidfd_send_signal posix_fallocate "
        "posix_fadvise copy_file_range splice O_DIRECT O_TMPFILE O_PATH getrandom",
    signal: "SIGRTMIN SIGRTMAX pidfd_send_signal sigtimedwait sigwaitinfo",
    mmap: "MADV_HUGEPAGE MADV_DONTFORK MAP_POPULATE",
    socket: "SO_PEERCRED SOCK_CLOEXEC SOCK_NONBLOCK AF_VSOCK",
}.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)

ABSENT = ("/proc", "/dev/shm", "/sys")

def refused(path):
    if not isinstance(path, (str, bytes, os.PathLike)):
        return False
    text = os.fsdecode(path)
    return any(text == each or text.startswith(each + "/") for each in ABSENT)

def without(function):
    def call(path=".", *arguments, **options):
        if refused(path):
            raise FileNotFoundError(2, "No such file or directory", os.fsdecode(path))
        return function(path, *arguments, **options)
    return call

for name in ("open", "stat", "lstat", "readlink", "listdir", "scandir", "statvfs", "mkdir", "access"):
    setattr(os, name, without(getattr(os, name)))
builtins.open = io.open = without(io.open)

class Library:
    def __init__(self, name=None, *arguments, **options):
        self._library = Real(name, *arguments, **options)
        self._name_given = name
    def __getattr__(self, name):
        linux = ("prctl", "fallocate", "sync_file_range", "renameat2", "gettid", "sched_getcpu")
        if self._name_given is None and name in linux:
            raise AttributeError(name)
        return getattr(self._library, name)

Real, ctypes.CDLL = ctypes.CDLL, Library
"""

IMPORTS = """
import phalanx
failed = {}
for found in pkgutil.walk_packages(phalanx.__path__, "phalanx."):
    parts = found.name.split(".")
    if parts[1] not in ("framework", "strategies", "precisions", "callbacks", "loggers", "cli", "compat", "checkpoint",
                        "configuration", "errors", "hf", "profilers", "registry"):
        continue
    if parts[-1] in ("__main__",) or "templates" in parts:
        continue
    try:
        importlib.import_module(found.name)
    except Exception as error:
        failed[found.name] = f"{type(error).__name__}: {error}"
print(json.dumps(failed))
"""

FIT = f"""
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from models import Regressor, loader
from phalanx import Trainer
from phalanx.callbacks import ModelCheckpoint

def fit(steps, ckpt_path=None):
    saves = ModelCheckpoint(every="2 steps", save_top_k=-1, save_last=True, asynchronous=True)
    trainer = Trainer(accelerator="cpu", devices=1, max_steps=steps, callbacks=saves, enable_progress_bar=False,
                      logger="csv", snapshots=2, default_root_dir=sys.argv[1])
    module = Regressor()
    trainer.fit(module, loader(40, num_workers=int(sys.argv[2])), ckpt_path=ckpt_path)
    return trainer, module.losses

trainer, losses = fit(6)
again, later = fit(10, saved := trainer.checkpoint_callback.last_model_path)
report = json.load(open(f"{{trainer.run_dir}}/report.json"))
print(json.dumps([trainer.global_step, again.global_step, len(later), report["state"], os.path.exists(saved)]))
"""


def test_every_module_is_imported_without_what_linux_alone_has() -> None:
    outcome = run_script(WITHOUT_LINUX + IMPORTS, timeout=120)
    assert outcome.returncode == 0, outcome.stdout
    assert json.loads(outcome.stdout.splitlines()[-1]) == {}


def test_a_fit_saves_and_resumes_without_what_linux_alone_has(tmp_path: Path) -> None:
    outcome = run_script(WITHOUT_LINUX + FIT, str(tmp_path), "0", timeout=120)
    assert outcome.returncode == 0, outcome.stdout
    assert json.loads(outcome.stdout.splitlines()[-1]) == [6, 10, 4, "finished", True]
