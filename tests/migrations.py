"""Scripts of other frameworks before and after ``phalanx migrate``, for its tests."""

from __future__ import annotations

import json
import subprocess
import textwrap
from typing import NamedTuple

import torch
from torch import nn

from phalanx.cli.migrate.edits import apply
from phalanx.cli.migrate.script import migrate_script


class Rewritten(NamedTuple):
    """A script after the rewriting: its text, and the line and reason of each part that is left."""

    text: str
    left: list[tuple[int, str]]


def rewritten(before: str, is_package_file: bool = False) -> Rewritten:
    """Return a script as ``phalanx migrate`` leaves it; a second rewriting must change nothing."""
    source = textwrap.dedent(before).encode()
    outcome = migrate_script(source, is_package_file)
    after = apply(source, outcome.edits, outcome.encoding)
    compile(after, "after", "exec")
    assert migrate_script(after, is_package_file).edits == []
    return Rewritten(after.decode(), [(each.line, each.reason) for each in outcome.left])


def assert_left_again(found: Rewritten) -> None:
    """Assert that a script whose imports are phalanx's by now still has what was left in it."""
    again = rewritten(found.text)
    assert again.text == found.text
    assert [reason for _, reason in again.left] == [reason for _, reason in found.left]


def assert_becomes(before: str, after: str, is_package_file: bool = False) -> None:
    """Assert that a script is rewritten completely, to this text."""
    found = rewritten(before, is_package_file)
    assert found.text == textwrap.dedent(after)
    assert found.left == []


def assert_losses_by_hand(done: subprocess.CompletedProcess[str], halved_every: int) -> None:
    """Compare the losses that a script has printed with those of plain torch.

    Args:
        done: the script, which has ended.
        halved_every: the number of updates after which the learning rate is halved.
    """
    torch.manual_seed(7)
    inputs = torch.randn(32, 4)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, halved_every, gamma=0.5)
    expected = []
    batches = list(zip(inputs.split(4), inputs.sum(1, keepdim=True).split(4), strict=True))
    for index, (x, y) in enumerate(2 * batches):
        loss = nn.functional.mse_loss(net(x), y)
        expected.append(loss.item())
        (loss / 2).backward()
        if index % 2:
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert done.returncode == 0, done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("losses ")]
    assert json.loads(line.removeprefix("losses ")) == expected
