"""Ray Train: offbeat.prepare in place of ray.train.torch.prepare_model.

    pip install '.[ray]'
    OFFBEAT_STRATEGY=dreamddp:period=4 python examples/launch/with_ray.py

On a cluster, submit it by `ray job submit --working-dir . -- python examples/launch/with_ray.py`.
"""

import os

import ray
import ray.train
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_data_loader
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat  # <- new


def train() -> None:
    """Train on one worker. Ray has connected the workers, and offbeat uses their process group."""
    torch.manual_seed(0)
    x = torch.rand(512, 8)
    data = TensorDataset(x, torch.sin(3 * x).sum(1, keepdim=True))
    loader = prepare_data_loader(DataLoader(data, batch_size=32, shuffle=True))
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)).to(get_device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = offbeat.prepare(model, optimizer)  # <- instead of prepare_model(model)

    losses = []
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    model.consolidate()  # <- new: replicas are equal from here on
    model.close()  # <- new: Ray ends its processes by a signal, before any code at exit
    if ray.train.get_context().get_world_rank() == 0:
        print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}", flush=True)


if __name__ == "__main__":
    # Workers run in processes of Ray's nodes, which do not have the variables of this process.
    variables = {name: value for name, value in os.environ.items() if name.startswith("OFFBEAT_")}
    ray.init(runtime_env={"env_vars": variables})
    scaling = ScalingConfig(num_workers=2, use_gpu=torch.cuda.is_available())
    TorchTrainer(train, scaling_config=scaling).fit()
    ray.shutdown()
