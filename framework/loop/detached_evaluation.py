"""An evaluation by a function of the user's, at the end of an optimizer step, that leaves no trace in the training."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..diagnostics.isolated_step import isolated
from ..run.overrides import in_context
from ..run.run import Run
from .evaluation_loop import EvaluationPlan, evaluating

T = TypeVar("T")


def evaluate_detached(run: Run, function: Callable[[], T]) -> T:
    """Run a function on the module in evaluation mode, without gradients; return its result. Collective.

    The module has the weights that a validation uses, such as an average. Random generators, buffers, logs, metrics and
    the attributes of the module are as before afterwards.

    Args:
        run: a fit, between two optimizer steps.
        function: runs the same number of forward passes on all ranks if these contain collectives.
    """
    plan = EvaluationPlan("validate", (), (), None, inference_mode=False)
    routed = run.strategy.route(in_context(function, run.fabric.forward_context()), training=False)
    with run.heartbeat.section("evaluation"), isolated(run.module), evaluating(run, plan):
        found: T = routed()
    return found
