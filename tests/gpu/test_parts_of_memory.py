"""Two workers that share a GPU, each with its part of the memory."""

import pytest

import nbdist
from nbdist.errors import NbdistError


def test_a_worker_takes_no_more_than_its_part():
    with nbdist.Cluster(2, gpu_ids=(0,), gpu_memory=0.3) as cluster:
        whole = cluster.evaluate("torch.cuda.get_device_properties(0).total_memory", 0)
        cluster.execute(f"x = torch.empty({int(whole * 0.2)}, dtype=torch.uint8, device=device)")
        with pytest.raises(NbdistError) as raised:
            cluster.execute(f"y = torch.empty({int(whole * 0.2)}, dtype=torch.uint8, device=device)", 1)
        assert type(raised.value).__name__ == "OutOfMemoryError"
        assert "GPU 0, of worker1: torch has taken" in "\n".join(raised.value.traceback)
        cluster.execute("del x; torch.cuda.empty_cache()")
        cluster.execute(f"y = torch.empty({int(whole * 0.2)}, dtype=torch.uint8, device=device)", 1)
