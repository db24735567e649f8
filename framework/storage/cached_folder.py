"""``CachedFolder``: one directory of the cache and its objects, kept alike.

A hidden file of each directory records, for everything in it, the version of the object and the state of the local file
when the two were the same. From that follows which of the two has changed since:

    the local one           it is uploaded, by ``upload``
    the object              it is downloaded, by ``refresh``
    both                    the object counts, unless this machine was uploading it when it was interrupted

A checkpoint is one entry, the object of its manifest. Its tensor files are downloaded when they are read.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ..core.errors import StorageError
from ..system.atomic_directories import HiddenDirectory, replace_directory
from ..system.atomic_files import hidden_sibling, new_file, write_synced
from ..system.file_lock import is_held
from ..system.run_directory import LOCK
from .store import Store

MANIFEST = "manifest.json"
RECORD = ".remote.json"
DELETIONS = ".remote.deleted"
_START = re.compile(rb'\{"checksum":"([0-9a-f]{16})"')
# For files that other nodes upload at the same time.
_OTHERS_SECONDS, _POLL_SECONDS = 120.0, 0.2
_CHECKSUM = re.compile(r"[0-9a-f]{16}")


@dataclass
class Entry:
    """A file or a checkpoint, as it was when the local one and the object were the same."""

    version: str = ""
    """The version of the object; empty if it was never uploaded."""
    state: str = ""
    """The size and the time of a local file, or the checksum of a checkpoint's manifest."""
    pending: str = ""
    """The state that was being uploaded when this was recorded."""


class CachedFolder:
    """A directory of the cache.

    Args:
        store: the objects, by names relative to the URL of ``root``.
        root: the directory whose URL the store has; ``path`` is it, or is below it.
        is_first: whether this is the first node of a run. On others there are only the tensor files of their own
            ranks, and the manifests, which the first node uploads once all files are there.
        before_manifest: called before the manifest of a checkpoint is uploaded. It uploads what the checkpoint
            refers to, such as the metrics up to its step.
    """

    def __init__(
        self,
        path: Path,
        store: Store,
        root: Path,
        is_first: bool = True,
        before_manifest: Callable[[], None] = lambda: None,
    ) -> None:
        self.path = path
        self._store = store
        self._is_first = is_first
        self._before_manifest = before_manifest
        self._below = "" if path == root else path.relative_to(root).as_posix() + "/"
        self._entries: dict[str, Entry] = {}
        self._put: dict[str, set[str]] = {}
        """The objects of tensor files that were uploaded here, by checkpoint. A list may be too old to have them."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            known = json.loads((path / RECORD).read_bytes())
            self._entries = {name: Entry(**entry) for name, entry in known.items()}

    # ---- to the bucket ----------------------------------------------------------------------------------------------

    def upload(self, is_stopped: Callable[[], bool] = lambda: False) -> None:
        """Upload what has changed here, and delete the objects of checkpoints that were deleted.

        Args:
            is_stopped: called before each file; once it returns True the rest is left.

        Raises:
            OSError: the service does not answer. What was uploaded before is recorded.
        """
        # Those that are deleted while others are uploaded wait for the next time: the newest one must be there first.
        deleted = deletions_in(self.path) if self._is_first else []
        for name, state in _contents(self.path).items():
            if is_stopped():
                return
            self._upload(name, state)
        for name in deleted:
            if not os.path.lexists(self.path / name):
                self._delete(name)
        if deleted:
            _forget_deletions(self.path, deleted)
        if not self._is_first:
            for name in list(self._entries):
                self._follow(name)

    def upload_files(self) -> None:
        """Upload what has changed here, but for checkpoints. Raises as ``upload``."""
        for name, state in _contents(self.path).items():
            if not _is_checksum(state):
                self._upload(name, state)

    def create_one(self, name: str) -> bool:
        """Upload a file that has no object yet; return False if it has one, of another machine."""
        state = _state(self.path / name)
        if not self._store.create(self._below + name, (self.path / name).read_bytes()):
            return False
        self._uploaded(self._entries.setdefault(name, Entry()), state, self._below + name)
        return True

    def upload_one(self, name: str) -> None:
        """Upload a file or a checkpoint, or delete its objects if it was deleted. Raises as ``upload``."""
        if (state := _contents(self.path).get(name)) is not None:
            self._upload(name, state)
        elif name in deletions_in(self.path):
            self._delete(name)
            _forget_deletions(self.path, [name])

    def _upload(self, name: str, state: str) -> None:
        if not (self._is_first or _is_checksum(state)):
            return
        entry = self._entries.setdefault(name, Entry())
        if entry.state != state:
            put = self._put_checkpoint if _is_checksum(state) else self._put_file
            put(name, state, entry)

    def _put_file(self, name: str, state: str, entry: Entry) -> None:
        self._expect(entry, state)
        # A file that was deleted in the meantime has no object.
        with contextlib.suppress(FileNotFoundError):
            self._store.put(self._below + name, self.path / name)
            self._uploaded(entry, state, self._below + name)

    def _put_checkpoint(self, name: str, checksum: str, entry: Entry) -> None:
        """Upload a checkpoint, its manifest last, unless it is replaced or deleted in the meantime."""
        was_begun = entry.pending == checksum
        with contextlib.ExitStack() as opened:
            # Opened all at once: their bytes stay, whatever happens to their names.
            try:
                files = {
                    file.name: os.fdopen(opened.enter_context(_opened(file)), "rb", closefd=False)
                    for file in sorted((self.path / name).iterdir())
                }
                manifest = files.pop(MANIFEST).read()
            except (FileNotFoundError, KeyError):
                return
            if checksum_of(manifest) != checksum:
                return
            self._expect(entry, checksum)
            for file, handle in files.items():
                target = f"{self._below}{name}/{checksum}/{file}"
                size = os.fstat(handle.fileno()).st_size
                known = self._store.version(target) if was_begun else None
                if known is None or known[1] != size:
                    self._store.put(target, Path(f"/dev/fd/{handle.fileno()}"))
                self._put.setdefault(name, set()).add(target)
        if not self._is_first:
            entry.version, entry.state, entry.pending = "", checksum, ""
            self._write()
            return
        if not self._waited_for_others(name, checksum, manifest, set(files)):
            return
        self._before_manifest()
        place = f"{self._below}{name}/{MANIFEST}"
        self._store.put(place, manifest)
        self._uploaded(entry, checksum, place)
        self._delete_others(name, keep=checksum)

    def _waited_for_others(self, name: str, checksum: str, manifest: bytes, own: set[str]) -> bool:
        """Wait until other nodes have uploaded their files of a checkpoint; return False if it was replaced meanwhile.

        Raises:
            StorageError: they take too long; it is tried again with the next upload.
        """
        below, place = f"{self._below}{name}/{checksum}/", self.path / name
        sizes = {name: record["size"] for name, record in json.loads(manifest)["files"].items()}
        until = time.monotonic() + _OTHERS_SECONDS
        for file in sorted(set(sizes) - own):
            while (known := self._store.version(below + file)) is None or known[1] != sizes[file]:
                if checkpoint_state(place) != checksum:
                    return False
                if time.monotonic() > until:
                    raise StorageError(f"{below}{file} has not been uploaded by its node.")
                time.sleep(_POLL_SECONDS)
        return True

    def _follow(self, name: str) -> None:
        """Delete the local files of a checkpoint that the first node has deleted."""
        entry, found = self._entries[name], self._store.version(f"{self._below}{name}/{MANIFEST}")
        if found is None and entry.version:
            _remove(self.path / name)
            del self._entries[name]
        elif found is not None:
            entry.version = found[0]

    def _expect(self, entry: Entry, state: str) -> None:
        entry.pending = state
        self._write()

    def _uploaded(self, entry: Entry, state: str, name: str) -> None:
        found = self._store.version(name)
        entry.version, entry.state, entry.pending = found[0] if found else "", state, ""
        self._write()

    def _delete(self, name: str) -> None:
        # First the object without which no reader finds the others.
        self._store.delete([f"{self._below}{name}/{MANIFEST}"])
        self._delete_others(name)
        self._entries.pop(name, None)
        self._write()

    def _delete_others(self, name: str, keep: str = "") -> None:
        """Delete the tensor files of a checkpoint that do not belong to the manifest with the checksum ``keep``."""
        own = f"{self._below}{name}/"
        found = {each for each in self._store.list(own[:-1]) if _is_tensor_file(each)} | self._put.pop(name, set())
        kept = {each for each in found if keep and each.startswith(f"{own}{keep}/")}
        if kept:
            self._put[name] = kept
        if found - kept:
            self._store.delete(sorted(found - kept))

    def evict(self, keep: int) -> None:
        """Delete the local tensor files of all but the newest ``keep`` checkpoints, as far as they are uploaded."""
        found = []
        for name, state in _contents(self.path).items():
            entry = self._entries.get(name)
            if _is_checksum(state) and entry is not None and entry.state == state:
                with contextlib.suppress(FileNotFoundError):
                    found.append(((self.path / name / MANIFEST).stat().st_mtime_ns, name))
        for _, name in sorted(found, reverse=True)[keep:]:
            # By the open directory: training may give its name to another checkpoint at any time.
            with contextlib.suppress(FileNotFoundError), _opened(self.path / name, os.O_DIRECTORY) as folder:
                if _state_in(folder) == self._entries[name].state:
                    for file in os.listdir(folder):
                        if file != MANIFEST:
                            os.unlink(file, dir_fd=folder)

    # ---- from the bucket --------------------------------------------------------------------------------------------

    def refresh(self, listed: Mapping[str, str]) -> None:
        """Download what others have changed, and delete what they have deleted.

        Args:
            listed: the versions of the objects of this directory, by name; that of a checkpoint is its manifest's.
        """
        local, deleted = _contents(self.path), deletions_in(self.path)
        for name, version in listed.items():
            if name.startswith(".") or name.partition("/")[0] in deleted:
                continue
            entry = self._entries.get(name.partition("/")[0])
            if name.partition("/")[0] not in local or entry is None or entry.version != version:
                self._refresh(name, version, local)
        for name in {*self._entries} - {each.partition("/")[0] for each in listed}:
            self._forget(name, local)
        if self._entries:
            self._write()

    def refresh_one(self, name: str, version: str) -> None:
        """Download a file or the manifest of a checkpoint, if others have changed it."""
        self._refresh(name, version, _contents(self.path))
        self._write()

    def _refresh(self, name: str, version: str, local: Mapping[str, str]) -> None:
        own, place = name.partition("/")[0], self._below + name
        entry = self._entries.get(own, Entry())
        if own in local and (found := self._store.version(place)) is not None:
            # A list may be old.
            version = found[0]
            if version == entry.version or (entry.pending and self._is_own(place, found[1], entry.pending)):
                return
        # A file that was deleted in the meantime is not there.
        with contextlib.suppress(FileNotFoundError):
            self._entries[own] = Entry(version, self._take(own, place))

    def _is_own(self, place: str, size: int, pending: str) -> bool:
        """Whether an object is what this machine was uploading when it was interrupted."""
        if _is_checksum(pending):
            return checksum_of(self._store.read(place, 0, 64)) == pending
        return pending.endswith(f"-{size}")

    def _forget(self, name: str, local: Mapping[str, str]) -> None:
        """Delete what another machine has deleted, unless it has changed here since."""
        entry = self._entries[name]
        if not entry.version or local.get(name, entry.state) != entry.state:
            return
        place = f"{self._below}{name}/{MANIFEST}" if _is_checksum(entry.state) else self._below + name
        if self._store.version(place) is None:
            _remove(self.path / name)
            del self._entries[name]

    def _take(self, name: str, place: str) -> str:
        """Write a file, or the manifest of a checkpoint; return its state."""
        target = self.path / name
        if not place.endswith(f"/{name}/{MANIFEST}") and place != f"{name}/{MANIFEST}":
            with new_file(target) as temporary:
                self._store.download(place, temporary)
            return _state(target)
        manifest = self._store.read(place)
        checksum = checksum_of(manifest)
        if not checksum or checkpoint_state(target) == checksum:
            return checksum
        hidden = HiddenDirectory(target)
        try:
            write_synced(hidden.path / MANIFEST, manifest)
            replace_directory(hidden.path, target)
        finally:
            hidden.release()
        return checksum

    def _write(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        temporary = hidden_sibling(self.path / RECORD, "tmp")
        temporary.write_text(json.dumps({name: asdict(entry) for name, entry in self._entries.items()}))
        os.replace(temporary, self.path / RECORD)


# ---- deletions on purpose -------------------------------------------------------------------------------------------


def record_deletion(path: Path) -> None:
    """Record that the objects of a checkpoint are to be deleted once it is not there any more.

    What is merely missing, such as after the cache was deleted, stays in the bucket.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _deletions(path.parent) as (names, write):
        write([*names, path.name])


def deletions_in(folder: Path) -> list[str]:
    """Return the names of the checkpoints of a directory that were deleted on purpose, and are not there any more."""
    if not (folder / DELETIONS).exists():
        return []
    with _deletions(folder) as (names, _):
        return [name for name in dict.fromkeys(names) if not os.path.lexists(folder / name)]


def _forget_deletions(folder: Path, done: Iterable[str]) -> None:
    with _deletions(folder) as (names, write):
        write([name for name in names if name not in set(done)])


@contextlib.contextmanager
def _deletions(folder: Path) -> Iterator[tuple[list[str], Callable[[list[str]], None]]]:
    """Yield the names in the file of deletions, and what writes others; no other process writes it meanwhile."""
    handle = os.open(folder / DELETIONS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        names = os.pread(handle, 1 << 24, 0).decode("utf-8", "replace").split("\n")

        def write(kept: list[str]) -> None:
            data = "".join(f"{name}\n" for name in kept).encode("utf-8")
            # Not synced: training waits for this, and a machine that loses its power loses the cache as well.
            os.pwrite(handle, data, 0)
            os.ftruncate(handle, len(data))

        yield [name for name in names if name], write
    finally:
        os.close(handle)


# ---- trees of directories -------------------------------------------------------------------------------------------


def folders_below(root: Path) -> Iterator[Path]:
    """Yield a directory and those below it, without hidden ones and without checkpoints."""
    if not root.is_dir():
        return
    yield root
    for entry in sorted(os.scandir(root), key=lambda each: each.name):
        is_folder = entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".")
        if is_folder and not os.path.lexists(os.path.join(entry.path, MANIFEST)):
            yield from folders_below(Path(entry.path))


def refresh(root: Path, store: Store) -> None:
    """Download what others have changed below a directory, whose URL the store has.

    Directories of runs that a process of this machine writes are left as they are: they are newer.
    """
    listed = store.list()
    checkpoints = {folder for folder, _, name in (each.rpartition("/") for each in listed) if name == MANIFEST}
    by_folder: dict[str, dict[str, str]] = {
        folder.relative_to(root).as_posix().lstrip("."): {} for folder in folders_below(root)
    }
    for name, version in listed.items():
        checkpoint = next((each for each in _parents(name) if each in checkpoints), None)
        folder, _, own = (name if checkpoint is None else checkpoint).rpartition("/")
        if checkpoint is None and not _is_tensor_file(name):
            by_folder.setdefault(folder, {})[own] = version
        elif name == f"{checkpoint}/{MANIFEST}":
            by_folder.setdefault(folder, {})[f"{own}/{MANIFEST}"] = version
    for folder, names in by_folder.items():
        if not is_written(root / folder):
            CachedFolder(root / folder, store, root).refresh(names)


def delete_unfinished(root: Path, store: Store) -> None:
    """Delete what killed uploads have left below a directory that this process alone uploads."""
    others: dict[str, list[tuple[str, str]]] = {}
    for name in store.list():
        if _is_tensor_file(name):
            checkpoint, checksum, _ = name.rsplit("/", 2)
            if checkpoint_state(root / checkpoint) != checksum:
                others.setdefault(checkpoint, []).append((checksum, name))
    for checkpoint, found in others.items():
        # The checkpoint here may be newer than that in the bucket.
        kept = ""
        with contextlib.suppress(FileNotFoundError):
            kept = checksum_of(store.read(f"{checkpoint}/{MANIFEST}", 0, 64))
        store.delete([name for checksum, name in found if checksum != kept])


def checksum_of(manifest: bytes) -> str:
    """Return the checksum in a manifest; empty for anything else."""
    match = _START.match(manifest)
    return "" if match is None else match[1].decode("ascii")


def _contents(folder: Path) -> dict[str, str]:
    """Return the state of every file and checkpoint in a directory, by name, without hidden ones and links."""
    found = {}
    with contextlib.suppress(FileNotFoundError):
        for entry in sorted(os.scandir(folder), key=lambda each: each.name):
            if entry.name.startswith("."):
                continue
            # What is deleted in the meantime is not there.
            with contextlib.suppress(FileNotFoundError):
                if entry.is_file(follow_symlinks=False):
                    found[entry.name] = _state(folder / entry.name)
                elif entry.is_dir(follow_symlinks=False) and (checksum := checkpoint_state(folder / entry.name)):
                    found[entry.name] = checksum
    return found


def _state(path: Path) -> str:
    status = path.stat()
    return f"{status.st_mtime_ns}-{status.st_size}"


def checkpoint_state(path: Path) -> str:
    """Return the checksum of a checkpoint's manifest; empty for anything else."""
    try:
        with _opened(path, os.O_DIRECTORY) as folder:
            return _state_in(folder)
    except (FileNotFoundError, NotADirectoryError):
        return ""


def _state_in(folder: int) -> str:
    try:
        with _opened(Path(MANIFEST), dir_fd=folder) as file:
            return checksum_of(os.read(file, 64))
    except FileNotFoundError:
        return ""


def _is_checksum(state: str) -> bool:
    return _CHECKSUM.fullmatch(state) is not None


def _is_tensor_file(name: str) -> bool:
    """Whether an object's name is that of a checkpoint's tensor file: ``.../<checksum>/<file>``."""
    parts = name.split("/")
    return len(parts) > 2 and _is_checksum(parts[-2]) and parts[-1].endswith(".safetensors")


def _parents(name: str) -> Iterator[str]:
    while "/" in name:
        name = name.rpartition("/")[0]
        yield name


@contextlib.contextmanager
def _opened(path: Path, flags: int = 0, dir_fd: int | None = None) -> Iterator[int]:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags, dir_fd=dir_fd)
    try:
        yield handle
    finally:
        os.close(handle)


def is_written(path: Path) -> bool:
    """Whether a process of this machine holds the lock of a run's directory that a path is in."""
    return any(is_held(folder / LOCK) for folder in (path, *path.parents[:3]))


def _remove(path: Path) -> None:
    try:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"{str(path)!r} was deleted elsewhere, and could not be deleted here: {error}.") from error
