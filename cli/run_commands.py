"""Arguments of the commands that run a stage. The module of a command is imported when the command runs."""

from __future__ import annotations

import argparse
from typing import Any

from . import run_stage

_STAGES = {
    "fit": "train by a configuration file, or run a script with overrides",
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


def add_commands(commands: Any) -> None:
    """Add ``fit``, ``validate``, ``test`` and ``predict`` to the subparsers of a parser."""
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
        parser.set_defaults(run=run_stage, parser=parser, stage=stage)
        parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
