"""``PrometheusLogger`` and ``OpenTelemetryLogger``: what a run shows of itself to others while it trains."""

from __future__ import annotations

import copy
import socket
import urllib.request
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
from messages import refuses
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client.parser import text_string_to_metric_families
from ranks import run_on_ranks, wait_until
from small_fits import Tiny, capturing, loader, quiet_trainer

from phalanx import Trainer
from phalanx.callbacks import LambdaCallback
from phalanx.errors import ConfigurationError
from phalanx.loggers import CSVLogger, OpenTelemetryLogger, PrometheusLogger

Samples = dict[str, dict[tuple[tuple[str, str], ...], float]]


def scraped(url: str) -> Samples:
    """Return the samples that Prometheus would collect, by name and labels."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        text = answer.read().decode()
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        assert family.type == "gauge"
        assert family.documentation
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def only(samples: Samples, name: str) -> float:
    (value,) = samples[name].values()
    return value


class Scrape(LambdaCallback):
    """Scrapes a logger at the end of an epoch, once it serves what was logged before."""

    def __init__(
        self, logger: PrometheusLogger, epoch: int = 0, expected: str = "phalanx_metric_train_loss_step"
    ) -> None:
        super().__init__()
        self.logger, self.epoch, self.expected = logger, epoch, expected
        self.url = ""
        self.samples: Samples = {}

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == self.epoch + 1 and trainer.is_global_zero:
            wait_until(lambda: self.logger.experiment)
            self.url = str(self.logger.experiment)
            wait_until(lambda: self.expected in scraped(self.url) and "phalanx_steps" in scraped(self.url))
            self.samples = scraped(self.url)


def fit(
    root: Path, logger: Any, callback: Any = None, ckpt_path: str | None = None, **settings: Any
) -> tuple[Trainer, list[str]]:
    """Train; return the Trainer and what it told the person."""
    settings = {"max_epochs": 2, "log_every_n_steps": 1, **settings}
    trainer = quiet_trainer(root, [callback or LambdaCallback()], logger=logger, **settings)
    notes = capturing(trainer)
    trainer.fit(Tiny(), loader(), ckpt_path=ckpt_path)
    return trainer, notes


def test_a_fit_serves_what_it_has_logged_until_its_end(tmp_path: Path) -> None:
    logger = PrometheusLogger(port=0)
    scrape = Scrape(logger, expected="phalanx_metric_train_loss_epoch")
    _, notes = fit(tmp_path, logger, scrape)
    samples, run = scrape.samples, ("run", "phalanx_logs/version_0")
    assert samples["phalanx_metric_train_loss_step"].keys() == {(("metric", "train_loss_step"), run)}
    assert only(samples, "phalanx_metric_train_loss_epoch") > 0
    assert set(samples["phalanx_logged_step"].values()) == {3.0}
    assert samples["phalanx_state"][run, ("state", "running")] == 1
    assert samples["phalanx_steps"] == {(run,): 8.0}
    assert f"PrometheusLogger: {scrape.url}" in notes
    assert "phalanx_metric_epoch" not in samples
    assert logger.experiment is None
    with pytest.raises(URLError):
        scraped(scrape.url)


def served_by(root: Path) -> tuple[str | None, Samples]:
    logger = PrometheusLogger(port=0)
    scrape = Scrape(logger)
    trainer, _ = fit(root, logger, scrape, devices=2)
    assert trainer.world_size == 2
    return scrape.url, scrape.samples


def test_rank_0_alone_serves(tmp_path: Path) -> None:
    (url, samples), other = run_on_ranks(2, served_by, tmp_path)
    assert url
    assert other == ("", {})
    assert len(samples["phalanx_metric_train_loss_step"]) == 1


def test_a_resumed_run_serves_again(tmp_path: Path) -> None:
    logger = PrometheusLogger(port=0)
    first, _ = fit(tmp_path, [logger, CSVLogger()], Scrape(logger), enable_checkpointing=True)
    scrape = Scrape(logger, 2)
    path = str(first.checkpoint_callback.last_model_path or first.checkpoint_callback.best_model_path)  # type: ignore
    fit(tmp_path, [logger, CSVLogger()], scrape, ckpt_path=path, max_epochs=4, enable_checkpointing=True)
    assert max(scrape.samples["phalanx_logged_step"].values()) >= 11


def test_a_port_that_is_taken_is_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        trainer, notes = fit(tmp_path, PrometheusLogger(port=port))
    assert trainer.state.finished
    (note,) = [note for note in notes if "PrometheusLogger" in note]
    assert note.startswith(f"PrometheusLogger: port {port} of 127.0.0.1 cannot be used (")
    assert note.endswith("give another port, or 0 for a free one. This run is not served.")


def test_names_that_prometheus_does_not_allow_keep_the_original_as_a_label(tmp_path: Path) -> None:
    logger = PrometheusLogger(port=0, prefix="a")
    logger.attach(tmp_path, "digits", 3)
    logger.log_metrics({"val/loss": 0.5, "val_loss": 0.25, "größe %": float("nan"), "epoch": 1}, step=7)
    samples = scraped(str(logger.experiment))
    copied = copy.deepcopy(logger)
    logger.finalize("success")
    run = ("run", "digits/version_3")
    assert samples["phalanx_metric_a_val_loss"] == {
        (("metric", "a-val/loss"), run): 0.5,
        (("metric", "a-val_loss"), run): 0.25,
    }
    (value,) = samples["phalanx_metric_a_gr__e__"].values()
    assert value != value
    assert samples["phalanx_step"] == {(run,): 8.0}
    assert copied.experiment is None


@pytest.mark.parametrize(
    ("arguments", "shown"), [({"port": 70000}, "port=70000"), ({"addr": ""}, "addr=''"), ({"port": True}, "port=True")]
)
def test_what_is_no_port_or_address_is_refused(arguments: dict[str, Any], shown: str) -> None:
    with refuses(ConfigurationError, shown):
        PrometheusLogger(**arguments)


# ---- OpenTelemetry --------------------------------------------------------------------------------------------------


def gauges(reader: InMemoryMetricReader) -> dict[str, list[tuple[float, dict[str, Any]]]]:
    data: Any = reader.get_metrics_data()
    return {
        metric.name: [(point.value, dict(point.attributes)) for point in metric.data.data_points]
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


def test_the_newest_values_are_gauges_of_opentelemetry(tmp_path: Path) -> None:
    provider = MeterProvider([reader := InMemoryMetricReader()])
    logger = OpenTelemetryLogger(provider)
    fit(tmp_path, [logger, csv := CSVLogger()])
    found = gauges(reader)
    last = (Path(csv.log_dir) / "metrics.csv").read_text().splitlines()
    run = {"run": "phalanx_logs/version_0"}
    ((value, attributes),) = found["phalanx.metric.train_loss_epoch"]
    assert attributes == {**run, "metric": "train_loss_epoch"}
    assert f"{value!r}" in last[-1]
    assert found["phalanx.step"] == [(8, run)]
    assert found["phalanx.epoch"] == [(1.0, run)]
    provider.shutdown()


def test_a_program_without_a_provider_is_told_once(tmp_path: Path) -> None:
    _, notes = fit(tmp_path, "opentelemetry")
    (note,) = [note for note in notes if "OpenTelemetryLogger" in note]
    assert "set_meter_provider" in note


def test_media_are_left_out_once(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, [LambdaCallback()], logger="opentelemetry", max_epochs=1)
    notes = capturing(trainer)

    class Shows(Tiny):
        def on_train_epoch_end(self) -> None:
            for logger in 2 * self.loggers:
                logger.log_text("text", "hello")

    trainer.fit(Shows(), loader())
    assert [note for note in notes if "leaves out texts" in note] == [
        "OpenTelemetryLogger leaves out texts: give another logger beside it."
    ]
    assert not list(tmp_path.rglob("media"))
