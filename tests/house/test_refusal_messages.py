"""The messages of errors: another sentence fails its test, and writing them keeps, replaces and drops entries."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from messages import COMMAND, Messages, read_messages, refuses, says, stable, write_messages

HERE = "house/test_refusal_messages.py"
RUN = f"{HERE}::test_another_sentence_fails_and_names_the_command"
DROPPED = f"{HERE}::test_a_name_that_is_absent_fails"
OTHER = f"{HERE}::test_writing_keeps_replaces_and_drops"


def plugin(path: Path, writes: bool, *args: str) -> Messages:
    options = SimpleNamespace(keyword="", markexpr="", collectonly=False)
    config: Any = SimpleNamespace(getoption=lambda name: writes, option=options, args=list(args))
    return Messages(config, path)


def run(messages: Messages, test: str, *sentences: str, passes: bool = True) -> None:
    """Let a test meet errors, and report it."""
    item: Any = SimpleNamespace(nodeid=f"tests/{test}", funcargs={}, user_properties=[])
    protocol = messages.pytest_runtest_protocol(item)
    next(protocol)
    try:
        for sentence in sentences:
            with refuses(ValueError, "size=3"):
                raise ValueError(sentence)
    finally:
        protocol.close()
    for when in ("call", "teardown"):
        report: Any = SimpleNamespace(
            nodeid=item.nodeid, when=when, passed=passes, user_properties=item.user_properties
        )
        messages.pytest_runtest_logreport(report)


def test_another_sentence_fails_and_names_the_command(tmp_path: Path) -> None:
    path = tmp_path / "messages.txt"
    write_messages({RUN: "ValueError: size=3 is odd.", f"{RUN} #2": "ValueError: size=3:\n\n  give 4"}, path)
    run(plugin(path, False), RUN, "size=3 is odd.", "size=3:\n\n  give 4\n")
    with pytest.raises(pytest.fail.Exception, match=COMMAND):
        run(plugin(path, False), RUN, "size=3 is uneven.")
    with pytest.raises(pytest.fail.Exception, match=COMMAND):
        run(plugin(path, False), OTHER, "size=3 is odd.")


def test_a_name_that_is_absent_fails(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="size=3"):
        run(plugin(tmp_path / "messages.txt", True), RUN, "size=4 is even.")
    with pytest.raises(pytest.fail.Exception), refuses(ValueError, "size=3"):
        pass
    with pytest.raises(AssertionError, match="size=3"):
        says("size=4", "size=3")


def test_writing_keeps_replaces_and_drops(tmp_path: Path) -> None:
    path = tmp_path / "messages.txt"
    gone = f"{HERE}::test_that_is_no_more"
    write_messages(
        {RUN: "old", f"{RUN} #2": "old", DROPPED: "old", f"{DROPPED}[a]": "old", OTHER: "kept", gone: ""}, path
    )
    messages = plugin(path, True)
    run(messages, RUN, "size=3 is odd.")
    run(messages, f"{DROPPED}[b]", "size=3 is odd.", passes=False)
    messages.pytest_sessionfinish()
    assert read_messages(path) == {RUN: "ValueError: size=3 is odd.", OTHER: "kept"}


def test_a_part_of_the_cases_drops_no_others(tmp_path: Path) -> None:
    path = tmp_path / "messages.txt"
    write_messages({f"{RUN}[a]": "kept"}, path)
    messages = plugin(path, True, f"tests/{RUN}[b]")
    run(messages, f"{RUN}[b]", "size=3 is odd.")
    messages.pytest_sessionfinish()
    assert read_messages(path) == {f"{RUN}[a]": "kept", f"{RUN}[b]": "ValueError: size=3 is odd."}


def test_what_varies_has_a_placeholder(tmp_path: Path) -> None:
    text = f"'{tmp_path}/a.ckpt' of {tmp_path.parent}/other12/b (pid 4711): 3.1 GB are free\x1b"
    assert stable(text, tmp_path) == "'<tmp_path>/a.ckpt' of <pytest>/other/b (pid <pid>): <...> are free\\x1b"
