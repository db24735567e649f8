"""``torch.compile`` for the parts of a module, inside the wrapping of any strategy.

A part is compiled by an attribute ``forward`` of the module itself. Names of parameters do not change, and the hooks
of the part, by which strategies gather parameters and reduce gradients, run outside of the compiled code.
``nn.Module.compile`` would compile them too: they would break its graphs, and hooks that are added later would not run.
"""

from __future__ import annotations

import sysconfig
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from typing import Any

import torch
from torch import nn

from ..core.errors import ConfigurationError, closest_or_known, did_you_mean, unknown
from ..system.environment import build_tools
from .blocks import ReplacedForward, callable_children, has_forward, has_parameters, repeated_blocks, replace_method
from .strategy import Strategy

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]

_OPTIONS = ("mode", "backend", "dynamic", "fullgraph", "options")
_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
# torch keeps 8 versions of a function: for each kind of block those of training and evaluation.
_MAX_KINDS = 4


class CompiledForward(ReplacedForward):
    """The compiled ``forward`` of one module."""


@dataclass(frozen=True)
class Compilation:
    """The parts of a module to compile, and the compiler."""

    compiler: Compiler
    """Returns the compiled form of a function."""
    blocks: bool | None = None
    """True for the repeated blocks, False for the module whole, None for blocks where they share compiled code."""
    given: Any = None
    """The argument ``compile``, for messages; None for the result of ``torch.compile``."""

    def check(self, strategy: Strategy) -> None:
        """Refuse a strategy that cannot run compiled modules.

        Raises:
            ConfigurationError: ``strategy.prevents_compiling`` has a reason.
        """
        if strategy.prevents_compiling:
            what = "the result of torch.compile" if self.given is None else f"compile={self.given!r}"
            raise ConfigurationError(f"strategy={strategy.name!r} got {what}, and it {strategy.prevents_compiling}.")

    def parts(self, module: nn.Module, gathered: bool = False) -> list[nn.Module]:
        """Return the parts to compile: the repeated blocks, or the module itself with the parts that its steps call.

        Args:
            gathered: whether the strategy gathers each block in hooks, which would end larger pieces of compiled code.

        Raises:
            ConfigurationError: blocks are wanted, and there are none.
        """
        found = [part for part in repeated_blocks(module) if gathered or _is_composite(part)]
        if not found and self.blocks:
            raise ConfigurationError(
                f"compile={self.given!r} found no repeated blocks in {type(module).__name__}: give compile=True, which "
                "compiles a module without blocks whole."
            )
        differ = bool(found) and not gathered and _num_kinds(found) > _MAX_KINDS
        if not found or self.blocks is False or (self.blocks is None and differ):
            whole = (module, *callable_children(module))
            found = [part for part in whole if has_forward(part) and has_parameters(part)]
        # A block may be used in several places.
        return [part for part in dict.fromkeys(found) if not is_compiled(part)]

    def apply(self, module: nn.Module, strategy: Strategy) -> Callable[[], None]:
        """Compile the parts of a module in place; return a function that reverts this.

        The code of a part is generated in its first call.

        Raises:
            ConfigurationError: see ``check`` and ``parts``.
        """
        self.check(strategy)
        parts = self.parts(module, strategy.traits.forward_has_collectives)
        undos = [replace_method(part, "forward", CompiledForward(part, self.compiler(part.forward))) for part in parts]

        def undo() -> None:
            for restore in undos:
                restore()

        return undo


def compilation(given: Any, device_type: str, strategy: Strategy | None = None) -> Compilation | None:
    """Return the meaning of the argument ``compile``; None if nothing is compiled.

    Args:
        given: False; True, which compiles the repeated blocks, or a module without such blocks whole; ``"blocks"``; or
            a dict of the options ``mode``, ``backend``, ``dynamic``, ``fullgraph`` and ``options`` of ``torch.compile``
            and of ``blocks``: True, or False for the module whole.
        device_type: ``"cpu"`` or ``"cuda"``.
        strategy: the strategy that will run the module, to be checked.

    Raises:
        ConfigurationError: an option is unknown or invalid, there is no C++ compiler, or the strategy cannot run
            compiled modules.
    """
    if given is False or given is None:
        return None
    if isinstance(given, str) and given != "blocks":
        if given in _MODES:
            raise ConfigurationError(f"compile={given!r} is a mode: give compile={{'mode': {given!r}}}.")
        raise unknown("compile", given, ["blocks"])
    if not (given is True or given == "blocks" or isinstance(given, Mapping)):
        raise ConfigurationError(f"compile={given!r} must be True, False, 'blocks', or a dict of options.")
    options = dict(given) if isinstance(given, Mapping) else {}
    _check_options(options)
    blocks = options.pop("blocks", None) if given != "blocks" else True
    compiler = _compiler(options, given)
    if device_type == "cpu" and options.get("backend", "inductor") in ("inductor", None):
        check_cpp_compiler(given)
    found = Compilation(compiler, blocks, given)
    if strategy is not None:
        found.check(strategy)
    return found


def compilation_of(model: Any) -> tuple[Any, Compilation | None]:
    """Return the module in the result of ``torch.compile``, with a compilation of the same options.

    Any other object is returned as it is, with None.
    """
    modules = vars(model).get("_modules", {}) if isinstance(model, nn.Module) else {}
    original = modules.get("_orig_mod")
    if original is None:
        return model, None
    compiler = getattr(model, "dynamo_ctx", None)
    return original, None if compiler is None else Compilation(compiler)


def is_compiled(part: nn.Module) -> bool:
    """Whether a module is compiled already: here, by the user, or as TorchScript."""
    return isinstance(vars(part).get("forward"), CompiledForward) or is_compiled_by_user(part)


def is_compiled_by_user(part: nn.Module) -> bool:
    """Whether the program has compiled a module itself, or made it TorchScript."""
    return has_compiled_call(part) or "_orig_mod" in part._modules or isinstance(part, torch.jit.ScriptModule)


def has_compiled_call(part: nn.Module) -> bool:
    """Whether the program has called ``compile()`` of a module. torch keeps the result under this private name only."""
    return part._compiled_call_impl is not None


@contextmanager
def uncompiled(module: nn.Module) -> Generator[None, None, None]:
    """Let a module compute without compiled code, so that hooks on all its submodules run."""
    compiled = [part for part in module.modules() if isinstance(vars(part).get("forward"), CompiledForward)]
    undos = [replace_method(part, "forward", vars(part)["forward"].plain) for part in compiled]
    try:
        yield
    finally:
        for restore in undos:
            restore()


def check_cpp_compiler(given: Any) -> None:
    """Refuse to generate C++ on a machine that cannot build it.

    Raises:
        ConfigurationError: a C++ compiler or Python's headers are missing.
    """
    program, _ = build_tools("g++")
    missing = []
    if which(program) is None:
        missing.append(f"a C++ compiler (no {program!r} on PATH; Debian: g++)")
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        missing.append("Python's headers (Debian: python3-dev)")
    if missing:
        raise ConfigurationError(
            f"compile={given!r} generates C++ on a CPU, and this machine lacks {' and '.join(missing)}: install that, "
            "or give compile={'backend': 'aot_eager'}, which generates none."
        )


def _check_options(options: Mapping[str, Any]) -> None:
    known = (*_OPTIONS, "blocks")
    for name, value in options.items():
        if name not in known:
            raise ConfigurationError(
                f"compile={{{name!r}: {value!r}}}: there is no such option.{closest_or_known(str(name), known)}"
            )
        if name in ("blocks", "fullgraph", "dynamic") and not (value is None or isinstance(value, bool)):
            raise ConfigurationError(f"compile={{{name!r}: {value!r}}}: it must be True or False.")


def _compiler(options: Mapping[str, Any], given: Any) -> Compiler:
    """Return torch's compiler with these options, which torch checks here."""
    arguments = {name: value for name, value in options.items() if value is not None}

    def compiler(function: Callable[..., Any]) -> Callable[..., Any]:
        # torch removes entries from the dict that it is given.
        fresh: dict[str, Any] = {
            name: dict(value) if isinstance(value, Mapping) else value for name, value in arguments.items()
        }
        compiled: Callable[..., Any] = torch.compile(function, **fresh)
        return compiled

    try:
        compiler(_check_options)
    except Exception as error:
        backend, mode = options.get("backend"), options.get("mode")
        hint = did_you_mean(str(mode), _MODES) if mode is not None else ""
        if not hint and isinstance(backend, str):
            hint = did_you_mean(backend, torch.compiler.list_backends())
        reason = str(error).splitlines()[0][:200].rstrip(".")
        raise ConfigurationError(f"compile={given!r} is refused by torch: {reason}.{hint}") from None
    return compiler


def _is_composite(part: nn.Module) -> bool:
    """Whether a block is more than one layer of torch, which has one operation to compile."""
    return next(part.children(), None) is not None or not type(part).__module__.startswith("torch.")


def _num_kinds(blocks: list[nn.Module]) -> int:
    """Return the largest number of blocks of one class that differ in the shapes of their parameters."""
    kinds: dict[type, set[tuple[Any, ...]]] = defaultdict(set)
    for block in blocks:
        kinds[type(block)].add(tuple((name, parameter.shape) for name, parameter in block.named_parameters()))
    return max(len(each) for each in kinds.values())
