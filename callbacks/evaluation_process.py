"""The process of ``Evaluate(aside=True)``: ``phalanx eval --watch``, which the fit starts, and which ends with it."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..framework.core.errors import ConfigurationError
from ..framework.system.environment import variables_apart
from ..framework.system.processes import die_with_parent

if TYPE_CHECKING:
    from ..framework.api.train_module import TrainModule

LOG = "evaluate.log"
"""The file in the run's directory that has the output of the process."""
_PERIOD_SECONDS = 2.0


def import_path(found: Any, what: str) -> str:
    """Return ``module:name``, by which another process of the same program imports a function or class.

    Args:
        found: the function or class.
        what: how it was given, for the message.

    Raises:
        ConfigurationError: it has no such name, as a lambda or a local function.
    """
    name = getattr(found, "__qualname__", "")
    home = sys.modules.get(getattr(found, "__module__", None) or "")
    module = None if home is None else _module_name(home)
    if module is None or getattr(home, name, None) is not found:
        raise ConfigurationError(
            f"{what} cannot be imported by another process: define it at the top level of a script or module."
        )
    return f"{module}:{name}"


def _module_name(home: Any) -> str | None:
    """Return the name by which a module is imported; that of the program itself is ``__main__`` only in this process.

    None for the program of a notebook or of the interpreter.
    """
    if home.__name__ != "__main__":
        return str(home.__name__)
    spec, file = getattr(home, "__spec__", None), getattr(home, "__file__", None)
    if spec is not None and spec.name != "__main__":
        return str(spec.name)
    return Path(file).stem if file is not None and file.endswith(".py") and os.path.isfile(file) else None


def check_rebuilds(module: TrainModule) -> str:
    """Return the import path of a module's class, which a checkpoint can be loaded into.

    Raises:
        ConfigurationError: the class cannot be imported elsewhere, or its ``__init__`` has arguments that checkpoints
            do not hold.
    """
    cls = type(module)
    path = import_path(cls, f"Evaluate(aside=True) loads checkpoints, and the class {cls.__qualname__}")
    required = [
        each.name
        for each in [*inspect.signature(cls.__init__).parameters.values()][1:]
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    container = (module.hparams_container or ("",))[0]
    if missing := [name for name in required if name not in module.hparams and name != container]:
        raise ConfigurationError(
            f"Evaluate(aside=True) loads checkpoints, which would lack the argument {missing[0]!r} of "
            f"{cls.__qualname__}: call self.save_hyperparameters() in __init__."
        )
    return path


class EvaluationProcess:
    """Evaluates each new checkpoint of a run until the fit ends. It ends with this process, however that ends.

    Args:
        directory: the run's directory.
        arguments: the arguments of ``phalanx eval`` that name the tasks and the module.
        device: the device of the module, such as ``"cpu"``.
    """

    def __init__(self, directory: Path, arguments: Sequence[str], device: str) -> None:
        self.log = directory / LOG
        command = [sys.executable, "-m", "phalanx", "eval", str(directory), *arguments, "--device", device]
        options = ["--watch", "--beside-fit", "--interval", f"{_PERIOD_SECONDS:g}"]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *options],
                env=variables_apart(),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=die_with_parent(),
            )

    @property
    def code(self) -> int | None:
        """The exit code; None while the process runs."""
        return self._process.poll()

    @property
    def last_line(self) -> str:
        """The last line of its output, which is that of the error if it has failed."""
        with suppress(OSError):
            lines = self.log.read_text(encoding="utf-8", errors="replace").split("\n")
            return next((line.strip() for line in reversed(lines) if line.strip()), "no output")
        return "no output"

    def finish(self) -> None:
        """Let it end once the checkpoints that exist are evaluated."""
        # It has ended by itself, after an error.
        with suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.write(b"end\n")
            self._process.stdin.flush()

    def ends_within(self, seconds: float) -> bool:
        """Wait for its end, at most so long; return whether it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self.code is not None

    def kill(self) -> None:
        """End it now."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()


def named_tasks(tasks: Callable[..., Any] | str | os.PathLike[str]) -> list[str]:
    """Return the arguments of ``phalanx eval`` for a function, or the path of a file of tasks.

    Raises:
        ConfigurationError: another process cannot import it.
    """
    if isinstance(tasks, str | os.PathLike):
        return ["--tasks", os.path.abspath(tasks)]
    name = getattr(tasks, "__qualname__", type(tasks).__name__)
    return ["--function", import_path(tasks, f"Evaluate(aside=True): the function {name}")]
