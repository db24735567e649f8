"""File names of checkpoints, made from a template such as ``"{epoch}-{step}-{val_loss:.2f}"``."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Any

from ..core.errors import ConfigurationError
from ..metrics.monitor import missing_metric

COUNTERS = ("epoch", "step")


class NameTemplate:
    """A template whose fields are ``epoch``, ``step`` and metrics.

    With ``insert_names`` each value is preceded by its name: ``epoch=3-step=1200-val_loss=0.12``, with another
    text than ``=`` in ``equals``. A slash in such a name becomes an underscore.

    Raises:
        ConfigurationError: the template cannot be read, a field's format does not fit numbers, or there is a slash
            outside fields, which would put checkpoints into folders that are never searched.
    """

    def __init__(self, template: str, insert_names: bool = True, equals: str = "=") -> None:
        self._insert_names = insert_names
        self._equals = equals
        try:
            self._parts = [
                (text, field, spec or "", conversion) for text, field, spec, conversion in Formatter().parse(template)
            ]
            for _, field, spec, _ in self._parts:
                format(1 if field in COUNTERS else 1.0, spec)
        except ValueError as error:
            raise ConfigurationError(f"filename={template!r} cannot be read: {error}.") from error
        if any(field == "" or conversion for _, field, _, conversion in self._parts):
            raise ConfigurationError(
                f"filename={template!r}: write a metric's name in each field, such as {{val_loss:.2f}}."
            )

        if any("/" in text for text, _, _, _ in self._parts):
            raise ConfigurationError(
                f"filename={template!r} must not contain a folder: pass it as dirpath=, where a resumed run looks."
            )

    @property
    def metrics(self) -> list[str]:
        """The metrics that the template uses."""
        return [field for _, field, _, _ in self._parts if field is not None and field not in COUNTERS]

    @property
    def pattern(self) -> str:
        """A regular expression that matches the names of this template, without a suffix."""
        text = ""
        for literal, field, _, _ in self._parts:
            text += re.escape(literal)
            if field is not None:
                text += (re.escape(self._label(field)) if self._insert_names else "") + ".+"
        return text

    def fill(self, epoch: int, step: int, metrics: Mapping[str, float]) -> str:
        """Return the name, without a suffix.

        Raises:
            MetricError: a field names a metric that was not logged.
        """
        counters = {"epoch": epoch, "step": step}
        name = ""
        for text, field, spec, _ in self._parts:
            name += text
            if field is None:
                continue
            if field not in counters and field not in metrics:
                raise missing_metric("A checkpoint's filename", field, metrics)
            value = counters[field] if field in counters else float(metrics[field])
            name += (self._label(field) if self._insert_names else "") + format(value, spec)
        return name

    def _label(self, field: str) -> str:
        return field.replace("/", "_") + self._equals


@dataclass(frozen=True)
class CheckpointNames:
    """The paths of a run's checkpoints: names from a template, and a name for the last one; ``-v1`` is added if a name
    is taken."""

    template: NameTemplate
    last: NameTemplate
    join: str
    extension: str
    first_version: int
    counts_versions: bool

    def path(
        self, directory: str | None, metrics: Mapping[str, Any], template: NameTemplate, version: int | None = None
    ) -> str:
        """Return the path for metrics, which must include ``epoch`` and ``step``.

        Raises:
            MetricError: the template uses a metric that was not logged.
        """
        counters = [int(metrics.get(name, 0)) for name in COUNTERS]
        name = template.fill(counters[0], counters[1], {key: float(value) for key, value in metrics.items()})
        if version is not None:
            name += f"{self.join}v{version}"
        return os.path.join(directory or "", name + self.extension)

    def free(
        self, directory: str | None, metrics: Mapping[str, Any], gives_way: str, template: NameTemplate | None = None
    ) -> str:
        """Return an unused path, or the path of the checkpoint that may be replaced."""
        template = template or self.template
        path = self.path(directory, metrics, template)
        version = self.first_version
        while self.counts_versions and os.path.lexists(path) and path != gives_way:
            path = self.path(directory, metrics, template, version)
            version += 1
        return path

    def gives(self, name: str) -> bool:
        """Whether ``name`` can be the name of one of this run's checkpoints."""
        versions = rf"(?:{re.escape(self.join)}v\d+)?{re.escape(self.extension)}"
        return any(re.fullmatch(f"(?:{one.pattern}){versions}", name) for one in (self.template, self.last))
