"""A Ray of two nodes on this machine, run as a program of its own: `python -m tests.runs.two_nodes FOLDER`.

Explains a cohort in this process, on two nodes, and on two nodes of which one is killed on the way; writes
what is different into found.json.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import ray
from benchmarks.killed.commands import contents
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import xmil
from tests.waiting import wait_for

SLIDES, WIDTH = 16, 8
RAY = {"engine": "ray", "workers": 2}


MEETING = """
import signal, time
from pathlib import Path
import ray, torch, xmil

HERE = Path(__file__).parent


class Meeting(torch.nn.Module):
    def forward(self, x):
        if (HERE / "doomed").exists() and ray.is_initialized() and ray.get_runtime_context().get_task_id():
            if ray.get_runtime_context().get_node_id() == (HERE / "doomed").read_text():
                (HERE / "met").touch()
                signal.pause()  # until the node is killed
            while not (HERE / "met").exists():
                time.sleep(0.01)
        return x


def build():
    model = xmil.create_model("attnmil", in_dim=WIDTH, n_classes=2, dim=4, seed=0)
    model.instance.insert(0, Meeting())
    return model
"""


def prepare(folder: Path) -> dict[str, Any]:
    """Features and a model, as the arguments of `explain_slides`.

    Once a node is doomed, a worker on it stops at its first slide, and the others wait until it has.
    """
    (folder / "features").mkdir()
    rng = np.random.default_rng(0)
    for i in range(SLIDES):
        np.save(folder / "features" / f"s{i}.npy", np.abs(rng.normal(size=(30, WIDTH))).astype(np.float32))
    (folder / "nets.py").write_text(MEETING.replace("WIDTH", str(WIDTH)))
    return {
        "model": f"{folder / 'nets.py'}:build",
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


@ray.remote(num_cpus=1)
def _where() -> str:
    import xmil.runs.explain  # noqa: F401  # so that the worker is ready

    return str(ray.get_runtime_context().get_node_id())


def _nodes_at_work() -> int:
    """On how many nodes a worker answers, once it has started."""
    pinned = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in ray.nodes()]
    return len(set(ray.get([_where.options(scheduling_strategy=each).remote() for each in pinned])))


def _kill_on_the_way(cluster: Cluster, node: Any, folder: Path, found: dict[str, Any]) -> None:
    wait_for((folder / "met").exists)
    cluster.remove_node(node, allow_graceful=False)
    found["written when the node died"] = len(list((folder / "killed" / "slides").glob("*.parquet")))


def main(folder: Path) -> None:
    """Explain three times and compare."""
    arguments, found = prepare(folder), dict[str, Any]()
    one = xmil.explain_slides(**arguments, out=folder / "one")
    cluster, second = start()
    found["nodes at work"] = _nodes_at_work()
    two = xmil.explain_slides(**arguments, out=folder / "two", **RAY)
    (folder / "doomed").write_text(second.node_id)
    args = (cluster, second, folder, found)
    killer = threading.Thread(target=_kill_on_the_way, args=args)
    killer.start()
    killed = xmil.explain_slides(**arguments, out=folder / "killed", **RAY)
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
