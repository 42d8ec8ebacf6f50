"""Recompute changes bytes, never numbers; and it stays inside what the compiler sees."""

import pytest
import torch
import torch._dynamo as dynamo
from tests.support.runs import MODELS
from torch import nn
from torch._logging._internal import warning_once

from meshwright.memory.recompute import apply_recompute
from meshwright.memory.torch_checkpoint import silence_in_place_warning
from meshwright.models.decoder import Decoder, build_decoder
from meshwright.models.initialise import initialise
from meshwright.spec import MemorySpec

KINDS = ["full", "selective"]


def _model(recompute: str, *, every: int = 1, is_compiled: bool = False, dropout: float = 0.1) -> Decoder:
    model = build_decoder(MODELS["gqa"].with_(num_layers=3, dropout=dropout))
    initialise(model, 0)
    apply_recompute(model.blocks.values(), MemorySpec(recompute=recompute, recompute_every=every))
    if is_compiled:
        for block in model.blocks.values():
            block.compile(backend="aot_eager")
    return model


def _gradients(model: Decoder) -> tuple[torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(1)
    tokens_BS = torch.randint(60, (2, 16), generator=torch.Generator().manual_seed(2))
    positions_BS = torch.arange(16).expand(2, 16)
    loss = model(tokens_BS, positions_BS=positions_BS, targets_BS=tokens_BS.roll(-1, 1))
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_bitwise_equal_with_dropout(kind, every):
    loss, gradients = _gradients(_model("none"))
    recomputed, found = _gradients(_model(kind, every=every))
    assert torch.equal(loss, recomputed)
    assert all(torch.equal(a, b) for a, b in zip(gradients, found, strict=True))


@pytest.mark.parametrize(("every", "expected"), [(1, 6), (2, 5)])
def test_full_enters_a_block_twice(every, expected):
    """Three blocks; the second time ends as soon as backward has what it needs, so entries are counted."""
    model, entries = build_decoder(MODELS["gqa"].with_(num_layers=3)), []
    initialise(model, 0)
    for block in model.blocks.values():
        block.mlp.register_forward_pre_hook(lambda *_: entries.append(1))
    apply_recompute(model.blocks.values(), MemorySpec(recompute="full", recompute_every=every))
    _gradients(model)
    assert len(entries) == expected


def test_selective_saves_matmuls():
    """Matmuls are not recomputed: fewer of them than with full, as many as without recompute."""
    from torch.utils.flop_counter import FlopCounterMode

    flops = {}
    for kind in ("none", *KINDS):
        model = _model(kind, dropout=0.0)
        with FlopCounterMode(display=False) as counter:
            _gradients(model)
        flops[kind] = counter.get_total_flops()
    assert flops["selective"] == flops["none"] < flops["full"]


@pytest.mark.parametrize("kind", ["none", *KINDS])
def test_the_compiler_sees_a_recomputed_block(kind, caplog):
    dynamo.reset()
    silence_in_place_warning()
    warning_once.cache_clear()
    dynamo.utils.counters.clear()
    loss, _ = _gradients(_model(kind, is_compiled=True, dropout=0.0))
    assert dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    assert not dynamo.utils.counters["graph_break"]
    assert not [one for one in caplog.records if "in-place" in one.getMessage()]
    eager, _ = _gradients(_model("none", dropout=0.0))
    torch.testing.assert_close(loss, eager)


def _convolutions(recompute: str) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU()) for _ in range(2)]
    apply_recompute(blocks, MemorySpec(recompute=recompute))
    return nn.Sequential(*blocks)


@pytest.mark.parametrize("kind", KINDS)
def test_running_statistics_move_once(kind):
    """Batch norm sees every batch once, though its forward runs twice: gradients and buffers bitwise."""
    images = torch.randn(4, 2, 5, 5, generator=torch.Generator().manual_seed(1))
    found = []
    for recompute in ("none", kind):
        model = _convolutions(recompute)
        for _ in range(2):
            model(images).square().sum().backward()
        found.append([*(one.grad for one in model.parameters()), *model.buffers()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert int(found[1][-1]) == 2  # num_batches_tracked
