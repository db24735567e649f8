"""``TrainerCLI``: a program whose model, data and Trainer come from configuration files and arguments."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, ClassVar

from ..api.data_module import DataModule
from ..api.train_module import TrainModule
from ..core.arguments import NamesArguments
from ..core.errors import ConfigurationError
from ..core.registry import as_list
from ..distributed.seed import seed_everything
from ..launch.exit_hooks import quick_exit, write_error
from ..run.overrides import is_overridden
from ..trainer.trainer import Trainer
from . import create_parser, instantiate, parse_configuration
from .optimizers import configured_optimizers, use_optimizers
from .save_config import SaveConfigCallback
from .script_overrides import naming_options

if TYPE_CHECKING:
    from jsonargparse import Namespace
    from torch.optim import Optimizer

    from ..api.callback import Callback
    from .parser import TrainerArgumentParser

_STAGES = {
    "fit": {"model", "train_dataloaders", "val_dataloaders", "datamodule"},
    "validate": {"model", "dataloaders", "datamodule"},
    "test": {"model", "dataloaders", "datamodule"},
    "predict": {"model", "dataloaders", "datamodule"},
}
_AUTOMATIC = "AUTOMATIC"
# The types of values that a configuration can describe.
_PLAIN = (bool, int, float, str, PurePath, type(None))


class TrainerCLI(NamesArguments):
    """Creates a model, its data and a Trainer from configuration files and arguments, and runs a stage.

    ``python main.py fit -c config.yaml --trainer.max_epochs 5``. The sections of a configuration are ``model``,
    ``data``, ``trainer``, ``optimizer``, ``lr_scheduler``, ``seed_everything``, and the arguments of the stage, such as
    ``ckpt_path``; docs/configuration.md describes them. Override ``add_arguments_to_parser`` for further arguments and
    links, and ``before_fit``, ``after_fit`` and those of other stages for code around a stage.

    With several ranks each of them runs the program, and creates its own objects.

    Args:
        model_class: the class of the module, or a function annotated with it; None for ``subclass_mode_model``.
        datamodule_class: the class of the data module; None for ``subclass_mode_data``, where it may be left out.
        save_config_callback: the class that saves the configuration in the run's directory; None saves none.
        save_config_kwargs: its arguments.
        trainer_class: the class of the Trainer, or a function annotated with it.
        trainer_defaults: defaults of the Trainer's arguments; its callbacks are added to those of the configuration.
            Objects, such as loggers or a strategy, are not part of the configuration, which may replace them.
        seed_everything_default: the seed; True for 0, False to seed nothing.
        parser_kwargs: arguments of the parser, or a dict of them by stage.
        parser_class: the class of the parser; None for ``phalanx.configuration.TrainerArgumentParser``.
        subclass_mode_model: whether the configuration names the module's class, which may be a subclass.
        subclass_mode_data: the same for the data module.
        args: arguments as on a command line, or a configuration; None for the command line of this process.
        run: whether the first argument is a stage to run. If not, the objects are created only.
        auto_configure_optimizers: whether the sections ``optimizer`` and ``lr_scheduler`` exist.
        load_from_checkpoint_support: accepted for programs written for Lightning: ``save_hyperparameters`` records the
            arguments that ``__init__`` received.

    Raises:
        ConfigurationError: an argument in ``args`` is unknown, or its value is not allowed. An error on the command
            line of this process is printed in one sentence, and ends the process with exit code 78.
    """

    env_prefix: ClassVar[str] = "PHALANX"
    """The first part of the names of environment variables, which ``parser_kwargs={"default_env": True}`` enables."""

    def __init__(
        self,
        model_class: type[TrainModule] | Callable[..., TrainModule] | None = None,
        datamodule_class: type[DataModule] | Callable[..., DataModule] | None = None,
        save_config_callback: type[SaveConfigCallback] | None = SaveConfigCallback,
        save_config_kwargs: dict[str, Any] | None = None,
        trainer_class: type[Trainer] | Callable[..., Trainer] = Trainer,
        trainer_defaults: dict[str, Any] | None = None,
        seed_everything_default: bool | int = True,
        parser_kwargs: dict[str, Any] | None = None,
        parser_class: type[TrainerArgumentParser] | None = None,
        subclass_mode_model: bool = False,
        subclass_mode_data: bool = False,
        args: Sequence[str] | Mapping[str, Any] | Namespace | None = None,
        run: bool = True,
        auto_configure_optimizers: bool = True,
        load_from_checkpoint_support: bool = True,
    ) -> None:
        self.model_class, self.datamodule_class, self.trainer_class = model_class, datamodule_class, trainer_class
        self.save_config_callback = save_config_callback
        self.save_config_kwargs = save_config_kwargs or {}
        self.trainer_defaults = trainer_defaults or {}
        self.seed_everything_default = seed_everything_default
        self.parser_class = parser_class
        self.subclass_mode_model = model_class is None or subclass_mode_model
        self.subclass_mode_data = datamodule_class is None or subclass_mode_data
        self.auto_configure_optimizers = auto_configure_optimizers
        self._given = args
        self._stage_arguments: dict[str, list[str]] = {}
        self._stage_parsers: dict[str, TrainerArgumentParser] = {}

        self.parser: TrainerArgumentParser = self._refusing(lambda: self.setup_parser(run, parser_kwargs or {}))
        self._refusing(lambda: self.parse_arguments(self.parser, args))
        self.subcommand: str | None = self.config["subcommand"] if run else None
        self._seed()
        self.before_instantiate_classes()
        self.instantiate_classes()
        self.after_instantiate_classes()
        if self.subcommand is not None:
            self.run_subcommand(self.subcommand)

    # ---- the parser -----------------------------------------------------------------------------------------------

    def init_parser(self, **options: Any) -> TrainerArgumentParser:
        """Return a parser without arguments but ``--config``."""
        version = vars(sys.modules[__name__.partition(".")[0]])["__version__"]
        settings = {"env_prefix": self.env_prefix, "dump_header": [f"phalanx=={version}"], **options}
        parser: TrainerArgumentParser = create_parser(self.parser_class, **settings)
        return parser

    def setup_parser(self, run: bool, options: dict[str, Any]) -> TrainerArgumentParser:
        """Return the parser of the program, with one for each stage if a stage is to be run."""
        parser = self.init_parser(**{name: value for name, value in options.items() if name not in _STAGES})
        if not run:
            self._add_arguments(parser)
            return parser
        stages = parser.add_subcommands()
        for stage, skipped in self.subcommands().items():
            method = getattr(self.trainer_class, stage, None) or getattr(Trainer, stage)
            summary = (method.__doc__ or "").partition(".")[0]
            own = self.init_parser(**{"description": summary, **options.get(stage, {})})
            self._add_arguments(own)
            kind = self.trainer_class if isinstance(self.trainer_class, type) else Trainer
            self._stage_arguments[stage] = own.add_method_arguments(kind, stage, skip=set(skipped), fail_untyped=False)
            self._stage_parsers[stage] = own
            stages.add_subcommand(stage, own, help=summary)
        return parser

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the stages, each with the arguments of its method that the configuration does not give."""
        return {stage: set(skipped) for stage, skipped in _STAGES.items()}

    def _add_arguments(self, parser: TrainerArgumentParser) -> None:
        self.add_default_arguments_to_parser(parser)
        self.add_core_arguments_to_parser(parser)
        self.add_arguments_to_parser(parser)
        if self.auto_configure_optimizers:
            # Unless add_arguments_to_parser has added its own.
            if not parser.optimizer_keys:
                parser.add_optimizer_args()
            if not parser.lr_scheduler_keys:
                parser.add_lr_scheduler_args()
        parser.link_optimizers()

    def add_default_arguments_to_parser(self, parser: TrainerArgumentParser) -> None:
        """Add ``--seed_everything``."""
        help_text = "seed of all generators before anything is created; true for 0, false to seed nothing"
        parser.add_argument("--seed_everything", type=bool | int, default=self.seed_everything_default, help=help_text)

    def add_core_arguments_to_parser(self, parser: TrainerArgumentParser) -> None:
        """Add the sections ``trainer``, ``model`` and ``data``."""
        parser.add_component_args(self.trainer_class, "trainer")
        plain, _ = self._split_defaults()
        parser.set_defaults({f"trainer.{name}": value for name, value in plain.items()})
        parser.add_component_args(self.model_class or TrainModule, "model", self.subclass_mode_model)
        # A module may have the loaders.
        required = self.datamodule_class is not None
        parser.add_component_args(self.datamodule_class or DataModule, "data", self.subclass_mode_data, required)

    def add_arguments_to_parser(self, parser: TrainerArgumentParser) -> None:
        """Override to add arguments or links: ``parser.link_arguments("data.batch_size", "model.batch_size")``."""

    def parse_arguments(
        self, parser: TrainerArgumentParser, args: Sequence[str] | Mapping[str, Any] | Namespace | None
    ) -> None:
        """Parse arguments, or those of this process for None, into ``config``."""
        self.config: Namespace = parse_configuration(parser, sys.argv[1:] if args is None else args)

    # ---- the objects ----------------------------------------------------------------------------------------------

    def before_instantiate_classes(self) -> None:
        """Override to run code before the objects are created."""

    def instantiate_classes(self) -> None:
        """Create ``model``, ``datamodule`` and ``trainer``."""
        self.config_init = self._refusing(lambda: instantiate(self.parser, self.config))
        self.datamodule: DataModule | None = self._value(self.config_init, "data")
        self.model: TrainModule = self._value(self.config_init, "model")
        self._use_optimizers()
        self.trainer: Trainer = self._refusing(self.instantiate_trainer)

    def after_instantiate_classes(self) -> None:
        """Override to run code after the objects were created."""

    def instantiate_trainer(self, **arguments: Any) -> Trainer:
        """Return a Trainer with the arguments of the configuration; ``arguments`` replace them."""
        given = {**self._value(self.config_init, "trainer").as_dict(), **arguments}
        _, objects = self._split_defaults()
        for name, value in objects.items():
            if name not in arguments and given.get(name) == self._own_parser.get_default(f"trainer.{name}"):
                given[name] = value
        callbacks = [*as_list(given.get("callbacks")), *as_list(self.trainer_defaults.get("callbacks"))]
        callbacks += [self._value(self.config_init, key) for key in self._own_parser.callback_keys]
        with naming_options(given):
            trainer = self.trainer_class(**{**given, "callbacks": callbacks or given.get("callbacks")})
        # The report of a run lists the arguments of the Trainer: the user has not given this one.
        if saved := self._config_callback(given):
            trainer.callbacks.append(saved)
        return trainer

    def _split_defaults(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the defaults of the Trainer that a configuration can describe, and objects such as loggers.

        Callbacks are in neither: they are added to those of the configuration.
        """
        given = {name: value for name, value in self.trainer_defaults.items() if name != "callbacks"}
        plain = {name: value for name, value in given.items() if _is_plain(value)}
        return plain, {name: value for name, value in given.items() if name not in plain}

    def _config_callback(self, given: Mapping[str, Any]) -> Callback | None:
        if self.save_config_callback is None or given.get("fast_dev_run") or given.get("barebones"):
            return None
        config = self.config if self.subcommand is None else self.config[self.subcommand]
        return self.save_config_callback(self._own_parser, config, **self.save_config_kwargs)

    @staticmethod
    def configure_optimizers(module: TrainModule, optimizer: Optimizer, lr_scheduler: Any = None) -> Any:
        """Return the result of the module's ``configure_optimizers``; override to return another one.

        Args:
            module: the module.
            optimizer: the optimizer of the configuration.
            lr_scheduler: its scheduler, or None.
        """
        return configured_optimizers(module, optimizer, lr_scheduler)

    def _use_optimizers(self) -> None:
        """Make the module return the optimizer of the configuration, if there is one."""
        parser = self._own_parser
        optimizers = [key for key, target in parser.optimizer_keys.items() if target == _AUTOMATIC]
        schedulers = [key for key, target in parser.lr_scheduler_keys.items() if target == _AUTOMATIC]
        if not self.auto_configure_optimizers or not optimizers:
            return
        if len(optimizers) > 1 or len(schedulers) > 1:
            raise ConfigurationError(
                f"{', '.join([*optimizers, *schedulers])}: configure_optimizers can return one optimizer and one "
                "scheduler by itself; give link_to=... to add_optimizer_args and add_lr_scheduler_args."
            )
        given = parser.class_spec(optimizers[0], self._value(self.config, optimizers[0]))
        if given is None:
            return
        scheduler = parser.class_spec(schedulers[0], self._value(self.config, schedulers[0])) if schedulers else None
        if is_overridden("configure_optimizers", self.model):
            write_error(
                f"phalanx: the section {optimizers[0]!r} replaces configure_optimizers of {type(self.model).__name__}."
            )
        use_optimizers(self.model, self.configure_optimizers, given, scheduler)

    # ---- the stage ------------------------------------------------------------------------------------------------

    def run_subcommand(self, stage: str) -> None:
        """Run a stage between ``before_<stage>`` and ``after_<stage>``; a method of its name replaces the Trainer's."""
        given = self.config_init[stage]
        arguments = {name: given[name] for name in self._stage_arguments[stage]}
        arguments["model"] = self.model
        if self.datamodule is not None:
            arguments["datamodule"] = self.datamodule
        self._call(f"before_{stage}")
        getattr(self, stage, getattr(self.trainer, stage))(**arguments)
        self._call(f"after_{stage}")

    def _call(self, name: str) -> None:
        if (hook := getattr(self, name, None)) is not None:
            hook()

    # ---- helpers --------------------------------------------------------------------------------------------------

    @property
    def _own_parser(self) -> TrainerArgumentParser:
        """The parser of the stage."""
        return self.parser if self.subcommand is None else self._stage_parsers[self.subcommand]

    def _value(self, config: Namespace, key: str) -> Any:
        """Return a value of the stage's configuration."""
        return (config if self.subcommand is None else config[self.subcommand]).get(key)

    def _seed(self) -> None:
        """Seed all generators, and record the seed in the configuration."""
        config = self.config if self.subcommand is None else self.config[self.subcommand]
        seed = config["seed_everything"]
        if seed is not False:
            config["seed_everything"] = seed_everything(None if seed is True else seed, workers=True)

    def _refusing(self, function: Callable[[], Any]) -> Any:
        """Call a function; end the process at a wrong argument of its command line."""
        try:
            return function()
        except ConfigurationError as error:
            if self._given is not None:
                raise
            write_error(f"{Path(sys.argv[0]).name}: {error}")
            raise quick_exit(error.exit_code) from None


def _is_plain(value: Any) -> bool:
    """Whether a configuration can describe a value."""
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    return isinstance(value, _PLAIN) or (isinstance(value, list | tuple) and all(map(_is_plain, value)))
