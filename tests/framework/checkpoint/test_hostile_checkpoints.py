"""Hostile checkpoints: whatever a file holds, nothing is executed, followed, written or deleted outside, or stretched.

``tests/hostile.py`` has the attacker's tools, and ``tests/bit_flips.py`` damage by chance.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import shutil
import socket
import tarfile
import unicodedata
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile import (
    READERS,
    Fields,
    accepting,
    contents,
    good,
    mutated,
    peak_memory,
    reset_peak_memory,
    rewrite,
    rewrite_header,
    write_manifest,
)
from messages import refuses

from phalanx import checkpoint
from phalanx.cli.main import main
from phalanx.framework.checkpoint.manifest import coverage_problem
from phalanx.framework.checkpoint.write_plan import CheckpointContents, Shard
from phalanx.framework.core.errors import CheckpointError
from phalanx.framework.distributed.world import World

MODEL = "model-00000.safetensors"
MANY = 12_000
MAX_BYTES = 400 << 20
# A hang, or work that grows with the square of what is listed, is a failure.
pytestmark = pytest.mark.timeout(60)


class Evil:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def pickled(path: Path) -> bytes:
    return pickle.dumps(Evil(path.parent / "executed"))


def saved_by_torch(path: Path) -> bytes:
    memory = io.BytesIO()
    torch.save({"weight": torch.ones(3), "evil": Evil(path.parent / "executed")}, memory)
    return memory.getvalue()


def zipped(path: Path) -> bytes:
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as archive:
        archive.writestr("../../escaped", "x" * 1000)
    return memory.getvalue()


def tarred(path: Path) -> bytes:
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w") as archive:
        link = tarfile.TarInfo("../escaped")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    return memory.getvalue()


def in_place_of(name: str, data: Callable[[Path], bytes]) -> Callable[[Path], object]:
    return lambda path: (path / name).write_bytes(data(path))


def link_to(name: str, target: str) -> Callable[[Path], object]:
    def attack(path: Path) -> None:
        (path / name).unlink()
        (path / name).symlink_to(target)

    return attack


def replaced(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    def attack(path: Path) -> None:
        (path / name).unlink()
        make(path / name)

    return attack


def bind(path: Path) -> None:
    """Make a socket with a name of any length."""
    with socket.socket(socket.AF_UNIX) as server:
        here = Path.cwd()
        os.chdir(path.parent)
        try:
            server.bind(path.name)
        finally:
            os.chdir(here)


def sparse(path: Path, size: int, start: bytes) -> None:
    """Make a file that says it is huge and takes no room."""
    with path.open("wb") as file:
        file.write(start)
        file.truncate(size)


def claimed(shape: list[int], size: int) -> Callable[[Fields], object]:
    """Claim a shape, and that the file is as large as that needs."""

    def change(fields: Fields) -> None:
        record = fields["sections"]["model"]["weight"]
        record["shape"] = record["parts"][0]["shape"] = shape
        # The last tensor of the file by position grows, so that nothing overlaps.
        moved = fields["sections"]["model"].pop("bias")
        fields["files"][MODEL]["size"] += size - 48 - 8
        assert moved

    return change


def entangled(fields: Fields) -> None:
    """Parts that each touch all others' rows and columns, in files that are not there."""
    record = fields["sections"]["model"]["weight"]
    record["shape"] = [1, 1, MANY]
    parts = []
    for index in range(MANY):
        name = f"model-{index:05d}.safetensors"
        start = 2 * (index // 2) if index % 7 else max(0, 2 * (index // 2) - 1)
        parts.append({**record["parts"][0], "file": name, "offsets": [0, 0, start], "shape": [1, 1, 1], "start": 8})
        fields["files"].setdefault(name, {**fields["files"][MODEL], "size": 12, "header_size": 8})
    record["parts"] = parts


def overlapping(fields: Fields) -> None:
    model = fields["sections"]["model"]
    model["bias"]["parts"][0]["start"] = model["weight"]["parts"][0]["start"]


def swapped(name: str) -> Callable[[Path], object]:
    def attack(path: Path) -> None:
        other = good(path.parent.parent / "elsewhere" / "b.ckpt", value=1.0)
        shutil.copyfile(other / name, path / name)
        shutil.rmtree(other.parent)

    return attack


def changing(change: Callable[[Fields], object]) -> Callable[[Path], object]:
    return lambda path: rewrite(path, change)


def header(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda path: rewrite_header(path, MODEL, change)


def in_text(old: str, new: str) -> Callable[[Path], object]:
    def attack(path: Path) -> None:
        text = "{" + (path / "manifest.json").read_text()[31:]
        assert old in text
        write_manifest(path, text.replace(old, new, 1))

    return attack


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def set_document(key: str, value: Any) -> Callable[[Path], object]:
    return changing(lambda fields: fields["document"].__setitem__(key, value))


def weight(fields: Fields) -> Any:
    return fields["sections"]["model"]["weight"]


def in_file(name: Any) -> Callable[[Path], object]:
    """Give the file of the model another name."""

    def change(fields: Fields) -> None:
        fields["files"][name] = fields["files"].pop(MODEL)
        for record in fields["sections"]["model"].values():
            for part in record.get("parts", []):
                part["file"] = name

    return changing(change)


HUGE = 2**63
CHANGES: dict[str, Callable[[Fields], object]] = {
    "huge shape": lambda fields: weight(fields).update(shape=[HUGE, HUGE]),
    "huge shape with nothing in it": lambda fields: weight(fields).update(shape=[0, HUGE // 2, HUGE // 2], parts=[]),
    "huge tensor": lambda fields: (
        weight(fields).update(shape=[1 << 40, 4]) or weight(fields)["parts"][0].update(shape=[1 << 40, 4])
    ),
    "negative shape": lambda fields: weight(fields).update(shape=[-3, -4]),
    "no shape": lambda fields: weight(fields).update(shape=12),
    "float shape": lambda fields: weight(fields).update(shape=[3.0, 4]),
    "bool shape": lambda fields: weight(fields).update(shape=[True, 12]),
    "many dims": lambda fields: weight(fields).update(shape=[1] * 1000),
    "gap": lambda fields: weight(fields).update(shape=[4, 4]),
    "no parts": lambda fields: weight(fields).update(parts=[]),
    "parts twice": lambda fields: weight(fields)["parts"].append(weight(fields)["parts"][0]),
    "offset beyond": lambda fields: weight(fields)["parts"][0].update(offsets=[1, 0]),
    "negative offset": lambda fields: weight(fields)["parts"][0].update(offsets=[-1, 0]),
    "start before": lambda fields: weight(fields)["parts"][0].update(start=0),
    "start beyond": lambda fields: weight(fields)["parts"][0].update(start=10**9),
    "start negative": lambda fields: weight(fields)["parts"][0].update(start=-8),
    "other section's file": lambda fields: weight(fields)["parts"][0].update(file="optimizer-00000.safetensors"),
    "unknown file": lambda fields: weight(fields)["parts"][0].update(file="model-00009.safetensors"),
    "dtype": lambda fields: weight(fields).update(dtype="I32"),
    "unknown dtype": lambda fields: weight(fields).update(dtype="PICKLE"),
    "dtype of another size": lambda fields: weight(fields).update(dtype="F64"),
    "checksum": lambda fields: weight(fields)["parts"][0].update(xxh3_64="0" * 16),
    "checksum is no text": lambda fields: weight(fields)["parts"][0].update(xxh3_64=7),
    "alias of nothing": lambda fields: fields["sections"]["model"].update(tied={"alias": "nothing"}),
    "alias of itself": lambda fields: fields["sections"]["model"].update(tied={"alias": "tied"}),
    "alias circle": lambda fields: fields["sections"]["model"].update(tied={"alias": "u"}, u={"alias": "tied"}),
    "reserved name": lambda fields: fields["sections"]["model"].update(__metadata__={"alias": "weight"}),
    "section name": lambda fields: fields["sections"].update({"../x": {}}),
    "sections": lambda fields: fields.update(sections=[1]),
    "files": lambda fields: fields.update(files=None),
    "header size": lambda fields: fields["files"]["model-00000.safetensors"].update(header_size=0),
    "size": lambda fields: fields["files"]["model-00000.safetensors"].update(size=HUGE * 4),
    "format": lambda fields: fields.update(format="other"),
    "version": lambda fields: fields.update(version="1"),
    "world size": lambda fields: fields.update(world_size=None),
    "no document": lambda fields: fields.pop("document"),
    "rank documents": lambda fields: fields.update(rank_documents={}),
    "renamed": lambda fields: fields["sections"]["model"].update(other=fields["sections"]["model"].pop("bias")),
}
FILES = ["../../outside/" + MODEL, "/etc/passwd", MODEL + "/..", "", "a\0b", ".", "..", 3]
TEXTS = {
    "empty": "{}",
    "duplicate": '{"version": 1, "version": 1}',
    "NaN": '{"format": NaN}',
    "deep": '{"format": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "long number": '{"format": ' + "9" * 10_000 + "}",
    "cut": '{"format": "phalanx-checkpoint", "version": 1',
}
ATTACKS: dict[str, Callable[[Path], object]] = {
    "a pickle for a tensor file": in_place_of(MODEL, pickled),
    "a pickle for the manifest": in_place_of("manifest.json", pickled),
    "what torch.save writes": in_place_of(MODEL, saved_by_torch),
    "a zip archive": in_place_of(MODEL, zipped),
    "a tar archive for the manifest": in_place_of("manifest.json", tarred),
    "a link to a device": link_to(MODEL, "/dev/zero"),
    "a link to itself": link_to(MODEL, MODEL),
    "a link to a good file": link_to(MODEL, "../../outside/" + MODEL),
    "a manifest that is a link": link_to("manifest.json", "../../outside/manifest.json"),
    "a directory": replaced(MODEL, Path.mkdir),
    "a socket": replaced(MODEL, bind),
    "a pipe": replaced("manifest.json", lambda path: os.mkfifo(path)),
    "a pipe for a tensor file": replaced(MODEL, lambda path: os.mkfifo(path)),
    "a sparse manifest": lambda path: sparse(path / "manifest.json", 1 << 42, b"{"),
    "a sparse manifest that begins well": lambda path: sparse(
        path / "manifest.json", 1 << 42, b'{"checksum":"0123456789abcdef",'
    ),
    "a tensor that is claimed": changing(claimed([1 << 42, 4], 1 << 46)),
    "a header of 64 TB": changing(
        lambda fields: fields["files"][MODEL].update(size=1 << 46, header_size=(1 << 46) - 56)
    ),
    "segments that overlap": changing(overlapping),
    "files of another checkpoint": swapped(MODEL),
    "the manifest of another checkpoint": swapped("manifest.json"),
    "infinity by a large number": in_text('"saved_at":', '"saved_at":1e999,"before":'),
    "infinity in the document": in_text('"progress":', '"x":1e999,"progress":'),
    "NaN as a time": in_text('"saved_at":', '"saved_at":"nan","before":'),
    "a key twice": in_text('"finite":', '"finite":true,"finite":'),
    "a long list of dims": changing(lambda fields: fields["sections"]["model"]["weight"].update(shape=[1] * 300_000)),
    "a document of a million lists": set_document("state", nested(900)),
    "a huge tensor without bytes": set_document(
        "state", {"$": "inline", "dtype": "float32", "shape": [1 << 38], "base64": ""}
    ),
    "a class by name": set_document("state", {"$": "os.system", "value": "touch executed"}),
    "a factory by name": set_document("state", {"$": "defaultdict", "factory": "eval", "items": []}),
    "a header with a key twice": header(lambda text: text.replace(b'"weight":', b'"weight":1,"weight":')),
    "a header nested deeply": header(
        lambda text: text.replace(b'{"format":"pt"}', b'{"a":' + b"[" * 9000 + b"]" * 9000 + b"}")
    ),
    "a header with other metadata": header(lambda text: text.replace(b'{"format":"pt"}', b'{"format":["pt"]}')),
    "a header with numbers of another kind": header(lambda text: text.replace(b'"shape":[3,4]', b'"shape":[3.0,4]')),
    "a header that is no JSON": header(lambda text: b"\xff" * len(text)),
    **{f"manifest: {name}": changing(change) for name, change in CHANGES.items()},
    **{f"file {name!r}": in_file(name) for name in FILES},
    **{f"JSON: {name}": partial(write_manifest, text=text) for name, text in TEXTS.items()},
}
# What only decoding the state meets.
ONLY_LOADING = {name for name in ATTACKS if name.split()[:2] in (["a", "class"], ["a", "factory"])}
ONLY_LOADING |= {"a huge tensor without bytes", "a document of a million lists"}
# What only those meet that read the header, which the manifest makes superfluous.
ONLY_HEADERS = {name for name in ATTACKS if name.startswith("a header") and "64 TB" not in name}
ONLY_HEADERS |= {"manifest: dtype", "manifest: renamed"}


@pytest.mark.parametrize("attack", ATTACKS)
def test_it_is_refused_and_touches_nothing(tmp_path: Path, attack: str) -> None:
    path = good(tmp_path / "run" / "a.ckpt")
    shutil.copytree(path, tmp_path / "outside")
    ATTACKS[attack](path)
    before, held = contents(tmp_path, path), reset_peak_memory()

    problems = checkpoint.verify(path)
    taken = accepting(path)

    assert peak_memory() - held < MAX_BYTES
    if attack in ONLY_LOADING:
        assert taken == set(READERS) - {"load"}
    elif attack in ONLY_HEADERS:
        assert problems
        assert checkpoint.newest_good(path.parent, lambda text: None) is None
    else:
        assert problems
        # Listing names the damaged one, the newest is none; neither raises. What a manifest says may be shown.
        assert taken <= {"list", "newest", "inspect"}
        assert [one.status for one in checkpoint.checkpoints(path.parent, verify=True)] == ["damaged"]
        assert checkpoint.newest_good(path.parent, lambda text: None) is None
    assert contents(tmp_path, path) == before


def refused(path: Path) -> str:
    """Assert that nothing accepts the checkpoint; return the message."""
    assert checkpoint.verify(path) != []
    with pytest.raises(CheckpointError) as info:
        READERS["read_all"](path)
    assert not checkpoint.is_complete(path)
    assert checkpoint.newest_good(path.parent, lambda text: None) is None
    return str(info.value)


def test_no_truncated_or_longer_file_is_accepted_and_none_may_be_missing(tmp_path: Path) -> None:
    path = good(tmp_path / "a.ckpt")
    for file in sorted(path.iterdir()):
        data = file.read_bytes()
        for other in (b"", data[:-1], data[: len(data) // 2], data + b"\0"):
            file.write_bytes(other)
            refused(path)
        file.unlink()
        assert file.name in refused(path)
        file.write_bytes(data)
    assert checkpoint.is_complete(path)


def test_anything_but_a_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path, name in [(tmp_path, "manifest"), (tmp_path / "file", "file"), (tmp_path / "no", "no")]:
        with refuses(CheckpointError, name, str(path)):
            checkpoint.load(path)
        assert checkpoint.verify(path) != []


def test_a_newer_format_is_refused_by_name(tmp_path: Path) -> None:
    path = good(tmp_path / "a.ckpt")
    rewrite(path, lambda fields: fields.update(version=4, phalanx="9.9"))
    with refuses(CheckpointError, "version 4", "'9.9'"):
        checkpoint.load(path)


def test_a_tensor_larger_than_memory_is_refused_by_who_would_load_it(tmp_path: Path) -> None:
    path = good(tmp_path / "a.ckpt")
    rewrite(path, claimed([1 << 39, 4], 1 << 43))
    with (path / MODEL).open("r+b") as file:
        file.truncate(json.loads((path / "manifest.json").read_text())["files"][MODEL]["size"])
    held = reset_peak_memory()
    with refuses(CheckpointError, "'weight'", "8,796,093,022,208"):
        checkpoint.load(path)
    assert peak_memory() - held < MAX_BYTES


def test_parts_for_each_element_take_no_longer_than_their_list(tmp_path: Path) -> None:
    path = good(tmp_path / "a.ckpt")
    rewrite(path, entangled)
    assert "overlap" in checkpoint.verify(path)[0]


def test_the_good_one_is_taken_by_every_reader(tmp_path: Path) -> None:
    path = good(tmp_path / "a.ckpt")
    assert checkpoint.verify(path) == []
    assert accepting(path) == set(READERS)


@pytest.mark.parametrize("seed", range(3))
def test_mutated_manifests_raise_nothing_but_checkpoint_errors(tmp_path: Path, seed: int) -> None:
    path, generator = good(tmp_path / "a.ckpt"), random.Random(seed)
    fields = json.loads((path / "manifest.json").read_text())
    del fields["checksum"]
    cheap = {name: READERS[name] for name in ("load", "read_all", "inspect", "list")}
    refused, held = 0, reset_peak_memory()
    for number in range(250):
        write_manifest(path, json.dumps(mutated(fields, generator) or {}))
        problems = checkpoint.verify(path)
        taken = accepting(path, READERS if number % 5 == 0 else cheap)
        assert not problems or not taken & {"read_all", "load"} or "contradicts" in problems[0]
        refused += bool(problems)
    assert refused > 100
    assert peak_memory() - held < MAX_BYTES


def test_mutated_headers_raise_nothing_but_checkpoint_errors(tmp_path: Path) -> None:
    path, generator = good(tmp_path / "a.ckpt"), random.Random(1)
    kept = {file.name: file.read_bytes() for file in path.iterdir()}
    refused, readers = 0, {name: READERS[name] for name in ("read_all", "newest")}
    for _ in range(250):
        name = generator.choice([name for name in kept if name != "manifest.json"])

        def change(text: bytes) -> bytes:
            data = bytearray(text)
            for _ in range(generator.choice((1, 2, 8))):
                at = generator.randrange(len(data))
                piece = generator.choice(
                    (b"", b"9", b"[", b"}", b'"', b"\0", b"\xff", b"1e999", b"NaN", data[at : at + 9])
                )
                data[at : at + generator.choice((0, 1, 9))] = piece
            return bytes(data)

        rewrite_header(path, name, change)
        refused += bool(checkpoint.verify(path))
        accepting(path, readers)
        for file, data in kept.items():
            (path / file).write_bytes(data)
    assert refused > 200


# ---- names --------------------------------------------------------------------------------------------------------

NAMES = ["..", "../../up", "/absolute", "a/b", "nul\0", "line\nfeed", "\x1b[2Jcolour", "\u202egnp.exe", "\ud800", ""]


def named(path: Path) -> Path:
    tensors = {name: Shard.whole(torch.full((2,), float(index))) for index, name in enumerate(NAMES)}
    return checkpoint.save(
        path, CheckpointContents({"model": tensors}, {"hparams": dict.fromkeys(NAMES, 1)}), World.single()
    )


def test_names_are_only_names(tmp_path: Path) -> None:
    path = named(tmp_path / "run" / "a.ckpt")
    before = contents(tmp_path, path)

    assert list(checkpoint.load(path)["state_dict"]) == NAMES
    assert checkpoint.verify(path) == []
    checkpoint.consolidate(path, tmp_path / "run" / "out", max_shard_size="8B")
    made = contents(tmp_path, path).keys() - before.keys()
    assert {Path(name).parent for name in made} == {tmp_path / "run", tmp_path / "run" / "out"}


def test_the_command_prints_no_character_that_acts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, other = named(tmp_path / "a.ckpt"), good(tmp_path / "b.ckpt")
    rewrite(path, lambda fields: fields["document"].update(module="\x1b[31m\u202e", strategy="\n\n"))
    commands = [["inspect", str(path)], ["diff", str(path), str(other)], ["list", str(tmp_path)], ["verify", str(path)]]
    for command in commands:
        for flags in ([], ["--json"]):
            main(["checkpoint", *command, *flags])
    main(["checkpoint", "inspect", str(tmp_path / "\x1b[31m.ckpt")])
    shown = capsys.readouterr()
    acting = {char for char in shown.out + shown.err if unicodedata.category(char) in ("Cc", "Cf", "Cs")}
    assert acting <= {"\n"}
    assert len(shown.err.splitlines()) == 1


# ---- what is deleted ----------------------------------------------------------------------------------------------


def test_deleting_follows_no_link(tmp_path: Path) -> None:
    path, precious = good(tmp_path / "run" / "a.ckpt"), tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis").write_text("mine")
    (path / "model-00001.safetensors").symlink_to(precious)
    (path / "model-00002.safetensors").symlink_to(precious / "thesis")
    (tmp_path / "run" / f".a.ckpt.{'0' * 16}.tmp").symlink_to(precious)

    checkpoint.clean_leftovers(tmp_path / "run")
    checkpoint.remove(path)
    assert not path.exists()
    assert (precious / "thesis").read_text() == "mine"


# ---- time ---------------------------------------------------------------------------------------------------------


def test_the_cover_of_many_parts_is_checked_without_comparing_all() -> None:
    side = 200
    grid = [((row, column), (1, 1)) for row in range(side) for column in range(side)]
    columns = [((0, index), (side, 1)) for index in range(side * side)]
    assert coverage_problem((side, side), random.Random(0).sample(grid, len(grid))) is None
    assert coverage_problem((side, side * side), columns) is None
    twice = [*columns[:-1], columns[0]]
    assert "overlap" in str(coverage_problem((side, side * side), twice))
    everywhere = [((0, 0), (1, side))] * side
    assert "overlap" in str(coverage_problem((side, side), everywhere))


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_the_cover_agrees_with_counting(dims: int) -> None:
    generator = random.Random(dims)
    outcomes = set()
    for _ in range(400):
        shape = tuple(generator.randint(1, 4) for _ in range(dims))
        boxes = [((0,) * dims, shape)]
        for _ in range(generator.randint(0, 5)):
            offsets, extent = boxes.pop(generator.randrange(len(boxes)))
            dim = generator.randrange(dims)
            cut = generator.randint(0, extent[dim])
            first, second, moved = list(extent), list(extent), list(offsets)
            first[dim], second[dim], moved[dim] = cut, extent[dim] - cut, offsets[dim] + cut
            boxes += [(offsets, tuple(first)), (tuple(moved), tuple(second))]
        if generator.random() < 0.5:
            offsets, extent = boxes.pop()
            boxes.append((tuple(max(0, at - generator.randint(0, 1)) for at in offsets), extent))
        counts = torch.zeros(shape, dtype=torch.int64)
        for offsets, extent in boxes:
            counts[tuple(slice(at, at + size) for at, size in zip(offsets, extent, strict=True))] += 1
        assert (coverage_problem(shape, boxes) is None) == bool((counts == 1).all()), (shape, boxes)
        outcomes.add(bool((counts == 1).all()))
    assert outcomes == {True, False}


def test_a_refusal_names_file_and_tensor(tmp_path: Path) -> None:
    path = good(tmp_path / "a.ckpt")
    data = bytearray((path / MODEL).read_bytes())
    data[-1] ^= 1
    (path / MODEL).write_bytes(data)
    for reader in (READERS["load"], READERS["consolidate"], READERS["diff"]):
        with refuses(CheckpointError, "'bias'", MODEL):
            reader(path)
