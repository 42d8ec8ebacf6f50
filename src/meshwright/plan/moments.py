"""The fullest moment of a step of our own runtime, to the byte where it is covered.

Two moments compete. In the forward of the head everything kept for backward exists, and the loss makes the
head's gradient beside its chunk of logits. In the backward of a stage's last block the gradient of the MLP's
product, a weight's gradient and, under recompute, the inner tensors of that block are there as well; with
tp also the gathered gradient of the block's output. Either may win, so both are added up and the larger is
returned, item by item. The rehearsal traces the same step and a test holds the two together.

Covered: 16-bit compute without compiler and fp8, dense layers, ZeRO 0 to 2, schedules with whole backwards.
Not in the sums: gradients copied into a bucket to be reduced. They win where little else is left at the
end of a backward: full recompute of a small model, or ZeRO-2 of one.
"""

from dataclasses import dataclass

import numpy as np

from meshwright.plan.frameworks import Framework
from meshwright.plan.layouts import FULL, NORMS, Floats, Layouts
from meshwright.plan.schedules import SCHEDULES
from meshwright.plan.workload import Workload

Items = dict[str, Floats]
COVERED_SCHEDULES = ("gpipe", "1f1b")
# Tokens, targets and positions are int64, the loss weights fp32.
BATCH_BYTES_PER_TOKEN = 28.0


@dataclass(frozen=True)
class Rank:
    """Facts of the three ranks, shape (N, 3), that the planner has worked out already."""

    layers: Floats
    in_flight: Floats
    whole_per_layer: Floats
    """Bytes one layer keeps of one micro-batch without recompute."""


def is_covered(work: Workload, stack: Framework) -> bool:
    """Whether the sums of this file hold for what is trained."""
    model = work.model
    return (
        stack.name == "meshwright"
        and work.precision in ("bf16", "fp16")
        and not (work.compiled or work.adapters or model.moe or model.attention.latent)
        and work.attention_kernel == "flash"
        and model.dropout == 0
    )


def covered_layouts(at: Layouts) -> Floats:
    """Of those, the layouts; shape (N, 1)."""
    whole = np.isin(np.asarray(SCHEDULES)[at.schedule], COVERED_SCHEDULES) | (at.pp == 1)
    here = (at.offloads("parameters") == 0) & (at.offloads("activations") == 0)
    return ((at.zero < 3) & (at.regather == 0) & whole & here)[:, None]


class Sums:
    """The two moments of every layout; all arrays have shape (N, 3) or (N, 1)."""

    def __init__(self, work: Workload, at: Layouts, stack: Framework, rank: Rank) -> None:
        self.work, self.at, self.stack, self.rank = work, at, stack, rank
        model = work.model
        self.tp = at.tp[:, None].astype(np.float64)
        self.tokens = at.microbatch_tokens(work.sequence_length)[:, None]
        self.row_tokens = self.tokens / self.tp
        self.stream = 2.0 * self.row_tokens * model.width
        self.full = ((at.recompute & FULL) > 0)[:, None]
        self.selective = ((at.recompute & NORMS) > 0)[:, None]
        self.pp = at.pp[:, None]
        is_last = np.array([[False, False, True]])
        self.is_last = is_last | (self.pp == 1)
        self.is_first = np.array([[True, False, False]]) | (self.pp == 1)
        self.microbatches = at.num_microbatches[:, None].astype(np.float64)
        casts = 2.0 if stack.casts_weights and stack.state.weight > 2.0 else 0.0
        self.layer_cast = casts * work.counts.dense_layer / self.tp
        self.head_cast = casts * model.vocab_size * model.width / self.tp

    def tables(self) -> Floats:
        """Cosines and sines of one micro-batch, fp32."""
        attention = self.work.model.attention
        width = attention.head_width if self.work.model.positions == "rope" else 0
        return 4.0 * self.tokens * width

    def kept_per_layer(self) -> Floats:
        """Bytes a layer keeps of one micro-batch, after recompute."""
        model, rank = self.work.model, self.rank
        core = rank.whole_per_layer - self._made_of_norms() - self._inner() * 4.0
        # Every product's output: queries, keys, values, whole partial sums before a scatter, the MLP's two.
        products = core + 2.0 * 2.0 * self.tokens * model.width + 2.0 * self._inner() + self.stream
        kept = np.where(self.full, self.stream, np.where(self.selective, products, rank.whole_per_layer))
        every = self.at.recompute_every[:, None]
        return rank.whole_per_layer + (kept - rank.whole_per_layer) / every

    def activations(self, flight: Floats) -> Floats:
        """What the blocks of a stage and the tables keep; a received input lies in its receive buffer."""
        received = np.where(~self.is_first & (self.full | self.selective), self.stream, 0.0)
        return flight * (self.rank.layers * self.kept_per_layer() + self.tables() - received)

    def at_the_head(self, state: Items) -> Items:
        """Forward of the head in the last micro-batch; zero where a rank has none."""
        model, rank, flight = self.work.model, self.rank, self.rank.in_flight
        ends = 2.0 * flight + 2.0  # the norm's fp32 input; of the present micro-batch its output and x
        whole = 2.0 * self.tokens * model.vocab_size / self.tp
        chunk = np.minimum(whole, self.stack.loss_chunk_bytes or whole)
        gathered = np.where(self.tp > 1, 2.0 * self.tokens * model.width, 0.0)
        # Of leaves autocast remembers its casts until the forward ends; of parts of DTensors it does not.
        recomputed = self.full | self.selective
        remembered = np.where(recomputed, np.where(self.tp == 1, 1.0, 0.0), flight)
        return {
            **state,
            "gradients": np.where(self.microbatches > flight, state["gradients"], 0.0),
            "activations": self.activations(flight) + ends * self.stream,
            "cast weights": remembered * rank.layers * self.layer_cast + self.head_cast,
            "logits": flight * self._head_gradients() + chunk + gathered,
            "exchange": self._exchange(flight),
        }

    def in_the_last_block(self, state: Items, *, is_first_back: bool) -> list[Items]:
        """Backward of the stage's last block, of the first micro-batch to come back or of a later one.

        Two points of it: the product with the MLP's last matrix, and after it the activation's gradient,
        when one inner tensor and one weight's cast are gone and that weight's gradient is there.
        """
        rank, model = self.rank, self.work.model
        flight = rank.in_flight
        if not is_first_back:
            flight = np.where(self.microbatches > flight, flight, np.maximum(flight - 1.0, 1.0))
        inner = self._inner()
        weight = 2.0 * model.mlp.width * model.width / self.tp
        incoming = np.where(self.is_last, self.stream, 0.0)
        gathered = np.where(self.tp > 1, 2.0 * self.tokens * model.width, 0.0)
        again = np.where(self.full, rank.whole_per_layer, np.where(self.selective, self._made_again(), 0.0))
        recomputed = self.full | self.selective
        casts = np.where(recomputed, self.layer_cast, flight * rank.layers * self.layer_cast)
        head = np.where(self.is_last, 4.0 * model.vocab_size * model.width / self.tp, 0.0)
        has = (self.microbatches > 1) & (not is_first_back)
        begun = np.where(is_first_back | (self.microbatches == 1), 2.0 * weight, 0.0)
        early = {
            **state,
            "gradients": np.where(has, state["gradients"], head),
            "activations": self.activations(flight) - np.where(self.selective, self._consumed(), 0.0),
            "working set": inner + weight + incoming + gathered + again,
            "logits": np.where(self.is_last, (flight - 1.0) * self._head_gradients(), 0.0),
            "cast weights": casts,
            "exchange": self._exchange(flight),
        }
        cast = np.where(self.layer_cast > 0, weight, 0.0)
        late = {
            **early,
            "gradients": early["gradients"] + begun,
            "activations": early["activations"] - np.where(recomputed, 0.0, inner),
            "working set": 3.0 * inner + incoming + again - np.where(recomputed, inner, 0.0),
            "cast weights": casts - cast,
        }
        return [early, late]

    def _head_gradients(self) -> Floats:
        """Of one micro-batch: the loss makes them in its forward and keeps them for its backward."""
        model = self.work.model
        return 2.0 * self.tokens * model.width + 4.0 * model.vocab_size * model.width / self.tp

    def _inner(self) -> Floats:
        """One inner tensor of the MLP."""
        return 2.0 * self.tokens * self.work.model.mlp.width / self.tp

    def _made_of_norms(self) -> Floats:
        """The norms' fp32 inputs, and their outputs, gathered under tp."""
        return 2.0 * 2.0 * self.stream + 2.0 * 2.0 * self.tokens * self.work.model.width

    def _consumed(self) -> Floats:
        """Kept products that the recomputed forward has used up: attention's output and what is rotated."""
        attention = self.work.model.attention
        rotated = 2.0 * self.tokens * (attention.num_heads + attention.num_kv_heads) * attention.head_width
        return 2.0 * self.tokens * self.work.model.width + rotated / self.tp

    def _made_again(self) -> Floats:
        """What selective recompute makes of one block: norms, rotations, the activation and the product."""
        model = self.work.model
        attention = model.attention
        rotated = 2.0 * self.tokens * (attention.num_heads + attention.num_kv_heads) * attention.head_width
        return self._made_of_norms() + rotated / self.tp + 2.0 * 2.0 * self.tokens * model.mlp.width / self.tp

    def _exchange(self, flight: Floats) -> Floats:
        """Receive buffers of every micro-batch, and what was sent on and waits for its gradient."""
        neighbours = (~self.is_first).astype(np.float64) + (~self.is_last).astype(np.float64)
        sent = np.where(self.is_last, 0.0, flight)
        # The last gradient that was sent back, once one was.
        back = (~self.is_first & (self.microbatches > flight)).astype(np.float64)
        return np.where(self.pp > 1, (neighbours * self.microbatches + sent + back) * self.stream, 0.0)


def fullest_items(work: Workload, at: Layouts, stack: Framework, rank: Rank, state: Items) -> Items:
    """Items of the fullest moment of every rank."""
    sums = Sums(work, at, stack, rank)
    head = sums.at_the_head(state)
    moments = [
        {name: np.where(sums.is_last, values, 0.0) for name, values in head.items()},
        *sums.in_the_last_block(state, is_first_back=True),
        *sums.in_the_last_block(state, is_first_back=False),
    ]
    names = dict.fromkeys(name for moment in moments for name in moment)
    zero = np.zeros((len(at), 3))
    tables = [{name: zero + moment.get(name, 0.0) for name in names} for moment in moments]
    totals = np.stack([sum(table.values()) for table in tables])  # pyright: ignore[reportCallIssue, reportArgumentType]
    best = totals.argmax(axis=0)
    chosen = {name: np.choose(best, [table[name] for table in tables]) for name in names}
    chosen["batch"] = zero + (BATCH_BYTES_PER_TOKEN * sums.microbatches * sums.tokens * at.cp[:, None])
    return chosen
