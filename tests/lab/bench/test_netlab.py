"""benchmarks/netlab.py: hosts, lines, exit codes, and that nothing is ever left behind."""

from __future__ import annotations

import ast
import dataclasses
import fcntl
import json
import math
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import line_check
import lines
import netlab
import pytest
from helpers import lab
from helpers.busy import always
from netlab import Lab, LabError

NETLAB = Path(netlab.__file__)
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}  # for the helpers of the tests
CONTROLS = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
needs_bbr = pytest.mark.skipif(
    not (CONTROLS.exists() and {"bbr", "cubic"} <= set(CONTROLS.read_text().split())),
    reason="this kernel has no BBR or no CUBIC",
)


@pytest.fixture
def only_lab(tmp_path_factory):
    """Labs measure what packets meet, so no two processes of pytest have one at the same time."""
    with open(tmp_path_factory.getbasetemp().parent / "netlab.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def needs_lab(test):
    return pytest.mark.usefixtures("only_lab")(lab.needs_lab("netlab is")(test))


def _python(code: str, *options: str) -> list[str]:
    return [sys.executable, str(NETLAB), *options, "--", sys.executable, "-c", code]


def _run(code: str, *options: str) -> subprocess.CompletedProcess:
    return subprocess.run(_python(code, *options), capture_output=True, text=True, timeout=400, env=ENVIRONMENT)


def _namespaces(pid: int | None = None) -> list[str]:
    """Namespaces of the lab with this process id, or of all labs."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.splitlines()
    names = [line.split()[0] for line in listed if line.strip()]
    return [name for name in names if name.startswith(f"netlab-{pid}-" if pid else "netlab-")]


def _start_sleepers(tmp_path: Path) -> tuple[subprocess.Popen, list[int]]:
    """A lab of two hosts whose processes sleep (after writing their process ids), once both are up."""
    code = f"import os, time, pathlib; pathlib.Path(r'{tmp_path}', os.environ['RANK']).write_text(str(os.getpid()))"
    lab = subprocess.Popen(_python(code + "; time.sleep(600)"), stdout=subprocess.DEVNULL)
    files = [tmp_path / "0", tmp_path / "1"]
    _wait_until(lambda: all(file.exists() and file.read_text() for file in files))
    return lab, [int(file.read_text()) for file in files]


def _wait_until(condition, seconds: float = 400) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@needs_lab
def test_each_host_is_a_rank_with_an_address_of_its_own():
    code = """
import os, subprocess
own = subprocess.check_output(["ip", "-4", "-o", "address"], text=True)
assert f"198.18.0.{int(os.environ['RANK']) + 1}/24" in own and own.count("inet") == 2, own
names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "GLOO_SOCKET_IFNAME", "NETLAB_LINE"
print(*(os.environ[name] for name in names))
"""
    done = _run(code, "--hosts", "3", "--line", "100mbit")
    assert done.returncode == 0, done.stderr
    expected = {f"{'' if rank == 0 else f'[{rank}] '}{rank} 3 0 198.18.0.1 eth0 100mbit" for rank in range(3)}
    assert set(done.stdout.splitlines()) == expected


@needs_lab
def test_hosts_share_out_the_cores_where_there_are_enough(tmp_path):
    script = f"import os; open({str(tmp_path)!r} + '/' + os.environ['RANK'], 'w').write(str(os.sched_getaffinity(0)))"
    with Lab(hosts=2, line="1gbit") as lab:
        assert lab.run([sys.executable, "-c", script]) == 0
    first, second = (ast.literal_eval((tmp_path / str(rank)).read_text()) for rank in range(2))
    cores = os.sched_getaffinity(0)
    assert first | second == cores
    assert not first & second or len(cores) == 1


@needs_lab
@pytest.mark.parametrize(
    "line", ["5mbit", "5mbit,round_trip=30ms,jitter=2ms,loss=2%,reorder=3%"], ids=["kernel", "forwarder"]
)
def test_check_measures_what_was_asked_for(line):
    def differing():
        done = subprocess.run(
            [sys.executable, NETLAB, "--line", line, "--check", "--seconds", "0.5"],
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert len(done.stdout.splitlines()) == 10, done.stdout + done.stderr
        names = {row.split("  ")[0] for row in done.stdout.splitlines() if "DIFFERS" in row}
        assert done.returncode == bool(names)
        return names

    assert not always(differing)


@needs_lab
def test_check_says_what_differs(capfd):
    with Lab(2, "5mbit,round_trip=30ms") as lab:
        # Another delay and another loss than `lines` say: of 104 packets 16 are lost, give or take 4; 3 would pass for none.
        lab.forwarder.tell("path", 1, 0, 0.05, 0, 0.15, 0)

        def wrong():
            """What is said to differ though it does not, or the other way round, as where a busy machine sends few packets."""
            differing = line_check.check(lab, 0.5)
            said = capfd.readouterr().out
            assert differing == {row.split("  ")[0] for row in said.splitlines() if "DIFFERS" in row}
            return {"round trip", "loss, 1 to 0"} - differing | differing & {"loss, 0 to 1"}

        assert not always(wrong, tries=4)


def test_a_stream_ends_though_nothing_of_it_came(monkeypatch):
    """Where a busy machine sent nothing in time, or all of it was lost, the check waited for ever."""
    monkeypatch.setattr(line_check, "LOST_SECONDS", 0.1)
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with one, other:
        for stream in (0, 0, 1):
            one.send(struct.pack("!II", line_check.LAST, stream))
        assert [line_check.receive(other, stream)["received"] for stream in (0, 1, 2)] == [0, 0, 0]
        assert line_check.send(one, 0, 1e6, 0.0) == 1
        assert line_check.receive(other, 0) == {"rate": 0.0, "received": 1, "late": 0}


PING = """
import json, os, pathlib, socket, time
folder, rank = pathlib.Path(r"{folder}"), int(os.environ["RANK"])
own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
own.bind(("", 5000))
own.settimeout(0.05)
got, end = [], time.monotonic() + {seconds}
while time.monotonic() < end and not (folder / "stop").exists():
    for peer in range({hosts}):
        if peer != rank:
            own.sendto(f"{{rank}} {{time.monotonic()}}".encode(), (f"198.18.0.{{peer + 1}}", 5000))
    try:
        while True:
            data, address = own.recvfrom(100)
            sender, sent = data.decode().split()
            got.append((int(sender), float(sent), time.monotonic(), address[0]))
            (folder / f"{{rank}} hears").touch()
    except TimeoutError:
        pass
(folder / str(rank)).write_text(json.dumps(got))
"""


def _pinged(lab: Lab, folder: Path, seconds: float = 3.0) -> list[list]:
    """What each host received from the others: (sender, seconds when sent, seconds when received, address seen)."""
    code = PING.format(folder=folder, seconds=seconds, hosts=lab.hosts)
    assert lab.run([sys.executable, "-c", code]) == 0
    return [json.loads((folder / str(host)).read_text()) for host in range(lab.hosts)]


def _late(lab: Lab, folder: Path, seconds: Callable[[int, int], float]) -> set[tuple[int, int]]:
    """Between which hosts even the fastest packet takes much longer than so many seconds; none may take less."""
    late = set()
    for host, got in enumerate(_pinged(lab, folder)):
        for sender in set(range(lab.hosts)) - {host}:
            fastest, expected = (
                min((b - a for s, a, b, _ in got if s == sender), default=math.inf),
                seconds(host, sender),
            )
            assert expected <= fastest
            if fastest >= expected + 0.035:
                late.add((host, sender))
    return late


@needs_lab
def test_sites_have_the_line_between_them(tmp_path):
    with Lab(4, "1gbit,round_trip=80ms", sites=2) as lab:
        assert not always(lambda: _late(lab, tmp_path, lambda one, other: 0.0 if one // 2 == other // 2 else 0.040))


@needs_lab
def test_each_host_has_a_line_of_its_own(tmp_path):
    trips = (0.040, 0.080, 0.0)
    with Lab(3, ["1gbit,round_trip=40ms", "1gbit,round_trip=80ms", "1gbit,round_trip=0ms"]) as lab:
        assert not always(lambda: _late(lab, tmp_path, lambda one, other: (trips[one] + trips[other]) / 4))


@needs_lab
def test_nat_lets_out_and_lets_answers_in(tmp_path):
    with Lab(3, "1gbit", nat=[1, 2]) as lab:
        code = f"""
import os, pathlib, socket, time
rank, file = int(os.environ["RANK"]), pathlib.Path(r"{tmp_path}", os.environ["RANK"])
server = socket.create_server(("", 5000))
server.settimeout(300)
if rank == 0:
    for _ in range(2):
        connection, address = server.accept()
        connection.sendall(address[0].encode() + b"x" * 200_000)
        connection.close()
else:
    connection = None
    while connection is None:
        try:
            connection = socket.create_connection(("198.18.0.1", 5000))
        except ConnectionRefusedError:  # rank 0 does not listen yet
            time.sleep(0.02)
    data = b""
    while part := connection.recv(1 << 16):
        data += part
    assert len(data.rstrip(b"x")) + 200_000 == len(data)
    seen = data.rstrip(b"x").decode()
    try:
        other = socket.create_connection((f"198.18.0.{{4 - rank}}", 5000), timeout=1)
        file.write_text(seen + " reached")
    except TimeoutError:
        file.write_text(seen + " closed")
"""
        assert lab.run([sys.executable, "-c", code]) == 0
    assert (tmp_path / "1").read_text() == "198.18.0.2 closed"
    assert (tmp_path / "2").read_text() == "198.18.0.3 closed"


@needs_lab
@pytest.mark.parametrize("line", ["5mbit", "5mbit,round_trip=4ms"], ids=["kernel", "forwarder"])
def test_a_line_is_cut_and_mended(tmp_path, line):
    def wrong():
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        short = set()
        for host, got in enumerate(_pinged_over_a_cut(folder, line)):
            assert {sender for sender, *_ in got} == {1 - host}
            times = [at for _, _, at, _ in got]
            longest = max(b - a for a, b in zip(times, times[1:], strict=False))
            assert times[-1] - times[0] > longest + 0.2  # packets came before and after
            if longest <= 0.8:  # a busy host may read the last packets before the cut as late as in its midst
                short.add(host)
        return short

    assert not always(wrong, tries=3)


def _pinged_over_a_cut(folder: Path, line: str) -> list[list]:
    """As `_pinged`, on two hosts that hear each other before a cut of one second and after it."""
    mended = threading.Event()
    with Lab(2, line) as lab, ThreadPoolExecutor(1) as pool, pytest.MonkeyPatch.context() as monkeypatch:
        mend = lab.mend

        def mend_and_tell(host):
            mend(host)
            mended.set()

        monkeypatch.setattr(lab, "mend", mend_and_tell)
        pinged = pool.submit(_pinged, lab, folder, seconds=1000.0)
        heard = [folder / f"{host} hears" for host in range(2)]
        _wait_until(lambda: all(path.exists() for path in heard))
        with netlab.cuts(lab, ["1:0.5:1.5"]):
            assert mended.wait(300)
        for path in heard:
            path.unlink()
        # Hosts may have to look for each other's address again.
        _wait_until(lambda: all(path.exists() for path in heard))
        time.sleep(1)
        (folder / "stop").touch()
        return pinged.result()


@needs_lab
@pytest.mark.parametrize("line", ["5mbit", "5mbit,round_trip=4ms"], ids=["kernel", "forwarder"])
def test_a_line_changes_while_the_lab_runs(line):
    rates = []
    with Lab(2, line) as lab:
        for rate in (5e6, 2e6):
            lab.set_line(1, dataclasses.replace(lab.lines[1], up=rate, down=rate))
            assert not always(lambda: line_check.check(lab, 0.5))
            rates.append(lab.lines[1].up)
        if lab.forwarder is None:
            with pytest.raises(LabError, match="cannot change to delay or loss"):
                lab.set_line(1, "ocean")
    assert rates == [5e6, 2e6]


@needs_lab
def test_congestion_control_is_that_of_the_hosts(tmp_path):
    code = "import sys; print(open('/proc/sys/net/ipv4/tcp_congestion_control').read())"
    for name in ("reno", "cubic"):
        done = _run(code, "--hosts", "1", "--congestion", name)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == name


@needs_lab
@needs_bbr
@pytest.mark.parametrize("congestion", ["cubic", "bbr"])
def test_connections_of_a_long_line_multiply_and_one_endures_lost_packets(congestion):
    code = """if True:
    import os, time, torch, torch.distributed as dist
    from helpers.traffic import controls
    from thinwire.comm.transport import connect
    def known():  # by inode, as some of them close meanwhile
        return {os.fstat(connection.fileno()).st_ino: name for connection, name in controls()}
    dist.init_process_group("gloo")
    before = known()
    with connect("tcp") as comm:
        light = sum(comm.all_reduce(torch.ones(250_000)).wait().sum().item() for _ in range(20))
        few = comm.counts(1 - comm.rank).connections
        while not comm.all_true(comm.counts(1 - comm.rank).connections >= 17):
            comm.all_reduce(torch.ones(3_000_000)).wait()
        used = [name for inode, name in known().items() if inode not in before]
        until = time.monotonic() + 20
        while used.count("bbr") != 1 and time.monotonic() < until:  # those that are being made have not chosen yet
            time.sleep(0.1)
            used = [name for inode, name in known().items() if inode not in before]
        if comm.rank == 0:
            print(light, few, used.count("bbr"), used.count("cubic") >= 16, set(used) <= {"bbr", "cubic"})
    dist.destroy_process_group()"""

    def differing():
        done = _run(code, "--line", "200mbit,round_trip=80ms", "--congestion", congestion)
        assert done.returncode == 0, done.stdout + done.stderr
        light, few, *rest = done.stdout.splitlines()[-1].split()
        assert [light, *rest] == [str(20 * 2 * 250_000.0), "1", "True", "True"]
        return {"connections"} if few != "9" else set()  # others take over from one that a busy machine holds up

    assert not always(differing, tries=3)


@needs_lab
@needs_bbr
def test_others_take_over_from_the_connection_that_endures_lost_packets_if_it_is_stuck():
    """Both what is new, and what lost connections left."""
    code = """if True:
    import os, socket, time, torch, torch.distributed as dist
    from helpers.traffic import controls
    from thinwire.comm.transport import connect
    def inode(at):
        return os.fstat(at.fileno()).st_ino
    def set_rate(bytes_per_second):
        for at, name in controls():
            if comm.rank == 0 and name == "bbr":
                at.setsockopt(socket.SOL_SOCKET, 47, bytes_per_second)  # SO_MAX_PACING_RATE
    dist.init_process_group("gloo")
    before = {inode(at) for at, _ in controls()}
    with connect("tcp") as comm:
        x, theirs = torch.ones(750_000), torch.zeros(750_000)
        while not comm.all_true(comm.counts(1 - comm.rank).connections >= 9):
            comm.barrier()
        comm.exchange({1 - comm.rank: x}, {1 - comm.rank: theirs}).wait()
        set_rate(1000)
        comm.barrier()
        begin = time.monotonic()
        comm.exchange({1 - comm.rank: x}, {1 - comm.rank: theirs.zero_()}).wait()
        if comm.rank == 1:
            print(theirs.sum().item(), time.monotonic() - begin < 100)  # over the slow connection it takes longer
        comm.barrier()
        if comm.rank == 0:
            # Nothing new is to be sent. What these have sent is not acknowledged; the first connection carries what is small.
            resent, ours = comm.counts(1).resent, {inode(at): name for at, name in controls() if inode(at) not in before}
            stuck = next(number for number, name in ours.items() if name == "bbr")
            for at, _ in controls():
                if inode(at) in ours and inode(at) not in (min(ours), stuck):
                    at.shutdown(socket.SHUT_RDWR)
            until = time.monotonic() + 100
            while comm.counts(1).resent == resent and time.monotonic() < until:
                time.sleep(0.1)
            print(comm.counts(1).resent > resent)
        comm.barrier()
        set_rate(1 << 30)  # closing waits for what the connection still has
    dist.destroy_process_group()"""
    done = _run(code, "--line", "200mbit,round_trip=80ms", "--congestion", "cubic")
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert "750000.0" in words and words.count("True") == 2, done.stdout


@needs_lab
@pytest.mark.parametrize("failing_rank", [0, 1])
def test_the_first_failure_stops_the_others_and_is_returned(failing_rank):
    start = time.monotonic()
    done = _run(f"import os, sys, time; os.environ['RANK'] == '{failing_rank}' and sys.exit(7); time.sleep(600)")
    assert done.returncode == 7
    assert done.stderr == ""
    assert time.monotonic() - start < 240


@needs_lab
def test_death_by_a_signal_is_a_failure():
    done = _run("import os, time; os.environ['RANK'] == '1' and os.kill(os.getpid(), 9); time.sleep(600)")
    assert done.returncode == 128 + 9


@needs_lab
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_leave_nothing_behind(tmp_path, number):
    lab, pids = _start_sleepers(tmp_path)
    assert len(_namespaces(lab.pid)) == 3
    lab.send_signal(number)
    assert lab.wait(timeout=400) == 128 + number
    assert _namespaces(lab.pid) == []
    assert not any(_alive(pid) for pid in pids)


@needs_lab
def test_the_next_start_removes_what_a_killed_lab_left_and_spares_the_living(tmp_path):
    (tmp_path / "living").mkdir()
    (tmp_path / "killed").mkdir()
    living, living_pids = _start_sleepers(tmp_path / "living")
    killed, killed_pids = _start_sleepers(tmp_path / "killed")
    try:
        killed.kill()
        killed.wait()
        _wait_until(lambda: not any(_alive(pid) for pid in killed_pids))  # they die with their parent
        assert len(_namespaces(killed.pid)) == 3
        assert _run("pass").returncode == 0
        assert _namespaces(killed.pid) == []
        assert len(_namespaces(living.pid)) == 3
        assert all(_alive(pid) for pid in living_pids)
    finally:
        living.terminate()
        living.wait()
    assert _namespaces(living.pid) == []


@needs_lab
def test_processes_that_outlive_their_rank_are_removed_with_the_lab(tmp_path):
    file = tmp_path / "pid"
    code = f"""
import os, pathlib, subprocess, sys
if os.environ["RANK"] == "0":
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    pathlib.Path(r"{file}").write_text(str(process.pid))
"""
    assert _run(code).returncode == 0
    _wait_until(lambda: not _alive(int(file.read_text())))


@needs_lab
def test_as_a_library_it_cleans_up_after_an_exception():
    def use_and_fail():
        with Lab(hosts=2, line="1gbit") as lab:
            assert len(_namespaces(os.getpid())) == 3
            assert lab.run(["sh", "-c", "exit $CODE"], env={"CODE": "3"}) == 3
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        use_and_fail()
    assert _namespaces(os.getpid()) == []


@pytest.mark.parametrize("rate", ["", "fast", "0gbit", "-1gbit", "1", "1gb/s"])
def test_a_rate_that_is_none_is_said_so(rate):
    with pytest.raises(LabError, match="is not a rate"):
        lines.parse_rate(rate)


def test_rates_are_powers_of_ten():
    assert lines.parse_rate("2.5Gbit") == 2.5e9
    assert lines.parse_rate("10kbit") == 1e4


def test_lines_have_names_and_changes():
    assert lines.parse_line("ocean") == lines.Line(2e8, 2e8, 0.1, 0.0, 1e-3, 0.0)
    assert lines.parse_line("100mbit") == lines.Line(1e8, 1e8)
    changed = lines.parse_line("ocean, loss=1%, up=20mbit, round_trip=0.2s")
    assert changed == lines.Line(2e7, 2e8, 0.2, 0.0, 0.01, 0.0)


@pytest.mark.parametrize(("line", "words"), [
    ("sea", "'sea' is not a line: give one of lan, metro"),
    ("ocean,speed=3", "'speed' is not a value of a line: give one of up, down"),
    ("ocean,loss=2ms", "loss=2ms: give a number and no unit or %"),
    ("ocean,round_trip=100", "give a number and s or ms"),
    ("ocean,loss=100%", "below 1"),
    ("1gbit,jitter=5ms", "at most half of the round trip"),
])  # fmt: skip
def test_a_line_that_is_none_is_said_so(line, words):
    with pytest.raises(LabError, match=re.escape(words)):
        lines.parse_line(line)


@pytest.mark.parametrize(("options", "words"), [
    (["--line", "fast", "--", "true"], "'fast' is not a line"),
    (["--hosts", "0", "--", "true"], "hosts=0"),
    (["--hosts", "251", "--", "true"], "hosts=251"),
    (["--hosts", "3", "--sites", "2", "--", "true"], "sites=2"),
    (["--nat", "2", "--", "true"], "nat=[2]"),
    (["--line", "lan", "lan", "lan", "--", "true"], "3 lines for 2 hosts"),
    (["--congestion", "tahoe", "--", "true"], "congestion 'tahoe'"),
    (["--cut", "1:2", "--", "true"], "give HOST:START:SECONDS"),
])  # fmt: skip
def test_bad_input_gets_one_line_and_an_exit_code(options, words):
    done = subprocess.run([sys.executable, NETLAB, *options], capture_output=True, text=True, timeout=400)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert words in done.stderr


def test_missing_root_and_missing_tools_are_said_so(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LabError, match="needs root"):
        netlab.require_privileges()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    with pytest.raises(LabError, match="install iproute2"):
        netlab.require_privileges()
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(LabError, match="darwin"):
        netlab.require_privileges()
