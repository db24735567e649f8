"""Runs on machines that are taken back: they save and end once the metadata of their service says so."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from messages import refuses
from model_script import MODEL
from models import Regressor, loader, silent_trainer
from ranks import completed, started_script, wait_until

from phalanx import Trainer
from phalanx.callbacks import LambdaCallback
from phalanx.checkpoint import open_checkpoint
from phalanx.framework.core.errors import ConfigurationError, Preempted
from phalanx.framework.launch import spot_notice


class Metadata(BaseHTTPRequestHandler):
    """Answers as the metadata services of AWS, GCP and Azure do."""

    ending = threading.Event()

    def do_PUT(self) -> None:
        wanted = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds")
        self._answer("token" if self.path == "/latest/api/token" and wanted else None)

    def do_GET(self) -> None:
        ending, headers = self.ending.is_set(), self.headers
        if self.path == "/latest/meta-data/spot/instance-action" and headers.get("X-aws-ec2-metadata-token") == "token":
            self._answer(json.dumps({"action": "terminate", "time": "2026-01-01T00:02:00Z"}) if ending else None)
        elif self.path == "/computeMetadata/v1/instance/preempted" and headers.get("Metadata-Flavor") == "Google":
            self._answer("TRUE" if ending else "FALSE")
        elif self.path.startswith("/metadata/scheduledevents?api-version=") and headers.get("Metadata") == "true":
            other = {"EventId": "1", "EventType": "Freeze", "EventStatus": "Scheduled"}
            own = [{"EventId": "2", "EventType": "Preempt", "EventStatus": "Scheduled"}] if ending else []
            self._answer(json.dumps({"DocumentIncarnation": 1, "Events": [other, *own]}))
        else:
            self._answer(None)

    def _answer(self, text: str | None) -> None:
        self.send_response(404 if text is None else 200)
        self.end_headers()
        self.wfile.write((text or "").encode())

    def log_message(self, format: str, *arguments: object) -> None:
        """Print nothing."""


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The event after which the machine is taken back."""
    Metadata.ending = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    place = f"127.0.0.1:{server.server_port}"
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://{place}")
    monkeypatch.setenv("GCE_METADATA_HOST", place)
    monkeypatch.setenv("AZURE_METADATA_HOST", f"http://{place}")
    monkeypatch.setattr(spot_notice, "INTERVAL_SECONDS", 0.02)
    yield Metadata.ending
    server.shutdown()
    thread.join()
    server.server_close()


def fitting(root: Path, **settings: Any) -> Trainer:
    return silent_trainer(default_root_dir=root, enable_checkpointing=True, **settings)


@pytest.mark.parametrize("service", ["aws", "gcp", "azure"])
def test_a_notice_saves_and_ends_the_run(tmp_path: Path, metadata: threading.Event, service: str) -> None:
    def announce(trainer: Trainer, *_: object) -> None:
        if trainer.global_step == 3:
            metadata.set()

    trainer = fitting(
        tmp_path,
        max_epochs=10_000,
        preemption_notices=service,
        callbacks=[LambdaCallback(on_train_batch_start=announce)],
    )
    with pytest.raises(Preempted, match="the machine is about to be taken back: stopped after optimizer step"):
        trainer.fit(Regressor(), loader())
    saved = next(tmp_path.rglob("preempted.ckpt"))
    assert open_checkpoint(saved).document["progress"]["global_step"] == trainer.global_step >= 3


def test_a_run_without_a_notice_goes_on(tmp_path: Path, metadata: threading.Event) -> None:
    trainer = fitting(tmp_path, max_epochs=2, preemption_notices="azure")
    trainer.fit(Regressor(), loader())
    assert trainer.current_epoch == 2


def test_a_machine_of_no_service_asks_nobody(tmp_path: Path, metadata: threading.Event) -> None:
    metadata.set()
    trainer = fitting(tmp_path, max_epochs=2)
    trainer.fit(Regressor(), loader())
    assert trainer.current_epoch == 2


def test_a_service_is_found_by_the_vendor_of_the_machine(
    tmp_path: Path, metadata: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vendor").write_text("Amazon EC2\n")
    monkeypatch.setattr(spot_notice, "_VENDOR", tmp_path / "vendor")
    metadata.set()
    trainer = fitting(tmp_path, max_epochs=10_000)
    with pytest.raises(Preempted):
        trainer.fit(Regressor(), loader())


def test_an_unknown_service_is_refused() -> None:
    with refuses(ConfigurationError, "preemption_notices='amazon' is not known"):
        Trainer(preemption_notices="amazon")
    with refuses(ConfigurationError, "preemption_notices=True must be 'auto'"):
        Trainer(preemption_notices=True)


SCRIPT = f"""{MODEL}
from phalanx.callbacks import ModelCheckpoint
from phalanx.framework.launch import spot_notice

spot_notice.INTERVAL_SECONDS = 0.05
class Noticed(Model):
    def training_step(self, batch, index):
        if self.global_step == 3:
            open(sys.argv[2], "w").close()
        return super().training_step(batch, index)

trainer = Trainer(
    accelerator="cpu", strategy="fsdp", devices=2, max_epochs=100_000, preemption_notices="gcp",
    default_root_dir=sys.argv[1], callbacks=ModelCheckpoint(), enable_progress_bar=False, verbose=False,
)
trainer.fit(Noticed(), loader(64), ckpt_path="auto")
"""


def test_ranks_save_into_a_bucket_before_they_end(tmp_path: Path, metadata: threading.Event) -> None:
    begun = tmp_path / "begun"
    with started_script(SCRIPT, f"file://{tmp_path}/bucket", str(begun)) as process:
        wait_until(begun.exists, seconds=60.0)
        metadata.set()
        # The grace of GCP and Azure.
        done = completed(process, 30.0)
    assert done.returncode == 75, done.stdout
    saved = list((tmp_path / "bucket").rglob("preempted.ckpt/manifest.json"))
    assert len(saved) == 1
