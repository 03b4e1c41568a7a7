"""Which worker a process is: every launcher's variables, as seen on real SLURM, Open MPI and MPICH, and mixtures."""

from __future__ import annotations

import pytest

from thinwire.lab.train.start.environment import PORTS, Environment, launched

BATCH = {"SLURM_JOB_ID": "42", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "4"}
BATCH |= {
    "SLURM_NPROCS": "4",
    "SLURM_TASKS_PER_NODE": "4",
    "SLURM_JOB_NODELIST": "n[07-08]",
    "SLURM_NODELIST": "n[07-08]",
}
STEP = BATCH | {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[07-08]", "SLURM_STEP_NUM_TASKS": "4"}
STEP |= {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
TORCHRUN = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN |= {"MASTER_ADDR": "n07", "MASTER_PORT": "29400"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_NAMESPACE": "1574567937"}
OPEN_MPI |= {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_RANK": "1"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4", "PMI_FD": "6", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
DAEMON = STEP | {
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_PROCID": "0",
}  # which srun started
PMI2 = {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "11", "PMI_JOBID": "42.0"}  # srun --mpi=pmi2
OVER_NODES = {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
MASTER = {"MASTER_ADDR": "198.18.0.1", "MASTER_PORT": "4000"}

OPEN_MPI_PORT = PORTS[1574567937 % 20_000]
KNOWN = {
    "torchrun": (TORCHRUN, ("torchrun", 2, 4, 0, 2, "n07", 29400)),
    "torchrun's variables by hand": (
        {"RANK": "1", "WORLD_SIZE": "2"},
        ("torchrun", 1, 2, 0, 1, "127.0.0.1", 29500),
    ),
    "srun": (STEP, ("srun", 3, 4, 1, 2, "n07", PORTS[42])),
    "srun on one node": (
        STEP | {"SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "n08"},
        ("srun", 3, 4, 1, 4, "127.0.0.1", PORTS[42]),
    ),
    "srun, uneven nodes": (
        STEP | {"SLURM_STEP_TASKS_PER_NODE": "1,3", "SLURM_LOCALID": "2"},
        ("srun", 3, 4, 2, 3, "n07", PORTS[42]),
    ),
    "a second step": (STEP | {"SLURM_STEP_ID": "1"}, ("srun", 3, 4, 1, 2, "n07", PORTS[143])),
    "srun with an address of one's own": (STEP | MASTER, ("srun", 3, 4, 1, 2, "198.18.0.1", 4000)),
    "srun --mpi=pmi2": (STEP | PMI2, ("srun", 3, 4, 1, 2, "n07", PORTS[42])),
    "Open MPI": (OPEN_MPI, ("mpirun (Open MPI)", 1, 4, 1, 4, "127.0.0.1", OPEN_MPI_PORT)),
    "Open MPI, the address given": (
        OPEN_MPI | OVER_NODES | MASTER,
        ("mpirun (Open MPI)", 1, 4, 1, 2, "198.18.0.1", 4000),
    ),
    "Open MPI over a job's nodes": (
        DAEMON | OPEN_MPI | OVER_NODES,
        ("mpirun (Open MPI)", 1, 4, 1, 2, "n07", PORTS[42]),
    ),
    "MPICH": (MPICH, ("mpirun (MPICH)", 1, 4, 1, 4, "127.0.0.1", 29500)),
    "MPICH over a job's nodes": (
        DAEMON | MPICH | {"MPI_LOCALNRANKS": "2"},
        ("mpirun (MPICH)", 1, 4, 1, 2, "n07", PORTS[42]),
    ),
    "torchrun under srun": (DAEMON | TORCHRUN, ("torchrun", 2, 4, 0, 2, "n07", 29400)),
    "torchrun under mpirun": (OPEN_MPI | TORCHRUN, ("torchrun", 2, 4, 0, 2, "n07", 29400)),
}


@pytest.mark.parametrize("case", KNOWN)
def test_a_worker_knows_its_place(case):
    variables, expected = KNOWN[case]
    environment = launched(variables)
    assert environment == Environment(*expected)
    assert launched(environment.variables()) == environment  # says the same in torchrun's variables


ALONE = {
    "nothing": {},
    "a variable of another's": {"RANK": "7"},
    "a batch script": BATCH,
    "salloc's shell": {name: BATCH[name] for name in ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_JOB_NODELIST")},
    "a shell under srun": DAEMON,
    "a batch script that was submitted from such a shell": BATCH
    | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    | {"SLURM_STEP_NODELIST": "n08"},
    "mpirun -np 1, Open MPI": OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"},
    "mpirun -np 1, MPICH, in a job of four tasks": BATCH | MPICH | {"PMI_SIZE": "1"},
    "an MPI that does not say what is on a node": {"PMI_RANK": "0", "PMI_SIZE": "4"},
}


@pytest.mark.parametrize("case", ALONE)
def test_one_task_alone_is_no_launch(case):
    assert launched(ALONE[case]) is None


WRONG = {
    "MPI over nodes without an address": (OPEN_MPI | OVER_NODES, "set MASTER_ADDR to the first node's"),
    "MPICH over nodes without an address": (MPICH | {"MPI_LOCALNRANKS": "2"}, "set MASTER_ADDR to the first node's"),
    "a rank that is too high": (TORCHRUN | {"RANK": "4"}, "rank 4 of 4 .* left over from another launch"),
    "a local rank that is too high": (TORCHRUN | {"LOCAL_RANK": "2"}, "local rank 2 of 2"),
    "more on a node than there are": (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "5"} | MASTER, "local rank 1 of 5"),
    "no number": (TORCHRUN | {"WORLD_SIZE": "all"}, "WORLD_SIZE must be a number, got 'all'"),
    "no port": (TORCHRUN | {"MASTER_PORT": "tcp"}, "MASTER_PORT must be a number, got 'tcp'"),
    "tasks per node": (
        STEP | {"SLURM_STEP_TASKS_PER_NODE": "two"},
        "SLURM_STEP_TASKS_PER_NODE in the environment must be like '4",
    ),
    "a node beyond the list": (STEP | {"SLURM_NODEID": "2"}, "local rank 1 of 0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_one_line(case):
    variables, message = WRONG[case]
    with pytest.raises(ValueError, match=message) as error:
        launched(variables)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("vm", "vm"),
        ("n[01-03,7],login", "n01"),
        ("a,b[1-2]", "a"),
        ("r[1-2]n[05,9]-ib,x", "r1n05-ib"),
        ("n[3,7]", "n3"),
    ],
)
def test_the_first_of_slurms_hosts_has_rank_0(nodes, first):
    assert launched(STEP | {"SLURM_STEP_NODELIST": nodes}).master_address == first
