"""Read-only attributes of a Trainer: its settings and its ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ..core.errors import ConfigurationError
from ..core.precision import LossScaler
from ..distributed.world import World
from ..parallel.resources import RankProperties, Resources
from ..parallel.strategy import Strategy
from .resolved_settings import Settings
from .session import Session

T = TypeVar("T")


class Setting(Generic[T]):
    """A read-only attribute of a Trainer with one of its settings. Assigning it raises ``ConfigurationError``."""

    def __init__(self, read: Callable[[Settings], T]) -> None:
        self._read = read
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, trainer: SettingProperties, owner: type) -> T:
        return self._read(trainer.settings)

    def __set__(self, trainer: SettingProperties, value: Any) -> None:
        raise ConfigurationError(f"trainer.{self._name} is read when the Trainer is created: pass it to Trainer(...).")


class SettingProperties:
    """The settings of a Trainer as its read-only attributes."""

    @property
    def settings(self) -> Settings:
        """The settings, resolved."""
        raise NotImplementedError

    max_epochs = Setting(lambda settings: settings.max_epochs)
    min_epochs = Setting(lambda settings: settings.min_epochs)
    max_steps = Setting(lambda settings: settings.max_steps)
    min_steps = Setting(lambda settings: settings.min_steps)
    fast_dev_run = Setting(
        lambda settings: settings.fast_dev_run if settings.fast_dev_run > 1 else bool(settings.fast_dev_run)
    )
    limit_train_batches = Setting(lambda settings: settings.limits["train"])
    limit_val_batches = Setting(lambda settings: settings.limits["validate"])
    limit_test_batches = Setting(lambda settings: settings.limits["test"])
    limit_predict_batches = Setting(lambda settings: settings.limits["predict"])
    overfit_batches = Setting(lambda settings: settings.overfit_batches)
    check_val_every_n_epoch = Setting(lambda settings: settings.check_val_every_n_epoch)
    val_check_interval = Setting(lambda settings: settings.val_check_interval)
    num_sanity_val_steps = Setting(lambda settings: settings.num_sanity_val_steps)
    log_every_n_steps = Setting(lambda settings: settings.log_every_n_steps)
    gradient_clip_val = Setting(lambda settings: settings.clipping[0])
    gradient_clip_algorithm = Setting(lambda settings: settings.clipping[1])
    enable_autolog_hparams = Setting(lambda settings: bool(settings.given.enable_autolog_hparams))
    barebones = Setting(lambda settings: settings.barebones)
    profiler = Setting(lambda settings: settings.profiler)
    verbose = Setting(lambda settings: settings.verbose)
    reload_dataloaders_every_n_epochs = Setting(lambda settings: settings.given.reload_dataloaders_every_n_epochs)
    default_root_dir = Setting(lambda settings: str(settings.root))


class FabricProperties(RankProperties):
    """Rank, strategy and precision of a Trainer's process, which are those of its Fabric."""

    _session: Session

    @property
    def _resources(self) -> Resources:
        return self._session.resources

    @property
    def world(self) -> World:
        """This process among the ranks."""
        return self._session.fabric.world

    @property
    def strategy(self) -> Strategy:
        """The strategy."""
        return self._session.fabric.strategy

    @property
    def precision(self) -> str:
        """The name of the precision."""
        return self._session.fabric.precision.name

    @property
    def scaler(self) -> LossScaler | None:
        """The loss scaler of the precision; None for a precision without a loss scale."""
        return self._session.fabric.scaler

    @property
    def device_ids(self) -> list[int]:
        """The indices of this node's devices."""
        resources = self._session.resources
        return list(range(resources.devices)) if resources.indices is None else list(resources.indices)

    @property
    def num_devices(self) -> int:
        """The number of ranks on each node."""
        return self._session.resources.devices

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        return self._session.resources.num_nodes
