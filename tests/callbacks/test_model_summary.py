"""``ModelSummary``: parameters, FLOPs and sizes against numbers computed by hand and Lightning's summary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_on_ranks
from small_fits import capturing, loader, quiet_trainer
from torch import Tensor, nn

from phalanx import TrainModule
from phalanx.callbacks import ModelSummary, RichModelSummary
from phalanx.callbacks.forward_trace import trace_forward
from phalanx.callbacks.summary import summarize

pl = pytest.importorskip("lightning.pytorch")


class Net(TrainModule):
    """Layers of several dtypes, with state that a forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2, bias=False))
        self.frozen = nn.Linear(2, 1).double().requires_grad_(False)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(1))
        self.example_input_array = torch.ones(3, 4)

    def forward(self, x: Tensor, flip: Tensor | None = None) -> Any:
        self.calls += torch.rand(1)
        y = self.body(x * self.scale)
        return y, self.frozen(y.double())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])[0].square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def cells(text: str) -> dict[str, list[str]]:
    """Return the cells of each row by the name of the module, and the heading under ``Name``."""
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if "|" in line]
    return {row[0]: row[1:] for row in rows}


def test_numbers_computed_by_hand() -> None:
    module = Net()
    text = summarize(module, 2, trace_forward(module, module.example_input_array))
    table = cells(text)
    assert table["Name"] == ["Type", "Params", "Share", "Dtype", "Mode", "FLOPs", "In size", "Out size"]
    # A linear layer takes two operations for each weight and row.
    linear, last, frozen = 2 * 3 * 4 * 8, 2 * 3 * 8 * 2, 2 * 3 * 2
    total = 4 + (4 * 8 + 8) + 2 * 8 + 8 * 2 + (2 + 1)

    def share(count: int) -> str:
        return f"{100 * count / total:.1f} %"

    assert table == {
        "Name": table["Name"],
        "body": ["Sequential", "72", share(72), "float32", "train", str(linear + last), "[3, 4]", "[3, 2]"],
        "body.0": ["Linear", "40", share(40), "float32", "train", str(linear), "[3, 4]", "[3, 8]"],
        "body.1": ["BatchNorm1d", "16", share(16), "float32", "train", "0", "[3, 8]", "[3, 8]"],
        "body.2": ["Dropout", "0", share(0), "", "train", "0", "[3, 8]", "[3, 8]"],
        "body.3": ["Linear", "16", share(16), "float32", "train", str(last), "[3, 8]", "[3, 2]"],
        "frozen": ["Linear", "3", share(3), "float64", "train", str(frozen), "[3, 2]", "[3, 1]"],
        "(own)": ["Net", "4", share(4), "float32", "train", "", "?", "?"],
    }
    assert text.splitlines()[-2:] == [
        f"{total - 3} trainable, 3 frozen, {total} parameters in all, 0.000 MB.",
        f"A forward pass on example_input_array takes {linear + last + frozen} FLOPs.",
    ]
    assert trace_forward(module, module.example_input_array)[""].out_size == "[[3, 2], [3, 1]]"


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.last = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).flatten(2).transpose(1, 2)
        # The layer is called twice.
        again: Tensor = self.last(self.last(self.attention(y, y, y)[0]).new_zeros(2, 64, 6))
        return again


class ConvolutionsOfLightning(pl.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.net = Convolutions()
        self.example_input_array = torch.ones(2, 3, 8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]


def test_numbers_of_lightnings_summary() -> None:
    module = ConvolutionsOfLightning()
    theirs = pl.utilities.model_summary.ModelSummary(module, max_depth=-1)
    trace = trace_forward(module, module.example_input_array)
    assert theirs.total_flops == trace[""].flops > 0
    for name, flops, in_size, out_size in zip(
        theirs.layer_names, theirs.flop_counts.values(), theirs.in_sizes, theirs.out_sizes, strict=True
    ):
        assert trace[name].flops == sum(flops.values()), name
        assert (trace[name].in_size, trace[name].out_size) == (str(in_size), str(out_size)), name


@pytest.mark.parametrize(
    "example", [torch.ones(2, 4), (torch.ones(2, 4),), [torch.ones(2, 4)], {"x": torch.ones(2, 4)}]
)
def test_kinds_of_examples(example: Any) -> None:
    trace = trace_forward(Net(), example)
    assert (trace[""].in_size, trace["body"].in_size) == ("[2, 4]", "[2, 4]")


def test_a_fit_is_unchanged_by_the_pass_on_the_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    states = []
    for callback in (ModelSummary(0), RichModelSummary(max_depth=-1, header_style="bold")):
        torch.manual_seed(0)
        module = Net()
        trainer = quiet_trainer(tmp_path, callback, max_epochs=2, enable_model_summary=True)
        trainer.fit(module, loader())
        states.append((module.state_dict(), torch.rand(1), [part.training for part in module.modules()]))
    assert "In size" in capsys.readouterr().out
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)


def test_an_outdated_example_does_not_end_the_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = Net()
    module.example_input_array = torch.ones(3, 5)
    trainer = quiet_trainer(tmp_path, ModelSummary(), max_epochs=1, enable_model_summary=True)
    trainer.fit(module, loader())
    assert trainer.global_step == 4
    output = capsys.readouterr().out
    assert "No sizes and FLOPs, as forward(example_input_array) failed: RuntimeError: The size of tensor" in output
    assert "In size" not in output


class Wide(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
        self.example_input_array = torch.ones(3, 4)

    def forward(self, x: Tensor) -> Any:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def summary_on_a_rank(strategy: str, precision: Any) -> list[str]:
    settings: dict[str, Any] = {"devices": 2, "strategy": strategy, "precision": precision}
    trainer = quiet_trainer(Path(), ModelSummary(-1), max_epochs=1, **settings)
    notes = capturing(trainer)
    trainer.fit(Wide(), loader())
    return notes


@pytest.mark.parametrize(
    ("strategy", "precision"), [("ddp", "bf16-mixed"), ("fsdp", "32-true"), ("zero3", "bf16-mixed")]
)
def test_full_numbers_under_each_strategy(strategy: str, precision: str) -> None:
    notes, others = run_on_ranks(2, summary_on_a_rank, strategy, precision)
    (text,) = [note for note in notes if "In size" in note or "No sizes" in note]
    table = cells(text)
    assert [table["net.0"][1], table["net.2"][1]] == ["320", "65"]
    assert [table["net.0"][5], table["net.2"][5]] == [f"{2 * 3 * 4 * 64 / 1000:.1f} K", str(2 * 3 * 64)]
    assert [table["net.0"][7], table["net.2"][6:8]] == ["[3, 64]", ["[3, 64]", "[3, 1]"]]
    assert "385 trainable, 0 frozen, 385 parameters in all" in text
    assert not [note for note in others if "In size" in note]
