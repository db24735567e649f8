"""Unknown arguments of constructors and functions: the message names the closest argument, or the place of another."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from messages import refuses
from models import Regressor, loader, silent_trainer

import phalanx
from phalanx import (
    Callback,
    DataModule,
    Fabric,
    Trainer,
    TrainModule,
    callbacks,
    checkpoint,
    precisions,
    strategies,
)
from phalanx.callbacks import EarlyStopping
from phalanx.compat.accelerate import Accelerator
from phalanx.errors import ConfigurationError, UnknownArgumentError
from phalanx.loggers import CSVLogger
from phalanx.precisions import BFloat16Mixed, Precision
from phalanx.strategies import SingleDeviceStrategy


def message(action: Callable[..., object], *args: Any, **arguments: Any) -> str:
    """Return the message of the error for the arguments of a call."""
    with refuses(ConfigurationError) as raised:
        action(*args, **arguments)
    assert isinstance(raised.value, TypeError)
    text = str(raised.value)
    assert "\n" not in text
    assert len(text) < 300
    return text


def public_calls() -> dict[str, Callable[..., object]]:
    """Return the public functions and classes, and the methods of the objects that programs call, by name."""
    faces = (phalanx, callbacks, checkpoint, precisions, strategies)
    named = {name: getattr(face, name) for face in faces for name in face.__all__} | {"CSVLogger": CSVLogger}
    found: dict[str, Callable[..., object]] = {
        name: each
        for name, each in named.items()
        if inspect.isfunction(each) or (inspect.isclass(each) and not issubclass(each, BaseException))
    }
    for each in (silent_trainer(), Fabric(accelerator="cpu", devices=1), Accelerator()):
        methods = inspect.getmembers(type(each), inspect.isfunction)
        found |= {f"{type(each).__name__}.{name}": getattr(each, name) for name, _ in methods if name[0] != "_"}
    return found


def refuses_by_name(call: Callable[..., object]) -> bool:
    try:
        call(unheard_of=1)
    except UnknownArgumentError as error:
        return "(unheard_of=1)" in str(error)
    except Exception:
        return False
    return False


# Python's own error names it, or they take any argument.
OTHERS = """
Accelerator.backward Accelerator.load_state Accelerator.print Accelerator.save_state Checkpoint CheckpointContents
Difference Fabric.backward Fabric.call Fabric.launch Fabric.print Fabric.profile Inspection LambdaCallback Listed
MemoryLayout Routed Save SequencePart Shard Snapshot Split StepAdapter StepFlags Strategy Trainer.finish_saves
Trainer.note
Trainer.pause_lr_schedulers Trainer.prepare_saves Trainer.print Trainer.raise_trigger Trainer.record_step
Trainer.report Trainer.request_save TrainerView Traits fingerprint has_nonfinite read_batch url_of
"""


def test_every_public_call_names_an_unknown_argument() -> None:
    assert {name for name, call in public_calls().items() if not refuses_by_name(call)} == set(OTHERS.split())


@pytest.mark.parametrize(
    ("name", "arguments", "meant"),
    [
        ("EarlyStopping", {"monitor": "val_loss", "patiense": 3}, "'patience'"),
        ("DDPStrategy", {"gradient_as_buckets_view": True}, "'gradient_as_bucket_view'"),
        ("Fabric", {"gradient_accumulation_steps": 2}, "'accumulate'"),
        ("verify", {"paths": "a"}, "'path'"),
        ("Trainer.fit", {"resume_from_checkpoint": None}, "'ckpt_path'"),
        ("Fabric.init_module", {"empty_int": True}, "'empty_init'"),
        ("Fabric.autocast", {"enabled": False}, "none"),
        ("Accelerator.autocast", {"handler": None}, "'autocast_handler'"),
    ],
)
def test_an_unknown_argument_gets_the_closest_one(name: str, arguments: dict[str, Any], meant: str) -> None:
    text = message(public_calls()[name], **arguments)
    unknown, value = list(arguments.items())[-1]
    assert text.startswith(f"{name}({unknown}={value!r})")
    assert meant in text


def test_an_unknown_argument_of_save_hyperparameters_gets_the_closest_one() -> None:
    class Mine(TrainModule):
        def __init__(self, size: int = 3, **arguments: Any) -> None:
            super().__init__()
            self.save_hyperparameters(**arguments)

    text = message(Mine, ignored="size")
    assert text.startswith("Mine.save_hyperparameters(ignored='size')")
    assert "'ignore'" in text
    assert "'logger'" in message(Mine, loggers=False)


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


class Logging(Regressor):
    def __init__(self, log: Callable[[TrainModule], None]) -> None:
        super().__init__()
        self.log_values = log

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log_values(self)


@pytest.mark.parametrize(
    ("log", "name", "meant"),
    [
        (lambda module: module.log("a", 1.0, progbar=True), "self.log(progbar=True)", "'prog_bar'"),
        (lambda module: module.log_dict({"a": 1.0}, on_steps=True), "self.log(on_steps=True)", "'on_step'"),
    ],
)
def test_an_unknown_argument_of_log_gets_the_closest_one(log: Any, name: str, meant: str) -> None:
    text = message(silent_trainer(max_steps=1).fit, Logging(log), loader())
    assert text.startswith(name)
    assert meant in text


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
    fabric = Fabric(accelerator="cpu", devices=1)
    with pytest.raises(TypeError, match=r"has no len\(\)") as raised, fabric.init_module():
        len(3)  # type: ignore[arg-type]
    assert not isinstance(raised.value, UnknownArgumentError)


def test_signatures_and_docstrings_stay_those_of_the_function() -> None:
    assert list(inspect.signature(EarlyStopping).parameters)[:3] == ["monitor", "min_delta", "patience"]
    assert list(inspect.signature(Trainer.fit).parameters)[:2] == ["self", "model"]
    assert (Trainer.fit.__doc__ or "").startswith("Train a module.")
    assert "progbar" not in inspect.signature(TrainModule.log).parameters
    assert pickle.loads(pickle.dumps(EarlyStopping("val_loss", patience=4))).patience == 4
