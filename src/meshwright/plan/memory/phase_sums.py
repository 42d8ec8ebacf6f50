"""What is held at each phase of a step that may be the fullest; candidates.py says which happen, and chooses.

Every sum is an array over layouts and the three ranks of a pipeline, without weights and optimizer states,
which are the same at all candidates.
"""

import numpy as np

from meshwright.plan.memory.block_bytes import Items, Turn
from meshwright.plan.memory.buckets import BUCKET_ELEMENTS
from meshwright.plan.memory.rank_facts import Facts, Mask
from meshwright.plan.workload.layouts import Floats


class Sums(Facts):
    """The candidates of every layout; all arrays have shape (N, 3) or (N, 1)."""

    # The head.

    def at_the_head(self) -> Items:
        """Forward of the head in the last micro-batch."""
        flight = self.rank.in_flight
        here = self.at_the_last_stage(flight)
        ends = 2.0 * here + 2.0  # the norm's fp32 input; of the present micro-batch its output and x
        whole = 2.0 * self.tokens * self.work.model.vocab_size / self.tp
        count = np.ceil(whole / (self.stack.loss_chunk_bytes or np.inf)).clip(1.0)
        # The logits of one chunk are freed when those of the next are there.
        chunks = whole / count * np.minimum(count, 2.0)
        # Of leaves autocast remembers its casts until the forward ends; of parts of DTensors it does not.
        remembered = self.rank.layers * self.blocks.remembered
        block = 2.0 * self.blocks.gathered_elements
        table = 2.0 * self.table
        flat = block if self.is_tied else table
        # A pipeline's first micro-batch finds no gradients, but the bucket of what was gathered last.
        is_first = self.is_sharded & (self.pp > 1) & (flight <= 1.0)
        first = np.where(is_first, np.maximum(flat - self._before_a_forward(), 0.0), 0.0)
        return {
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
        # Then they are freed, and FSDP2 reduces what was made of the weight's.
        each = self.stack.state.gradient
        shard = (1.0 + self.scattered() * (self.stack.state.weight < each)) / self.shards
        on_the_way = np.where(self.is_sharded & self.overlaps & (not self.is_tied), each * self.table, 0.0)
        made = np.maximum(self.head_gradients(), on_the_way * (1.0 + shard))
        again = self.whole_stream + np.where(self.is_sharded, 2.0, self.stack.state.weight) * self.table
        # A gradient of 16 bits becomes one of 32 beside itself; a part of a DTensor does when these are gone.
        widened = (self.stack.state.weight < each) & ~self.is_sharded & (self.tp == 1)
        return {
            "gradients": self._before_the_head(),
            "gathered": self.gathered(2.0 * self.table + 2.0 * self.blocks.gathered_elements),
            "activations": self.activations(flight * self.rank.layers, flight) + 2.0 * here * self.stream,
            "cast weights": flight * self.rank.layers * self.blocks.casts,
            "logits": (here - 1.0) * self.head_gradients()
            + made
            + again
            + np.where(widened, each * self.table, 0.0),
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
        flight = self.rank.in_flight
        others = flight * self.rank.layers - 1.0
        return {
            "gradients": self._before_a_forward(),
            "gathered": self.gathered(4.0 * self.blocks.gathered_elements + 2.0 * self.tied_table()),
            "activations": self.activations(others, flight) + self.normed(flight),
            "working set": self.stream + self.blocks.forward,
            "logits": self.waiting_head_gradients(flight),
            "cast weights": others * self.blocks.casts + (self.rank.layers - 1.0) * self.blocks.remembered,
            "exchange": self.exchange(flight - 1.0),
        }

    # The blocks.

    def _flight(self, turn: Turn) -> Floats:
        """In flight when a micro-batch comes back; a later one may have none that took the first's place."""
        flight = self.rank.in_flight
        if turn == "later":
            return np.where(self.microbatches > flight, flight, np.maximum(flight - 1.0, 1.0))
        return flight if turn == "first" else np.ones_like(flight)

    def in_the_last_block(self, turn: Turn) -> Items:
        """Backward of the stage's last block."""
        rank, flight = self.rank, self._flight(turn)
        others = flight * rank.layers - 1.0
        block = self.blocks.back[turn]
        return {
            "gradients": self._before_the_block(turn) + block["gradients"],
            # This block, the next one to come in a bucket, and the head's gradient in flight.
            "gathered": self.gathered(
                4.0 * self.blocks.gathered_elements + 2.0 * self.tied_table(), self._heads_way()
            )
            + block.get("gathered", 0.0),
            "activations": self.activations(others, flight) + self.normed(flight) + block["activations"],
            "working set": block["working set"]
            + np.where(self.is_last & ~self.takes_turns, self.stream, 0.0),
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
        # What is launched with the last micro-batch, or with each, is whole no longer.
        is_sent = (
            self.is_due() & self.overlaps & (self.scatters | (turn == "last") | (self.microbatches == 1))
        )
        sent = self.stack.state.gradient * self.flats["ends"] * (1.0 - 1.0 / self.rows())
        return left + np.where(waits, tied, np.where(is_new, head, 0.0)) - np.where(is_sent, sent, 0.0)

    def _heads_way(self) -> Floats:
        """ZeRO-3: the head's gradient as it is reduced; a tied one stays whole until the root's turn."""
        return np.where(self.is_last, 2.0 * self.table, 0.0) if self.is_tied else self.head_gradient

    def in_an_early_block(self, name: str, turn: Turn) -> Items:
        """Backward of a block with so many before it, when most gradients of the micro-batch are there."""
        before = self.blocks_before(name)
        rank = self.rank
        block = self.blocks.inner_back[turn]
        flight = self._flight(turn)
        others = (flight - 1.0) * rank.layers + before
        embedding = np.where(self.is_first & (not self.is_tied), self.table, 0.0)
        following = np.where(before > 0, self.blocks.gathered_elements, embedding)
        weights = 2.0 * (following + self.blocks.gathered_elements) + 4.0 * self.tied_table()
        on_the_way = np.where(rank.layers > 1, self.stack.state.gradient * self.blocks.gathered_elements, 0.0)
        on_the_way = on_the_way + self._waiting_head()
        return {
            "gradients": self._before_an_early_block(name, turn) + block["gradients"],
            "gathered": self.gathered(weights, on_the_way) + block.get("gathered", 0.0),
            "activations": self.activations(others, flight) + self.normed(flight) + block["activations"],
            "working set": block["working set"] + self.stream,
            "logits": self.waiting_head_gradients(flight),
            "cast weights": others * self.blocks.casts + block["cast weights"],
            "exchange": self.exchange(flight),
        }

    def after_the_first_block(self, turn: Turn) -> Items:
        """ZeRO-3: the stage's first block is behind, and FSDP2 reduces its gradients in one bucket."""
        flight, state = self._flight(turn), self.stack.state
        # What comes out of the sum is made narrow again where weights are.
        shard = 1.0 + self.scattered() * (state.weight < state.gradient)
        flat = state.gradient * self.blocks.gathered_elements
        # Beside it all whole gradients, until they are copied into it; FSDP2 lets go of the last one later.
        scattered = flat * shard / self.shards + 2.0 * self.blocks.last_elements
        flat = flat + np.maximum(2.0 * self.blocks.gathered_elements, scattered)
        embedding = np.where(self.is_first & (not self.is_tied), self.table, 0.0)
        others = (flight - 1.0) * self.rank.layers
        return {
            "gradients": self._before_an_early_block("first block", turn),
            "gathered": self.gathered(2.0 * embedding + 4.0 * self.tied_table(), flat + self._waiting_head()),
            "activations": self.activations(others, flight - 1.0) + self.normed(flight),
            "working set": self.stream,
            "logits": self.waiting_head_gradients(flight),
            "cast weights": others * self.blocks.casts,
            "exchange": self.exchange(flight),
        }

    def _waiting_head(self) -> Floats:
        """The gradient of a tied head without an embedding stays whole until the root's turn."""
        waits = self.is_last & ~self.is_first & self.is_tied
        reduced = self.stack.state.gradient * self.scattered() / self.shards
        return np.where(waits, (2.0 - reduced) * self.table, 0.0)

    def at_a_launch(self, turn: Turn) -> Items:
        """A bucket is launched in a block before the last: small blocks fill one together."""
        each, one, flight = self.stack.state.gradient, self.inner_launch, self._flight(turn)
        left = np.where(turn == "first", 0.0, self.left_gradients)
        is_new = (left == 0.0) | self.scatters
        unsent = each * one.elements
        made = unsent + self.waiting_experts(self.rank.layers - one.block)
        whole = np.where(is_new, made, left - each * one.sent)
        part = np.where(self.at.zero[:, None] > 0, 1.0 / self.shards, 0.0)
        # The gradient of a tied head comes first and goes last.
        waits = np.where(self.is_last & self.is_tied, self.table, 0.0)
        others = (flight - 1.0) * self.rank.layers + one.block
        return {
            "gradients": np.where(self.scatters, left, 0.0) + whole + each * (one.sent / self.rows() + waits),
            "gathered": unsent * (1.0 + part),
            "activations": self.activations(others, flight) + self.normed(flight),
            "working set": one.after + self.stream,
            "logits": self.waiting_head_gradients(flight),
            "cast weights": others * self.blocks.casts,
            "exchange": self.exchange(flight),
        }

    def blocks_before(self, name: str) -> Floats:
        """Blocks of the stage before one of EARLY_BLOCKS."""
        layers = self.rank.layers
        last_but_one = np.maximum(layers - 2.0, 0.0)
        return {"first block": 0.0 * layers, "second block": 1.0 + 0.0 * layers}.get(name, last_but_one)

    def sums_experts_alone(self) -> Mask:
        """Whether tp alone makes gradients wait for others: of experts, which it does not cut."""
        is_alone = (self.at.dp * self.at.cp == 1)[:, None]
        return is_alone & (self.tp > 1) & (self.work.model.moe is not None)

    def when_experts_are_summed(self) -> Items:
        """The first bucket of experts is summed over tp; in a pipeline, after the schedule."""
        moe, each, layers = self.work.model.moe, self.stack.state.gradient, self.rank.layers
        assert moe is not None
        matrix = moe.num_experts * moe.width * self.work.model.width
        count = np.minimum(np.ceil(BUCKET_ELEMENTS / matrix), 3.0 * layers)
        before = np.where(self.pp > 1, 0.0, layers - np.ceil(count / 3.0))
        table = np.where(self.is_first & (self.pp == 1), self.table, 0.0)
        made = each * (self.rank.parameters - table - before * self.blocks.elements + self.tied_table())
        left = np.where(self.pp > 1, self.whole_gradients, self.left_gradients + each * self.tied_table())
        # One that holds all of them waits for the stage's first norm.
        within = np.where(count * matrix >= BUCKET_ELEMENTS, self.blocks.after["experts.gate"], 0.0)
        block = np.where(self.pp > 1, 0.0, within + self.stream)
        flight = np.where(self.pp > 1, 0.0, 1.0)
        return {
            "gradients": np.where(self.microbatches > 1, left, made),
            "gathered": each * matrix * count,
            "activations": self.activations(before, flight),
            "working set": block,
            "exchange": self.exchange(0.0 * flight),
        }

    def _before_an_early_block(self, name: str, turn: Turn) -> Floats:
        """Gradients of the first micro-batch, or of the last one, which sends off what earlier ones left."""
        left = np.where(turn == "first", 0.0, self.left_gradients)
        each, tied = self.stack.state.gradient, self.tied_table()
        table = np.where(self.is_first, self.table, 0.0)
        done = self.rank.parameters - (1.0 + self.blocks_before(name)) * self.blocks.elements
        left_over = np.maximum(done - table - self.flats[f"sent before the {name}"], 0.0)
        unsent = np.where(self.is_due() & self.overlaps, left_over + tied, done - table + tied)
        made = unsent + np.maximum(done - table + tied - unsent, 0.0) / self.rows()
        made = np.where(
            self.is_sharded & self.overlaps, self.scattered() * (done - table) / self.shards, made
        )
        is_new = (left == 0.0) | self.scatters
        return np.where(self.scatters, left, 0.0) + each * np.where(is_new, made, tied + unsent)

    def when_gradients_are_taken(self) -> Items:
        """ZeRO-3 in a pipeline: before the third backward what the second left in 16 bits is widened."""
        flight = np.minimum(self.rank.in_flight, self.microbatches - 2.0)
        here = np.where(self.is_last, self.at_the_last_stage(flight), 0.0)
        # The parameters of the root come first, when all others still wait.
        root = np.where(self.is_first | (self.is_last & self.is_tied), self.table, 0.0)
        waiting = self.scattered() * self.sharded_gradients / self.chunks
        return {
            "gradients": self.left_gradients + waiting + self.stack.state.gradient * root / self.shards,
            "gathered": self.gathered(0.0 * flight),
            "activations": self.activations(flight * self.rank.layers, flight) + 2.0 * here * self.stream,
            "logits": here * self.head_gradients(),
            "exchange": self.exchange(flight),
        }

    def widens_later(self) -> Mask:
        """Whether gradients that FSDP2 has scattered wait in 16 bits for a sum in 32."""
        has_third = self.is_sharded & self.scatters & (self.pp > 1) & (self.microbatches > 2)
        return has_third & (self.scattered() < 1.0)

    # The ends.

    def at_the_end(self) -> Items:
        """The embedding's gradient of a micro-batch that sends nothing off, beside a tied head's."""
        each = self.stack.state.gradient
        table = np.where(self.is_first, self.table, 0.0)
        # Where tp cuts the table autograd adds the two gradients of a tied one in a third tensor.
        tied = self.tied_table() * np.where(self.tp > 1, 2.0, 1.0)
        first = self.whole_gradients + each * tied
        middle = self.left_gradients + each * (table + tied)
        last = each * (self.flats["last"] + tied)
        sent = (self.whole_gradients - each * self.flats["last"]) / self.rows()
        last = last + sent + np.where(self.scatters, self.left_gradients, 0.0)
        whole = np.where(self.microbatches > self.is_due() + 1.0, middle, first)
        # One of 16 bits becomes one of 32 beside itself, and what came out of the first block is still there.
        widens = (self.stack.state.weight < each) & (self.tp == 1)
        narrow = np.where(widens, self.stack.state.weight * table, 0.0) + np.where(
            table > 0, self.stream, 0.0
        )
        # FSDP2 reduces what belongs to the root last: the embedding, or a tied head.
        root = np.where(self.is_first | (self.is_last & self.is_tied), self.table, 0.0)
        shard = each * root / self.shards * (self.scattered() < 1.0)
        reduced = self.left_gradients + self.scattered() * self.sharded_gradients + shard
        whole_table = 4.0 * self.table + 2.0 * self.tied_table()
        is_sent = self.is_due() & self.overlaps & (self.scatters | (self.microbatches == 1))
        # A pipeline that reduces each micro-batch has others in flight.
        is_among = self.scatters & (self.pp > 1)
        flight = np.where(is_among, self._flight("later") - 1.0, 0.0).clip(0.0)
        return {
            "gradients": np.where(
                self.is_sharded & self.overlaps, reduced, np.where(is_sent, last, whole) + narrow
            ),
            "gathered": self.gathered(
                np.maximum(whole_table + each * self.blocks.gathered_elements, (2.0 + each) * self.table),
                np.where(self.pp > 1, (2.0 + each) * root, 0.0),
            ),
            "activations": self.activations(flight * self.rank.layers, flight),
            "cast weights": flight * self.rank.layers * self.blocks.casts,
            "exchange": self.exchange(flight + is_among),
        }

    def on_the_way(self) -> Items:
        """Gradients launched after the backward; of each micro-batch in a pipeline, beside the others."""
        rank = self.rank
        others = np.where(self.scatters, rank.in_flight - 1.0 / self.chunks, 0.0)
        return {
            "gradients": self._reduction(),
            "gathered": self.gathered(np.zeros_like(rank.layers)),
            "activations": self.activations(others * rank.layers, others) + self.normed(others + 1.0),
            "working set": np.where(self.scatters & ~self.is_first, self.whole_stream + self.stream, 0.0),
            "logits": np.where(self.is_last, others * self.head_gradients(), 0.0),
            "cast weights": others * rank.layers * self.blocks.casts,
            "exchange": self.exchange(others),
        }

    def _reduction(self) -> Floats:
        """Gradients in all forms while buckets are launched after the backward."""
        each = self.stack.state.gradient
        last, fullest = self.flats["last"], self.flats["reduction"]
        # A stage that is reduced by itself has buffers of its own.
        last = np.where(self.scatters, np.minimum(last, self.rank.parameters / self.chunks), last)
        # All micro-batches in flight: the second to come back finds gradients, and one fewer beside it.
        later = np.where(self.microbatches <= self.rank.in_flight, self.left_gradients, 0.0)
        later = np.maximum(later - self.rank.layers * self.blocks.kept, 0.0) * (self.pp > 1)
        part = np.where(self.at.zero[:, None] > 0, 1.0 / self.shards, 0.0)
        waiting, tail = last, last * (2.0 + part)
        if self.work.model.moe is not None:  # buffers of experts come after it
            waiting, tail = self.flats["waiting"], self.flats["tail"]
        sent = (self.whole_gradients - each * waiting) / self.rows()
        overlapped = each * tail + sent + np.where(self.scatters, self._before_the_head() + later, 0.0)
        return np.where(self.is_due(), np.where(self.overlaps, overlapped, each * fullest), 0.0)

    def in_the_update(self) -> Items:
        """ZeRO-1 and 2: the rows of the others come into a bucket, and are copied out of it."""
        weight = self.stack.state.weight
        largest, parameter = self.flats["largest"], self.flats["largest_parameter"]
        gathers = np.isin(self.at.zero, (1, 2))[:, None]
        flat = weight * (largest * (1.0 + 1.0 / self.shards) + parameter)
        return {
            "gradients": self.sharded_gradients,
            "gathered": np.where(gathers, flat, 0.0),
            "exchange": self.exchange(0.0 * self.rank.in_flight),
        }
