"""A Ray cluster of two nodes on this machine: prints its address, and ends on SIGTERM.

Its files are in the folder that RAY_TMPDIR names. The path must be short: that of a socket is below 108 characters.
"""

from __future__ import annotations

import signal

from ray.cluster_utils import Cluster


def main() -> None:
    """Run the cluster."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        print(f"address {cluster.address}", flush=True)
        signal.sigwait({signal.SIGTERM})
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
