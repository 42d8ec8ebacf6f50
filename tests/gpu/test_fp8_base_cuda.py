"""A frozen base in fp8 on tensor cores: outputs and input gradients of the emulation, and training steps."""

import os

import pytest
import torch
import torch.distributed as dist
from tests.equivalence.test_fp8_base import LORA, base_run

from meshwright.mesh import World, build_mesh
from meshwright.models.layers.experts_stored import StoredExperts, StoredFp8GroupedLinears
from meshwright.precision.fp8.linear import NO_AMAX_GROUPS
from meshwright.precision.fp8.stored import (
    Fp8Scale,
    StoredFp8Matmul,
    encode_stored,
    stored_scale,
    weight_amax,
)
from meshwright.precision.fp8.transpose import deferred_stacked_transpose
from meshwright.spec import DataSpec, Fp8Spec, MemorySpec, MoeSpec, ParallelSpec, PrecisionSpec, SyntheticSpec
from meshwright.spec.memory import Recompute
from meshwright.train.build import build_data, build_training
from meshwright.train.step import StepOutcome, Training, train_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
        reason="needs a CUDA device with fp8 (sm89)",
    ),
    # torch's own compiler uses what torch has deprecated.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
DEVICE = torch.device("cuda", 0)
# As in test_fp8_cuda.py: Hopper adds products with about 14 bits, and the result is rounded to bf16.
NATIVE = 2**-7


def _normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, torch.bfloat16)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_tensor_cores_give_the_emulated_outputs_and_gradients(*, is_compiled: bool) -> None:
    weights = [_normal(rows, 1024, seed=rows) for rows in (768, 256)]
    scale = Fp8Scale().to_empty(device=DEVICE)
    scale.value.copy_(stored_scale(torch.stack([one.abs().amax().float() for one in weights]).amax()))
    stored = [encode_stored(one, scale.value) for one in weights]
    found = []
    for native in (True, False):
        matmul = StoredFp8Matmul(scale, dtype=torch.bfloat16, native=native, amax_groups=NO_AMAX_GROUPS)
        fused = torch.compile(matmul.fused) if is_compiled else matmul.fused
        x = _normal(512, 1024, seed=1).requires_grad_()
        ys = fused(x, stored)
        # Gradients that do not depend on the outputs: a loss would make more of their rounding.
        torch.autograd.backward(ys, [_normal(*y.shape, seed=y.shape[1]) for y in ys])
        found.append([*ys, x.grad])
    for ours, exact in zip(*found, strict=True):
        error = (ours.double() - exact.double()).norm() / exact.double().norm()
        assert error < NATIVE


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="torch's grouped fp8 kernel is for Hopper",
)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_tensor_cores_give_the_emulated_outputs_of_experts(*, is_compiled: bool) -> None:
    """Rows of several experts, of which one has none; the transposes of backward are tile by tile."""
    counts_E = torch.tensor([200, 0, 312], device=DEVICE)
    full = [_normal(3, rows, 1024, seed=rows) for rows in (768, 256)]
    scales = [stored_scale(weight_amax(one)) for one in full]
    weights = [
        StoredExperts(encode_stored(one, scale), scale) for one, scale in zip(full, scales, strict=True)
    ]
    found = []
    for native in (True, False):
        matmul = StoredFp8GroupedLinears(dtype=torch.bfloat16, native=native)
        forward = torch.compile(matmul) if is_compiled else matmul
        x = _normal(512, 1024, seed=1).requires_grad_()
        ys = forward((x, x), weights, counts_E)
        torch.autograd.backward(ys, [_normal(*y.shape, seed=y.shape[1]) for y in ys])
        found.append([*ys, x.grad])
    for ours, exact in zip(*found, strict=True):
        error = (ours.double() - exact.double()).norm() / exact.double().norm()
        assert error < NATIVE


def test_small_weights_in_fp16_are_stored_as_in_fp32() -> None:
    """The reciprocal of their scale is above the largest number of fp16."""
    weight = (1e-3 * _normal(64, 128, seed=3).float()).half()
    scale = stored_scale(weight_amax(weight))
    assert 1 / scale > torch.finfo(torch.float16).max
    assert torch.equal(encode_stored(weight, scale), encode_stored(weight.float(), scale))


def test_stacked_bytes_are_transposed_tile_by_tile() -> None:
    stored = torch.randint(0, 256, (5, 200, 336), dtype=torch.uint8, device=DEVICE)
    found = deferred_stacked_transpose(stored, stored)
    assert torch.equal(found, stored.transpose(1, 2).contiguous())


def _trained(
    base: str, *, is_compiled: bool, recompute: Recompute = "none", moe: MoeSpec | None = None
) -> tuple[Training, list[StepOutcome]]:
    """After four steps of adapters on random weights; with base=weights, fp8 matmuls cast full weights."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    fp8 = Fp8Spec(recipe="current", bf16_layers_each_end=0, experts=moe is not None)
    fp8 = fp8 if base == "weights" else None
    run = base_run(
        LORA.with_(base=base, rank=8),
        precision=PrecisionSpec(compute="bf16", fp8=fp8),
        memory=MemorySpec(recompute=recompute),
        compile=is_compiled,
        device="cuda",
        data=DataSpec(synthetic=SyntheticSpec(num_documents=50), sequence_length=128, batch_sequences=4),
    )
    attention = run.model.attention.with_(num_heads=4, num_kv_heads=2, head_width=64)
    model = run.model.with_(
        num_layers=4, width=256, vocab_size=512, max_positions=128, init_std=0.02,
        attention=attention, mlp=run.model.mlp.with_(width=512), moe=moe,
    )  # fmt: skip
    run = run.with_(model=model)
    mesh = build_mesh(ParallelSpec(), World(rank=0, local_rank=0, num_ranks=1, device=DEVICE))
    training, batches = build_training(run, mesh), build_data(run, mesh)
    outcomes = [train_step(training, next(batches), learning_rate=1e-2) for _ in range(4)]
    batches.close()
    return training, outcomes


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_adapters_train_on_stored_weights_as_on_cast_ones(recompute: Recompute) -> None:
    """Eager, compiled, and beside `precision.fp8` on full weights, whose fp8 values are the same."""
    _, cast = _trained("weights", is_compiled=False, recompute=recompute)
    training, eager = _trained("fp8", is_compiled=False, recompute=recompute)
    _, compiled = _trained("fp8", is_compiled=True, recompute=recompute)
    linears = [
        one for one in training.program.stages[0].modules() if getattr(one, "weight_scale", None) is not None
    ]
    assert len(linears) == 7 * 4
    assert all(one.weight.dtype == torch.uint8 and one.weight.grad is None for one in linears)
    for outcomes in (eager, compiled):
        assert float(outcomes[0].loss) == pytest.approx(float(cast[0].loss), rel=1e-3)
        assert float(outcomes[0].grad_norm) == pytest.approx(float(cast[0].grad_norm), rel=2e-2)
        assert float(outcomes[-1].loss) < float(outcomes[0].loss)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_adapters_train_on_stored_experts_as_on_cast_ones(recompute: Recompute) -> None:
    """Eager, compiled, and beside `precision.fp8.experts` on full weights, whose fp8 values are the same."""
    moe = MoeSpec(num_experts=8, top_k=2, width=256)
    _, cast = _trained("weights", is_compiled=False, recompute=recompute, moe=moe)
    training, eager = _trained("fp8", is_compiled=False, recompute=recompute, moe=moe)
    _, compiled = _trained("fp8", is_compiled=True, recompute=recompute, moe=moe)
    experts = [one for one in training.program.stages[0].modules() if getattr(one, "scales", None)]
    assert len(experts) == 4
    assert all(one.down.dtype == torch.uint8 and one.down.grad is None for one in experts)
    for outcomes in (eager, compiled):
        assert float(outcomes[0].loss) == pytest.approx(float(cast[0].loss), rel=1e-3)
        assert float(outcomes[0].grad_norm) == pytest.approx(float(cast[0].grad_norm), rel=2e-2)
        assert float(outcomes[-1].loss) < float(outcomes[0].loss)
