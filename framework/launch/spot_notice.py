"""Notices of machines that are taken back: spot instances of AWS, GCP and Azure, by the metadata of the machine.

Each service announces the end on a local address some time before it: two minutes on AWS, thirty seconds on GCP and
Azure. A thread asks every five seconds, and makes all ranks save and end as a signal does.

Sources: "Spot Instance interruption notices" of Amazon EC2, "Preemptible VM instances" of Compute Engine, and
"Scheduled Events" of Azure virtual machines.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import ConfigurationError, unknown
from ..system.environment import library_variable

if TYPE_CHECKING:
    from ..distributed.control import Triggers

AUTO = "auto"
NOTICE = "spot notice"
INTERVAL_SECONDS = 5.0
_ANSWER_SECONDS = 2.0
_VENDOR = Path("/sys/class/dmi/id/sys_vendor")


class _Metadata:
    """The metadata service of a machine, which is reached without proxies."""

    def __init__(self, address: str) -> None:
        # Of 20 ms, which a program without notices would pay at its start.
        from urllib.request import ProxyHandler, build_opener

        self._address = address.rstrip("/")
        self._opener = build_opener(ProxyHandler({}))

    def answer(self, path: str, headers: Mapping[str, str], method: str = "GET") -> str | None:
        """Return the answer to a request; None if there is none, or an error such as 404."""
        from urllib.request import Request

        request = Request(self._address + path, headers=dict(headers), method=method)
        try:
            with self._opener.open(request, timeout=_ANSWER_SECONDS) as answer:
                text: str = answer.read().decode("utf-8", "replace")
                return text
        except (OSError, ValueError):
            return None


def _aws() -> Callable[[], bool]:
    metadata = _Metadata(library_variable("AWS_EC2_METADATA_SERVICE_ENDPOINT") or "http://169.254.169.254")

    def is_ending() -> bool:
        token = metadata.answer("/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT")
        headers = {} if token is None else {"X-aws-ec2-metadata-token": token}
        # 404 until the end is announced.
        return metadata.answer("/latest/meta-data/spot/instance-action", headers) is not None

    return is_ending


def _gcp() -> Callable[[], bool]:
    metadata = _Metadata(f"http://{library_variable('GCE_METADATA_HOST') or 'metadata.google.internal'}")
    headers = {"Metadata-Flavor": "Google"}
    return lambda: metadata.answer("/computeMetadata/v1/instance/preempted", headers) == "TRUE"


def _azure() -> Callable[[], bool]:
    metadata = _Metadata(library_variable("AZURE_METADATA_HOST") or "http://169.254.169.254")

    def is_ending() -> bool:
        text = metadata.answer("/metadata/scheduledevents?api-version=2020-07-01", {"Metadata": "true"})
        try:
            events = json.loads(text or "{}").get("Events", [])
            return any(event.get("EventType") == "Preempt" for event in events)
        except (AttributeError, TypeError, ValueError):
            return False

    return is_ending


_SERVICES = {"aws": _aws, "gcp": _gcp, "azure": _azure}
_VENDORS = {"amazon ec2": "aws", "google": "gcp", "microsoft corporation": "azure"}


def check_service(name: str, value: object) -> str | bool:
    """Check the argument that selects the metadata service to poll, and return it.

    Raises:
        ConfigurationError: it is neither "auto", nor False, nor a known service.
    """
    if value is False or value == AUTO:
        return value
    if not isinstance(value, str):
        raise ConfigurationError(f"{name}={value!r} must be 'auto', the name of a service, or False.")
    if value not in _SERVICES:
        raise unknown(name, value, [AUTO, *_SERVICES])
    return value


class SpotNotices:
    """Asks whether this machine is about to be taken back, within its context.

    Args:
        service: "aws", "gcp", "azure", "auto" for that of the machine, if it is one of them, or False for none.
    """

    def __init__(self, service: str | bool) -> None:
        self._service = _service_of_machine() if service == AUTO else service or None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> SpotNotices:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def report_to(self, triggers: Triggers, trigger: str) -> None:
        """Begin to ask. One rank of each machine is enough, as the signal reaches all ranks."""
        if not isinstance(self._service, str):
            return
        is_ending = _SERVICES[self._service]()

        def ask() -> None:
            while not is_ending():
                if self._ended.wait(INTERVAL_SECONDS):
                    return
            triggers.post(trigger, NOTICE)

        self._thread = threading.Thread(target=ask, daemon=True, name="phalanx-notices")
        self._thread.start()


def _service_of_machine() -> str | None:
    try:
        return _VENDORS.get(_VENDOR.read_text(encoding="utf-8").strip().lower())
    except (OSError, ValueError):
        return None
