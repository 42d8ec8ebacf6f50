"""The fullest moment of a step of our own runtime, to the byte where it is covered.

Some moments compete, and every rank is at the fullest of its own:

    head, forward      everything kept for backward exists, and a chunk of logits beside the head's gradient
    head, backward     the head's gradient is there twice
    last block, back   of the first micro-batch to come back, of a later one, and of the last one, which
                       sends gradients off in flat buffers
    first block, back  little is kept any more, and all gradients are there
    end of backward    the embedding's gradient, and the last gradients on their way
    update             ZeRO-1 and 2 gather what others updated

The blocks are written down on a tape (block_tape.py). The rehearsal traces the same step and a test holds
the two together.

Covered: 16-bit compute without compiler, dense layers, gpipe, 1f1b and interleaved 1f1b.
"""

from collections.abc import Iterator

import numpy as np

from meshwright.plan.buckets import Stage
from meshwright.plan.frameworks import Framework
from meshwright.plan.layouts import FULL, Floats, Layouts
from meshwright.plan.moment_facts import Facts, Mask, Rank, Turn
from meshwright.plan.schedules import SCHEDULES
from meshwright.plan.tape import Items
from meshwright.plan.workload import Workload

COVERED_SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b")
# Tokens, targets and positions are int64, the loss weights fp32.
BATCH_BYTES_PER_TOKEN = 28.0


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


def covered_layouts(at: Layouts) -> Mask:
    """Of those, the layouts; shape (N, 1)."""
    whole = np.isin(np.asarray(SCHEDULES)[at.schedule], COVERED_SCHEDULES) | (at.pp == 1)
    here = (at.offloads("parameters") == 0) & (at.offloads("activations") == 0)
    # Stages of one rank that are reduced one by one have buffers of their own, unknown here.
    apart = (at.zero >= 2) & (at.reduce_last == 0) & (at.virtual_stages > 1)
    # In a single round of turns the first stages have no gradients yet when a rank is fullest.
    apart = apart | ((at.virtual_stages > 1) & (at.num_microbatches < 2 * at.pp))
    return ((at.regather == 0) & whole & here & ~apart)[:, None]


class Sums(Facts):
    """The moments of every layout; all arrays have shape (N, 3) or (N, 1)."""

    # The head.

    def at_the_head(self) -> Items:
        """Forward of the head in the last micro-batch."""
        flight = self.rank.in_flight
        here = self.at_the_last_stage(flight)
        ends = 2.0 * here + 2.0  # the norm's fp32 input; of the present micro-batch its output and x
        whole = 2.0 * self.tokens * self.work.model.vocab_size / self.tp
        count = np.ceil(whole / (self.stack.loss_chunk_bytes or np.inf)).clip(1.0)
        # The logits of one chunk are let go of when those of the next are there.
        chunks = whole / count * np.minimum(count, 2.0)
        # Of leaves autocast remembers its casts until the forward ends; of parts of DTensors it does not.
        cast = self.casts * self.blocks.elements
        remembered = np.where(self.recomputes & (self.tp == 1), self.rank.layers * cast, 0.0)
        block = 2.0 * self.blocks.elements
        table = 2.0 * self.table
        flat = block if self.is_tied else table
        # A pipeline's first micro-batch finds no gradients, but the flat buffer of what was gathered last.
        first = np.where(
            self.is_sharded & (self.pp > 1), np.maximum(flat - self._before_a_forward(), 0.0), 0.0
        )
        return {
            **self.state,
            "gradients": self._before_a_forward(),
            "gathered": self.gathered(table + flat) + first,
            "activations": self.activations(flight * self.rank.layers, flight) + ends * self.stream,
            "cast weights": flight * self.rank.layers * self.blocks.casts
            + remembered
            + self.casts * self.table,
            "logits": here * self.head_gradients() + chunks + self.gathered_stream,
            "exchange": self.exchange(flight),
        }

    def behind_the_head(self) -> Items:
        """Backward of the head: its gradients are multiplied, so they are there twice."""
        flight = self.rank.in_flight
        here = self.at_the_last_stage(flight)
        # Then they are let go of, and FSDP2 reduces what was made of the weight's.
        each = self.stack.state.gradient
        shard = (1.0 + self.scattered() * (self.stack.state.weight < each)) / self.shards
        on_the_way = np.where(self.is_sharded & self.overlaps & (not self.is_tied), each * self.table, 0.0)
        made = np.maximum(self.head_gradients(), on_the_way * (1.0 + shard))
        again = self.whole_stream + np.where(self.is_sharded, 2.0, self.stack.state.weight) * self.table
        return {
            **self.state,
            "gradients": self._before_the_head(),
            "gathered": self.gathered(2.0 * self.table + 2.0 * self.blocks.elements),
            "activations": self.activations(flight * self.rank.layers, flight) + 2.0 * here * self.stream,
            "cast weights": flight * self.rank.layers * self.blocks.casts,
            "logits": (here - 1.0) * self.head_gradients() + made + again,
            "exchange": self.exchange(flight),
        }

    def _before_the_head(self) -> Floats:
        return np.where(self.microbatches > self.rank.in_flight, self.left_gradients, 0.0)

    def _before_a_forward(self) -> Floats:
        """In a pipeline the scattered gradients of a stage are added when the next backward begins."""
        waits = self.scatters & (self.pp > 1) & (self.microbatches > self.rank.in_flight + 1.0)
        added = np.where(self.is_sharded, self.scattered(), 1.0) / self.chunks
        return self._before_the_head() * np.where(waits, 1.0 + added, 1.0)

    def through_the_last_block(self) -> Items:
        """Forward of the stage's last block in the last micro-batch that comes before a backward."""
        flight, model = self.rank.in_flight, self.work.model
        # Its input, the sum after attention with what was added, and the same of the MLP.
        is_spread = (self.tp > 1) & (self.at.microbatch_sequences > 1)[:, None]
        streams = 4.0 * self.stream + self.whole_stream * (1.0 + is_spread)
        inner = 3.0 * self.work.working_bytes * self.tokens * model.mlp.width / self.tp
        full = ((self.at.recompute & FULL) > 0)[:, None]
        cast = np.where(self.recomputes, self.casts * self.blocks.elements, 0.0)
        remembered = np.where(self.tp == 1, self.rank.layers * cast, 0.0)
        return {
            **self.state,
            "gradients": self._before_a_forward(),
            "gathered": self.gathered(4.0 * self.blocks.elements),
            "activations": self.activations(flight * self.rank.layers, flight) + self.normed(flight),
            "working set": np.where(
                full, np.maximum(inner + 3.0 * self.stream + self.whole_stream, streams), streams
            ),
            "logits": self.waiting_head_gradients(flight),
            "cast weights": flight * self.rank.layers * self.blocks.casts + remembered,
            "exchange": self.exchange(flight - 1.0),
        }

    # The blocks.

    def in_the_last_block(self, turn: Turn) -> Items:
        """Backward of the stage's last block."""
        rank = self.rank
        flight = rank.in_flight
        if turn == "later":
            flight = np.where(self.microbatches > flight, flight, np.maximum(flight - 1.0, 1.0))
        elif turn == "last":
            flight = np.ones_like(flight)
        others = flight * rank.layers - 1.0
        block = self.blocks.back[turn]
        return {
            **self.state,
            "gradients": self._before_the_block(turn) + block["gradients"],
            # This block, the next one to come in a flat buffer, and the head's gradient on its way.
            "gathered": self.gathered(4.0 * self.blocks.elements + 2.0 * self.tied_table(), self._heads_way())
            + block.get("gathered", 0.0),
            "activations": self.activations(others, flight) + self.normed(flight) + block["activations"],
            "working set": block["working set"] + np.where(self.is_last, self.stream, 0.0),
            "logits": self.waiting_head_gradients(flight),
            "cast weights": others * self.blocks.casts + block["cast weights"],
            "exchange": self.exchange(flight),
        }

    def _before_the_block(self, turn: Turn) -> Floats:
        """Gradients when the backward of the last block begins: of earlier micro-batches, and the head's.

        A tied head's waits for the embedding's, so that it is beside the sum of earlier ones.
        """
        left = np.where(turn == "first", 0.0, self.left_gradients)
        is_new = (left == 0.0) | self.scatters
        reduced = 0.0 if self.is_tied else self.scattered() / self.shards
        head = self.head_gradient * np.where(self.is_sharded & self.overlaps, reduced, 1.0)
        tied = np.where(self.is_sharded, 0.0, self.stack.state.gradient * self.tied_table())
        waits = self.is_tied & self.is_first & ~self.is_sharded
        # What is sent off with the last micro-batch, or with each, is whole no longer.
        is_sent = (
            self.is_due() & self.overlaps & (self.scatters | (turn == "last") | (self.microbatches == 1))
        )
        sent = self.stack.state.gradient * self.flats["ends"] * (1.0 - 1.0 / self.rows())
        return left + np.where(waits, tied, np.where(is_new, head, 0.0)) - np.where(is_sent, sent, 0.0)

    def _heads_way(self) -> Floats:
        """ZeRO-3: the head's gradient as it is reduced; a tied one stays whole until the root's turn."""
        return np.where(self.is_last, 2.0 * self.table, 0.0) if self.is_tied else self.head_gradient

    def in_an_early_block(self, before: int, turn: Turn) -> Items:
        """Backward of a block with so many before it, when most gradients of the micro-batch are there."""
        rank = self.rank
        block = self.blocks.back[turn]
        fewer = np.where(
            self.microbatches > rank.in_flight, rank.in_flight, np.maximum(rank.in_flight - 1.0, 1.0)
        )
        flight = {"first": rank.in_flight, "later": fewer, "last": np.ones_like(fewer)}[turn]
        others = (flight - 1.0) * rank.layers + before
        embedding = np.where(self.is_first & (not self.is_tied), self.table, 0.0)
        following = self.blocks.elements if before else embedding
        weights = 2.0 * (following + self.blocks.elements) + 4.0 * self.tied_table()
        on_the_way = np.where(rank.layers > 1, self.stack.state.gradient * self.blocks.elements, 0.0)
        return {
            **self.state,
            "gradients": self._before_an_early_block(before, turn) + block["gradients"],
            "gathered": self.gathered(weights, on_the_way) + block.get("gathered", 0.0),
            "activations": self.activations(others, flight) + self.normed(flight) + block["activations"],
            "working set": block["working set"] + self.stream,
            "logits": self.waiting_head_gradients(flight),
            "cast weights": others * self.blocks.casts + block["cast weights"],
            "exchange": self.exchange(flight),
        }

    def at_a_launch(self) -> Items:
        """A flat buffer is sent off in a block before the last: small blocks fill one together."""
        each, zero = self.stack.state.gradient, 0.0 * self.rank.layers
        found = {"gradients": zero, "gathered": zero, "activations": zero, "working set": zero}
        for is_cut in (False, True):
            rows = self.is_due() & (self.pp == 1) & ((self.tp > 1) == is_cut)
            if not rows.any():
                continue
            num_layers = self.work.model.num_layers
            stage = Stage(num_layers, has_embedding=True, has_head=True, is_cut=is_cut)
            found_launches = self.work.buckets.launches(stage)
            inner = [one for one in found_launches if one.block < num_layers - 1]
            if not inner:
                continue
            first, tp = inner[0], self.tp
            sent = each * first.sent / tp / self.rows()
            is_new = (self.left_gradients == 0.0) | self.scatters
            unsent = each * first.elements / tp
            whole = np.where(is_new, unsent, self.left_gradients - each * first.sent / tp)
            left = np.where(self.scatters, self.left_gradients, 0.0)
            part = np.where(self.at.zero[:, None] > 0, 1.0 / self.shards, 0.0)
            tied = each * self.tied_table()
            items = {
                "gradients": left + whole + sent + tied,
                "gathered": unsent * (1.0 + part),
                "activations": self.activations(zero + first.block, zero + 1.0),
                "working set": self.blocks.after[first.name] + self.stream,
            }
            found = {name: np.where(rows, items[name], values) for name, values in found.items()}
        return {**self.state, **found}

    def _before_an_early_block(self, before: int, turn: Turn) -> Floats:
        """Gradients of the first micro-batch, or of the last one, which sends off what earlier ones left."""
        left = np.where(turn == "first", 0.0, self.left_gradients)
        each, tied = self.stack.state.gradient, self.tied_table()
        table = np.where(self.is_first, self.table, 0.0)
        done = self.rank.parameters - (1 + before) * self.blocks.elements
        left_over = np.maximum(self.flats["last"] - table - (1 + before) * self.blocks.elements, 0.0)
        unsent = np.where(self.is_due() & self.overlaps, left_over + tied, done - table + tied)
        made = unsent + np.maximum(done - table + tied - unsent, 0.0) / self.rows()
        made = np.where(
            self.is_sharded & self.overlaps, self.scattered() * (done - table) / self.shards, made
        )
        is_new = (left == 0.0) | self.scatters
        return np.where(self.scatters, left, 0.0) + each * np.where(is_new, made, tied + unsent)

    # The ends.

    def at_the_end(self) -> Items:
        """The embedding's gradient of a micro-batch that sends nothing off, beside a tied head's."""
        each, tied = self.stack.state.gradient, self.tied_table()
        table = np.where(self.is_first, self.table, 0.0)
        first = self.whole_gradients + each * tied
        middle = self.left_gradients + each * (table + tied)
        whole = np.where(self.microbatches > self.is_due() + 1.0, middle, first)
        reduced = self.left_gradients + self.sharded_gradients
        whole_table = 4.0 * self.table + 2.0 * tied
        is_whole = ~(self.is_due() & (self.scatters | (self.microbatches == 1)))
        return {
            **self.state,
            "gradients": np.where(self.is_sharded & self.overlaps, reduced, np.where(is_whole, whole, 0.0)),
            "gathered": self.gathered(
                np.maximum(whole_table + each * self.blocks.elements, (2.0 + each) * self.table)
            ),
            "exchange": self.exchange(0.0 * self.rank.in_flight),
        }

    def on_the_way(self) -> Items:
        """Gradients sent off after the backward; of each micro-batch in a pipeline, beside the others."""
        rank = self.rank
        others = np.where(self.scatters, rank.in_flight - 1.0 / self.chunks, 0.0)
        return {
            **self.state,
            "gradients": self._reduction(),
            "gathered": self.gathered(np.zeros_like(rank.layers)),
            "activations": self.activations(others * rank.layers, others) + self.normed(others + 1.0),
            "working set": np.where(self.scatters & ~self.is_first, self.whole_stream + self.stream, 0.0),
            "logits": np.where(self.is_last, others * self.head_gradients(), 0.0),
            "cast weights": others * rank.layers * self.blocks.casts,
            "exchange": self.exchange(others),
        }

    def _reduction(self) -> Floats:
        """Gradients in all forms while flat buffers are sent off after the backward."""
        each = self.stack.state.gradient
        last, fullest = self.flats["last"], self.flats["reduction"]
        # A stage that is reduced by itself has buffers of its own.
        last = np.where(self.scatters, np.minimum(last, self.rank.parameters / self.chunks), last)
        # All micro-batches in flight: the second to come back finds gradients, and one fewer beside it.
        later = np.where(self.microbatches <= self.rank.in_flight, self.left_gradients, 0.0)
        later = np.maximum(later - self.rank.layers * self.blocks.kept, 0.0) * (self.pp > 1)
        sent = (self.whole_gradients - each * last) / self.rows()
        part = np.where(self.at.zero[:, None] > 0, 1.0 / self.shards, 0.0)
        overlapped = (
            each * last * (2.0 + part) + sent + np.where(self.scatters, self._before_the_head() + later, 0.0)
        )
        return np.where(self.is_due(), np.where(self.overlaps, overlapped, each * fullest), 0.0)

    def in_the_update(self) -> Items:
        """ZeRO-1 and 2: the rows of the others come into a flat buffer, and are copied out of it."""
        weight = self.stack.state.weight
        largest, parameter = self.flats["largest"], self.flats["largest_parameter"]
        gathers = np.isin(self.at.zero, (1, 2))[:, None]
        flat = weight * (largest * (1.0 + 1.0 / self.shards) + parameter)
        return {
            **self.state,
            "gradients": self.sharded_gradients,
            "gathered": np.where(gathers, flat, 0.0),
            "exchange": self.exchange(0.0 * self.rank.in_flight),
        }


def fullest_items(work: Workload, at: Layouts, stack: Framework, rank: Rank, state: Items) -> Items:
    """Items of the fullest moment of every rank."""
    moments = [items for _, items in moments_of(work, at, stack, rank, state)]
    names = dict.fromkeys(name for moment in moments for name in moment)
    zero = np.zeros((len(at), 3))
    tables = [{name: zero + moment.get(name, 0.0) for name in names} for moment in moments]
    totals = np.stack([sum(table.values()) for table in tables])  # pyright: ignore[reportCallIssue, reportArgumentType]
    best = totals.argmax(axis=0)
    chosen = {name: np.choose(best, [table[name] for table in tables]) for name in names}
    # A pipeline joins the micro-batches of a step, of which it has cut its part of the sequence.
    copies = 1.0 + (at.pp > 1) / at.cp
    sequences = at.num_microbatches * at.microbatch_sequences * copies
    chosen["batch"] = zero + (BATCH_BYTES_PER_TOKEN * work.sequence_length * sequences)[:, None]
    return chosen


def moments_of(
    work: Workload, at: Layouts, stack: Framework, rank: Rank, state: Items
) -> Iterator[tuple[str, Items]]:
    """The moments that compete, by name."""
    sums = Sums(work, at, stack, rank, state)
    yield "head, forward", _where(sums.is_last, sums.at_the_head())
    yield "head, backward", _where(sums.is_last, sums.behind_the_head())
    yield "last block, forward", sums.through_the_last_block()
    yield "last block, first", sums.in_the_last_block("first")
    yield "last block, later", _where(sums.has_middle(), sums.in_the_last_block("later"))
    yield "last block, last", sums.in_the_last_block("last")
    has_second = sums.rank.layers > 2
    for turn in ("first", "last"):
        yield f"first block, {turn}", sums.in_an_early_block(0, turn)
        yield f"second block, {turn}", _where(has_second, sums.in_an_early_block(1, turn))
    each = sums.scatters & (sums.pp > 1)
    yield "first block, later", _where(each, sums.in_an_early_block(0, "later"))
    yield "second block, later", _where(each & has_second, sums.in_an_early_block(1, "later"))
    yield "launch", sums.at_a_launch()
    yield "end of backward", sums.at_the_end()
    yield "reduction", sums.on_the_way()
    yield "update", sums.in_the_update()


def _where(mask: Mask, items: Items) -> Items:
    return {name: np.where(mask, values, 0.0) for name, values in items.items()}
