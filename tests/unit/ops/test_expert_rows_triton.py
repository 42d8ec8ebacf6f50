"""The kernel that sums a token's rows, in Triton's interpreter, against plain torch."""

from itertools import product

import torch
from tests.support.triton_interpreter import IS_INTERPRETED, needs_triton, printed_in_interpreter

from meshwright.ops.expert_rows import rows_by_expert, sum_rows

NUM_KEPT = (None, 9)
WIDTHS = (5, 4100)  # less than a block, and more than the largest
EXPERTS_TC = torch.tensor([[2, 0, 3], [0, 1, 3], [2, 1, 0], [0, 2, 1]])


@needs_triton
def test_the_interpreted_kernel_equals_plain_torch() -> None:
    kinds = [f"{kept}/{width}/{other}" for kept, width, other in product(NUM_KEPT, WIDTHS, (False, True))]
    assert printed_in_interpreter("tests.unit.ops.test_expert_rows_triton") == kinds


def compare(num_kept: int | None, width: int, has_other: bool) -> None:
    from meshwright.ops.expert_rows_triton import sum_rows_kernel

    rows = rows_by_expert(EXPERTS_TC, num_kept)
    generator = torch.Generator().manual_seed(0)
    y_ND, other_ND = (torch.randn(len(rows.choice_N), width, generator=generator) for _ in range(2))
    other = other_ND if has_other else None
    found_TD = sum_rows_kernel(y_ND, other, rows.place_TC)
    # Six fp32 numbers are added in another order.
    torch.testing.assert_close(found_TD, sum_rows(y_ND, other, rows.place_TC), rtol=1e-6, atol=1e-6)
    print(f"{num_kept}/{width}/{has_other}")


if __name__ == "__main__" and IS_INTERPRETED:
    for kind in product(NUM_KEPT, WIDTHS, (False, True)):
        compare(*kind)
