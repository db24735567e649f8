"""The messages of errors: a test names the error and what its message must contain, ``messages.txt`` has all the words.

    with refuses(ConfigurationError, "max_epochs"):    # pytest.raises, and a look at the message
        Trainer(max_epochs=-2)
    says(result.stderr, "max_epochs")                  # a message that reached the test as text

The name is a short token that tells this refusal from others: an argument, a given value, the closest match. A sentence
can then be improved in the product alone: ``make messages`` writes the file again, for a review of its diff. What
differs from run to run or between machines has a placeholder there, as ``<tmp_path>``.
"""

from __future__ import annotations

import contextlib
import difflib
import platform
import re
import sys
import tempfile
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, ClassVar, TypeVar

import pytest
import torch
from tiers import function_of

MESSAGES = Path(__file__).with_suffix(".txt")
COMMAND = "make messages"
_TESTS = Path(__file__).parent
_HEAD = f"# The message of every refusal in the tests, under the name of its test. Written by `{COMMAND}`.\n"
_PROPERTY = "message"
_UNPRINTABLE = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_VARYING = (
    (re.compile(r"[^\s'\"]*/pytest-of-[\w.-]+/pytest-\d+/(?:popen-gw\d+/)?([^\s'\"/]*?)\d+\b"), r"<pytest>/\1"),
    (re.compile(r"\.[0-9a-f]{16}\.tmp\b"), ".<random>.tmp"),
    (re.compile(r"\b[\d.]+ [KMGT]?B are free"), "<...> are free"),
    (re.compile(r"\bpid \d+"), "pid <pid>"),
    (re.compile(r"\b0x[0-9a-f]{6,}"), "<address>"),
)
_Error = TypeVar("_Error", bound=BaseException)


@contextlib.contextmanager
def refuses(
    kind: type[_Error] | tuple[type[_Error], ...], *names: str, varies: str | None = None
) -> Iterator[pytest.ExceptionInfo[_Error]]:
    """Expect an error as ``pytest.raises`` does, and compare its message with the one in ``messages.txt``.

    Args:
        kind: the class of the error.
        names: what the message must contain, whatever its words are.
        varies: a regular expression for what differs between runs or machines.
    """
    __tracebackhide__ = True
    with pytest.raises(kind) as caught:
        yield caught
    _compare(f"{caught.type.__name__}: {caught.value}", names, varies)


def says(text: str | Sequence[str], *names: str, varies: str | None = None) -> None:
    """Compare a message that is known as text, or those of ranks, of which equal ones count once; see ``refuses``."""
    __tracebackhide__ = True
    for each in [text] if isinstance(text, str) else dict.fromkeys(text):
        _compare(each, names, varies)


def _compare(text: str, names: Collection[str], varies: str | None) -> None:
    __tracebackhide__ = True
    absent = [name for name in names if name not in text]
    assert not absent, f"the message does not contain {', '.join(map(repr, absent))}: {text}"
    # A warm rank is in no test: what it raises is compared by its names.
    if Messages.current is not None:
        Messages.current.compare(text, varies)


def read_messages(path: Path = MESSAGES) -> dict[str, str]:
    """Return the message of each key: a test, and a number from its second message on."""
    lines: dict[str, list[str]] = {}
    key = ""
    for line in path.read_text(encoding="utf-8").split("\n") if path.exists() else ():
        if line.startswith("    ") or not line:
            lines.get(key, []).append(line[4:])
        elif not line.startswith("#"):
            key = line
            lines[key] = []
    return {key: "\n".join(text).strip("\n") for key, text in lines.items()}


def write_messages(messages: Mapping[str, str], path: Path = MESSAGES) -> None:
    """Write what ``read_messages`` reads."""
    parts = [_HEAD]
    for key in sorted(messages, key=lambda key: (case_of(key), len(key), key)):
        parts.append(f"{key}\n" + "".join(f"    {line}".rstrip() + "\n" for line in messages[key].split("\n")))
    path.write_text("\n".join(parts), encoding="utf-8")


def case_of(key: str) -> str:
    """Return the test of a key, without the number of the message."""
    return re.sub(r" #\d+$", "", key)


def stable(text: str, tmp_path: Path | None = None) -> str:
    """Replace what differs from run to run and from machine to machine."""
    folders = {tempfile.gettempdir(): "<tmp>", str(_TESTS.parent): "<root>"}
    folders |= {sys.prefix: "<environment>"} | ({str(tmp_path): "<tmp_path>"} if tmp_path else {})
    for folder in sorted(folders, key=len, reverse=True):
        text = text.replace(folder, folders[folder])
    for pattern, name in _VARYING:
        text = pattern.sub(name, text)
    for version in (torch.__version__, torch.__version__.partition("+")[0], platform.python_version()):
        text = re.sub(rf"(?<![\d.]){re.escape(version)}(?![\d+])", "<version>", text)
    text = _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)
    return "\n".join(line.rstrip() for line in text.strip("\n").split("\n"))


class Messages:
    """The plugin that compares messages, and collects them with ``--write-messages``."""

    current: ClassVar[Messages | None] = None

    def __init__(self, config: pytest.Config, path: Path = MESSAGES) -> None:
        self._config = config
        self._path = path
        self._writes = config.getoption("--write-messages")
        self._is_worker = hasattr(config, "workerinput")
        self._known = read_messages(path)
        self._said: dict[str, str] = {}
        self._passed: set[str] = set()
        self._reported: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Give the messages of a test its name."""
        self._item, self._count = item, 0
        before, Messages.current = Messages.current, self
        try:
            return (yield)
        finally:
            Messages.current = before

    def compare(self, text: str, varies: str | None) -> None:
        """Compare one more message of the current test with the file, or keep it for the file."""
        __tracebackhide__ = True
        self._count += 1
        key = self._item.nodeid.removeprefix("tests/") + (f" #{self._count}" if self._count > 1 else "")
        text = re.sub(varies, "<...>", text) if varies else text
        text = stable(text, getattr(self._item, "funcargs", {}).get("tmp_path"))
        if self._writes:
            # What a report carries comes from the workers of xdist too.
            self._item.user_properties.append((_PROPERTY, [key, text]))
        elif text != (known := self._known.get(key)):
            why = f"is not in {MESSAGES.name}" if known is None else f"is another than in {MESSAGES.name}"
            lines = "\n".join(difflib.ndiff((known or "").splitlines(), text.splitlines()))
            pytest.fail(f"the message of {key} {why}:\n{lines}\nIf it is what you mean, run `{COMMAND}`.")

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Run what has messages only, to write them in minutes."""
        known = {function_of(case_of(key)) for key in self._known}
        if self._writes:
            items[:] = [item for item in items if function_of(item.nodeid) in known or _has_messages(item)]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the messages of a test that passed."""
        case = report.nodeid.removeprefix("tests/")
        self._reported.add(case)
        if report.when == "call" and report.passed:
            self._passed.add(case)
        elif report.when == "teardown" and case in self._passed:
            self._said |= dict(value for name, value in report.user_properties if name == _PROPERTY)  # type: ignore

    def pytest_sessionfinish(self) -> None:
        """Write the file."""
        if self._writes and not self._is_worker and not self._config.option.collectonly:
            options = self._config.option
            is_whole = not (options.keyword or options.markexpr or any("::" in arg for arg in self._config.args))
            known = merged(read_messages(self._path), self._said, self._passed, self._reported if is_whole else set())
            write_messages({key: text for key, text in known.items() if _exists(function_of(case_of(key)))}, self._path)


def merged(
    known: Mapping[str, str], said: Mapping[str, str], passed: Collection[str], reported: Collection[str]
) -> dict[str, str]:
    """Return the messages that are known after a run.

    Args:
        known: the messages before.
        said: the messages of the run.
        passed: the cases that passed. Messages that they no longer give are dropped.
        reported: the cases that ran or were skipped, if all cases of their functions did. Other cases are dropped.
    """
    functions = {function_of(case) for case in reported}
    kept = {}
    for key, text in known.items():
        case = case_of(key)
        if case not in passed and (case in reported or function_of(case) not in functions):
            kept[key] = text
    return {**kept, **said}


def _exists(function: str) -> bool:
    file, _, name = function.partition("::")
    path = _TESTS / file
    return path.is_file() and f"def {name.rpartition('::')[2]}(" in path.read_text(encoding="utf-8")


def _has_messages(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and _calls(item.function, set())


def _calls(function: Any, seen: set[CodeType]) -> bool:
    """Whether a function calls ``refuses`` or ``says``, itself or through other functions of the tests."""
    if function is refuses or function is says:
        return True
    if not isinstance(function, FunctionType) or not function.__code__.co_filename.startswith(str(_TESTS)):
        return False
    names: set[str] = set()
    todo = [function.__code__]
    while todo:
        code = todo.pop()
        names.update(code.co_names)
        todo += [each for each in code.co_consts if isinstance(each, CodeType)]
    if function.__code__ in seen:
        return False
    seen.add(function.__code__)
    return any(_calls(function.__globals__.get(name), seen) for name in names)
