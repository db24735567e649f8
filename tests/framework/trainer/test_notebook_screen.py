"""A real notebook of the cells in docs/notebooks.md: what is shown, what is updated in place, and what is left."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from ranks import wait_until

import phalanx
from phalanx.callbacks.epoch_table import Best, EpochRow, EpochTable
from phalanx.callbacks.progress_screens import Notebook

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

PAGE = Path(phalanx.__file__).parent / "docs" / "notebooks.md"
# Each batch updates the bar.
OFTEN = "import phalanx.callbacks.progress_screens as s; s._NOTEBOOK_SECONDS = 0.0"
NUMBER = "import os; os.getpid()"
INTERRUPTED = """
from phalanx import Callback
class Interrupting(Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 3:
            import _thread; _thread.interrupt_main()
Trainer(max_epochs=9, accelerator="cpu", devices=1, callbacks=[Interrupting()]).fit(Regressor(), data)
"""


class Executed(NamedTuple):
    """A notebook that was executed."""

    outputs: list[list[Any]]
    """Of each cell, as the notebook is saved."""
    displays: list[list[tuple[str, str, str]]]
    """Of each cell: each display and each update of one, as its type, its id and its HTML."""


class Client(nbclient.NotebookClient):  # type: ignore[misc, name-defined]
    """Records the messages that display something, which the outputs of a saved notebook no longer have."""

    displays: list[list[tuple[str, str, str]]]

    def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
        content = msg["content"]
        if msg["msg_type"] in ("display_data", "update_display_data"):
            identity = content.get("transient", {}).get("display_id", "")
            self.displays[cell_index].append((msg["msg_type"], identity, content["data"].get("text/html", "")))
        return super().process_message(msg, cell, cell_index)


def execute(folder: Path) -> Executed:
    """Execute the cells in one kernel."""
    cells = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    sources = [OFTEN, *cells, INTERRUPTED, NUMBER]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    resources = {"metadata": {"path": str(folder)}}
    client = Client(notebook, timeout=120, kernel_name="python3", resources=resources, allow_errors=True)
    client.displays = [[] for _ in sources]
    client.execute()
    return Executed([cell.outputs for cell in notebook.cells], client.displays)


def text_of(outputs: list[Any]) -> str:
    return "".join(output.text for output in outputs if output.output_type == "stream")


def rows_of(html: str) -> list[list[str]]:
    return [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", html)]


def check_table(outputs: list[Any], ranks: int, epochs: int, steps: int) -> None:
    """A fit leaves its table and no bar."""
    (shown,) = (output for output in outputs if output.output_type == "display_data")
    header, *rows = rows_of(shown.data["text/html"])
    assert header == ["epoch", "step", "train/loss", "val/loss", "s/epoch", "samples/s", "best"]
    assert [row[:2] for row in rows] == [[str(epoch), str(steps * (epoch + 1))] for epoch in range(epochs)]
    assert all(float(row[2]) > 0 and float(row[3]) > 0 for row in rows)
    assert rows[0][-1] == "*"
    assert "<progress" not in shown.data["text/html"]
    assert shown.data["text/plain"].startswith(f"epoch {epochs - 1}/{epochs - 1}: {steps} batches in ")
    text = text_of(outputs)
    assert f"{ranks} rank" in text
    assert "\x1b" not in text
    for line in ("┌─ phalanx ", "┌─ done ", f"trained    {steps * epochs} optimizer steps, {epochs} epochs"):
        assert text.count(line) == 1, text


def check_bar(displays: list[tuple[str, str, str]], batches: int) -> None:
    """The bar is updated in place."""
    kinds = [kind for kind, _, _ in displays]
    # One output, however often it changes.
    assert kinds == ["display_data"] + ["update_display_data"] * (len(kinds) - 1)
    assert len({identity for _, identity, _ in displays}) == 1
    assert displays[0][1]
    bars = [html for _, _, html in displays if "<progress" in html]
    assert len(bars) >= batches
    assert any(html.startswith("<div>epoch 0/") for html in bars)
    assert any(html.startswith("<table>") and "<div>epoch 1/" in html for html in bars)
    assert any("<div>validation <progress" in html for html in bars)


def check_report(outputs: list[Any], steps: int) -> None:
    """The report is shown as a page."""
    (result,) = (output for output in outputs if output.output_type == "execute_result")
    assert f"finished at step {steps}" in result.data["text/plain"]
    page = result.data["text/html"]
    assert page.startswith('<iframe srcdoc="&lt;!doctype html&gt;')
    assert "val/loss" in page


def test_the_cells_of_the_page_in_a_kernel(tmp_path: Path) -> None:
    outputs, displays = execute(tmp_path)
    check_table(outputs[1], ranks=1, epochs=3, steps=8)
    check_bar(displays[1], batches=24)
    check_report(outputs[2], steps=24)
    # A fit on two ranks, and its report.
    check_table(outputs[3], ranks=2, epochs=2, steps=4)
    check_bar(displays[3], batches=8)
    check_report(outputs[3], steps=8)
    # An interrupt saves, which is said in one line.
    (error,) = (output for output in outputs[4] if output.output_type == "error")
    assert error.ename == "KeyboardInterrupt"
    assert "stopped after optimizer step 3, and saved " in error.evalue
    assert "<progress" not in displays[4][-1][2]
    # No kernel is left.
    (result,) = outputs[5]
    number = int(result.data["text/plain"])
    assert number != os.getpid()
    wait_until(lambda: not Path(f"/proc/{number}").exists())


def test_all_rows_are_sent_at_the_end_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    def display(data: dict[str, str], **_: Any) -> None:
        sent.append(data["text/html"].count("<tr>") - 1)

    monkeypatch.setattr("IPython.display.display", display)
    screen, table = Notebook(), EpochTable(Best())
    for epoch in range(120):
        table.add(EpochRow(epoch, epoch, {"loss": 1.0}, 1.0, None))
        screen.end_epoch("", table)
    assert sent == [min(rows, 50) for rows in range(1, 121)]
    screen.close()
    assert sent[120:] == [120]
    screen.close()
    assert len(sent) == 121
