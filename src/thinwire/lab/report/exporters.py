"""A run's numbers of the moment for programs that watch many runs: Prometheus asks for them, OpenTelemetry is sent them.

Both get `numbers(snapshot(folder))` as gauges with the label `run`: `thinwire_loss` for Prometheus, `thinwire.loss` for
OpenTelemetry, whose collectors write the one as the other.
"""

from __future__ import annotations

from typing import Any

from ...algorithm import require


def numbers(seen: dict[str, Any]) -> dict[str, float]:
    """Every number of a run's snapshot by name: those of the last row, whether it is finished, and the seconds since that row.

    Example:
        >>> numbers({"finished": False, "age_seconds": 3.5, "now": {"step": 20, "loss": None, "levels": [-1.0, 1.0]}})
        {'step': 20, 'finished': 0, 'age_seconds': 3.5}
    """
    values = seen["now"] | {"finished": int(seen["finished"]), "age_seconds": seen["age_seconds"]}
    return {name: value for name, value in values.items() if isinstance(value, (int, float))}


def prometheus(seen: dict[str, Any]) -> bytes:
    """The numbers in Prometheus' text format.

    Raises:
        ModuleNotFoundError: prometheus_client is not installed.
    """
    from prometheus_client import CollectorRegistry, Gauge, generate_latest

    # The global registry refuses a second gauge of the same name, so each answer has its own.
    registry = CollectorRegistry()
    for name, value in numbers(seen).items():
        gauge = Gauge(f"thinwire_{name}", f"{name} of the run", ["run"], registry=registry)
        gauge.labels(seen["name"]).set(value)
    return generate_latest(registry)


class OpenTelemetry:
    """Sends the numbers to an OpenTelemetry collector by OTLP over HTTP.

    The variables of OpenTelemetry configure it: OTEL_EXPORTER_OTLP_ENDPOINT is the collector, by default
    http://localhost:4318; OTEL_METRIC_EXPORT_INTERVAL the milliseconds between two messages, by default a minute.

    Raises:
        ValueError: the package is not installed.
    """

    def __init__(self) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
            from opentelemetry.sdk.metrics import MeterProvider
            from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        except ImportError as error:
            require(
                False,
                f"--otlp needs a package that cannot be imported ({error}); pip install "
                "opentelemetry-exporter-otlp-proto-http, or leave --otlp out",
            )
        self._provider = MeterProvider([PeriodicExportingMetricReader(OTLPMetricExporter())])
        self._meter = self._provider.get_meter("thinwire")
        self._gauges: dict[str, Any] = {}

    def set(self, seen: dict[str, Any]) -> None:
        """Take over the numbers of a snapshot; the next message has them."""
        for name, value in numbers(seen).items():
            if name not in self._gauges:
                self._gauges[name] = self._meter.create_gauge(f"thinwire.{name}")
            self._gauges[name].set(value, {"run": seen["name"]})

    def close(self) -> None:
        """Send the last numbers."""
        self._provider.shutdown()
