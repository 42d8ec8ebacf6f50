"""Rows of a table in host memory: the plain form, and the Triton kernel, interpreted."""

import torch
from tests.support.triton_interpreter import IS_INTERPRETED, needs_triton, printed_in_interpreter

from meshwright.ops.host_rows import host_rows


def test_rows_are_those_of_the_table() -> None:
    table_VD, ids_BS = torch.randn(7, 3), torch.tensor([[0, 6, 6], [2, 1, 0]])
    assert torch.equal(host_rows(table_VD, ids_BS), table_VD[ids_BS])
    torch.library.opcheck(host_rows, (table_VD, ids_BS))


@needs_triton
def test_the_interpreted_kernel_reads_the_same_rows() -> None:
    assert printed_in_interpreter(__name__) == ["rows"]


def compare() -> None:
    """A width that fills no block."""
    from meshwright.ops.host_rows_triton import read_host_rows

    table_VD, ids_BS = torch.randn(5, 1100), torch.tensor([[4, 0], [1, 4]])
    assert torch.equal(read_host_rows(table_VD, ids_BS), table_VD[ids_BS])
    print("rows")


if __name__ == "__main__" and IS_INTERPRETED:
    compare()
