"""The kernel of dropout, in Triton's interpreter, against plain torch."""

from itertools import product

import torch
from tests.support.triton_interpreter import IS_INTERPRETED, needs_triton, printed_in_interpreter

from meshwright.ops.dropout import DropoutMask, threshold
from meshwright.ops.dropout_keys import sequence_keys

ROWS = (0, 3, 9)  # none, less than a tile, and more
WIDTHS = (5, 1030)


@needs_triton
def test_the_interpreted_kernel_equals_plain_torch() -> None:
    kinds = [f"{rows}/{width}" for rows, width in product(ROWS, WIDTHS)]
    assert printed_in_interpreter("tests.unit.ops.test_dropout_triton") == kinds


def compare(num_rows: int, width: int) -> None:
    from meshwright.ops.dropout_triton import drop_kernel

    keys = sequence_keys(5, 1, torch.arange(num_rows))
    x = torch.randn(num_rows, width)
    found = drop_kernel(x, keys, 77, threshold(0.3), 1.0 / 0.7)
    torch.testing.assert_close(found, DropoutMask(keys, 77, 0.3).drop(x))
    assert torch.equal(found == 0, DropoutMask(keys, 77, 0.3).drop(x) == 0)
    print(f"{num_rows}/{width}")


if __name__ == "__main__" and IS_INTERPRETED:
    for kind in product(ROWS, WIDTHS):
        compare(*kind)
