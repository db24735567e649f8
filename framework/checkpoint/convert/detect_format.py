"""Detection of a foreign checkpoint's format, by the names of its files alone: nothing is opened."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...core.errors import CheckpointError, ConfigurationError, did_you_mean
from ...core.wording import first_of
from ..manifest import MANIFEST

FORMATS = {
    "lightning": "a .ckpt file of Lightning",
    "lightning-sharded": "a folder of Lightning's FSDP or ModelParallel strategy (.metadata and meta.pt)",
    "lightning-deepspeed": "a folder of Lightning's DeepSpeed strategy (checkpoint/*_states.pt)",
    "accelerate": "a folder of Accelerate's save_state (model.safetensors or pytorch_model.bin, optimizer.bin)",
    "accelerate-sharded": "a folder of Accelerate's save_state under FSDP (pytorch_model_fsdp_0/.metadata)",
    "accelerate-deepspeed": "a folder of Accelerate's save_state under DeepSpeed (pytorch_model/*_states.pt)",
    "deepspeed": "a folder of DeepSpeed's save_checkpoint (latest, global_step<n>/*_states.pt)",
}
_STATES = re.compile(r"(bf16_)?(zero_pp_rank_\d+_)?mp_rank_\d+_(model|optim)_states\.pt")
_PLAIN_ACCELERATE = re.compile(r"(model|pytorch_model)(_\d+)?\.(safetensors|bin)(\.index\.json)?")
_OF_ACCELERATE = re.compile(
    r"(optimizer|scheduler|sampler)(_\d+)?\.bin|random_states_\d+\.pkl|custom_checkpoint_\d+\.pkl"
)


@dataclass(frozen=True)
class Names:
    """The names of regular files in a folder, of folders, and of links and other things, which are never read."""

    files: frozenset[str]
    folders: frozenset[str]
    others: frozenset[str]


def names_in(folder: Path) -> Names:
    """List a folder. Raises ``CheckpointError`` where it cannot be."""
    kinds: dict[str, set[str]] = {"files": set(), "folders": set(), "others": set()}
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                mode = entry.stat(follow_symlinks=False).st_mode
                kind = "files" if stat.S_ISREG(mode) else "folders" if stat.S_ISDIR(mode) else "others"
                kinds[kind].add(entry.name)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be listed: {error.strerror}.") from error
    return Names(*(frozenset(kinds[kind]) for kind in ("files", "folders", "others")))


def file_of(folder: Path, name: str) -> Path:
    """Return a regular file that lies in a folder itself.

    Raises:
        CheckpointError: it is missing, a link, or not in the folder.
    """
    path = folder / name
    if Path(name).name != name or name in ("", ".", ".."):
        raise CheckpointError(f"{folder} points to {name!r}, which is not a file of its own; it is not read.")
    if path.is_symlink():
        raise CheckpointError(f"{path} is a link, and links in a foreign checkpoint are not followed: copy the file.")
    if not path.is_file():
        raise CheckpointError(f"{folder} lacks {name}.{did_you_mean(name, names_in(folder).files)}")
    return path


def detect(source: Path, given: str | None) -> str:
    """Return the format of ``source``; ``given`` is what the user says it is.

    Raises:
        ConfigurationError: ``given`` is not a known format.
        CheckpointError: nothing known lies there, or something else than ``given``, or several formats at once.
    """
    if given is not None and given not in FORMATS:
        raise ConfigurationError(
            f"format={given!r} is not known.{did_you_mean(given, FORMATS)} Known: {', '.join(FORMATS)}."
        )
    if not os.path.lexists(source):
        raise CheckpointError(f"{source} does not exist; give a foreign checkpoint's file or folder.")
    found, seen = _candidates(source)
    if given is not None:
        found = [name for name in found if name == given]
    if len(found) == 1:
        return found[0]
    if found:
        raise CheckpointError(
            f"{source} holds {seen}, which are of several formats: {', '.join(found)}. Say which with format=."
        )
    wanted = f"no {given!r} ({FORMATS[given]})" if given else "no foreign checkpoint that is known"
    raise CheckpointError(f"{source} is {wanted}; it holds {seen}.{_closest(source, given)}")


def _candidates(source: Path) -> tuple[list[str], str]:
    if not source.is_dir():
        return (["lightning"] if source.is_file() else []), "one file"
    names = names_in(source)
    below = {folder: names_in(source / folder) for folder in names.folders}
    found = [name for name, test in _TESTS.items() if test(names, below)]
    shown = sorted(names.files | {f"{name}/" for name in names.folders} | {f"{name} (a link)" for name in names.others})
    return found, first_of(shown, 8) or "nothing"


def _is_accelerate(names: Names) -> bool:
    return any(_OF_ACCELERATE.fullmatch(name) for name in names.files)


def has_states(names: Names) -> bool:
    """Whether a folder holds files as DeepSpeed names them."""
    return any(_STATES.fullmatch(name) for name in names.files)


def _below(below: dict[str, Names], pattern: str, test: Callable[[Names], bool]) -> bool:
    return any(re.fullmatch(pattern, folder) and test(names) for folder, names in below.items())


_Test = Callable[[Names, dict[str, Names]], bool]
_TESTS: dict[str, _Test] = {
    "lightning-sharded": lambda names, below: {".metadata", "meta.pt"} <= names.files,
    "lightning-deepspeed": lambda names, below: _below(below, "checkpoint", has_states),
    "accelerate": lambda names, below: (
        any(_PLAIN_ACCELERATE.fullmatch(name) for name in names.files) and MANIFEST not in names.files
    ),
    "accelerate-sharded": lambda names, below: _below(
        below, r"pytorch_model_fsdp_\d+", lambda inner: ".metadata" in inner.files
    ),
    "accelerate-deepspeed": lambda names, below: (
        _below(below, r"pytorch_model(_\d+)?", has_states)
        and (_is_accelerate(names) or "latest" not in names.files or "pytorch_model" in below)
    ),
    "deepspeed": lambda names, below: (
        has_states(names) or _below(below, "(?!(checkpoint|pytorch_model)$).*", has_states)
    ),
}


def _closest(source: Path, given: str | None) -> str:
    """Return a sentence on what it resembles most."""
    if not source.is_dir():
        return " A checkpoint of Lightning is a file, those of the others are folders: give the folder."
    names = names_in(source)
    if MANIFEST in names.files:
        return " It looks like a checkpoint of phalanx, which needs no conversion."
    if given is not None:
        found, _ = _candidates(source)
        return f" It looks like {found[0]!r}." if found else ""
    if ".metadata" in names.files:
        return " It looks like 'lightning-sharded' without its meta.pt, or like one folder of an 'accelerate-sharded'."
    if _is_accelerate(names):
        return " It looks like 'accelerate' without a model (model.safetensors or pytorch_model.bin)."
    if "latest" in names.files:
        return " It looks like 'deepspeed' without the folder that 'latest' names."
    for folder in sorted(names.folders):
        found, _ = _candidates(source / folder)
        if found:
            return f" {folder!r} in it looks like {found[0]!r}: give that."
    return f" Known: {', '.join(FORMATS)}."
