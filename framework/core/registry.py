"""Registries of plug-ins: the names of strategies, precisions, loggers and callbacks, and the code they refer to.

A target is written ``"module:attribute"``. Its module is imported when the name is first used, so that naming a plug-in
here costs no import. Built-in targets begin with a dot and are relative to the package.

Third-party packages add names through entry points of the groups ``phalanx.strategies``, ``phalanx.precisions``,
``phalanx.loggers`` and ``phalanx.callbacks``. A package cannot replace a built-in name. An alias that is the name of an
entry point, too, is refused when it is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from importlib import import_module
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any

from .errors import ConfigurationError, UnknownNameError, unknown

_PACKAGE = __name__.rpartition(".framework")[0]
_STARTS_RANKS = "use 'ddp', which starts the ranks itself, in scripts and in notebooks"
_NO_XLA = "phalanx trains on CPUs and CUDA devices, not on TPUs; use 'ddp' or 'fsdp'"
_OTHER_FP8 = "use 'fp8-mixed', which computes linear layers in fp8 by torchao"
_NO_QUANTIZATION = "weights are not quantized; use 'bf16-true' for the smallest ones"
_OWN_LOGGER = "derive a logger from phalanx.loggers.Logger, with name, version and log_metrics; see docs/extending.md"


class Registry:
    """The names of one kind of plug-in.

    Args:
        what: describes an entry in messages, such as ``"strategy"``.
        group: the group of entry points that adds names.
        table: the target of each built-in name.
        aliases: other names for the names in ``table``.
        instead: for names that other frameworks have and phalanx lacks, a sentence that says what to use instead.
    """

    def __init__(
        self,
        what: str,
        group: str,
        table: dict[str, str],
        aliases: dict[str, str] | None = None,
        instead: Mapping[str, str] | None = None,
    ) -> None:
        self.what = what
        self.group = group
        self._table = table
        self._aliases = aliases or {}
        self._instead = instead or {}
        self._entry_points: dict[str, str] | None = None

    def __iter__(self) -> Iterator[str]:
        yield from self._table
        yield from (point.name for point in entry_points(group=self.group) if point.name not in self._table)

    @property
    def built_in(self) -> tuple[str, ...]:
        """The names without those of entry points, which take milliseconds to find."""
        return tuple(self._table)

    @property
    def aliases(self) -> Mapping[str, str]:
        """The name in ``built_in`` that each other name stands for."""
        return MappingProxyType(self._aliases)

    def register(self, name: str, target: str) -> None:
        """Add ``name`` for ``target``, written ``"module:attribute"`` with the module's full name.

        Raises:
            ConfigurationError: the name is taken, or the target is not of that form.
        """
        if name in self._table or name in self._aliases:
            raise ConfigurationError(f"{self.what} {name!r} is registered already; choose another name.")
        if target.count(":") != 1:
            raise ConfigurationError(f"{self.what} {name!r} needs a target 'module:attribute', got {target!r}.")
        self._table[name] = target

    def canonical(self, name: str) -> str:
        """Return the name that ``name`` stands for.

        Raises:
            UnknownNameError: the name is not registered; the message gives the closest name first.
            ConfigurationError: it is an alias, and an entry point has the same name.
        """
        if name in self._aliases:
            self._check_alias(name)
            return self._aliases[name]
        if name not in self._table and name not in set(self):
            raise self._unknown(name)
        return name

    def _check_alias(self, name: str) -> None:
        """Refuse an alias that an entry point has as its name: the alias would hide the plug-in without a word."""
        if self._entry_points is None:
            self._entry_points = {point.name: point.value for point in entry_points(group=self.group)}
        if (target := self._entry_points.get(name)) is not None:
            raise ConfigurationError(
                f"{self.what}={name!r} is the built-in {self._aliases[name]!r} and also an entry point of the group "
                f"{self.group}, {target!r}: write {self._aliases[name]!r} for the first, or rename the entry point."
            )

    def _unknown(self, name: str) -> UnknownNameError:
        if sentence := self._instead.get(name.lower()):
            return UnknownNameError(f"{self.what}={name!r} is not known: {sentence}.")
        return unknown(self.what, name, self, self._aliases)

    def load(self, name: str) -> Any:
        """Return the object that ``name`` stands for, importing its module on first use."""
        name = self.canonical(name)
        target = self._table.get(name)
        if target is None:
            return next(point for point in entry_points(group=self.group) if point.name == name).load()
        module, _, attribute = target.partition(":")
        return getattr(import_module(module, _PACKAGE), attribute)


def automatic(function: str) -> Any:
    """Return a function of ``phalanx.strategies.automatic``, where strategies are chosen by name."""
    return getattr(import_module(".strategies.automatic", _PACKAGE), function)


STRATEGIES = Registry(
    "strategy",
    "phalanx.strategies",
    {
        "single": ".strategies.single:SingleDeviceStrategy",
        "ddp": ".strategies.ddp:DDPStrategy",
        "ddp_find_unused_parameters_true": ".strategies.ddp:find_unused_parameters",
        "fsdp": ".strategies.fsdp.strategy:FSDPStrategy",
        "fsdp-offload": ".strategies.fsdp.strategy:fsdp_offload",
        "hsdp": ".strategies.fsdp.strategy:hsdp",
        "pipeline": ".strategies.pipeline.strategy:PipelineStrategy",
        "deepspeed": ".strategies.deepspeed.strategy:DeepSpeedStrategy",
        "zero1": ".strategies.deepspeed.strategy:zero1",
        "zero1-offload": ".strategies.deepspeed.strategy:zero1_offload",
        "zero2": ".strategies.deepspeed.strategy:zero2",
        "zero2-offload": ".strategies.deepspeed.strategy:zero2_offload",
        "zero3": ".strategies.deepspeed.strategy:zero3",
        "zero3-offload": ".strategies.deepspeed.strategy:zero3_offload",
        "zero3-nvme": ".strategies.deepspeed.strategy:zero3_nvme",
    },
    aliases={
        "full_shard": "fsdp",
        "hybrid_shard": "hsdp",
        "fsdp_cpu_offload": "fsdp-offload",
        "deepspeed_stage_1": "zero1",
        "deepspeed_stage_1_offload": "zero1-offload",
        "deepspeed_stage_2": "zero2",
        "deepspeed_stage_2_offload": "zero2-offload",
        "deepspeed_stage_3": "zero3",
        "deepspeed_stage_3_offload": "zero3-offload",
        "deepspeed_stage_3_offload_nvme": "zero3-nvme",
    },
    instead={
        "ddp_sharded": "use 'fsdp', which shards parameters, gradients and optimizer state, or 'zero2'",
        "sharded_ddp": "use 'fsdp', which shards parameters, gradients and optimizer state, or 'zero2'",
        "ddp_sharded_spawn": "use 'fsdp', which shards parameters, gradients and optimizer state, or 'zero2'",
        "ddp_spawn": _STARTS_RANKS,
        "ddp_fork": _STARTS_RANKS,
        "ddp_notebook": _STARTS_RANKS,
        "ddp_cpu": "use 'ddp' with accelerator='cpu'",
        "multi_gpu": "use 'ddp'",
        "multi_cpu": "use 'ddp' with accelerator='cpu'",
        "dp": "use 'ddp' with one rank for each device",
        "ddp2": "use 'ddp' with one rank for each device",
        "horovod": "use 'ddp'",
        "bagua": "use 'ddp'",
        "hivemind": "use 'ddp'",
        "deepspeed_zero1": "use 'zero1'",
        "deepspeed_zero2": "use 'zero2'",
        "deepspeed_zero3": "use 'zero3'",
        "fsdp_native": "use 'fsdp'",
        "fsdp2": "use 'fsdp', which is built on torch's fully_shard",
        "fairscale": "use 'fsdp'",
        "colossalai": "use 'fsdp' or 'zero3'",
        "megatron_lm": "use 'fsdp' with FSDPStrategy(tensor_parallel=...)",
        "megatron": "use 'fsdp' with FSDPStrategy(tensor_parallel=...)",
        "tpu_spawn": _NO_XLA,
        "xla": _NO_XLA,
        "xla_fsdp": _NO_XLA,
        "hpu_parallel": "phalanx trains on CPUs and CUDA devices; use 'ddp'",
    },
)

PRECISIONS = Registry(
    "precision",
    "phalanx.precisions",
    {
        "32-true": ".precisions.true:Float32True",
        "64-true": ".precisions.true:Float64True",
        "bf16-mixed": ".precisions.mixed:BFloat16Mixed",
        "16-mixed": ".precisions.mixed:Float16Mixed",
        "fp8-mixed": ".precisions.float8:Float8Mixed",
        "bf16-true": ".precisions.true:BFloat16True",
        "16-true": ".precisions.true:Float16True",
    },
    aliases={
        "32": "32-true",
        "64": "64-true",
        "bf16": "bf16-mixed",
        "16": "16-mixed",
        "fp16": "16-mixed",
        "fp8": "fp8-mixed",
    },
    instead={
        "no": "use '32-true'",
        "fp32": "use '32-true'",
        "transformer-engine": _OTHER_FP8,
        "transformer-engine-float16": _OTHER_FP8,
        "tf32": "use '32-true', and call torch.set_float32_matmul_precision('high')",
        "nf4": _NO_QUANTIZATION,
        "fp4": _NO_QUANTIZATION,
        "int8": _NO_QUANTIZATION,
    },
)

LOGGERS = Registry(
    "logger",
    "phalanx.loggers",
    {
        "csv": ".loggers.csv_file:CSVLogger",
        "jsonl": ".loggers.json_lines:JSONLinesLogger",
        "mlflow": ".loggers.mlflow:MLFlowLogger",
        "opentelemetry": ".loggers.opentelemetry:OpenTelemetryLogger",
        "prometheus": ".loggers.prometheus:PrometheusLogger",
        "tensorboard": ".loggers.tensorboard:TensorBoardLogger",
        "trackio": ".loggers.trackio:TrackioLogger",
        "wandb": ".loggers.wandb:WandbLogger",
    },
    instead=dict.fromkeys(
        ("comet", "comet_ml", "neptune", "clearml", "aim", "dvclive", "swanlab"),
        _OWN_LOGGER,
    ),
)

CALLBACKS = Registry(
    "callback",
    "phalanx.callbacks",
    {
        "early_stopping": ".callbacks.early_stopping:EarlyStopping",
        "evaluate": ".callbacks.evaluate:Evaluate",
        "model_checkpoint": ".callbacks.model_checkpoint:ModelCheckpoint",
        "gradient_accumulation_scheduler": ".callbacks.accumulation:GradientAccumulationScheduler",
        "gradient_norm_monitor": ".callbacks.gradient_norm:GradientNormMonitor",
        "learning_rate_monitor": ".callbacks.learning_rate:LearningRateMonitor",
        "device_stats_monitor": ".callbacks.device_stats:DeviceStatsMonitor",
        "backbone_finetuning": ".callbacks.finetuning:BackboneFinetuning",
        "base_finetuning": ".callbacks.finetuning:BaseFinetuning",
        "base_prediction_writer": ".callbacks.prediction_writer:BasePredictionWriter",
        "prediction_writer": ".callbacks.prediction_writer:PredictionWriter",
        "optuna_pruning": ".callbacks.optuna_pruning:OptunaPruning",
        "throughput_monitor": ".callbacks.throughput:ThroughputMonitor",
        "timer": ".callbacks.timer:Timer",
        "model_summary": ".callbacks.summary:ModelSummary",
        "on_exception_checkpoint": ".callbacks.on_exception_checkpoint:OnExceptionCheckpoint",
        "progress_bar": ".callbacks.progress:ProgressBar",
        "rich_model_summary": ".callbacks.summary:RichModelSummary",
        "tqdm_progress_bar": ".callbacks.progress:TQDMProgressBar",
        "rich_progress_bar": ".callbacks.progress:RichProgressBar",
        "weight_averaging": ".callbacks.weight_averaging:WeightAveraging",
        "ema": ".callbacks.weight_averaging:EMAWeightAveraging",
        "stochastic_weight_averaging": ".callbacks.stochastic_weight_averaging:StochasticWeightAveraging",
        "lambda": ".callbacks.lambda_callback:LambdaCallback",
    },
)


def as_list(given: Any) -> list[Any]:
    """Return the plug-ins that a user gave: None, an object or a name, or a sequence or set of objects and names."""
    if given is None:
        return []
    if isinstance(given, str) or not isinstance(given, Sequence | Set):
        return [given]
    return list(given)
