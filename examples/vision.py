"""A convolutional network in channels_last on generated images, with batch norm over all ranks.

python examples/vision.py
torchrun --nproc-per-node 2 examples/vision.py
"""

import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import meshwright

SIZE = 16


class Shapes:
    """Images of a disc, a square or a cross at a random place, with noise; generated on access."""

    def __init__(self, num_images: int, seed: int) -> None:
        self.num_images, self.seed = num_images, seed

    def __len__(self) -> int:
        return self.num_images

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        kind = index % 3
        row, column = torch.randint(4, SIZE - 4, (2,), generator=generator).tolist()
        down = (torch.arange(SIZE) - row).abs()[:, None]
        across = (torch.arange(SIZE) - column).abs()[None, :]
        inside = (down**2 + across**2 <= 9, (down <= 3) & (across <= 3), (down == across) & (down <= 3))[kind]
        return inside + 0.3 * torch.randn(3, SIZE, SIZE, generator=generator), kind


class Residual(nn.Module):
    """Two convolutions with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return torch.relu(x_BCHW + self.convolutions(x_BCHW))


def network(width: int = 16) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, stride=2, padding=1),
        nn.Sequential(*(Residual(width) for _ in range(3))),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, 3),
    ).to(memory_format=torch.channels_last)


def loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
    images, kinds = batch
    images = images.contiguous(memory_format=torch.channels_last)
    return cross_entropy(model(images), kinds, reduction="sum"), len(kinds)


def main(directory: str) -> None:
    meshwright.fit(
        network(),
        Shapes(3000, seed=1),
        loss,
        evaluation=Shapes(300, seed=2),
        evaluate={"every_steps": 20},
        directory=directory,
        sync_batch_norm=True,
        batch_samples=48,
        microbatch_samples=24,
        num_steps=40,
        lr=3e-3,
        zero=1,
        recompute="full",
    )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/shapes")
