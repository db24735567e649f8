"""Accelerate's arguments for ``torch.compile``, translated into ``Fabric(compile=...)``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from ...framework.core.arguments import names_fields
from ...framework.core.errors import ConfigurationError


class DynamoBackend(str, Enum):
    """Backends of ``torch.compile``; any other one is given by its name."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    CUDAGRAPHS = "CUDAGRAPHS"
    TVM = "TVM"


@names_fields
@dataclass
class TorchDynamoPlugin:
    """The options of ``torch.compile``.

    Attributes:
        backend: a ``DynamoBackend``, or a name of torch's in any case; ``"no"`` does not compile.
        disable: do not compile.
        use_regional_compilation: compile each repeated block instead of the module as a whole.
    """

    backend: str | None = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def compilation(self) -> bool | dict[str, Any]:
        """Return the argument ``compile`` of ``Fabric``."""
        backend = str(getattr(self.backend, "value", self.backend) or "no").lower()
        if self.disable or backend == "no":
            return False
        given = {"mode": self.mode, "fullgraph": self.fullgraph, "dynamic": self.dynamic, "options": self.options}
        kept = {name: value for name, value in given.items() if value is not None}
        return {"backend": backend, "blocks": bool(self.use_regional_compilation), **kept}


def compilation_of(backend: str | None, plugin: TorchDynamoPlugin | None) -> bool | dict[str, Any]:
    """Return the argument ``compile`` of ``Fabric`` for those of ``Accelerator``.

    Raises:
        ConfigurationError: both were given.
    """
    if backend is not None and plugin is not None:
        raise ConfigurationError("dynamo_backend and dynamo_plugin were both given: leave one of them out.")
    return (plugin or TorchDynamoPlugin(backend)).compilation()
