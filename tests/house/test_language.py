"""Plain English: words and phrases that docstrings, comments, messages, pages and names of tests must not use.

CONTRIBUTING.md gives the rules. Text in backquotes and fenced blocks is code, and is not read. ``known_wording.txt``
holds the number of breaches that a file may still have: it only ever gets shorter. Identifiers are read word by word.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import known_breaches
import pytest

import phalanx

ROOT = Path(phalanx.__file__).parent
FOLDERS = ("framework", "strategies", "precisions", "callbacks", "loggers", "cli", "examples", "benchmarks", "docs")
CODE = [*sorted(ROOT.glob("*.py")), *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TESTS = sorted((ROOT / "tests").rglob("*.py"))
KNOWN = Path(__file__).with_name("known_wording.txt")

# A pattern, and what to write instead. A space matches any white space, so that a phrase may be wrapped.
WORDS = {
    r"anew|afresh": "again",
    r"heed(s|ed|ing)?|unheeded": "handle, observe",
    r"settl(e|es|ed|ing)": "finish, complete, wait for",
    r"whoever|somebody|someone|nobody|anybody|everybody|no one": "name the subject",
    r"a person|persons": "the user, the console",
    r"one's own|of ours|of theirs": "your own, name the owner",
    r"told|tell(s|ing)? (of|that|whether|what|how|where|who|it|them|one another|each other)": "report, send, log",
    r"(come|comes|came|coming) about": "happen, result",
    r"(come|comes|came|become|becomes|became) of": "result, happen to",
    r"(go|goes|went|going|gone) on(?! (the|a|an|each|every|one|rank|device|CPU|GPU)\b)": "continue",
    r"(let|lets|letting) go": "release",
    r"(take|takes|took|taking) notes?": "record",
    r"behind the training": "asynchronous, in the background",
    r"(of|by) then": "at that time",
    r"(stands?|stood)(?! (for|out)\b)(?!-)": "is",
    r"stand-ins?": "filler batch, placeholder",
    r"(?<!significant\s)figures(?! out)": "metrics, values",
    r"alike": "the same, identical on all ranks",
    r"(is|are|was|were|be|been|held|saved|gathered|kept|taken|read) whole": "full, complete, unsharded",
    r"troubles?": "error",
    r"(leave|leaves|left|no|give|gives|gave|without) (a )?word": "message, record",
    r"lest|thereof|therein|whence|hitherto|naught|nought": "a current word",
    r"(?<!there\s)(is|are|was|were) none": "is not, does not; None in backquotes",
    r"(?<!there\s)(?<!it\s)(is|are|was|were) no (?!longer|more|less|different|better|such|need)[a-z]+": "is not a",
    r"(its|their|the|a|each|every|of|at|on|in) (\d+|\{\})\. [a-z]\w*": "an English ordinal: 7th",
}
# The same, at the start of a docstring's summary.
SUMMARIES = {
    r"what|who|whom|whose|where|which|whatever|how|why|when": "begin with a noun or an imperative verb",
    r"whether (what|who|where)": "name the subject",
    r"(return|yield|give|take|do|read|write|hold|list) (what|whatever|who|where|whom)": "name the object",
    r"it|its|they|those|these|that|such|this (is|was|has|does)": "begin with the noun itself",
    r"say|tell|hear|speak": "report, print, log, warn",
}


# Words that no identifier may contain, as a part between underscores or capitals.
IN_IDENTIFIERS = re.compile(
    "alike|anew|afresh|heed(s|ed)?|lest|nobody|somebody|someone|settle[sd]?|stood|tell(s|ing)?|told|troubles?|whoever",
    re.IGNORECASE,
)


def compiled(patterns: Mapping[str, str], before: str) -> list[tuple[re.Pattern[str], str]]:
    """Return expressions for phrases that follow ``before``; case does not count."""
    return [
        (re.compile(rf"{before}(?P<hit>{pattern})(?!\w)".replace(" ", r"\s+"), re.IGNORECASE), advice)
        for pattern, advice in patterns.items()
    ]


ANYWHERE = compiled(WORDS, r"(?<![\w-])")
# A summary may begin with the name of the thing: "``CSVLogger``: ...".
AT_START = compiled(SUMMARIES, r"\A\s*(?:[^\s:]+:\s+)?")
# In the name of a test, "is_none" is Python's None.
IN_NAMES = [each for each in ANYWHERE if not each[0].pattern.endswith(r"none)(?!\w)")]


class Text(NamedTuple):
    """A piece of English from a file, with the line it begins in."""

    line: int
    text: str
    is_docstring: bool = False


def breaches(text: Text) -> list[tuple[int, str, str]]:
    """Return the line, the phrase and the advice for each breach in a text."""
    words = re.sub(r"`+[^`]*`+", lambda code: "`" + "\n" * code.group().count("\n"), text.text)
    rules = [*ANYWHERE, *(AT_START if text.is_docstring else [])]
    return [
        (text.line + words.count("\n", 0, match.start("hit")), " ".join(match.group("hit").split()), advice)
        for rule, advice in rules
        for match in rule.finditer(words)
    ]


def texts_of_code(source: str) -> Iterator[Text]:
    """Yield the docstrings, the string literals of several words and the blocks of comments of a Python file."""
    nodes = list(ast.walk(ast.parse(source)))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    pieces = {id(piece) for node in nodes if isinstance(node, ast.JoinedStr) for piece in node.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(piece.value) if isinstance(piece, ast.Constant) else "{}" for piece in node.values)
            yield Text(node.lineno, text)
        elif isinstance(node, ast.Constant) and id(node) not in pieces and " " in str(node.value).strip():
            yield Text(node.lineno, str(node.value), id(node) in docstrings)
    yield from comments(source)


def comments(source: str) -> Iterator[Text]:
    """Yield comments, those of consecutive lines as one text."""
    block: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if block and token.start[0] != block[-1][0] + 1:
                yield Text(block[0][0], "\n".join(text for _, text in block))
                block = []
            block.append((token.start[0], token.string.lstrip("#")))
    if block:
        yield Text(block[0][0], "\n".join(text for _, text in block))


def text_of_page(page: str) -> Text:
    """Return a page of Markdown without its blocks of code; lines keep their numbers."""
    blank = re.sub(
        r"^```.*?^```$", lambda block: "\n" * block.group().count("\n"), page, flags=re.MULTILINE | re.DOTALL
    )
    return Text(1, blank)


def test_names(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the words of the name of each test function."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node.lineno, node.name.removeprefix("test_").replace("_", " ")


# pytest would take it for a test.
test_names.__test__ = False  # type: ignore[attr-defined]


def identifiers(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of everything that a file defines or uses under a name."""
    for node in ast.walk(ast.parse(source)):
        for field in ("id", "attr", "arg", "asname", "name"):
            if isinstance(name := getattr(node, field, None), str):
                yield getattr(node, "lineno", 0), name


def unclear_identifiers(source: str) -> dict[str, int]:
    """Return the identifiers that contain a word to avoid, with the line of their first use."""
    found: dict[str, int] = {}
    for line, name in identifiers(source):
        parts = re.split(r"_+|(?<=[a-z0-9])(?=[A-Z])", name)
        if any(IN_IDENTIFIERS.fullmatch(part) for part in parts):
            found.setdefault(name, line)
    return found


def breaches_of(path: Path) -> list[str]:
    """Return the breaches of a file as ``line: phrase (advice)``."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        found = breaches(text_of_page(source))
    elif path.is_relative_to(ROOT / "tests"):
        names = list(test_names(source))
        found = [
            (line, match.group("hit"), advice)
            for line, name in names
            for rule, advice in IN_NAMES
            for match in rule.finditer(name)
        ]
    else:
        found = [each for text in texts_of_code(source) for each in breaches(text)]
    return [f"{line}: {phrase!r} (better: {advice})" for line, phrase, advice in sorted(found)]


def all_breaches() -> dict[str, list[str]]:
    """Return the breaches of every file that has any."""
    found = {path.relative_to(ROOT).as_posix(): breaches_of(path) for path in [*CODE, *PAGES, *TESTS]}
    return {name: lines for name, lines in found.items() if lines}


def known_counts() -> dict[str, int]:
    """Return how many breaches each listed file may still have."""
    pairs = [line.rsplit(" ", 1) for line in KNOWN.read_text().splitlines()] if KNOWN.exists() else []
    return {name: int(count) for name, count in pairs}


def beyond(found: Mapping[str, list[str]], known: Mapping[str, int], existing: set[str]) -> list[str]:
    """Return every breach of the files that have more of them than is known, as ``file:line: phrase (advice)``.

    The counts of listed files that no longer exist may be used by files that are not listed: a file that was renamed.
    """
    spare = sum(count for name, count in known.items() if name not in existing)
    too_many = [name for name, lines in found.items() if name in known and len(lines) > known[name]]
    unlisted = [name for name in found if name not in known]
    if sum(len(found[name]) for name in unlisted) > spare:
        too_many += unlisted
    return [f"{name}:{line}" for name in too_many for line in found[name]]


def test_the_project_is_written_in_plain_english() -> None:
    existing = {path.relative_to(ROOT).as_posix() for path in [*CODE, *PAGES, *TESTS]}
    more = beyond(all_breaches(), known_counts(), existing)
    assert not more, "\n" + "\n".join(more)


@pytest.mark.parametrize(
    "text",
    [
        "The epoch begins anew.",
        "A trigger that is heeded at the boundary",
        "Whoever reads it must wait.",
        "The ranks are told to stop",
        "a rank tells the others nothing, and tells\n    of its failure",
        "how that comes\nabout",
        "Training goes on after the save.",
        "Let go of the lock",
        "the watch takes note of it",
        "a save behind the training",
        "the newest checkpoint of then",
        "The file stands in the run's directory.",
        "runs a stand-in for the batch",
        "Figures are written by rank 0",
        "alike on all ranks",
        "weights that are gathered whole",
        "no word of it to the scaler",
        "{} is none of the strategies",
        "{!r} is no directory",
        "their 7. collective",
        "its {}. collective",
    ],
)
def test_a_planted_breach_is_found(text: str) -> None:
    assert breaches(Text(1, text))


@pytest.mark.parametrize(
    "summary",
    [
        "What a run holds.",
        "Who waits for the first rank.",
        "where a rank is",
        "``CSVLogger``: what is written as rows.",
        "Whether what was saved is complete.",
        "Return what the callback holds.",
        "It is closed at the end.",
        "Say which file is meant.",
    ],
)
def test_a_planted_summary_without_a_noun_is_found(summary: str) -> None:
    assert breaches(Text(1, summary, is_docstring=True))


@pytest.mark.parametrize(
    "text",
    [
        "The rank understands `stand_at` and ``nobody``, and the name stand_at too.",
        "The node goes online; it goes on the device.",
        "bf16 stands for bfloat16.",
        "Three significant figures",
        "There is no checkpoint, and there is none to resume from.",
        "The file is no longer read; it is no different from the others.",
        "The flag tells DDP to skip the reduction; names tell apart two runs.",
        "The number of steps is 7. The next one is 8.",
        "Wait for pending saves.",
        "Whether gradients are finite on this rank.",
        "The settings of a run, in a long-standing order.",
        "A whole number of bytes",
    ],
)
def test_good_sentences_pass(text: str) -> None:
    assert not breaches(Text(1, text, is_docstring=True))


def test_each_kind_of_text_is_read() -> None:
    source = '''
"""A module.

It begins anew.
"""

x = f"{y} is no {z} of that and {w} is no number"  # told


def f():
    """Do it."""
    # A comment that comes
    # about in two lines.
    return "anew"
'''
    found = [each for text in texts_of_code(source) for each in breaches(text)]
    assert sorted((line, phrase) for line, phrase, _ in found) == [
        (4, "anew"),
        (7, "is no number"),
        (7, "told"),
        (12, "comes about"),
    ]
    assert breaches(text_of_page("# Title\n\n```python\nanew = 1\n```\n\nIt is told.\n")) == [
        (7, "told", "report, send, log")
    ]


def test_identifiers_are_plain_english() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in CODE
        for name, line in unclear_identifiers(path.read_text(encoding="utf-8")).items()
        if name not in known_breaches.IDENTIFIERS.get(path.parent.relative_to(ROOT).as_posix(), "").split()
    ]
    assert not found, "\n" + "\n".join(found)


def test_planted_identifiers_are_found() -> None:
    source = "def tell_ranks(told): ...\nclass HeedLoss: ...\nx._told = settled\nimport a as was_told\n"
    assert set(unclear_identifiers(source)) == {"tell_ranks", "told", "HeedLoss", "_told", "settled", "was_told"}
    assert not unclear_identifiers("teller = intellect = foretold = heedful = 1")


def test_names_of_tests_are_read() -> None:
    names = dict(
        test_names("def test_nobody_waits(): ...\ndef test_a_loss_that_is_none(): ...\ndef helper_told(): ...")
    )
    assert names == {1: "nobody waits", 2: "a loss that is none"}
    assert [bool(rule.search(names[1])) for rule, _ in IN_NAMES].count(True) == 1
    assert not any(rule.search(names[2]) for rule, _ in IN_NAMES)


def test_a_count_may_shrink_and_move_but_not_grow() -> None:
    found = {"a.py": ["1: x", "2: y"], "new.py": ["3: z"]}
    assert beyond(found, {"a.py": 2, "old.py": 1}, {"a.py", "new.py"}) == []
    assert beyond(found, {"a.py": 1, "old.py": 1}, {"a.py", "new.py"}) == ["a.py:1: x", "a.py:2: y"]
    assert beyond(found, {"a.py": 9}, {"a.py", "new.py"}) == ["new.py:3: z"]


if __name__ == "__main__":
    for name, lines in all_breaches().items():
        for each in lines:
            print(f"{name}:{each}")
