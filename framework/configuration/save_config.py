"""``SaveConfigCallback``: the resolved configuration in the directory of a run, which reproduces the run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..api.callback import Callback
from ..core.errors import ConfigurationError, StorageError
from ..system.atomic_files import write_text
from ..system.run_directory import CONFIGURATION

if TYPE_CHECKING:
    from jsonargparse import Namespace

    from ..api.train_module import TrainModule
    from .parser import TrainerArgumentParser


class SaveConfigCallback(Callback):
    """Writes the resolved configuration into the directory of a run, on rank 0. ``TrainerCLI`` adds it.

    A run that is resumed in its directory replaces the file. A Trainer that writes no files writes no configuration.

    Args:
        parser: the parser of the configuration.
        config: the configuration.
        config_filename: the name of the file.
        overwrite: accepted for programs written for Lightning: no other run has the same directory.
        multifile: whether files that the configuration was split into are written as such; only False is supported.
        save_to_log_dir: whether to write the file; False is for subclasses that override ``save_config``.

    Raises:
        ConfigurationError: the file would neither be written nor used, or would be split.
    """

    def __init__(
        self,
        parser: TrainerArgumentParser,
        config: Namespace,
        config_filename: str = CONFIGURATION,
        overwrite: bool = False,
        multifile: bool = False,
        save_to_log_dir: bool = True,
    ) -> None:
        if multifile:
            raise ConfigurationError("multifile=True is not supported: the configuration is written into one file.")
        if not save_to_log_dir and type(self).save_config is SaveConfigCallback.save_config:
            raise ConfigurationError(
                "save_to_log_dir=False saves nothing: override save_config in a subclass, or give TrainerCLI "
                "save_config_callback=None."
            )
        self.parser = parser
        self.config = config
        self.config_filename = config_filename
        self.save_to_log_dir = save_to_log_dir
        self.already_saved = False

    def setup(self, trainer: Any, module: TrainModule, stage: str) -> None:
        """Write the configuration once."""
        if self.already_saved:
            return
        self.already_saved = True
        if not trainer.is_global_zero:
            return
        if self.save_to_log_dir and trainer.directory.claimed:
            try:
                text = trainer.settings.without_addresses(self.parser.text_of(self.config))
                write_text(trainer.run_dir / self.config_filename, text)
            except StorageError as error:
                trainer.note(f"{self.config_filename} is missing: {error}")
        self.save_config(trainer, module, stage)

    def save_config(self, trainer: Any, module: TrainModule, stage: str) -> None:
        """Save the configuration elsewhere as well; called on rank 0 alone, so it must call no collective."""
