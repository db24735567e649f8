"""Kill a training run at random instants, start it again with the same command, compare with the run nobody killed.

    python tests/kill_trials.py --trials 20 --ranks 1
    python tests/kill_trials.py --trials 20 --ranks 2

Each trial kills one rank, all ranks or the launcher with SIGKILL, several times in a row; then the run is left to end.
Its weights must be those of the undisturbed run, bit for bit, and so must the losses it logged.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = """
import hashlib, json, random, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from phalanx import AccumulationSchedule, Trainer, TrainModule
from phalanx.callbacks import ModelCheckpoint

root, ranks = sys.argv[1], int(sys.argv[2])


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch, batch_idx):
        time.sleep(0.01)
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


if __name__ == "__main__":
    torch.manual_seed(5)
    x = torch.randn(96, 6)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    module = Net()
    trainer = Trainer(
        accelerator="cpu", devices=ranks, max_epochs=3, default_root_dir=root, logger=False,
        enable_progress_bar=False, enable_model_summary=False, val_check_interval=6,
        accumulate_grad_batches=AccumulationSchedule.cycle([1, 2]),
        callbacks=[ModelCheckpoint(monitor="val", save_top_k=2, save_last=True, every_n_train_steps=1)],
    )
    loader = DataLoader(data, 4, shuffle=True, num_workers=1)
    trainer.fit(module, loader, DataLoader(data, 32), ckpt_path="auto")
    if trainer.is_global_zero:
        weights = b"".join(t.numpy().tobytes() for t in module.state_dict().values())
        metrics = {name: value.item() for name, value in sorted(trainer.callback_metrics.items())}
        with open(root + "/result.json", "w") as file:
            json.dump({"weights": hashlib.sha256(weights).hexdigest(), "metrics": metrics,
                       "steps": trainer.global_step}, file)
"""


def start(script: Path, root: Path, ranks: int) -> subprocess.Popen[bytes]:
    """Start the run in a session of its own."""
    return subprocess.Popen(
        [sys.executable, str(script), str(root), str(ranks)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        # What a killed launcher leaves in the temporary directory goes with the trial.
        env={**os.environ, "TMPDIR": str(root)},
        start_new_session=True,
    )


def children(pid: int) -> list[int]:
    """Return the direct children of a process."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(child) for child in text.split()]


def kill(process: subprocess.Popen[bytes], who: str, random_: random.Random) -> None:
    """Send SIGKILL to one rank, to all of them, or to the process that started them; then wait until all are gone."""
    ranks = children(process.pid)
    victims = {"launcher": [process.pid], "all": [*ranks, process.pid], "rank": ranks[:]}[who]
    if who == "rank" and victims:
        victims = [random_.choice(victims)]
    for pid in victims or [process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    finish(process, 30)


def finish(process: subprocess.Popen[bytes], seconds: float) -> str:
    """Wait for a run; end everything it started if it takes too long."""
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"the run did not end within {seconds} s:\n{output.decode()}") from None
    return output.decode(errors="replace")


def whole_run(script: Path, root: Path, ranks: int) -> tuple[dict[str, object], float]:
    """Run to the end; return the result and the seconds it took."""
    root.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    process = start(script, root, ranks)
    output = finish(process, 180)
    if process.returncode != 0:
        raise AssertionError(f"exit code {process.returncode}:\n{output}")
    result: dict[str, object] = json.loads((root / "result.json").read_text())
    return result, time.monotonic() - began


def trial(
    script: Path, root: Path, ranks: int, seconds: float, random_: random.Random, kills: int
) -> dict[str, object]:
    """Kill a run ``kills`` times at random instants, then let it end; return its result."""
    root.mkdir(parents=True)
    for _ in range(kills):
        process = start(script, root, ranks)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(random_.uniform(0.3, 1.0) * seconds)
        if process.poll() is not None:
            finish(process, 10)
            break
        kill(process, random_.choice(["rank", "all", "launcher"]) if ranks > 1 else "launcher", random_)
    return whole_run(script, root, ranks)[0]


def run_trials(folder: Path, trials: int, ranks: int, seed: int, kills: int = 2) -> list[str]:
    """Return what went wrong, a line for each failed trial."""
    random_ = random.Random(seed)
    script = folder / "train.py"
    script.write_text(SCRIPT)
    expected, seconds = whole_run(script, folder / "undisturbed", ranks)
    problems = []
    for number in range(trials):
        result = trial(script, folder / f"trial{number}", ranks, seconds, random_, kills)
        if result != expected:
            problems.append(f"trial {number} of {trials} on {ranks} rank(s): {result} instead of {expected}")
    return problems


def main() -> None:
    """Run trials from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kills", type=int, default=2, help="how often each trial's run is killed")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        problems = run_trials(Path(folder), arguments.trials, arguments.ranks, arguments.seed, arguments.kills)
    for problem in problems:
        print(problem)
    print(f"{arguments.trials - len(problems)} of {arguments.trials} trials ended like the undisturbed run")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
