"""`thinwire doctor` as its users meet it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading

import pytest
from helpers.command import TORCHRUN, python, thinwire
from helpers.ports import free_port

import thinwire as tw
from thinwire.lab.cli import doctor, main
from thinwire.plan import Lines
from thinwire.plan.doctor import Host

QUICK = ["--seconds", "0.5", "--megabytes", "0.5", "--parameters", "1M"]


def test_one_host_alone_has_facts_of_its_own(tmp_path, capsys):
    file = tmp_path / "doctor.json"
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert main(["doctor", "--json", str(file), "--speed"]) == 0
        port = server.getsockname()[1]
    printed, found = capsys.readouterr().out, json.loads(file.read_text())
    assert "Hosts" in printed and "wrong" in printed and "Mb/s" not in printed
    host = Host.of(found["hosts"][0])
    assert host.name == socket.gethostname() and host.versions["thinwire"] == tw.__version__
    assert host.cores == len(os.sched_getaffinity(0)) and host.speeds["flops"] > 0
    assert f"127.0.0.1:{port}" in host.listening and host.interface is not None


@pytest.mark.parametrize(("megabytes", "is_told"), [(8.0, True), (64.0, False)])
def test_messages_that_are_too_short_for_a_long_line_are_told(megabytes, is_told, capsys):
    hosts = [Host(f"node{i}", {}, (), f"10.0.0.{i}") for i in range(2)]
    lines = Lines.of_rates([[0, 8e6], [8e6, 0]], [[0, 0.1], [0.1, 0]])
    doctor._report(doctor.Doctor(workers=2, megabytes=megabytes), doctor.Diagnosis(hosts, lines, "tcp"))
    assert ("measure with --megabytes 64." in capsys.readouterr().out) == is_told


def test_two_workers_measure_their_lines_and_say_what_follows(tmp_path):
    file = tmp_path / "doctor.json"
    run = thinwire("doctor", "--workers", 2, *QUICK, "--json", file, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    for text in ("sends at most 0.5 MB", "to 1", "Round trip, ms", "--transport ", "--timeout:", "  method "):
        assert text in run.stdout, run.stdout
    found = json.loads(file.read_text())
    rates = found["lines"]["bytes_per_second"]
    assert len(rates) == 2 == len(found["hosts"]) and rates[0][1] > 0
    assert isinstance(tw.parse(found["strategy"]), tw.strategy.Strategy)
    assert {"--timeout"} < {limit["name"] for limit in found["limits"]}
    assert all(finding["remedy"] for finding in found["findings"])


def test_what_ends_the_workers_is_said_without_a_traceback(tmp_path):
    run = thinwire("doctor", "--workers", 2, *QUICK, "--transport", "tcp", cwd=tmp_path, THINWIRE_CREDENTIALS="nowhere")
    assert run.returncode == 2 and "thinwire: nowhere has no certificate.pem; make keys" in run.stderr, run.stderr
    assert "Traceback" not in run.stderr
    run = thinwire("doctor", "--workers", 2, *QUICK, "--transport", "gloo", "--timeout", "0.001", cwd=tmp_path)
    assert run.returncode == 1 and "could not connect with the others" in run.stderr, run.stderr
    assert "Traceback" not in run.stderr


def test_a_full_disk_is_no_firewall(tmp_path):
    """Rank 1 said that it could not connect with the others."""
    full = "import os, sys; os.dup2(os.open('/dev/full', os.O_WRONLY), 1); "
    program = full + "from thinwire.lab.cli import main; sys.exit(main())"
    run = python("-c", program, "doctor", "--workers", 2, *QUICK, cwd=tmp_path)
    assert (run.returncode, run.stderr) == (
        1,
        "thinwire: cannot write the output: No space left on device; free some space\n",
    )


def test_workers_of_a_launcher_print_one_diagnosis(tmp_path):
    command = ["--nproc-per-node", 3, "-m", "thinwire", "doctor", *QUICK, "--transport", "tcp"]
    run = python(*TORCHRUN, *command, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("What follows") == 1 and "--transport tcp, " in run.stdout


def test_a_worker_that_never_comes_is_a_line_and_not_a_hang(tmp_path):
    port = free_port()
    alone = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for rank, why in (
        (0, "rank 1 did not come to the store within 2 seconds"),
        (1, f"worker 0 did not answer at 127.0.0.1:{port} within 2 seconds (Connection refused)"),
    ):
        alone["RANK"] = str(rank)
        run = thinwire("doctor", "--timeout", 2, cwd=tmp_path, MASTER_PORT=str(port), **alone)
        assert run.returncode == 1 and "Hosts" in run.stdout
        said = run.stderr.strip().splitlines()[-1]
        assert said.startswith(f"thinwire: rank {rank} could not connect with the others: {why}"), run.stderr


def test_an_address_where_something_else_answers_is_one_line(tmp_path):
    """PyTorch printed a stack of C++ functions before it. A process of its own: what it logs is set when it is imported."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:  # the test is over
                    return
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
        command = [sys.executable, "-m", "thinwire", "doctor", "--timeout", "1"]
        done = subprocess.run(command, env=os.environ | place, capture_output=True, text=True, timeout=200)
        server.shutdown(socket.SHUT_RDWR)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert "worker 1 does not reach the store at 127.0.0.1:" in done.stderr


def test_mistakes_are_one_line(capsys):
    for options, message in (
        (["--transport", "pigeon"], "pigeon"),
        (["--workers", "0"], "workers must be an integer, 1 or more"),
        (["--seconds", "nan"], "seconds must be above 0 and finite, got nan"),
        (["--compute", "-1"], "compute must be at least 0 and finite, got -1.0 seconds"),
        (["--parameters", "many"], "cannot read the number of parameters"),
    ):
        assert main(["doctor", *options]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
