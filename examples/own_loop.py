"""A plain torch loop, and the five lines (marked +) that distribute it over any number of ranks.

python examples/own_loop.py
torchrun --nproc-per-node 2 examples/own_loop.py
"""

import math

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import meshwright  # +


def spirals(num_points: int) -> TensorDataset:
    """Points on two spirals, and the spiral of each point."""
    generator = torch.Generator().manual_seed(0)
    arm = torch.randint(2, (num_points,), generator=generator)
    radius = torch.rand(num_points, generator=generator).sqrt()
    angle = 2 * math.pi * (radius + arm / 2)
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return TensorDataset(points + 0.02 * torch.randn(points.shape, generator=generator), arm)


def main() -> None:
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(spirals(1000), batch_size=50, shuffle=True)

    run = meshwright.prepare(model, optimizer, loader, zero=2, max_grad_norm=1.0)  # +
    for epoch in range(20):
        for points, arm in run.loader:
            loss = cross_entropy(model(points), arm, reduction="sum")
            run.backward(loss, len(arm))  # + in place of loss.backward()
            step = run.step()  # + in place of optimizer.step() and optimizer.zero_grad()
        if run.is_first and epoch % 5 == 4:
            print(f"epoch {epoch + 1}: loss {step.loss:.3f}, gradient norm {step.grad_norm:.2f}")
    run.end()  # +


if __name__ == "__main__":
    main()
