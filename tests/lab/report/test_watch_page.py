"""`thinwire watch` beside a run that is being written, finished or gone, in its three forms."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from helpers.program import wait_until
from helpers.report_runs import write_run
from helpers.schemas import lost
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from prometheus_client.parser import text_string_to_metric_families

from thinwire.lab.cli import main
from thinwire.lab.report.exporters import prometheus
from thinwire.lab.report.watch import MAX_CALLERS, MAX_ROWS, figures, server, snapshot, sparkline, state_of
from thinwire.lab.train.results.metrics_files import COLUMNS

DASHBOARD = Path(__file__).parents[3] / "examples" / "watch" / "grafana.json"
ROWS = [
    {
        "step": 10,
        "loss": 2.0,
        "bytes_sent": 1_000_000,
        "dense_fp32_bytes": 8_000_000,
        "seconds": 1.0,
        "wait_seconds": 0.5,
    },
    {
        "step": 19,
        "loss": 1.5,
        "test_accuracy": 0.5,
        "bytes_sent": 2_000_000,
        "dense_fp32_bytes": 16_000_000,
        "seconds": 2.0,
    },
    {
        "step": 20,
        "loss": 1.0,
        "bytes_sent": 8_000_000,
        "dense_fp32_bytes": 24_000_000,
        "seconds": 4.0,
        "wait_seconds": 0.5,
    },
]


@pytest.fixture
def run(tmp_path):
    """A run that is under way: it has no summary, and its last row is written in part."""
    (tmp_path / "config.json").write_text(
        json.dumps({"strategy": "Gradients(Mean())", "recipe": "digits", "workers": 2})
    )
    rows = "".join(json.dumps(row) + "\n" for row in ROWS)
    (tmp_path / "metrics.jsonl").write_text(rows + '{"step": 21, "los')
    return tmp_path


def get(serving, path):
    url = f"http://127.0.0.1:{serving.server_address[1]}{path}"
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.headers.get_content_type(), answer.read().decode()


@pytest.fixture
def serving(run):
    with server(run, "127.0.0.1", 0) as made:
        thread = threading.Thread(target=made.serve_forever, daemon=True)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def test_callers_that_say_nothing_take_bounded_room_and_time(serving, monkeypatch):
    """More than it hears at once are sent away at once, the others after a while; then it answers again."""
    monkeypatch.setattr(serving.RequestHandlerClass, "timeout", 1.0)
    address = serving.server_address[:2]
    silent = [socket.create_connection(address) for _ in range(MAX_CALLERS + 8)]
    for one in silent:
        one.settimeout(60)
        with contextlib.suppress(ConnectionError):
            assert one.recv(1) == b""

    def is_answered():
        with contextlib.suppress(OSError):  # a caller's place becomes free after the caller sees its end
            return '"step": 20' in get(serving, "/run.json")[1]

    before = threading.active_count()
    wait_until(is_answered, "an answer")
    assert threading.active_count() <= before + MAX_CALLERS


def test_the_moment_has_the_last_rows_and_the_rates_between_them(run):
    now = snapshot(run)["now"]
    assert now["step"] == 20 and now["test_accuracy"] == 0.5  # of an earlier row
    assert now["megabytes_per_second"] == pytest.approx((8 - 2) / 2) and now["waiting"] == pytest.approx(0.5 / 2)


def test_the_state_follows_the_files(run, tmp_path):
    assert state_of(snapshot(run)) == "running"
    hours_ago = time.time() - 7300
    os.utime(run / "metrics.jsonl", (hours_ago, hours_ago))
    assert state_of(snapshot(run)) == "no row for 2 h"
    write_run(tmp_path / "done", 0.9, 4e8, strategy="Gradients(Mean())", name="done")
    assert state_of(snapshot(tmp_path / "done")) == "finished"
    (run / "metrics.jsonl").unlink()
    assert snapshot(run)["now"] == {}  # before its first row


def test_a_run_with_a_damaged_summary_has_not_finished(run, capsys):
    for text in ("{", "[]", "{}", '{"final": 3}', '{"final": {"test_accuracy": "high"}}'):
        (run / "summary.json").write_text(text)
        assert state_of(snapshot(run)) == "summary.json is damaged"
        assert not snapshot(run)["finished"]
    assert main(["watch", str(run), "--once"]) == 0
    shown = capsys.readouterr().out
    assert "summary.json is damaged" in shown and "50.0 %" in shown  # the numbers of the run are whole


@pytest.mark.parametrize("key", ["seconds", "bytes_sent", "wait_seconds", "loss"])
@pytest.mark.parametrize("place", [-2, -1])
def test_null_where_a_run_diverged_leaves_out_what_follows_from_it(key, place, run, capsys):
    rows = [row | {"compute_seconds": 0.5} for row in ROWS]
    rows[place][key] = None
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    seen = snapshot(run)
    assert ("megabytes_per_second" in seen["now"]) == (key in ("wait_seconds", "loss"))
    json.dumps(seen | {"figures": figures(seen)}, allow_nan=False)  # a browser reads no NaN
    assert main(["watch", str(run), "--once"]) == 0
    assert "phases of rank 0" in capsys.readouterr().out


def test_long_runs_are_thinned(run):
    (run / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(10 * MAX_ROWS)))
    rows = snapshot(run)["rows"]
    assert MAX_ROWS // 2 < len(rows) <= MAX_ROWS and rows[0]["step"] == 0


def test_the_terminal_shows_the_moment(run, capsys):
    assert main(["watch", str(run), "--once"]) == 0
    shown = capsys.readouterr().out
    for text in ("running", "50.0 %", "8 MB", "3 times", "3 MB/s", sparkline([2.0, 1.5, 1.0], 60), "Gradients(Mean())"):
        assert text in shown, text


def test_the_terminal_shows_brackets_in_names(tmp_path, run, capsys):
    (run / "config.json").write_text(json.dumps({"strategy": "Gossip(Mix(own[red]))"}))
    named = run.rename(tmp_path.with_name("run [b] ["))
    assert main(["watch", str(named), "--once"]) == 0
    shown = capsys.readouterr().out
    assert "run [b] [: running" in shown and "own[red]" in shown


def test_the_page_and_its_data(serving):
    kind, page = get(serving, "/")
    assert kind == "text/html" and "http" not in page.replace(
        "<!doctype html>", ""
    )  # nothing is fetched from elsewhere
    kind, body = get(serving, "/run.json")
    seen = json.loads(body)
    assert kind == "application/json" and seen["state"] == "running" and seen["rows"] == ROWS
    assert ["loss", "1"] in seen["figures"]


def test_prometheus_reads_the_moment(serving, run):
    families = {family.name: family for family in text_string_to_metric_families(get(serving, "/metrics")[1])}
    for name, value in ROWS[-1].items():
        (sample,) = families[f"thinwire_{name}"].samples
        assert sample.value == value and sample.labels == {"run": run.name}
    assert families["thinwire_finished"].samples[0].value == 0


@pytest.fixture
def collector(monkeypatch):
    """An OpenTelemetry collector: the messages that it is sent, read by the protocol's own classes."""
    messages = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
            messages.append((self.path, ExportMetricsServiceRequest.FromString(body)))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as serving:
        thread = threading.Thread(target=serving.serve_forever, daemon=True)
        thread.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{serving.server_address[1]}")
        yield messages
        serving.shutdown()
        thread.join()


def test_opentelemetry_is_sent_the_numbers_that_prometheus_reads(run, collector, capsys):
    assert main(["watch", str(run), "--once", "--otlp"]) == 0
    assert "50.0 %" in capsys.readouterr().out
    path, message = collector[-1]
    assert path == "/v1/metrics"
    sent = {}
    for metric in message.resource_metrics[0].scope_metrics[0].metrics:
        (point,) = metric.gauge.data_points
        assert [(label.key, label.value.string_value) for label in point.attributes] == [("run", run.name)]
        sent[metric.name] = point.as_double if point.WhichOneof("value") == "as_double" else point.as_int
    asked = {family.name: family for family in text_string_to_metric_families(prometheus(snapshot(run)).decode())}
    assert sent.keys() == {name.replace("thinwire_", "thinwire.") for name in asked}
    age = sent.pop("thinwire.age_seconds")
    assert 0 <= age <= asked["thinwire_age_seconds"].samples[0].value
    for name, value in sent.items():
        assert value == pytest.approx(asked[name.replace(".", "_")].samples[0].value)


@pytest.mark.parametrize(("other", "remedy"), [("--otlp", "start one for each"), ("--once", "leave out --once")])
def test_serving_goes_with_no_other_way_to_show_a_run(other, remedy, run, capsys):
    assert main(["watch", str(run), "--serve", "0", other]) == 2
    assert remedy in capsys.readouterr().err


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Grafana's classes need Python 3.11")
def test_the_dashboard_is_one_of_grafanas_and_asks_for_metrics_that_there_are(run):
    """By Grafana's own classes; and against what Prometheus gets of a run whose rows have every column."""
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    (run / "metrics.jsonl").write_text(
        "".join(json.dumps(dict.fromkeys(COLUMNS, step) | {"step": step, "seconds": step}) + "\n" for step in (1, 2))
    )
    given = {family.name for family in text_string_to_metric_families(prometheus(snapshot(run)).decode())}
    register_default_plugins()
    written = json.loads(DASHBOARD.read_text())
    made = Dashboard.from_json(written)
    assert list(lost(written, json.loads(JSONEncoder().encode(made)))) == []  # Grafana knows every field
    expressions = [target["expr"] for panel in written["panels"] for target in panel["targets"]]
    queries = [variable["query"] for variable in written["templating"]["list"]]
    assert {name for text in (*expressions, *queries) for name in re.findall(r"thinwire_\w+", text)} <= given
    assert all(re.search(r'thinwire_\w+\{run=~"\$run"\}', text) for text in expressions)
    cells = [cell for panel in made.panels for cell in _cells(panel.grid_pos)]
    assert len(cells) == len(set(cells)) == 24 * (1 + max(y for _, y in cells))  # no gap, and no panel covers another


def _cells(place):
    return [(x, y) for x in range(place.x, place.x + place.w) for y in range(place.y, place.y + place.h)]


def test_what_is_not_there_is_said(serving, run, capsys, tmp_path):
    for path, code in (("/other", 404), ("/run.json", 503)):
        if code == 503:
            (run / "config.json").unlink()
        with pytest.raises(urllib.error.HTTPError) as refusal:
            get(serving, path)
        assert refusal.value.code == code
    assert main(["watch", str(tmp_path / "none")]) == 2
    assert "holds no run: config.json is missing" in capsys.readouterr().err
    assert main(["watch", "--once"]) == 2
    assert "thinwire watch needs RUN (folder of the run, such as runs/digits); see" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["nine", "99999", "1.2.3.4:"])
def test_a_place_that_cannot_be_is_one_line(run, capsys, place):
    assert main(["watch", str(run), "--serve", place]) == 2
    assert f"--serve takes [ADDRESS:]PORT, such as 9100 or 0.0.0.0:9100, got '{place}'" in capsys.readouterr().err


def test_a_taken_port_is_one_line(run, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["watch", str(run), "--serve", str(taken.getsockname()[1])]) == 2
    assert "Address already in use; give another port" in capsys.readouterr().err


def test_metrics_of_an_own_task_are_shown_too(tmp_path):
    write_run(tmp_path / "run", measured={"mean_error": 3.0, "test_mean_error": 0.5})
    assert ("test mean error", "0.5") in figures(snapshot(tmp_path / "run"))
