"""Reads from the environment which launcher started this process, its rank, and the address of rank 0.

    torchrun   RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT
    Open MPI   OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
    MPICH      PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS; also Intel MPI, whose launcher is Hydra too
    srun       SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, SLURM_STEP_TASKS_PER_NODE, SLURM_STEP_NODELIST

They are checked in this order, the innermost launcher first: MPI starts its daemons on other nodes with srun, and torchrun
may run under any of them. A batch script has SLURM_PROCID and SLURM_NTASKS too, but only srun sets SLURM_STEP_NUM_TASKS. A
single task does not count as a launch: it may be a shell in an allocation, and starts its workers itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ....algorithm import require

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 29500  # torchrun's
NAME = "THINWIRE_LAUNCHER"  # name of the launcher, if `set_variables` set torchrun's variables
PORTS = range(10_000, 30_000)  # below the system's ephemeral ports

# Where each MPI says rank, size, local rank and local size.
OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


@dataclass(frozen=True)
class Environment:
    """The place of one worker that a launcher started.

    Args:
        launcher: name of the launcher, such as "srun".
        rank: of this worker, 0..size-1.
        size: number of workers.
        local_rank: rank among the workers on its node, 0..local_size-1.
        local_size: number of workers on its node.
        master_address: host of rank 0.
        master_port: TCP port on which rank 0 listens.

    Raises:
        ValueError: a rank is not below its size.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    master_address: str
    master_port: int

    def __post_init__(self):
        fits = 0 <= self.rank < self.size and 0 <= self.local_rank < self.local_size <= self.size
        require(
            fits,
            f"{self.launcher} says rank {self.rank} of {self.size} and local rank {self.local_rank} of {self.local_size}, "
            "which cannot be; is the environment left over from another launch?",
        )

    @property
    def one_node(self) -> bool:
        """Whether all workers are on this node."""
        return self.local_size == self.size

    def variables(self) -> dict[str, str]:
        """The same values as torchrun's variables, which PyTorch and the hierarchical exchange read."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": str(self.master_port),
            NAME: self.launcher,
        }


def launched(variables: Mapping[str, str] = os.environ) -> Environment | None:
    """The place of this process under a launcher, or None if no launcher started it.

    Raises:
        ValueError: a variable is not a number or contradicts the others; or MPI uses several nodes, and no variable has the
            address of rank 0.

    Example:
        >>> launched({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node1", "MASTER_PORT": "29400"}).rank
        1
        >>> launched({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None  # a batch script
        True
    """
    # The first one counts: the innermost launcher.
    for names, read in LAUNCHERS.items():
        if set(names) <= variables.keys():
            return read(variables)
    return None


def set_variables() -> Environment | None:
    """Return `launched()`, and set torchrun's variables for this process and its children."""
    environment = launched()
    if environment:
        os.environ.update(environment.variables())
    return environment


def _torchrun(variables: Mapping[str, str]) -> Environment:
    rank, size = (_number(variables, name) for name in ("RANK", "WORLD_SIZE"))
    local_rank, local_size = _number(variables, "LOCAL_RANK", 0), _number(variables, "LOCAL_WORLD_SIZE", 1)
    address, port = variables.get("MASTER_ADDR", LOOPBACK), _number(variables, "MASTER_PORT", DEFAULT_PORT)
    return Environment(variables.get(NAME, "torchrun"), rank, size, local_rank, local_size, address, port)


def _open_mpi(variables: Mapping[str, str]) -> Environment | None:
    job = variables.get("PMIX_NAMESPACE") or variables.get("OMPI_MCA_ess_base_jobid") or ""
    numbers = [_number(variables, name) for name in OPEN_MPI]
    return _task("mpirun (Open MPI)", numbers, variables, variables.get("SLURM_JOB_NODELIST", ""), _port_of(job))


def _mpich(variables: Mapping[str, str]) -> Environment | None:
    numbers, job = [_number(variables, name) for name in MPICH], _ancestor("hydra_pmi_proxy")
    return _task("mpirun (MPICH)", numbers, variables, variables.get("SLURM_JOB_NODELIST", ""), _port_of(job))


def _srun(variables: Mapping[str, str]) -> Environment | None:
    size, node = _number(variables, "SLURM_STEP_NUM_TASKS"), _number(variables, "SLURM_NODEID", 0)
    per_node = _expanded(variables.get("SLURM_STEP_TASKS_PER_NODE", str(size)))
    local_size = per_node[node] if node < len(per_node) else 0
    numbers = [_number(variables, "SLURM_PROCID"), size, _number(variables, "SLURM_LOCALID"), local_size]
    return _task("srun", numbers, variables, variables["SLURM_STEP_NODELIST"], _slurm_port(variables))


def _task(
    launcher: str, numbers: list[int], variables: Mapping[str, str], nodes: str, own_port: int
) -> Environment | None:
    """The place of one of several tasks; None for a task alone.

    Args:
        launcher: its name.
        numbers: rank, size, local rank and local size.
        variables: the environment.
        nodes: all hosts, in SLURM's notation; "" if nobody says them.
        own_port: it differs between launches, but all workers know it only if they are on one node.
    """
    rank, size, local_rank, local_size = numbers
    if size == 1:
        return None
    if local_size == size:
        address, port = LOOPBACK, own_port
    else:
        address, port = _first_host(nodes), _slurm_port(variables)
    address = variables.get("MASTER_ADDR", address)
    require(
        bool(address),
        f"{launcher} started {size} workers on several nodes and does not say where rank 0 is; set MASTER_ADDR to the "
        "first node's name or address for all workers, as in: mpirun -x MASTER_ADDR=node1 (MPICH: -genv MASTER_ADDR node1)",
    )
    port = _number(variables, "MASTER_PORT", port)
    return Environment(launcher, rank, size, local_rank, local_size, address, port)


LAUNCHERS = {
    ("RANK", "WORLD_SIZE"): _torchrun,
    OPEN_MPI: _open_mpi,
    MPICH: _mpich,
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST"): _srun,
}


def _number(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = variables.get(name, str(default))
    require(text.isdecimal(), f"the environment's {name} must be a number, got {text!r}; is it left over?")
    return int(text)


def _port_of(job: str) -> int:
    """A port for a launch: the same for all of its workers, and usually different for other launches."""
    return PORTS[int(job) % len(PORTS)] if job.isdecimal() else DEFAULT_PORT


def _slurm_port(variables: Mapping[str, str]) -> int:
    """A port that differs between jobs on one node and between steps of a job."""
    job, step = variables.get("SLURM_JOB_ID", ""), variables.get("SLURM_STEP_ID", "0")
    return _port_of(str(int(job) + 101 * int(step))) if job.isdecimal() and step.isdecimal() else DEFAULT_PORT


def _first_host(nodes: str) -> str:
    """The first host of a list in SLURM's notation: "n01" of "n[01-03,7],login".

    Example:
        >>> _first_host("gpu[1-2,5]-rack[07,9],login")
        'gpu1-rack07'
    """
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", nodes).split(",")[0]


def _expanded(counts: str) -> list[int]:
    """Number of tasks of each node, from SLURM's notation.

    Example:
        >>> _expanded("4(x2),1")
        [4, 4, 1]
    """
    numbers: list[int] = []
    for part in counts.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(f"SLURM_STEP_TASKS_PER_NODE in the environment must be like '4(x2),1', got {counts!r}")
        numbers += [int(match[1])] * int(match[2] or 1)
    return numbers


def _ancestor(name: str) -> str:
    """Process id of the nearest ancestor with this name, or "": equal for all workers that it started."""
    import psutil

    return next((str(process.pid) for process in psutil.Process().parents() if process.name() == name), "")
