"""``Store``: the objects below a URL, by eight verbs."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..core.errors import ConfigurationError, StorageError
from ..system.atomic_files import new_file

_FIRST_WAIT = 0.25
_LONGEST_WAIT = 10.0
# Fields of what fsspec says about an object, of which the first one that is there tells its versions apart.
_VERSIONS = ("ETag", "etag", "generation", "content_md5", "md5", "created", "mtime", "LastModified", "last_modified")
# What another attempt does not change.
_FINAL = (FileNotFoundError, PermissionError, FileExistsError, ImportError, NotImplementedError, TypeError)


class Store(Protocol):
    """The objects below one URL, by their names relative to it, with slashes.

    An object is there with all of its bytes or not at all, before, during and after each call. All methods may be
    called on any thread. Every method but ``version`` raises ``FileNotFoundError`` for an object that does not exist,
    and each of them an ``OSError`` if the service does not answer or refuses.
    """

    url: str

    def list(self, below: str = "") -> dict[str, str]:
        """Return the versions of all objects whose names begin with ``below`` and a slash, by name.

        A service may answer with what was there some seconds ago.
        """

    def folders(self) -> Sequence[str]:
        """Return the parts before the first slash of the names that have one."""

    def version(self, name: str) -> tuple[str, int] | None:
        """Return the version of an object, and its size in bytes; None if it does not exist."""

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        """Return the bytes of an object from ``start`` to ``end``."""

    def download(self, name: str, target: Path) -> None:
        """Write an object to a new file."""

    def put(self, name: str, source: bytes | Path) -> None:
        """Write an object: bytes, or the contents of a file."""

    def create(self, name: str, data: bytes) -> bool:
        """Write an object that does not exist; return False if it does, or another process was faster."""

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; those that do not exist are ignored."""


def open_store(url: str, patience: float = 60.0) -> Store:
    """Return the store of a URL.

    Args:
        patience: the seconds for which a request that has failed is tried again.

    Raises:
        ConfigurationError: the library of its protocol is not installed.
    """
    protocol, _, rest = url.partition("://")
    return LocalStore(url, Path(rest)) if protocol == "file" else RemoteStore(url, patience)


class LocalStore:
    """A store in a directory, such as that of a network file system: ``file:///mnt/shared``."""

    def __init__(self, url: str, root: Path) -> None:
        self.url = url
        self._root = root

    def list(self, below: str = "") -> dict[str, str]:
        found = {}
        for folder, _, files in os.walk(self._root / below):
            for file in files:
                path = Path(folder, file)
                # Hidden files are being written.
                if not file.startswith(".") and (known := _status(path)) is not None:
                    found[path.relative_to(self._root).as_posix()] = known[0]
        return found

    def folders(self) -> Sequence[str]:
        found = os.scandir(self._root) if self._root.is_dir() else ()
        return sorted(entry.name for entry in found if entry.is_dir())

    def version(self, name: str) -> tuple[str, int] | None:
        return _status(self._root / name)

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        with (self._root / name).open("rb") as file:
            file.seek(start or 0)
            return file.read(-1 if end is None else end - (start or 0))

    def download(self, name: str, target: Path) -> None:
        shutil.copyfile(self._root / name, target)

    def put(self, name: str, source: bytes | Path) -> None:
        with new_file(self._root / name) as temporary, temporary.open("xb") as file:
            if isinstance(source, bytes):
                file.write(source)
            else:
                with source.open("rb") as given:
                    shutil.copyfileobj(given, file)
            file.flush()
            os.fsync(file.fileno())

    def create(self, name: str, data: bytes) -> bool:
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with path.open("xb") as file:
                file.write(data)
        except FileExistsError:
            return False
        return True

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            path = self._root / name
            path.unlink(missing_ok=True)
            for folder in path.relative_to(self._root).parents[:-1]:
                try:
                    (self._root / folder).rmdir()
                except OSError:
                    break


def _status(path: Path) -> tuple[str, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return f"{found.st_mtime_ns}-{found.st_ino}-{found.st_size}", found.st_size


class RemoteStore:
    """A store of fsspec. Requests that fail are tried again, with growing pauses."""

    def __init__(self, url: str, patience: float) -> None:
        self.url = url
        self._patience = patience
        try:
            from fsspec.core import url_to_fs

            # Its lists of directories are not those of other processes.
            self._files, root = url_to_fs(url, use_listings_cache=False)
        except ImportError as error:
            raise ConfigurationError(f"{url!r} needs a package that is not installed: {error}") from None
        except Exception as error:
            # Such as credentials that are missing.
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise StorageError(f"{url} cannot be reached ({reason}).") from None
        self._root = root.rstrip("/")

    def list(self, below: str = "") -> dict[str, str]:
        try:
            listed = self._retried("listing", below, lambda: self._files.find(self._path(below), detail=True))
        except FileNotFoundError:
            return {}
        root = len(self._root) + 1
        return {path[root:]: _version(info) for path, info in listed.items() if len(path) > root}

    def folders(self) -> Sequence[str]:
        try:
            listed = self._retried("listing", "", lambda: self._files.ls(self._root, detail=True))
        except FileNotFoundError:
            return []
        return sorted(each["name"].rstrip("/").rpartition("/")[2] for each in listed if each["type"] == "directory")

    def version(self, name: str) -> tuple[str, int] | None:
        try:
            info = self._retried("asking for", name, lambda: self._files.info(self._path(name)))
        except FileNotFoundError:
            return None
        return None if info.get("type") == "directory" else (_version(info), int(info["size"]))

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        path = self._path(name)
        data: bytes = self._retried("reading", name, lambda: self._files.cat_file(path, start=start, end=end))
        return data

    def download(self, name: str, target: Path) -> None:
        self._retried("reading", name, lambda: self._files.get_file(self._path(name), str(target)))

    def put(self, name: str, source: bytes | Path) -> None:
        path = self._path(name)

        def put() -> None:
            if isinstance(source, bytes):
                self._files.pipe_file(path, source)
            else:
                self._files.put_file(str(source), path)

        if isinstance(source, Path):
            # A file that was deleted in the meantime is not a fault of the service.
            source.stat()
        try:
            self._retried("writing", name, put)
        except FileNotFoundError:
            bucket = self.url.partition("://")[2].partition("/")[0]
            raise StorageError(f"writing {self.url}/{name} failed: there is no bucket {bucket!r}.") from None

    def create(self, name: str, data: bytes) -> bool:
        if self.version(name) is not None:
            return False
        try:
            # Not tried again: an answer that is lost would look like the object of another process.
            self._files.pipe_file(self._path(name), data, mode="create")
        except FileExistsError:
            return False
        except Exception:
            # A service, or a library, that cannot: the last one to write counts.
            self.put(name, data)
        return self.read(name) == data

    def delete(self, names: Iterable[str]) -> None:
        paths = [self._path(name) for name in names]

        def delete() -> None:
            for path in paths:
                try:
                    self._files.rm_file(path)
                except FileNotFoundError:
                    continue

        self._retried("deleting", "", delete)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _retried(self, action: str, name: str, request: Callable[[], Any]) -> Any:
        """Return the result of a request; one that fails is tried again for as long as the store has patience."""
        began, wait = time.monotonic(), _FIRST_WAIT
        while True:
            # Other processes change what was listed.
            self._files.invalidate_cache()
            try:
                return request()
            except FileNotFoundError:
                raise
            except Exception as error:
                is_final = isinstance(error, _FINAL) or time.monotonic() + wait - began > self._patience
                if is_final:
                    where = f"{self.url}/{name}" if name else self.url
                    reason = f"{type(error).__name__}: {error}".partition("\n")[0]
                    raise StorageError(f"{action} {where} failed ({reason}).") from None
            time.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT)


def _version(info: dict[str, Any]) -> str:
    known = next((info[field] for field in _VERSIONS if info.get(field)), "")
    return f"{known}-{info.get('size')}"
