"""Two ranks on one GPU add up over symmetric memory: a script for torchrun, which prints nothing and exits 0.

torch allows two ranks of a group on one GPU where TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 says so; NCCL does not, so
the group is gloo's.
"""

import os

import torch
import torch.distributed as dist

from spmd_worker.ops.kernels.triton import peer_sums, rows
from spmd_worker.ops.kernels.triton.peer_sums import PeerSums, SymmetricMemory, half_bytes

ROOM_BYTES = 1 << 20
EPS = 1e-5


def main() -> None:
    dist.init_process_group("gloo")
    rank, size, device = dist.get_rank(), dist.get_world_size(), torch.device("cuda", 0)
    torch.cuda.set_device(device)
    own = SymmetricMemory.allocate(2 * half_bytes(ROOM_BYTES, size), device)
    sums = PeerSums(SymmetricMemory(dist.group.WORLD, own), rank, ROOM_BYTES)
    # Memory of its own: each has halves that take turns.
    others = SymmetricMemory.allocate(2 * half_bytes(ROOM_BYTES, size), device)
    tree = PeerSums(SymmetricMemory(dist.group.WORLD, others), rank, ROOM_BYTES, adds_by_tree=True)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for num_rows in (1, 3, 64, 700):
            torch.manual_seed(num_rows)
            parts = [torch.randn(num_rows, 576, device=device).to(dtype) * 10.0**each for each in range(size)]
            weight, residual = torch.randn(576, device=device).to(dtype), torch.randn(num_rows, 576, device=device)
            total = parts[0].float()
            for part in parts[1:]:
                total = total + part.float()
            expected = total.to(dtype)
            for one_round in (1 << 30, 256):
                peer_sums.ONE_ROUND_BYTES = one_round
                assert torch.equal(sums.all_reduce(parts[rank].clone()), expected), (dtype, num_rows, one_round)
                own, other = residual.to(dtype, copy=True), residual.to(dtype, copy=True)
                normed = sums.all_reduce_add_rms_norm(parts[rank].clone(), own, weight, EPS)
                assert torch.equal(normed, rows.add_rms_norm(expected, other, weight, EPS)), (dtype, num_rows)
                assert torch.equal(own, other), (dtype, num_rows, one_round)
                wide = [part.float() * 1.1 for part in parts]
                added = (wide[0] + wide[1]).to(dtype)
                assert torch.equal(tree.sum_parts(wide[rank].clone(), dtype), added), (dtype, num_rows, one_round)
                own, other = residual.to(dtype, copy=True), residual.to(dtype, copy=True)
                normed = tree.all_reduce_add_rms_norm(wide[rank].clone(), own, weight, EPS)
                assert torch.equal(normed, rows.add_rms_norm(added, other, weight, EPS)), (dtype, num_rows)
                assert torch.equal(own, other), (dtype, num_rows, one_round)
            assert torch.equal(sums.all_gather(parts[rank]), torch.stack(parts)), (dtype, num_rows)
            assert torch.equal(sums.broadcast(parts[rank].clone(), 1), parts[1]), (dtype, num_rows)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    assert os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1", "two ranks share a GPU here"
    main()
