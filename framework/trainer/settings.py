"""The arguments of ``Trainer``: each is declared once, with its default, its rule and its documentation.

The signature and the docstring of ``Trainer`` are made from it; ``resolve_settings`` applies the rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from ..core.accumulation import AccumulationSchedule
from ..core.precision import Precision
from ..core.registry import PRECISIONS
from ..data.worker_process import SIGNALS
from ..launch.signals import check_signals
from ..launch.spot_notice import AUTO, check_service
from ..parallel.strategy import Strategy
from ..profiling.profiler import Profiler
from ..report.notifications import check_addresses
from ..watchdog.heartbeat import StallTimeout, resolve_stall_timeout
from .rules import (
    Limit,
    Rule,
    at_least,
    batch_limit,
    counted_in,
    deterministic,
    dev_run,
    directory,
    duration_above_zero,
    flag,
    interval,
    one_of,
    optional_duration,
    optional_interval,
    positive_number,
    resolve_profiler,
    snapshot_interval,
    unsupported,
)

REWIND = "rewind"
"""The value of ``nonfinite`` with which a fit goes back."""
OF_ONE_RANK = frozenset(
    {
        "accelerator", "benchmark", "callbacks", "default_root_dir", "device_peak_flops", "devices",
        "enable_autolog_hparams", "enable_model_summary", "enable_progress_bar", "enable_report", "inference_mode",
        "logger", "max_restarts", "notify", "preemption_notices", "preemption_signals", "profiler", "requeue",
        "stall_timeout", "time_limit_margin", "verbose",
    }
)  # fmt: skip
"""The arguments that may differ between the ranks of a run. All others change what is trained, or which collectives a
rank calls."""


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f'``"{name}"``' for name in names)


def _setting(default: Any, documentation: str, rule: Rule | None = None) -> Any:
    return field(default=default, metadata={"documentation": documentation, "rule": rule})


@dataclass(kw_only=True)
class TrainerSettings:
    """The arguments of ``Trainer`` as the user gave them."""

    accelerator: str = _setting(
        "auto",
        '``"cpu"``, ``"cuda"`` (ROCm too), ``"xpu"``, ``"mps"``, or the type of another backend of torch; ``"gpu"``: '
        'the accelerator that torch sees; ``"auto"``: that one, else the CPU.',
    )
    strategy: str | Strategy = _setting(
        "auto",
        'how work is distributed over ranks, a name or a ``Strategy``. ``"auto"`` chooses when a fit starts: on one '
        "rank ``single``, else the first of ``ddp``, ``fsdp``, ``zero3-offload`` and ``zero3-nvme`` that fits into "
        "memory.",
    )
    parallel: Mapping[str, int] | str | None = _setting(
        None,
        'ranks along each axis of a mesh, ``{"tp": 2, "dp_shard": -1}`` or ``"tp=2,dp_shard=-1"``: ``dp_replicate`` '
        "replicas, ``dp_shard`` ranks that share a replica's state, ``cp`` that share its sequences, ``tp`` that share "
        "a layer's computation, ``pp`` with some of the layers, ``ep`` with some of the experts. One may be -1, which "
        "takes the ranks that the others leave. A strategy refuses axes that it does not have. "
        'With ``strategy="auto"``, ``pp`` selects ``pipeline``, ``dp_replicate=-1`` or ``dp_shard=1`` ``ddp``, other '
        "``dp_*`` and ``ep`` ``fsdp``; with ``tp`` or ``cp`` alone it is ``ddp`` if the model fits, else ``fsdp``.",
    )
    devices: int | str | list[int] = _setting(
        "auto", 'ranks on each node: a number, a list of the indices of devices, or ``"auto"``.'
    )
    num_nodes: int = _setting(1, "nodes; more than one needs a launcher such as torchrun.")
    precision: str | int | Precision | None = _setting(
        None,
        f"{_quoted(PRECISIONS.built_in)}; or a short form, {_quoted(PRECISIONS.aliases)}, where numbers may be int; or "
        "a registered name, or a ``Precision``. None is ``32-true``.",
    )
    compile: bool | str | Mapping[str, Any] = _setting(
        False,
        "the parts that ``torch.compile`` compiles, in place and before the strategy wraps the module: True or "
        '``"blocks"``, the blocks that are repeated in a list of modules, or with True a module without such blocks '
        "whole; or a dict of its options ``mode``, ``backend``, ``dynamic``, ``fullgraph`` and ``options``, with "
        '``"blocks": False`` for the module whole. A submodule that is compiled already stays as it is. The search for '
        "the layer of a NaN and the summary of the model run in eager mode.",
    )
    memory: str | Mapping[str, str] | None = _setting(
        None,
        'how the repeated blocks of a module keep activations for the backward pass: ``"blocks"`` computes them again, '
        '``"selective"`` all but the results of matrix products and attention, ``"offload"`` keeps them in the memory '
        "of the host; or a dict from patterns of the names of blocks to these words. "
        'With ``"selective"``, attention that uses dropout is computed again too.',
    )
    logger: Any = _setting(None, "a ``Logger``, a name, or a list of these; True is TensorBoard, False none.")
    callbacks: Any = _setting(None, "a ``Callback``, a name, or a list of these.")
    fast_dev_run: bool | int = _setting(
        False, "run this many batches of each loop, without loggers and checkpoints, to try everything.", dev_run
    )
    duration: Any = _setting(
        None,
        'how long to train, in any unit: ``"2 epochs"``, ``"1000 steps"``, ``"1e9 tokens"``, ``"5e6 samples"`` or '
        '``"30 min"``. Tokens and samples are those of all ranks, counted by ``batch_weight``; training ends after the '
        "step that reaches them. Resuming with such a limit from a checkpoint without their count raises an error. The "
        "first limit that is reached ends the fit.",
        optional_interval,
    )
    max_epochs: int | str | None = _setting(
        None,
        "epochs to train; -1 means no limit. Without any limit 1000.",
        counted_in("epochs", at_least(-1)),
    )
    min_epochs: int | None = _setting(None, "epochs to train before a stop takes effect.", at_least(0))
    max_steps: int | str | None = _setting(
        -1, "optimizer steps to train; -1 means no limit.", counted_in("steps", at_least(-1))
    )
    min_steps: int | None = _setting(None, "optimizer steps before a stop takes effect.", at_least(0))
    max_time: Any = _setting(
        None,
        'time to train: ``"30 min"``, a ``timedelta``, a dict of its arguments, or ``"DD:HH:MM:SS"``.',
        optional_duration,
    )
    limit_train_batches: Limit | None = _setting(
        None, "training batches of an epoch: a number (int) or a fraction (float).", batch_limit
    )
    limit_val_batches: Limit | None = _setting(
        None, "validation batches, counted as in one process, for any number of ranks.", batch_limit
    )
    limit_test_batches: Limit | None = _setting(None, "the same for ``test``.", batch_limit)
    limit_predict_batches: Limit | None = _setting(None, "the same for ``predict``.", batch_limit)
    overfit_batches: Limit = _setting(
        0.0,
        "use so many batches, unshuffled, for training and validation; ``limit_train_batches`` and "
        "``limit_val_batches`` have no effect then.",
        batch_limit,
    )
    val_check_interval: Any = _setting(
        None,
        "validate within an epoch: a fraction of it, a number of batches, or a time; or a text such as "
        '``"1000 steps"``, ``"2 epochs"``, ``"1e6 tokens"`` or ``"30 min"``, counted over epochs. Validation starts at '
        "the end of an optimizer step, so with gradient accumulation it may start a few batches late.",
        interval,
    )
    check_val_every_n_epoch: int | None = _setting(
        1, "validate in every n-th epoch; None counts ``val_check_interval`` over epochs.", at_least(1)
    )
    num_sanity_val_steps: int | None = _setting(
        None, "validation batches to try before training (default 2); -1 for all.", at_least(-1)
    )
    log_every_n_steps: int | str | None = _setting(
        None,
        "optimizer steps between sending values to the loggers (default 50); 0 for never.",
        counted_in("steps", at_least(0)),
    )
    enable_checkpointing: bool | None = _setting(None, "whether to save checkpoints by default.", flag)
    enable_progress_bar: bool | None = _setting(None, "whether to show a progress bar.", flag)
    enable_model_summary: bool | None = _setting(None, "whether to show a table of the layers.", flag)
    enable_report: bool = _setting(
        True,
        "whether a fit that writes files also writes ``report.html``, a page with settings, curves and checkpoints, "
        "and the reason why it ended.",
        flag,
    )
    verbose: bool = _setting(
        True,
        "whether to show summaries, progress bars and the results of ``validate`` and ``test``; warnings and errors "
        "are always shown. The environment variable ``PHALANX_QUIET=1`` has the same effect as False.",
        flag,
    )
    accumulate_grad_batches: int | Mapping[int, int] | AccumulationSchedule = _setting(
        1, "micro-batches of each optimizer step: a number, ``{epoch: number}``, or a schedule."
    )
    global_batch_size: int | None = _setting(
        None, "samples of each optimizer step over all ranks; one such global batch counts as one batch.", at_least(1)
    )
    micro_batch_size: int | str | None = _setting(
        None,
        "samples of a forward and backward pass on one rank, of which as many run as the rank's part of the global "
        'batch takes; ``"auto"`` finds the size that fits into memory, ``"auto:8"`` from 8 samples on; None: the batch '
        'size of the loader. With ``"auto"``, a resumed run begins with the size in the checkpoint, and a run in which '
        'one sample does not fit ends with an error. On a CPU prefer ``"auto:8"``, since the operating system may kill '
        "the process before torch raises an error.",
    )
    gradient_clip_val: int | float | None = _setting(None, "clip gradients to this norm or value; 0 and None do not.")
    gradient_clip_algorithm: str | None = _setting(None, '``"norm"`` (default) or ``"value"``.')
    deterministic: bool | str | None = _setting(
        None, 'use deterministic algorithms; ``"warn"`` only warns where there is none.', deterministic
    )
    benchmark: bool | None = _setting(
        None,
        "let cuDNN search for its fastest algorithms. With True, a resumed run may not be bit-identical.",
        flag,
    )
    inference_mode: bool = _setting(
        True,
        "evaluate under ``torch.inference_mode`` rather than ``torch.no_grad``. ``fp8-mixed`` and strategies such as "
        "``fsdp`` and ``zero3`` always use ``torch.no_grad``.",
        flag,
    )
    use_distributed_sampler: bool = _setting(True, "shard loaders over ranks; False leaves them as they are.", flag)
    profiler: str | Profiler | None = _setting(
        None,
        'measures where the time of a fit goes, on every rank: ``"simple"`` by section, ``"advanced"`` by function, '
        '``"torch"`` writes traces of some steps; or a ``Profiler``. The files are in ``profile/`` in the run\'s '
        "directory.",
        resolve_profiler,
    )
    device_peak_flops: float | None = _setting(
        None,
        "FLOPs per second that one device reaches at most in the run's precision, for the model FLOPs utilization "
        "(MFU); None looks them up for known GPUs.",
        positive_number,
    )
    detect_anomaly: bool = _setting(False, "find the operation whose gradient is NaN; slow.", flag)
    barebones: bool = _setting(False, "no logger, no callbacks, no sanity check: for measuring.", flag)
    sync_batchnorm: bool = _setting(False, "compute batch statistics over all ranks.", flag)
    reload_dataloaders_every_n_epochs: int = _setting(0, "request new loaders every n epochs.", at_least(0))
    default_root_dir: str | Path | None = _setting(
        None, "where ``<name>/version_<n>`` is created (default: the working directory).", directory
    )
    enable_autolog_hparams: bool = _setting(True, "send the module's hyperparameters to the loggers.", flag)
    model_registry: None = _setting(None, "must be None.", unsupported("checkpoints are in the run's directory"))
    plugins: None = _setting(
        None, "must be None.", unsupported("give strategies, loggers and callbacks as objects or by name")
    )
    nonfinite: str = _setting(
        "raise",
        'reaction to a loss or gradient that is NaN or infinite: ``"raise"`` on all ranks, on a CPU before its update, '
        'on CUDA for losses alone and up to 16 micro-batches later; ``"skip"`` the update (at most 10 in a row), '
        '``"rewind"`` to the newest checkpoint and leave out the data since (at most 100 steps of it), or '
        '``"ignore"``.',
        one_of("raise", "skip", REWIND, "ignore"),
    )
    debug: str | None = _setting(
        None,
        '``"collectives"`` compares what ranks do before each collective and names the first difference; slow. A rank '
        "that waits 120 seconds because another one has called no collective raises an error too.",
        one_of("collectives", optional=True),
    )
    preemption_signals: Sequence[str] = _setting(
        SIGNALS,
        "signals at which a run finishes the step, saves and ends: SIGTERM, SIGUSR1 and SIGUSR2 with exit code 75, "
        "SIGINT with 130; a second SIGINT stops immediately.",
        lambda name, value: check_signals(value),
    )
    preemption_notices: str | bool = _setting(
        AUTO,
        'poll for the notice that a spot machine of ``"aws"``, ``"gcp"`` or ``"azure"`` is reclaimed; then save and '
        'end with exit code 75. ``"auto"``: on machines of these services. False: do not poll.',
        check_service,
    )
    notify: str | Sequence[str] | None = _setting(
        None,
        "an address, or a list of them, to which rank 0 or its launcher sends a JSON object when a fit ends, stalls, "
        'is preempted or restarted, or its loss rises suddenly; ``"env:NAME"`` is the address in a variable. Messages '
        "and files show the path of an address as ``***``.",
        check_addresses,
    )
    requeue: bool = _setting(
        True,
        "put a SLURM job back into the queue after SIGUSR1 or SIGUSR2, as ``sbatch --signal`` sends them. A job file "
        "of ``phalanx launch`` does so itself.",
        flag,
    )
    time_limit_margin: Any = _setting(
        timedelta(minutes=2),
        "how long before the end of a SLURM job to save and end with exit code 75.",
        duration_above_zero,
    )
    max_restarts: int = _setting(
        0,
        "how often ranks that phalanx launched are restarted after a failure, from the newest snapshot in memory or "
        "good checkpoint. A step that fails twice in a row ends the run, and so does a failure that a restart would "
        "not change. It has no effect under ``phalanx launch``, which has the option ``--max-restarts``.",
        at_least(0),
    )
    snapshots: int | str | bool | None = _setting(
        None,
        'after how many optimizer steps, or which time such as ``"5 min"``, the state is copied into memory that '
        "outlives the ranks. Restarted ranks continue from it, and if a run fails it is saved as ``rescued.ckpt``. "
        '``"auto"``: as often as takes at most 2 percent of the time; None: ``"auto"`` with ``max_restarts``; False: '
        "never. If less memory is free on a node than three checkpoints take, a message says so, and none are taken.",
        snapshot_interval,
    )
    verify_every: int | str | None = _setting(
        None,
        "after how many optimizer steps one is computed twice and compared bit for bit, as are weights that several "
        "ranks hold. A step with a wrong number is repeated and its rank named; a run whose weights are wrong ends "
        "with exit code 77. So does a run whose ranks hold different optimizer state, or whose weights change within "
        "the forward and backward passes of a step.",
        counted_in("steps", at_least(1)),
    )
    stall_timeout: StallTimeout = _setting(
        None,
        'after how many seconds (or which time, ``"10 min"`` or a ``timedelta``) without progress a run ends with exit '
        "code 76, with the stacks of all ranks; also a dict by section. None learns the limits, False sets none. "
        "A slow rank whose call stack changes has ten times the limit, and at least 5 minutes. Time in a debugger, or "
        "while Ctrl-Z pauses the run, does not count. Under torchrun, SLURM and MPI a stall is not detected while "
        "another thread holds the GIL.",
        lambda name, value: resolve_stall_timeout(value),
    )
