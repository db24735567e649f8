"""Running test functions on real ranks, and scripts as a user would.

    run_on_ranks    on two or three processes that are kept warm for the whole session: milliseconds for each call
    run_script      a script in a process of its own, with everything it starts, for what the launcher does

A rank finds a function of a test file by the file's path and the function's name, because tests/ is no package.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

import cuda_machine
import pytest
from warm_python import NewPython, WarmPython

TESTS = Path(__file__).parent
# How long ranks that wait for one that failed are given to notice.
NOTICE_SECONDS = 2.0
START_SECONDS = 60.0
# How far the load of the machine extends a limit on time.
_MOST_SLOWNESS = 4.0
# pytest's own, those that torch sets when its profiler or compiler is first used or loads the code that it has
# generated, and two that phalanx sets for good.
_FOREIGN_VARIABLES = {
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "CUBLAS_WORKSPACE_CONFIG",
}


@contextlib.contextmanager
def over_gloo() -> Iterator[None]:
    """Sum over gloo within the context, where profilers see it, and not through the memory that ranks share."""
    from phalanx.framework.distributed.world import World

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(World, "sums_in_memory", False)
        yield


def run_on_ranks(
    num_ranks: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0, device: str = "cpu"
) -> list[Any]:
    """Call ``function(*args)`` on each of ``num_ranks`` warm ranks; return what each returned, in rank order.

    The ranks form a gloo group on the CPU, so ``World.from_environment("cpu")`` finds them. Generators are seeded alike
    before each call. A single rank is in no group. With ``device="cuda"`` each process has the CUDA devices of the
    machine, or two emulated ones, and the group has a backend for them too; see ``cuda_machine``. On a machine that is
    busy with other work, the limit on time is extended, up to four times.

    Raises:
        AssertionError: a rank raised, died, left threads or variables behind, or all took longer than ``timeout``
            seconds. The message holds the ranks' tracebacks and what they printed.
    """
    pool = _POOLS.get((num_ranks, device))
    if pool is None:
        pool = _POOLS[num_ranks, device] = _Pool(num_ranks, device)
    try:
        return pool.call(function, args, timeout)
    except BaseException:
        # Ranks that did not all finish are at different places: the next test gets fresh ones.
        del _POOLS[num_ranks, device]
        pool.kill()
        raise


def warm_python(device: str = "cpu", libraries: tuple[str, ...] = ()) -> WarmPython | NewPython:
    """Return the process that scripts and warm ranks are forked from; it has imported further ``libraries``.

    Those with devices of the machine are new interpreters, as those of users are: a driver may refuse a forked process.
    """
    if device != "cpu" and not cuda_machine.EMULATED:
        return NewPython()
    if device == "cpu" and _PRELOADED and _PRELOADED.issuperset(libraries):
        libraries = tuple(sorted(_PRELOADED))
    if (device, libraries) not in _WARM:
        _WARM[device, libraries] = WarmPython(variables_for(device), libraries)
    return _WARM[device, libraries]


def preload(libraries: Sequence[str]) -> None:
    """Let all processes on the CPU find further libraries imported: DeepSpeed and torchmetrics take 9 s each.

    For runs of many tests. One that needs a few ranks once would wait for libraries that it does not use.
    """
    _PRELOADED.update(libraries)


def variables_for(device: str) -> dict[str, str]:
    """Return the variables with which a new interpreter has devices of this type; see ``cuda_machine.variables``."""
    return {} if device == "cpu" else cuda_machine.variables()


def end_ranks() -> None:
    """End all warm ranks. What they are forked from stays: the next ones start within a second."""
    while _POOLS:
        _POOLS.popitem()[1].kill()


def close_pools() -> None:
    """End all warm ranks, and what they are forked from."""
    end_ranks()
    while _WARM:
        _WARM.popitem()[1].close()


def pool_pids() -> set[int]:
    """Return the processes that outlive a test."""
    return {process.pid for pool in _POOLS.values() for process in pool.processes} | {
        warm.pid for warm in _WARM.values()
    }


class _Pool:
    """Processes that wait for calls on a pipe of their own each; idle ones sleep."""

    def __init__(self, num_ranks: int, device: str) -> None:
        self.processes: list[subprocess.Popen[str]] = []
        self._pipes: list[Connection] = []
        # Files without a name: nothing to remove, whatever happens.
        self._outputs = [tempfile.TemporaryFile() for _ in range(num_ranks)]  # noqa: SIM115
        listener = socket.create_server(("127.0.0.1", 0))
        try:
            for rank in range(num_ranks):
                self._start(rank, num_ranks, device, listener)
        finally:
            listener.close()
        self._collect(START_SECONDS, "start")

    def _start(self, rank: int, num_ranks: int, device: str, listener: socket.socket) -> None:
        ours, theirs = socket.socketpair()
        inherited = {"RANK_PIPE": theirs.fileno()} | ({"RANK_STORE": listener.fileno()} if rank == 0 else {})
        port = listener.getsockname()[1]
        process = warm_python(device).start(
            TESTS / "warm_rank.py",
            [str(rank), str(num_ranks), str(port), device],
            Path.cwd(),
            {
                **os.environ,
                **variables_for(device),
                **({} if device == "cpu" else cuda_machine.rank_variables(rank, num_ranks, port)),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
            },
            self._outputs[rank].fileno(),
            inherited,
        )
        self.processes.append(process)
        self._pipes.append(Connection(ours.detach()))
        theirs.close()

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        module = sys.modules[function.__module__]
        call = (module.__name__, module.__file__, function.__qualname__, pickle.dumps(args))
        for output in self._outputs:
            output.seek(0)
            output.truncate()
        for pipe in self._pipes:
            # A rank that died since the last call is told of below.
            with contextlib.suppress(OSError):
                pipe.send(call)
        return self._collect(timeout, function.__qualname__)

    def _collect(self, timeout: float, what: str) -> list[Any]:
        """Return the answer of each rank, or raise with all that is known of those that failed."""
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}
        begin = time.monotonic()
        deadline = begin + timeout
        while len(answers) + len(failures) < len(self._pipes):
            waiting = [rank for rank in range(len(self._pipes)) if rank not in answers and rank not in failures]
            ready = wait([self._pipes[rank] for rank in waiting], max(0.0, deadline - time.monotonic()))
            if not ready and not failures and time.monotonic() < (later := begin + timeout * _slowness()):
                deadline = later
                continue
            if not ready:
                break
            for rank in [rank for rank in waiting if self._pipes[rank] in ready]:
                try:
                    good, value = pickle.loads(self._pipes[rank].recv_bytes())
                except (EOFError, OSError):
                    good, value = False, f"died: {self._death(rank)}"
                (answers if good else failures)[rank] = value
                if not good:
                    deadline = min(deadline, time.monotonic() + NOTICE_SECONDS)
        if len(answers) == len(self._pipes):
            return [answers[rank] for rank in range(len(self._pipes))]
        raise AssertionError(self._describe(what, timeout, answers, failures))

    def _describe(self, what: str, timeout: float, answers: Mapping[int, Any], failures: Mapping[int, str]) -> str:
        silent = [rank for rank in range(len(self._pipes)) if rank not in answers and rank not in failures]
        parts = [f"{what} on {len(self._pipes)} ranks failed"]
        parts += [f"--- rank {rank} {text}" for rank, text in failures.items()]
        if silent:
            self._print_stacks(silent)
            when = f"gave no answer within {timeout:g} s" if not failures else "was still at it"
            parts += [f"--- rank {rank} {when}" for rank in silent]
        for rank, output in enumerate(self._outputs):
            output.seek(0)
            if text := output.read().decode(errors="replace").strip():
                parts.append(f"--- rank {rank} printed:\n{text[-6000:]}")
        return "\n".join(parts)

    def _print_stacks(self, ranks: Sequence[int]) -> None:
        """Make ranks print the stacks of their threads, and wait until they have, or until a limit."""
        sizes = self._sizes(ranks)
        for rank in ranks:
            with contextlib.suppress(OSError):
                self.processes[rank].send_signal(_STACKS_SIGNAL)
        until = time.monotonic() + NOTICE_SECONDS * _MOST_SLOWNESS
        before = sizes
        while time.monotonic() < until:
            time.sleep(0.2)
            now = self._sizes(ranks)
            if now == before and all(size > first for size, first in zip(now, sizes, strict=True)):
                break
            before = now

    def _sizes(self, ranks: Sequence[int]) -> list[int]:
        return [os.fstat(self._outputs[rank].fileno()).st_size for rank in ranks]

    def _death(self, rank: int) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.processes[rank].wait(NOTICE_SECONDS)
            return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return "closed its pipe"

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        for pipe, output in zip(self._pipes, self._outputs, strict=True):
            pipe.close()
            output.close()


def _slowness() -> float:
    """Return how many times longer work takes on this machine than on an idle one, as the limits on time assume."""
    return min(max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)), _MOST_SLOWNESS)


# A fit takes SIGUSR1 and SIGUSR2 over, and gives them back to Python, which does not know of handlers in C: after a fit
# they would end a rank that should print its stacks.
_STACKS_SIGNAL = signal.SIGQUIT
# By the number of ranks, and the type of their devices.
_POOLS: dict[tuple[int, str], _Pool] = {}
_WARM: dict[tuple[str, tuple[str, ...]], WarmPython] = {}
_PRELOADED: set[str] = set()


def serve(rank: int, num_ranks: int, port: int, device: str, store_fd: int, pipe_fd: int) -> None:
    """Be a warm rank: answer calls until the pipe closes."""
    faulthandler.enable()
    faulthandler.register(_STACKS_SIGNAL, all_threads=True)
    pipe = Connection(pipe_fd)
    _join_group(rank, num_ranks, port, device, store_fd)
    _send(pipe, True, None)
    while True:
        try:
            call = pipe.recv()
        except EOFError:
            # No collective at the end: the others may be gone.
            os._exit(0)
        try:
            good, value = True, _answer(*call)
        except BaseException:
            good, value = False, f"raised:\n{traceback.format_exc()}"
        _send(pipe, good, value)


def _send(pipe: Connection, good: bool, value: Any) -> None:
    try:
        payload = pickle.dumps((good, value))
    except Exception:
        payload = pickle.dumps((False, f"returned what cannot be pickled:\n{traceback.format_exc()}"))
    sys.stdout.flush()
    pipe.send_bytes(payload)


def _join_group(rank: int, num_ranks: int, port: int, device: str, store_fd: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if num_ranks == 1:
        return
    options: dict[str, Any] = {"master_listen_fd": store_fd} if rank == 0 else {}
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, num_ranks, is_master=rank == 0, wait_for_workers=False, **options
    )
    backend = "gloo" if device == "cpu" else cuda_machine.backend(num_ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks)
    _keep_shapes()


def _answer(module_name: str, path: str, name: str, pickled_args: bytes) -> Any:
    import torch
    import torch.distributed as dist

    function: Any = _load(module_name, path)
    for part in name.split("."):
        function = getattr(function, part)
    args = pickle.loads(pickled_args)
    threads, variables, directory = set(threading.enumerate()), dict(os.environ), Path.cwd()
    seed_alike()
    hooks = set(torch.nn.modules.module._global_forward_pre_hooks)
    value = function(*args)
    if dist.is_initialized():
        _end_groups()
    # A destroyed group keeps a thread that wakes up a hundred times a second for as long as anything refers to it.
    gc.collect()
    # That of a sharded module which still lives, and whose hook would end what the next function compiles at each call.
    for hook in set(torch.nn.modules.module._global_forward_pre_hooks) - hooks:
        del torch.nn.modules.module._global_forward_pre_hooks[hook]
    # What is left now stays. Searched again in each collection, it would take a fifth of the time of all tests.
    gc.freeze()
    left = lasting_threads(threads)
    assert not left, f"the function left threads behind: {left}"
    changed = changed_variables(variables)
    assert not changed, f"the function left environment variables changed: {changed}"
    os.chdir(directory)
    return value


def _load(module_name: str, path: str) -> ModuleType:
    """Return the test file as the module of the name it has in the main process, so that its classes pickle."""
    module = sys.modules.get(module_name)
    if module is None or getattr(module, "__file__", None) != path:
        if (folder := str(Path(path).parent)) not in sys.path:
            # For helpers beside the test file.
            sys.path.append(folder)
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    return module


def _end_groups() -> None:
    """Destroy the groups that the function left: each holds native threads and sockets, and calls are many."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    if dist.get_world_size() > 1:
        dist.barrier()
    if session := sys.modules.get("phalanx.strategies.deepspeed.session"):
        # One that was not stopped, as that of a Fabric, has replaced functions of torch, and keeps groups and a model.
        for each in gc.get_objects():
            # Not isinstance, which asks a weak proxy for what it refers to.
            if issubclass(type(each), session.EngineSession):
                each.stop(None)
        sys.modules["phalanx.strategies.deepspeed.engine"].release_globals()
    if dist.get_world_size() == 1:
        # A single rank begins each function without a group.
        dist.destroy_process_group()
        return
    groups = [group for group in distributed_c10d._world.pg_map if group is not dist.group.WORLD]
    for group in groups:
        dist.destroy_process_group(group)
    if groups:
        _forget_meshes()


def _forget_meshes() -> None:
    """Clear what torch keeps of device meshes: the next function's meshes equal these, and would find their groups."""
    from torch.distributed.tensor import _collective_utils, _redistribute, debug

    debug._clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()


def _keep_shapes() -> None:
    """Let DTensor keep the shapes of outputs, which are those of any mesh, when it forgets the meshes.

    It finds them by running each operator on fake tensors, which takes a third of the time of a short fit.
    """
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    owner: Any = ShardingPropagator
    compute = owner._propagate_tensor_meta_non_cached
    known: dict[Any, Any] = {}

    def described(value: Any) -> Any:
        if isinstance(value, DTensorSpec):
            return value.tensor_meta
        if isinstance(value, list | tuple):
            return type(value), *map(described, value)
        return type(value), value

    def shapes_of(propagator: Any, schema: Any) -> Any:
        key = (schema.op, described(schema.args_schema), described([*schema.kwargs_schema.items()]))
        try:
            hash(key)
        except TypeError:
            return compute(propagator, schema)
        if key not in known:
            known[key] = compute(propagator, schema)
        return known[key]

    owner._propagate_tensor_meta_non_cached = shapes_of


def seed_alike() -> None:
    """Seed the generators that a test may draw from."""
    import torch

    random.seed(0)
    torch.manual_seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)


def changed_variables(known: Mapping[str, str]) -> list[str]:
    """Return the names of environment variables that differ from ``known``, but for those nobody can help."""
    names = {name for name, _ in known.items() ^ dict(os.environ).items()}
    return sorted(names - _FOREIGN_VARIABLES)


def lasting_threads(known: set[threading.Thread], seconds: float = 10.0) -> list[str]:
    """Return the names of threads beyond ``known`` that do not end within ``seconds``."""
    until = time.monotonic() + seconds
    while left := [thread for thread in threading.enumerate() if thread not in known and _is_lasting(thread)]:
        # Threads of a loader end with the iterator, which may sit in a reference circle.
        gc.collect()
        if time.monotonic() >= until:
            break
        time.sleep(0.01)
    return [thread.name for thread in left]


def _is_lasting(thread: threading.Thread) -> bool:
    # The threads of torch's backward passes last as long as the process; Python knows of them once they have asked. So
    # does the thread of tqdm's first bar, which libraries show, and fsspec's event loop with its resolver of names.
    is_known = thread.name in ("tqdm_monitor", "fsspecIO") or thread.name.startswith("asyncio_")
    return thread.is_alive() and not isinstance(thread, threading._DummyThread) and not is_known


@contextlib.contextmanager
def started_command(
    command: Sequence[str], cwd: Path, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Start a command, with ``env`` added to the environment; kill all it started at the end.

    Its standard output and error are one stream, ``process.stdout``; its session is its pid.
    """
    process = subprocess.Popen(
        command,
        env={**os.environ, **(env or {})},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A session of its own, so that all of it can be found and ended.
        start_new_session=True,
    )
    with _ended(process):
        yield process


@contextlib.contextmanager
def _ended(process: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    finally:
        end_session(process.pid)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@contextlib.contextmanager
def started_script(
    script: str | Path,
    *args: str,
    env: Mapping[str, str] | None = None,
    flags: Sequence[str] = (),
    is_new: bool = False,
    device: str = "cpu",
    libraries: tuple[str, ...] = (),
    cwd: Path | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """Start a script, given as a path or as its source, in ``cwd`` or a directory of its own; see ``started_command``.

    It finds torch, phalanx and further ``libraries`` imported, unless the interpreter ``is_new``; that takes seconds,
    and is for tests of how a process starts, of the interpreter's ``flags``, and of what libraries read from the
    environment. ``device="cuda"`` gives it the CUDA devices of the machine, or two emulated ones.
    """
    variables = {**variables_for(device), **(env or {})}
    directory = Path(tempfile.mkdtemp(prefix="script-"))
    try:
        path = script.resolve() if isinstance(script, Path) else directory / "script.py"
        if isinstance(script, str):
            path.write_text(script)
        if is_new or flags:
            with started_command([sys.executable, *flags, str(path), *args], cwd or directory, variables) as process:
                yield process
        else:
            process = warm_python(device, libraries).start(path, args, cwd or directory, {**os.environ, **variables})
            with _ended(process):
                yield process
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def run_script(
    script: str | Path,
    *args: str,
    env: Mapping[str, str] | None = None,
    timeout: float = 60.0,
    flags: Sequence[str] = (),
    is_new: bool = False,
    device: str = "cpu",
    libraries: tuple[str, ...] = (),
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a script to its end; ``stdout`` holds both its streams, in order.

    Raises:
        AssertionError: it took longer than ``timeout`` seconds; all it started was killed.
    """
    given = {"env": env, "flags": flags, "is_new": is_new, "device": device, "libraries": libraries, "cwd": cwd}
    with started_script(script, *args, **given) as process:  # type: ignore[arg-type]
        return completed(process, timeout)


def run_command(
    command: Sequence[str], cwd: Path, env: Mapping[str, str] | None = None, timeout: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, as ``run_script`` does a script."""
    with started_command(command, cwd, env) as process:
        return completed(process, timeout)


def completed(process: subprocess.Popen[str], timeout: float) -> subprocess.CompletedProcess[str]:
    """Wait for what ``started_command`` started. A busy machine extends the limit on time, as for ``run_on_ranks``."""
    begin = time.monotonic()
    left = timeout
    while True:
        try:
            output, _ = process.communicate(timeout=left)
        except subprocess.TimeoutExpired:
            left = begin + timeout * _slowness() - time.monotonic()
            if left > 0:
                continue
            end_session(process.pid)
            output, _ = process.communicate()
            raise AssertionError(f"{process.args!r} did not end within {timeout:g} s; it printed:\n{output}") from None
        return subprocess.CompletedProcess(process.args, process.returncode, output)


def session_pids(session: int) -> set[int]:
    """Return the live processes of a session; zombies are not alive."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name before it may hold anything but a closing bracket that is not the last.
            state, _, _, owner = path.read_text().rpartition(")")[2].split()[:4]
            if int(owner) == session and state not in "ZX":
                found.add(int(path.parent.name))
    return found


def end_session(session: int) -> None:
    """Kill every process of a session."""
    while pids := session_pids(session):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def wait_until(condition: Callable[[], object], seconds: float = 30.0, printed: Callable[[], str] = lambda: "") -> None:
    """Wait for ``condition`` to hold.

    Raises:
        AssertionError: it did not, within ``seconds`` on an idle machine. It ends with what ``printed`` returns.
    """
    begin = now = time.monotonic()
    while not condition():
        asked, now = now, time.monotonic()
        waited = now - begin
        is_late = waited >= seconds and waited >= seconds * _slowness()
        assert not is_late, f"{condition} is not true after {waited:.0f} s\n{printed()}"
        # What is waited for needs the processors, and a condition that reads checkpoints would take one of them.
        time.sleep(min(max(0.01, 4 * (now - asked)), 0.2))
        now = time.monotonic()


def read_terminal(descriptor: int) -> str:
    """Return what is written to a terminal until nobody holds its other end; close it."""
    parts = []
    with contextlib.suppress(OSError):
        while part := os.read(descriptor, 1 << 16):
            parts.append(part)
    os.close(descriptor)
    return b"".join(parts).decode(errors="replace")


__all__ = [
    "changed_variables",
    "close_pools",
    "end_ranks",
    "lasting_threads",
    "pool_pids",
    "read_terminal",
    "run_command",
    "run_on_ranks",
    "run_script",
    "seed_alike",
    "session_pids",
    "started_command",
    "started_script",
    "wait_until",
]
