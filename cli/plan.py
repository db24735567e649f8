"""``phalanx plan``: the batch, the memory of a rank and the communication of a step, without training."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from ..callbacks.model_checkpoint import ModelCheckpoint
from ..framework.core.accumulation import resolve_accumulation
from ..framework.core.degrees import resolve_degrees
from ..framework.core.errors import ConfigurationError
from ..framework.core.global_batch import GlobalBatch, pieces_of, resolve_global_batch
from ..framework.core.precision import resolve_precision
from ..framework.core.registry import STRATEGIES
from ..framework.core.size_text import size_text
from ..framework.core.wording import counted
from ..framework.memory.available_memory import gpu_libraries
from ..framework.memory.communication import Traffic, Transfer, communication
from ..framework.memory.memory_plan import Alternatives, MemoryPlan, PlanRow, TrainingData, alternatives
from ..framework.parallel.strategy import Strategy
from ..framework.system.console import printable
from .commands import CHECK_FAILED
from .planned_program import PlannedFit, canonical_strategy, of_class, of_script
from .terminal_text import fitted_table, painted, say, say_json, say_wrapped

# Those that few scripts have as well.
_OPTIONS = ("--ranks", "--ranks-per-node", "--device-memory", "--host-memory", "--rehearse", "--json")


@dataclass(frozen=True)
class _Answer:
    """The content of an answer, in the terminal and as JSON."""

    target: str
    model: str
    plan: MemoryPlan
    row: PlanRow
    """The strategy that the answer is about."""
    window: int
    global_batch: int | None
    """Samples of an optimizer step where the program sets them; None: micro-batch x window x ranks."""
    transfers: tuple[Transfer, ...] | tuple[Traffic, ...]
    instead: Alternatives | None
    """None if the run fits."""
    saves: list[str]
    """Sentences on the checkpoints whose interval the run chooses."""


def show_plan(given: argparse.Namespace) -> int:
    """Print the plan of a script or a class; return the exit code: 69 if the run does not fit."""
    _check_arguments(given)
    chosen = None if given.strategy is None else canonical_strategy(given.strategy)
    fit = of_class(given.target) if ":" in given.target else of_script(given.target, given.arguments)
    about = _strategy(fit, chosen)
    plan = _plan(fit, about, given)
    answer = _answer(given.target, fit, plan, _row(plan, about if isinstance(about, str) else about.name))
    if given.json:
        say_json(_document(answer))
    else:
        _show(answer)
    return 0 if answer.row.fits and answer.row.refusal is None else CHECK_FAILED


def _check_arguments(given: argparse.Namespace) -> None:
    """Refuse sizes without a unit, and note options of ``plan`` that the script would get.

    Raises:
        ConfigurationError: a size has no unit.
    """
    for option, size in (("--device-memory", given.device_memory), ("--host-memory", given.host_memory)):
        if size is not None and size.strip()[-1:].isdigit():
            raise ConfigurationError(f"{option} {size} has no unit: give a size such as 80GB.")
    misplaced = [each for each in given.arguments if each.partition("=")[0] in _OPTIONS]
    if misplaced:
        text = (
            f"note: {misplaced[0]} behind {given.target} is an argument of the script; options of plan come before it"
        )
        print(f"phalanx: {printable(text)}.", file=sys.stderr)


def _strategy(fit: PlannedFit, chosen: str | None) -> str | Strategy:
    """Return the strategy that the answer is about; one with arguments of the program is that object."""
    given = fit.settings.strategy
    name = chosen or fit.strategy
    return given if isinstance(given, Strategy) and name == given.name else name


def _plan(fit: PlannedFit, about: str | Strategy, given: argparse.Namespace) -> MemoryPlan:
    """Plan a fit on the machines of the command line, or else on those that the program asks for."""
    on_other_machines = given.ranks is not None or given.ranks_per_node is not None
    parallel = fit.settings.parallel if given.parallel is None else given.parallel
    # The formulas know data-parallel ranks only; a rehearsal runs a step of one rank of the mesh.
    rehearses = given.rehearse or about == "auto" or bool(resolve_degrees(parallel).used)
    return fit.trainer.plan(
        fit.module,
        fit.loaders,
        datamodule=fit.datamodule,
        activation_bytes=fit.activation_bytes,
        ranks=fit.ranks if given.ranks is None else given.ranks,
        ranks_per_node=given.ranks_per_node if on_other_machines else fit.ranks_per_node,
        device_memory=given.device_memory,
        host_memory=given.host_memory,
        parallel=parallel,
        rehearse=about if rehearses else None,
    )


def _answer(target: str, fit: PlannedFit, plan: MemoryPlan, row: PlanRow) -> _Answer:
    """Return the answer about one strategy of a plan."""
    precision = resolve_precision(fit.settings.precision)
    global_batch = resolve_global_batch(fit.settings.global_batch_size, fit.settings.micro_batch_size)
    window = _window(fit, plan, global_batch)
    layout = row.layout if row.rank is None else None
    return _Answer(
        target,
        type(fit.module).__name__,
        plan,
        row,
        window,
        None if global_batch is None else global_batch.samples,
        row.traffic if layout is None else communication(layout, plan.size, plan.ranks, precision, window),
        None if layout is None or row.fits else alternatives(plan, row.name, precision),
        _saves(fit, plan.world_size),
    )


def _saves(fit: PlannedFit, ranks: int) -> list[str]:
    found = [each.planned_saves(ranks) for each in fit.trainer.callbacks if isinstance(each, ModelCheckpoint)]
    return [sentence for sentence in found if sentence is not None]


def _window(fit: PlannedFit, plan: MemoryPlan, global_batch: GlobalBatch | None) -> int:
    """Return the micro-batches of a rank in an optimizer step."""
    if global_batch is not None and plan.data is not None and plan.data.micro_batch is not None:
        return len(pieces_of(global_batch.share(_data_ranks(plan)), plan.data.micro_batch))
    schedule = resolve_accumulation(fit.settings.accumulate_grad_batches)
    return schedule.constant or schedule.largest


def _reserved(plan: MemoryPlan) -> int:
    """Return the bytes of a device that are not available to a run, as libraries take them."""
    return 0 if plan.memory.device_is_host else gpu_libraries(plan.local_size or plan.world_size)


def _row(plan: MemoryPlan, name: str) -> PlanRow:
    if name == "auto":
        return plan[plan.chosen]
    if all(row.name != name for row in plan):
        known = ", ".join(row.name for row in plan)
        raise ConfigurationError(f"There is no formula for strategy={name!r}: give --strategy with one of {known}.")
    return plan[name]


def _data_ranks(plan: MemoryPlan) -> int:
    """Return the number of ranks that read different data."""
    return plan.degrees.lay_out(plan.world_size).data_size


def _batch(answer: _Answer) -> dict[str, int | None]:
    """Return the arithmetic of a step; None for what is not known."""
    plan, window = answer.plan, answer.window
    data, samples = plan.data or TrainingData(), answer.global_batch
    if samples is None and data.micro_batch is not None:
        samples = data.micro_batch * window * _data_ranks(plan)
    span = samples if answer.global_batch is not None else (data.micro_batch or 0) * _data_ranks(plan)
    steps, last = _steps(data, span, samples)
    return {
        "micro_batch": data.micro_batch,
        "window": window,
        "ranks": _data_ranks(plan),
        "global_batch": samples,
        "samples": data.samples,
        "steps_per_epoch": steps,
        "samples_of_last_step": last,
    }


def _steps(data: TrainingData, span: int | None, samples: int | None) -> tuple[int | None, int | None]:
    """Return the optimizer steps of an epoch, and the samples of the last one; None if they are unknown.

    Args:
        data: the training data.
        span: samples that are dropped together with ``drop_last``.
        samples: samples of an optimizer step.
    """
    if not samples or not span or not data.samples:
        return None, None
    used = data.samples // span * span if data.drop_last else data.samples
    return -(-used // samples), (used - 1) % samples + 1 if used else 0


def _document(answer: _Answer) -> dict[str, Any]:
    plan, row = answer.plan, answer.row
    return {
        "schema": 1,
        "target": answer.target,
        "model": answer.model,
        "parameters": plan.size.elements,
        "frozen": plan.size.frozen,
        "precision": plan.precision,
        "strategy": row.name,
        "ranks": plan.world_size,
        "ranks_per_node": plan.local_size,
        "parallel": plan.degrees.given,
        "fits": row.fits,
        "refusal": row.refusal,
        "rehearsed_rank": row.rank,
        "shortage": row.shortage,
        "batch": _batch(answer),
        "reserved": _reserved(plan),
        "available": plan.memory,
        "needs": row.needs,
        "communication": [{**asdict(each), "sent": each.sent} for each in answer.transfers],
        "strategies": [
            {"name": each.name, "fits": each.fits, "refusal": each.refusal, "needs": each.needs} for each in plan
        ],
        "instead": answer.instead,
        "saves": answer.saves,
        "notes": plan.notes,
    }


def _show(answer: _Answer) -> None:
    plan, row = answer.plan, answer.row
    frozen = f" ({plan.size.frozen:,} frozen)" if plan.size.frozen else ""
    nodes = counted(-(-plan.world_size // (plan.local_size or plan.world_size)), "node")
    say_wrapped(f"{answer.target}: {answer.model}, {plan.size.elements:,} parameters{frozen}", "")
    say(f"strategy   {row.name}, {counted(plan.world_size, 'rank')} on {nodes}, precision {plan.precision}")
    say(f"numbers    {'by formulas' if row.rank is None else f'rehearsed: a step of rank {row.rank}, without data'}")
    if plan.degrees.used:
        say(f"axes       {plan.degrees.lay_out(plan.world_size, STRATEGIES.load(row.name)().rest)}")
    _show_batch(_batch(answer))
    if row.needs.everywhere.total:
        _show_memory(plan, row)
    for each in answer.transfers:
        often = "once" if each.times == 1 else f"{each.times} times"
        what = f"along {each.axis}" if isinstance(each, Traffic) else f"of the {each.what}"
        say(f"step       {each.operation} {what}, {often}: a rank sends {size_text(each.sent)}")
    if not answer.transfers:
        say("step       no communication but a few bytes")
    for sentence in answer.saves:
        say_wrapped(f"saves      {sentence}", "")
    for note in plan.notes:
        say_wrapped(f"note: {note}", "")
    _show_verdict(plan, row, answer.instead)


def _show_batch(batch: dict[str, int | None]) -> None:
    if batch["micro_batch"] is None:
        say(f"batch      the micro-batch is not known; window x ranks: {batch['window']} x {batch['ranks']}")
        return
    factors = (batch["micro_batch"], batch["window"] or 0, batch["ranks"] or 0)
    if prod(factors) == batch["global_batch"]:
        product = f"{' x '.join(map(str, factors))} = {batch['global_batch']:,}"
        say(f"batch      micro-batch x window x ranks: {product} samples")
    else:
        ranks = counted(factors[2], "rank")
        say(f"batch      {batch['global_batch']:,} samples on {ranks}, in micro-batches of {factors[0]}")
    if batch["steps_per_epoch"] is None:
        return
    steps, last = counted(batch["steps_per_epoch"], "step"), batch["samples_of_last_step"]
    rest = "" if last == batch["global_batch"] else f", the last of which has {last:,}"
    say(f"epoch      {batch['samples']:,} samples: {steps}{rest}")


def _show_memory(plan: MemoryPlan, row: PlanRow) -> None:
    """Print what a rank holds by category and place."""
    places = {"device": row.needs.device, "host": row.needs.host, "disk": row.needs.disk}
    if plan.memory.device_is_host:
        places = {"memory": row.needs.device + row.needs.host, "disk": row.needs.disk}
    available = {"memory": plan.memory.device, **vars(plan.memory)}
    places = {name: held for name, held in places.items() if held.total}
    kinds = [name for name in vars(row.needs.device) if any(getattr(held, name) for held in places.values())]
    lines = [[name.replace("_", " "), *(size_text(getattr(held, name)) for held in places.values())] for name in kinds]
    lines.append(["at its peak", *(size_text(held.total) for held in places.values())])
    if reserved := _reserved(plan):
        # The device is the first place.
        lines.append(["for CUDA libraries", size_text(reserved), *("" for _ in list(places)[1:])])
    lines.append(["available", *(size_text(available[name]) for name in places)])
    fitted_table([f"{'a rank':<18}", *(f"{name:>8}" for name in places)], lines)


def _show_verdict(plan: MemoryPlan, row: PlanRow, instead: Alternatives | None) -> None:
    if row.refusal is not None:
        say_wrapped(f"cannot be used: {row.refusal}", "")
        return
    if row.fits:
        print(painted("fits", "green"))
        return
    print(painted(f"does not fit: too large for the {row.shortage}", "red"))
    if instead is None:
        return
    ways = [f"strategy {', '.join(instead.strategies)}"] if instead.strategies else []
    ways += [f"a micro-batch of {instead.micro_batch}"] if instead.micro_batch else []
    ways += [f"{instead.ranks} ranks of such memory"] if instead.ranks else []
    # A note of the plan has it if no strategy fits.
    if ways or plan.fits:
        say_wrapped(f"what fits instead: {'; or '.join(ways) or 'nothing, by these formulas'}", "")
