"""Unmodified models of timm and torchvision: every ZeRO stage equals a plain loop; memory formats stay."""

from typing import Any

import pytest
import torch
from tests.support.equivalence import this_world
from tests.support.module_training import (
    fit_spec,
    microbatches_of_rank,
    offload,
    parallel,
    recompute,
    relative_errors,
    train_cases,
    train_plain_loop,
)
from tests.support.user_modules import VISION, user_module
from tests.support.vision_modules import require_vision
from torch import Tensor, nn

from meshwright.mesh import build_mesh
from meshwright.modules.blocks import find_blocks
from meshwright.modules.build_training import build_module_training
from meshwright.spec.modules import FitSpec

RTOL = 1e-9
LAYOUTS = {
    "dp2": {"parallel": parallel(dp_replicate=2)},
    "zero_2 recompute": {"parallel": parallel(dp_shard=2, zero=2), "memory": recompute("full")},
    "zero_3": {"parallel": parallel(dp_shard=2, zero=3), "memory": offload("optimizer")},
    "zero_3 recompute": {"parallel": parallel(dp_shard=2, zero=3), "memory": recompute("selective")},
}
BLOCKS = {"torchvision resnet": "layer*.*"}  # one a stage: nothing that looks like a list of blocks
WITH_BATCH_NORM = ("timm resnet", "torchvision mobilenet", "torchvision resnet")
# The first has 5 million parameters, since its widths are fixed; the others repeat what the rest proves.
WIDE = ("torchvision resnet", "timm vit")


def _spec(name: str, **case: Any) -> FitSpec:
    """Batch norm has the statistics of the full batch where a rank computes its part in one micro-batch."""
    has_norms = name in WITH_BATCH_NORM
    return fit_spec(
        microbatch_samples=4 if has_norms else 2, sync_batch_norm=has_norms, blocks=BLOCKS.get(name), **case
    )


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.soak] if name in WIDE else []) for name in VISION]
)
def test_two_ranks_equal_one_device(ranks, name):
    require_vision()
    specs = [_spec(name, **case) for case in LAYOUTS.values()]
    expected = train_plain_loop(name, "sgd")
    for by_rank in ranks.run(train_cases, 2, name, specs):
        for case, trained in zip(LAYOUTS, by_rank, strict=True):
            errors = relative_errors(trained, expected)
            assert max(errors.values()) <= RTOL, (case, max(errors, key=errors.get))


def formats(name: str, specs: list[FitSpec]) -> list[tuple[set[bool], set[bool]]]:
    """Whether weights of convolutions, and what blocks give, lie in channels_last after a step."""
    return [_formats(name, spec) for spec in specs]


def _formats(name: str, spec: FitSpec) -> tuple[set[bool], set[bool]]:
    user, outputs = user_module(name), set[bool]()
    model, mesh = user.build(), build_mesh(spec.parallel, this_world())

    def look(_module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> None:
        outputs.add(_is_channels_last(output))

    for block in find_blocks(model, spec.blocks).values():
        block.register_forward_hook(look)
    batch = user.batch(0)
    training = build_module_training(model, user.loss, spec, mesh, batch)
    training.program.accumulate(microbatches_of_rank(batch, spec, mesh.dp_rank))
    training.optimizer.step()
    training.program.gather_parameters()
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Conv2d)]
    return {_is_channels_last(weight) for weight in weights}, outputs


def _is_channels_last(tensor: Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", ["timm resnet", "timm convnext", "torchvision mobilenet"])
def test_channels_last_is_kept(ranks, name):
    """FSDP2 holds weights in rows, so under it only what flows keeps the format."""
    require_vision()
    specs = [_spec(name, **case) for case in LAYOUTS.values()]
    for by_rank in ranks.run(formats, 2, name, specs):
        assert [outputs for _, outputs in by_rank] == [{True}] * len(specs)
        assert [weights == {True} for weights, _ in by_rank] == [spec.parallel.zero < 3 for spec in specs]
