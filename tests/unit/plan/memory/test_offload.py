"""What offload, regather and the choice of when to reduce do to bytes and seconds."""

import numpy as np
import pytest

from meshwright.hardware import parse_cluster
from meshwright.plan.framework import our_runtime
from meshwright.plan.memory.in_flight import in_flight
from meshwright.plan.memory.rank_bytes import Memory, host_items, memory, movable_bytes
from meshwright.plan.predict import host_bytes, predict_run
from meshwright.plan.search.candidate import candidate_of, with_layout
from meshwright.plan.time.step_time import HOST_BOTH_WAYS, host_share, step_cost
from meshwright.plan.workload.layouts import (
    FULL,
    OFFLOAD_BITS,
    RECOMPUTE_SELECTIVE,
    Layouts,
    layouts,
    one_layout,
)
from meshwright.plan.workload.workload import Workload
from meshwright.spec import MemorySpec, ParallelSpec
from meshwright.spec.families import family
from meshwright.spec.parameters import num_parameters, parameters
from meshwright.spec.text import parse_run

H100 = parse_cluster("h100:8x1")
MODEL = family("llama-3.1-8b")
WORK = Workload(MODEL, 4096)
COMPILED = Workload(MODEL, 4096, compiled=True)
OPTIMIZER, PARAMETERS, ACTIVATIONS = (
    OFFLOAD_BITS[word] for word in ("optimizer", "parameters", "activations")
)


def _memory(at: Layouts, work: Workload = WORK) -> Memory:
    return memory(work, at, H100, our_runtime())


def _seconds(at: Layouts, item: str) -> float:
    return float(np.atleast_1d(step_cost(WORK, at, H100, our_runtime()).items[item])[0])


class TestBytes:
    def test_optimizer_states_leave_the_device(self) -> None:
        plain, moved = _memory(layouts()), _memory(layouts(offload=OPTIMIZER))
        assert moved.host["optimizer"][0, 0] == plain.items["optimizer"][0, 0] == 8 * num_parameters(MODEL)
        assert moved.items["optimizer"].max() == 0
        assert plain.peak_host_bytes[0] == 0

    def test_shards_of_them_where_zero_divides(self) -> None:
        whole, divided = (_memory(layouts(offload=OPTIMIZER, dp_shard=n, zero=n > 1)) for n in (1, 8))
        assert divided.peak_host_bytes[0] == pytest.approx(whole.peak_host_bytes[0] / 8)

    def test_buffers_of_the_update_count_beyond_activations(self) -> None:
        """Two buckets: the table of the vocabulary and a matrix of the MLP, with two moments each."""
        short = Workload(MODEL, 128)
        moved = _memory(layouts(offload=OPTIMIZER), short)
        here = moved.items["activations"] + moved.items["logits"] + moved.items["offload buffers"]
        table, matrix = MODEL.vocab_size * MODEL.width, MODEL.width * MODEL.mlp.width
        assert here[0, 0] == pytest.approx(8 * (table + matrix), rel=1e-3)
        assert _memory(layouts(offload=OPTIMIZER, microbatch_sequences=8)).items["offload buffers"].max() == 0

    def test_weights_of_blocks_leave_but_for_two(self) -> None:
        plain, moved = _memory(layouts(), COMPILED), _memory(layouts(offload=PARAMETERS), COMPILED)
        blocks = 4 * sum(one.num_elements for one in parameters(MODEL) if one.layer is not None)
        assert moved.host["parameters"][0, 0] == pytest.approx(blocks)
        fall = plain.items["weights"][0, 0] - moved.items["weights"][0, 0]
        assert fall == pytest.approx(blocks * (1 - 2 / MODEL.num_layers))
        assert moved.items["gradients"][0, 0] == plain.items["gradients"][0, 0]

    @pytest.mark.parametrize(("pp", "num_microbatches"), [(1, 4), (4, 8)])
    def test_activations_leave_but_for_two_layers(self, pp: int, num_microbatches: int) -> None:
        at = {"pp": pp, "num_microbatches": num_microbatches}
        plain, moved = _memory(layouts(**at), COMPILED), _memory(layouts(**at, offload=ACTIVATIONS), COMPILED)
        layer = movable_bytes(COMPILED, layouts(**at), our_runtime())[0, 0]
        layers = np.array([[MODEL.num_layers / pp] * 3])
        assert moved.host["activations"].max() == pytest.approx(
            (in_flight(layouts(**at)) * layers * layer).max(), rel=0.05
        )
        # Beside two layers there are the rope tables and the input of the last norm, on every rank.
        assert moved.items["activations"] == pytest.approx(2 * layer, rel=0.1)
        if pp == 1:  # In a pipeline another phase is the fullest when activations are on the host.
            left = plain.items["activations"] - moved.host["activations"]
            assert moved.items["activations"] == pytest.approx(left + 2 * layer)

    def test_the_peak_without_activations_is_a_peak_of_its_own(self) -> None:
        """What is left at a phase with few activations may exceed what is left where they were most."""
        at = {"pp": 4, "num_microbatches": 8}
        plain, moved = _memory(layouts(**at), COMPILED), _memory(layouts(**at, offload=ACTIVATIONS), COMPILED)
        least = plain.allocated_bytes - plain.items["activations"]
        assert (moved.allocated_bytes >= least).all()

    @pytest.mark.parametrize("recompute", [RECOMPUTE_SELECTIVE, FULL])
    def test_what_a_recomputed_layer_keeps_moves(self, recompute: int) -> None:
        kept = movable_bytes(COMPILED, layouts(recompute=recompute), our_runtime())[0, 0]
        moved = _memory(layouts(offload=ACTIVATIONS, recompute=recompute), COMPILED)
        assert moved.host["activations"][0, 0] == pytest.approx(MODEL.num_layers * kept)
        assert kept < movable_bytes(COMPILED, layouts(), our_runtime())[0, 0]

    def test_of_a_recomputed_block_its_input_moves_as_the_stream_is(self) -> None:
        moved = _memory(layouts(offload=ACTIVATIONS, recompute=FULL))
        assert moved.host["activations"][0, 0] == 2 * 4096 * MODEL.width * MODEL.num_layers

    def test_regather_keeps_a_part_of_two_inputs(self) -> None:
        kept, dropped = (
            our_runtime().layer_activation_bytes(WORK, layouts(tp=8, regather=value), moe=False)[0]
            for value in (0, 1)
        )
        assert kept - dropped == 2 * 2 * 4096 * MODEL.width * (1 - 1 / 8)

    def test_in_a_pipeline_too(self) -> None:
        at = {"dp_shard": 8, "zero": 2, "pp": 4, "num_microbatches": 8}
        each, last = _memory(layouts(**at)), _memory(layouts(**at, reduce_last=1))
        # Shards of the sums, and of one micro-batch that waits for the next to come back.
        assert last.items["gradients"][0, 0] == pytest.approx(8 / 2 * each.items["gradients"][0, 0])

    def test_zero_three_in_a_pipeline_keeps_them_beside_gathered_weights(self) -> None:
        at = {"dp_shard": 8, "zero": 3, "pp": 4, "num_microbatches": 8}
        each, last = (_memory(layouts(**at, reduce_last=value), COMPILED) for value in (0, 1))
        whole = 4 * num_parameters(MODEL) / 4
        saved = (last.allocated_bytes - each.allocated_bytes).max()
        # All but those of the block at work; ends of the model are on other ranks.
        assert 0.75 * whole < saved < 1.1 * whole

    @pytest.mark.parametrize("zero", [2, 3])
    def test_reducing_last_keeps_full_gradients(self, zero: int) -> None:
        at = {"dp_shard": 8, "zero": zero, "num_microbatches": 4}
        each, last = _memory(layouts(**at)), _memory(layouts(**at, reduce_last=1))
        assert last.items["gradients"][0, 0] == 8 * each.items["gradients"][0, 0] == 4 * num_parameters(MODEL)


class TestSeconds:
    def test_a_fetched_state_travels_once_each_way(self) -> None:
        """Both directions at once, beside the update: what shows is one way less the update."""
        at = layouts(offload=OPTIMIZER)
        # Eight devices of a node have four links to the host.
        assert host_share(H100) == 0.5
        one_way = 8 * num_parameters(MODEL) / (0.5 * HOST_BOTH_WAYS * H100.host.bytes_per_second)
        assert _seconds(at, "offload") == pytest.approx(one_way - _seconds(at, "optimizer"))
        assert _seconds(at, "optimizer") == _seconds(layouts(), "optimizer")

    def test_activations_pay_per_microbatch_and_hide_behind_wide_layers(self) -> None:
        once, twice = (
            _seconds(layouts(offload=ACTIVATIONS, num_microbatches=count), "offload") for count in (1, 2)
        )
        # The second one also hides behind the sum of gradients.
        assert 1.9 * once < twice < 2 * once and once > 0
        inputs = layouts(offload=ACTIVATIONS, recompute=FULL)
        assert _seconds(inputs, "offload") == 0

    def test_regather_sends_half_of_the_forward_again(self) -> None:
        plain, again = (_seconds(layouts(tp=8, regather=value), "tp") for value in (0, 1))
        # 8 crossings a layer (4 each way) and 2 more; head and embedding besides.
        assert again / plain == pytest.approx(10 / 8, rel=0.02)

    @pytest.mark.parametrize("pp", [1, 4])
    @pytest.mark.parametrize("zero", [2, 3])
    def test_reducing_last_sends_less(self, zero: int, pp: int) -> None:
        at = {"dp_shard": 8 // pp, "pp": pp, "zero": zero, "num_microbatches": 16}
        slow = parse_cluster("a100-40gb:1x8")
        each, last = (
            step_cost(WORK, layouts(**at, reduce_last=value), slow, our_runtime()).step_seconds[0]
            for value in (0, 1)
        )
        assert last < each


RUN = """
model: {family: llama-3.2-1b}
schedule: {num_steps: 10}
data: {synthetic: {}, sequence_length: 1024, batch_sequences: 8}
"""


def _run(*words: str):
    return parse_run(RUN, list(words)).run


def test_a_run_says_its_host_memory_on_any_cluster() -> None:
    run = _run("memory.offload=optimizer,activations")
    found = predict_run(run, parse_cluster("h100:1"))
    assert host_bytes(run) == pytest.approx(sum(found.peak_stage.host_items.values()))
    assert found.peak_stage.host_items["optimizer"] == 8 * num_parameters(run.model)
    assert host_bytes(_run()) == 0


def test_too_much_for_the_host_does_not_fit() -> None:
    work = Workload(family("llama-3.1-70b"), 1024)
    at = layouts(offload=OPTIMIZER)
    found = memory(work, at, H100, our_runtime())
    assert found.peak_host_bytes[0] > H100.host_memory_bytes / H100.devices_per_node
    small = layouts(tp=8, dp_shard=8, zero=3, offload=OPTIMIZER, microbatch_sequences=1)
    assert memory(work, small, H100, our_runtime()).fits(H100)[0]
    assert not found.fits(H100)[0]


def test_the_search_keeps_what_the_run_says() -> None:
    run = _run("memory.offload=activations,optimizer")
    at = one_layout(run.parallel, run.memory, microbatch_sequences=1, num_microbatches=8)
    assert with_layout(run, at).memory.offload == ("optimizer", "activations")
    tp = _run("parallel.tp=2", "memory.regather_tp_inputs=true")
    assert candidate_of(tp, parse_cluster("h100:2")).layout.regather[0] == 1
    last = ParallelSpec(dp_shard=2, zero=3, grad_reduce="last_microbatch")
    assert one_layout(last, MemorySpec(), microbatch_sequences=1, num_microbatches=2).parallel(0) == last


def test_the_rank_that_is_priced_holds_what_the_formula_says() -> None:
    """Only blocks move, and the last stage has fewer: it gave some up for the head."""
    found = host_items(WORK, layouts(pp=4, num_microbatches=8, offload=PARAMETERS), our_runtime())
    layer = 4 * sum(one.num_elements for one in parameters(MODEL) if one.layer == 0)
    assert found["parameters"][0] / layer == pytest.approx([8, 9, 6])
