"""``UserEntries``: the dict that ``on_save_checkpoint`` and ``on_load_checkpoint`` receive."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from ..core.errors import ConfigurationError

_WEIGHTS = (
    "save_frozen = False on the module leaves out frozen weights, strict_loading = False loads only those that match, "
    "and checkpoint_renames changes their names"
)
_ELSEWHERE = {
    "state_dict": f"weights are saved and loaded apart from it: {_WEIGHTS}",
    "optimizer_states": "optimizers are saved and loaded apart from it: read self.trainer.optimizers",
    "lr_schedulers": "schedulers are saved and loaded apart from it: read self.lr_schedulers()",
    "callbacks": "callbacks are saved and loaded apart from it, by their state_dict and load_state_dict",
    "hyper_parameters": "hyperparameters are saved apart from it: read self.hparams",
    "epoch": "read self.current_epoch",
    "global_step": "read self.global_step",
}
_ABSENT = object()


class UserEntries(dict[str, Any]):
    """Entries of the user's own. Of a checkpoint's other entries it says where they are."""

    def __init__(self, hook: str, entries: Mapping[str, Any] | None = None) -> None:
        super().__init__(entries or {})
        self._hook = hook

    def __missing__(self, name: str) -> Any:
        if name not in _ELSEWHERE:
            raise KeyError(name)
        self._refuse(name)

    def __setitem__(self, name: str, value: Any) -> None:
        if name in ("state_dict", "optimizer_states", "lr_schedulers"):
            self._refuse(name)
        super().__setitem__(name, value)

    def get(self, name: str, default: Any = None) -> Any:
        """Return an entry, or the default.

        Raises:
            ConfigurationError: the name is that of a part of a checkpoint which is elsewhere.
        """
        if name in _ELSEWHERE:
            return self[name]
        return super().get(name, default)

    def pop(self, name: str, default: Any = _ABSENT) -> Any:
        """Remove and return an entry; raises as ``get``."""
        if name in _ELSEWHERE:
            self[name]
        return super().pop(name) if default is _ABSENT else super().pop(name, default)

    def _refuse(self, name: str) -> NoReturn:
        raise ConfigurationError(
            f"{self._hook}: checkpoint[{name!r}] was used, but the dict holds only the entries that you add; "
            f"{_ELSEWHERE[name]}."
        )
