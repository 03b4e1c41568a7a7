"""Show on one GPU that everything works, and how fast: in parts, each within nine minutes. Checks run side by side.

    python3 scripts/gpu.py                       list the parts
    python3 scripts/gpu.py kernels codecs        run these, then print one table of all parts that have run so far
    python3 scripts/gpu.py --dry-run all         the same without a GPU: kernels are compiled only, the rest is on the CPU;
                                                 for PyTorch's CPU build, and with a C++ compiler

It needs PyTorch for GPUs, NumPy, Triton, pytest, pytest-xdist and hypothesis, and nothing of thinwire's own environment: no
installation, no C++ compiler, no network. Results are kept in build/gpu, one file a part.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "build" / "gpu"
LIMIT_SECONDS = 9 * 60  # of a part
KERNELS = [
    f"tests/kernels/triton/check_{name}.py"
    for name in ("quantize", "levels", "dense", "sparse", "host_waits", "launches")
]
STUDY = "--device cuda --layers 10 --width 512 --context 256 --batch 32 --steps 400 --test-windows 2048 --rates 1 --minutes 6.5"
DRY_STUDY = (
    "--workers 2 --layers 1 --width 32 --context 16 --batch 1 --steps 20 --test-windows 8 "
    "--rates 1 --seeds 0 --files 200"
)


@dataclass(frozen=True)
class Part:
    """What one run shows.

    Args:
        name: of the part.
        minutes: how long it is expected to take.
        title: what it shows.
        files: checks of pytest; empty for a measurement.
        processes: of pytest; kernels compile on the CPU, side by side.
    """

    name: str
    minutes: int
    title: str
    files: tuple[str, ...] = ()
    processes: int = 8

    @property
    def is_check(self) -> bool:
        """Whether it may run beside others; what measures, and the sanitizer, run alone."""
        return bool(self.files) and self.name != "sanitizer"


PARTS = (
    Part("kernels", 2, "kernels give the reference's bytes, and no host waits", tuple(KERNELS)),
    Part("codecs", 2, "golden bytes and the conformance suite of all codecs", ("tests/gpu/check_codecs.py",)),
    Part(
        "training",
        2,
        "one rank over NCCL, two ranks on one GPU over Gloo, streams",
        ("tests/gpu/check_training.py",),
        2,
    ),
    Part("overhead", 1, "a step with Mean(QSGD(bits=4)) beside plain DDP, with a timeline"),
    Part("speed", 4, "codecs as shares of a copy"),
    Part("study", 8, "a GPT trained with seven methods: loss against bytes; each call goes on"),
    Part("sanitizer", 8, "the kernels' checks under compute-sanitizer", tuple(KERNELS[:4]), 0),
)  # in order of worth


def environment(dry: bool) -> dict[str, str]:
    """For all that is started: the sources as they are, and bits of cuBLAS that do not depend on the stream."""
    paths = [str(ROOT / "src"), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "OMP_NUM_THREADS": "1",
        "THINWIRE_DRY_RUN": str(int(dry)),
    }


def run(parts: Sequence[Part], dry: bool, name: str) -> list[dict[str, Any]]:
    """Run parts side by side, each in a process of its own that is ended at the limit; what they showed, which is kept.

    Args:
        parts: what to run.
        dry: whether to do without a GPU.
        name: of the device, with the versions.
    """
    RESULTS.mkdir(parents=True, exist_ok=True)
    began, running, seconds, results = time.monotonic(), dict[str, subprocess.Popen[bytes]](), dict[str, float](), []
    try:
        for part in parts:
            (RESULTS / f"{part.name}.rows.json").unlink(missing_ok=True)
            if not _left_out(part, dry):
                running[part.name] = _started(_command(part, dry), RESULTS / f"{part.name}.log", environment(dry))
        while len(seconds) < len(running) and time.monotonic() < began + LIMIT_SECONDS:
            time.sleep(0.1)
            ended = [name for name, process in running.items() if process.poll() is not None]
            seconds |= {name: time.monotonic() - began for name in ended if name not in seconds}
    finally:
        codes = {name: process.poll() for name, process in running.items()}
        for process in running.values():
            _kill(process)
    for part in parts:
        result: dict[str, Any] = {
            "title": part.title,
            "dry_run": dry,
            "date": time.strftime("%Y-%m-%d %H:%M"),
            "on": name,
            "seconds": round(seconds.get(part.name, time.monotonic() - began)),
        }
        if part.name in codes:
            result |= _summary(part, codes[part.name], (RESULTS / f"{part.name}.log").read_text(errors="replace"))
        else:
            result |= {"state": "left out", "shown": _left_out(part, dry)}
        (RESULTS / f"{part.name}.json").write_text(json.dumps(result, indent=1))
        results.append(result)
    return results


def _left_out(part: Part, dry: bool) -> str:
    """Why a part cannot run; "" if it can."""
    if part.name != "sanitizer" or (not dry and shutil.which("compute-sanitizer")):
        return ""
    return "needs a GPU" if dry else "no compute-sanitizer"


def _command(part: Part, dry: bool) -> list[str]:
    if part.name == "study":
        return [
            sys.executable,
            str(ROOT / "benchmarks" / "internet.py"),
            str(RESULTS),
            *(DRY_STUDY if dry else STUDY).split(),
        ]
    if not part.files:
        return [sys.executable, str(ROOT / "scripts" / "gpu_speed.py"), part.name, str(RESULTS)]
    processes = min(part.processes, os.cpu_count() or 1)
    pytest = [sys.executable, "-m", "pytest", "-vv", "-n", str(processes), "--dist", "load", "-W", "ignore"]
    if dry:
        pytest += ["-p", "helpers.simulated_gpu" if part.name == "training" else "helpers.compile_launches"]
    sanitizer = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "1"]
    return [*(sanitizer if part.name == "sanitizer" else []), *pytest, "-p", "no:cacheprovider", *part.files]


def _started(command: list[str], log: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    """A process in a session of its own; what it prints is kept."""
    if command[0] == "compute-sanitizer":  # the allocator would hide what lies beyond a tensor
        env |= {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    with open(log, "w") as file:
        return subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process, if it is still at work, and what it has started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _summary(part: Part, code: int | None, printed: str) -> dict[str, Any]:
    """State and contents of a part's row in the table, from what it printed."""
    state = {0: "passed", None: "not finished"}.get(code, "failed")
    if not part.files:
        path = RESULTS / f"{part.name}.rows.json"
        rows = json.loads(path.read_text()) if path.exists() else []
        return {"state": state, "rows": rows, "shown": f"{len(rows)} rows" if rows else printed.strip()[-300:]}
    outcomes = re.findall(r"\b(PASSED|FAILED|ERROR|SKIPPED)\b(?=\s)", printed.partition("short test summary")[0])
    summary = printed.partition("short test summary")[2]
    failed = sorted(set(re.findall(r"^(?:FAILED|ERROR) (\S+::.+)$", summary, re.MULTILINE)))  # each with its reason
    collected = re.search(r"(?:collected |\[)(\d+) items?", printed)
    shown = f"{outcomes.count('PASSED')} of {collected[1] if collected else '?'} checks passed"
    if left_out := outcomes.count("SKIPPED"):
        shown += f", {left_out} left out"
    if not outcomes:
        shown = f"no check ran: {printed.strip()[-300:]}"
    return {"state": state, "shown": shown, "failed": failed}


def table() -> str:
    """All parts in order of worth, and what was measured below; those that have not run say so."""
    lines, below, places = [], [], dict[str, None]()
    for part in PARTS:
        path = RESULTS / f"{part.name}.json"
        if not path.exists():
            lines.append(f"{part.name:10} {'not run':13} {'':>7}  {part.title}")
            continue
        result = json.loads(path.read_text())
        state = result["state"] + (" (dry)" if result["dry_run"] else "")
        lines.append(f"{part.name:10} {state:13} {result['seconds']:5} s  {part.title}: {result['shown']}")
        lines += [f"{'':10} failed: {name[:400]}" for name in result.get("failed", [])]
        below += ["", f"{part.title}, {result['date']}", *result["rows"]] if result.get("rows") else []
        places |= {result["on"]: None}
    return "\n".join([*lines, *(f"on {place}" for place in places), *below])


def device() -> str:
    """The GPU and the versions, in one line; "" if there is no GPU."""
    ask = "import sys, torch, triton; c = torch.cuda; print(c.is_available() and f'{c.get_device_name()}, "
    ask += "PyTorch {torch.__version__}, Triton {triton.__version__}, Python {sys.version.split()[0]}' or '')"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"PyTorch or Triton cannot be imported: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout.strip()


def main(arguments: list[str]) -> int:
    """List the parts, or run some and print the table; return how many failed."""
    parser = argparse.ArgumentParser(description="Parts in order of worth; without a part, they are only listed.")
    parser.add_argument("parts", nargs="*", choices=[*(part.name for part in PARTS), "all", []], metavar="PART")
    parser.add_argument("--dry-run", action="store_true", help="without a GPU: compile kernels, train on the CPU")
    chosen = parser.parse_args(arguments)
    if not chosen.parts:
        print("\n".join(f"{part.name:10} {part.minutes} min  {part.title}" for part in PARTS))
        return 0
    name = device()
    if not name and not chosen.dry_run:
        sys.exit("no GPU: PyTorch sees no CUDA or ROCm device, so nothing was run; --dry-run needs none")
    name = "no GPU, a dry run" if chosen.dry_run else name
    print(name, flush=True)
    wanted = [part for part in PARTS if part.name in chosen.parts or "all" in chosen.parts]
    checks = [part for part in wanted if part.is_check]  # most of their time goes to compiling, on the CPU
    results = []
    for group in filter(None, [checks, *([part] for part in wanted if not part.is_check)]):
        names, minutes = " and ".join(part.name for part in group), max(part.minutes for part in group)
        print(f"{names}: about {minutes} min ...", flush=True)
        results += run(group, chosen.dry_run, name)
    print(table())
    return sum(result["state"] in ("failed", "not finished") for result in results)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
