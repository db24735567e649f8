"""The names of the checkpoints of ``ModelCheckpoint``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..framework.checkpoint.file_names import CheckpointNames, NameTemplate

DEFAULT_NAME = "{epoch}-{step}"


class CheckpointNaming:
    """Paths made from templates; the upper-case attributes may be changed on the class or on an object."""

    CHECKPOINT_JOIN_CHAR = "-"
    CHECKPOINT_EQUALS_CHAR = "="
    CHECKPOINT_NAME_LAST = "last"
    FILE_EXTENSION = ".ckpt"
    STARTING_VERSION = 1

    filename: str | None
    dirpath: str | None
    auto_insert_metric_name: bool
    enable_version_counter: bool

    def format_checkpoint_name(
        self,
        metrics: Mapping[str, Any],
        filename: str | None = None,
        ver: int | None = None,
        prefix: str | None = None,
    ) -> str:
        """Return the path for metrics, which include ``epoch`` and ``step``.

        ``ver`` is appended as ``-v<ver>``, and ``prefix`` comes first, with ``CHECKPOINT_JOIN_CHAR`` after it.

        Raises:
            MetricError: the template names a metric that is not given.
        """
        filename = filename or self.filename or DEFAULT_NAME
        template = self._as_template(f"{prefix}{self.CHECKPOINT_JOIN_CHAR}{filename}" if prefix else filename)
        return self._names.path(self.dirpath, metrics, template, ver)

    def _as_template(self, filename: str) -> NameTemplate:
        return NameTemplate(filename, self.auto_insert_metric_name, self.CHECKPOINT_EQUALS_CHAR)

    @property
    def _names(self) -> CheckpointNames:
        # Constructed at each call, as the user may change these public attributes.
        last = self._as_template(self.CHECKPOINT_NAME_LAST)
        versions = (self.STARTING_VERSION, self.enable_version_counter)
        template = self._as_template(self.filename or DEFAULT_NAME)
        return CheckpointNames(template, last, self.CHECKPOINT_JOIN_CHAR, self.FILE_EXTENSION, *versions)
