"""Each example in its short form, as a script of its own: it ends well, and what it prints shows that it learned."""

from __future__ import annotations

import re
from pathlib import Path

from ranks import run_script

import phalanx

EXAMPLES = Path(phalanx.__file__).parent / "examples"


def run_example(
    name: str, out: Path, *flags: str, strategy: str = "auto", devices: int = 1, precision: str = "32-true"
) -> str:
    """Return what an example printed."""
    options = ["--strategy", strategy, "--devices", str(devices), "--precision", precision, "--out", str(out), *flags]
    process = run_script(EXAMPLES / name, "--short", *options, timeout=180)
    output = str(process.stdout)
    assert process.returncode == 0, output
    return output


def number_after(text: str, output: str) -> float:
    """Return the number that follows ``text``."""
    match = re.search(re.escape(text) + r"\s*([\d.]+)", output)
    assert match, f"{text!r} is not in the output:\n{output}"
    return float(match.group(1).rstrip("."))


def test_digits_on_two_ranks_learns_and_says_where_its_files_are(tmp_path: Path) -> None:
    output = run_example("digits.py", tmp_path, strategy="ddp", devices=2)

    assert number_after("test accuracy:", output) > 85
    assert output.count("test accuracy:") == 1
    run = tmp_path / "digits" / "version_0"
    assert f"logs and checkpoints: {run}" in output
    assert list((run / "checkpoints").glob("*.ckpt"))
    assert (run / "metrics.csv").read_text().startswith("epoch")


def test_gpt_learns_and_writes(tmp_path: Path) -> None:
    output = run_example("gpt.py", tmp_path, precision="bf16-mixed")

    assert number_after("validation loss:", output) < 3.9
    assert "--- sample\ndef " in output


def test_fabric_loop_on_two_ranks_learns_and_loads_what_it_saved(tmp_path: Path) -> None:
    output = run_example("fabric_loop.py", tmp_path, devices=2)

    after = number_after("validation loss after:", output)
    assert after < number_after("validation loss before:", output) - 1.0
    assert number_after("at step 24; loaded:", output) == after
    assert output.count("validation loss after:") == 1
    assert (tmp_path / "fabric_loop" / "last.ckpt" / "manifest.json").exists()


def test_long_context_trains_the_same_model_on_one_rank_and_in_parts(tmp_path: Path) -> None:
    one = run_example("long_context.py", tmp_path / "one")
    two = run_example("long_context.py", tmp_path / "two", "--parallel", "cp=2", strategy="ddp", devices=2)

    loss = number_after("validation loss:", one)
    assert loss < 4.0
    # The printed digits.
    assert abs(number_after("validation loss:", two) - loss) <= 1e-3


def test_lightning_port_on_two_ranks_learns(tmp_path: Path) -> None:
    output = run_example("lightning_port.py", tmp_path, devices=2)

    history = re.search(r"validation loss by epoch: ([\d., ]+)", output)
    assert history, output
    losses = [float(loss) for loss in history.group(1).split(", ")]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert number_after("test loss:", output) < 0.08
    assert "359 images" in output


def test_pipeline_on_two_ranks_learns_and_samples_from_the_full_model(tmp_path: Path) -> None:
    process = run_script(EXAMPLES / "pipeline.py", "--short", "--out", str(tmp_path), timeout=180)
    output = str(process.stdout)

    assert process.returncode == 0, output
    assert number_after("validation loss:", output) < 4.3
    assert output.count("--- sample\ndef ") == 1
    assert list((tmp_path / "pipeline" / "version_0" / "checkpoints").glob("*.ckpt"))


def test_every_example_is_run_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {
        "digits.py",
        "gpt.py",
        "long_context.py",
        "fabric_loop.py",
        "finetune.py",
        "lightning_port.py",
        "pipeline.py",
    }
