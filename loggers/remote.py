"""``RemoteLogger``: base class of the loggers that pass records to the store of another library."""

from __future__ import annotations

import json
import os
import secrets
from abc import abstractmethod
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar

from ..framework.core.arguments import check_names
from ..framework.core.errors import ConfigurationError
from ..framework.distributed.rank_zero import is_rank_zero
from ..framework.metrics.file_logger import FileLogger, plain_number
from ..framework.metrics.logger import media_record
from ..framework.metrics.media import Histogram, Images, Media, Table, Text
from ..framework.system.atomic_files import write_text
from .delivery import Delivery, Store

_CONNECT_SECONDS = 120.0
_CLOSE_SECONDS = 60.0
# After an error, other ranks wait for this one.
_CLOSE_SECONDS_AFTER_ERROR = 10.0


class RemoteLogger(FileLogger):
    """Base class of the loggers of other libraries.

    Every record is first written to a file in the run's directory, and a thread passes it on. A step never waits for a
    network, and while the server cannot be reached records are kept in the file, also beyond the end of the process:
    they are sent when the run resumes. A resumed run continues the same remote run, asks it for what it has, and
    records each step once. The libraries' own queues do not suffice: all of them lose points when a process is killed.

    Attributes:
        LIBRARY: the module of the library; also the name of the logger's files.
        REQUIREMENT: the package to install, with its range of versions.
    """

    LIBRARY = ""
    REQUIREMENT = ""

    _LIVE: ClassVar = {"_delivery": type(None), "_saver": type(None)}

    def __init__(
        self,
        save_dir: str | os.PathLike[str] | None,
        name: str | None,
        version: int | str | None,
        prefix: str,
        log_model: bool | str,
    ) -> None:
        super().__init__(save_dir, name, version, prefix)
        cls = type(self).__name__
        # A directory of this name in the working directory has a spec as well, without a file.
        spec = find_spec(self.LIBRARY)
        if spec is None or spec.origin is None:
            raise ConfigurationError(f"{cls} needs {self.LIBRARY}: pip install '{self.REQUIREMENT}'.")
        if log_model not in (True, False, "all"):
            raise ConfigurationError(f"{cls}(log_model={log_model!r}): give True, False or 'all'.")
        self._log_model = log_model
        self._saver: Any = None
        self._logged_models: set[tuple[str, float]] = set()
        self._delivery: Delivery | None = None

    def _check_options(self, options: Mapping[str, Any]) -> None:
        """Refuse further arguments that the library's ``init`` does not have: it runs later, on another thread.

        Raises:
            UnknownArgumentError: there are such arguments.
        """
        if not options:
            return
        of_library = signature(import_module(self.LIBRARY).init).parameters
        own = [name for name in signature(type(self).__init__).parameters if name not in ("self", "kwargs")]
        check_names(type(self).__name__, options, dict.fromkeys([*own, *of_library]))

    @abstractmethod
    def _new_store(self, identity: Identity) -> Store:
        """Return the store of the current run. Called once the run's directory exists."""

    @property
    def close_seconds(self) -> float:
        return _CLOSE_SECONDS + 5

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Record metrics; ``step`` defaults to the last step plus one."""
        step = self._count_step(step)
        values = {self._with_prefix(key): plain_number(value) for key, value in metrics.items()}
        self._begun().add_metrics(values, step)

    def log_hyperparams(self, params: Any = None) -> None:
        params = self._write_hparams(params)
        self._begun().add("hparams", params)

    def log_media(self, media: Media) -> None:
        files = self._write_files(media) if isinstance(media, Images) else []
        record = {**media_record(media, files, Path(self.log_dir)), **_content(media)}
        self._begun().add_media({**record, "key": self._with_prefix(media.key)}, media.step)

    def after_save_checkpoint(self, callback: Any) -> None:
        self._saver = callback
        if self._log_model == "all" or (self._log_model and callback.save_top_k == -1):
            self._add_models()

    def state_dict(self) -> dict[str, Any]:
        return {"directory": self.log_dir, "position": self._current().size}

    def resume(self, step: int, state: Mapping[str, Any]) -> None:
        if self._has_own_files(state):
            self._current().resume(state.get("position"), step)

    def finalize(self, status: str) -> None:
        if self._log_model and self._saver is not None and status == "success":
            self._add_models()
        self._saver = None
        delivery, self._delivery = self._delivery, None
        if delivery is not None and delivery.is_started:
            seconds = _CLOSE_SECONDS if status == "success" else _CLOSE_SECONDS_AFTER_ERROR
            if missing := delivery.finish(status, seconds):
                self._say(
                    f"{type(self).__name__}: {missing} records were not sent; they are kept in {delivery.path} and are "
                    "sent when the run resumes."
                )

    def _connected(self) -> Any:
        """Return the store, connected; on other ranks than 0 an object on which every call has no effect.

        Raises:
            ConnectionError: the store cannot be reached.
        """
        if not is_rank_zero():
            return _Nothing()
        store = self._begun().connected(_CONNECT_SECONDS)
        if store is None:
            raise ConnectionError(f"{type(self).__name__}: the run was not opened in {_CONNECT_SECONDS:.0f} s.")
        return store

    def _begun(self) -> Delivery:
        """Return the delivery of the current run, started."""
        delivery = self._current()
        if not delivery.is_started:
            delivery.start(self._new_store(Identity(self._make_log_dir() / f"{self.LIBRARY}.json")))
        return delivery

    def _current(self) -> Delivery:
        if self._delivery is None:
            path = Path(self.log_dir) / f"{self.LIBRARY}.jsonl"
            # A program without a Trainer may end without finalize.
            self._delivery = Delivery(path, type(self).__name__, self._say, partial(self.finalize, "success"))
        return self._delivery

    def _add_models(self) -> None:
        """Record the checkpoints that the callback holds and that were not recorded before."""
        best, last = str(self._saver.best_model_path), str(self._saver.last_model_path)
        for path in dict.fromkeys([*map(str, self._saver.best_k_models), last, best]):
            if not path or not os.path.exists(path) or (path, os.path.getmtime(path)) in self._logged_models:
                continue
            self._logged_models.add((path, os.path.getmtime(path)))
            aliases = [alias for alias, other in (("latest", last), ("best", best)) if other == path]
            self._begun().add("model", {"path": os.path.abspath(path), "aliases": aliases})


class Identity:
    """The names by which a resumed run finds its remote run, in a JSON file of the run's directory.

    ``key`` is a text that no other run has, made before the remote run is.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.directory = path.parent
        try:
            self._values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            self._values = {}
        if "key" not in self._values:
            self.set("key", secrets.token_hex(4))

    def get(self, name: str) -> str | None:
        """Return the value of a name, or None."""
        value = self._values.get(name)
        return None if value is None else str(value)

    @property
    def key(self) -> str:
        """The text that no other run has."""
        return str(self._values["key"])

    def set(self, name: str, value: str) -> None:
        """Set a value and write the file."""
        self._values[name] = value
        write_text(self._path, json.dumps(self._values))


class _Nothing:
    """The library's object on ranks that do not log: every attribute is this object, and every call returns it."""

    def __getattr__(self, name: str) -> _Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> _Nothing:
        return self


def _content(media: Media) -> dict[str, Any]:
    if isinstance(media, Table):
        return {"columns": list(media.columns), "rows": [list(row) for row in media.rows]}
    if isinstance(media, Text):
        return {"text": media.text}
    if isinstance(media, Histogram):
        return {"counts": list(media.counts), "edges": list(media.edges)}
    return {}
