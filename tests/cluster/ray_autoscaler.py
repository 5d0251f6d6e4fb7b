"""A program that starts a Ray whose autoscaler brings nodes; test_ray.py runs it on a host of its own.

``python ray_autoscaler.py 1|2`` uses the autoscaler of that version. The head has one CPU; a node that is brought has
two; at most two are brought. They are processes on this machine, and come after some seconds, as those of a cloud come
after minutes. The program prints each line that a notebook would show, and one when it has come to a point.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import ray
from ray._private import utils
from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider

utils.get_dashboard_dependency_error = ImportError  # for the nodes; see ray_small.py
HEAD = "fffffffffffffffffffffffffffffffffffffffffffffffffff00000"
"""The id that the provider gives the head."""
NODES = 2
COME_AFTER = 5.0
"""Seconds until a node starts."""


class SlowNodes(FakeMultiNodeProvider):
    """Starts nodes for the autoscaler, which imports this module."""

    def create_node_with_resources_and_labels(self, *arguments: object) -> None:
        time.sleep(COME_AFTER)
        super().create_node_with_resources_and_labels(*arguments)


def say(*words: object) -> None:
    print("point", *words, flush=True)


def start_head(version: int) -> None:
    """Start Ray with its autoscaler, as `ray.cluster_utils.AutoscalingCluster` does; that one ends every other Ray."""
    config = {
        "cluster_name": "test",
        "max_workers": NODES,
        "provider": {
            "type": "external",
            "module": "ray_autoscaler.SlowNodes",
            "launch_multiple": version == 2,
            "head_node_id": HEAD,
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
            "two": {"resources": {"CPU": 2}, "node_config": {}, "min_workers": 0, "max_workers": NODES},
        },
        "head_node_type": "ray.head.default",
        "idle_timeout_minutes": 5,
        "upscaling_speed": 100,
        "auth": {},
        "docker": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        **{
            f"{which}_commands": []
            for which in (
                *("initialization", "setup", "head_setup", "worker_setup"),
                *("head_start_ray", "worker_start_ray"),
            )
        },
    }
    file = Path("/tmp/autoscaler.json")
    file.write_text(json.dumps(config))
    environment = {
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_FAKE_CLUSTER": "1",
        "RAY_CLOUD_INSTANCE_ID": HEAD,
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD,
        "RAY_enable_autoscaler_v2": str(version - 1),
    }
    program = str(Path(__file__).with_name("ray_small.py"))
    subprocess.run(
        [
            *(sys.executable, program, "start", "--head", "--port=6379", "--num-cpus=1"),
            *(f"--autoscaling-config={file}", "--include-dashboard=false", "--disable-usage-stats"),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
        env=os.environ | environment,
    )


def main(version: int) -> None:
    import nbdist
    from nbdist import trace
    from nbdist.errors import ResourceError

    trace.show_steps(lambda: lambda line: say("line", line))
    start_head(version)
    ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    say("head")
    try:  # no node that it may bring has a GPU
        nbdist.Cluster(1, launcher="ray", gpus_per_worker=1, timeout=4).start()
    except ResourceError as error:
        say("error", error)
    try:  # it cannot bring them in so short a time
        nbdist.Cluster(5, launcher="ray", timeout=4).start()
    except ResourceError as error:
        say("error", error)
    with nbdist.Cluster(5, launcher="ray", timeout=180) as cluster:
        say("ranks", *cluster.evaluate("rank"))


if __name__ == "__main__":
    main(int(sys.argv[1]))
