"""Unknown arguments of constructors and functions: the message names the closest argument, or the place of another."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from messages import refuses
from models import Regressor, loader, silent_trainer

from phalanx import (
    AccumulationSchedule,
    Callback,
    CombinedLoader,
    DataModule,
    Fabric,
    Trainer,
    TrainModule,
    checkpoint,
    seed_everything,
)
from phalanx.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    ProgressBar,
    Timer,
)
from phalanx.compat.accelerate import Accelerator
from phalanx.errors import ConfigurationError, UnknownArgumentError
from phalanx.loggers import CSVLogger
from phalanx.precisions import BFloat16Mixed, LossScaler, Precision
from phalanx.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, SingleDeviceStrategy


def message(action: Callable[..., object], *args: Any, **arguments: Any) -> str:
    """Return the message of the error for the arguments of a call."""
    with refuses(ConfigurationError) as raised:
        action(*args, **arguments)
    text = str(raised.value)
    assert "\n" not in text
    assert len(text) < 300
    return text


@pytest.mark.parametrize(
    ("build", "arguments", "meant"),
    [
        (EarlyStopping, {"monitor": "val_loss", "patiense": 3}, "patience"),
        (ModelCheckpoint, {"monitors": "val_loss"}, "monitor"),
        (LearningRateMonitor, {"loging_interval": "step"}, "logging_interval"),
        (Timer, {"durations": "00:01:00:00"}, "duration"),
        (EMAWeightAveraging, {"decays": 0.9}, "decay"),
        (ProgressBar, {"refresh_second": 1}, "refresh_seconds"),
        (CSVLogger, {"save_dirs": "logs"}, "save_dir"),
        (DDPStrategy, {"find_unused": True}, "find_unused_parameters"),
        (DDPStrategy, {"gradient_as_buckets_view": True}, "gradient_as_bucket_view"),
        (Fabric, {"precison": "32-true"}, "precision"),
        (Fabric, {"accumulate_grad_batches": 2}, "accumulate"),
        (Fabric, {"gradient_accumulation_steps": 2}, "accumulate"),
        (Accelerator, {"mixed_precison": "bf16"}, "mixed_precision"),
        (seed_everything, {"worker": True}, "workers"),
    ],
)
def test_an_unknown_argument_of_a_constructor_gets_the_closest_one(
    build: Callable[..., object], arguments: dict[str, Any], meant: str
) -> None:
    text = message(build, **arguments)
    name, value = list(arguments.items())[-1]
    assert text.startswith(f"{build.__name__}({name}={value!r})")
    assert repr(meant) in text


@pytest.mark.parametrize(
    ("build", "name", "meant"), [(DeepSpeedStrategy, "stages", "stage"), (FSDPStrategy, "unit", "units")]
)
def test_strategies_with_tables_of_arguments_name_the_closest_one_too(
    build: Callable[..., object], name: str, meant: str
) -> None:
    assert repr(meant) in message(build, **{name: 1})


@pytest.mark.parametrize(
    ("verb", "name", "meant"),
    [
        ("fit", "train_dataloader", "train_dataloaders"),
        ("fit", "val_loader", "val_dataloaders"),
        ("fit", "data_module", "datamodule"),
        ("fit", "resume_from_checkpoint", "ckpt_path"),
        ("validate", "val_dataloaders", "dataloaders"),
        ("test", "test_dataloaders", "dataloaders"),
        ("predict", "dataloader", "dataloaders"),
        ("plan", "activations_bytes", "activation_bytes"),
        ("save_checkpoint", "weight_only", "weights_only"),
    ],
)
def test_an_unknown_argument_of_the_trainers_verbs_gets_the_closest_one(verb: str, name: str, meant: str) -> None:
    trainer = silent_trainer()
    text = message(getattr(trainer, verb), Regressor(), **{name: object()})
    assert text.startswith(f"Trainer.{verb}({name}=...)")
    assert repr(meant) in text


@pytest.mark.parametrize(
    ("verb", "name", "meant"),
    [
        ("setup_dataloaders", "move_to_devices", "move_to_device"),
        ("log", "setp", "step"),
        ("clip_gradients", "max_norms", "max_norm"),
    ],
)
def test_an_unknown_argument_of_the_fabrics_verbs_gets_the_closest_one(verb: str, name: str, meant: str) -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    text = message(getattr(fabric, verb), **{name: 1})
    assert text.startswith(f"Fabric.{verb}({name}=1)")
    assert repr(meant) in text


@pytest.mark.parametrize(
    ("verb", "arguments", "closest"),
    [
        ("accumulate", {"model": None}, "none"),
        ("autocast", {"enabled": False}, "none"),
        ("free_memory", {"object": None}, "none"),
        ("init_module", {"empty_int": True}, "'empty_init'"),
        ("init_tensor", {"device": "cpu"}, "none"),
        ("join_uneven_inputs", {"even_batch": True}, "'even_batches'"),
        ("no_backward_sync", {"enable": False}, "'enabled'"),
        ("rank_zero_first", {"locally": True}, "'local'"),
        ("set_accumulation", {"accumulates": 2}, "'accumulate'"),
        ("split_between_processes", {"apply_pading": True}, "'apply_padding'"),
    ],
)
def test_an_unknown_argument_of_a_context_manager_gets_the_closest_one(
    verb: str, arguments: dict[str, Any], closest: str
) -> None:
    text = message(getattr(Fabric(accelerator="cpu", devices=1), verb), **arguments)
    name, value = next(iter(arguments.items()))
    assert text.startswith(f"Fabric.{verb}({name}={value!r})")
    assert closest in text


@pytest.mark.parametrize(
    ("verb", "name", "meant"),
    [
        ("autocast", "handler", "autocast_handler"),
        ("profile", "handler", "profile_handler"),
        ("unwrap_model", "keep_fp32", "keep_fp32_wrapper"),
        ("trigger_sync_in_backward", "modle", "model"),
    ],
)
def test_an_unknown_argument_of_accelerates_methods_gets_the_closest_one(verb: str, name: str, meant: str) -> None:
    text = message(getattr(Accelerator(), verb), **{name: None})
    assert text.startswith(f"Accelerator.{verb}({name}=None)")
    assert repr(meant) in text


def test_a_type_error_inside_a_context_manager_is_pythons() -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    with pytest.raises(TypeError, match=r"has no len\(\)") as raised, fabric.init_module():
        len(3)  # type: ignore[arg-type]
    assert not isinstance(raised.value, UnknownArgumentError)


def test_an_unknown_argument_of_save_hyperparameters_gets_the_closest_one() -> None:
    class Mine(TrainModule):
        def __init__(self, size: int = 3, **arguments: Any) -> None:
            super().__init__()
            self.save_hyperparameters(**arguments)

    text = message(Mine, ignored="size")
    assert text.startswith("Mine.save_hyperparameters(ignored='size')")
    assert "'ignore'" in text
    assert "'logger'" in message(Mine, loggers=False)


def test_save_hyperparameters_keeps_the_arguments_of_each_class_on_the_way() -> None:
    class Base(TrainModule):
        def __init__(self, size: int = 3) -> None:
            super().__init__()
            self.save_hyperparameters()

    class Mine(Base):
        def __init__(self, depth: int, size: int = 5) -> None:
            super().__init__(size)

    class Data(DataModule):
        def __init__(self, path: str, rows: int = 2) -> None:
            self.save_hyperparameters(ignore="rows")

    assert dict(Mine(2).hparams) == {"size": 5, "depth": 2}
    assert dict(Data("here").hparams) == {"path": "here"}


@pytest.mark.parametrize("base", [Callback, TrainModule, DataModule, Precision, SingleDeviceStrategy, BFloat16Mixed])
def test_a_class_without_constructor_names_the_unknown_argument(base: type) -> None:
    class Mine(base):  # type: ignore[misc]
        pass

    assert message(Mine, sise=3).startswith("Mine(sise=3)")
    assert inspect.signature(Mine).parameters == {}
    with pytest.raises(TypeError):
        Mine(3)


def test_a_class_without_constructor_still_passes_arguments_on() -> None:
    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

    class Mine(Callback, Named):
        pass

    class Own(Callback):
        name: str

        def __new__(cls, name: str) -> Own:
            made = super().__new__(cls)
            made.name = name
            return made

    class Inner(EarlyStopping):
        pass

    # A type checker finds no such arguments in the base class.
    mine: Any = Mine
    own: Any = Own
    assert mine(name="a").name == "a"
    assert own(name="b").name == "b"
    assert pickle.loads(pickle.dumps(BFloat16Mixed())).name == BFloat16Mixed().name
    assert message(Inner, monitor="loss", patiense=2).startswith("Inner(patiense=2)")


@pytest.mark.parametrize(
    ("function", "arguments", "meant"),
    [
        (AccumulationSchedule, {"factor": 2}, "factors"),
        (CombinedLoader, {"iterable": []}, "iterables"),
        (LossScaler, {"growth_interwal": 2}, "growth_interval"),
        (ModelSummary, {"max_dept": 2}, "max_depth"),
        (checkpoint.verify, {"paths": "a"}, "path"),
        (checkpoint.newest_good, {"directories": "a"}, "directory"),
        (DataModule.from_datasets, {"train_datasets": None}, "train_dataset"),
    ],
)
def test_an_unknown_argument_of_other_public_functions_gets_the_closest_one(
    function: Callable[..., object], arguments: dict[str, Any], meant: str
) -> None:
    assert repr(meant) in message(function, **arguments)


def test_an_unknown_argument_of_log_gets_the_closest_one() -> None:
    class Mine(Regressor):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("a", 1.0, progbar=True)  # type: ignore[call-arg]

    text = message(silent_trainer(max_steps=1).fit, Mine(), loader())
    assert text.startswith("self.log(progbar=True)")
    assert "'prog_bar'" in text


def test_an_unknown_argument_of_log_dict_gets_the_closest_one() -> None:
    class Mine(Regressor):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log_dict({"a": 1.0}, on_steps=True)

    assert "'on_step'" in message(silent_trainer(max_steps=1).fit, Mine(), loader())


def test_the_error_is_the_type_error_that_python_would_raise() -> None:
    with pytest.raises(TypeError):
        EarlyStopping("val_loss", patiense=3)  # type: ignore[call-arg]
    with pytest.raises(UnknownArgumentError):
        Trainer(max_epoch=3)  # type: ignore[call-arg]


def test_subclasses_pass_further_arguments_on() -> None:
    class Mine(EarlyStopping):
        def __init__(self, name: str, **others: Any) -> None:
            super().__init__("val_loss", **others)
            self.name = name

    class Open(Callback):
        def __init__(self, **anything: Any) -> None:
            self.anything = anything

    assert Mine("a", patience=7).patience == 7
    assert Open(patiense=3).anything == {"patiense": 3}
    assert "EarlyStopping(patiense=3)" in message(Mine, "a", patiense=3)


def test_other_type_errors_are_pythons() -> None:
    class Mine(Callback):
        def __init__(self, size: int) -> None:
            self.size = len(size)  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="missing 1 required positional argument: 'monitor'"):
        EarlyStopping()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"has no len\(\)") as raised:
        Mine(size=3)
    assert not isinstance(raised.value, UnknownArgumentError)


def test_signatures_and_docstrings_stay_those_of_the_function() -> None:
    assert list(inspect.signature(EarlyStopping).parameters)[:3] == ["monitor", "min_delta", "patience"]
    assert list(inspect.signature(Trainer.fit).parameters)[:2] == ["self", "model"]
    assert (Trainer.fit.__doc__ or "").startswith("Train a module.")
    assert "progbar" not in inspect.signature(TrainModule.log).parameters
    assert pickle.loads(pickle.dumps(EarlyStopping("val_loss", patience=4))).patience == 4
