"""A script for any launcher: torchrun, srun, mpirun, a TrainJob of Kubernetes.

    torchrun --nproc-per-node 2 examples/launch/train.py
    sbatch examples/launch/srun.sbatch
    kubectl apply -f examples/launch/trainjob.yaml

`offbeat.prepare` reads rank and address from the launcher's variables. After it, a script reads its
rank from `torch.distributed`.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import offbeat

LOCAL_RANK = int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)
DEVICE = torch.device("cuda", LOCAL_RANK) if torch.cuda.is_available() else torch.device("cpu")


def make_data() -> TensorDataset:
    """Return points and the values of a function at them, the same on every rank."""
    x = torch.rand(512, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, torch.sin(3 * x).sum(1, keepdim=True))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = offbeat.prepare(model, optimizer)  # <- the one changed line
    rank, size = dist.get_rank(), dist.get_world_size()

    data = make_data()
    sampler = DistributedSampler(data, size, rank)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    loss = torch.zeros(())
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = step(model, optimizer, x.to(DEVICE), y.to(DEVICE))
    model.consolidate()
    if rank == 0:
        print(f"{size} ranks, loss {loss.item():.4f}", flush=True)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


if __name__ == "__main__":
    main()
