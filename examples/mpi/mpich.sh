#!/bin/bash
# Train under MPICH or Intel MPI:      examples/mpi/mpich.sh digits --name mine
#
# On several nodes, all must see the same files at the current folder, and ssh must get from this node to the others.
# Lines to edit are marked. Within a SLURM job, leave -hosts out and say -n: mpirun then knows the nodes.

hosts=${HOSTS:-localhost:4}             # EDIT: node:workers,node:workers, such as node1:4,node2:4
workers=${WORKERS:-4}                   # EDIT: number of workers on all nodes together
interface=${INTERFACE:-lo}              # EDIT: the network interface that joins the nodes, such as eth0
master=${MASTER_ADDR:-127.0.0.1}        # EDIT: name or address of the first node, as the others reach it

# EDIT: how thinwire comes to be found, on every node
source .venv/bin/activate

exec "${MPIRUN:-mpirun}" -hosts "$hosts" -n "$workers" -genv MASTER_ADDR "$master" \
    thinwire train "$@" --interface "$interface" --resume
