"""The count of trained tokens or samples over all ranks, which is known at the end of each optimizer step."""

from __future__ import annotations

from collections.abc import Callable

from ..run.run import Run
from .automatic_step import AutomaticStep
from .manual_step import ManualStep


def window_units(step: AutomaticStep | ManualStep, has_samples: bool) -> Callable[[], float]:
    """Return a function that returns the tokens or samples of the window that has just run, summed over the ranks.

    Where they are the weights of the micro-batches, the control reduction of the step has summed them already. It is
    the only step that knows them in time: those of the meter travel with the next step. Otherwise each step has a
    reduction of its own, which is collective.

    Args:
        step: the step of the fit.
        has_samples: whether micro-batches are weighed by their samples, as those of a global batch are.
    """
    run, world = step.run, step.run.world
    meter = run.meter
    if world.size == 1:
        return lambda: meter.open_units
    # Ranks that read the same data count it each.
    if meter.unit == "tokens":
        copies = world.identical
        if isinstance(step, AutomaticStep):
            return _by_weights(step, world.size / copies)
    else:
        copies = world.size // world.data_size
        if isinstance(step, AutomaticStep) and has_samples:
            return _by_weights(step, world.size / copies)
    return lambda: _reduced(run) / copies


def _by_weights(step: AutomaticStep, factor: float) -> Callable[[], float]:
    # The totals may be replaced during a fit. Sums of weights with a fraction differ in their last bits.
    return lambda: round(step.totals.mean_weight * factor, 6)


def _reduced(run: Run) -> float:
    """Return the units of this window over all ranks. Collective."""
    (total,) = run.world.control_reduce((run.meter.open_units,)).wait()
    return float(total)
