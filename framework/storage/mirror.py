"""``Mirror``: uploads a run from the cache, on a thread beside training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ..core.errors import ConfigurationError, StorageError
from .cached_folder import MANIFEST, CachedFolder, delete_unfinished, folders_below, refresh
from .cached_url import Location, is_url, local_place, url_of
from .lease import Lease
from .store import open_store

INTERVAL_SECONDS = 30.0
"""The time after which the files of a run are uploaded again, such as its metrics."""
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 30.0
ENDED_SECONDS, PREEMPTED_SECONDS, FAILED_SECONDS = 600.0, 60.0, 5.0
"""How long a run that has ended waits for an upload that does not get on."""

_mirrors: dict[Path, Mirror] = {}
"""The mirrors of this process, by each directory that they upload."""


class NoMirror:
    """Of a run that is on a disk."""

    def close(self, seconds: float = 0.0) -> None:
        """Nothing to upload."""


class Mirror:
    """Uploads directories of the cache whenever they have changed, until it is closed.

    Args:
        folders: the directories, each with its subdirectories, and how many of the checkpoints in it keep their
            tensors on the disk; None for all.
        own: the directory of the run, which no other process may upload; None if it is on a disk.
        note: called with a sentence when the service does not answer, and when it does again.
        is_first: whether this is the first node of the run; see ``CachedFolder``.
    """

    def __init__(
        self, folders: Mapping[Path, int | None], own: Path | None, note: Callable[[str], None], is_first: bool
    ) -> None:
        self._note = note
        self._keep = dict(folders)
        self._roots = {folder: open_store(_url(folder), patience=5.0) for folder in folders}
        self._own = own
        self._folders: dict[Path, CachedFolder] = {}
        self._wake = threading.Event()
        self._ended = threading.Event()
        self._problem: str | None = None
        self._rounds = 0
        """The number of times that everything was uploaded."""
        self._is_first = is_first
        self._lease = None if own is None or not is_first else Lease(self._roots[own])
        if self._lease is not None:
            self._lease.acquire(note)
        self._thread = threading.Thread(target=self._run, daemon=True, name="phalanx-upload")
        self._thread.start()
        _mirrors.update(dict.fromkeys(self._roots, self))

    def changed(self) -> None:
        """Upload now, on the thread."""
        self._wake.set()

    def close(self, seconds: float = ENDED_SECONDS) -> None:
        """Upload what is left, and end the thread.

        Raises:
            StorageError: it was not possible within ``seconds`` of the last success.
        """
        for folder in self._roots:
            _mirrors.pop(folder, None)
        # The round that is under way may have begun before the last change.
        began, needed, seen = time.monotonic(), self._rounds + 2, self._rounds
        while self._rounds < needed and self._thread.is_alive() and time.monotonic() - began < seconds:
            self._wake.set()
            if self._rounds > seen:
                seen, began = self._rounds, time.monotonic()
            time.sleep(0.01)
        self._ended.set()
        self._wake.set()
        if self._lease is not None:
            self._lease.release()
        if self._rounds < needed:
            where = ", ".join(map(str, self._roots))
            raise StorageError(
                f"not everything was uploaded to {next(iter(self._roots.values())).url}: "
                f"{self._problem or 'it takes too long.'} It is in {where}, and the next fit uploads it."
            )
        self._thread.join()

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
            self._wake.clear()

    def _upload(self) -> None:
        if not self._rounds and self._own is not None and self._is_first:
            delete_unfinished(self._own, self._roots[self._own])
        for root, store in self._roots.items():
            for path in folders_below(root):
                folder = self._folders.setdefault(path, CachedFolder(path, store, root, self._is_first))
                folder.upload()
                if (keep := self._keep[root]) is not None:
                    folder.evict(keep)


def open_mirror(
    folders: Mapping[Path, int | None], note: Callable[[str], None], is_first: bool = True
) -> Mirror | NoMirror:
    """Return the mirror of those directories of a run, of which its own is the first, that are in the cache."""
    cached = {folder: keep for folder, keep in folders.items() if url_of(folder) is not None}
    own = next(iter(folders))
    return Mirror(cached, own if own in cached else None, note, is_first) if cached else NoMirror()


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
        store = open_store(_url(place))
        manifest = store.version(MANIFEST)
        if manifest is None:
            refresh(place, store)
        else:
            # A checkpoint is one entry of the directory above.
            above = place.parent
            CachedFolder(above, open_store(_url(above)), above).refresh_one(f"{place.name}/{MANIFEST}", manifest[0])
    return place


def refresh_cached(folder: Path) -> None:
    """Download what others have changed below a directory of the cache. Raises as ``refreshed``."""
    if (url := url_of(folder)) is not None and _covering(folder) is None:
        refresh(folder, open_store(url))


def created(path: Path) -> bool:
    """Upload a file that has no object yet; return False if it has one, of another machine. True on a disk.

    Raises:
        StorageError: it could not be uploaded.
    """
    folder = path.parent
    url = url_of(folder)
    return url is None or CachedFolder(folder, open_store(url), folder).create_one(path.name)


def after_change(path: Path, is_first: bool = True) -> None:
    """Upload what was saved or deleted: behind training by a mirror, else before this returns.

    Args:
        path: a file or a checkpoint.
        is_first: whether this is the first node of a run; see ``CachedFolder``.

    Raises:
        StorageError: it could not be uploaded.
    """
    if (mirror := _covering(path)) is not None:
        mirror.changed()
    elif (url := url_of(path.parent)) is not None:
        CachedFolder(path.parent, open_store(url), path.parent, is_first).upload_one(path.name)


@contextmanager
def writing(folder: Path, note: Callable[[str], None]) -> Generator[None]:
    """Context in which this process alone writes the directory of a run; what it changes is uploaded at the end.

    Raises:
        StorageError: another machine writes it, or the service does not answer.
    """
    if (url := url_of(folder)) is None:
        yield
        return
    store = open_store(url)
    lease = Lease(store)
    lease.acquire(note)
    try:
        yield
        for path in folders_below(folder):
            CachedFolder(path, store, folder).upload()
    finally:
        lease.release()


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


def _url(folder: Path) -> str:
    url = url_of(folder)
    if url is None:
        raise ConfigurationError(f"{str(folder)!r} has no URL.")
    return url
