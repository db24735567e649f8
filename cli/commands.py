"""The arguments of all commands. The module of a command is imported when the command runs."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from .command_parser import add_command

CHECK_FAILED = 69
"""``EX_UNAVAILABLE`` of sysexits.h."""
KINDS = {
    "classifier": "a classifier of handwritten digits",
    "lm": "a transformer on the source of Python's standard library",
    "finetune": "a backbone that is frozen at first, and trained later",
    "gan": "two networks, by manual optimization",
    "loop": "a loop of your own, on Fabric",
}
SHELLS = ("bash", "zsh", "tcsh")

SAMPLERS, PRUNERS = ("tpe", "random", "grid"), ("median", "halving")
PLATFORMS = ("slurm", "ray", "kubernetes")
MOST_RUNS = 20
INTERVAL_SECONDS, LEAST_INTERVAL_SECONDS = 1.0, 0.1
METRICS_PORT, METRICS_ADDRESS = 9400, "127.0.0.1"
WATCH_SECONDS = 5.0
WEIGHTS, PROGRAM = ".safetensors", ".pt2"
_RUN = "a run's directory or its name, such as version_3 or 3; by default the newest run below this directory"
_FILES = "Reads files alone, also those of a run that is training."


def add_commands(commands: Any) -> None:
    """Add all commands to the subparsers of a parser."""
    for add in (
        _new, _demo, _doctor, _selftest, _completion,
        _stages, _evaluate, _launch, _sweep, _try, _plan,
        _runs, _top, _metrics, _report, _why, _data, _compare, _schema,
        _checkpoint, _rewind, _clean,
        _migrate, _export,
    ):  # fmt: skip
        add(commands)


# ---- begin ----------------------------------------------------------------------------------------------------------


def _new(commands: Any) -> None:
    text = "start a project: a script, its configuration and its test"
    kinds = "\n".join(f"  {name:<12}{what}" for name, what in KINDS.items())
    example = "phalanx new classifier my-project"
    parser = add_command(commands, "new", "new_project:create_project", text, example, f"Kinds:\n{kinds}")
    parser.add_argument("kind", metavar="KIND", choices=tuple(KINDS), help="what to start from")
    parser.add_argument("name", metavar="NAME", help="the folder to create")


def _demo(commands: Any) -> None:
    text = "train a small language model in less than a minute"
    details = "It is a small version of the project of 'phalanx new lm'."
    example = "phalanx demo --strategy zero2 --devices 2"
    parser = add_command(commands, "demo", "demo:run_demo", text, example, details, has_json=False)
    parser.add_argument("--strategy", default="auto", metavar="NAME", help="how to distribute the work, such as ddp")
    parser.add_argument("--devices", default="auto", metavar="N", help="ranks on this machine (default: its GPUs)")
    parser.add_argument("--out", default=".", metavar="DIR", help="where the run's directory will be (default: here)")


def _doctor(commands: Any) -> None:
    text = "check this machine: software, disk, limits, GPUs, hosts"
    details = f"The exit code is {CHECK_FAILED} if a check fails."
    example = "phalanx doctor runs --ranks 8 --hosts a,b"
    parser = add_command(commands, "doctor", "doctor:examine", text, example, details)
    parser.add_argument("directory", metavar="DIR", nargs="?", default=".", help="where runs will be (default: here)")
    parser.add_argument("--ranks", type=int, default=8, metavar="N", help="ranks of a run on this machine (default: 8)")
    parser.add_argument("--port", type=int, default=0, metavar="P", help="check the port that MASTER_PORT will be")
    parser.add_argument("--hosts", default="", metavar="A,B", help="also check other hosts over ssh")
    parser.add_argument("--build", action="store_true", help="build DeepSpeed's ops that are missing")
    parser.add_argument("--paste", action="store_true", help="also print what belongs into a report of a defect")


def _selftest(commands: Any) -> None:
    text = "compare each strategy on two ranks with plain torch on one"
    details = f"Those that cannot run are skipped. The exit code is {CHECK_FAILED} if one differs or fails."
    example = "phalanx selftest --only fsdp --only zero3"
    parser = add_command(commands, "selftest", "selftest:compare_strategies", text, example, details)
    only = "this strategy alone; may be repeated (default: all)"
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help=only)
    accelerator = "cpu or cuda (default: cuda if there are two devices)"
    parser.add_argument(
        "--accelerator", choices=("auto", "cpu", "cuda"), default="auto", metavar="TYPE", help=accelerator
    )


def _completion(commands: Any) -> None:
    text = "print the script with which a shell completes commands"
    example = 'eval "$(phalanx completion bash)"    in ~/.bashrc'
    parser = add_command(
        commands, "completion", "completion:print_completion", text, example, has_json=False, needs="shtab>=1.7"
    )
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))


# ---- run ------------------------------------------------------------------------------------------------------------

_STAGES = {
    "fit": "train by a configuration file, or a script with overrides",
    "validate": "validate the model of a configuration file",
    "test": "test the model of a configuration file",
    "predict": "predict with the model of a configuration file",
}
_DETAILS = """
  CONFIG                 files in YAML or JSON; later ones have precedence
  --SECTION.NAME VALUE   override a value: --trainer.max_epochs 5
  --print_config         print the resolved configuration, and end
  --model.help CLASS     list the arguments of a class; also --data.help CLASS
"""
_SCRIPT = """
  SCRIPT                 a Python file; its Trainer takes these arguments
  --trainer.NAME VALUE   an argument of the Trainer, instead of the script's
  -- ARGUMENTS           those of the script
"""
_EXAMPLES = {
    "fit": "  phalanx fit config.yaml --trainer.max_epochs 5\n  phalanx fit train.py --trainer.devices 8 -- --lr 0.1",
    "validate": "  phalanx validate config.yaml --ckpt_path best",
    "test": "  phalanx test config.yaml --ckpt_path best",
    "predict": "  phalanx predict config.yaml --ckpt_path best",
}


def _stages(commands: Any) -> None:
    """Add ``fit``, ``validate``, ``test`` and ``predict``."""
    for stage, summary in _STAGES.items():
        scripts = f"       phalanx {stage} SCRIPT [--trainer.NAME VALUE ...] [-- ARGUMENTS]\n" if stage == "fit" else ""
        parser = commands.add_parser(
            stage,
            help=summary,
            usage=f"phalanx {stage} CONFIG... [--SECTION.NAME VALUE ...]\n{scripts}",
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=f"configuration:{_DETAILS}{f'{chr(10)}script:{_SCRIPT}' if scripts else ''}\n"
            f"example:\n{_EXAMPLES[stage]}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            add_help=False,
            # No argument is an option here: all are passed on to the parser of the configuration.
            prefix_chars="\0",
        )
        parser.set_defaults(run="run_program:run_stage", parser=parser, needs="", stage=stage)
        parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _evaluate(commands: Any) -> None:
    text = "evaluate the checkpoints of a run, also while it trains"
    details = "Each checkpoint is evaluated once. The results are in the report of the run."
    example = "phalanx eval version_3 --tasks tasks.yaml --watch"
    parser = add_command(commands, "eval", "evaluate_run:evaluate_checkpoints", text, example, details)
    parser.usage = "phalanx eval [options] [RUN]"
    # Each option and its help are on one line of 80 columns.
    parser.formatter_class = partial(argparse.RawDescriptionHelpFormatter, max_help_position=28)
    add = parser.add_argument
    add("given_run", metavar="RUN", nargs="?", help="a run's directory or name (default: the newest)")
    add("--tasks", metavar="FILE", help="a YAML file with tasks of lm-evaluation-harness")
    add("--function", metavar="MODULE:NAME", help="or a function of a Trainer and a module")
    add("--module", metavar="MODULE:CLASS", help="the class (default: as the checkpoint has it)")
    add("--average", metavar="NAME", help="an average of the weights, such as ema")
    add("--device", metavar="DEVICE", help="cpu, cuda or cuda:1 (default: a GPU, if there is one)")
    add("--watch", action="store_true", help="wait for further checkpoints until the run ends")
    between = f"time between two looks of --watch (default: {WATCH_SECONDS:g})"
    add("--interval", type=float, default=WATCH_SECONDS, metavar="SECONDS", help=between)
    add("--again", action="store_true", help="also evaluate checkpoints that have results")
    # Of Evaluate(aside=True), whose fit says on the standard input that it has saved its last checkpoint.
    add("--beside-fit", action="store_true", help=argparse.SUPPRESS)


def _launch(commands: Any) -> None:
    text = "run a script on several ranks or nodes, or as a job"
    example = "phalanx launch -n 8 --nodes 2 --node-rank 0 --rdzv host-a:29500 train.py"
    parser = add_command(commands, "launch", "launch:run_or_write", text, example, has_json=False)
    parser.usage = "phalanx launch [options] SCRIPT ..."
    # Each option and its help are on one line of 80 columns.
    parser.formatter_class = partial(argparse.RawDescriptionHelpFormatter, max_help_position=28)
    add = parser.add_argument
    add("-n", "--devices", type=int, metavar="N", help="ranks on each node (default: its GPUs, or 1)")
    add("--max-restarts", type=int, default=0, metavar="N", help="restarts of failed ranks (default: 0)")
    add("--nodes", default="1", metavar="N|MIN:MAX", help="nodes; run the command on each (default: 1)")
    add("--spares", type=int, default=0, metavar="K", help="nodes beyond that, to replace lost ones")
    add("--node-rank", type=int, metavar="K", help="number of this node, from 0")
    add("--rdzv", metavar="HOST:PORT", help="node 0 and a free port there, for several nodes")
    add("--on", choices=PLATFORMS, metavar="PLATFORM", help="write a job for slurm, ray or kubernetes")
    add("-o", "--output", metavar="FILE", help="where to write the job (default: printed)")
    add("--submit", action="store_true", help="submit the job with sbatch, ray or kubectl")
    add("--name", metavar="NAME", help="name of the job (default: that of the script)")
    add("--image", metavar="IMAGE", help="container image, for kubernetes")
    add("--cpu", action="store_true", help="request no GPUs for the job")
    add("--json", action="store_true", help="describe the job in JSON")
    # Its line would not fit on a screen of 24 lines.
    add("script", metavar="SCRIPT", help=argparse.SUPPRESS)
    # Not required, as an error about a missing script would name it otherwise.
    add("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS).required = False


def _sweep(commands: Any) -> None:
    text = "find the best values of a program's arguments"
    details = "The same command continues a sweep that was killed."
    example = 'phalanx sweep train.py --search "lr=log:1e-5:1e-2 width=4,8" --metric loss'
    parser = add_command(
        commands, "sweep", "sweep:run_sweep", text, example, details, needs="optuna>=4", takes_program=True
    )
    parser.usage = "phalanx sweep PROGRAM --search SPACE --metric NAME [options] [-- ...]"
    parser.formatter_class = partial(argparse.RawDescriptionHelpFormatter, max_help_position=21)
    add = parser.add_argument
    add("--search", action="append", required=True, metavar="SPACE", help="values to try, as in the example")
    add("--metric", required=True, metavar="NAME", help="the metric that decides, such as val_loss")
    add("--mode", choices=("min", "max"), metavar="MODE", help="min or max (default: min)")
    add("--value", choices=("best", "last"), default="best", metavar="WHICH", help="best or last (default: best)")
    add("--trials", type=int, metavar="N", help="number of trials (default: 20, or the grid)")
    add("--ranks", type=int, metavar="N", help="ranks of a trial (default: those of the program)")
    add("--sampler", choices=SAMPLERS, default="tpe", metavar="NAME", help="tpe, random or grid (default: tpe)")
    add("--prune", choices=PRUNERS, metavar="NAME", help="end bad trials early: median or halving")
    add("--seed", type=int, default=0, metavar="N", help="seed of the sampler (default: 0)")
    add("--out", metavar="DIR", help="the sweep's directory (default: in phalanx_sweeps)")
    # Its line would not fit on a screen of 24 lines.
    add("target", metavar="PROGRAM", help=argparse.SUPPRESS)


def _try(commands: Any) -> None:
    text = "run a program within a time, and judge it by earlier runs"
    details = "Made for programs that change a script and need a verdict: give --json."
    example = "phalanx try train.py --budget 5m --metric val_loss --seeds 3 --json"
    parser = add_command(commands, "try", "try_program:try_program", text, example, details, takes_program=True)
    parser.usage = "phalanx try PROGRAM --budget TIME --metric NAME [options] [-- ...]"
    parser.formatter_class = partial(argparse.RawDescriptionHelpFormatter, max_help_position=21)
    add = parser.add_argument
    add("target", metavar="PROGRAM", help="a script or a configuration file")
    add("--budget", required=True, metavar="TIME", help="the most that each run may take, such as 90s, 5m or 2h")
    add("--metric", required=True, metavar="NAME", help="the metric that decides, such as val_loss")
    add("--mode", choices=("min", "max"), metavar="MODE", help="min or max (default: min)")
    add("--value", choices=("best", "last"), default="best", metavar="WHICH", help="best or last (default: best)")
    add("--seeds", type=int, default=1, metavar="N", help="runs with different seeds (default: 1)")
    add("--ranks", type=int, metavar="N", help="ranks of a run (default: those of the program)")
    add("--against", metavar="RUN", help="the earlier run (default: the best one of this program)")


def _plan(commands: Any) -> None:
    text = "count memory and communication of a run, without training"
    details = f"A script runs up to its fit. The exit code is {CHECK_FAILED} if the run does not fit."
    example = "phalanx plan --ranks 64 --device-memory 80GB train.py --width 4096"
    parser = add_command(commands, "plan", "plan:show_plan", text, example, details)
    parser.add_argument("--ranks", type=int, metavar="N", help="plan for N ranks (default: those of the script)")
    parser.add_argument("--ranks-per-node", type=int, metavar="N", help="ranks of a node (default: at most 8)")
    parser.add_argument("--device-memory", metavar="SIZE", help="memory of a GPU, such as 80GB (default: this machine)")
    parser.add_argument("--host-memory", metavar="SIZE", help="memory of a node, such as 1TB (default: this machine)")
    parser.add_argument("--strategy", metavar="NAME", help="plan this strategy (default: that of the script)")
    parser.add_argument("--parallel", metavar="DEGREES", help="ranks along each axis, such as tp=2,cp=2")
    parser.add_argument("--rehearse", action="store_true", help="measure a step without data (default with --parallel)")
    parser.add_argument("target", metavar="TARGET", help="a script with its arguments, or MODULE:CLASS")
    parser.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


# ---- look -----------------------------------------------------------------------------------------------------------


def _runs(commands: Any) -> None:
    text = "list the runs below a directory, the newest first"
    parser = add_command(commands, "runs", "runs:list_runs", text, "phalanx runs experiments --limit 5", _FILES)
    parser.add_argument("directory", metavar="DIR", nargs="?", default=".", help="where to search (default: here)")
    limit = f"show N runs (default: {MOST_RUNS}; 0: all)"
    parser.add_argument("--limit", type=int, default=MOST_RUNS, metavar="N", help=limit)


def _top(commands: Any) -> None:
    text = "watch a run while it trains; q or Ctrl-C ends the view"
    parser = add_command(commands, "top", "top:watch_run", text, "phalanx top version_3 --interval 5", _FILES)
    parser.add_argument("given_run", metavar="RUN", nargs="?", help=_RUN)
    parser.add_argument("--once", action="store_true", help="print one view, and end")
    between = f"time between two views (default: {INTERVAL_SECONDS:g})"
    parser.add_argument("--interval", type=float, default=INTERVAL_SECONDS, metavar="SECONDS", help=between)


def _metrics(commands: Any) -> None:
    text = "serve the state and the values of a run to Prometheus"
    example = "phalanx metrics version_3 --port 9400 --addr 0.0.0.0"
    parser = add_command(
        commands,
        "metrics",
        "metrics:serve_metrics",
        text,
        example,
        _FILES,
        has_json=False,
        needs="prometheus-client>=0.20",
    )
    parser.add_argument("given_run", metavar="RUN", nargs="?", help=_RUN)
    parser.add_argument(
        "--port", type=int, default=METRICS_PORT, metavar="P", help=f"0: a free one (default: {METRICS_PORT})"
    )
    parser.add_argument(
        "--addr", default=METRICS_ADDRESS, help=f"where to listen (default: {METRICS_ADDRESS})", metavar="ADDRESS"
    )
    parser.add_argument("--once", action="store_true", help="print the metrics, and end")


def _report(commands: Any) -> None:
    text = "show the report of a run, and write its page"
    example = "phalanx report version_3 --out report.html"
    parser = add_command(commands, "report", "run_report:show_report", text, example, _FILES)
    parser.add_argument("given_run", metavar="RUN", nargs="?", help=_RUN)
    parser.add_argument("--out", metavar="FILE", help="where to write the page (default: report.html of the run)")


def _why(commands: Any) -> None:
    text = "explain why a run ended, what was lost, and what resumes it"
    parser = add_command(commands, "why", "why:explain_run", text, "phalanx why phalanx_logs/version_3", _FILES)
    parser.add_argument("given_run", metavar="RUN", nargs="?", help=_RUN)


def _data(commands: Any) -> None:
    text = "show which samples each rank has read for a step or batch"
    parser = add_command(commands, "data", "data:show_data", text, "phalanx data version_3 --step 812 --rank 1", _FILES)
    parser.add_argument("given_run", metavar="RUN", nargs="?", help=_RUN)
    steps = "the optimizer step, counted from 0, as messages and metrics.csv give it"
    parser.add_argument("--step", type=int, metavar="N", help=steps)
    parser.add_argument("--epoch", type=int, metavar="E", help="instead of a step: the epoch, counted from 0")
    parser.add_argument("--batch", type=int, metavar="B", help="and the batch in it, counted from 0")
    parser.add_argument("--rank", type=int, metavar="R", help="only this rank (of those with different data)")


def _compare(commands: Any) -> None:
    text = "compare the settings, results and curves of two runs"
    example = "phalanx compare version_3 version_4 --out both.html"
    parser = add_command(commands, "compare", "compare:compare_runs", text, example, _FILES)
    parser.add_argument("first", metavar="A", help="a run's directory or its name, such as version_3 or 3")
    parser.add_argument("second", metavar="B", help="another run")
    parser.add_argument("--out", metavar="FILE", help="also write a page with the curves of both in the same charts")


def _schema(commands: Any) -> None:
    text = "print the JSON Schema of a command's --json"
    parser = add_command(
        commands, "schema", "json_schemas:show_schema", text, "phalanx schema checkpoint list", has_json=False
    )
    parser.add_argument("of", metavar="COMMAND", nargs="*", help="a command (default: list those that have one)")


# ---- keep -----------------------------------------------------------------------------------------------------------


def _checkpoint(commands: Any) -> None:
    text = "look into, check, compare and convert checkpoints"
    own = commands.add_parser("checkpoint", help=text, description=f"{text[0].upper()}{text[1:]}.")
    verbs = own.add_subparsers(dest="verb", metavar="VERB", required=True, title="verbs")
    _inspect(verbs)
    _verify(verbs)
    _list(verbs)
    _diff(verbs)
    _consolidate(verbs)
    _convert(verbs)


def _verb(verbs: Any, name: str, function: str, summary: str, example: str) -> argparse.ArgumentParser:
    return add_command(verbs, name, f"checkpoint:{function}", summary, f"phalanx checkpoint {name} {example}")


def _inspect(verbs: Any) -> None:
    parser = _verb(
        verbs, "inspect", "inspect_checkpoint", "show what a checkpoint holds", "runs/version_3/checkpoints/last.ckpt"
    )
    parser.add_argument("path", help="a checkpoint")


def _verify(verbs: Any) -> None:
    text = "read every byte of checkpoints and compare it with the checksums"
    parser = _verb(verbs, "verify", "verify_checkpoints", text, "runs/version_3/checkpoints/*.ckpt")
    parser.add_argument("paths", nargs="+", metavar="path", help="a checkpoint")


def _list(verbs: Any) -> None:
    text = "list the checkpoints of a run or a directory, the furthest last"
    parser = _verb(verbs, "list", "list_checkpoints", text, "runs/version_3/checkpoints --verify")
    run = "a run's directory or name, or a directory that holds checkpoints (default: the newest run below here)"
    parser.add_argument("path", metavar="RUN", nargs="?", help=run)
    parser.add_argument("--verify", action="store_true", help="read every byte; the exit code is 65 if one is damaged")
    by = "order them by a result of phalanx eval, the highest last, such as eval/arc_easy/acc"
    parser.add_argument("--by", metavar="NAME", help=by)


def _diff(verbs: Any) -> None:
    text = "compare two checkpoints; the exit code is 65 if they differ"
    parser = _verb(verbs, "diff", "diff_checkpoints", text, "epoch=3-step=64.ckpt last.ckpt")
    parser.add_argument("path", help="a checkpoint")
    parser.add_argument("other", help="another one")


def _consolidate(verbs: Any) -> None:
    text = "write the weights of a checkpoint as plain safetensors"
    parser = _verb(verbs, "consolidate", "consolidate_checkpoint", text, "last.ckpt model.safetensors --dtype bf16")
    parser.add_argument("path", help="a checkpoint")
    parser.add_argument("out", help="a file, or with --max-shard-size a directory, that does not exist yet")
    parser.add_argument("--dtype", help="write floating point tensors as bf16, float16, float32, ...")
    parser.add_argument("--max-shard-size", metavar="SIZE", help="split into files of at most this size, such as 5GB")
    parser.add_argument("--section", default="model", help="what to write: model, averages/<key>, optimizer, ...")


def _convert(verbs: Any) -> None:
    text = "make a checkpoint from one of Lightning, Accelerate or DeepSpeed"
    parser = _verb(verbs, "convert", "convert_checkpoint", text, "lightning.ckpt resumable.ckpt --module models:GPT")
    add = parser.add_argument
    add("path", help="the foreign file or folder")
    add("out", help="the checkpoint to make; nothing may be there")
    add("--format", help="the format, if it is not recognised")
    add("--module", metavar="MODULE:CLASS", help="the module's class, where names are not certain")
    add("--prefix", default="", help="prefix to add to the names of weights, such as net.")
    add("--leave-out", metavar="CLASS", action="append", default=[], help="a class whose objects are left out")
    add("--trust", action="store_true", help="unpickle every class that the file names: can run any code")


def _rewind(commands: Any) -> None:
    text = "continue a run from an earlier step, without some data"
    details = "Newer checkpoints are set aside. fit(..., ckpt_path='auto') continues the run."
    example = "phalanx rewind version_3 --skip 801:806"
    parser = add_command(commands, "rewind", "rewind:rewind_run", text, example, details)
    parser.add_argument("given_run", metavar="RUN", nargs="?", help=_RUN)
    to = "go back to the newest checkpoint at or before this step (default: the first of --skip)"
    parser.add_argument("--to", type=int, metavar="N", help=to)
    skip = "leave out the data of the steps from A up to but not including B, or of step A; may be repeated"
    parser.add_argument("--skip", action="append", default=[], metavar="A:B", help=skip)


def _clean(commands: Any) -> None:
    text = "delete old checkpoints or runs, by rule"
    details = "The newest and the best checkpoint of each run stay.\nRuns that are being written are left as they are."
    example = "phalanx clean experiments --keep-last 3 --older-than 30d --dry-run"
    parser = add_command(commands, "clean", "clean:clean", text, example, details)
    parser.add_argument("directory", metavar="DIR", nargs="?", default=".", help="where to search (default: here)")
    parser.add_argument("--keep-last", type=int, metavar="N", help="keep the newest N of each run (default: 1)")
    parser.add_argument("--older-than", metavar="SPAN", help="delete only what is older, such as 12h, 30d or 4w")
    parser.add_argument("--runs", action="store_true", help="delete whole runs, and keep the newest N of each name")
    parser.add_argument("--dry-run", action="store_true", help="only show what would be deleted")


# ---- move -----------------------------------------------------------------------------------------------------------


def _migrate(commands: Any) -> None:
    parser = add_command(
        commands, "migrate", "migrate.command:migrate_files",
        "rewrite scripts of Lightning and Accelerate for phalanx",
        "phalanx migrate train.py config.yaml --write",
        "Prints the differences, and what is left to you.", needs="libcst>=1.5",
    )  # fmt: skip
    parser.add_argument("files", metavar="FILE", nargs="+", help="scripts, YAML configurations, or directories of them")
    parser.add_argument("--write", action="store_true", help="apply the changes instead of printing them")


def _export(commands: Any) -> None:
    parser = add_command(
        commands, "export", "export:export_model",
        "write the weights or the program of a model for others",
        "phalanx export version_3 model.safetensors --dtype bf16",
        "Of a run, the best checkpoint is taken, or else the last one.",
    )  # fmt: skip
    parser.add_argument("source", metavar="FROM", help="a checkpoint, or a run's directory or name")
    parser.add_argument("out", metavar="OUT", help=f"{WEIGHTS}: its weights; {PROGRAM}: a program")
    add = parser.add_argument
    add("--dtype", metavar="TYPE", help="bf16, float16, ... (default: as they are)")
    add("--max-shard-size", metavar="SIZE", help="split the weights into files, such as 5GB")
    add("--average", metavar="NAME", help="an average of the weights, such as ema")
    add("--module", metavar="MODULE:CLASS", help="the module's class, for a program")
