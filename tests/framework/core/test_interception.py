"""The interceptor of a process: it sees a program before ranks are started or a loop begins, in every thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from phalanx import Fabric
from phalanx.framework.core.interception import current_interceptor, intercepting
from phalanx.framework.launch import launch_function, launch_script


class LoopReachedError(Exception):
    """Ends a program whose loop is about to begin."""


class Refusing:
    """Ends a program at its loop."""

    def settings(self, given: Any) -> Any:
        return given

    def stage(self, session: Any, stage: str, request: Any) -> Any:
        raise AssertionError(stage)

    def loop(self) -> None:
        raise LoopReachedError


def set_up_a_module() -> None:
    Fabric(accelerator="cpu", devices=1).setup(torch.nn.Linear(2, 1))


@pytest.mark.parametrize(
    "begin",
    [
        set_up_a_module,
        lambda: Fabric(accelerator="cpu", devices=2).launch(print),
        lambda: launch_function(print, (), 2),
        lambda: launch_script(2),
    ],
    ids=["setup", "launch", "function", "script"],
)
def test_a_loop_is_intercepted_before_it_begins(begin: Callable[[], object]) -> None:
    with intercepting(Refusing()), pytest.raises(LoopReachedError):
        begin()


def test_the_threads_of_a_program_are_intercepted() -> None:
    found = []
    interceptor = Refusing()
    with intercepting(interceptor):
        thread = threading.Thread(target=lambda: found.append(current_interceptor()))
        thread.start()
        thread.join()
    assert found == [interceptor]


def test_an_interceptor_is_that_of_its_context() -> None:
    outer, inner = Refusing(), Refusing()
    with intercepting(outer):
        with contextlib.suppress(LoopReachedError), intercepting(inner):
            assert current_interceptor() is inner
            raise LoopReachedError
        assert current_interceptor() is outer
    assert current_interceptor() is None
