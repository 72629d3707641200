"""Ray's own test cluster in a process of its own: two nodes on this host, until standard input closes.

    python -m tests.support.ray_nodes NUM_NODES NUM_GPUS

Prints its address. `RAY_AUTH_TOKEN_PATH` names the token file.
"""

import sys
import warnings


def main(num_nodes: int, num_gpus: int) -> None:
    warnings.simplefilter("ignore")
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "num_gpus": num_gpus, "object_store_memory": 100 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, connect=False, head_node_args=node)
    try:
        for _ in range(num_nodes - 1):
            cluster.add_node(num_cpus=1, num_gpus=num_gpus, object_store_memory=100 << 20)
        cluster.wait_for_nodes(timeout=30)
        sys.stdout.write(f"{cluster.address}\n")
        sys.stdout.flush()
        sys.stdin.read()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
