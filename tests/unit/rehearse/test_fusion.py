"""Kernels of small graphs: what is written, what is fused, whose memory is reused."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from meshwright.rehearse.allocation_log import rounded
from meshwright.rehearse.fusion import Kernel, kernels_of, peak_bytes
from meshwright.rehearse.operations import Operations

SIZE = 64
MATRIX = rounded(SIZE * SIZE * 4)


def kernels(function: Callable[..., object], num_inputs: int) -> list[Kernel]:
    graph = make_fx(function)(*(torch.zeros(SIZE, SIZE) for _ in range(num_inputs))).graph
    for number, node in enumerate(graph.find_nodes(op="placeholder")):
        node.name = f"primals_{number}"  # as torch names inputs that belong to the caller
    return kernels_of(Operations(graph))


def written(found: list[Kernel]) -> list[list[str]]:
    return [[node.name for node in kernel.written] for kernel in found]


def test_pointwise_values_between_matmuls_are_written_once():
    found = kernels(lambda x, w: (torch.tanh(x @ w) * 2 + 1).exp() @ w, 2)
    assert written(found) == [["mm"], ["exp"], ["mm_1"]]
    # The one value takes the bytes of the product that it is made of.
    assert [node.name for node in found[1].overwritten] == ["mm"]
    assert peak_bytes(found) == 2 * MATRIX


def test_a_row_is_reduced_and_used_in_one_kernel():
    found = kernels(lambda x: x * torch.rsqrt((x * x).mean(-1, keepdim=True)), 1)
    assert written(found) == [["mul_1"]]


def test_a_full_reduction_is_known_only_after_its_kernel():
    found = kernels(lambda x: x / x.abs().amax(), 1)
    assert written(found) == [["amax"], ["div"]]


def test_a_sum_over_columns_is_not_fused_with_its_reader():
    found = kernels(lambda x: x - x.sum(0, keepdim=True), 1)
    assert written(found) == [["sum_1"], ["sub"]]


def test_values_that_read_the_same_buffer_are_fused_and_reuse_no_buffer_that_one_of_them_reads():
    def two(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ w
        return y.sin() @ w, y.cos() @ w

    found = kernels(two, 2)
    shared = next(kernel for kernel in found if len(kernel.written) == 2)
    assert {node.name for node in shared.written} == {"sin", "cos"}
    assert shared.overwritten == ()
    assert [node.name for node in shared.freed] == ["mm"]
    assert peak_bytes(found) == 3 * MATRIX


def test_a_value_of_many_reads_is_realized_before_it_is_read_twice():
    def many(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        total = a + b + c + d + e
        return total[:8].exp() @ a, total[:16].exp() @ a

    def few(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        total = a + b + c + d
        return total[:8].exp() @ a, total[:16].exp() @ a

    assert ["add_3"] in written(kernels(many, 5))
    assert ["add_2"] not in written(kernels(few, 4))


def test_returned_values_stay_allocated_and_views_cost_nothing():
    found = kernels(lambda x: ((x + 1).t(), x.view(-1)), 1)
    assert written(found) == [["add"]]
    assert found[0].freed == ()


def test_a_mutation_waits_for_the_readers_of_its_tensor():
    def overwrite(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        before = y @ w
        y.copy_(x)
        return before + y @ w

    names = [kernel.operations[0].node.name for kernel in kernels(overwrite, 2)]
    assert names.index("mm_1") < names.index("copy_") < names.index("mm_2")
