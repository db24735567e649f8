"""Fits that write to a bucket, and are read and resumed on another machine."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from buckets import NAME, Bucket, Faults
from messages import refuses
from ranks import wait_until
from small_fits import Tiny, loader
from torch import nn

import phalanx
from phalanx import Fabric, Trainer, checkpoint as library
from phalanx.callbacks import LambdaCallback, ModelCheckpoint
from phalanx.cli.main import main
from phalanx.framework.core.errors import CheckpointError, ConfigurationError, StorageError
from phalanx.framework.storage import lease
from phalanx.framework.storage.cached_folder import CachedFolder
from phalanx.framework.storage.cached_url import local_place, url_of
from phalanx.framework.storage.store import open_store
from phalanx.loggers import CSVLogger

Machine = Callable[[str], Path]
PAGE = Path(phalanx.__file__).parent / "docs" / "object-storage.md"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Begin to work on another machine; return its cache."""

    def begin(name: str) -> Path:
        monkeypatch.setenv("PHALANX_CACHE", str(tmp_path / name))
        return tmp_path / name

    begin("first")
    return begin


@pytest.fixture(params=["file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty place."""
    if request.param == "file":
        yield f"file://{tmp_path}/bucket"
        return
    bucket: Bucket = request.getfixturevalue("bucket")
    yield f"s3://{NAME}/{tmp_path.name}"
    assert not bucket.faults.failing


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    with Bucket() as served:
        yield served


def fitted(
    root: str | Path, epochs: int, ckpt_path: str | None = None, before_step: Any = lambda *_: None, **saving: Any
) -> Trainer:
    """Train on four batches an epoch, with a checkpoint after every second one."""
    saver = ModelCheckpoint(**{"save_last": True, "every_n_train_steps": 2, **saving})
    torch.manual_seed(3)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        default_root_dir=root,
        logger=CSVLogger(),
        callbacks=[saver, LambdaCallback(on_train_batch_start=before_step)],
        log_every_n_steps=1,
        verbose=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(Tiny({"val": [0.3, 0.2, 0.1, 0.4]}), loader(), loader(), ckpt_path=ckpt_path)
    return trainer


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    assert trainer.model is not None
    return dict(trainer.model.state_dict())


def objects(url: str) -> set[str]:
    """Return the names of what is below a URL."""
    return set(open_store(url).list())


def saved_run(trainer: Trainer) -> str:
    assert trainer.log_dir is not None
    found = url_of(trainer.log_dir)
    assert found is not None
    return found


def test_a_fit_goes_on_on_an_empty_machine(tmp_path: Path, machine: Machine, url: str) -> None:
    fitted(url, 2)
    machine("second")
    again = fitted(url, 4, ckpt_path="auto")
    last = f"{saved_run(again)}/checkpoints/last.ckpt"
    whole = fitted(tmp_path / "disk", 4)
    assert again.global_step == whole.global_step == 16
    torch.testing.assert_close(weights_of(again), weights_of(whole), rtol=0, atol=0)
    figures = [Path(str(each.log_dir), "metrics.csv").read_text() for each in (again, whole)]
    assert figures[0] == figures[1]
    machine("third")
    assert not local_place(last).exists()
    assert library.verify(last) == []
    torch.testing.assert_close(library.weights(last), weights_of(whole), rtol=0, atol=0)


def test_the_bucket_has_what_the_disk_has_and_nothing_else(machine: Machine, url: str) -> None:
    trainer = fitted(url, 3, monitor="val", save_top_k=2, every_n_train_steps=None)
    run = saved_run(trainer)
    folder = local_place(run)
    local = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    expected = {name for name in local if not any(part.startswith(".") for part in name.split("/"))}
    checksums = {one.path.name: library.open_checkpoint(one.path).manifest.checksum for one in kept(folder)}
    names = set()
    for name in expected:
        head, _, file = name.rpartition("/")
        inside = file.endswith(".safetensors")
        names.add(f"{head}/{checksums[Path(head).name]}/{file}" if inside else name)
    assert objects(run) == names
    assert len(checksums) == 3
    best = trainer.checkpoint_callback.best_model_path  # type: ignore[union-attr]
    library.remove(f"{url_of(best)}")
    assert not any(Path(best).name in name for name in objects(run))


def kept(folder: Path) -> list[Any]:
    return library.checkpoints(folder / "checkpoints")


def test_tensors_that_are_not_on_the_disk_are_read_from_the_bucket(machine: Machine, url: str) -> None:
    trainer = fitted(url, 2, save_top_k=-1, keep_local=1)
    folder = local_place(saved_run(trainer)) / "checkpoints"
    held = {path.parent.name for path in folder.rglob("*.safetensors")}
    assert held == {"last.ckpt"}
    found = library.checkpoints(folder, verify=True)
    assert [one.status for one in found] == ["good"] * 5
    weights = library.weights(folder / "epoch=0-step=2.ckpt")
    loaded = Tiny.load_from_checkpoint(str(folder / "epoch=0-step=2.ckpt"))
    torch.testing.assert_close(dict(loaded.state_dict()), weights, rtol=0, atol=0)
    assert {path.parent.name for path in folder.rglob("*.safetensors")} == {"last.ckpt"}
    module = Tiny({"val": [0.5]})
    assert trainer.validate(module, loader(), ckpt_path=str(folder / "epoch=0-step=2.ckpt"), verbose=False)
    torch.testing.assert_close(dict(module.state_dict()), weights, rtol=0, atol=0)


def test_what_another_machine_has_changed_is_seen(machine: Machine, url: str) -> None:
    first = machine("first")
    fitted(url, 1)
    machine("second")
    fitted(url, 2, ckpt_path="auto")
    assert machine("first") == first
    third = fitted(url, 3, ckpt_path="auto")
    assert third.global_step == 12
    rows = Path(str(third.log_dir), "metrics.csv").read_text().splitlines()
    assert len([row for row in rows[1:] if row]) == len(set(rows[1:]))
    steps = [one.step for one in library.checkpoints(local_place(saved_run(third)) / "checkpoints")]
    assert max(step for step in steps if step is not None) == 12


def test_what_a_lost_machine_could_not_delete_is_deleted(
    machine: Machine, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait_for_upload(trainer: Trainer, *_: object) -> None:
        """Each one is there before the next one is saved."""
        path = trainer.checkpoint_callback.best_model_path  # type: ignore[union-attr]
        if path:
            wait_until(lambda: f"checkpoints/{Path(path).name}/manifest.json" in objects(saved_run(trainer)))

    with monkeypatch.context() as patch:
        patch.setattr(CachedFolder, "_delete", lambda folder, name: None)
        run = saved_run(fitted(url, 3, before_step=wait_for_upload, save_last=False))
    assert len([name for name in objects(run) if name.endswith("manifest.json")]) == 6
    machine("second")
    fitted(url, 4, ckpt_path="auto", save_last=False)
    assert {name.split("/")[1] for name in objects(run) if ".ckpt/" in name} == {"epoch=3-step=16.ckpt"}


def test_what_a_run_without_a_checkpoint_has_left_is_deleted(machine: Machine, url: str) -> None:
    store = open_store(f"{url}/phalanx_logs/version_0")
    store.put("run.id", b"0123456789abcdef")
    store.put(f"checkpoints/last.ckpt/{1:016x}/model-00000.safetensors", b"half")
    run = saved_run(fitted(url, 1, ckpt_path="auto"))
    assert run == f"{url}/phalanx_logs/version_1"
    assert list(store.list()) == ["run.id"]


def test_two_machines_do_not_take_the_same_version(machine: Machine, url: str) -> None:
    runs = []
    for name in ("first", "second"):
        machine(name)
        local_place(f"{url}/phalanx_logs").mkdir(parents=True, exist_ok=True)
        runs.append(saved_run(fitted(url, 1)))
    assert runs == [f"{url}/phalanx_logs/version_{number}" for number in range(2)]


def test_a_run_that_another_machine_writes_is_refused(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "_POLL_SECONDS", 0.05)
    run = saved_run(fitted(f"file://{tmp_path}/bucket", 1))
    store = open_store(run)
    ended = threading.Event()

    def say() -> None:
        store.put(lease.NAME, json.dumps({"host": "elsewhere", "pid": 1, "time": time.time()}).encode())

    def renew() -> None:
        while not ended.wait(0.02):
            say()

    say()
    renewing = threading.Thread(target=renew)
    renewing.start()
    try:
        with refuses(StorageError, "is being written by process 1 on elsewhere"):
            fitted(f"file://{tmp_path}/bucket", 2, ckpt_path="auto")
    finally:
        ended.set()
        renewing.join()
    monkeypatch.setattr(lease, "_COUNTS_SECONDS", 0.3)
    assert fitted(f"file://{tmp_path}/bucket", 2, ckpt_path="auto").global_step == 8


def test_a_service_that_fails_and_goes_away_is_waited_for(
    bucket: Bucket, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    # The first requests of a fit are answered.
    bucket.faults = Faults(failing=0.05)
    run = saved_run(fitted(f"s3://{NAME}/failing", 4))
    machine("second")
    assert library.verify(f"{run}/checkpoints/last.ckpt") == []


def test_checkpoints_of_programs_are_in_buckets(machine: Machine, url: str) -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    model = fabric.setup(nn.Linear(3, 1))
    fabric.save(f"{url}/loop.ckpt", {"model": model, "step": 4})
    machine("second")
    other = fabric.setup(nn.Linear(3, 1))
    assert fabric.load(f"{url}/loop.ckpt", {"model": other}) == {"step": 4}
    torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)
    trainer = fitted(url, 1)
    trainer.save_checkpoint(f"{url}/mine.ckpt")
    machine("third")
    assert [one.path.name for one in library.checkpoints(url)] == ["loop.ckpt", "mine.ckpt"]
    loaded = Tiny.load_from_checkpoint(f"{url}/mine.ckpt")
    torch.testing.assert_close(dict(loaded.state_dict()), weights_of(trainer), rtol=0, atol=0)


def test_memory_is_a_bucket_too(machine: Machine) -> None:
    run = saved_run(fitted("memory://fits", 2))
    machine("second")
    assert library.verify(f"{run}/checkpoints/last.ckpt") == []
    assert fitted("memory://fits", 3, ckpt_path="auto").global_step == 12


def test_a_deleted_cache_deletes_nothing(machine: Machine, url: str) -> None:
    run = saved_run(fitted(url, 1))
    before = objects(run)
    shutil.rmtree(machine("first"))
    assert library.verify(f"{run}/checkpoints/last.ckpt") == []
    assert objects(run) == before


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("s4://runs/one", "the unknown protocol 's4'"),
        ("s3://key:secret@runs/one", "has a password in it"),
        ("memory://runs/../one", "has '..' in it"),
        ("gs://runs/one", "needs a package that is not installed"),
    ],
)
def test_urls_are_checked_before_anything_starts(given: str, message: str) -> None:
    with refuses(ConfigurationError, message) as refused:
        Trainer(default_root_dir=given)
    assert "secret" not in str(refused.value)


def test_a_missing_bucket_ends_the_fit_before_its_first_step(bucket: Bucket, machine: Machine) -> None:
    with refuses(StorageError, "there is no bucket 'nowhere'"):
        fitted("s3://nowhere/runs", 1)


def test_what_is_written_to_paths_alone_refuses_urls(machine: Machine, tmp_path: Path) -> None:
    trainer = fitted(tmp_path, 1)
    last = trainer.checkpoint_callback.last_model_path  # type: ignore[union-attr]
    with refuses(ConfigurationError, "is a URL, and this is written to a local path"):
        library.consolidate(last, f"file://{tmp_path}/weights")


def test_damage_in_the_bucket_is_found(machine: Machine, tmp_path: Path) -> None:
    run = saved_run(fitted(f"file://{tmp_path}/bucket", 1))
    last = next(Path(tmp_path, "bucket").rglob("last.ckpt"))
    weights = next(last.rglob("model-*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    machine("second")
    with refuses(CheckpointError, "does not match its checksum"):
        library.weights(f"{run}/checkpoints/last.ckpt")


def test_commands_read_runs_in_a_bucket(machine: Machine, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = saved_run(fitted(url, 2, save_top_k=-1))
    machine("second")

    def shown(*arguments: str) -> str:
        capsys.readouterr()
        assert main(list(arguments)) == 0
        return capsys.readouterr().out

    assert run in shown("runs", url)
    assert "finished at step 8" in shown("why", run)
    assert "last.ckpt" in shown("checkpoint", "list", run)
    assert "is good" in shown("checkpoint", "verify", f"{run}/checkpoints/last.ckpt")
    assert "train_loss" in shown("report", run)
    assert not any(path.suffix == ".safetensors" for path in machine("second").rglob("*"))
    # What a command changes is changed in the bucket.
    assert "goes back from step 8 to step 4" in shown("rewind", run, "--to", "4")
    machine("third")
    again = fitted(url, 2, ckpt_path="auto")
    assert again.global_step == 8
    assert "went back to" in shown("why", run)


def test_every_command_of_the_page_runs(bucket: Bucket, machine: Machine) -> None:
    bucket.client.create_bucket(Bucket="bucket")
    fitted("s3://bucket/runs", 1)
    machine("second")
    commands = [line.split()[1:] for line in PAGE.read_text().splitlines() if line.startswith("    phalanx ")]
    assert len(commands) > 4
    assert [main(each) for each in commands] == [0] * len(commands)
