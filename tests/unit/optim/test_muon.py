"""What Newton-Schulz makes of a matrix, and which parameters it is for."""

import pytest
import torch

from meshwright.optim.muon import is_orthogonalised, orthogonal


@pytest.mark.parametrize("shape", [(8, 8), (4, 16), (16, 4), (3, 5, 12)])
def test_singular_values_come_near_one(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    values = torch.linalg.svdvals(orthogonal(matrices))
    # The polynomial ends between 0.68 and 1.14 for whatever is not vanishing.
    assert ((values > 0.6) & (values < 1.25)).all()
    u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
    # The same rotation: its part along U V^T is the mean of the singular values.
    along = (orthogonal(matrices) * (u @ vh)).sum((-2, -1)) / min(shape[-2:])
    assert (along > 0.6).all()


def test_zero_stays_zero():
    assert not orthogonal(torch.zeros(3, 4)).any()


def test_16_bits_are_enough():
    matrix = torch.randn(32, 64, generator=torch.Generator().manual_seed(2))
    exact, rough = orthogonal(matrix.double()), orthogonal(matrix.bfloat16()).double()
    # bf16 keeps 8 bits and the polynomial multiplies errors by up to 3.4 five times over.
    assert (exact - rough).norm() / exact.norm() < 0.05


def test_embeddings_head_and_vectors_are_left_to_adamw():
    names = {"embedding.tokens.weight": (8, 4), "head.weight": (8, 4), "blocks.0.mlp.up.weight": (8, 4)}
    names |= {"norm.weight": (4,), "blocks.0.mlp.experts.up": (2, 8, 4)}
    chosen = {name for name, shape in names.items() if is_orthogonalised(name, torch.Size(shape))}
    assert chosen == {"blocks.0.mlp.up.weight", "blocks.0.mlp.experts.up"}
