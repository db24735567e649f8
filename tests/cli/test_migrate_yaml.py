"""Configurations of LightningCLI and Hydra: the class names that ``phalanx migrate`` rewrites."""

from __future__ import annotations

import textwrap

import pytest

from phalanx.cli.migrate.edits import apply
from phalanx.cli.migrate.files import migrate_yaml


def rewritten(before: str) -> tuple[str, list[tuple[int, str]]]:
    source = textwrap.dedent(before).encode()
    outcome = migrate_yaml(source)
    after = apply(source, outcome.edits, outcome.encoding)
    assert migrate_yaml(after).edits == []
    return after.decode(), [(each.line, each.reason) for each in outcome.left]


def test_class_paths_become_those_of_phalanx() -> None:
    before = """
    # lightning.pytorch==2.5
    seed_everything: 7
    model:
      class_path: mine.Net
      init_args: {width: 8}
    trainer:
      max_epochs: 2
      callbacks:
        - class_path: lightning.pytorch.callbacks.EarlyStopping  # stops
          init_args:
            monitor: val_loss
        - class_path: "pytorch_lightning.callbacks.model_checkpoint.ModelCheckpoint"
      logger: {class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: .}}
    optimizer:
      class_path: torch.optim.Adam
    """
    after = """
    # lightning.pytorch==2.5
    seed_everything: 7
    model:
      class_path: mine.Net
      init_args: {width: 8}
    trainer:
      max_epochs: 2
      callbacks:
        - class_path: phalanx.callbacks.EarlyStopping  # stops
          init_args:
            monitor: val_loss
        - class_path: "phalanx.callbacks.ModelCheckpoint"
      logger: {class_path: phalanx.loggers.CSVLogger, init_args: {save_dir: .}}
    optimizer:
      class_path: torch.optim.Adam
    """
    assert rewritten(before) == (textwrap.dedent(after), [])


def test_targets_of_hydra_become_those_of_phalanx() -> None:
    assert rewritten("trainer:\n  _target_: lightning.pytorch.trainer.Trainer\n  max_epochs: 2\n") == (
        "trainer:\n  _target_: phalanx.Trainer\n  max_epochs: 2\n",
        [],
    )


def test_a_class_without_a_counterpart_is_left() -> None:
    before = "trainer:\n  callbacks:\n  - class_path: lightning.pytorch.callbacks.LearningRateFinder\n"
    text, ((line, reason),) = rewritten(before)
    assert text == before
    assert line == 3
    assert "LearningRateFinder" in reason


@pytest.mark.parametrize(
    "text", ["", "a: [1,\n", "class_path:\n", "class_path: 3.5\n", "# class_path: lightning.pytorch.Trainer\n"]
)
def test_other_text_stays(text: str) -> None:
    assert rewritten(text) == (text, [])
