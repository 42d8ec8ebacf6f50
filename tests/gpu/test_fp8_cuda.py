"""fp8 on tensor cores: the bits of the emulation, its products up to the order of sums, no graph breaks."""

import os

import pytest
import torch
import torch.distributed as dist
from tests.equivalence.test_fp8 import fp8_run

from meshwright.mesh import World, build_mesh
from meshwright.models.layers.experts_fp8 import Fp8GroupedLinears
from meshwright.ops.sharded import local
from meshwright.parallel.fp8 import fp8_sites
from meshwright.parallel.fp8_experts import expert_sites
from meshwright.precision.fp8.cast import cast_transpose, deferred_cast_transpose
from meshwright.precision.fp8.expert_weights import CachedFp8Experts, encode_experts, expert_scales
from meshwright.precision.fp8.grouped_matmul import is_grouped_native
from meshwright.precision.fp8.linear import NO_AMAX_GROUPS, Fp8Options, fp8_linears
from meshwright.precision.fp8.matmul import emulated_matmul, is_native, matmul
from meshwright.precision.fp8.quantise import encode, power_of_two_scale, quantise
from meshwright.precision.fp8.recipes import E4M3, E5M2, RECIPES
from meshwright.spec import (
    DataSpec,
    Fp8Spec,
    MemorySpec,
    MoeSpec,
    ParallelSpec,
    PrecisionSpec,
    SyntheticSpec,
)
from meshwright.train.build import build_data, build_training
from meshwright.train.step import StepOutcome, Training, train_step

CUDA = torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not CUDA or torch.cuda.get_device_capability() < (8, 9), reason="needs a CUDA device with fp8 (sm89)"
    ),
    # torch's own compiler uses what torch has deprecated.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
T, K, N = 512, 1024, 768
# Products of fp8 numbers are exact in fp32. Hopper adds them with about 14 bits: 2^-13 of the amax term
# per addition, errors of both signs over K terms; the result is rounded to bf16 (2^-9).
NATIVE = 2**-7
DEVICE = torch.device("cuda", 0)


def _normal(*shape: int, seed: int, std: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * std


def _error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("block", [None, (1, 128), (128, 128), (1, 32)])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_quantisation_has_the_bits_of_the_cpu(dtype, block, is_compiled):
    x = _normal(T, K, seed=0).bfloat16()
    x[7] *= 1e-6
    x[9, 3] = 3e4
    function = torch.compile(quantise, fullgraph=True) if is_compiled else quantise
    here, there = quantise(x, dtype, block), function(x.cuda(), dtype, block)
    assert torch.equal(here.values_MK.view(torch.uint8), there.values_MK.view(torch.uint8).cpu())
    assert torch.equal(here.scale, there.scale.cpu())


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().contiguous().view(torch.uint8)


def _awkward(rows: int, columns: int, source: torch.dtype) -> torch.Tensor:
    """Numbers of all sizes, some beyond the formats and below them, some that are none."""
    x = _normal(rows, columns, seed=0) * torch.exp2(_normal(rows, columns, seed=1, std=8.0))
    x[3, 5], x[7, 2], x[8, 2], x[9, 0] = torch.inf, -torch.inf, 1e30, 1e-30
    return x.to(source)


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("exponent", [-20, 0, 6])
def test_cast_and_transpose_have_the_bits_of_the_cpu(dtype, source, exponent):
    """Of parts that fill no tile and are columns of wider matrices."""
    scale, parts = (
        torch.tensor(2.0**exponent),
        [_awkward(200, 150, source)[:, 7:143], _awkward(200, 40, source)],
    )
    expected = encode(torch.cat(parts, 1), scale, dtype, None).values_MK
    cast = cast_transpose([part.cuda() for part in parts], scale.cuda(), dtype, with_amax=True)
    assert torch.equal(_bits(cast.values_MK), _bits(expected))
    assert torch.equal(_bits(cast.transposed_KM), _bits(expected.t()))
    assert cast.tile_amax.amax() == torch.inf
    rows = [part.cuda().t().contiguous() for part in parts]
    late = deferred_cast_transpose(rows, scale.cuda(), dtype, cast.tile_amax)
    assert torch.equal(_bits(late), _bits(expected))


def test_cast_keeps_nan_and_reports_it():
    x = _normal(130, 140, seed=0).bfloat16()
    x[129, 139] = torch.nan
    cast = cast_transpose([x.cuda()], torch.tensor(1.0, device=DEVICE), E4M3, with_amax=True)
    assert cast.values_MK.float().isnan().nonzero().tolist() == [[129, 139]]
    assert cast.transposed_KM.float().isnan().nonzero().tolist() == [[139, 129]]
    assert cast.tile_amax.isinf().sum() == 1
    amax = cast_transpose([x[:128].cuda()], torch.tensor(1.0, device=DEVICE), E4M3, with_amax=True).tile_amax
    assert amax.amax() == x[:128].abs().amax().float()


@pytest.mark.parametrize("recipe", ["current", "blockwise"])
def test_several_matrices_are_one_with_all_their_rows(recipe):
    weights = [_normal(rows, K, seed=rows, std=0.02).cuda().bfloat16() for rows in (256, 512)]
    x = _normal(T, K, seed=0).cuda().bfloat16().requires_grad_()
    native = is_native(RECIPES[recipe], DEVICE)
    options = Fp8Options(recipe, native, NO_AMAX_GROUPS)
    (first, second), _ = fp8_linears(x, weights, options)
    (concatenated,), _ = fp8_linears(x, [torch.cat(weights)], options)
    assert torch.equal(torch.cat((first, second), 1), concatenated)


def test_scales_have_the_bits_of_the_cpu():
    amax = torch.cat([2.0 ** torch.arange(-140.0, 128.0) * factor for factor in (1.0, 1.75, 1.7500002)])
    amax = torch.cat([amax, torch.tensor([0.0, torch.inf, torch.nan])])
    for dtype in (E4M3, E5M2):
        assert torch.equal(
            power_of_two_scale(amax, dtype).view(torch.int32),
            power_of_two_scale(amax.cuda(), dtype).cpu().view(torch.int32),
        )


@pytest.mark.parametrize("recipe", ["current", "blockwise", "mxfp8"])
def test_the_card_multiplies_like_the_emulation(recipe):
    rule = RECIPES[recipe]
    if not is_native(rule, DEVICE):
        pytest.skip(f"this card does not multiply {recipe} itself")
    x, weight, grad = _normal(T, K, seed=0), _normal(N, K, seed=1, std=0.02), _normal(T, N, seed=2, std=1e-4)
    pairs = {
        "forward": (
            quantise(x.cuda(), E4M3, rule.token_block),
            quantise(weight.cuda(), E4M3, rule.weight_block),
        ),
        "dx": (
            quantise(grad.cuda(), rule.gradient, rule.token_block),
            quantise(weight.t().contiguous().cuda(), E4M3, rule.weight_block),
        ),
        "dW": (
            quantise(grad.t().contiguous().cuda(), rule.gradient, rule.token_block),
            quantise(x.t().contiguous().cuda(), E4M3, rule.token_block),
        ),
    }
    for name, (a, b) in pairs.items():
        for to in (torch.bfloat16, torch.float32):
            fast = name == "forward"
            ours = matmul(a, b, to=to, native=True, fast_accumulation=fast)
            assert ours.dtype == to
            assert _error(ours, emulated_matmul(a, b, to=torch.float64)) < NATIVE, name


@pytest.mark.parametrize("recipe", ["current", "blockwise", "mxfp8"])
def test_compiled_in_one_graph(recipe):
    options = Fp8Options(recipe, is_native(RECIPES[recipe], DEVICE), NO_AMAX_GROUPS)

    def linear(x, weight):
        return fp8_linears(x, [weight], options)[0][0]

    results = []
    for function in (linear, torch.compile(linear, fullgraph=True)):
        x = _normal(T, K, seed=0).cuda().bfloat16().requires_grad_()
        weight = _normal(N, K, seed=1, std=0.02).cuda().requires_grad_()
        y = function(x, weight)
        y.backward(_normal(T, N, seed=2, std=1e-4).cuda().bfloat16())
        results.append((y.detach(), x.grad, weight.grad))
    for eager, compiled in zip(*results, strict=True):
        # The same fp8 numbers; a matmul may choose another kernel, and both results are rounded to bf16.
        assert _error(compiled, eager) < NATIVE


def _experts(recipe: str, counts: list[int], d: int = 1024, f: int = 768):
    """Rows of very different sizes, experts, and the gradient of the output."""
    num_rows = sum(counts)
    x = _normal(num_rows, d, seed=0) * torch.exp2(_normal(num_rows, 1, seed=3, std=4.0))
    weight, grad = _normal(len(counts), f, d, seed=1, std=0.02), _normal(num_rows, f, seed=2, std=1e-4)
    matmul = [Fp8GroupedLinears(recipe, dtype=torch.bfloat16, native=native) for native in (True, False)]
    return x.bfloat16().cuda(), weight.cuda(), grad.bfloat16().cuda(), torch.tensor(counts).cuda(), *matmul


COUNTS = {"ragged": [130, 0, 1, 200, 17], "even": [256] * 8, "one": [77], "many": [3] * 130}


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("recipe", ["current", "blockwise"])
def test_grouped_matmuls_equal_their_emulation(recipe, counts):
    if not is_grouped_native(RECIPES[recipe], DEVICE):
        pytest.skip(f"this card has no grouped kernel for {recipe}")
    x, weight, grad, counts_E, native, emulated = _experts(recipe, COUNTS[counts])
    results = []
    for function in (native, emulated):
        x_own, weight_own = x.clone().requires_grad_(), weight.clone().requires_grad_()
        (y,) = function([x_own], [weight_own], counts_E)
        y.backward(grad)
        results.append((y.detach(), x_own.grad, weight_own.grad))
    for ours, exact in zip(*results, strict=True):
        assert ours.dtype == exact.dtype
        assert _error(ours, exact) < NATIVE


@pytest.mark.parametrize("recipe", ["current", "blockwise"])
def test_experts_cast_to_the_bits_of_the_cpu(recipe):
    rule, weight = (
        RECIPES[recipe],
        _normal(5, 384, 256, seed=0) * torch.exp2(_normal(5, 1, 1, seed=1, std=9.0)),
    )
    cached = CachedFp8Experts(recipe, weight.shape).to_empty(device=DEVICE)
    cached.cast(weight.cuda())
    expected = encode_experts(weight, expert_scales(weight, rule), rule)
    assert torch.equal(cached.scale_ERC.cpu(), expected.scale_ERC)
    assert torch.equal(_bits(cached.values_ENK), _bits(expected.values_ENK))
    assert torch.equal(_bits(cached.transposed_EKN), _bits(expected.values_ENK.transpose(1, 2)))


@pytest.mark.parametrize("recipe", ["current", "blockwise"])
def test_grouped_matmuls_compile_in_one_graph(recipe):
    x, weight, grad, counts_E, native, _ = _experts(recipe, COUNTS["ragged"])
    if not is_grouped_native(RECIPES[recipe], DEVICE):
        pytest.skip(f"this card has no grouped kernel for {recipe}")
    results = []
    for function in (native, torch.compile(native, fullgraph=True)):
        x_own, weight_own = x.clone().requires_grad_(), weight.clone().requires_grad_()
        (y,) = function([x_own], [weight_own], counts_E)
        y.backward(grad)
        results.append((y.detach(), x_own.grad, weight_own.grad))
    for eager, compiled in zip(*results, strict=True):
        assert _error(compiled, eager) < NATIVE


@pytest.mark.parametrize("recipe", ["current", "blockwise"])
def test_a_model_with_experts_in_fp8_trains_compiled_as_it_does_eagerly(recipe):
    moe = MoeSpec(num_experts=8, top_k=2, width=256)
    _, eager = _trained(recipe, moe=moe, is_compiled=False)
    training, compiled = _trained(recipe, cast_weights="per_step", moe=moe, is_compiled=True)
    assert len(expert_sites(training.program.stages)) == 2 * 2
    assert float(eager[0].loss) == pytest.approx(float(compiled[0].loss), rel=1e-3)
    for outcomes in (eager, compiled):
        assert float(outcomes[-1].loss) < float(outcomes[0].loss)


def _trained(
    recipe: str,
    recompute: str = "none",
    cast_weights: str = "per_microbatch",
    *,
    is_compiled: bool,
    moe: MoeSpec | None = None,
) -> tuple[Training, list[StepOutcome]]:
    """After four steps."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    run = fp8_run(
        precision=PrecisionSpec(
            compute="bf16",
            fp8=Fp8Spec(
                recipe=recipe, bf16_layers_each_end=1, cast_weights=cast_weights, experts=moe is not None
            ),
        ),
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
    outcomes = [train_step(training, next(batches), learning_rate=1e-3) for _ in range(4)]
    batches.close()
    return training, outcomes


@pytest.mark.parametrize("recipe", ["current", "delayed", "blockwise", "mxfp8"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_model_trains_compiled_as_it_does_eagerly(recipe, recompute):
    """Weights are cast per micro-batch in the one and once per step in the other.

    Compared in the first step only: AdamW's first update is the sign of each gradient, and signs of gradients
    that are rounding alone fall as they like (1.5% of the second loss, in plain bf16 as well).
    """
    _, eager = _trained(recipe, recompute, is_compiled=False)
    _, compiled = _trained(recipe, recompute, "per_step", is_compiled=True)
    assert float(eager[0].loss) == pytest.approx(float(compiled[0].loss), rel=1e-3)
    # Gradients of bf16 are within 0.7% of those of fp32, compiled or not; fp8 may round apart by 2^-4.
    assert float(eager[0].grad_norm) == pytest.approx(float(compiled[0].grad_norm), rel=2e-2)
    for outcomes in (eager, compiled):
        assert float(outcomes[-1].loss) < float(outcomes[0].loss)


@pytest.mark.parametrize("recipe", ["current", "delayed", "blockwise"])
def test_cached_weights_follow_the_updates(recipe):
    training, _ = _trained(recipe, cast_weights="per_step", is_compiled=False)
    rule, found = RECIPES[recipe], fp8_sites(training.program.stages)
    assert len(found) == 2 * 4
    for site in found:
        cached_weight = site.matmul.cached_weight
        weight = torch.cat([local(linear.weight) for linear in site.linears])
        expected = quantise(weight.detach(), rule.operand, rule.weight_block)
        assert torch.equal(_bits(cached_weight.values_NK), _bits(expected.values_MK)), site.name
        assert torch.equal(cached_weight.scale, expected.scale)
        transposed = quantise(weight.detach().t().contiguous(), rule.operand, rule.weight_block)
        assert torch.equal(_bits(cached_weight.transposed_KN), _bits(transposed.values_MK)), site.name
