"""`thinwire doctor` on hosts of the network lab, one of which is bad in every way; checks that each way is named.

    sudo env "PATH=$PATH" python benchmarks/doctor_netlab.py

Host 1 of three has a slow line up, an MTU of its own, few file descriptors, and CUBIC on a long line.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from netlab import INTERFACE, Lab, set_congestion
from script import run_script

BAD, LINES = 1, ["continent", "continent,up=10mbit", "continent"]
EXPECTED = (
    "the MTU of eth0 is 1280, and 1500 on the other hosts",
    "at most 128 open files, and 3 workers need",
    "TCP's congestion control is cubic",
    "Mb/s, and the others",
)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with Lab(3, LINES) as lab:
        for host, namespace in enumerate(lab.namespaces):
            set_congestion(namespace, "cubic" if host == BAD else "bbr")
        mtu = ["ip", "-n", lab.namespaces[BAD], "link", "set", INTERFACE, "mtu", "1280"]
        subprocess.run(mtu, check=True)
        doctor = f"{sys.executable} -m thinwire doctor --parameters 5M --json $0"
        found = lab.ask(["bash", "-c", f"[ $RANK = {BAD} ] && ulimit -n 128; exec {doctor}"])["findings"]
    of_bad = [finding["what"] for finding in found if finding["ranks"] == [BAD]]
    missed = [text for text in EXPECTED if not any(text in what for what in of_bad)]
    print(f"named: {len(EXPECTED) - len(missed)} of {len(EXPECTED)}")
    if missed:
        sys.exit(f"not named: {missed}")


if __name__ == "__main__":
    run_script(main)
