"""How often the host waits for the device in an optimizer step, under every strategy: a breach shows each stack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from emulated_fits import Classifier, Manual
from emulated_steps import (
    BARE,
    EVERYDAY,
    FIRST,
    LAST,
    STRATEGIES,
    WITHOUT_READING,
    Waits,
    check,
    check_each,
    on_devices,
    waits_of_fit,
)
from ranks import run_on_ranks
from torch import Tensor, nn

from phalanx.callbacks import (
    DeviceStatsMonitor,
    EMAWeightAveraging,
    GradientNormMonitor,
    LearningRateMonitor,
    Timer,
    WeightAveraging,
)
from phalanx.strategies import FSDPStrategy

CASES: dict[str, dict[str, Any]] = {**WITHOUT_READING, "fp16": {"precision": "16-mixed"}, "skip": {"nonfinite": "skip"}}
# Where a case differs from the bare step. The check for non-finite gradients reads one number, which ZeRO's engine
# reads in any case; so does its check for overflow in stages 2 and 3, in fp16 and in stage 2 also in bf16.
OTHERWISE: dict[tuple[str, str], int] = {
    **{(strategy, case): 1 for strategy in ("single", "ddp", "fsdp", "hsdp") for case in ("fp16", "skip")},
    ("zero2", "bf16"): 3,
    ("zero2", "clipped bf16"): 3,
    ("zero1", "fp16"): 3,
    ("zero2", "fp16"): 3,
    ("zero3", "fp16"): 4,
}


def waits_of_cases(strategy: str, devices: int) -> dict[str, Waits]:
    return {name: waits_of_fit(strategy, devices, arguments) for name, arguments in CASES.items()}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_waits_as_often_as_its_strategy_and_precision_require(strategy: str) -> None:
    devices = on_devices(strategy)
    for found in run_on_ranks(devices, waits_of_cases, strategy, devices, device="cuda"):
        for name, waits in found.items():
            check_each(f"{strategy}, {name}", waits, OTHERWISE.get((strategy, name), BARE.get(strategy, 0)))


def test_offloaded_gradients_are_waited_for_once_each() -> None:
    num_parameters = len(list(Classifier().parameters()))
    for found in run_on_ranks(2, waits_of_fit, "fsdp-offload", 2, {"gradient_clip_val": 0.1}, device="cuda"):
        check_each("fsdp-offload", found, num_parameters)


# ---- the everyday step -----------------------------------------------------------------------------------------------

VALIDATED_EVERY = 3


class Validated(Classifier):
    """Logs a metric in validation."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the loss."""
        self.log("validated", nn.functional.cross_entropy(self.head(self.blocks(batch[0])), batch[1]))


def everyday(strategy: str, devices: int) -> dict[str, Waits]:
    callbacks = [
        EMAWeightAveraging(decay=0.5),
        WeightAveraging(evaluate=False, average_at_end=False),
        LearningRateMonitor(logging_interval="step"),
        GradientNormMonitor(),
        DeviceStatsMonitor(),
        Timer(duration="01:00:00:00"),
    ]
    validation = {"val_check_interval": VALIDATED_EVERY}
    return {
        "logged": waits_of_fit(strategy, devices, EVERYDAY, logs=True),
        "with callbacks": waits_of_fit(strategy, devices, {**EVERYDAY, "callbacks": callbacks}, logs=True),
        "validated": waits_of_fit(strategy, devices, validation, Validated, validates=True),
    }


def due(every: int) -> list[int]:
    """Return 1 for each of the later steps that ends a period of so many steps, else 0."""
    return [int((step + 1) % every == 0) for step in range(FIRST, LAST)]


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp", "zero2", "zero3"])
def test_logging_callbacks_and_validation_wait_only_where_values_are_due(strategy: str) -> None:
    devices, bare = on_devices(strategy), BARE.get(strategy, 0)
    logged = [bare + is_due for is_due in due(EVERYDAY["log_every_n_steps"])]
    for found in run_on_ranks(devices, everyday, strategy, devices, device="cuda"):
        for name in ("logged", "with callbacks"):
            # The progress bar reads its metrics by the clock, not by the step.
            waits = [[each for each in step if "progress_bar" not in each] for step in found[name]]
            check(f"{strategy}, {name}", waits, logged)
        # A validation follows the step that makes it due, and reads its metric.
        validated = [bare + is_due for is_due in due(VALIDATED_EVERY)]
        check(f"{strategy}, validated", found["validated"], validated)


# ---- snapshots in memory ---------------------------------------------------------------------------------------------


SNAPSHOTS_EVERY = 2


class Kept(Classifier):
    """Looks for snapshots in a directory when the fit ends."""

    def __init__(self, memory: Path, **options: Any) -> None:
        super().__init__(**options)
        self.memory = memory

    def on_train_end(self) -> None:
        """Check that there are some; one may be in progress."""
        assert list(self.memory.glob("fit_0/memory-*.ckpt"))


def with_snapshots(strategy: str, devices: int, launch: str) -> Waits:
    """Fit as in an attempt of a launch that has memory for snapshots."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHALANX_ERROR_DIR", f"{launch}/0")
        return waits_of_fit(strategy, devices, {"snapshots": SNAPSHOTS_EVERY}, Kept, memory=Path(launch) / "memory")


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp", "zero2", "zero3"])
def test_snapshots_add_no_waiting(strategy: str, tmp_path: Path) -> None:
    for name in ("0", "memory"):
        (tmp_path / name).mkdir()
    devices, bare = on_devices(strategy), BARE.get(strategy, 0)
    # ZeRO's optimizers keep the number of updates on the device, and a snapshot holds it.
    read = [bare + is_due * strategy.startswith("zero") for is_due in due(SNAPSHOTS_EVERY)]
    for found in run_on_ranks(devices, with_snapshots, strategy, devices, str(tmp_path), device="cuda"):
        check(strategy, found, read)


# ---- manual optimization, and activation checkpointing ---------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_manual_optimization_waits_no_more_than_automatic(strategy: str) -> None:
    devices = on_devices(strategy)
    for found in run_on_ranks(devices, waits_of_fit, strategy, devices, {}, Manual, device="cuda"):
        check_each(strategy, found, 0)


class Recomputing(Classifier):
    """Computes the activations of its blocks again in the backward pass, with dropout, whose random state is kept."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss."""
        from torch.utils.checkpoint import checkpoint

        self.at_step(self, batch_idx)
        hidden = batch[0]
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        return nn.functional.cross_entropy(self.head(hidden), batch[1])


def recomputing(strategy: str, devices: int) -> list[Waits]:
    found = [waits_of_fit(strategy, devices, {}, Recomputing)]
    if strategy == "fsdp":
        found.append(waits_of_fit(FSDPStrategy(activation_checkpointing=True), devices, {}))
    return found


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp", "zero2"])
def test_recomputed_activations_add_no_waiting(strategy: str) -> None:
    devices = on_devices(strategy)
    for found in run_on_ranks(devices, recomputing, strategy, devices, device="cuda"):
        for waits in found:
            check_each(strategy, waits, BARE.get(strategy, 0))
