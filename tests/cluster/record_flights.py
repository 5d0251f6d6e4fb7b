"""Records what torch's flight recorder tells of two programs that hang, for `test_flight_recorder`.

    python tests/cluster/record_flights.py FOLDER

writes FOLDER/torch-2.13.json, with the version of the torch that runs this: by program, the groups' ranks and
descriptions, and the entries of each of the three members.
"""

import json
import multiprocessing
import os
import pathlib
import pickle
import sys
import tempfile
import threading
import time

MEMBERS = 3
LEFT_OUT = ("record_id", "op_id", "thread_name", "state", "timeout_ms", "p2p_seq_id", "pg_id")
"""Fields of an entry that nobody reads; and so are its times."""


def common(dist, torch):
    """Do what a healthy program does, in the default group and in two others."""
    whole = torch.ones(3, 2)
    pair = dist.new_group([0, 1], group_desc="pair")
    dist.new_group([0, 2], group_desc="mesh_tp")
    dist.all_reduce(whole)
    dist.all_gather_into_tensor(torch.empty(9, 2), whole)
    dist.reduce_scatter_tensor(torch.empty(1, 2), whole)
    parts = [torch.ones(2) for _ in range(MEMBERS)]
    dist.scatter(torch.empty(2), parts if dist.get_rank() == 0 else None)
    dist.gather(torch.ones(2), parts if dist.get_rank() == 0 else None)
    uneven = torch.ones(dist.get_rank() + 1)  # worker r sends one element to each of the first r + 1
    sent = [int(other <= dist.get_rank()) for other in range(MEMBERS)]
    got = [int(dist.get_rank() <= other) for other in range(MEMBERS)]
    dist.all_to_all_single(torch.empty(sum(got)), uneven, got, sent)
    dist.all_gather_object([None] * MEMBERS, "a" * dist.get_rank())
    dist.all_reduce(whole, async_op=True).wait()
    if dist.get_rank() < 2:
        dist.all_reduce(torch.ones(4, dtype=torch.int64), group=pair)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    dist.barrier()


def absent(dist, torch):
    """Leave member 2 behind."""
    if dist.get_rank() != 2:
        dist.all_reduce(torch.ones(1024))


def different(dist, torch):
    """Let member 1 call another collective."""
    tensor = torch.ones(4)
    if dist.get_rank() == 1:
        dist.broadcast(tensor, 0)
    else:
        dist.all_reduce(tensor)


def member(rank, store, name, folder):
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import _dump_fr_trace

    dist.init_process_group("gloo", rank=rank, world_size=MEMBERS, init_method=f"file://{store}")
    common(dist, torch)
    threading.Thread(target=globals()[name], args=(dist, torch), daemon=True).start()
    time.sleep(2)
    told = pickle.loads(_dump_fr_trace(includeStackTraces=False))
    entries = [
        {key: value for key, value in entry.items() if key not in LEFT_OUT and not key.startswith("time_discovered")}
        for entry in told["entries"]
    ]
    pathlib.Path(folder, f"{name}{rank}").write_text(json.dumps(entries))
    time.sleep(2)  # an end would fail the collectives of the others
    os._exit(0)


def main(folder):
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    found = {}
    spawn = multiprocessing.get_context("spawn")
    for name in ("absent", "different"):
        with tempfile.TemporaryDirectory() as temporary:
            arguments = [(rank, f"{temporary}/store", name, temporary) for rank in range(MEMBERS)]
            members = [spawn.Process(target=member, args=each) for each in arguments]
            for each in members:
                each.start()
            for each in members:
                each.join()
            found[name] = [json.loads(pathlib.Path(temporary, f"{name}{rank}").read_text()) for rank in range(MEMBERS)]
    version = ".".join(torch.__version__.split(".")[:2])
    text = json.dumps(found, separators=(",", ":")).replace("},{", "},\n{")
    pathlib.Path(folder, f"torch-{version}.json").write_text(text + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
