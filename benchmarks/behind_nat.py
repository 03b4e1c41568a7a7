"""Two workers behind a NAT each, which nobody can dial, and a third host with the store and the relay.

    python benchmarks/netlab.py --hosts 3 --line metro --nat 1 2 --cut 2:20:15 -- python benchmarks/behind_nat.py

Hosts 1 and 2 run torch.distributed on the backend "thinwire" for `--seconds`, and check every sum. Printed are the addresses
that they have and are seen with, what happens when host 0 dials host 1, how many sums there were, and how long the longest
took: as long as the cut of the line, if there was one.
"""

from __future__ import annotations

import argparse
import os
import socket
import time

import torch
import torch.distributed as dist
from script import run_script

import thinwire.comm.backend  # noqa: F401
from thinwire.comm.tls.relay import Relay

RELAY_PORT, STORE_PORT = 29600, 29601
NUMEL = 250_000  # a megabyte


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    seconds = parser.parse_args().seconds
    torch.set_num_threads(1)
    number, master = int(os.environ["RANK"]), os.environ["MASTER_ADDR"]
    store = dist.TCPStore(master, STORE_PORT, is_master=number == 0, wait_for_workers=False)
    if number == 0:
        serve(master, store)
        return
    os.environ["THINWIRE_RELAY"] = f"{master}:{RELAY_PORT}"
    store.wait(["the relay is there"])
    dist.init_process_group("thinwire", store=store, rank=number - 1, world_size=2)
    group = dist.group.WORLD
    contact = group.communicator._connections.contact
    store.set(f"address/{number}", f"{contact.host}:{contact.port}")
    print(f"host {number}: its address is {contact.host}, and the relay sees {contact.seen_as}", flush=True)
    sums, longest, until = 0, 0.0, time.monotonic() + seconds
    done = torch.zeros(1)
    while not done:
        x = torch.full((NUMEL,), float(number + sums))
        started = time.monotonic()
        dist.all_reduce(x)
        longest, sums = max(longest, time.monotonic() - started), sums + 1
        assert bool((x == 1 + 2 * sums).all()), sums
        done = torch.tensor([float(time.monotonic() > until)])
        dist.broadcast(done, 0)
    print(f"host {number}: {sums} sums of 1 MB in {seconds:g} s, the longest took {longest:.2f} s", flush=True)
    store.set(f"done/{number}", "")
    dist.destroy_process_group()


def serve(master: str, store: dist.Store) -> None:
    """What host 0 does."""
    with Relay(master, RELAY_PORT):
        store.set("the relay is there", "")
        host, port = store.get("address/1").decode().split(":")
        try:
            socket.create_connection((host, int(port)), 3).close()
            print(f"host 0 dials {host}:{port}: it answers, so it is not behind NAT", flush=True)
        except OSError as error:
            print(f"host 0 dials {host}:{port}: {error.strerror or error}", flush=True)
        store.wait(["done/1", "done/2"])


if __name__ == "__main__":
    run_script(main)
