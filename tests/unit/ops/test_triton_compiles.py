"""Every Triton kernel compiles to machine code for the GPUs that are supported, on a machine without one."""

import re
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from tests.support.triton_compiler import SHARED_BYTES, compiled_launches
from tests.support.triton_interpreter import needs_triton

import meshwright

HALF, FP8 = torch.bfloat16, torch.float8_e4m3fn
FLOATS = (torch.float32, HALF)
LAUNCHES: dict[str, Callable[[], None]] = {}
"""What launches the kernels of one file, by the file's name."""
Launch = Callable[[], None]


def launches(file: str) -> Callable[[Launch], Launch]:
    def added(launch: Launch) -> Launch:
        LAUNCHES[file] = launch
        return launch

    return added


@launches("dropout_triton")
def drop() -> None:
    from meshwright.ops.dropout_triton import drop_kernel

    for dtype, width in product((*FLOATS, torch.float16), (1024, 1030)):
        drop_kernel(torch.empty(8, width, dtype=dtype), torch.arange(8), 4096, -5, 1.1)


@launches("adapted_swiglu_triton")
def add_adapters_and_activate() -> None:
    from meshwright.ops.adapted_swiglu_triton import MAX_RANKS, add_and_activate

    for num_ranks in (8, 32, MAX_RANKS):
        plain, u, b = (
            torch.empty(shape, dtype=HALF) for shape in ((64, 256), (64, num_ranks), (256, num_ranks))
        )
        add_and_activate(plain, u, b)


@launches("swiglu_triton")
def swiglu() -> None:
    from meshwright.ops.swiglu_triton import swiglu_backward

    for dtype, amax in product(FLOATS, (None, torch.empty(64))):
        swiglu_backward(torch.empty(64, 128, dtype=dtype), torch.empty(64, 256, dtype=dtype), amax)


@launches("host_rows_triton")
def host_rows() -> None:
    from meshwright.ops.host_rows_triton import read_host_rows

    for dtype in FLOATS:
        read_host_rows(torch.empty(64, 128, dtype=dtype), torch.arange(5))


@launches("gelu_triton")
def gelu() -> None:
    from meshwright.ops.gelu_triton import gelu_backward

    for dtype in FLOATS:
        gelu_backward(torch.empty(64, 130, dtype=dtype), torch.empty(64, 130, dtype=dtype))


@launches("nf4_triton")
def nf4() -> None:
    from meshwright.ops.nf4_triton import dequantise_into

    for dtype in FLOATS:
        packed = torch.empty(64, 64, dtype=torch.uint8)
        dequantise_into(packed, torch.empty(64, 2), torch.empty(64, 128, dtype=dtype))


@launches("expert_rows_triton")
def expert_rows() -> None:
    from meshwright.ops.expert_rows_triton import sum_rows_kernel

    rows, places = torch.empty(64, 128, dtype=HALF), torch.zeros(32, 2, dtype=torch.int64)
    for other in (None, rows):
        sum_rows_kernel(rows, other, places)


@launches("loss_triton")
def loss() -> None:
    from meshwright.ops.loss_triton import TRITON, scaled_copy

    targets, row = torch.zeros(4, dtype=torch.int64), torch.empty(4)
    for dtype in FLOATS:
        logits = torch.empty(4, 10_000, dtype=dtype)
        TRITON.statistics(logits, targets)
        TRITON.to_gradient(logits, row, targets, row)
        TRITON.unscaled_gradient(logits, targets)
        scaled_copy(torch.empty(5, 7), torch.empty(()), dtype)


@launches("adamw_triton")
def adamw() -> None:
    from meshwright.optim.adamw_triton import adamw_kernel
    from meshwright.optim.fused import AdamScalars
    from meshwright.optim.rounding_noise import NoiseGrid

    grid = NoiseGrid(torch.zeros(4, dtype=torch.int32), torch.zeros(2048, dtype=torch.int32))
    key, fp32, bits = (
        torch.zeros(1, dtype=torch.int32),
        torch.empty(4, 2048),
        torch.empty(4, 2048, dtype=torch.int16),
    )
    for scale in (1.0, torch.ones(())):
        scalars = AdamScalars(0.99, 0.1, 0.5, 0.1, 0.99, 0.01, 1e-8, scale)
        adamw_kernel(fp32, None, fp32, fp32, fp32, scalars, None, key)  # all in fp32
        adamw_kernel(bits, bits, bits.view(HALF), bits, bits, scalars, grid, key)  # bf16 with lower bits
        adamw_kernel(bits, None, bits.view(HALF), bits, bits, scalars, grid, key)  # stochastic rounding


@launches("transpose_triton")
def transpose() -> None:
    from meshwright.precision.fp8.transpose_triton import transpose_tiles

    for dtype, shape in product((torch.uint8, HALF, torch.float32), ((128, 192), (3, 128, 192))):
        transpose_tiles(torch.empty(shape, dtype=dtype))


@launches("cast_triton")
def cast() -> None:
    from meshwright.precision.fp8.cast_triton import cast_tiles

    for dtype, amax in product(FLOATS, (None, torch.empty(4))):
        values, transposed = torch.empty(128, 192, dtype=FP8), torch.empty(192, 128, dtype=FP8)
        cast_tiles(torch.empty(128, 192, dtype=dtype), torch.ones(()), values, transposed, amax)


@launches("cast_experts_triton")
def cast_experts() -> None:
    from meshwright.precision.fp8.cast_experts_triton import cast_expert_tiles

    for scales in ((3, 1, 1), (3, 1, 2)):
        values, transposed = torch.empty(3, 128, 256, dtype=FP8), torch.empty(3, 256, 128, dtype=FP8)
        cast_expert_tiles(torch.empty(3, 128, 256, dtype=HALF), torch.ones(scales), values, transposed)


@launches("grouped_triton")
def grouped() -> None:
    from meshwright.precision.fp8.grouped_triton import grouped_block_kernel

    a, b = torch.empty(64, 256, dtype=FP8), torch.empty(3, 128, 256, dtype=FP8)
    ends = torch.zeros(3, dtype=torch.int32)
    grouped_block_kernel(a, b, torch.ones(2, 64), torch.ones(3, 1, 2), ends, torch.empty(64, 128, dtype=HALF))


# The fp8 format of these begins with Ada (8.9).
NEEDS_FP8 = {"grouped_triton", "cast_triton", "cast_experts_triton"}
TARGETS = [
    (file, capability)
    for file, capability in product(LAUNCHES, SHARED_BYTES)
    if capability >= 89 or file not in NEEDS_FP8
]


@needs_triton
@pytest.mark.parametrize(("file", "capability"), TARGETS)
def test_a_kernel_compiles(file: str, capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with compiled_launches(monkeypatch, capability) as found:
        LAUNCHES[file]()
    assert found
    for each in found:
        assert each.cubin.startswith(b"\x7fELF"), each.name
        assert each.shared_bytes <= SHARED_BYTES[capability], each.name


@needs_triton
def test_every_launched_kernel_is_among_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new file of kernels, or a new kernel in one of them, has to be added above."""
    folder = Path(meshwright.__file__).parent
    files = {path.stem: path for path in folder.rglob("*_triton.py")}
    assert set(LAUNCHES) == set(files)
    for name, path in files.items():
        with compiled_launches(monkeypatch, 90) as found:
            LAUNCHES[name]()
        kernels = re.findall(r"@triton\.jit\s+def (\w+)\(", text := path.read_text())
        launched = {kernel for kernel in kernels if len(re.findall(rf"\b{kernel}(\[|,)", text)) > 0}
        assert {each.name for each in found} == launched


@needs_triton
def test_a_kernel_that_does_not_compile_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.compiler import CompilationError

    from meshwright.precision.fp8.transpose_triton import transpose_tiles

    monkeypatch.setattr("meshwright.precision.fp8.transpose_triton.TILE", 48)  # no power of two
    with compiled_launches(monkeypatch, 90), pytest.raises(CompilationError):
        transpose_tiles(torch.empty(64, 64))
