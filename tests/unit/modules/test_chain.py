"""Chains that a pipeline can split into stages, and chains that it refuses."""

import pytest
import torch
from tests.support.user_modules import plain_token_loss, sequential, token_batch
from torch import nn

from meshwright.errors import SpecError
from meshwright.modules.chain import Chain, ChainStage, require_chain, split_into_stages


class Plain(nn.Module):
    """A forward that is the chain of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(37, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])
        self.head = nn.Linear(8, 37)

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Residual(Plain):
    """A forward that adds something between its parts."""

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Offset(Plain):
    """A parameter outside its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.ones(8))


class Tied(Plain):
    """The head is the table."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.table.weight


ORDER = ["table", "blocks.*", "head"]


def test_a_chain_is_proved_on_a_batch():
    part_io = require_chain(Chain(Plain(), ORDER), plain_token_loss, token_batch(0))
    assert [tuple(one.shape) for one in part_io] == [(8, 12), *[(8, 12, 8)] * 4, (8, 12, 37)]
    assert all(one.is_meta for one in part_io)


def test_a_sequential_needs_no_order():
    assert len(require_chain(Chain(sequential()), plain_token_loss, token_batch(0))) == 8


@pytest.mark.parametrize(
    ("model", "order", "fact"),
    [
        (Residual(), ORDER, "its forward does something else between them"),
        (Plain(), ["table", "blocks.*", "blocks.0", "head"], "part 'blocks.0' is named twice"),
        (Offset(), ORDER, "parameter offset is in none of the parts"),
        (Tied(), ORDER, "parameter table.weight is in table and head"),
        (Plain(), ["table", "blocks.*"], "parameter head.weight is in none of the parts"),
        (Plain(), ["blocks.*", "table", "head"], "part 'blocks.0' does not accept the output"),
        (Plain(), ["table", "layers.*", "head"], "pattern 'layers.*' matches none"),
        (Plain(), None, "the order in which Plain runs its parts is not known"),
    ],
)
def test_a_chain_that_cannot_be_split_is_refused(model, order, fact):
    with pytest.raises(SpecError) as caught:
        require_chain(Chain(model, order), plain_token_loss, token_batch(0))
    assert fact in caught.value.fact
    assert caught.value.hint


def test_a_loss_that_wants_more_than_a_tensor():
    def loss(model, batch):
        return model(batch[0]).logits.sum(), 1

    with pytest.raises(SpecError, match="the loss does not accept the output of the last part"):
        require_chain(
            Chain(Plain(), ORDER), lambda model, batch: loss(lambda x: model(x), batch), token_batch(0)
        )


def test_stages_keep_the_names_and_share_the_parameters():
    model = Plain()
    stages = split_into_stages(Chain(model, ORDER).parts(), 2)
    names = [name for parts in stages for name, _ in ChainStage(parts).named_parameters()]
    assert names == [name for name, _ in model.named_parameters()]
    assert [list(parts) for parts in stages] == [["table", "blocks.0", "blocks.1", "blocks.2"], ["head"]]


def test_more_stages_than_parts():
    with pytest.raises(SpecError, match="6 pipeline stages for the 5 parts"):
        split_into_stages(Chain(Plain(), ORDER).parts(), 6)
