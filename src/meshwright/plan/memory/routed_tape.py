"""A block whose MLP is routed experts, on the tape; what is not of the experts is as in block_tape.py.

Written after models/layers/moe.py, routing.py and parallel/ep.py. Bytes beside those of a dense block:

    n   rows sent to experts, one per token and choice     g   one inner tensor of the experts
    f   one inner tensor of the shared expert              e   scores of all experts, fp32

Tokens of tp are routed by the rank that has them, so n, g and e are of its part of the sequence.
"""

from meshwright.plan.memory.block_sizes import RoutedSizes, Sizes
from meshwright.plan.memory.block_tape import WIDE, BlockTape
from meshwright.plan.workload.layouts import Floats


class RoutedTape(BlockTape):
    """The backward of a block with routed experts, from what it kept to its last gradient."""

    def __init__(self, sizes: Sizes, routed: RoutedSizes) -> None:
        super().__init__(sizes)
        self.r = routed

    def _keep_mlp(self, made: Floats, every: Floats) -> None:
        s, r = self.s, self.r
        self.hold("activations", wide_2=made * WIDE * s.x, router=made * WIDE * s.x)
        self.hold("activations", scores=every * r.e, order=made * r.order, rows=made * r.n)
        self.hold("activations", expert_gate=every * r.g, expert_up=every * r.g)
        self.hold("activations", expert_silu=made * r.g, expert_product=made * r.g)
        # Copies by index keep what they copied.
        self.hold("activations", expert_out=every * r.n, returned=made * r.is_dealt * r.n, back=made * r.n)
        if r.has_shared:
            self.hold("activations", normed_2=made * s.X, gate=every * s.f, up=every * s.f)
            self.hold("activations", silu=made * s.f, product=made * s.f, out=self.selective * s.X)

    def _make_mlp(self) -> None:
        s, r = self.s, self.r
        self._norm(2)
        self._renew("router", WIDE * s.x)
        self._renew("order", r.order)
        self.hold("working set", scores_again=self.full * r.e)
        self._make_experts()
        if r.has_shared:
            self._make_products("", "", s.f)
        else:
            self.free("normed_2_again", "plain_2_again")
        self.free("joined", "seen", "dropped", "summed", "summed_again")

    def _make_experts(self) -> None:
        r, again = self.r, self.again
        self.hold("working set", unsent=again * r.is_dealt * r.n)
        self._renew("rows", r.n)
        self.free("unsent")
        self._make_products("expert_", "experts.", r.g)
        self.hold("working set", expert_out_again=self.full * r.n)
        self.hold("working set", unsent=again * r.is_dealt * r.n)
        self._renew("returned", r.is_dealt * r.n)
        self.free("unsent")
        self.hold("working set", zeros=again * r.n)
        self._renew("back", r.n)
        self.free("zeros")

    def _mlp_back(self) -> None:
        if self.r.has_shared:
            self._shared_back()
        else:
            self.free("gathered")
        self._experts_back()
        self.free("d_shared")

    def _shared_back(self) -> None:
        s = self.s
        self._gated_back("", "", s.f, s.X, ends="gathered", inputs=("normed_2", "plain_2"))
        self._sum_back("gate")
        self.hold("working set", d_shared=s.x)

    def _experts_back(self) -> None:
        s, r = self.s, self.r
        self.hold("working set", d_wide_out=WIDE * s.x)
        # Of rows and of weights, both in fp32.
        self.hold("working set", d_weighted=WIDE * r.n, d_weights=WIDE * r.n)
        self.free("back_again")  # what was made again is let go of when it is used
        self.hold("working set", d_back=r.n)
        self.let_go("back")
        self.free("d_weighted", "d_weights", "d_wide_out")
        self.hold("working set", d_out=r.n)
        self.free("d_back")
        self.let_go("returned")
        self.hold("working set", d_sent=r.is_dealt * r.n)
        self.free("d_sent")
        self.let_go("expert_out")
        self._gated_back("expert_", "experts.", r.g, r.n, ends="d_out", inputs=("rows",))
        self.free("right")
        self._accumulate("experts.gate")
        self.hold("working set", d_sent=r.is_dealt * r.n)
        self.free("d_sent")
        self.hold("working set", d_routed=s.x)
        self.free("left")
        self.let_go("order", "scores")
        self.hold("working set", d_router=WIDE * s.x)
        self.let_go("router")
        self.hold("working set", d_narrow_2=s.x)
        self.free("d_router", "d_narrow_2", "d_routed")
