"""``compile=``: parts of a module compiled in place, inside any strategy."""

from __future__ import annotations

import copy
import importlib.util
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from compiled_graphs import GRAPHS, counting, forget_compiled, num_graphs
from messages import refuses
from models import Regressor, loader, silent_trainer
from ranks import run_on_ranks
from small_gpt import (
    Language,
    SmallGPT,
    assert_close,
    small_gpt,
    token_data,
    token_loader,
    weights,
)
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader, Subset

from phalanx import Fabric, Trainer, TrainModule
from phalanx.errors import ConfigurationError
from phalanx.framework.parallel.compilation import CompiledForward, compilation
from phalanx.framework.parallel.strategy import Strategy
from phalanx.strategies import FSDPStrategy


def no_progress_thread() -> AbstractContextManager[Any]:
    """Keep the compiler's progress bar from starting a thread that would outlive the test."""
    if importlib.util.find_spec("tqdm") is None:
        return nullcontext()
    return patch.object(importlib.import_module("tqdm").tqdm, "monitor_interval", 0)


class Logging(Language):
    """Logs in its step, and notes which of its blocks have compiled code."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def on_train_start(self) -> None:
        self.seen["compiled"] = [name for name, part in self.named_modules() if "forward" in vars(part)]


BLOCKS = [f"gpt.blocks.{number}" for number in range(3)]


def uneven_loader() -> DataLoader[Any]:
    """Return batches of 6, the last of which has 2 on each of two ranks."""
    return DataLoader(Subset(token_data(), range(52)), batch_size=6)


def trained(strategy: Any, ranks: int, compile: Any, **settings: Any) -> tuple[dict[str, Tensor], Logging, Trainer]:
    forget_compiled()
    module = Logging()
    trainer = silent_trainer(
        strategy=strategy, devices=ranks, max_epochs=2, compile=compile, num_sanity_val_steps=1, **settings
    )
    with no_progress_thread():
        trainer.fit(module, uneven_loader(), token_loader(6, 12))
    names = [name for name, part in module.named_modules() if "forward" in vars(part)]
    assert not names, f"{names} are still compiled after the fit"
    return weights(module) if trainer.is_global_zero else {}, module, trainer


def both(make: Callable[[], Any], ranks: int, compile: Any) -> list[str]:
    """Train eager and compiled; return the names of the compiled parts."""
    expected, _, _ = trained(make(), ranks, False)
    assert not GRAPHS
    found, module, _ = trained(make(), ranks, compile)
    assert_close(found, expected)
    assert not counters["graph_break"]
    names: list[str] = module.seen["compiled"]
    return names


def both_on_ranks(name: str, backend: str) -> list[str]:
    return both(lambda: name, 2, {"backend": backend})


@pytest.mark.parametrize("name", ["ddp_find_unused_parameters_true", "fsdp", "zero2"])
def test_compiled_blocks_train_the_same_model_on_ranks(name: str) -> None:
    assert run_on_ranks(2, both_on_ranks, name, "aot_eager", timeout=120) == [BLOCKS, BLOCKS]


def test_compiled_blocks_train_the_same_model_on_one_device() -> None:
    assert both(lambda: "single", 1, {"backend": counting}) == BLOCKS
    # One for each length of the batch's first dim, the second of which is for any, in training and evaluation.
    assert num_graphs() <= 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x).relu()
        return output


class Layers(Regressor):
    """Blocks of two operations: a compiler takes seconds for each kernel. Notes which parts have compiled code."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Sequential(Layer(), Layer()), nn.Linear(6, 1))
        self.compiled: list[str] = []

    def on_train_start(self) -> None:
        self.compiled = [name for name, part in self.named_modules() if "forward" in vars(part)]


def test_generated_code_trains_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    # In this thread, as others would outlive the test; precompiled headers take longer than these kernels.
    options = {"compile_threads": 1, "cpp_cache_precompile_headers": False}
    found = []
    for given in ({"blocks": True, "options": options}, False):
        forget_compiled()
        torch.manual_seed(0)
        module = Layers()
        with no_progress_thread():
            silent_trainer(devices=1, max_epochs=2, compile=given).fit(module, loader(16))
        found.append(weights(module))
        assert module.compiled == (["net.0.0", "net.0.1"] if given else [])
        assert not counters["graph_break"]
    assert any(tmp_path.rglob("*.cpp"))
    assert_close(*found)


def test_blocks_of_one_kind_share_one_graph() -> None:
    counts = []
    for layers in (2, 5):
        forget_compiled()
        trainer = silent_trainer(devices=1, max_steps=2, compile={"backend": counting})
        trainer.fit(Language(layers), token_loader(6))
        counts.append(len(GRAPHS))
        assert not counters["graph_break"]
    assert counts == [1, 1]


def test_the_module_whole_has_one_graph() -> None:
    forget_compiled()
    trainer = silent_trainer(devices=1, max_steps=2, compile={"backend": counting, "blocks": False})
    trainer.fit(Language(), token_loader(6))
    assert len(GRAPHS) == 1
    assert not counters["graph_break"]


class Direct(Regressor):
    """Has layers of its own, called from its forward, which logs."""

    def forward(self, x: Tensor) -> Tensor:
        output = self.net(x)
        self.log("mean", output.mean())
        result: Tensor = torch.tanh(output)
        return result


def test_a_module_without_blocks_is_compiled_whole_and_may_log_in_its_forward() -> None:
    losses = []
    for given in (False, {"backend": counting}):
        forget_compiled()
        module = Direct()
        trainer = silent_trainer(devices=1, max_steps=4, compile=given)
        trainer.fit(module, loader(16))
        assert "mean" in trainer.callback_metrics
        losses.append(module.losses)
    assert GRAPHS
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


# ---- copies and hooks -----------------------------------------------------------------------------------------------


def test_copies_of_a_compiled_module_are_plain_and_use_their_own_weights() -> None:
    gpt, tokens = small_gpt(), token_data(4).tensors[0]
    found = compilation({"backend": "eager"}, "cpu")
    assert found is not None
    undo = found.apply(gpt, silent_trainer(devices=1).strategy)
    expected = gpt(tokens)
    for copied in (copy.deepcopy(gpt), pickle.loads(pickle.dumps(gpt))):
        for parameter in copied.parameters():
            parameter.data.zero_()
        assert not any(isinstance(vars(part).get("forward"), CompiledForward) for part in copied.modules())
        assert copied(tokens).abs().max() == 0
    torch.testing.assert_close(gpt(tokens), expected)
    undo()
    assert not any("forward" in vars(part) for part in gpt.modules())


def test_hooks_of_a_compiled_block_run_also_if_they_are_added_later() -> None:
    gpt, tokens = small_gpt(), token_data(4).tensors[0]
    found = compilation({"backend": "eager"}, "cpu")
    assert found is not None
    found.apply(gpt, silent_trainer(devices=1).strategy)
    gpt(tokens)
    calls: list[str] = []
    gpt.blocks[1].register_forward_hook(lambda *_: calls.append("block"))
    gpt(tokens)
    assert calls == ["block"]


class Poisoned(Language):
    """A module with a weight that makes a layer inside a block overflow in the third step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 2:
            block: Any = self.gpt.blocks[1]
            block.up.weight.data.fill_(3e38)
        return super().training_step(batch, batch_idx)


def test_the_search_for_a_nonfinite_value_looks_into_compiled_blocks() -> None:
    forget_compiled()
    trainer = silent_trainer(devices=1, max_steps=4, compile={"backend": "eager"})
    with refuses(Exception, "gpt.blocks.1.up"):
        trainer.fit(Poisoned(), token_loader(6))


# ---- the result of torch.compile, and Fabric ------------------------------------------------------------------------


def test_the_result_of_torch_compile_is_compiled_by_blocks() -> None:
    forget_compiled()
    module = Logging()
    compiled: Any = torch.compile(module, backend=counting)
    trainer = silent_trainer(devices=1, max_steps=2)
    trainer.fit(compiled, token_loader(6))
    assert module.seen["compiled"] == BLOCKS
    assert len(GRAPHS) == 1
    assert trainer.model is module


def test_a_set_up_module_compiled_whole_is_called_through_the_fabric_by_both_names() -> None:
    forget_compiled()
    fabric = Fabric(
        accelerator="cpu", devices=1, precision="bf16-mixed", compile={"backend": counting, "blocks": False}
    )
    original = SmallGPT(1)
    model = fabric.setup(original)
    tokens = token_data(4).tensors[0]
    assert model(tokens).dtype == model.forward(tokens).dtype == torch.float32
    assert original(tokens).dtype == torch.float32
    assert num_graphs() == len(GRAPHS) > 0


# ---- arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mod": "default"}, "'mod'"),
        ({"blocks": "all"}, "{'blocks': 'all'}"),
        ({"fullgraph": 1}, "{'fullgraph': 1}"),
        ({"mode": "max-autotunes"}, "'max-autotune'"),
        ({"backend": "inducter"}, "'inductor'"),
        ({"mode": "default", "options": {}}, "options"),
        ("block", "compile='block'"),
        ("max-autotune", "{'mode': 'max-autotune'}"),
        (3, "compile=3"),
    ],
)
def test_a_wrong_compile_is_refused_when_the_trainer_is_made(given: Any, said: str) -> None:
    for make in (lambda: silent_trainer(devices=1, compile=given), lambda: Fabric(devices=1, compile=given)):
        with refuses(ConfigurationError, said, varies="(?<=by torch: ).*(?= Did you mean)") as raised:
            make()
        assert "\n" not in str(raised.value)


def test_a_machine_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with refuses(ConfigurationError, "'no-such-compiler'", "PATH"):
        silent_trainer(devices=1, compile=True)
    silent_trainer(devices=1, compile={"backend": "aot_eager"})


def test_blocks_that_are_asked_for_must_exist() -> None:
    with refuses(ConfigurationError, "compile=True"):
        silent_trainer(devices=1, compile={"blocks": True, "backend": "eager"}).fit(Regressor(), loader())


def test_a_strategy_that_cannot_compile_says_why() -> None:
    class Own(Strategy):
        name = "own"
        prevents_compiling = "gathers each layer in a hook: leave that out"

        def setup(self, *_: Any, **__: Any) -> Any: ...

        def route(self, *_: Any, **__: Any) -> Any: ...

        def zero_backward(self) -> None: ...

        def reduce_gradients(self, *_: Any, **__: Any) -> None: ...

    makes: list[Any] = [silent_trainer, Fabric]
    for make in makes:
        with refuses(ConfigurationError, "strategy='own'", "compile="):
            make(devices=1, strategy=Own(), compile={"backend": "eager"})


def test_recomputed_activations_are_not_compiled() -> None:
    strategy = FSDPStrategy(activation_checkpointing=True)
    with refuses(ConfigurationError, "activation_checkpointing"):
        silent_trainer(devices=1, strategy=strategy, compile={"backend": "eager"})


class Convolutions(TrainModule):
    """Blocks of one class in more shapes than share compiled code."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.Sequential(*[Stage(width) for width in range(2, 8)])

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.stages(x)
        return output


class Stage(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width + 1)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x).relu()
        return output


def test_blocks_that_would_not_share_code_are_compiled_whole_unless_asked_for() -> None:
    module = Convolutions()
    automatic, by_blocks = (
        compilation({"backend": "eager"}, "cpu"),
        compilation({"backend": "eager", "blocks": True}, "cpu"),
    )
    assert automatic is not None
    assert by_blocks is not None
    assert automatic.parts(module) == [module, module.stages]
    assert by_blocks.parts(module) == list(module.stages)
