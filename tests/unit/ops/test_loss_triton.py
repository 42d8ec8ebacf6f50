"""The Triton passes over logits, in Triton's interpreter, against the plain ones."""

import torch
from tests.support.triton_interpreter import IS_INTERPRETED, needs_triton, printed_in_interpreter

from meshwright.ops.loss_rows import PLAIN


@needs_triton
def test_interpreted_passes_equal_the_plain_ones() -> None:
    assert printed_in_interpreter(__name__) == ["float32", "bfloat16"]


def compare(dtype: torch.dtype) -> None:
    """All three passes on rows that are a padded view, sharded over 2 ranks: some targets are not local."""
    from meshwright.ops.loss_triton import TRITON

    generator = torch.Generator().manual_seed(1)
    padded = torch.randn(6, 10_048, generator=generator).to(dtype) * 4
    padded[:, 10_000:] = 0
    targets_T = torch.tensor([0, 9_999, -3, 10_000, 8_191, 8_192])
    weights_T = torch.rand(6, generator=generator)
    padded[2, 9_000] = 200.0  # beyond the margin, in the second block: the first is rescaled
    plain, own, two_passes = (padded.clone()[:, :10_000] for _ in range(3))
    rounding = 2e-6 if dtype == torch.float32 else 1e-2  # of the last bit; bf16 has 8
    for seen, true in zip(TRITON.statistics(own, targets_T), PLAIN.statistics(plain, targets_T), strict=True):
        torch.testing.assert_close(seen, true, rtol=1e-5, atol=0)  # float32 sums in another order
    true = PLAIN.unscaled_gradient(plain, targets_T)
    lse_T = true.sum_exp_T.log() + true.max_T
    TRITON.to_gradient(two_passes, lse_T, targets_T, weights_T)
    scaled = plain * (weights_T / true.sum_exp_T)[:, None]
    torch.testing.assert_close(two_passes.float(), scaled, rtol=rounding, atol=1e-6)
    seen = TRITON.unscaled_gradient(own, targets_T)
    same = (seen.sum_exp_T / true.sum_exp_T)[:, None]  # another logit may stand for the highest
    torch.testing.assert_close(seen.sum_exp_T.log() + seen.max_T, lse_T)
    torch.testing.assert_close(own.float(), plain * same, rtol=rounding, atol=1e-6)
    assert not own._base[:, 10_000:].any()  # pyright: ignore[reportOptionalSubscript]
    compare_copies(dtype)
    print(str(dtype).removeprefix("torch."))


def compare_copies(dtype: torch.dtype) -> None:
    """More elements than one program takes, and not a multiple of it."""
    from meshwright.ops.loss_triton import scaled_copy

    x = torch.randn(3, 3001, generator=torch.Generator().manual_seed(2))
    factor = torch.tensor(0.37)
    # The interpreter truncates to bf16, devices round.
    rounding = 0.0 if dtype == torch.float32 else 2.0**-7
    torch.testing.assert_close(scaled_copy(x, factor, dtype), (x * factor).to(dtype), rtol=rounding, atol=0)


if __name__ == "__main__" and IS_INTERPRETED:
    compare(torch.float32)
    compare(torch.bfloat16)
