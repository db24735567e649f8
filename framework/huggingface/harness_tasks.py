"""``HarnessTasks``: tasks of lm-evaluation-harness that a YAML file names, as a function of a Trainer and a module."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..core.errors import ConfigurationError, did_you_mean, is_count
from ..distributed.rank_zero_first import first_in_turn
from ..system.environment import variables_set
from .harness_model import CausalModel, Ranks, as_harness_model

if TYPE_CHECKING:
    from torch import nn

    from ..api.contracts import TrainerView

LIBRARY, REQUIREMENT = "lm_eval", "lm-eval>=0.4.13,<0.5"
# Those that lm-evaluation-harness sets by default, so that results are equal to those of its own command.
_SEEDS = {"python": 0, "numpy": 1234, "torch": 1234, "fewshot": 1234}
# Axes over which the ranks divide sequences or layers: no rank has the logits of a whole sequence.
_DIVIDING = {"cp", "pp"}


@dataclass
class HarnessTasks:
    """Tasks of lm-evaluation-harness. Called with a Trainer and a module, it returns their metrics."""

    path: Path
    """The file."""
    tasks: list[str | dict[str, Any]]
    """The names of tasks, groups and tags, and configurations of tasks."""
    include_path: str | None = None
    """The folder of further tasks, relative to the file."""
    num_fewshot: int | None = None
    limit: float | None = None
    """The number of samples of each task; below 1, their share."""
    batch_size: int = 1
    """The number of sequences of a forward pass, on each rank."""
    tokenizer: str | None = None
    """The folder of the tokenizer, relative to the file, or a name; None for the attribute ``tokenizer`` of the
    module."""
    max_length: int | None = None
    """The longest sequence in tokens; None for that of the model."""
    apply_chat_template: bool = False
    _loaded: Any = field(default=None, init=False, repr=False)
    _tokenizer: Any = field(default=None, init=False, repr=False)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> HarnessTasks:
        """Read a file, and check it.

        Raises:
            ConfigurationError: there is no such file, it is no YAML, one of its values is wrong, or lm_eval is not
                installed.
        """
        spec = find_spec(LIBRARY)
        if spec is None or spec.origin is None:
            raise ConfigurationError(f"{os.fspath(path)!r}: tasks need {LIBRARY}: pip install '{REQUIREMENT}'.")
        found = _mapping_in(Path(path))
        known = [each.name for each in fields(cls) if each.init and each.name != "path"]
        for name in found:
            if name not in known:
                raise ConfigurationError(
                    f"{os.fspath(path)} has the key {name!r}, which is not known here.{did_you_mean(str(name), known)} "
                    f"Known: {', '.join(known)}."
                )
        given = cls(Path(path), **{"tasks": [], **found})
        given.check()
        return given

    def check(self) -> None:
        """Refuse wrong values.

        Raises:
            ConfigurationError: a value has the wrong type or range.
        """
        self.tasks = [self.tasks] if isinstance(self.tasks, str) else self.tasks
        names = isinstance(self.tasks, list) and all(isinstance(each, str | dict) for each in self.tasks)
        rules = {
            "tasks": (bool(self.tasks) and names, "a list of names of tasks"),
            "include_path": (self.include_path is None or self._beside(str(self.include_path)).is_dir(), "a folder"),
            "num_fewshot": (self.num_fewshot is None or is_count(self.num_fewshot, 0), "a whole number of samples"),
            "limit": (self.limit is None or _is_positive(self.limit), "a positive number of samples, or their share"),
            "batch_size": (is_count(self.batch_size, 1), "a whole number of at least 1"),
            "tokenizer": (self.tokenizer is None or isinstance(self.tokenizer, str), "a folder or a name"),
            "max_length": (self.max_length is None or is_count(self.max_length, 1), "a number of tokens"),
            "apply_chat_template": (isinstance(self.apply_chat_template, bool), "true or false"),
        }
        for name, (is_right, rule) in rules.items():
            if not is_right:
                raise ConfigurationError(f"{self.path}: {name}: {getattr(self, name)!r} must be {rule}.")

    @property
    def name(self) -> str:
        """The name of the file, by which records refer to these tasks."""
        return self.path.name

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_loaded": None, "_tokenizer": None}

    def load(self, trainer: TrainerView, module: nn.Module) -> None:
        """Load the tokenizer and the data of the tasks, on rank 0 first. Collective.

        Raises:
            ConfigurationError: there is no such task, no tokenizer, or the ranks divide sequences or layers.
        """
        degrees = trainer.strategy.degrees
        if dividing := sorted(_DIVIDING.intersection(degrees.used)):
            raise ConfigurationError(
                f"{self.path.name} with {degrees}: tasks of lm-evaluation-harness need the logits of "
                f"whole sequences, which no rank has under {' and '.join(dividing)}. Evaluate the checkpoints with "
                "`phalanx eval`."
            )
        if self._loaded is None:
            with _quiet(), first_in_turn(trainer.world, local=True):
                self._loaded = self._load_tasks()
        if self._tokenizer is None:
            self._tokenizer = self._load_tokenizer(module)

    def __call__(self, trainer: TrainerView, module: nn.Module) -> dict[str, float]:
        """Return the metrics as ``task/metric``, with the filter of answers, if there is one, at the end. Collective.

        All generators of random numbers are seeded.
        """
        self.load(trainer, module)
        run, strategy = trainer.run, trainer.strategy

        def tick() -> None:
            if run is not None:
                run.heartbeat.phase[0] += 1

        ranks = Ranks(trainer.world, strategy.traits.forward_has_collectives, tick)
        model = CausalModel(module, self._tokenizer, ranks, self.batch_size, self.max_length)
        _seed()
        with _quiet():
            from lm_eval.evaluator import evaluate

            found = evaluate(
                as_harness_model(model),
                self._loaded,
                limit=self.limit,
                bootstrap_iters=0,
                log_samples=False,
                apply_chat_template=self.apply_chat_template,
                fewshot_as_multiturn=self.apply_chat_template,
            )
        return _numbers(found)

    def _load_tasks(self) -> Any:
        from lm_eval.tasks import TaskManager

        include = None if self.include_path is None else str(self._beside(self.include_path))
        # To list the tasks that come with the library takes seconds.
        manager = TaskManager(include_path=include, include_defaults=False)
        names = [each for each in self.tasks if isinstance(each, str)]
        if any(name not in manager.task_index for name in names):
            manager = TaskManager(include_path=include)
        for name in names:
            if not manager.match_tasks([name]):
                raise ConfigurationError(
                    f"{self.path}: {name!r} is not a known task.{did_you_mean(name, manager.task_index)} Give the "
                    "folder of your own tasks as include_path."
                )
        loaded = manager.load([*names, *(each for each in self.tasks if not isinstance(each, str))])
        for task in loaded["tasks"].values():
            own = task.get_config("num_fewshot")
            # A task that sets 0 is not meant to have examples.
            if own is None or (self.num_fewshot is not None and own != 0):
                task.set_config(key="num_fewshot", value=self.num_fewshot or 0)
            task.set_fewshot_seed(seed=_SEEDS["fewshot"])
        return loaded

    def _load_tokenizer(self, module: nn.Module) -> Any:
        if self.tokenizer is None:
            found = getattr(module, "tokenizer", None)
            if found is None:
                raise ConfigurationError(
                    f"{self.path} names no tokenizer, and {type(module).__name__} has no attribute tokenizer: give one "
                    "of them."
                )
            return found
        from transformers import AutoTokenizer

        folder = self._beside(self.tokenizer)
        try:
            return AutoTokenizer.from_pretrained(folder if folder.is_dir() else self.tokenizer)
        except (OSError, ValueError) as error:
            text = " ".join(str(error).split())
            raise ConfigurationError(f"{self.path}: the tokenizer {self.tokenizer!r} cannot be read: {text}") from error

    def _beside(self, given: str) -> Path:
        """Return a path of the file, which is relative to its folder."""
        return self.path.absolute().parent / Path(given).expanduser()


def _mapping_in(path: Path) -> Mapping[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        names = os.listdir(path.parent) if path.parent.is_dir() else []
        raise ConfigurationError(f"There is no file of tasks {str(path)!r}.{did_you_mean(path.name, names)}") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigurationError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"{path} must hold a mapping with the key tasks, such as 'tasks: [arc_easy]'.")
    return found


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _numbers(found: Any) -> dict[str, float]:
    """Return the metrics of tasks and groups, without their errors."""
    numbers: dict[str, float] = {}
    for task, metrics in {**found["results"], **found.get("groups", {})}.items():
        for name, value in metrics.items():
            metric, _, choice = name.partition(",")
            if isinstance(value, int | float) and choice and not metric.endswith("_stderr"):
                numbers[f"{task}/{metric}" if choice == "none" else f"{task}/{metric}/{choice}"] = float(value)
    return numbers


def _seed() -> None:
    import numpy

    random.seed(_SEEDS["python"])
    numpy.random.seed(_SEEDS["numpy"])
    torch.manual_seed(_SEEDS["torch"])


@contextlib.contextmanager
def _quiet() -> Any:
    """Keep the bars and the messages of the library from the console, which shows those of the fit.

    Variables of the environment that the library sets when it is imported are removed again.
    """
    log = logging.getLogger(LIBRARY)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()), variables_set({}):
            yield
    finally:
        log.setLevel(level)
