import os

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc


def my_add(t1, t2):
    return torch.add(t1, t2)


def main():
    with dist_autograd.context() as context_id:
        t1 = torch.rand((3, 3), requires_grad=True)
        t2 = torch.rand((3, 3), requires_grad=True)

        # Perform some computation remotely.
        t3 = rpc.rpc_sync("worker1", my_add, args=(t1, t2))

        # Perform some computation locally based on the remote result.
        t4 = torch.rand((3, 3), requires_grad=True)
        t5 = torch.mul(t3, t4)
        loss = t5.sum()

        dist_autograd.backward(context_id, [loss])
        gradients = dist_autograd.get_gradients(context_id)
        print([torch.equal(gradients[t1], t4), torch.equal(gradients[t2], t4), torch.equal(gradients[t4], t1 + t2)])


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    if rank == 0:
        main()
    rpc.shutdown()
