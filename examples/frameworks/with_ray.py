"""Ray Train: offbeat.prepare in the place of ray.train.torch.prepare_model."""

import ray.train
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader
from tiny_llama import Counting, build
from torch.utils.data import DataLoader

import offbeat  # <- new


def train() -> None:
    model = build().to(ray.train.torch.get_device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    strategy = "dreamddp:period=4"  # <- new
    model, optimizer = offbeat.prepare(model, optimizer, strategy)  # <- not prepare_model(model)
    loader = prepare_data_loader(DataLoader(Counting(), batch_size=4))

    losses = []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
    model.consolidate()  # <- new: replicas are equal from here on
    total = sum(p.double().sum().item() for p in model.parameters())
    model.close()  # <- new: Ray ends its processes without saying goodbye
    ray.train.report({"first": losses[0], "last": losses[-1], "total": total})


if __name__ == "__main__":
    scaling = ScalingConfig(num_workers=2, use_gpu=torch.cuda.is_available())
    print(TorchTrainer(train, scaling_config=scaling).fit().metrics)
