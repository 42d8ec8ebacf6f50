"""What is held at each phase of a step that may be the fullest; phases.py chooses among them.

Every sum is an array over rows, without weights and optimizer states, which are the same at all phases.
"""

import numpy as np

from meshwright.plan.memory.block_bytes import Items
from meshwright.plan.memory.rows import Rows
from meshwright.plan.workload.layouts import Floats


class ForwardSums(Rows):
    """Phases of the forward of a micro-batch in a stage."""

    def at_the_head(self) -> Items:
        """Forward of the head."""
        here = self.count["kept_last"] + 1.0
        full = 2.0 * self.tokens * self.work.model.vocab_size / self.tp
        count = np.ceil(full / self.stack.loss_chunk_bytes).clip(1.0)
        # Of leaves autocast remembers its casts until the forward ends; of parts of DTensors it does not.
        remembered = self.layers * self.block(self._blocks.remembered)
        table = 2.0 * self.table
        flat = 2.0 * self.gathered_elements if self.is_tied else table
        # A pipeline's first micro-batch finds no gradients, but the bucket of what was gathered last.
        is_first = self.is_sharded & self.in_pipeline & (self.count["kept"] == 0)
        first = np.where(is_first, np.maximum(flat - self.gradients, 0.0), 0.0)
        # The norm's fp32 input, its output and x.
        ends = 4.0 * self.stream
        return {
            "gradients": self.gradients,
            "gathered": self.gathered(table + flat) + first,
            "activations": self.activations(self.layers) + ends,
            "cast weights": self.cast_weights(self.layers) + remembered + self.weight_casts * self.table,
            "logits": here * self.head_gradients + full / count + self.gathered_stream,
            "exchange": self.exchange(1.0),
        }

    def through_the_last_block(self) -> Items:
        """Forward of the stage's last block."""
        blocks = self.layers - 1.0
        return {
            "gradients": self.gradients,
            "gathered": self.gathered(4.0 * self.gathered_elements + 2.0 * self.tied_table),
            "activations": self.activations(blocks, in_use=1.0),
            "working set": self.stream + self.block(self._blocks.forward),
            "logits": self.other_heads,
            "cast weights": self.cast_weights(blocks) + blocks * self.block(self._blocks.remembered),
            "exchange": self.exchange(0.0),
        }

    @property
    def gradients(self) -> Floats:
        """Gradients beside a forward: in a pipeline those scattered last are added in the next backward."""
        sums = self.each * self.counted_elements("summed") * self.shard_share
        scattered = np.where(self.is_sharded, self.scattered, 1.0) * self.shard_share
        latest = self.each * self.counted_elements("latest") * scattered
        return np.where(self.scatters, sums + latest, self.left)


class BackwardSums(Rows):
    """Phases of the backward of a micro-batch in a stage."""

    def behind_the_head(self) -> Items:
        """Backward of the head: its gradients are multiplied, so they are there twice."""
        # Then they are freed, and FSDP2 reduces what was made of the weight's.
        weight = self.stack.state.weight
        shard = (1.0 + self.scattered * (weight < self.each)) / self.shards
        reduces = self.is_sharded & self.overlaps & (not self.is_tied)
        in_flight = np.where(reduces, self.each * self.table, 0.0)
        made = np.maximum(self.head_gradients, in_flight * (1.0 + shard))
        again = self.full_stream + np.where(self.is_sharded, 2.0, weight) * self.table
        # A gradient of 16 bits becomes one of 32 beside itself; a part of a DTensor does when these are gone.
        widened = (weight < self.each) & ~self.is_sharded & (self.tp == 1)
        return {
            "gradients": self.left,
            "gathered": self.gathered(2.0 * self.table + 2.0 * self.gathered_elements),
            "activations": self.activations(self.layers) + 2.0 * self.stream,
            "cast weights": self.cast_weights(self.layers),
            "logits": self.other_heads + made + again + np.where(widened, self.each * self.table, 0.0),
            "exchange": self.exchange(1.0),
        }

    def in_the_last_block(self) -> Items:
        """Backward of the stage's last block."""
        blocks, peak = self.layers - 1.0, self.last_backward_peak
        # This block, the next one to come in a bucket, and the head's gradient in flight.
        weights = 4.0 * self.gathered_elements + 2.0 * self.tied_table
        return {
            "gradients": self._before_the_block() + peak["gradients"],
            "gathered": self.gathered(weights, self._head_in_flight()) + peak["gathered"],
            "activations": self.activations(blocks, in_use=1.0) + peak["activations"],
            "working set": peak["working set"] + np.where(self.is_last, self.stream, 0.0),
            "logits": self.other_heads,
            "cast weights": self.cast_weights(blocks) + peak["cast weights"],
            "exchange": self.exchange(1.0),
        }

    def _before_the_block(self) -> Floats:
        """Gradients when the backward of the last block begins: of earlier micro-batches, and the head's.

        A tied head's waits for the embedding's, so that it is beside the sum of earlier ones.
        """
        reduced = 0.0 if self.is_tied else self.scattered / self.shards
        head = np.where(self.is_last, self.each * self.table, 0.0)
        head = head * np.where(self.is_sharded & self.overlaps, reduced, 1.0)
        tied = np.where(self.is_sharded, 0.0, self.each * self.tied_table)
        waits = self.is_tied & self.is_first & ~self.is_sharded
        # What is launched now is full no longer.
        sent = self.each * self.flats["ends"] * (1.0 - 1.0 / self.rows_of_buckets)
        sent = np.where(self.launches, sent, 0.0)
        return self.left + np.where(waits, tied, np.where(self.is_new, head, 0.0)) - sent

    def _head_in_flight(self) -> Floats:
        """ZeRO-3: the head's gradient as it is reduced; a tied one stays full until the root's turn."""
        return np.where(self.is_last, (2.0 if self.is_tied else self.each) * self.table, 0.0)

    def in_an_early_block(self, name: str) -> Items:
        """Backward of a block with few before it, when most gradients of the micro-batch are there."""
        before, peak = self.blocks_before(name), self.backward_peak
        following = np.where(before > 0, self.gathered_elements, self._embedding)
        weights = 2.0 * (following + self.gathered_elements) + 4.0 * self.tied_table
        in_flight = np.where(self.layers > 1, self.each * self.gathered_elements, 0.0) + self._waiting_head
        return {
            "gradients": self._before_an_early_block(name) + peak["gradients"],
            "gathered": self.gathered(weights, in_flight) + peak["gathered"],
            "activations": self.activations(before, in_use=1.0) + peak["activations"],
            "working set": peak["working set"] + self.stream,
            "logits": self.other_heads,
            "cast weights": self.cast_weights(before) + peak["cast weights"],
            "exchange": self.exchange(1.0),
        }

    def blocks_before(self, name: str) -> Floats:
        """Blocks of the stage before one of EARLY_BLOCKS."""
        if name == "first block":
            return np.zeros_like(self.layers)
        return np.ones_like(self.layers) if name == "second block" else np.maximum(self.layers - 2.0, 0.0)

    @property
    def _embedding(self) -> Floats:
        return np.where(self.is_first & (not self.is_tied), self.table, 0.0)

    @property
    def _waiting_head(self) -> Floats:
        """The gradient of a tied head without an embedding stays full until the root's turn."""
        waits = self.is_last & ~self.is_first & self.is_tied
        return np.where(waits, (2.0 - self.each * self.scattered / self.shards) * self.table, 0.0)

    def _before_an_early_block(self, name: str) -> Floats:
        """Gradients of other stages, those of this one so far, and what is left of launched ones."""
        table = np.where(self.is_first, self.table, 0.0)
        done = self.own_elements - table - (1.0 + self.blocks_before(name)) * self.elements
        full = np.where(self.is_new, done, self.own_elements)
        sent = np.where(self.launches, np.minimum(self.flats[f"sent before the {name}"], full), 0.0)
        made = full + self.tied_table - sent * (1.0 - 1.0 / self.rows_of_buckets)
        reduces = self.is_sharded & self.overlaps
        made = np.where(reduces, self.scattered * done / self.shards, made)
        return self._beside + self.each * made

    @property
    def _beside(self) -> Floats:
        """Gradients that this backward does not add to."""
        own = np.where(self.is_new, 0.0, self.each * self.own_elements)
        return self.left - own

    def after_the_first_block(self) -> Items:
        """ZeRO-3: the stage's first block is behind, and FSDP2 reduces its gradients in one bucket."""
        state = self.stack.state
        # What comes out of the sum is cast to 16 bits again where weights are.
        shard = 1.0 + self.scattered * (state.weight < state.gradient)
        flat = state.gradient * self.gathered_elements
        # Beside it all full gradients, until they are copied into it; FSDP2 frees the last one later.
        scattered = flat * shard / self.shards + 2.0 * self.block(self._blocks.last_elements)
        flat = flat + np.maximum(2.0 * self.gathered_elements, scattered)
        weights = 2.0 * self._embedding + 4.0 * self.tied_table
        return {
            "gradients": self._before_an_early_block("first block"),
            "gathered": self.gathered(weights, flat + self._waiting_head),
            "activations": self.activations(0.0 * self.layers, own=0.0),
            "working set": self.stream,
            "logits": self.other_heads,
            "cast weights": self.cast_weights(0.0 * self.layers),
            "exchange": self.exchange(1.0),
        }

    def at_a_launch(self) -> Items:
        """A bucket is launched in a block before the last: small blocks fill one together."""
        one = self.inner_launch
        unsent = self.each * one.elements
        made = unsent + self.waiting_experts(self.layers - one.block)
        full = np.where(self.is_new, made, self.each * (self.own_elements - one.sent))
        part = np.where(self.at.zero > 0, 1.0 / self.shards, 0.0)
        # The gradient of a tied head comes first and goes last.
        waits = np.where(self.is_last & self.is_tied, self.table, 0.0)
        return {
            "gradients": self._beside + full + self.each * (one.sent / self.rows_of_buckets + waits),
            "gathered": unsent * (1.0 + part),
            "activations": self.activations(one.block, in_use=1.0),
            "working set": one.after + self.stream,
            "logits": self.other_heads,
            "cast weights": self.cast_weights(one.block),
            "exchange": self.exchange(1.0),
        }

    def when_gradients_are_taken(self) -> Items:
        """ZeRO-3 in a pipeline: as a backward begins, what the latest one left in 16 bits is cast to 32."""
        sums = self.each * self.counted_elements("summed") * self.shard_share
        waiting = self.each * self.scattered * self.counted_elements("latest") * self.shard_share
        # The parameters of the root come first, when all others still wait.
        root = np.where(self.count["latest_first"] > 0, self.table, 0.0)
        own = np.where(self.is_last, 2.0 * self.stream, 0.0)
        return {
            "gradients": sums + waiting + self.each * root / self.shards,
            "gathered": self.gathered(0.0 * sums),
            "activations": self.activations(self.layers) + own,
            "logits": self.other_heads + np.where(self.is_last, self.head_gradients, 0.0),
            "cast weights": self.cast_weights(self.layers),
            "exchange": self.exchange(1.0),
        }

    def when_experts_are_summed(self) -> Items:
        """tp alone: the first bucket of experts is summed, which tp does not shard."""
        matrix, count, fills = self.expert_bucket()
        before = self.layers - np.ceil(count / 3.0)
        made = self.own_elements - np.where(self.is_first, self.table, 0.0) - before * self.elements
        made = np.where(self.is_new, made, self.own_elements) + self.tied_table
        # One that holds all of them waits for the stage's first norm.
        within = np.where(fills, self.block(self._blocks.after_experts), 0.0)
        return {
            "gradients": self._beside + self.each * made,
            "gathered": self.each * matrix * count,
            "activations": self.activations(before, in_use=1.0),
            "working set": within + self.stream,
            "exchange": self.exchange(0.0),
        }

    def at_the_end(self) -> Items:
        """The embedding's gradient, beside a tied head's; FSDP2 reduces what belongs to the root last."""
        each, weight = self.each, self.stack.state.weight
        table = np.where(self.is_first, self.table, 0.0)
        # Where tp shards the table autograd adds the two gradients of a tied one in a third tensor.
        tied = self.tied_table * np.where(self.tp > 1, 2.0, 1.0)
        full = self.own_elements + tied + np.where(self.is_new, 0.0, table)
        last = self.flats["last"]
        launched = last + tied + (self.own_elements - last) / self.rows_of_buckets
        # One of 16 bits becomes one of 32 beside itself, and what came out of the first block is still there.
        widens = (weight < each) & (self.tp == 1)
        narrow = np.where(widens, weight * table, 0.0) + np.where(table > 0, self.stream, 0.0)
        root = np.where(self.is_first | (self.is_last & self.is_tied), self.table, 0.0)
        shard = each * root / self.shards * (self.scattered < 1.0)
        reduced = self.left + self.scattered * each * self.own_elements * self.shard_share + shard
        made = self._beside + each * np.where(self.launches, launched, full) + narrow
        full_table = 4.0 * self.table + 2.0 * self.tied_table
        gathered = np.maximum(full_table + each * self.gathered_elements, (2.0 + each) * self.table)
        return {
            "gradients": np.where(self.is_sharded & self.overlaps, reduced, made),
            "gathered": self.gathered(gathered, np.where(self.in_pipeline, (2.0 + each) * root, 0.0)),
            "activations": self.activations(0.0 * self.layers, own=0.0),
            "logits": self.other_heads,
            "cast weights": self.cast_weights(0.0 * self.layers),
            "exchange": self.exchange(1.0),
        }

    def in_flight(self) -> Items:
        """The last buckets of a backward, as they are launched."""
        part = np.where(self.at.zero > 0, 1.0 / self.shards, 0.0)
        waiting, tail = self.flats["last"], self.flats["last"] * (2.0 + part)
        if self.work.model.moe is not None:  # buckets of experts come after it
            waiting, tail = self.flats["waiting"], self.flats["tail"]
        sent = (self.own_elements - waiting) / self.rows_of_buckets
        received = np.where(self.in_pipeline & ~self.is_first, self.full_stream + self.stream, 0.0)
        return {
            "gradients": self._beside + self.each * (tail + sent),
            "activations": self.activations(0.0 * self.layers, own=0.0),
            "working set": received,
            "logits": self.other_heads,
            "cast weights": self.cast_weights(0.0 * self.layers),
            "exchange": self.exchange(0.0),
        }


class SplitSums(Rows):
    """Phases of a split backward: I computes input gradients, W weight gradients."""

    def in_the_input_pass(self) -> Items:
        """I of the stage's first block: all others already hold what W needs."""
        split = self._blocks.split
        head = np.where(self.is_last, self.head_between, 0.0)
        between = (self.layers - 1.0) * self.block(split["between"])
        return {
            "gradients": self.left,
            "gathered": self.gathered(0.0 * self.layers),
            "activations": self.activations(np.ones_like(self.layers)) + between,
            "working set": self.block(split["input"]) + head,
            "logits": self.other_heads,
            "cast weights": self.cast_weights(self.layers),
            "exchange": self.exchange(1.0),
        }

    def in_the_weight_pass(self) -> Items:
        """W as it begins."""
        split = self._blocks.split
        head = np.where(self.is_last, self.head_between, 0.0)
        between = self.layers * self.block(split["between"]) + self.tables - self.stream
        peak = np.where(self.has_gradients, self.block(split["weight"]), self.block(split["new weight"]))
        return {
            "gradients": self.left,
            "gathered": self.gathered(0.0 * self.layers),
            "activations": self.activations(0.0 * self.layers, own=0.0) + between,
            "working set": peak + head,
            "logits": self.other_heads,
            "cast weights": self.cast_weights(self.layers),
            "exchange": self.exchange(1.0),
        }

    def after_the_weight_pass(self) -> Items:
        """W as it ends: all gradients of the stage are there."""
        new = np.where(self.has_gradients, 0.0, self.own_elements)
        return {
            "gradients": self.left + self.each * new,
            "gathered": self.gathered(0.0 * self.layers),
            "activations": self.activations(0.0 * self.layers, own=0.0),
            "logits": self.other_heads,
            "cast weights": self.cast_weights(0.0 * self.layers),
            "exchange": self.exchange(1.0),
        }


class EndSums(Rows):
    """Phases after the last backward of a step: one row for each rank."""

    def reduction(self) -> Items:
        """A pipeline launches all buckets one after the other."""
        return {
            "gradients": np.where(self.is_due, self.each * self.flats["reduction"], 0.0),
            "gathered": self.gathered(0.0 * self.layers),
            "activations": self.activations(0.0 * self.layers, own=0.0),
            "exchange": self.exchange(0.0),
        }

    def when_experts_are_summed(self) -> Items:
        """tp alone in a pipeline: the first bucket of experts is summed."""
        matrix, count, _ = self.expert_bucket()
        return {
            "gradients": self.each * self.parameters,
            "gathered": self.each * matrix * count,
            "activations": self.activations(0.0 * self.layers, own=0.0),
            "exchange": self.exchange(0.0),
        }

    def in_the_update(self) -> Items:
        """ZeRO-1 and 2: the rows of the others come into a bucket, and are copied out of it."""
        weight = self.stack.state.weight
        largest, parameter = self.flats["largest"], self.flats["largest_parameter"]
        gathers = np.isin(self.at.zero, (1, 2))
        flat = weight * (largest * (1.0 + 1.0 / self.shards) + parameter)
        share = np.where(self.at.zero > 0, self.shard_share, 1.0)
        return {
            "gradients": self.each * self.parameters * share,
            "gathered": np.where(gathers, flat, 0.0),
            "activations": self.activations(0.0 * self.layers, own=0.0),
            "exchange": self.exchange(0.0),
        }
