"""Passes on CUDA, compiled or our own kernel, against plain torch on the CPU, and what they cost."""

import pytest
import torch
from torch import Tensor, nn

from meshwright.optim import fused
from meshwright.optim.build import build_optimizer, master_weights, set_learning_rate
from meshwright.spec import OptimSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's compiler of torch's own past
]

# Several shapes, a vector, a stack, one whose last dim is no multiple of a block, one row.
SHAPES = {"a": (96, 512), "b": (40, 256), "c": (30, 100), "d": (3, 8, 512), "e": (1000,), "f": (1, 512)}
NUM_STEPS = 5
CASES = {
    "exact": ("bf16_exact", OptimSpec()),
    "exact_10_bytes": ("bf16_exact", OptimSpec(state="bf16")),
    "stochastic_8_bytes": ("bf16_stochastic", OptimSpec(state="bf16")),
    "stochastic_6_bytes": ("bf16_stochastic", OptimSpec(kind="adamw_8bit")),
    "8_bit": ("fp32", OptimSpec(kind="adamw_8bit")),
    "moments": ("fp32", OptimSpec(state="bf16")),
}
# fp32 arithmetic with fused multiply-adds and a GPU's division: last bits of a step, over five steps.
FP32 = 1e-5
# A last bit tips a rounding to bf16 or to a code now and then: this part of the elements may differ.
TIPPED = 1e-3


def trained(case: str, device: str) -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
    weights, optim = CASES[case]
    dtype = torch.float32 if weights == "fp32" else torch.bfloat16
    generator = torch.Generator().manual_seed(0)

    def drawn(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    named = {name: nn.Parameter(drawn(shape)) for name, shape in SHAPES.items()}
    optimizer = build_optimizer(named, optim, weights=weights)
    for step in range(NUM_STEPS):
        set_learning_rate(optimizer, 1e-3 * (step + 1))
        for weight in named.values():
            weight.grad = drawn(tuple(weight.shape))
        optimizer.step()
    return named, optimizer


@pytest.mark.parametrize("case", CASES)
def test_the_pass_equals_plain_torch(case):
    (ours, optimizer), (theirs, plain) = trained(case, "cuda"), trained(case, "cpu")
    masters = {name: weight.detach() for name, weight in ours.items()} | master_weights(optimizer, ours)
    known = {name: weight.detach() for name, weight in theirs.items()} | master_weights(plain, theirs)
    for name, value in masters.items():
        away = (value.cpu().double() - known[name].double()).abs() > FP32 * (1 + known[name].double().abs())
        allowed = 0.0 if case == "exact" else TIPPED * NUM_STEPS
        assert away.double().mean() <= allowed, f"{name}: {away.double().mean():.1e}"
        for key, state in optimizer.state[ours[name]].items():
            if key.endswith("code"):
                apart = (state.cpu().int() - plain.state[theirs[name]][key].int()).abs()
                assert (apart > 1).double().mean() <= TIPPED, f"{name} {key}"


@pytest.mark.parametrize("case", ("exact_10_bytes", "stochastic_8_bytes", "stochastic_6_bytes"))
def test_an_update_allocates_next_to_nothing(case):
    """One pass in place: no fp32 copy of a weight, a gradient or a moment is ever made."""
    weights, optim = CASES[case]
    matrix = nn.Parameter(torch.randn(4096, 4096, device="cuda").bfloat16())
    optimizer = build_optimizer({"matrix": matrix}, optim, weights=weights)
    matrix.grad = torch.randn_like(matrix)
    optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < matrix.numel() // 4


def test_nothing_is_compiled_anew_from_step_to_step():
    trained("8_bit", "cuda")
    counters = torch._dynamo.utils.counters
    before = sum(counters["stats"].values())
    trained("8_bit", "cuda")
    assert sum(counters["stats"].values()) == before
    assert fused._compiled.cache_info().currsize >= 1
