"""The emulated devices: what they report, what they keep separate, and what they do later."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuda_recording import NATIVE, recorded
from ranks import run_on_ranks, run_script


def on_device(function: Any, *args: Any) -> Any:
    return run_on_ranks(1, function, *args, device="cuda")[0]


def kinds_of_waiting() -> list[list[str]]:
    x = torch.arange(4.0, device="cuda")
    pinned = torch.zeros(4, pin_memory=True)
    ways: list[Callable[[], object]] = [
        lambda: x.sum().item(),
        lambda: x.nonzero(),
        lambda: x[x > 1],
        lambda: x.cpu(),
        lambda: torch.tensor([1.0, 2.0], device="cuda"),
        lambda: pinned.to("cuda", non_blocking=True),
        lambda: torch.zeros(4).to("cuda", non_blocking=True),
        lambda: pinned.copy_(x, non_blocking=True),
        lambda: torch.cuda.synchronize(),
        lambda: torch.cuda.current_stream().synchronize(),
        lambda: (x * 2 + 1).softmax(0),
    ]
    found = []
    for way in ways:
        with recorded("sync", "event", "pageable", "upload", "download") as recording:
            way()
        found.append(list(dict.fromkeys(entry.kind for entry in recording.entries)))
    torch.cuda.synchronize()
    return found


def test_what_makes_the_host_wait_is_recorded_by_its_kind() -> None:
    assert on_device(kinds_of_waiting) == [
        ["sync"],
        ["sync"],
        ["sync"],
        ["sync"],
        ["sync", "pageable"],
        ["upload"],
        ["pageable"],
        ["download"],
        ["sync"],
        ["sync"],
        [],
    ]


def stack_of_a_wait() -> tuple[str, ...]:
    with recorded("sync") as recording:
        torch.ones(1, device="cuda").item()
    return recording.entries[0].stack


def test_an_entry_has_the_stack_of_its_cause() -> None:
    assert on_device(stack_of_a_wait)[0].endswith("stack_of_a_wait")


def values_before_and_after() -> tuple[float, bool, float, bool, float]:
    target = torch.zeros(1, pin_memory=True)
    event = torch.cuda.Event()
    target.copy_(torch.ones(1, device="cuda"), non_blocking=True)
    event.record()
    early, was_done = target[0].item(), event.query()
    between = target[0].item()
    is_done = event.query()
    return early, was_done, between, is_done, target[0].item()


def test_a_copy_to_pinned_memory_is_seen_once_its_event_is_complete() -> None:
    assert on_device(values_before_and_after) == (0.0, False, 0.0, True, 1.0)


def values_on_another_stream(waits: bool) -> float:
    source = torch.ones(1, device="cuda")
    target = torch.zeros(1, pin_memory=True)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        target.copy_(source, non_blocking=True)
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    torch.cuda.current_stream().synchronize()
    found = target[0].item()
    torch.cuda.synchronize()
    return found


def test_streams_wait_for_one_another_only_where_the_program_says_so() -> None:
    assert on_device(values_on_another_stream, False) == 0.0
    assert on_device(values_on_another_stream, True) == 1.0


def races_of(waits: bool) -> list[str]:
    source = torch.ones(3, pin_memory=True)
    with recorded("race") as recording:
        source.to("cuda", non_blocking=True)
        if waits:
            torch.cuda.synchronize()
        source.fill_(2.0)
        torch.cuda.synchronize()
    return [entry.what for entry in recording.entries]


def test_pinned_memory_must_not_change_before_it_is_copied() -> None:
    assert on_device(races_of, True) == []
    assert on_device(races_of, False) == ["pinned memory was written before it was copied"]


def devices_of_threads() -> list[tuple[str, int]]:
    with recorded("device") as recording:
        torch.cuda.set_device(1)
        weight = torch.ones(2, device="cuda", requires_grad=True)
        other = threading.Thread(target=lambda: torch.ones(1, device="cuda"), name="other")
        other.start()
        other.join()
        weight.square().sum().backward()
    torch.cuda.set_device(0)
    return [(entry.thread, entry.device) for entry in recording.entries]


def test_a_new_thread_begins_with_device_0() -> None:
    assert on_device(devices_of_threads) == [("MainThread", 1), ("other", 0), (NATIVE, 1)]


def generators() -> list[list[float]]:
    torch.manual_seed(5)
    drawn = [torch.rand(3, device=f"cuda:{index}").tolist() for index in (0, 1)]
    state = torch.cuda.get_rng_state(1)
    before = torch.get_rng_state()
    drawn.append(torch.nn.functional.dropout(torch.ones(64, device="cuda:1")).tolist())
    assert torch.equal(before, torch.get_rng_state())
    torch.cuda.set_rng_state(state, 1)
    drawn.append(torch.nn.functional.dropout(torch.ones(64, device="cuda:1")).tolist())
    return drawn


def test_each_device_draws_from_a_generator_of_its_own() -> None:
    first, second, mask, again = on_device(generators)
    assert first == second
    assert mask == again


def memory_of_devices() -> tuple[int, int, int]:
    before = torch.cuda.memory_allocated(1)
    block = torch.empty(1 << 20, dtype=torch.uint8, device="cuda:1")
    held = torch.cuda.memory_allocated(1) - before
    block.untyped_storage().resize_(0)
    freed = torch.cuda.memory_allocated(1) - before
    free, total = torch.cuda.mem_get_info(1)
    return held, freed, total - free - torch.cuda.memory_allocated(1)


def test_memory_is_counted_for_each_device() -> None:
    assert on_device(memory_of_devices) == (1 << 20, 0, 0)


def mixed() -> None:
    torch.ones(2, device="cuda") + torch.ones(2)


def across() -> None:
    torch.ones(2, device="cuda:0") + torch.ones(2, device="cuda:1")


def fails(function: Any) -> bool:
    with pytest.raises(RuntimeError, match="same device"):
        function()
    return True


def test_tensors_of_several_devices_do_not_mix() -> None:
    assert on_device(fails, mixed)
    assert on_device(fails, across)


def views_in_inference_mode() -> list[float]:
    weight = torch.nn.Parameter(torch.tensor([[1.0, 2.0]], device="cuda"))
    with torch.inference_mode():
        seen = weight.t()[1:].detach()
        found = [seen.item(), (weight * 2).view(2)[0].item()]
    weight.square().sum().backward()
    return found


def test_views_of_parameters_work_in_inference_mode() -> None:
    assert on_device(views_in_inference_mode) == [2.0, 2.0]


def reduced() -> tuple[float, str]:
    mean = torch.full((2,), float(torch.distributed.get_rank()), device=f"cuda:{torch.distributed.get_rank()}")
    torch.distributed.all_reduce(mean, torch.distributed.ReduceOp.AVG)
    return mean[0].item(), torch.distributed.get_backend_config()


def test_ranks_reduce_tensors_of_their_devices() -> None:
    assert run_on_ranks(2, reduced, device="cuda") == [(0.5, "cpu:gloo,cuda:nccl")] * 2


FORKED = """
import os, torch
torch.cuda.init()
if (child := os.fork()) == 0:
    try:
        torch.ones(1, device="cuda")
    except RuntimeError as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""


def test_a_process_forked_from_one_that_uses_devices_can_use_none() -> None:
    assert "Cannot re-initialize CUDA in forked subprocess" in run_script(FORKED, device="cuda").stdout
