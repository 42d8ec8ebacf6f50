"""Compiles Triton kernels for a GPU on a machine without one.

The interpreter runs a kernel's Python; it knows neither its types nor its limits. Here each launch ends in
machine code for a chosen architecture instead of a run, made by the compiler and the assembler that a GPU's
machine uses.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

SHARED_BYTES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}
"""Shared memory that a block may have, by compute capability: A100; Ada; H100 and H200."""
_POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.uint8: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv",
}
_ALIGNMENT_BYTES = 16  # what a launch tells the compiler about pointers and sizes


class Compiled(NamedTuple):
    """The machine code of one launch."""

    name: str
    shared_bytes: int
    cubin: bytes


@contextmanager
def compiled_launches(patch: pytest.MonkeyPatch, capability: int) -> Iterator[list[Compiled]]:
    """Within this, launches of kernels are compiled for this capability (90: 9.0), and not run."""
    from triton.runtime.jit import JITFunction

    found: list[Compiled] = []

    def launch(kernel: Any, *values: Any, grid: Any, **named: Any) -> None:
        del grid
        named.pop("warmup", None)
        found.append(_compiled(kernel, values, named, capability))

    with patch.context() as patched:
        patched.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # Triton's default, which warns where it is not set
        patched.setattr(JITFunction, "run", launch)
        yield found


def _compiled(kernel: Any, values: tuple[Any, ...], named: dict[str, Any], capability: int) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names: list[str] = kernel.arg_names
    bound = dict(zip(names, values, strict=False))
    options = {key: value for key, value in named.items() if key not in names}
    bound |= {key: value for key, value in named.items() if key in names}
    fixed = {each.name for each in kernel.params if each.is_constexpr}
    fixed |= {name for name, value in bound.items() if value is None}
    signature = {name: "constexpr" if name in fixed else _type_of(bound[name]) for name in names}
    aligned = [index for index, name in enumerate(names) if name not in fixed and _is_aligned(bound[name])]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={name: bound[name] for name in names if name in fixed},
        attrs={(index,): [["tt.divisibility", _ALIGNMENT_BYTES]] for index in aligned},
    )
    code = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return Compiled(kernel.fn.__name__, code.metadata.shared, code.asm["cubin"])


def _type_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return _POINTERS[value.dtype]
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    assert isinstance(value, float), value
    return "fp32"


def _is_aligned(value: Any) -> bool:
    number = value.data_ptr() if isinstance(value, Tensor) else value
    return isinstance(number, int) and number % _ALIGNMENT_BYTES == 0
