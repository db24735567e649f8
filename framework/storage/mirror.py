"""``Mirror``: uploads a run from the cache, on a thread beside training. And what reads and writes without one."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from ..core.errors import StorageError
from ..system.file_lock import lock, unlock
from ..system.run_directory import LOCK
from .cached_folder import (
    MANIFEST,
    CachedFolder,
    delete_unfinished,
    folders_below,
    is_written,
    record_deletion,
    refresh,
)
from .cached_url import Location, is_url, local_place, url_of
from .lease import Lease
from .store import Store, open_store

INTERVAL_SECONDS = 30.0
"""The time after which the files of a run are uploaded again, such as its metrics."""
_PAUSE_SECONDS = 0.05
"""The time between a change and its upload. The save that made the change still holds up a step, and an upload at once
would compete with it for the interpreter: 1 to 5 ms more for each save."""
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 30.0
ENDED_SECONDS, PREEMPTED_SECONDS, FAILED_SECONDS = 600.0, 60.0, 20.0
"""How long a run waits for what is not uploaded: one that has trained, without an answer of the service; one that was
told to end, and one that has failed, in all."""

_leases: dict[Path, Lease] = {}
"""The leases that this process holds, by the directory of the run."""


class NoMirror:
    """Of a run that is on a disk."""

    def close(self, seconds: float | None = None) -> None:
        """Nothing to upload."""


class Mirror:
    """Uploads directories of the cache whenever they have changed, until it is closed.

    Args:
        folders: the directories, each with its subdirectories, and how many of the checkpoints in it keep their
            tensors on the disk; None for all.
        own: the directory of the run, whose lease this process holds; None if it is on a disk.
        note: called with a sentence when the service does not answer, and when it does again.
        is_first: whether this is the first node of the run; see ``CachedFolder``.
    """

    def __init__(
        self, folders: Mapping[Path, int | None], own: Path | None, note: Callable[[str], None], is_first: bool
    ) -> None:
        self._note = note
        self._keep = dict(folders)
        self._roots = {folder: _store_of(folder, patience=5.0) for folder in folders}
        self._own = own
        self._is_first = is_first
        self._folders: dict[Path, CachedFolder] = {}
        self._wake = threading.Event()
        self._is_closing = threading.Event()
        self._ended = threading.Event()
        self._problem: str | None = None
        self._rounds = 0
        """The number of times that everything was uploaded."""
        # Of directories that several runs may share. Readers on this machine leave them as they are.
        self._locks = [handle for folder in self._roots if folder != own and (handle := _locked(folder)) is not None]
        self._thread = threading.Thread(target=self._run, daemon=True, name="phalanx-upload")
        self._thread.start()
        _mirrors.update(dict.fromkeys(self._roots, self))

    def changed(self) -> None:
        """Upload soon, on the thread."""
        self._wake.set()

    def close(self, seconds: float | None = None) -> None:
        """Upload what is left, and end the thread.

        Args:
            seconds: how long this may take. None for as long as the service answers: then it fails if there was no
                answer for ten minutes.

        Raises:
            StorageError: not everything was uploaded.
        """
        for folder in self._roots:
            _mirrors.pop(folder, None)
        self._is_closing.set()
        # The round that is under way may have begun before the last change.
        needed, began = self._rounds + 2, time.monotonic()
        while self._rounds < needed and self._thread.is_alive():
            self._wake.set()
            if seconds is None and self._problem is None:
                began = time.monotonic()
            if time.monotonic() - began > (ENDED_SECONDS if seconds is None else seconds):
                break
            time.sleep(0.01)
        is_done = self._rounds >= needed
        self._ended.set()
        self._wake.set()
        self._thread.join(None if is_done else 1.0)
        if is_done and self._own is not None and self._is_first:
            # The list at the start may have been older than what a killed upload had left. It is no reason to fail.
            with suppress(OSError):
                delete_unfinished(self._own, self._roots[self._own])
        for handle in self._locks:
            unlock(handle)
        if not is_done:
            where = ", ".join(map(str, self._roots))
            raise StorageError(
                f"not everything was uploaded to {next(iter(self._roots.values())).url}: "
                f"{self._problem or 'it takes too long.'} It is in {where}, and the next fit uploads it."
            )

    def _run(self) -> None:
        wait = _FIRST_WAIT
        while not self._ended.is_set():
            try:
                self._upload()
            except Exception as error:
                if self._problem is None:
                    self._note(f"Nothing can be uploaded, and it is tried again: {error}")
                self._problem = str(error)
                self._ended.wait(wait)
                wait = min(2 * wait, _LONGEST_WAIT)
                continue
            if self._problem is not None:
                self._note("What could not be uploaded is uploaded now.")
            self._problem, wait = None, _FIRST_WAIT
            self._rounds += 1
            self._wake.wait(INTERVAL_SECONDS)
            self._is_closing.wait(_PAUSE_SECONDS)
            self._wake.clear()

    def _upload(self) -> None:
        if self._own is not None and self._is_first:
            _leases[self._own].check()
            if not self._rounds:
                delete_unfinished(self._own, self._roots[self._own])
        for root, folder in self._all_folders():
            folder.upload(self._ended.is_set)
            if (keep := self._keep[root]) is not None:
                folder.evict(keep)

    def _upload_files(self) -> None:
        for _, folder in self._all_folders():
            folder.upload_files()

    def _all_folders(self) -> Iterator[tuple[Path, CachedFolder]]:
        for root, store in self._roots.items():
            for path in folders_below(root):
                if path not in self._folders:
                    self._folders[path] = CachedFolder(path, store, root, self._is_first, self._upload_files)
                yield root, self._folders[path]


_mirrors: dict[Path, Mirror] = {}
"""The mirrors of this process, by each directory that they upload."""


def open_mirror(
    folders: Mapping[Path, int | None], note: Callable[[str], None], is_first: bool = True
) -> Mirror | NoMirror:
    """Return the mirror of those directories of a run, of which its own is the first, that are in the cache."""
    cached = {folder: keep for folder, keep in folders.items() if url_of(folder) is not None}
    own = next(iter(folders))
    if own in cached and is_first:
        take_lease(own, note)
    return Mirror(cached, own if own in cached else None, note, is_first) if cached else NoMirror()


# ---- the right to write a run ---------------------------------------------------------------------------------------


def take_lease(folder: Path, note: Callable[[str], None]) -> bool:
    """Take the right to write a run in a bucket, until ``release_lease``; return whether it was not held before.

    Raises:
        StorageError: another machine writes the run, or the service does not answer.
    """
    if (url := url_of(folder)) is None or folder in _leases:
        return False
    lease = Lease(open_store(url))
    lease.acquire(note)
    _leases[folder] = lease
    return True


def release_lease(folder: Path) -> None:
    """Give back the right to write a run, if this process has it."""
    if (lease := _leases.pop(folder, None)) is not None:
        lease.release()


def clean_passed_over(folder: Path) -> None:
    """Delete what killed uploads have left of a run that nobody continues, unless another machine writes it.

    Raises:
        StorageError: another machine writes it, or the service does not answer.
    """
    if (url := url_of(folder)) is not None:
        lease = Lease(store := open_store(url))
        lease.acquire(lambda _: None, waits=False)
        try:
            delete_unfinished(folder, store)
        finally:
            lease.release()


@contextmanager
def writing(folder: Path, note: Callable[[str], None]) -> Generator[None]:
    """Context in which this process alone writes the directory of a run; what it changes is uploaded at the end.

    Raises:
        StorageError: another machine writes it, or the service does not answer.
    """
    if (url := url_of(folder)) is None:
        yield
        return
    take_lease(folder, note)
    try:
        yield
        store = open_store(url)
        for path in folders_below(folder):
            CachedFolder(path, store, folder).upload()
    finally:
        release_lease(folder)


# ---- without a mirror -----------------------------------------------------------------------------------------------


def refreshed(location: Location) -> Path:
    """Return the local directory of a location; that of a URL has what is in the bucket now, but for tensors.

    Raises:
        ConfigurationError: the URL has an unknown protocol, or its library is missing.
        StorageError: the service does not answer.
    """
    if not is_url(location):
        return Path(location)
    place = local_place(location)
    if _covering(place) is None:
        store = _store_of(place)
        manifest = store.version(MANIFEST)
        if manifest is None:
            refresh(place, store)
        elif not is_written(place.parent):
            # A checkpoint is one entry of the directory above.
            above = place.parent
            CachedFolder(above, _store_of(above), above).refresh_one(f"{place.name}/{MANIFEST}", manifest[0])
    return place


def refresh_cached(folder: Path) -> None:
    """Download what others have changed below a directory of the cache. Raises as ``refreshed``."""
    if (url := url_of(folder)) is not None and _covering(folder) is None:
        refresh(folder, open_store(url))


def make_folders(folder: Path) -> None:
    """Make the directories that a directory of the cache has in the bucket, without what is in them.

    Raises:
        StorageError: the service does not answer.
    """
    if (url := url_of(folder)) is not None:
        for name in open_store(url).folders():
            (folder / name).mkdir(parents=True, exist_ok=True)


def created(path: Path) -> bool:
    """Upload a file that has no object yet; return False if it has one, of another machine. True on a disk.

    Raises:
        StorageError: it could not be uploaded.
    """
    folder = path.parent
    url = url_of(folder)
    return url is None or CachedFolder(folder, open_store(url), folder).create_one(path.name)


def after_change(path: Path, is_first: bool = True, patience: float = 60.0) -> None:
    """Upload what was saved or deleted: behind training by a mirror, else before this returns.

    Args:
        path: a file or a checkpoint.
        is_first: whether this is the first node of a run; see ``CachedFolder``.
        patience: the seconds for which a request that has failed is tried again.

    Raises:
        StorageError: it could not be uploaded.
    """
    if (mirror := _covering(path)) is not None:
        mirror.changed()
    elif (url := url_of(path.parent)) is not None and not is_written(path.parent):
        CachedFolder(path.parent, open_store(url, patience), path.parent, is_first).upload_one(path.name)


def before_deletion(path: Path) -> None:
    """Record that a checkpoint is deleted on purpose, so that it is deleted in the bucket too."""
    if url_of(path) is not None:
        record_deletion(path)


def delete_folder(folder: Path) -> None:
    """Delete all objects of a directory of the cache; manifests first, so that no checkpoint is read in between.

    Raises:
        StorageError: the service does not answer.
    """
    if (url := url_of(folder)) is not None:
        store = open_store(url)
        names = store.list()
        store.delete(sorted(names, key=lambda name: (not name.endswith(f"/{MANIFEST}"), name)))


def _covering(path: Path) -> Mirror | None:
    return next((_mirrors[folder] for folder in (path, *path.parents) if folder in _mirrors), None)


def _store_of(folder: Path, patience: float = 60.0) -> Store:
    url = url_of(folder)
    assert url is not None
    return open_store(url, patience)


def _locked(folder: Path) -> int | None:
    """Return the handle of the lock of a directory, which this process holds now; None if another one does."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    if lock(handle) is True:
        return handle
    os.close(handle)
    return None
