"""A model, a dataset and a loss of your own, handed to the trainer in the lines marked +.

    python examples/own_model.py
    torchrun --nproc-per-node 2 examples/own_model.py

The run directory holds what `meshwright train` writes; `meshwright report runs/copy` draws it.
"""

import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import meshwright  # +

NUM_SYMBOLS, LENGTH, WIDTH = 16, 12, 64


class Reverser(nn.Module):
    """Reads symbols and predicts them in reverse order."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols = nn.Embedding(NUM_SYMBOLS, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, NUM_SYMBOLS)

    def forward(self, symbols_BS: Tensor) -> Tensor:
        x_BSD = self.symbols(symbols_BS) + self.places
        for block in self.blocks:
            x_BSD = block(x_BSD)
        return self.head(x_BSD)


def examples(num_samples: int, seed: int) -> TensorDataset:
    symbols = torch.randint(NUM_SYMBOLS, (num_samples, LENGTH), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(symbols, symbols.flip(1))


def loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
    """The sum over all symbols and their number: only the trainer divides."""
    symbols, backwards = batch
    return cross_entropy(
        model(symbols).flatten(0, 1), backwards.flatten(), reduction="sum"
    ), backwards.numel()


def main(directory: str) -> None:
    meshwright.fit(  # +
        Reverser(),  # +
        examples(4096, seed=0),  # +
        loss,  # +
        directory=directory,  # +
        num_steps=100,  # +
        batch_samples=64,  # +
        lr=2e-3,  # +
        zero=3,  # +
    )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/copy")
