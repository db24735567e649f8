"""Hostile checkpoints: a good one to start from, attackers' tools, and everything that reads a checkpoint."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import xxhash

from phalanx import checkpoint
from phalanx.framework.checkpoint import codec
from phalanx.framework.checkpoint.write_plan import CheckpointContents, Shard
from phalanx.framework.core.errors import CheckpointError
from phalanx.framework.distributed.world import World

Fields = dict[str, Any]


def good(path: Path, value: float = 0.0) -> Path:
    """Save a checkpoint with all that a Trainer's has: weights, tied ones, an optimizer, state of many kinds."""
    generator = torch.Generator().manual_seed(3)
    model = {
        "weight": torch.randn(3, 4, generator=generator) + value,
        "bias": torch.randn(4, generator=generator).bfloat16(),
    }
    state = {
        "callbacks": {"early": {"best": torch.ones(2, 3), "wait": 3}},
        "tuple": (1, 2.5, None),
        "bytes": b"abc" * 2000,
        "nested": [{"a": {1, 2}}, float("inf"), 1 << 70],
    }
    document, tensors = codec.encode(state)
    model["tied"] = model["weight"]
    sections = {
        "model": model,
        "optimizer": {"0/exp_avg/weight": torch.randn(3, 4, generator=generator)},
        "state": tensors,
    }
    shards = {name: {key: Shard.whole(tensor) for key, tensor in each.items()} for name, each in sections.items()}
    whole = {
        "progress": {"global_step": 3, "batch": 4, "epoch": 1},
        "hparams": {"width": 3},
        "optimizers": [{"class": "AdamW", "groups": [{"params": ["weight"], "hyper": {"lr": 0.1}}], "scalars": {}}],
        "state": document,
    }
    inline = codec.encode_inline({"random": torch.arange(5), "flag": torch.tensor(True)})
    return checkpoint.save(path, CheckpointContents(shards, whole, inline), World.single())


# ---- an attacker's tools ------------------------------------------------------------------------------------------


def rewrite(path: Path, change: Callable[[Fields], object]) -> None:
    """Change the manifest and give it a good checksum again."""
    fields = json.loads((path / "manifest.json").read_text())
    del fields["checksum"]
    change(fields)
    write_manifest(path, json.dumps(fields))


def write_manifest(path: Path, text: str) -> None:
    """Write a manifest's text with a good checksum."""
    rest = text.strip()[1:].encode()
    checksum = xxhash.xxh3_64_hexdigest(b"{" + rest).encode()
    (path / "manifest.json").write_bytes(b'{"checksum":"' + checksum + b'",' + rest)


def rewrite_header(path: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    """Change the header of a tensor file and make the manifest agree: sizes, checksums and positions."""
    data = (path / name).read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    text = change(data[8:size])
    header = len(text).to_bytes(8, "little") + text
    (path / name).write_bytes(header + data[size:])

    def agree(fields: Fields) -> None:
        record = fields["files"][name]
        record.update(size=len(header) + len(data) - size, header_size=len(header))
        record.update(header_xxh3_64=xxhash.xxh3_64_hexdigest(header))
        record.update(xxh3_64=xxhash.xxh3_64_hexdigest(header + data[size:]))
        for tensors in fields["sections"].values():
            for tensor in tensors.values():
                for part in tensor.get("parts", []):
                    if part["file"] == name:
                        part["start"] += len(header) - size

    rewrite(path, agree)


# ---- everything that reads ----------------------------------------------------------------------------------------


def read_all(path: Path) -> None:
    """Read every tensor, whole."""
    opened = checkpoint.open_checkpoint(path)
    for section in opened.sections:
        opened.read_section(section)


def consolidated(path: Path) -> None:
    """Consolidate every section, and throw the files away."""
    for section in checkpoint.inspect(path).sections:
        out = path.parent / "consolidated.out"
        try:
            checkpoint.consolidate(path, out, section=section)
        finally:
            out.unlink(missing_ok=True)


READERS: dict[str, Callable[[Path], object]] = {
    "load": checkpoint.load,
    "read_all": read_all,
    "weights": checkpoint.weights,
    "inspect": checkpoint.inspect,
    "diff": lambda path: checkpoint.diff(path, path),
    "consolidate": consolidated,
    "list": lambda path: checkpoint.checkpoints(path.parent, verify=True),
    "newest": lambda path: checkpoint.newest_good(path.parent, lambda text: None),
}


def accepting(path: Path, readers: dict[str, Callable[[Path], object]] = READERS) -> set[str]:
    """Return the readers that take a checkpoint. One that raises anything but ``CheckpointError`` lets it through."""
    taken = set()
    for name, reader in readers.items():
        with suppress(CheckpointError):
            reader(path)
            taken.add(name)
    return taken


# ---- mutations ----------------------------------------------------------------------------------------------------

VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 7, 31, 1 << 31, 1 << 62, 1 << 63, 1 << 200, -(1 << 70), 0.5, -0.0, 1e308),
    *(
        "",
        "$",
        "x",
        "\0",
        "..",
        "../x",
        "/etc/passwd",
        "F32",
        "I64",
        "BOOL",
        "model",
        "weight",
        "tied",
        "nan",
        "\ud800",
    ),
    *("model-00000.safetensors", "state-00000.safetensors", "0" * 16, "\u202e\x1b[31m", "a" * 10_000, "QUJD", "=="),
    *([], {}, [[]], [0], [3, 4], [1 << 62] * 3, [0, 1 << 61], {"alias": "weight"}, {"alias": "tied"}, {"$": "tuple"}),
    *({"$": "tensor", "key": "x"}, {"$": "tensor"}, {"$": "inline", "dtype": "float32", "shape": [9], "base64": ""}),
    *({"$": "scalar", "dtype": "int64", "value": 1 << 90}, {"$": "range", "value": [0, 1 << 62, 1]}, {"$": "size"}),
    *({"$": "array", "dtype": "O", "value": 1}, {"$": "Counter", "items": [[[], 1]]}, {"$": "path", "type": "x"}),
    *({"$": "device", "value": "cuda:99"}, {"$": "datetime", "value": "x"}, {"$": "timedelta", "value": [1e300] * 3}),
    *({"$": "numpy", "dtype": "uint8", "value": -5}, {"$": "complex", "value": [1]}, {"$": "int", "value": "zz"}),
    *({"$": "set", "items": [[1]]}, {"$": "defaultdict", "factory": "eval", "items": []}, {"$": "os.system"}),
]


def mutated(fields: Any, generator: random.Random) -> Any:
    """Return a tree of JSON with one to three places changed: another value, one gone, doubled, renamed or swapped."""
    fields = copy.deepcopy(fields)
    for _ in range(generator.choice((1, 1, 2, 3))):
        places = list(_places(fields))
        holder, key = generator.choice(places)
        action = generator.randrange(6)
        if action == 0 and isinstance(holder, dict):
            holder[generator.choice([str(value)[:40] for value in VALUES])] = holder.pop(key)
        elif action == 1:
            del holder[key]
        elif action == 2 and isinstance(holder, list):
            holder.append(copy.deepcopy(holder[key]))
        elif action == 3:
            other, place = generator.choice(places)
            with suppress(KeyError, IndexError):
                holder[key] = copy.deepcopy(other[place])
        elif action == 4 and type(holder[key]) is int:
            holder[key] += generator.choice((-8, -1, 1, 8))
        else:
            holder[key] = copy.deepcopy(generator.choice(VALUES))
        if not list(_places(fields)):
            break
    return fields


def _places(value: Any) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from _places(inner)


def peak_memory() -> int:
    """Return the most bytes that this process held since ``reset_peak_memory``."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return 0


def reset_peak_memory() -> int:
    """Begin to measure anew; return the bytes that this process holds now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_memory()


def contents(folder: Path, but: Path) -> dict[str, bytes | str]:
    """Return all that lies in a folder, links as what they point to, without one path."""
    found: dict[str, bytes | str] = {}
    for root, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = Path(root) / name
            if path != but and but not in path.parents:
                found[str(path)] = (
                    os.readlink(path) if path.is_symlink() else b"" if path.is_dir() else path.read_bytes()
                )
    return found
