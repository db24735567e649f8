"""``fp8-mixed``: the layers that compute in fp8, losses beside those of torchao used by hand, and resumed runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from language_model import Block, LanguageModel, adamw, token_loader, tokens
from messages import refuses
from models import Regressor, loader, silent_trainer
from parity_table import converted_by_hand
from ranks import run_on_ranks
from torch import Tensor, nn

from phalanx import Fabric, TrainModule
from phalanx.framework.checkpoint.reader import open_checkpoint
from phalanx.framework.core.errors import ConfigurationError, UnknownNameError
from phalanx.precisions import Float8Mixed, float8
from phalanx.strategies import FSDPStrategy

STEPS, GLOBAL_BATCH = 4, 8
ROWS = STEPS * GLOBAL_BATCH
BLOCK = ("query", "key", "value", "project", "widen", "narrow")


def by_hand(ranks: int, gathers: bool) -> list[list[float]]:
    """Return the losses of each rank of the same run in plain torch and torchao.

    With ``gathers`` weights are converted to bf16 before they are used, as FSDP gathers them.
    """
    module = LanguageModel()
    converted_by_hand(module)
    optimizer = adamw(module, module.lr)
    rows = tokens(ROWS)
    losses: list[list[float]] = [[] for _ in range(ranks)]
    for step in range(STEPS):
        optimizer.zero_grad()
        batch = rows[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH]
        for rank in range(ranks):
            used = {name: one.bfloat16() if gathers else one for name, one in module.named_parameters()}
            with torch.autocast("cpu", torch.bfloat16):
                # Each rank trains on consecutive rows of a global batch.
                loss = torch.func.functional_call(Loss(module), prefixed(used), (batch.chunk(ranks)[rank],))
            (loss / ranks).backward()
            losses[rank].append(loss.item())
        optimizer.step()
    return losses


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute in ``count`` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Loss(nn.Module):
    """Calls the loss of a language model, so that ``functional_call`` can."""

    def __init__(self, module: LanguageModel) -> None:
        super().__init__()
        self.inner = module

    def forward(self, rows: Tensor) -> Tensor:
        return self.inner.loss(rows)


def prefixed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"inner.{name}": tensor for name, tensor in tensors.items()}


def trained(ranks: int, strategy: str, precision: Any = "fp8") -> list[float]:
    module = LanguageModel()
    trainer = silent_trainer(devices=ranks, strategy=strategy, max_steps=STEPS, precision=precision)
    trainer.fit(module, token_loader(ROWS, GLOBAL_BATCH // ranks))
    return module.losses


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "single"), (2, "ddp"), (2, "fsdp")])
def test_training_in_fp8_equals_torchao_used_by_hand(ranks: int, strategy: str) -> None:
    each = [trained(1, strategy)] if ranks == 1 else run_on_ranks(ranks, trained, ranks, strategy)
    # Several ranks compute in one thread each. The number of threads changes the order of sums, and the last digit of a
    # sum may decide to which number in fp8 an element is rounded.
    with threads(1 if ranks > 1 else torch.get_num_threads()):
        wanted = by_hand(ranks, strategy == "fsdp")
    torch.testing.assert_close(torch.tensor(each), torch.tensor(wanted), rtol=1e-6, atol=0)


def computing_in_fp8(module: nn.Module) -> set[str]:
    return {name for name, layer in module.named_modules() if type(layer).__name__ == "Float8Linear"}


class Watched(LanguageModel):
    """Builds its blocks where a strategy leaves them without data, and notes the layers that compute in fp8."""

    def __init__(self) -> None:
        super().__init__()
        del self.blocks
        self.seen: dict[str, set[str]] = {}

    def configure_model(self) -> None:
        if "blocks" not in self._modules:
            self.blocks = nn.ModuleList([Block(), Block()])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen["fit"] = computing_in_fp8(self)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen["validate"] = computing_in_fp8(self)
        self.log("loss", self.loss(batch[0]))


def watched() -> dict[str, set[str]]:
    module = Watched()
    trainer = silent_trainer(devices=2, strategy="fsdp", max_steps=1, precision="fp8")
    trainer.fit(module, token_loader(ROWS, GLOBAL_BATCH // 2))
    trainer.validate(module, token_loader(GLOBAL_BATCH, GLOBAL_BATCH // 2))
    assert not computing_in_fp8(module)
    assert len(module.losses) == 1
    return module.seen


def test_layers_of_configure_model_compute_in_fp8_in_training_and_evaluation() -> None:
    # `blocks` is registered last here, so the last layer is the last block's.
    inner = {f"blocks.{number}.{name}" for number in range(2) for name in BLOCK} - {"blocks.1.narrow"}
    for seen in run_on_ranks(2, watched):
        assert seen == {"fit": inner, "validate": inner}


def test_converted_layers_stay_the_same_objects_and_are_reverted() -> None:
    module = LanguageModel()
    called: list[int] = []
    layer = module.get_submodule("blocks.0.query")
    layer.register_forward_hook(lambda *_: called.append(1))
    names = list(module.state_dict())
    silent_trainer(max_steps=1, precision="fp8").fit(module, token_loader(ROWS, GLOBAL_BATCH))
    assert called
    assert module.get_submodule("blocks.0.query") is layer
    assert type(layer) is nn.Linear
    assert set(vars(layer)) == set(vars(nn.Linear(16, 16)))
    assert list(module.state_dict()) == names
    assert {type(one) for one in module.parameters()} == {nn.Parameter}
    assert {one.dtype for one in module.parameters()} == {torch.float32}


def test_the_memory_of_a_run_in_fp8_is_planned() -> None:
    plans = [
        silent_trainer(precision=name).plan(LanguageModel(), token_loader(ROWS, GLOBAL_BATCH))
        for name in ("fp8", "bf16-mixed")
    ]
    eighth, half = (plan["single"].needs.device for plan in plans)
    assert eighth.optimizer_state == half.optimizer_state
    assert eighth.parameters == half.parameters


class Layers(TrainModule):
    """Layers that fp8 kernels do not take, beside one that they do."""

    def __init__(self, inner: int = 32) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.odd = nn.Linear(32, 20)
        self.odd_too = nn.Linear(20, 32)
        self.attention = nn.MultiheadAttention(32, 2)
        self.good = nn.Linear(32, inner)
        self.last = nn.Linear(inner, 16)


def converted(precision: Float8Mixed, module: nn.Module) -> set[str]:
    undo = precision.convert_module(module)
    found = computing_in_fp8(module)
    precision.convert_module(module)
    assert computing_in_fp8(module) == found
    undo()
    assert not computing_in_fp8(module)
    return found


def test_layers_of_other_sizes_and_classes_are_not_converted() -> None:
    assert converted(Float8Mixed(), Layers()) == {"good"}


@pytest.mark.parametrize(
    "skip", [["blocks.0", "blocks.1.query"], lambda name, layer: "blocks.0" in name or name.endswith("query")]
)
def test_layers_are_left_out_by_name_or_by_a_function(skip: Any) -> None:
    assert converted(Float8Mixed(skip), LanguageModel()) == {f"blocks.1.{name}" for name in BLOCK[1:]}


@pytest.mark.parametrize(
    ("attempt", "name"),
    [
        (lambda: Float8Mixed("head"), "skip='head'"),
        (lambda: Float8Mixed(recipe="rowwize"), "recipe='rowwize'"),
        (lambda: Float8Mixed(["blocks.0.qery"]).convert_module(LanguageModel()), "'blocks.0.qery'"),
        (lambda: silent_trainer(precision="fp8", max_steps=1).fit(Regressor(), loader()), "precision='fp8-mixed'"),
        (lambda: silent_trainer(precision="fp8", strategy="zero2"), "precision='fp8-mixed'"),
        (
            lambda: silent_trainer(precision="fp8", strategy=FSDPStrategy(tensor_parallel=2), devices=2),
            "tensor_parallel=2",
        ),
    ],
)
def test_what_fp8_does_not_fit_is_refused_in_one_sentence(attempt: Callable[[], Any], name: str) -> None:
    with refuses((ConfigurationError, UnknownNameError), name):
        attempt()


def test_a_gpu_without_fp8_products_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with refuses(ConfigurationError, "precision='fp8-mixed'", "A100", "8.0"):
        Float8Mixed().check_device(torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    Float8Mixed().check_device(torch.device("cuda", 0))


def test_missing_torchao_is_reported_with_the_command_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(float8, "version", missing)
    with refuses(ConfigurationError, "precision='fp8-mixed'", "torchao"):
        silent_trainer(precision="fp8")


def saved(root: str, stop: int, ckpt: str | None, precision: str = "fp8") -> list[float]:
    """Train until ``stop``, from a checkpoint if there is one; return the losses."""
    module = LanguageModel()
    trainer = silent_trainer(max_steps=stop, precision=precision, default_root_dir=root)
    trainer.fit(module, token_loader(ROWS, GLOBAL_BATCH), ckpt_path=ckpt)
    trainer.save_checkpoint(f"{root}/{stop}.ckpt")
    return module.losses


def test_checkpoints_are_interchangeable_with_other_precisions(tmp_path: Path) -> None:
    saved(str(tmp_path), 2, None)
    checkpoint = str(tmp_path / "2.ckpt")
    assert set(open_checkpoint(tmp_path / "2.ckpt").names("model")) <= set(LanguageModel().state_dict())
    assert len(saved(str(tmp_path), 3, checkpoint, "bf16-mixed")) == 1
    saved(str(tmp_path), STEPS, str(tmp_path / "3.ckpt"))
    loaded = LanguageModel.load_from_checkpoint(str(tmp_path / "4.ckpt"))
    assert type(loaded.get_submodule("blocks.0.query")) is nn.Linear


def in_a_loop(ranks: int, strategy: str) -> list[float]:
    fabric = Fabric("cpu", strategy, ranks, precision="fp8")
    fabric.launch()
    net, losses = LanguageModel(), []
    model, optimizer = fabric.setup(net, adamw(net, net.lr))
    for (rows,) in fabric.setup_dataloaders(token_loader(ROWS, GLOBAL_BATCH // ranks)):
        logits = model(rows)[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
        losses.append(loss.item())
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
    return losses


def test_a_fabric_computes_in_fp8_too() -> None:
    torch.testing.assert_close(in_a_loop(1, "single"), by_hand(1, False)[0], rtol=1e-6, atol=0)
