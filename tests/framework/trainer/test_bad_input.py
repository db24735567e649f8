"""Every mistake gets one sentence, before any process starts: what was given, the rule, the next step."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from messages import refuses
from models import Regressor, loader, regression_data, silent_trainer
from ranks import run_script
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from phalanx import AccumulationSchedule, Callback, DataModule, PhalanxError, Trainer, TrainModule
from phalanx.callbacks import EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint, Timer
from phalanx.framework.core.errors import ConfigurationError, LoopError, UnknownNameError
from phalanx.framework.core.precision import resolve_precision
from phalanx.strategies import SingleDeviceStrategy


def message(action: Callable[[], object], *words: str, error: type[PhalanxError] = ConfigurationError) -> str:
    """Return the message of the error that an action raises: a paragraph with some words that ends like a sentence."""
    with refuses(error, *words) as raised:
        action()
    text = str(raised.value)
    assert "\n" not in text
    assert text.rstrip()[-1] in ".)?"
    return text


def refusal(*words: str, **arguments: Any) -> str:
    """Return how a Trainer refuses its arguments, with some words."""
    return message(lambda: Trainer(**{"accelerator": "cpu", **arguments}), *words)


def fit_refusal(module: Any, data: Any, *words: str, error: type[PhalanxError] = ConfigurationError) -> str:
    """Return how a fit refuses a module or its data, with some words."""
    return message(lambda: silent_trainer(devices=1, max_steps=1).fit(module, data), *words, error=error)


# ---- arguments of the Trainer -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"strategy": "dpd"}, "'ddp'"),
        ({"precision": "bf16-mxied"}, "'bf16-mixed'"),
        ({"accelerator": "gpuu"}, "'gpu'"),
        ({"logger": "tensorbord"}, "'tensorboard'"),
        ({"callbacks": ["early_stoping"]}, "'early_stopping'"),
        ({"nonfinite": "rase"}, "'raise'"),
        ({"gradient_clip_algorithm": "norn", "gradient_clip_val": 1.0}, "'norm'"),
    ],
)
def test_unknown_names_get_the_closest_known_one(arguments: dict[str, Any], expected: str) -> None:
    with refuses(UnknownNameError, expected) as raised:
        Trainer(**{"accelerator": "cpu", **arguments})
    assert len(str(raised.value)) < 200
    assert isinstance(raised.value, ValueError)
    assert isinstance(raised.value, KeyError)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"max_epoch": 3}, "'max_epochs'"),
        ({"gpus": 2}, "'devices'"),
        ({"limit_validation_batches": 2}, "'limit_val_batches'"),
        ({"resume_from_checkpoint": "a.ckpt"}, "fit(model, ckpt_path=...)"),
        ({"batch_size": 4}, "DataLoader"),
        ({"flux_capacitor": True}, "accelerator, strategy"),
        ({"patience": 3}, "EarlyStopping(patience=...)"),
    ],
)
def test_unknown_arguments_get_a_hint(arguments: dict[str, Any], expected: str) -> None:
    ((name, value),) = arguments.items()
    text = refusal(expected, **arguments)
    assert text.startswith(f"Trainer({name}={value!r})")
    assert len(text) < 250


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"strategy": "ddp_sharded"}, "'fsdp'"),
        ({"strategy": "deepspeed_zero3"}, "'zero3'"),
        ({"strategy": "MULTI_GPU"}, "'ddp'"),
        ({"precision": "transformer-engine"}, "'fp8-mixed'"),
        ({"precision": "no"}, "'32-true'"),
        ({"accelerator": "tpu"}, "devices of torch.accelerator"),
        ({"logger": "comet"}, "phalanx.loggers.Logger"),
    ],
)
def test_names_of_other_frameworks_get_what_to_use_instead(arguments: dict[str, Any], expected: str) -> None:
    ((name, value),) = arguments.items()
    text = refusal(expected, **arguments)
    assert text.startswith(f"{name}={value!r}")
    assert "Did you mean" not in text


def test_without_a_close_name_a_message_lists_one_line_of_names() -> None:
    text = refusal("single, ddp, ", strategy="nonsense")
    assert text.startswith("strategy='nonsense'")
    assert len(text) < 200


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_epochs": -2}, {"max_epochs": True}, {"max_epochs": 1.5}, {"max_epochs": "3"}, {"min_epochs": -1},
        {"max_steps": -2}, {"max_steps": 1.0}, {"min_steps": False}, {"check_val_every_n_epoch": 0},
        {"num_sanity_val_steps": -2}, {"log_every_n_steps": -1}, {"reload_dataloaders_every_n_epochs": -1},
        {"num_nodes": 0}, {"num_nodes": True}, {"devices": 0}, {"devices": True}, {"devices": "many"}, {"devices": 1.0},
        {"devices": -2}, {"accumulate_grad_batches": 0}, {"accumulate_grad_batches": 1.5},
        {"accumulate_grad_batches": {0: 0}}, {"accumulate_grad_batches": {-1: 2}},
        {"limit_train_batches": -1}, {"limit_val_batches": 1.5}, {"limit_test_batches": True},
        {"limit_predict_batches": "all"}, {"overfit_batches": -0.5}, {"val_check_interval": -1},
        {"fast_dev_run": -1}, {"fast_dev_run": 0.5}, {"gradient_clip_val": -1.0}, {"gradient_clip_val": "1"},
        {"precision": True},
    ],
    ids=str,
)  # fmt: skip
def test_a_number_out_of_range_is_refused(arguments: dict[str, Any]) -> None:
    ((name, value),) = arguments.items()
    refusal(name if isinstance(value, dict) else f"{name}={value!r}", **arguments)


@pytest.mark.parametrize(
    "name",
    [
        "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "benchmark", "inference_mode",
        "use_distributed_sampler", "detect_anomaly", "barebones", "sync_batchnorm",
    ],
)  # fmt: skip
def test_a_switch_is_true_or_false(name: str) -> None:
    refusal(f"{name}='false'", **{name: "false"})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_time": "00:00:01:00", "callbacks": [Timer("00:01:00:00")]}, ["max_time=0:01:00", "Timer"]),
        (
            {"enable_checkpointing": False, "callbacks": [ModelCheckpoint()]},
            ["enable_checkpointing=False", "ModelCheckpoint"],
        ),
        ({"enable_progress_bar": False, "callbacks": "progress_bar"}, ["enable_progress_bar=False", "ProgressBar"]),
        (
            {"accumulate_grad_batches": 2, "callbacks": [GradientAccumulationScheduler({1: 2})]},
            ["accumulate_grad_batches=2", "GradientAccumulationScheduler"],
        ),
        (
            {
                "accumulate_grad_batches": AccumulationSchedule.cycle([1, 2]),
                "callbacks": [GradientAccumulationScheduler({1: 2})],
            },
            ["accumulate_grad_batches=cycle of 1, 2", "GradientAccumulationScheduler"],
        ),
        ({"min_epochs": 3, "max_epochs": 2}, ["min_epochs=3", "max_epochs=2"]),
        ({"check_val_every_n_epoch": None}, ["check_val_every_n_epoch=None", "batches"]),
        ({"check_val_every_n_epoch": None, "val_check_interval": 0.5}, ["val_check_interval=0.5"]),
        ({"val_check_interval": 0}, ["limit_val_batches=0"]),
        ({"barebones": True, "callbacks": [Timer()]}, ["barebones=True", "callbacks"]),
        ({"barebones": True, "logger": "csv"}, ["barebones=True", "logger='csv'"]),
        ({"barebones": True, "enable_checkpointing": True}, ["barebones=True", "enable_checkpointing=True"]),
        ({"barebones": True, "fast_dev_run": True}, ["barebones=True", "fast_dev_run=True"]),
        ({"strategy": "single", "devices": 2}, ["strategy='single'", "2 ranks", "ddp"]),
        ({"strategy": SingleDeviceStrategy(), "devices": 2}, ["2 ranks"]),
        ({"num_nodes": 2}, ["num_nodes=2", "torchrun"]),
        ({"devices": [0, 1]}, ["devices=[0, 1]", "'cpu'"]),
        ({"callbacks": [Timer(), Timer()]}, ["two callbacks", "'Timer'", "state_key"]),
        ({"max_time": "soon"}, ["max_time='soon'", "DD:HH:MM:SS"]),
        ({"accelerator": "mps"}, ["accelerator='mps'", "no MPS device", "Apple silicon"]),
        ({"accelerator": "npu"}, ["accelerator='npu'", "no NPU device", "its backend"]),
        ({"max_time": {"fortnights": 1}}, ["max_time={'fortnights': 1}"]),
        ({"max_time": timedelta(0)}, ["max_time="]),
        ({"deterministic": "yes"}, ["deterministic='yes'", "'warn'"]),
        ({"profiler": "simpel"}, ["profiler", "'simpel'", "'simple'"]),
        ({"device_peak_flops": 0}, ["device_peak_flops=0", "0"]),
        ({"plugins": []}, ["plugins"]),
        ({"default_root_dir": 3}, ["default_root_dir=3", "path"]),
    ],
    ids=lambda value: None if isinstance(value, list) else ", ".join(value),
)
def test_contradictions_are_refused(arguments: dict[str, Any], words: list[str]) -> None:
    refusal(*words, **arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"callbacks": [Timer]}, ["Timer", "Timer(...)"]),
        ({"callbacks": [3]}, ["3", "early_stopping"]),
        ({"callbacks": ["gradient_accumulation_scheduler"]}, ["GradientAccumulationScheduler(scheduling=...)"]),
        ({"logger": 3}, ["3", "csv"]),
        ({"logger": [Timer()]}, ["logger"]),
        ({"strategy": SingleDeviceStrategy}, ["strategy=", "object"]),
        ({"strategy": 3}, ["strategy=3"]),
    ],
)  # fmt: skip
def test_the_wrong_kind_of_object_is_refused(arguments: dict[str, Any], words: list[str]) -> None:
    refusal(*words, **arguments)


def test_a_callback_made_for_lightning_is_recognized(lightning: Any) -> None:
    refusal("lightning.pytorch", callbacks=[lightning.callbacks.Timer()])


def test_early_stopping_by_name_watches_the_validation_loss() -> None:
    (callback,) = (c for c in Trainer(accelerator="cpu", callbacks=["early_stopping"]).early_stopping_callbacks)
    assert isinstance(callback, EarlyStopping)
    assert callback.monitor == "val_loss"


def test_settings_cannot_be_changed_behind_the_trainers_back() -> None:
    trainer = silent_trainer(max_epochs=1)
    message(lambda: setattr(trainer, "max_epochs", 3), "Trainer(...)")
    assert trainer.max_epochs == 1


# ---- the module ---------------------------------------------------------------------------------------------------


class Forgetful(TrainModule):
    def __init__(self) -> None:
        pass


class NoOptimizers(Regressor):
    configure_optimizers = TrainModule.configure_optimizers


class NoStep(TrainModule):
    def configure_optimizers(self) -> Any:
        return None


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.Linear(2, 1), ["Linear", "phalanx.TrainModule"]),
        (lambda: Regressor, ["Regressor", "Regressor(...)"]),
        (lambda: None, ["NoneType"]),
        (lambda: DataModule(), ["DataModule", "arguments"]),
        (Forgetful, ["Forgetful.__init__", "super().__init__()"]),
        (NoOptimizers, ["NoOptimizers", "configure_optimizers"]),
        (NoStep, ["NoStep", "training_step"]),
    ],
)
def test_what_cannot_be_trained_is_refused(make: Callable[[], Any], words: list[str]) -> None:
    fit_refusal(make(), loader(), *words)


def test_modules_and_data_modules_of_lightning_are_refused_with_advice(lightning: Any) -> None:
    class Old(lightning.LightningModule):  # type: ignore[misc]
        pass

    class Images(lightning.LightningDataModule):  # type: ignore[misc]
        pass

    fit_refusal(Old(), loader(), "Old", "phalanx.TrainModule", "LightningModule")
    fit_refusal(Regressor(), Images(), "Images", "phalanx.DataModule", "LightningDataModule")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("validaton_step", "validation_step"),
        ("configure_optimizer", "configure_optimizers"),
        ("validation_epoch_end", "on_validation_epoch_end"),
        ("on_epoch_end", "on_train_epoch_end"),
        ("configure_sharded_model", "configure_model"),
        ("val_dataloaders", "val_dataloader"),
        ("forwrd", "forward"),
        ("on_training_step", "on_train_batch_end"),
        ("on_validation_end_epoch", "on_validation_epoch_end"),
    ],
)
def test_a_hook_that_is_never_called_is_refused(name: str, meant: str) -> None:
    base = NoOptimizers if meant == "configure_optimizers" else Regressor
    kind = type("Mine", (base,), {name: lambda self, *args: None})
    fit_refusal(kind(), loader(), f"Mine.{name}.", repr(meant))


def test_a_misspelled_override_of_a_hook_that_the_class_has_is_refused_too() -> None:
    class Base(Regressor):
        def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    class Mine(Base):
        def validaton_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)

    fit_refusal(Mine(), loader(), "Mine.validaton_step", "'validation_step'")


def test_helpers_with_names_of_their_own_are_fine() -> None:
    class Mine(Regressor):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.trainings_step(batch, batch_idx)

        def trainings_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx)

        def training_step_alone(self, batch: Any) -> Any: ...
        def forward_once(self, x: Tensor) -> None: ...
        def on_validation_figure(self) -> None: ...
        def train_loss(self) -> None: ...
        def on_gradient_norm(self) -> None: ...
        def shared_step(self, batch: Any) -> None: ...
        def validation_metrics(self) -> None: ...

    silent_trainer(max_steps=1).fit(Mine(), loader())


def test_misspelled_hooks_of_callbacks_and_data_modules_are_found_too() -> None:
    class Watching(Callback):
        def on_validaton_end(self, trainer: Any, module: Any) -> None: ...

    class Adding(Regressor):
        def configure_callbacks(self) -> Any:
            return [Watching()]

    class Data(DataModule):
        def train_dataloader(self) -> Any:
            return loader()

        def train_dataloaders(self) -> Any: ...

    refusal("'on_validation_end'", callbacks=[Watching()])
    fit_refusal(Adding(), loader(), "Watching.on_validaton_end", "'on_validation_end'")
    fit_refusal(Regressor(), Data(), "Data.train_dataloaders.", "'train_dataloader'")


@pytest.mark.parametrize(
    ("stage", "lacks"),
    [("validate", "validation_step"), ("test", "test_step"), ("predict", "predict_step")],
)
def test_an_evaluation_needs_a_model_with_its_step(stage: str, lacks: str) -> None:
    evaluate = getattr(silent_trainer(), stage)
    message(lambda: evaluate(NoStep(), loader()), lacks)
    message(evaluate, "model=")


def test_a_step_with_other_arguments_is_refused() -> None:
    class Three(Regressor):
        def training_step(self, batch: Any, batch_idx: int, optimizer_idx: int) -> Any: ...  # type: ignore[override]

    fit_refusal(Three(), loader(), "(batch, batch_idx, optimizer_idx)", error=LoopError)


# ---- what the module returns --------------------------------------------------------------------------------------


class Returning(Regressor):
    """Returns what a function makes of the loss."""

    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.change = change

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.change(super().training_step(batch, batch_idx))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda loss: loss.item(), ["float", "loss"]),
        (lambda loss: {"los": loss}, ["'loss'", "['los']"]),
        (lambda loss: {"loss": 1.0}, ["float"]),
        (lambda loss: (loss, 1), ["tuple"]),
        (lambda loss: loss.detach(), ["parameter"]),
        (lambda loss: loss.repeat(3), ["(3,)", "mean()"]),
    ],
)
def test_a_step_that_returns_the_wrong_thing(change: Callable[[Tensor], Any], words: list[str]) -> None:
    fit_refusal(Returning(change), loader(), *words, error=LoopError)


class Optimizing(Regressor):
    """Returns what a function makes of the module, from configure_optimizers."""

    def __init__(self, make: Callable[[TrainModule], Any]) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def scheduler(module: nn.Module) -> Any:
    return torch.optim.lr_scheduler.ConstantLR(sgd(module))


def scheduled(module: nn.Module, **config: Any) -> dict[str, Any]:
    """Return an optimizer and a scheduler of it, with more keys for the scheduler."""
    made = scheduler(module)
    return {"optimizer": made.optimizer, "lr_scheduler": {"scheduler": made, **config}}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda m: None, ["configure_optimizers", "optimizer"]),
        (lambda m: [sgd(m), sgd(m)], ["2", "automatic_optimization"]),
        (lambda m: 3, ["int", "optimizer"]),
        (lambda m: {"optimiser": sgd(m)}, ["'optimiser'", "'optimizer'"]),
        (lambda m: {"lr_scheduler": scheduler(m)}, ["'optimizer'"]),
        (lambda m: {"optimizer": sgd(m), "lr_scheduler": {"interval": "step"}}, ["'scheduler'"]),
        (lambda m: scheduled(m, intervall="step"), ["'interval'"]),
        (lambda m: scheduled(m, interval="batch"), ["interval='batch'", "'epoch' or 'step'"]),
        (lambda m: scheduled(m, frequency=0), ["frequency=0"]),
        (lambda m: ([o := sgd(m)], [torch.optim.lr_scheduler.ReduceLROnPlateau(o)]), ["ReduceLROn", "'monitor'"]),
        (lambda m: ([sgd(m)], [scheduler(m)]), ["ConstantLR"]),
        (lambda m: ([sgd(m)], [3]), ["int", "step()"]),
        (lambda m: sgd(nn.Linear(2, 1)), ["SGD", "(1, 2)", "self.parameters()"]),
        (lambda m: sgd(m.requires_grad_(False)), ["gradient"]),
        (lambda m: torch.optim.LBFGS(m.parameters()), ["LBFGS", "automatic_optimization"]),
    ],
)  # fmt: skip
def test_configure_optimizers_that_returns_the_wrong_thing(
    make: Callable[[TrainModule], Any], words: list[str]
) -> None:
    fit_refusal(Optimizing(make), loader(), *words)


# ---- data ---------------------------------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (None, ["train_dataloaders", "train_dataloader()"]),
        (regression_data(8), ["TensorDataset", "DataLoader(dataset"]),
        ("data.csv", ["train_dataloaders", "str"]),
        (torch.ones(4, 2), ["train_dataloaders", "Tensor"]),
        ({}, ["train_dataloaders", "dict"]),
        ([], ["train_dataloaders"]),
        (DataLoader(TensorDataset(torch.ones(3, 2)), batch_size=4, drop_last=True), ["train_dataloaders", "drop_last"]),
        (DataLoader(TensorDataset(torch.ones(0, 2))), ["train_dataloaders"]),
        (Stream(), ["batch_size=None"]),
        (lambda: loader(), ["function"]),
        ({"a": loader(), "b": "x"}, ["train_dataloaders['b']", "str"]),
    ],
)
def test_data_that_cannot_be_read_is_refused(data: Any, words: list[str]) -> None:
    fit_refusal(Regressor(), data, *words)


def test_data_modules_that_are_none() -> None:
    class Data(DataModule):
        pass

    fit = silent_trainer().fit
    message(lambda: fit(Regressor(), datamodule=Data), "Data")  # type: ignore[arg-type]
    message(lambda: fit(Regressor(), datamodule=Data()), "train_dataloader")
    message(lambda: fit(Regressor(), loader(), datamodule=Data()), "datamodule")


class Manual(Regressor):
    automatic_optimization = False


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"gradient_clip_val": 1.0}, ["gradient_clip_val=1.0", "self.clip_gradients"]),
        ({"accumulate_grad_batches": 4}, ["accumulate_grad_batches=4", "training_step"]),
    ],
)
def test_settings_that_mean_nothing_under_manual_optimization(arguments: dict[str, Any], words: list[str]) -> None:
    message(lambda: silent_trainer(**arguments).fit(Manual(), loader()), *words)


# ---- no process is started ----------------------------------------------------------------------------------------

# What a module has beside the usual, arguments of the Trainer, those of fit, and what is said.
_MISTAKES = [
    ("", "", "M(), data.dataset", "a TensorDataset, a dataset"),
    ("    def validaton_step(self, batch, batch_idx): ...", "", "M(), data", "Did you mean 'validation_step'?"),
    ("    automatic_optimization = False", ", gradient_clip_val=1.0", "M(), data", "self.clip_gradients"),
    ("", "", "M(), data, ckpt_path='x.ckpt'", "'x.ckpt' does not exist"),
]
_SCRIPT = """
import json, os, sys
print("PROCESS", os.getpid(), flush=True)
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from phalanx import Trainer, TrainModule

data = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2)
for source in json.loads(sys.argv[1]):
    try:
        exec(source)
    except Exception as error:
        print("REFUSED", " ".join(str(error).split()), flush=True)
    else:
        print("TAKEN", flush=True)
"""
_ATTEMPT = """
class M(TrainModule):
    def __init__(self):
        TrainModule.__init__(self)
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
{method}

Trainer(accelerator="cpu", devices=2, logger=False, enable_checkpointing=False{arguments}).fit({fit})
"""


def test_no_rank_is_started_for_a_mistake() -> None:
    attempts = [_ATTEMPT.format(method=method, arguments=given, fit=fit) for method, given, fit, _ in _MISTAKES]
    lines = run_script(_SCRIPT, json.dumps(attempts)).stdout.splitlines()
    assert len([line for line in lines if line.startswith("PROCESS")]) == 1
    answers = [line for line in lines if line.startswith(("REFUSED", "TAKEN"))]
    assert len(answers) == len(_MISTAKES)
    for answer, (*_, expected) in zip(answers, _MISTAKES, strict=True):
        assert answer.startswith("REFUSED")
        assert expected in answer


def test_devices_that_the_launcher_did_not_start() -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                 "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"}  # fmt: skip
    script = "from phalanx import Trainer\nTrainer(accelerator='cpu', devices=4)"
    done = run_script(script, env=variables)
    assert "devices=4" in done.stdout
    assert "torchrun" in done.stdout


def test_a_precision_has_short_forms() -> None:
    given = (None, 32, "16", 16, "fp16", "bf16", "64")
    names = [resolve_precision(one).name for one in given]
    assert names == ["32-true", "32-true", "16-mixed", "16-mixed", "16-mixed", "bf16-mixed", "64-true"]
