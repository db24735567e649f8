"""``NodeFolders``: a folder on each node for checkpoints in its memory, with copies that outlive a lost node.

On one node all ranks write a checkpoint into one folder. The memory of a node is not seen by others, so on several
nodes each keeps a part: the files that its ranks have written, those of the node before it in a ring, and the manifest,
which names all files. After the loss of a node each file is still on one of the others, unless its neighbour is lost
too. ``gather_newest`` then gives all files to all nodes, on which any number of ranks can load them.

The first rank of each node acts for it.
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from ..core.errors import CheckpointError, StorageError
from ..distributed.rendezvous import destroy_group
from ..distributed.world import World
from ..system.atomic_files import write_synced
from .inspection import furthest, good_manifests
from .manifest import MANIFEST, Manifest, parse_at, read_manifest_bytes
from .verify import bad_files, problems_of

_PIECE_BYTES = 16 * 2**20


class NodeFolders:
    """The folders of the nodes of a run. Its construction is collective.

    Args:
        world: the ranks.
        folder: the folder of this rank, the same for all ranks of its node.
        has_copies: whether each node keeps a copy of the files of the one before it.
    """

    def __init__(self, world: World, folder: Path, has_copies: bool = True) -> None:
        places = world.all_gather_object((socket.gethostname(), str(folder)))
        first: dict[tuple[str, str], int] = {}
        for rank, place in enumerate(places):
            first.setdefault(place, rank)
        self.folder = folder
        self._has_copies = has_copies
        self.is_usable = True
        """Whether all nodes hold the same newest checkpoint, so that ranks can continue from it."""
        self.serves_restarts = False
        """Whether ranks that fail are started again, by the launcher of node 0."""
        self.leaders = list(first.values())
        """The first rank of each node."""
        self.leader = first[places[world.rank]]
        """The first rank of this node."""
        self.leads = self.leader == world.rank
        """Whether this rank is the first one of its node."""
        self._leader_of = [first[place] for place in places]

    @property
    def are_several(self) -> bool:
        """Whether there are several nodes."""
        return len(self.leaders) > 1

    def copy_to_next(self, directory: Path, sizes: Sequence[dict[str, int]], world: World) -> None:
        """Copy the files of this node to the next one, and those of the node before into ``directory``.

        Called on the first rank of each node.

        Args:
            directory: the directory that the ranks of this node have written into.
            sizes: for each rank, the names of the files that it has written and their sizes in bytes.
            world: the ranks, whose control group is used.
        """
        if not self._has_copies:
            return
        place = self.leaders.index(world.rank)
        after, before = self.leaders[(place + 1) % len(self.leaders)], self.leaders[place - 1]
        sent, received = self._pieces(sizes, world.rank), self._pieces(sizes, before)
        failures: list[Exception] = []
        for number in range(max(len(sent), len(received))):
            # Each sends and receives at once, so that no node waits for one that waits for it. Nor does a failure stop
            # the exchange, in which the neighbours would wait.
            under_way: list[dist.Work | None] = []
            if number < len(received):
                buffer = bytearray(received[number].size)
                under_way.append(dist.irecv(_tensor(buffer), before, group=world.control))
            if number < len(sent):
                data = sent[number].read(directory, failures)
                under_way.append(dist.isend(_tensor(data), after, group=world.control))
            for work in filter(None, under_way):
                work.wait()
            if number < len(received) and not failures:
                received[number].write(directory, buffer, failures)
        if failures:
            raise failures[0]

    def _pieces(self, sizes: Sequence[dict[str, int]], leader: int) -> list[_Piece]:
        """Return the pieces of all files that the ranks of a node have written."""
        own = (each for rank, each in enumerate(sizes) if self._leader_of[rank] == leader)
        return [piece for files in own for name in sorted(files) for piece in _pieces_of(name, files[name])]


@dataclass(frozen=True)
class _Piece:
    """A range of bytes of a file."""

    name: str
    start: int
    size: int

    def read(self, directory: Path, failures: list[Exception]) -> bytearray:
        data = bytearray(self.size)
        try:
            with (directory / self.name).open("rb") as file:
                file.seek(self.start)
                file.readinto(data)
        except OSError as error:
            failures.append(error)
        return data

    def write(self, directory: Path, data: bytearray, failures: list[Exception]) -> None:
        try:
            with (directory / self.name).open("ab" if self.start else "wb") as file:
                file.write(data)
        except OSError as error:
            failures.append(error)


def _pieces_of(name: str, size: int) -> list[_Piece]:
    return [_Piece(name, start, min(_PIECE_BYTES, size - start)) for start in range(0, size, _PIECE_BYTES)]


def _tensor(data: bytearray) -> torch.Tensor:
    """Return a tensor of the bytes, which shares their memory."""
    return torch.frombuffer(data, dtype=torch.uint8)


@dataclass(frozen=True)
class _Held:
    """The files of one checkpoint on a node."""

    name: str
    checksum: str
    """Of its manifest, which is the same on all nodes."""
    progress: tuple[float, ...]
    files: frozenset[str]
    """The files of which every byte is good."""


def gather_newest(world: World, nodes: NodeFolders, note: Callable[[str], None]) -> bool:
    """Give every node all files of the newest checkpoint of which each file is left on some node. Collective.

    What is left of checkpoints that have lost files is removed.

    Args:
        world: the ranks.
        nodes: their folders.
        note: called on rank 0 with a sentence about each checkpoint that cannot be used.

    Returns:
        Whether there is one that all nodes hold now; True for a single node, which is not searched.
    """
    if not nodes.are_several:
        return True
    own = _held(nodes.folder) if nodes.leads else []
    every = {rank: held for rank, held in enumerate(world.all_gather_object(own)) if rank in nodes.leaders}
    kinds = {(held.name, held.checksum): held for of_node in every.values() for held in of_node}
    group = dist.new_group(nodes.leaders, backend="gloo")
    try:
        for newest in sorted(kinds.values(), key=lambda held: held.progress, reverse=True):
            path, holders = nodes.folder / newest.name, _holders(newest, every)
            source = next(rank for rank, of_node in every.items() if any(held == newest for held in of_node))
            data = world.broadcast_object(read_manifest_bytes(path) if world.rank == source else b"", source)
            manifest = parse_at(path, data)
            if lost := sorted(set(manifest.files) - set(holders)):
                if nodes.leads:
                    shutil.rmtree(path, ignore_errors=True)
                problems = [f"{lost[0]} is on none of the nodes."]
            else:
                own_problem = _take(path, world.rank, data, manifest, holders, group) if nodes.leads else ""
                found = world.all_gather_object(own_problem)
                problems = [f"rank {rank}: {problem}" for rank, problem in enumerate(found) if problem]
            if not problems:
                return True
            if world.is_global_zero:
                note(f"Skipped {newest.name} of step {newest.progress[0]:.0f}: {problems[0]}")
        return False
    finally:
        destroy_group([group])


def _held(folder: Path) -> list[_Held]:
    """Return what is left of the checkpoints in a folder."""
    found = []
    for path, manifest in good_manifests([folder] if folder.is_dir() else ()):
        there = [name for name in manifest.files if (path / name).exists()]
        bad = bad_files(path, manifest, there)
        found.append(_Held(path.name, manifest.checksum, furthest(manifest), frozenset(there) - bad))
    return found


def _holders(newest: _Held, every: dict[int, list[_Held]]) -> dict[str, list[int]]:
    """Return, for each file of a checkpoint that is left, the ranks whose nodes hold it."""
    holders: dict[str, list[int]] = {}
    for rank, of_node in every.items():
        for held in of_node:
            is_same = (held.name, held.checksum) == (newest.name, newest.checksum)
            for name in held.files if is_same else ():
                holders.setdefault(name, []).append(rank)
    return holders


def _take(
    path: Path,
    rank: int,
    data: bytes,
    manifest: Manifest,
    holders: dict[str, list[int]],
    group: dist.ProcessGroup,
) -> str:
    """Get the files of a checkpoint that this node lacks from others; return why it could not, if so.

    A failure does not stop the exchange, in which the others would wait.
    """
    failures: list[Exception] = []
    missing = {name for name, ranks in holders.items() if rank not in ranks}
    if _manifest_of(path) != data:
        # Another checkpoint, or the files of one without a manifest.
        shutil.rmtree(path, ignore_errors=True)
    try:
        path.mkdir(parents=True, exist_ok=True)
        needed, free = sum(manifest.files[name].size for name in missing), shutil.disk_usage(path).free
        if needed > free:
            failures.append(
                StorageError(f"it needs {needed:,} bytes of memory, and {free:,} are free in {path.parent}.")
            )
    except OSError as error:
        failures.append(error)
    for name in sorted(holders):
        if len(holders[name]) < dist.get_world_size(group):
            source = holders[name][0]
            for piece in _pieces_of(name, manifest.files[name].size):
                given = piece.read(path, failures) if rank == source else bytearray(piece.size)
                dist.broadcast(_tensor(given), source, group=group)
                if name in missing and not failures:
                    piece.write(path, given, failures)
    if not failures and (problems := problems_of(path, manifest, missing)):
        return problems[0]
    try:
        if not failures and _manifest_of(path) is None:
            write_synced(path / MANIFEST, data)
    except OSError as error:
        failures.append(error)
    return str(failures[0]) if failures else ""


def _manifest_of(path: Path) -> bytes | None:
    with suppress(CheckpointError):
        return read_manifest_bytes(path)
    return None
