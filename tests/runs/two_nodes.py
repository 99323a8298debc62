"""A Ray of two nodes on this machine, run as a program of its own: `python -m tests.runs.two_nodes FOLDER`.

Explains a cohort in this process, on two nodes, and on two nodes of which one is killed on the way; writes
what is different into found.json.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
from benchmarks.killed.commands import contents
from ray.cluster_utils import Cluster

import xmil
from xmil.runs.workers.pool import Workers

SLIDES, WIDTH = 16, 8
RAY = Workers("ray", workers=2)


def prepare(folder: Path) -> dict[str, Any]:
    """Features and a model, as the arguments of `explain_slides`."""
    (folder / "features").mkdir()
    rng = np.random.default_rng(0)
    for i in range(SLIDES):
        np.save(folder / "features" / f"s{i}.npy", np.abs(rng.normal(size=(30, WIDTH))).astype(np.float32))
    model = xmil.create_model("attnmil", in_dim=WIDTH, n_classes=2, dim=4, seed=0)
    xmil.save_model(model, folder / "m.safetensors")
    return {
        "model": folder / "m.safetensors",
        "features": folder / "features",
        "methods": ["lrp", "attention"],
    }


def start() -> tuple[Cluster, Any]:
    """Two nodes with one CPU each, and the one that may die."""
    options = {"num_cpus": 1, "object_store_memory": 80_000_000}
    cluster = Cluster(initialize_head=True, head_node_args={**options, "include_dashboard": False})
    second = cluster.add_node(**options)
    cluster.wait_for_nodes()
    env = {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}}
    ray.init(address=cluster.address, log_to_driver=False, runtime_env=env)
    return cluster, second


@ray.remote(num_cpus=1, scheduling_strategy="SPREAD")
def _where() -> str:
    import xmil.runs.explain  # noqa: F401  # so that the worker is ready

    time.sleep(0.5)
    return str(ray.get_runtime_context().get_node_id())


def _kill_on_the_way(cluster: Cluster, node: Any, out: Path, found: dict[str, Any]) -> None:
    while len(list((out / "slides").glob("*.parquet"))) < 2:
        time.sleep(0.001)
    cluster.remove_node(node, allow_graceful=False)
    found["written when the node died"] = len(list((out / "slides").glob("*.parquet")))


def main(folder: Path) -> None:
    """Explain three times and compare."""
    arguments, found = prepare(folder), dict[str, Any]()
    one = xmil.explain_slides(**arguments, out=folder / "one")
    cluster, second = start()
    found["nodes at work"] = len(set(ray.get([_where.remote() for _ in range(4)])))
    two = xmil.explain_slides(**arguments, out=folder / "two", workers=RAY)
    args = (cluster, second, folder / "killed", found)
    killer = threading.Thread(target=_kill_on_the_way, args=args)
    killer.start()
    killed = xmil.explain_slides(**arguments, out=folder / "killed", workers=RAY)
    killer.join()
    found["the node is dead"] = not second.any_processes_alive()
    runs = {"one": one, "two": two, "killed": killed}
    found["failed"] = {name: len(run.failed) for name, run in runs.items()}
    whole = contents(folder / "one")
    found["equal"] = {name: contents(folder / name) == whole for name in ("two", "killed")}
    ray.shutdown()
    cluster.shutdown()
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
