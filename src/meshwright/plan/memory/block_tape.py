"""One block of our runtime on the tape: what its forward keeps, what recompute makes again, its backward.

Written after models/decoder.py and models/layers, operator by operator; letters as there. Bytes:

    x   a rank's rows of the stream          X   the same rows gathered over tp
    q   queries, or the attention's output   k   keys, or values
    f   one inner tensor of the MLP          w   a weight in the format of compute

Without recompute everything in `KEPT` waits for the backward; with it the block's input does, and with
`selective` the outputs of products and of attention as well.
"""

import numpy as np

from meshwright.plan.memory.block_sizes import Sizes
from meshwright.plan.memory.tape import Items, Tape
from meshwright.plan.workload.layouts import FULL, NORMS, Floats

WIDE = 2.0
"""An fp32 copy of a tensor of 16 bits."""


class BlockTape(Tape):
    """The backward of one block, from what it kept to its last gradient."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(len(sizes.x))
        self.s = sizes
        at, state = sizes.at, sizes.stack.state
        self.is_sharded = (at.zero == 3).astype(np.float64)
        self.casts = np.where(at.zero == 3, 0.0, float(sizes.work.working_bytes < state.weight))
        self.full = ((at.recompute & FULL) > 0).astype(np.float64)
        self.selective = ((at.recompute & NORMS) > 0).astype(np.float64)
        self.again = np.maximum(self.full, self.selective)
        self.after: Items = {}
        """Bytes held beside gradients when that of a matrix has come."""

    # What forward leaves.

    def keep(self) -> None:
        """Everything that waits for the backward."""
        s, made = self.s, 1.0 - self.again
        every = 1.0 - self.full
        self.hold("activations", input=self.again * s.x)
        self._keep_attention(made, every)
        self._keep_mlp(made, every)
        for name, elements in s.weights.items():
            self.hold("cast weights", **{f"cast_{name}": made * self.casts * 2.0 * elements})

    def _keep_attention(self, made: Floats, every: Floats) -> None:
        s = self.s
        self.hold("activations", wide_1=made * WIDE * s.x, normed_1=made * s.X)
        self.hold("activations", raw_q=self.selective * s.q, raw_k=self.selective * s.k)
        if s.has_head_norms:
            self.hold("activations", wide_q=made * WIDE * s.q, wide_k=made * WIDE * s.k)
        # Gathered keys and values take the place of this rank's own.
        own = np.where(s.gathers > 0, 0.0, 1.0)
        self.hold("activations", turned_q=made * s.q, turned_k=made * own * s.k)
        self.hold("activations", v=(made * own + self.selective) * s.k, all_keys=made * s.gathers * 2.0 * s.k)
        # Attention reads the mask as what is added to scores.
        self.hold("activations", bias=made * 2.0 * s.mask.whole)
        parts = self._kernel_outputs()
        self.hold("activations", attended=(made * (1.0 + s.swaps) + self.selective * parts) * s.q)
        self.hold("activations", lse=(made + self.selective * parts) * s.lse, summed=self.selective * s.X)

    def _kernel_outputs(self) -> Floats:
        """Outputs of the attention kernel in units of the queries, on the rank of cp that calls it most.

        With zig-zag halves: gathered keys are seen in full and up to the diagonal by both halves; around
        a ring every owner's keys are one more call. With a mask each half calls once for each half of
        another's keys that it may see.
        """
        s = self.s
        plain = np.where(s.gathers > 0, 2.0, np.where(s.rings > 0, s.rings, 1.0))
        return np.where(s.mask.band > 0, 0.5 * s.mask.calls, plain)

    def reach_the_mask(self) -> None:
        """The forward of a block until attention has its mask."""
        s, made = self.s, 1.0 - self.again
        self.hold("activations", input=s.x, wide_1=made * WIDE * s.x, normed_1=s.X)
        self.hold("activations", ungathered=s.is_cut * s.x)
        self.hold("activations", raw_q=self.selective * s.q, raw_k=self.selective * s.k)
        if s.has_head_norms:
            self.hold("activations", wide_q=made * WIDE * s.q, wide_k=made * WIDE * s.k)
        self.hold("activations", turned_q=s.q, turned_k=s.k, v=s.k)
        self.hold("activations", all_keys=s.swaps * (s.q + 2.0 * s.k))
        for name in ("query", "key", "value"):
            self.hold("cast weights", **{f"cast_{name}": self.casts * 2.0 * s.weights[name]})
        self._mask(np.ones(len(s.x)))
        self.look()

    def _keep_mlp(self, made: Floats, every: Floats) -> None:
        s = self.s
        self.hold("activations", wide_2=made * WIDE * s.x, normed_2=made * s.X, up=every * s.f)
        if s.is_gated:
            self.hold("activations", gate=every * s.f, silu=made * s.f)
        self.hold("activations", product=made * s.f, out=self.selective * s.X)

    # What backward makes again.

    def make_again(self) -> None:
        """The forward once more, up to the last tensor that backward needs."""
        self._make_attention()
        self._make_mlp()

    def _renew(self, name: str, size: Floats, item: str = "working set") -> None:
        """A tensor that was kept, or is made again."""
        self.hold(item, **{f"{name}_again": self.again * size})

    def _norm(self, index: int) -> None:
        s, again = self.s, self.again
        self._renew(f"wide_{index}", WIDE * s.x)
        self.hold("working set", output=again * WIDE * s.x)
        self.hold("working set", narrow=again * s.x)
        self.free("output")
        self.hold("working set", **{f"normed_{index}_again": again * s.X * s.is_cut})
        if not np.all(s.is_cut):
            # Without tp the narrow output itself is what the products read.
            self.hold("working set", **{f"plain_{index}_again": again * s.x * (1.0 - s.is_cut)})
        self.free("narrow")

    def _make_attention(self) -> None:
        s, full = self.s, self.full
        self._norm(1)
        self.hold("working set", ungathered=self.again * s.is_cut * s.x)
        for name, size in (("query", s.q), ("key", s.k), ("value", s.k)):
            self._cast(name)
            self.hold("working set", **{f"{name}_again": full * size})
        for name, size in (("q", s.q), ("k", s.k)):
            if s.has_head_norms:
                self._renew(f"wide_{name}", WIDE * size)
            self._turn(name, self.again * size)
        self.free("query_again", "key_again", "raw_q", "raw_k")
        self._attend_again()
        self.free("ungathered")
        self._cast("output")
        self.hold("working set", summed_again=full * s.X)
        # The sum over tp takes the place of the partial one.
        self.hold("working set", ordered=self.again * s.is_spread * s.X, seen=self.again * s.is_cut * s.x)
        self.free("ordered")
        self.hold("working set", dropped=-s.is_cut * (full + self.selective) * s.X)
        self.hold("working set", joined=self.again * s.x)

    def _attend_again(self) -> None:
        """Over cp the kernel's outputs are merged, or exchanged, into one more tensor."""
        s, again = self.s, self.again
        merges = np.minimum(s.gathers + s.rings, 1.0)
        packed = s.swaps * (s.q + 2.0 * s.k) + s.gathers * 2.0 * s.k
        self.hold("working set", sent=again * packed, all_keys_again=again * packed)
        self.free("sent")
        self._mask(again)
        self.hold("working set", merged=again * merges * WIDE * s.q)
        self.hold("working set", attended_again=self.full * s.q + self.selective * merges * s.q)
        self.hold("working set", lse_again=self.full * s.lse, swapped_again=again * s.swaps * s.q)
        # What was packed or merged is needed no more.
        self.hold("working set", let_go=-again * (s.swaps * (s.q + 2.0 * s.k) + (s.gathers > 0) * 2.0 * s.k))
        self.hold("working set", gone=-self.selective * merges * self._kernel_outputs() * s.q)
        self.free("merged", "mask")

    def _mask(self, made: Floats) -> None:
        """Who sees whom, and the same as what is added to scores: minus infinity for pairs that do not."""
        mask = self.s.mask
        self.hold("working set", making=made * mask.making)
        self.free("making")
        self.hold("working set", mask=made * mask.whole, bias_again=made * 2.0 * mask.whole)
        self.hold("working set", unseen=made * mask.whole)
        self.free("unseen")

    def _turn(self, name: str, size: Floats) -> None:
        """Rotation in fp32: halves are multiplied, added and joined."""
        self.hold("working set", wide=WIDE * size, first=size, left=size, right=size, second=size)
        self.free("left", "right")
        self.hold("working set", **{f"turned_{name}_again": size})
        self.free("wide", "first", "second")

    def _make_mlp(self) -> None:
        s = self.s
        self._norm(2)
        self._make_products("", "", s.f, is_gated=s.is_gated)
        self.free("joined", "seen", "dropped", "summed", "summed_again")

    def _make_products(self, kept: str, weights: str, inner: Floats, *, is_gated: bool = True) -> None:
        """Of an MLP, by the beginnings of their names."""
        if is_gated:
            self._cast(f"{weights}gate")
            self.hold("working set", **{f"{kept}gate_again": self.full * inner})
            self._renew(f"{kept}silu", inner)
        self._cast(f"{weights}up")
        self.hold("working set", **{f"{kept}up_again": self.full * inner})
        self._renew(f"{kept}product", inner)
        self._cast(f"{weights}down")

    def _cast(self, name: str) -> None:
        self.hold(
            "cast weights", **{f"cast_{name}_again": self.again * self.casts * 2.0 * self.s.weights[name]}
        )

    # Backward.

    def backward(self) -> None:
        """From the gradient of the block's output to that of its input."""
        s = self.s
        self.hold("working set", gathered=s.is_cut * s.X)
        self.hold("working set", copied=s.is_spread * s.X)
        self.free("copied")
        self.make_again()
        self._mlp_back()
        self._norm_back(2)
        self.hold("working set", gathered=s.is_cut * s.X)
        self._attention_back()
        self._norm_back(1)
        self.let_go("input", "out")

    def let_go(self, *names: str) -> None:
        """Of what was kept and of what was made again."""
        self.free(*names, *(f"{name}_again" for name in names))

    def _weight_gradient(self, name: str) -> None:
        """A product's weight gradient, in the format of compute."""
        self.hold("working set", **{f"grad_{name}": 2.0 * self.s.weights[name]})

    def _accumulate(self, name: str) -> None:
        """It becomes the parameter's, or is added to it; ZeRO-3 keeps it until the block's are reduced."""
        elements = self.s.weights[name]
        plain = 1.0 - self.is_sharded
        self.hold("gradients", **{f"sum_{name}": plain * self.s.stack.state.gradient * elements})
        self.free(f"grad_{name}")
        self.hold("gradients", **{f"added_{name}": -self.s.accumulates * self.size(f"sum_{name}")})
        self.after[name] = self.held_bytes - self.held_of("gradients")
        self.hold("gathered", flat=self.s.flats.get(name, 0.0))
        self.free("flat")
        if np.any(self.is_sharded):
            self.hold("gathered", **{f"whole_{name}": self.is_sharded * 2.0 * elements})

    def _mlp_back(self) -> None:
        s = self.s
        if s.is_gated:
            self._gated_back("", "", s.f, s.X, ends="gathered", inputs=("normed_2", "plain_2"))
            self._sum_back("gate")
            return
        self._weight_gradient("down")
        self.hold("working set", d_product=s.f)
        self.let_go("product", "cast_down")
        self.free("gathered")
        self._accumulate("down")
        self.hold("working set", d_up=s.f)
        self.let_go("up")
        self.free("d_product")
        self._weight_gradient("up")
        self.hold("working set", left=s.X)
        self.let_go("cast_up", "normed_2", "plain_2")
        self.free("d_up")
        self._accumulate("up")
        self._sum_back(None)

    def _gated_back(
        self, kept: str, weights: str, inner: Floats, outer: Floats, *, ends: str, inputs: tuple[str, ...]
    ) -> None:
        """Products of a gated MLP from the last to the first, by the beginnings of their names.

        `ends` is the gradient that came, `inputs` what both first products had kept; `left` and `right`, the
        gradients of the input by each, are left over, and the last weight gradient is not yet added.
        """
        self._weight_gradient(f"{weights}down")
        self.hold("working set", d_product=inner)
        self.let_go(f"{kept}product", f"cast_{weights}down")
        self.free(ends)
        self._accumulate(f"{weights}down")
        self.hold("working set", d_silu=inner, d_up=inner)
        self.let_go(f"{kept}up", f"{kept}silu")
        self.free("d_product")
        self._weight_gradient(f"{weights}up")
        self.hold("working set", left=outer)
        self.let_go(f"cast_{weights}up")
        self.free("d_up")
        self._accumulate(f"{weights}up")
        self.hold("working set", d_gate=inner)
        self.free("d_silu")
        self.let_go(f"{kept}gate")
        self._weight_gradient(f"{weights}gate")
        self.hold("working set", right=outer)
        self.let_go(f"cast_{weights}gate", *inputs)
        self.free("d_gate")

    def _sum_back(self, last: str | None) -> None:
        """The gradients of one input are added; over tp they are scattered."""
        s = self.s
        if last:
            self.free("right")  # added in place
            self._accumulate(last)
        self.hold("working set", ordered=s.is_spread * s.X, part=s.x * s.is_cut)
        self.hold("working set", whole=s.x * (1.0 - s.is_cut))
        self.free("left", "ordered")
        self.free("whole", "part")

    def _norm_back(self, index: int) -> None:
        s = self.s
        self.hold("working set", d_narrow=s.x)
        self.hold("working set", d_output=WIDE * s.x)
        self.free("d_narrow")
        self.hold("working set", d_wide=WIDE * s.x)
        self.free("d_output")
        self.let_go(f"wide_{index}")
        self.hold("working set", d_x=s.x)
        self.free("d_wide")
        self.free("d_x")  # added to the stream's gradient in place

    def _attention_back(self) -> None:
        s = self.s
        self._weight_gradient("output")
        self.hold("working set", d_attended=s.q)
        self.let_go("cast_output")
        self.free("gathered")
        self._accumulate("output")
        self._attend_back()
        for name, size in (("k", s.k), ("q", s.q)):
            self._turn_back(name, size)
            if s.has_head_norms:
                self.let_go(f"wide_{name}")
        self._weight_gradient("value")
        self.hold("working set", left=s.X)
        self.free("d_v")
        self.let_go("cast_value")
        self._accumulate("value")
        for name, gradient in (("key", "d_k"), ("query", "d_q")):
            self._weight_gradient(name)
            self.hold("working set", right=s.X)
            self.free(gradient)
            self.let_go(f"cast_{name}")
            if name == "query":
                self.let_go("normed_1", "plain_1")
            self.free("right")
            self._accumulate(name)
        self._sum_back(None)

    def _attend_back(self) -> None:
        s = self.s
        merges = np.minimum(s.gathers + s.rings, 1.0)
        keys = np.maximum(s.gathers, 1.0) * 2.0 * s.k
        self.hold("working set", sums=merges * WIDE * (s.q + keys), parts=merges * (s.q + keys))
        self.hold("working set", swapped=s.swaps * (s.q + 2.0 * s.k))
        self.free("parts")
        self.hold("working set", d_q=s.q, d_k=0.5 * keys, d_v=0.5 * keys)
        self.free("d_attended", "sums", "swapped", "let_go", "gone")
        self.let_go("turned_q", "turned_k", "v", "value", "attended", "lse", "all_keys", "swapped", "bias")
        self.free("d_k", "d_v")
        self.hold("working set", d_k=s.k, d_v=s.k)

    def _turn_back(self, name: str, size: Floats) -> None:
        self.hold("working set", wide=WIDE * size)
        self.free(f"d_{name}")
        self.hold("working set", first=size, second=size, third=size, fourth=size)
        self.free("third", "fourth")
        self.hold("working set", joined_halves=WIDE * size)
        self.free("wide", "first", "second")
        self.hold("working set", **{f"d_{name}": size})
        self.free("joined_halves")
