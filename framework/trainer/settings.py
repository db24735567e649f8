"""The arguments of ``Trainer``: each is declared once, with its default, its rule and its documentation.

``TrainerSettings`` holds what the user gave; the signature and the docstring of ``Trainer`` are made from it.
``Settings`` holds what the engine uses, checked and resolved before any process starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

from ..core.accumulation import AccumulationSchedule, resolve_accumulation
from ..core.errors import ConfigurationError
from ..data.worker_process import SIGNALS
from ..launch.signals import check_signals
from ..parallel.optimizer_step import check_clipping
from ..parallel.strategy import Strategy
from ..watchdog.heartbeat import StallTimeout, resolve_stall_timeout
from .rules import (
    Limit,
    Rule,
    at_least,
    batch_limit,
    deterministic,
    dev_run,
    directory,
    duration,
    flag,
    interval,
    one_of,
    optional_duration,
    unsupported,
)

_LIMITS = {
    "train": "limit_train_batches",
    "validate": "limit_val_batches",
    "test": "limit_test_batches",
    "predict": "limit_predict_batches",
}
_DEFAULT_EPOCHS = 1000
# No count of steps reaches it: "never" costs the loop no question of its own.
_NEVER = 1 << 62


def _setting(default: Any, documentation: str, rule: Rule | None = None) -> Any:
    return field(default=default, metadata={"documentation": documentation, "rule": rule})


@dataclass(kw_only=True)
class TrainerSettings:
    """The arguments of ``Trainer`` as the user gave them."""

    accelerator: str = _setting("auto", '``"auto"``, ``"cpu"``, ``"gpu"`` or ``"cuda"``.')
    strategy: str | Strategy = _setting(
        "auto",
        'how work is spread over ranks, a name or a ``Strategy``. ``"auto"`` chooses when a fit starts: on one rank '
        "``single``, else the first of ``ddp``, ``fsdp``, ``zero3-offload`` and ``zero3-nvme`` that fits into memory.",
    )
    devices: int | str | list[int] = _setting(
        "auto", 'ranks on each node: a number, a list of CUDA indices, or ``"auto"``.'
    )
    num_nodes: int = _setting(1, "nodes; more than one needs a launcher such as torchrun.")
    precision: Any = _setting(
        None,
        '``"32-true"``, ``"64-true"``, ``"bf16-mixed"``, ``"16-mixed"``, ``"bf16-true"``, ``"16-true"``; short forms '
        'are ``32``, ``64``, ``"bf16"``, ``16`` and ``"fp16"``.',
    )
    logger: Any = _setting(None, "a ``Logger``, a name, or a list of these; True is TensorBoard, False none.")
    callbacks: Any = _setting(None, "a ``Callback``, a name, or a list of these.")
    fast_dev_run: bool | int = _setting(
        False, "run this many batches of each loop, without loggers and checkpoints, to try everything.", dev_run
    )
    max_epochs: int | None = _setting(None, "epochs to train; -1 means no limit. Without any limit 1000.", at_least(-1))
    min_epochs: int | None = _setting(None, "epochs to train before a stop takes effect.", at_least(0))
    max_steps: int | None = _setting(-1, "optimizer steps to train; -1 means no limit.", at_least(-1))
    min_steps: int | None = _setting(None, "optimizer steps before a stop takes effect.", at_least(0))
    max_time: Any = _setting(
        None, 'time to train: a ``timedelta``, a dict of its arguments, or ``"DD:HH:MM:SS"``.', optional_duration
    )
    limit_train_batches: Limit | None = _setting(
        None, "training batches of an epoch: a number (int) or a fraction (float).", batch_limit
    )
    limit_val_batches: Limit | None = _setting(
        None, "validation batches, counted as in one process, whatever the number of ranks.", batch_limit
    )
    limit_test_batches: Limit | None = _setting(None, "the same for ``test``.", batch_limit)
    limit_predict_batches: Limit | None = _setting(None, "the same for ``predict``.", batch_limit)
    overfit_batches: Limit = _setting(0.0, "use so many batches, unshuffled, for training and validation.", batch_limit)
    val_check_interval: Any = _setting(
        None, "validate within an epoch: a fraction of it, a number of batches, or a time.", interval
    )
    check_val_every_n_epoch: int | None = _setting(
        1, "validate in every n-th epoch; None counts ``val_check_interval`` over epochs.", at_least(1)
    )
    num_sanity_val_steps: int | None = _setting(
        None, "validation batches to try before training (default 2); -1 for all.", at_least(-1)
    )
    log_every_n_steps: int | None = _setting(
        None, "how often values of steps go to the loggers (default 50); 0 for never.", at_least(0)
    )
    enable_checkpointing: bool | None = _setting(None, "whether to save checkpoints by default.", flag)
    enable_progress_bar: bool | None = _setting(None, "whether to show a progress bar.", flag)
    enable_model_summary: bool | None = _setting(None, "whether to show a table of the layers.", flag)
    accumulate_grad_batches: int | Mapping[int, int] | AccumulationSchedule = _setting(
        1, "micro-batches of each optimizer step: a number, ``{epoch: number}``, or a schedule."
    )
    gradient_clip_val: int | float | None = _setting(None, "clip gradients to this norm or value; 0 and None do not.")
    gradient_clip_algorithm: str | None = _setting(None, '``"norm"`` (default) or ``"value"``.')
    deterministic: bool | str | None = _setting(
        None, 'use deterministic algorithms; ``"warn"`` only warns where there is none.', deterministic
    )
    benchmark: bool | None = _setting(None, "let cuDNN search for its fastest algorithms.", flag)
    inference_mode: bool = _setting(
        True, "evaluate under ``torch.inference_mode`` rather than ``torch.no_grad``.", flag
    )
    use_distributed_sampler: bool = _setting(True, "shard loaders over ranks; False leaves them as they are.", flag)
    profiler: None = _setting(None, "must be None.", unsupported("run fit under torch.profiler"))
    detect_anomaly: bool = _setting(False, "find the operation whose gradient is NaN; slow.", flag)
    barebones: bool = _setting(False, "no logger, no callbacks, no sanity check: for measuring.", flag)
    sync_batchnorm: bool = _setting(False, "compute batch statistics over all ranks.", flag)
    reload_dataloaders_every_n_epochs: int = _setting(0, "ask for new loaders every n epochs.", at_least(0))
    default_root_dir: str | Path | None = _setting(
        None, "where ``<name>/version_<n>`` is created (default: the working directory).", directory
    )
    plugins: None = _setting(
        None, "must be None.", unsupported("give strategies, loggers and callbacks as objects or by name")
    )
    nonfinite: str = _setting(
        "raise",
        'what follows a loss or gradient that is NaN or infinite: ``"raise"`` on all ranks before its update, '
        '``"skip"`` the update (at most 10 in a row), or ``"ignore"``.',
        one_of("raise", "skip", "ignore"),
    )
    debug: str | None = _setting(
        None,
        '``"collectives"`` compares what ranks do before each collective and names the first difference; slow.',
        one_of("collectives", optional=True),
    )
    preemption_signals: Sequence[str] = _setting(
        SIGNALS,
        "signals at which a run finishes the step, saves and ends: SIGTERM, SIGUSR1 and SIGUSR2 with exit code 75, "
        "SIGINT with 130; a second SIGINT stops at once.",
        lambda name, value: check_signals(value),
    )
    requeue: bool = _setting(
        True, "put a SLURM job back into the queue after SIGUSR1 or SIGUSR2, as ``sbatch --signal`` sends them.", flag
    )
    time_limit_margin: Any = _setting(
        timedelta(minutes=2), "how long before the end of a SLURM job to save and end with exit code 75.", duration
    )
    max_restarts: int = _setting(
        0,
        "how often ranks that phalanx launched are restarted after a failure, from the newest good checkpoint. A step "
        "that fails twice in a row ends the run, and so does a failure that a restart would not change.",
        at_least(0),
    )
    stall_timeout: StallTimeout = _setting(
        None,
        "after how many seconds (or which ``timedelta``) without progress a run ends with exit code 76, with the "
        "stacks of all ranks; also a dict by section. None learns the limits, False sets none.",
        lambda name, value: resolve_stall_timeout(value),
    )


@dataclass
class Settings:
    """The settings of a Trainer, checked and resolved."""

    given: TrainerSettings
    max_epochs: int | None
    min_epochs: int | None
    max_steps: int
    min_steps: int | None
    max_time: timedelta | None
    limits: dict[str, Limit]
    """For ``"train"``, ``"validate"``, ``"test"``, ``"predict"``: a fraction as float, a number of batches as int."""
    overfit_batches: Limit
    val_check_interval: Limit | timedelta
    check_val_every_n_epoch: int | None
    num_sanity_val_steps: int
    log_every_n_steps: int
    accumulation: AccumulationSchedule
    clipping: tuple[float | None, str]
    fast_dev_run: int
    root: Path
    preemption_signals: tuple[str, ...]
    time_limit_margin: timedelta
    stall_limits: tuple[float, ...]

    @property
    def barebones(self) -> bool:
        """Whether everything that costs time is left out."""
        return self.given.barebones

    @property
    def shards_data(self) -> bool:
        """Whether loaders are sharded over ranks."""
        return self.given.use_distributed_sampler

    def limit_batches(self, stage: str, total: int | None) -> int | None:
        """Return how many of ``total`` batches a stage may use; None means all of an unknown number."""
        limit = self.limits[stage]
        if isinstance(limit, int):
            return limit if total is None else min(limit, total)
        if total is None:
            if limit not in (0.0, 1.0):
                raise ConfigurationError(
                    f"{_LIMITS[stage]}={limit} is a fraction, but the loader has no length: give a whole number."
                )
            return 0 if limit == 0.0 else None
        # A fraction that is not 0 keeps at least one batch.
        return max(1, int(total * limit)) if limit and total else 0

    def document(self) -> dict[str, Any]:
        """Return the settings as they are written into the directory of a run."""
        given = self.given
        return {
            "max_epochs": self.max_epochs,
            "min_epochs": self.min_epochs,
            "max_steps": self.max_steps,
            "min_steps": self.min_steps,
            "max_time": self.max_time,
            "limits": self.limits,
            "overfit_batches": self.overfit_batches,
            "val_check_interval": self.val_check_interval,
            "check_val_every_n_epoch": self.check_val_every_n_epoch,
            "num_sanity_val_steps": self.num_sanity_val_steps,
            "log_every_n_steps": self.log_every_n_steps,
            "clipping": self.clipping,
            "nonfinite": given.nonfinite,
            "debug": given.debug,
            "fast_dev_run": self.fast_dev_run,
            "barebones": given.barebones,
            "detect_anomaly": given.detect_anomaly,
            "reload_every": given.reload_dataloaders_every_n_epochs,
            "root": self.root,
        }


def resolve_settings(given: TrainerSettings) -> Settings:
    """Apply every rule, then the rules between arguments.

    Raises:
        ConfigurationError: an argument breaks its rule, or two contradict one another.
    """
    value = {
        each.name: getattr(given, each.name)
        if each.metadata["rule"] is None
        else each.metadata["rule"](each.name, getattr(given, each.name))
        for each in fields(given)
    }
    _check_combinations(given)
    max_epochs, max_steps = value["max_epochs"], -1 if given.max_steps is None else given.max_steps
    if max_epochs is None and max_steps == -1 and value["max_time"] is None:
        max_epochs = _DEFAULT_EPOCHS
    sanity, log_every = given.num_sanity_val_steps, given.log_every_n_steps
    settings = Settings(
        given=given,
        max_epochs=max_epochs,
        min_epochs=given.min_epochs,
        max_steps=max_steps,
        min_steps=given.min_steps,
        max_time=value["max_time"],
        limits={stage: value[name] for stage, name in _LIMITS.items()},
        overfit_batches=value["overfit_batches"],
        val_check_interval=value["val_check_interval"],
        check_val_every_n_epoch=given.check_val_every_n_epoch,
        num_sanity_val_steps=0 if given.barebones else 2 if sanity is None else sanity,
        log_every_n_steps=(0 if given.barebones else 50 if log_every is None else log_every) or _NEVER,
        accumulation=resolve_accumulation(given.accumulate_grad_batches),
        clipping=check_clipping(given.gradient_clip_val, given.gradient_clip_algorithm),
        fast_dev_run=value["fast_dev_run"],
        root=value["default_root_dir"],
        preemption_signals=value["preemption_signals"],
        time_limit_margin=value["time_limit_margin"],
        stall_limits=value["stall_timeout"],
    )
    if settings.fast_dev_run:
        _limit_to_dev_run(settings, settings.fast_dev_run)
    elif settings.overfit_batches:
        settings.limits["train"] = settings.limits["validate"] = settings.overfit_batches
    return settings


def _limit_to_dev_run(settings: Settings, batches: int) -> None:
    """Reduce a run to so many batches of each loop, whatever else was asked for."""
    settings.limits = dict.fromkeys(settings.limits, batches)
    settings.max_epochs, settings.max_steps, settings.max_time = 1, batches, None
    settings.min_epochs = settings.min_steps = None
    settings.num_sanity_val_steps, settings.overfit_batches = 0, 0
    settings.val_check_interval, settings.check_val_every_n_epoch, settings.log_every_n_steps = 1.0, 1, 1


def _check_combinations(given: TrainerSettings) -> None:
    """Refuse arguments that contradict one another."""
    if given.check_val_every_n_epoch is None and isinstance(given.val_check_interval, float | None):
        raise ConfigurationError(
            f"check_val_every_n_epoch=None with val_check_interval={given.val_check_interval}: without epochs there is "
            "no fraction of one; give val_check_interval as a number of batches or as a time."
        )
    _check_order("min_epochs", given.min_epochs, "max_epochs", given.max_epochs)
    _check_order("min_steps", given.min_steps, "max_steps", given.max_steps)
    if given.overfit_batches:
        limits = {name: getattr(given, name) for name in ("limit_train_batches", "limit_val_batches")}
        _refuse_both("overfit_batches", given.overfit_batches, "both say how many batches to use", **limits)
    if given.barebones:
        _refuse_both("barebones", True, "it leaves out whatever costs time",
                     fast_dev_run=given.fast_dev_run or None, detect_anomaly=given.detect_anomaly or None,
                     num_sanity_val_steps=given.num_sanity_val_steps)  # fmt: skip


def _check_order(low: str, lowest: int | None, high: str, highest: int | None) -> None:
    if lowest is not None and highest is not None and 0 <= highest < lowest:
        raise ConfigurationError(f"{low}={lowest} is larger than {high}={highest}: give {low} at most {high}.")


def _refuse_both(name: str, value: Any, reason: str, **others: Any) -> None:
    for other, given in others.items():
        if given is not None:
            raise ConfigurationError(
                f"{name}={value} and {other}={given} contradict one another: {reason}. Leave one of them out."
            )
