"""The table of epochs: its columns, its marks, and its HTML."""

from __future__ import annotations

import math

import pytest

from phalanx.callbacks.epoch_table import Best, EpochRow, EpochTable, shown_metrics
from phalanx.framework.profiling.throughput import Throughput

SPEED = Throughput("tokens", 1.0, 12.6, 1, 1.0, 1.0, 0.0, None, None, None, None, None, 0)


def row(epoch: int, **metrics: float | None) -> EpochRow:
    return EpochRow(epoch, 10 * (epoch + 1), metrics, 2.5, None)


def lines(best: Best, rows: list[EpochRow], columns: int | None = None) -> list[str]:
    table = EpochTable(best)
    shown = []
    for each in rows:
        table.add(each)
        shown += table.lines(columns)
    return shown


def test_a_row_for_each_epoch_below_one_header() -> None:
    assert lines(Best("b"), [row(0, a=1.0, b=0.123456), row(1, a=12345.678, b=0.5), row(2, a=-1.23456e-20, b=0.1)]) == [
        " epoch     step          a          b  s/epoch  samples/s  best",
        "     0       10          1     0.1235      2.5                *",
        "     1       20  1.235e+04        0.5      2.5",
        "     2       30  -1.23e-20        0.1      2.5                *",
    ]


def test_a_new_metric_is_a_new_header_and_a_missing_one_is_empty() -> None:
    shown = lines(Best(), [row(0, a=1.0), row(1, a=1.0, b=2.0), row(2, b=3.0)])
    assert [line.split() for line in shown] == [
        ["epoch", "step", "a", "s/epoch", "samples/s"], ["0", "10", "1", "2.5"],
        ["epoch", "step", "a", "b", "s/epoch", "samples/s"], ["1", "20", "1", "2", "2.5"], ["2", "30", "3", "2.5"],
    ]  # fmt: skip
    assert shown[-1].index("3") == shown[-2].index("2", shown[-2].index("1 "))


def test_columns_grow_with_their_values_below_a_new_header() -> None:
    table = EpochTable(Best())
    shown = []
    for step, value in ((999_999, 1.0), (1_000_000, 2.0), (1_000_001, 1e-200), (1_000_002, 3.0)):
        table.add(EpochRow(0, step, {"a": value, "b": -value}, 1.0, None))
        shown += table.lines(None)
    assert shown == [
        " epoch     step          a          b  s/epoch  samples/s",
        "     0  999,999          1         -1      1.0",
        " epoch       step          a          b  s/epoch  samples/s",
        "     0  1,000,000          2         -2      1.0",
        "     0  1,000,001     1e-200    -1e-200      1.0",
        "     0  1,000,002          3         -3      1.0",
    ]


def test_columns_that_have_grown_leave_room_for_fewer() -> None:
    table, width = EpochTable(Best()), len(" epoch     step          a          b  s/epoch  samples/s")
    for step, count in ((999_999, 2), (1_000_000, 2), (1, 1)):
        table.add(EpochRow(0, step, {"a": 1.0, "b": 2.0}, 1.0, None))
        shown = table.lines(width)
        assert len(shown) == count
        assert max(map(len, shown)) <= width
    assert shown == ["     0          1          1      1.0"]


def test_the_unit_of_a_speed_is_that_of_the_rows_below() -> None:
    shown = lines(Best(), [row(0), EpochRow(1, 20, {}, 2.5, SPEED), row(2)])
    assert [line.split() for line in shown] == [
        ["epoch", "step", "s/epoch", "samples/s"], ["0", "10", "2.5"],
        ["epoch", "step", "s/epoch", "tok/s"], ["1", "20", "2.5", "13"], ["2", "30", "2.5"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("columns", "titles"),
    [
        (80, ["epoch", "step", "first", "second", "last", "s/epoch", "samples/s", "best"]),
        (70, ["epoch", "step", "first", "last", "s/epoch", "samples/s", "best"]),
        (55, ["epoch", "step", "last", "s/epoch", "samples/s", "best"]),
        (45, ["epoch", "step", "last", "s/epoch", "best"]),
        (32, ["epoch", "step", "last", "best"]),
        (10, ["epoch", "step", "best"]),
    ],
)
def test_columns_are_left_out_by_their_importance(columns: int, titles: list[str]) -> None:
    header, _ = lines(Best("last"), [row(0, first=1.0, second=2.0, last=3.0)], columns)
    assert header.split() == titles
    assert len(header) <= max(columns, 30)


@pytest.mark.parametrize(
    ("best", "marks"),
    [
        (Best("a"), [True, False, True, False]),
        (Best("a", "max"), [True, True, False, False]),
        # Of a resumed fit.
        (Best("a", "min", 1.5), [False, False, True, False]),
        (Best("other"), [False, False, False, False]),
        (Best(), [False, False, False, False]),
    ],
)
def test_an_epoch_with_the_best_value_so_far_is_marked(best: Best, marks: list[bool]) -> None:
    values = [2.0, 3.0, 1.0, None]
    assert [best.improves({"a": value}) for value in values] == marks


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_never_the_best(value: float, mode: str) -> None:
    best = Best("a", mode)
    assert [best.improves({"a": each}) for each in (value, 1.0, value, 1.0)] == [False, True, False, False]


def test_the_value_of_the_epoch_is_the_one_that_counts() -> None:
    assert shown_metrics({"a_step": 1.0, "a_epoch": 2.0, "b_step": 3.0}) == {"a_epoch": 2.0, "b_step": 3.0}
    header, first = lines(Best("a"), [row(0, a_epoch=2.0)])
    assert header.split() == ["epoch", "step", "a", "s/epoch", "samples/s", "best"]
    assert first.endswith("*")


def test_the_html_has_all_columns_and_escapes_names() -> None:
    table = EpochTable(Best())
    assert table.html() == ""
    table.add(EpochRow(0, 1_000, {"a<b": 0.25}, 100.4, SPEED))
    assert table.html() == (
        "<table><tr><th>epoch</th><th>step</th><th>a&lt;b</th><th>s/epoch</th><th>tok/s</th></tr>"
        "<tr><td>0</td><td>1,000</td><td>0.25</td><td>100</td><td>13</td></tr></table>"
    )


def test_the_html_may_be_of_the_last_rows() -> None:
    table = EpochTable(Best("a"))
    for epoch in range(3):
        table.add(row(epoch, a=-float(epoch)))
    assert table.html().count("<tr>") == 4
    last = table.html(2)
    assert last.count("<tr>") == 3
    assert "<td>20</td><td>-1</td>" in last
    assert "<td>30</td><td>-2</td>" in last
