"""``phalanx fit``, ``validate``, ``test`` and ``predict``, run as a user runs them."""

from __future__ import annotations

import csv
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import configured
import pytest
import yaml
from command_terminal import Terminal, command, shown_lines
from hook_server import SECRET, HookServer
from ranks import run_command, run_script

# The console script, which here starts with its libraries imported.
COMMAND = """
import sys
from phalanx.cli.main import main
if __name__ == "__main__":
    sys.exit(main())
"""
CONFIG: dict[str, Any] = {
    "seed_everything": 7,
    "model": {"class_path": "project.Net", "init_args": {"width": 6}},
    "data": {"class_path": "project.Points"},
    "trainer": {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
        "log_every_n_steps": 1,
        "logger": "csv",
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": [{"class_path": "ModelCheckpoint", "init_args": {"monitor": "val_loss"}}],
    },
}
WITHOUT_CONFIGURATIONS = """
import sys
from phalanx import Trainer, TrainerCLI, configuration
from phalanx.cli.main import main

for arguments in ("--help", "fit --help", "fit train.py --trainer.max_epochs=3", "fit config.yaml"):
    try:
        code = main(arguments.split())
    except SystemExit as ended:
        code = ended.code
    sys.stderr.flush()
    print("ended with", code, flush=True)
"""
SCRIPT = """
import sys
from pathlib import Path
from phalanx import Trainer
from project import Net, Points

if __name__ == "__main__":
    trainer = Trainer(max_epochs=1, accelerator="cpu", enable_model_summary=False, enable_progress_bar=False,
                      logger=False, callbacks=[])
    model = Net()
    trainer.fit(model, datamodule=Points())
    Path(f"rank{trainer.global_rank}.txt").write_text(
        f"{trainer.world_size} {trainer.max_epochs} {trainer.global_step} {sys.argv[1:]}")
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a module and its data, a configuration, and a script."""
    shutil.copy(configured.__file__, tmp_path / "project.py")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def phalanx(project: Path, *arguments: str, **env: str) -> tuple[int, str]:
    """Run the command in a folder, with its output in a pipe; return the exit code and the output."""
    done = run_script(COMMAND, *arguments, env={"COLUMNS": "80", **env}, libraries=("jsonargparse",), cwd=project)
    return done.returncode, done.stdout


def test_classes_beside_a_configuration_are_found(project: Path) -> None:
    (folder := project / "elsewhere").mkdir()
    code, output = phalanx(folder, "fit", "../config.yaml", "--trainer.max_steps=1")
    assert code == 0, output


def losses_of(run: Path) -> list[str]:
    with (run / "metrics.csv").open() as lines:
        return [row["train_loss"] for row in csv.DictReader(lines) if row["train_loss"]]


def newest(project: Path) -> Path:
    return max(project.glob("phalanx_logs/version_*"))


def test_a_fit_leaves_its_configuration_which_reproduces_it(project: Path) -> None:
    code, shown = phalanx(project, "fit", "config.yaml")
    assert (code, "strategy   single, 1 rank on cpu" in shown) == (0, True)
    first = newest(project)
    assert len(losses_of(first)) == 12
    resume = shown[shown.index("  resume     with a higher limit:") :].splitlines()[1].split()
    assert resume[-4:] == ["fit", "config.yaml", "--ckpt_path", "auto"]
    assert (first / "report.html").exists()
    code, printed = phalanx(project, "fit", "config.yaml", "--print_config")
    assert code == 0
    saved = (first / "config.yaml").read_text()
    assert yaml.safe_load(printed) == yaml.safe_load(saved)
    report = json.loads((first / "report.json").read_text())
    assert report["command"].endswith(" fit config.yaml")
    # Neither the callback that writes the configuration nor defaults that the file repeats.
    given: dict[str, Any] = CONFIG["trainer"]
    assert report["settings"]["changed"] == {**given, "logger": "CSVLogger", "callbacks": "ModelCheckpoint"}
    assert phalanx(project, "fit", str(first / "config.yaml"))[0] == 0
    assert newest(project) != first
    assert losses_of(newest(project)) == losses_of(first)


def test_a_preempted_fit_names_the_command_that_resumes_it(project: Path) -> None:
    (project / "config.yaml").write_text(yaml.safe_dump(CONFIG | {"model": {"class_path": "project.PreemptedNet"}}))
    code, shown = phalanx(project, "fit", "config.yaml")
    assert code == 75, shown
    report = json.loads((newest(project) / "report.json").read_text())
    assert report["why"]["resume"].endswith(" fit config.yaml --ckpt_path auto")
    assert phalanx(project, *report["why"]["resume"].split()[-4:])[0] == 0
    assert len(list(project.glob("phalanx_logs/version_*"))) == 1
    assert len(losses_of(newest(project))) == 12


def test_files_options_and_variables_are_merged(project: Path) -> None:
    (project / "long.yaml").write_text("trainer: {max_epochs: 4}\nmodel: {init_args: {width: 3}}\n")
    variables = {"PHALANX_FIT__TRAINER__MAX_STEPS": "9", "PHALANX_FIT__TRAINER__MAX_EPOCHS": "6"}
    code, printed = phalanx(
        project, "fit", "config.yaml", "long.yaml", "--data.batch_size=2", "--print_config", **variables
    )
    found = yaml.safe_load(printed)
    assert code == 0
    assert (found["trainer"]["max_epochs"], found["trainer"]["max_steps"]) == (4, 9)
    assert found["model"]["init_args"] == {"width": 3, "lr": 0.1}
    assert found["data"]["init_args"]["batch_size"] == 2


def test_a_checkpoint_is_evaluated_and_resumed(project: Path) -> None:
    assert phalanx(project, "fit", "config.yaml")[0] == 0
    (checkpoint,) = newest(project).glob("checkpoints/*.ckpt")
    code, shown = phalanx(project, "test", "config.yaml", "--ckpt_path", str(checkpoint))
    assert (code, "test_loss" in shown) == (0, True), shown
    assert phalanx(project, "predict", "config.yaml", f"--ckpt_path={checkpoint}")[0] == 0
    code, shown = phalanx(project, "fit", "config.yaml", f"--ckpt_path={checkpoint}", "--trainer.max_epochs=3")
    assert (code, "resumes" in shown) == (0, True), shown
    assert "18 optimizer steps, 3 epochs" in shown


def test_a_process_of_its_own_evaluates_and_resumes_the_best_checkpoint_of_the_newest_run(project: Path) -> None:
    # The first of two checkpoints is the best one.
    saver = {"class_path": "ModelCheckpoint", "init_args": {"monitor": "val_loss", "mode": "max", "save_top_k": -1}}
    config = CONFIG | {"trainer": CONFIG["trainer"] | {"callbacks": [saver]}}
    (project / "config.yaml").write_text(yaml.safe_dump(config))
    code, shown = phalanx(project, "validate", "config.yaml", "--ckpt_path", "best")
    assert (code, "no ModelCheckpoint has saved one in a run of" in shown) == (65, True), shown
    assert phalanx(project, "fit", "config.yaml")[0] == 0
    run = newest(project)
    best, last = sorted(run.glob("checkpoints/*.ckpt"))
    expected, other = (phalanx(project, "validate", "config.yaml", "--ckpt_path", str(path)) for path in (best, last))

    def results(shown: str) -> list[str]:
        return [line for line in shown.splitlines() if line.startswith("validate:")]

    assert results(expected[1]) != results(other[1])
    code, shown = phalanx(project, "validate", "config.yaml", "--ckpt_path", "best")
    assert (code, results(shown)) == (0, results(expected[1])), shown
    # A fit that was killed leaves no report: its newest checkpoint records the best one.
    (run / "report.json").unlink()
    code, shown = phalanx(project, "validate", "config.yaml", "--ckpt_path", "best")
    assert (code, results(shown)) == (0, results(expected[1])), shown
    code, shown = phalanx(project, "fit", "config.yaml", "--ckpt_path", "best", "--trainer.max_epochs=3")
    assert (code, f"{best.name}: epoch 1, batch 0, step 6" in shown) == (0, True), shown


def test_a_fit_on_two_ranks(project: Path) -> None:
    code, shown = phalanx(project, "fit", "config.yaml", "--trainer.devices=2", "--trainer.strategy=ddp")
    assert (code, "ddp, 2 ranks" in shown) == (0, True), shown
    assert yaml.safe_load((newest(project) / "config.yaml").read_text())["trainer"]["devices"] == 2
    assert len(losses_of(newest(project))) == 6


def test_a_terminal_of_80_columns(project: Path) -> None:
    lines = shown_lines(Terminal(["fit", "config.yaml"], project).end())
    assert any("strategy   single" in line for line in lines)


def test_the_help_begins_with_the_form_of_the_command(project: Path) -> None:
    for stage in ("fit", "validate", "test", "predict"):
        first = command(stage, "--help", cwd=project, env={"COLUMNS": "80"}).stdout.splitlines()[0]
        assert first == f"usage: phalanx {stage} CONFIG... [--SECTION.NAME VALUE ...]"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("fit", "give a configuration file. Try 'phalanx fit --help'."),
        ("fit confg.yaml", "There is no file 'confg.yaml'. Did you mean 'config.yaml'?"),
        ("fit trian.py", "There is no script 'trian.py'. Did you mean 'train.py'?"),
        (
            "fit train.py --trainer.max_epoch 3",
            "'--trainer.max_epoch' is not known. Did you mean '--trainer.max_epochs'?",
        ),
        ("fit train.py --trainer.max_epochs x", "max_epochs='x': give a number and its unit, such as '2 epochs'."),
        ("fit train.py --trainer.strategy dpp", "strategy='dpp' is not known. Did you mean 'ddp'?"),
        ("fit train.py --trainer.devices", "'--trainer.devices' needs a value: --trainer.devices=VALUE."),
        ("fit train.py --devices 2", "'--devices' is not an option for scripts. Did you mean '--trainer.devices'?"),
        ("fit train.py --trainer.patience 3", "'--trainer.patience' is not known; it belongs to EarlyStopping"),
        ("fit train.py config.yaml", "a script runs by 'phalanx fit SCRIPT', with its own arguments after '--'."),
        ("validate train.py", "a script runs by 'phalanx fit SCRIPT', with its own arguments after '--'."),
    ],
)
def test_a_wrong_command_line_is_answered_in_one_sentence(project: Path, arguments: str, expected: str) -> None:
    done = command(*arguments.split(), cwd=project)
    assert (done.returncode, len(done.stdout.splitlines())) == (78, 1), done.stdout
    assert done.stdout.startswith("phalanx: ")
    assert expected in done.stdout
    assert not (project / "phalanx_logs").exists()


def test_a_wrong_configuration_is_answered_in_one_sentence(project: Path) -> None:
    # test_wrong_configurations.py has many others.
    code, shown = phalanx(project, "fit", "config.yaml", "--model.wdith", "3")
    sentence = "phalanx: model.wdith is not an argument of project.Net. Did you mean 'width'?"
    assert (code, len(shown.splitlines()), shown.startswith(sentence)) == (78, 1, True), shown
    assert not (project / "phalanx_logs").exists()


@pytest.mark.parametrize("error", ["ValueError", "TypeError", "RuntimeError"])
@pytest.mark.parametrize("place", ["__init__", "training_step"])
def test_an_error_of_the_module_is_shown_with_its_lines_alone(project: Path, place: str, error: str) -> None:
    with (project / "project.py").open("a") as file:
        file.write(f"\nclass Failing(Net):\n    def {place}(self, *given):\n        raise {error}('planted')\n")
    code, shown = phalanx(project, "fit", "config.yaml", "--model=project.Failing")
    assert code == 1
    frames = [line for line in shown.splitlines() if line.startswith("  File ")]
    assert [("project.py" in frame, f"in {place}" in frame) for frame in frames] == [(True, True)], shown
    assert f"{error}: planted" in shown.splitlines()
    assert shown.count("Traceback") == 1


def test_a_syntax_error_of_a_script_is_shown_as_by_the_interpreter(project: Path) -> None:
    (project / "train.py").write_text("value = {\n")
    code, shown = phalanx(project, "fit", "train.py")
    assert code == 1
    frames = [line for line in shown.splitlines() if line.startswith("  File ")]
    assert ["train.py" in frame for frame in frames] == [True], shown
    assert "SyntaxError: '{' was never closed" in shown.splitlines()


def test_overrides_of_a_script(project: Path) -> None:
    code, shown = phalanx(
        project, "fit", "train.py", "--trainer.max_epochs", "3", '--trainer.callbacks=["timer"]', "--", "--lr", "0.1"
    )
    assert code == 0, shown
    assert "overrides  max_epochs=3, callbacks=['timer'], instead of the script's" in shown
    assert (project / "rank0.txt").read_text() == "1 3 18 ['--lr', '0.1']"
    report = json.loads((newest(project) / "report.json").read_text())
    assert "fit train.py --trainer.max_epochs 3" in report["command"]
    assert phalanx(project, "fit", "train.py")[0] == 0
    assert (project / "rank0.txt").read_text() == "1 1 6 []"


def test_overrides_reach_every_rank(project: Path) -> None:
    code, shown = phalanx(
        project, "fit", "train.py", "--trainer.devices=2", "--trainer.strategy=ddp", "--trainer.max_epochs=2"
    )
    assert (code, "ddp, 2 ranks" in shown) == (0, True), shown
    assert shown.count("overrides  devices=2, strategy='ddp', max_epochs=2") == 1
    assert [(project / f"rank{rank}.txt").read_text() for rank in (0, 1)] == ["2 2 6 []"] * 2


def test_a_script_that_the_script_starts_keeps_its_arguments(project: Path) -> None:
    starter = "import subprocess, sys\nsubprocess.run([sys.executable, 'train.py'], check=True)\n"
    (project / "starter.py").write_text(starter)
    code, shown = phalanx(project, "fit", "starter.py", "--trainer.max_epochs=3")
    assert (code, "overrides" in shown) == (0, False), shown
    assert (project / "rank0.txt").read_text() == "1 1 6 []"


def test_jsonargparse_is_imported_for_configurations_only(project: Path) -> None:
    (project / "jsonargparse.py").write_text("raise ModuleNotFoundError('planted', name='jsonargparse')\n")
    done = run_command([sys.executable, "-c", WITHOUT_CONFIGURATIONS], project, {"PYTHONPATH": str(project)})
    assert re.findall(r"^ended with (\d+)$", done.stdout, re.MULTILINE) == ["0", "0", "0", "78"], done.stdout
    assert (project / "rank0.txt").read_text() == "1 3 18 []"
    assert "jsonargparse" in done.stdout.splitlines()[-2]


@pytest.mark.parametrize("option", ["--trainer.notify={}", "--trainer.notify+={}", "--trainer.notify {}"])
def test_the_secret_part_of_an_address_is_in_no_file_and_no_output(project: Path, option: str) -> None:
    with HookServer() as hooks:
        code, output = phalanx(project, "fit", "config.yaml", *option.format(hooks.url).split())
    assert code == 0, output
    assert hooks.events == ["end"]
    assert SECRET not in output
    written = [path for path in project.rglob("*") if path.is_file()]
    assert [path for path in written if SECRET.encode() in path.read_bytes()] == []
    assert any("/***" in path.read_text() for path in written if path.name == "config.yaml")
