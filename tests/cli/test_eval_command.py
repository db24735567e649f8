"""``phalanx eval``: each checkpoint of a run once, also beside the run; the results are in what shows the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from called_command import CalledCommand
from local_tasks import NAMES, causal, samples, write_tasks
from models import SILENT
from ranks import completed, started_script, wait_until
from torch import Tensor, nn
from torch.utils.data import DataLoader

from phalanx import Trainer, TrainModule
from phalanx.callbacks import Evaluate, ModelCheckpoint
from phalanx.errors import ConfigurationError
from phalanx.hf import TransformersModule


class Line(TrainModule):
    """A weight that grows by one in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return -self.weight

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def distance(trainer: Any, module: Any) -> dict[str, Any]:
    """Return how far the weight is from three."""
    assert not module.training
    assert not torch.is_grad_enabled()
    assert module.trainer is trainer
    return {"distance": (module.weight - 3).abs(), "step": trainer.global_step}


def trained(root: Path, steps: int = 6, callbacks: tuple[Any, ...] = (), **arguments: Any) -> Path:
    saves = ModelCheckpoint(every_n_train_steps=2, save_top_k=-1)
    settings: dict[str, Any] = {**SILENT, "devices": 1, "max_steps": steps, "enable_checkpointing": True}
    trainer = Trainer(**settings, callbacks=[*callbacks, saves], default_root_dir=str(root))
    trainer.fit(Line(), DataLoader(torch.arange(20)), **arguments)  # type: ignore[arg-type]
    return Path(trainer.run_dir)


def arguments(run: Path, name: str = "distance") -> tuple[Any, ...]:
    return run, "--function", f"{__name__}:{name}", "--module", f"{__name__}:Line", "--device", "cpu"


def test_the_checkpoints_of_a_run_are_evaluated_once_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, command = trained(tmp_path), CalledCommand("eval", capsys)
    made = json.loads(command(*arguments(run), "--json").out)["evaluations"]
    assert [(each["step"], each["values"]) for each in made] == [
        (step, {"eval/distance": abs(step - 3), "eval/step": step}) for step in (2, 4, 6)
    ]
    assert "no checkpoint without results" in " ".join(command(*arguments(run)).out.split())
    assert len(json.loads(command(*arguments(run), "--again", "--json").out)["evaluations"]) == 3

    # The report that the fit wrote at its end has them too.
    for report in (json.loads((run / "report.json").read_text()), _shown("report", capsys, run)):
        assert report["curves"]["eval/distance"] == {"step": [1, 3, 5], "value": [1.0, 1.0, 3.0]}
        assert report["metrics"]["eval/distance"] == 3.0
    (listed,) = _shown("runs", capsys, tmp_path)["runs"]
    assert listed["metrics"]["eval/step"] == 6.0
    pair = _shown("compare", capsys, run, run)["metrics"]["eval/distance"]
    assert [(each["min"], each["last"]) for each in pair] == [(1.0, 3.0)] * 2

    # Checkpoints are listed by a result.
    listing = CalledCommand("checkpoint", capsys)
    lines = listing("list", run, "--by", "eval/distance").out.splitlines()[1:]
    assert [line.split()[1] for line in lines] == ["2", "4", "6"]
    assert "eval/distance=3" in lines[-1]
    refused = listing("list", run, "--by", "eval/distanc")
    assert refused.code == ConfigurationError.exit_code
    assert "Did you mean 'eval/distance'?" in refused.err


SCRIPT = """
import sys, time
from pathlib import Path

sys.path[:0] = [{tests!r}, {here!r}]
from phalanx.callbacks import LambdaCallback
from test_eval_command import trained

if __name__ == "__main__":
    trained(Path(sys.argv[1]), 8, (LambdaCallback(on_train_batch_start=lambda *_: time.sleep(0.3)),))
"""


def test_a_run_is_watched_until_it_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = Path(__file__).parent
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(tests=str(here.parent), here=str(here)))
    with started_script(script, str(tmp_path)) as process:
        wait_until(lambda: [*tmp_path.glob("*/version_0/status.json")])
        (run,) = tmp_path.glob("*/version_0")
        shown = CalledCommand("eval", capsys)(*arguments(run), "--watch", "--interval", 0.1, "--json")
        assert completed(process, 30.0).returncode == 0
    made = json.loads(shown.out)["evaluations"]
    assert [each["step"] for each in made] == [2, 4, 6, 8]
    assert _shown("report", capsys, run)["curves"]["eval/distance"]["value"] == [1.0, 1.0, 3.0, 5.0]


def test_results_of_weights_that_were_trained_again_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, command = trained(tmp_path), CalledCommand("eval", capsys)
    assert command(*arguments(run)).code == 0
    assert CalledCommand("rewind", capsys)(run, "--to", 2).code == 0
    assert trained(tmp_path, ckpt_path="auto") == run
    assert _shown("report", capsys, run)["curves"]["eval/distance"]["step"] == [1]
    made = json.loads(command(*arguments(run), "--json").out)["evaluations"]
    assert [each["step"] for each in made] == [4, 6]


def test_tasks_of_the_library_have_the_results_of_the_callback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import tqdm

    # Its bars start a thread, which the tests would find left behind.
    tqdm.tqdm.monitor_interval = 0
    tasks = write_tasks(tmp_path)
    saves = ModelCheckpoint(every_n_train_steps=3, save_top_k=-1)
    settings: dict[str, Any] = {**SILENT, "devices": 1, "max_steps": 3, "enable_checkpointing": True}
    trainer = Trainer(**settings, callbacks=[Evaluate(tasks, every=3), saves], default_root_dir=str(tmp_path))
    torch.manual_seed(2)
    trainer.fit(TransformersModule(causal(), learning_rate=0.05), DataLoader(samples(), 2))  # type: ignore[arg-type]
    expected = {f"eval/{name}": pytest.approx(float(trainer.callback_metrics[f"eval/{name}"])) for name in NAMES}

    # The checkpoint names the class, and has the model's configuration.
    found = CalledCommand("eval", capsys)(trainer.run_dir, "--tasks", tasks, "--device", "cpu", "--json")
    (made,) = json.loads(found.out)["evaluations"]
    assert made["tasks"] == "tasks.yaml"
    assert made["values"] == expected


def test_wrong_arguments_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, command = trained(tmp_path, 2), CalledCommand("eval", capsys)
    for given, said in (
        ((run,), "--tasks FILE"),
        ((*arguments(run), "--interval", 0), "--interval 0"),
        ((*arguments(run), "--device", "tpu:0"), "--device tpu:0"),
        ((*arguments(run)[:3], "--module", f"{__name__}:Lines"), "Line"),
        (arguments(run, "distant"), "distance"),
        ((run, "--tasks", tmp_path / "tasks.yaml"), "tasks.yaml"),
    ):
        found = command(*given)
        assert found.code == ConfigurationError.exit_code
        assert said in found.err


def test_a_program_that_trains_where_it_is_imported_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(tmp_path, 2)
    (tmp_path / "unguarded.py").write_text("from test_eval_command import *\n\ntrained(Path('again'))\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = CalledCommand("eval", capsys)(run, "--function", "unguarded:distance")
    assert found.code == ConfigurationError.exit_code
    assert "--function unguarded:distance" in found.err
    assert "__main__" in found.err
    assert not (tmp_path / "again").exists()


def test_a_damaged_checkpoint_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(tmp_path)
    file = next((run / "checkpoints").glob("*step=4.ckpt/*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    found = CalledCommand("eval", capsys)(*arguments(run))
    assert found.code == 0
    assert "step=4.ckpt was not evaluated" in found.out
    assert [json.loads(line)["step"] for line in (run / "evaluations.jsonl").read_text().splitlines()] == [2, 6]


def _shown(command: str, capsys: pytest.CaptureFixture[str], *arguments: Any) -> Any:
    return json.loads(CalledCommand(command, capsys)(*arguments, "--json").out)
