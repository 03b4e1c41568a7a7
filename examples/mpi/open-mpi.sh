#!/bin/bash
# Train under Open MPI:      examples/mpi/open-mpi.sh digits --name mine
#
# On several nodes, all must see the same files at the current folder, and ssh must get from this node to the others.
# Lines to edit are marked. Within a SLURM job, leave --host out: mpirun then knows the nodes.

hosts=${HOSTS:-localhost:4}             # EDIT: node:workers,node:workers, such as node1:4,node2:4
interface=${INTERFACE:-lo}              # EDIT: the network interface that joins the nodes, such as eth0
master=${MASTER_ADDR:-127.0.0.1}        # EDIT: name or address of the first node, as the others reach it

# EDIT: how thinwire comes to be found, on every node
source .venv/bin/activate

# A run that is stopped (kill -USR1, kill, Ctrl-C) gets time to save: Open MPI's own timeout is one second.
exec "${MPIRUN:-mpirun}" --host "$hosts" -x PATH -x MASTER_ADDR="$master" --mca odls_base_sigkill_timeout 120 \
    thinwire train "$@" --interface "$interface" --resume
