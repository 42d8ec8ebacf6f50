"""Rules about how the axes shard the model and the batch, and which axes can be combined."""

from collections.abc import Iterator
from functools import cache

from meshwright.errors import SpecError
from meshwright.spec.run import RunSpec

Violations = Iterator[SpecError]
# Schedules with separate input and weight backward, which torch runs as two passes over one graph.
SPLIT_BACKWARD = ("interleaved_zero_bubble", "zbv", "dualpipev")
V_SHAPED = ("zbv", "dualpipev")
LOOPED = ("interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble")
_LARGEST_SHOWN = 64


@cache
def divisors(*numbers: int) -> str:
    """`1, 2 or 4`: the common divisors of the numbers, up to 64."""
    common = [d for d in range(1, _LARGEST_SHOWN + 1) if all(number % d == 0 for number in numbers)]
    return ", ".join(map(str, common[:-1])) + (f" or {common[-1]}" if len(common) > 1 else "1")


def tp_divides_heads(run: RunSpec) -> Violations:
    """Tensor parallel shards attention by heads: tp divides the query heads and the key/value heads."""
    attention, tp = run.model.attention, run.parallel.tp
    valid = divisors(attention.num_heads, attention.num_kv_heads)
    if attention.num_heads % tp:
        fact = f"tp={tp} does not divide num_heads={attention.num_heads}"
        yield SpecError(fact, where="parallel.tp", hint=f"use tp={valid}")
    elif attention.num_kv_heads % tp:
        fact = f"tp={tp} does not divide num_kv_heads={attention.num_kv_heads}"
        yield SpecError(
            fact, where="parallel.tp", hint=f"use tp={valid}: a key/value head is never split or copied"
        )


def tp_divides_mlp(run: RunSpec) -> Violations:
    """tp divides the inner width of the dense MLP and of the shared experts."""
    model, tp = run.model, run.parallel.tp
    if not model.is_moe_layer(0) and model.mlp.width % tp:
        fact = f"tp={tp} does not divide mlp.width={model.mlp.width}"
        yield SpecError(fact, where="parallel.tp", hint=f"use tp={divisors(model.mlp.width)}")
    if model.moe is not None and model.moe.shared_width % tp:
        fact = f"tp={tp} does not divide moe.shared_width={model.moe.shared_width}"
        yield SpecError(fact, where="parallel.tp", hint=f"use tp={divisors(model.moe.shared_width)}")


def tp_divides_vocabulary(run: RunSpec) -> Violations:
    """tp divides the vocabulary of embedding and head."""
    vocabulary, tp = run.model.vocab_size, run.parallel.tp
    if vocabulary % tp:
        fact = f"tp={tp} does not divide vocab_size={vocabulary}"
        hint = f"pad it: model.vocab_size={-(-vocabulary // tp) * tp}"
        if run.checkpoint.start_from is not None:
            hint = f"use tp={divisors(vocabulary)}: the vocabulary is that of checkpoint.start_from"
        yield SpecError(fact, where="parallel.tp", hint=hint)


def sequence_is_sharded_evenly(run: RunSpec) -> Violations:
    """tp divides the sequence; with cp, whose ranks have two chunks of each stripe, 2 x cp x stripes x tp."""
    parallel, length = run.parallel, run.data.sequence_length
    zigzag = parallel.cp > 1
    num_chunks = parallel.tp * (2 * parallel.cp * parallel.cp_stripes if zigzag else 1)
    if length % num_chunks:
        stripes = " x cp_stripes" if parallel.cp_stripes > 1 else ""
        formula = f"2 x cp{stripes} x tp" if zigzag else "tp"
        fact = f"sequence_length={length} is not a multiple of {formula} = {num_chunks}"
        multiple = max(num_chunks, length // num_chunks * num_chunks)
        yield SpecError(fact, where="data.sequence_length", hint=f"use data.sequence_length={multiple}")


def cp_divides_heads(run: RunSpec) -> Violations:
    """ulysses, and hierarchical inside, shard attention by heads: their degree divides a tp rank's heads."""
    parallel, attention = run.parallel, run.model.attention
    degree = {"ulysses": parallel.cp, "hierarchical": parallel.cp_inner}.get(parallel.cp_kind, 1)
    if attention.num_heads % parallel.tp or attention.num_kv_heads % parallel.tp:
        return  # reported by tp_divides_heads
    heads, kv_heads = attention.num_heads // parallel.tp, attention.num_kv_heads // parallel.tp
    if heads % degree or kv_heads % degree:
        name = "cp" if parallel.cp_kind == "ulysses" else "cp_inner"
        fact = f"{name}={degree} does not divide the {heads} heads and {kv_heads} kv heads of a tp rank"
        hint = f"use {name}={divisors(heads, kv_heads)}, or parallel.cp_kind=gather"
        yield SpecError(fact, where=f"parallel.{name}", hint=hint)


def hierarchical_has_two_levels(run: RunSpec) -> Violations:
    """hierarchical splits cp into cp_inner ranks and a ring across them, both larger than one."""
    parallel = run.parallel
    if parallel.cp_kind != "hierarchical" or parallel.cp == 1:
        return
    if not 1 < parallel.cp_inner < parallel.cp or parallel.cp % parallel.cp_inner:
        valid = [inner for inner in range(2, min(parallel.cp, 65)) if parallel.cp % inner == 0]
        hint = f"use cp_inner={' or '.join(map(str, valid))}" if valid else "use cp_kind=ring or ulysses"
        fact = f"cp_inner={parallel.cp_inner} does not split cp={parallel.cp} into two levels"
        yield SpecError(fact, where="parallel.cp_inner", hint=hint)


def attention_dropout_needs_ulysses(run: RunSpec) -> Violations:
    """With cp only ulysses supports attention dropout."""
    parallel, dropout = run.parallel, run.model.attention.dropout
    if dropout and parallel.cp > 1 and parallel.cp_kind != "ulysses":
        fact = f"attention.dropout={dropout:g} with cp_kind={parallel.cp_kind}, which does not support it"
        hint = "set model.attention.dropout=0, or use parallel.cp_kind=ulysses"
        yield SpecError(fact, where="model.attention.dropout", hint=hint)


def zero_needs_sharding_ranks(run: RunSpec) -> Violations:
    """`zero` shards state over dp_shard x cp, so it needs more than one such rank; dp_shard needs `zero`."""
    parallel = run.parallel
    if parallel.zero and parallel.dp_shard * parallel.cp == 1:
        fact = f"zero={parallel.zero} with dp_shard=1 and cp=1 has no ranks to shard over"
        yield SpecError(
            fact,
            where="parallel.zero",
            hint="set parallel.dp_shard to the sharding ranks, or zero=0",
        )
    if parallel.dp_shard > 1 and not parallel.zero:
        fact = f"dp_shard={parallel.dp_shard} with zero=0 shards nothing"
        hint = f"set parallel.zero=1, 2 or 3, or use parallel.dp_replicate={parallel.dp_shard}"
        yield SpecError(fact, where="parallel.dp_shard", hint=hint)


def ep_divides_experts(run: RunSpec) -> Violations:
    """ep distributes experts over ranks of dp_shard x cp: it divides both the experts and those ranks."""
    parallel, moe = run.parallel, run.model.moe
    if parallel.ep == 1:
        return
    if moe is None:
        fact = f"ep={parallel.ep}, but the model has no experts"
        yield SpecError(fact, where="parallel.ep", hint="set parallel.ep=1, or choose a model with model.moe")
        return
    ranks = parallel.dp_shard * parallel.cp
    valid = divisors(moe.num_experts, ranks)
    if moe.num_experts % parallel.ep:
        fact = f"ep={parallel.ep} does not divide num_experts={moe.num_experts}"
        yield SpecError(fact, where="parallel.ep", hint=f"use ep={valid}")
    if ranks % parallel.ep:
        fact = f"ep={parallel.ep} does not divide dp_shard x cp = {ranks}, whose ranks it uses"
        yield SpecError(fact, where="parallel.ep", hint=f"use ep={valid}, or raise parallel.dp_shard")


def etp_is_all_or_nothing(run: RunSpec) -> Violations:
    """An expert is unsharded on each tp rank (etp=1) or sharded like the dense MLP (etp=tp)."""
    parallel, moe = run.parallel, run.model.moe
    if parallel.etp not in (1, parallel.tp):
        fact = f"etp={parallel.etp} is neither 1 nor tp={parallel.tp}"
        yield SpecError(fact, where="parallel.etp", hint=f"use etp=1 or etp={parallel.tp}")
    elif moe is not None and moe.width % parallel.etp:
        fact = f"etp={parallel.etp} does not divide moe.width={moe.width}"
        yield SpecError(fact, where="parallel.etp", hint="use etp=1")


def overlapped_experts_are_shared(run: RunSpec) -> Violations:
    """ep_overlap=shared runs shared experts while rows are in flight, so the model has some."""
    parallel, moe = run.parallel, run.model.moe
    if parallel.ep_overlap == "shared" and moe is not None and not moe.shared_width:
        fact = "ep_overlap=shared, but the model has no shared experts: moe.shared_width=0"
        hint = "use ep_overlap=halves or none"
        yield SpecError(fact, where="parallel.ep_overlap", hint=hint)


def stages_have_layers(run: RunSpec) -> Violations:
    """Every pipeline stage has at least one layer."""
    parallel, layers = run.parallel, run.model.num_layers
    if parallel.num_stages > layers:
        fact = f"pp x virtual_stages = {parallel.num_stages} stages for num_layers={layers}"
        hint = f"use at most {layers} stages"
        yield SpecError(fact, where="parallel.pp", hint=hint)


def schedule_fits_virtual_stages(run: RunSpec) -> Violations:
    """zbv and dualpipev have two stages per rank, gpipe and 1f1b one, interleaved schedules any number."""
    parallel = run.parallel
    chunks, kind = parallel.virtual_stages, parallel.schedule
    if parallel.pp == 1 or kind in LOOPED:
        return
    wanted = 2 if kind in V_SHAPED else 1
    if chunks != wanted:
        fact = f"schedule={kind} with virtual_stages={chunks}"
        other = "" if kind in V_SHAPED else f", or schedule={LOOPED[0]}"
        yield SpecError(fact, where="parallel.virtual_stages", hint=f"use virtual_stages={wanted}{other}")


def microbatches_fill_schedule(run: RunSpec) -> Violations:
    """1f1b and dualpipev need as many micro-batches as stages; interleaved schedules need equal rounds."""
    parallel = run.parallel
    for where, _, count in run.each_accumulation():
        if parallel.pp > 1 and count > 0:
            yield from _fills_schedule(run, where, count)


def _fills_schedule(run: RunSpec, where: str, count: int) -> Violations:
    parallel, kind = run.parallel, run.parallel.schedule
    unit = run.data.microbatch_sequences * parallel.dp
    if kind in ("1f1b", "dualpipev") and count < parallel.num_stages:
        fact = (
            f"schedule={kind} with {parallel.num_stages} stages needs as many micro-batches, and has {count}"
        )
        hint = f"use {where}={parallel.num_stages * unit} or more, or smaller micro-batches"
        yield SpecError(fact, where=where, hint=hint)
    rounds = max(1, count // parallel.pp)
    if kind in ("interleaved_1f1b", "interleaved_zero_bubble") and count % rounds:
        fact = f"{kind} cannot run {count} micro-batches in {rounds} equal rounds (pp={parallel.pp})"
        below, above = rounds * parallel.pp * unit, (rounds + 1) * parallel.pp * unit
        yield SpecError(fact, where=where, hint=f"use {where}={below} or {above}")


def split_backward_runs_once(run: RunSpec) -> Violations:
    """Split-backward schedules run a block's graph twice, which neither recompute nor compile supports."""
    kind = run.parallel.schedule
    if run.parallel.pp == 1 or kind not in SPLIT_BACKWARD:
        return
    advice = "or use parallel.schedule=interleaved_1f1b or 1f1b"
    if run.memory.recompute != "none":
        fact = f"schedule={kind} with recompute={run.memory.recompute} would recompute a block per weight"
        yield SpecError(fact, where="memory.recompute", hint=f"set memory.recompute=none, {advice}")
    if run.compile:
        fact = f"schedule={kind} splits the backward, which compiled blocks do not support"
        yield SpecError(fact, where="compile", hint=f"set compile=false, {advice}")


def split_backward_reduces_last(run: RunSpec) -> Violations:
    """Split-backward schedules run no autograd hooks for weights, so gradients are reduced last."""
    parallel = run.parallel
    is_each = parallel.zero >= 2 and parallel.grad_reduce == "each_microbatch" and run.accumulation > 1
    if parallel.pp > 1 and parallel.schedule in SPLIT_BACKWARD and is_each:
        fact = f"schedule={parallel.schedule} splits the backward and cannot reduce gradients during it"
        hint = "set parallel.grad_reduce=last_microbatch, or use parallel.schedule=interleaved_1f1b or 1f1b"
        yield SpecError(fact, where="parallel.grad_reduce", hint=hint)


def batch_is_split_evenly(run: RunSpec) -> Violations:
    """The global batch is a multiple of one micro-batch on every data-parallel rank."""
    data, parallel = run.data, run.parallel
    unit = data.microbatch_sequences * parallel.dp
    for where, sequences, _ in run.each_accumulation():
        if sequences % unit:
            below = sequences // unit * unit
            choices = f"{below} or {below + unit}" if below else f"{unit}"
            fact = (
                f"batch_sequences={sequences} is not a multiple of "
                f"microbatch_sequences x dp = {data.microbatch_sequences} x {parallel.dp} = {unit}"
            )
            yield SpecError(fact, where=where, hint=f"use {where}={choices}")


PARALLEL_RULES = [
    tp_divides_heads,
    tp_divides_mlp,
    tp_divides_vocabulary,
    sequence_is_sharded_evenly,
    cp_divides_heads,
    hierarchical_has_two_levels,
    attention_dropout_needs_ulysses,
    zero_needs_sharding_ranks,
    ep_divides_experts,
    etp_is_all_or_nothing,
    overlapped_experts_are_shared,
    stages_have_layers,
    schedule_fits_virtual_stages,
    microbatches_fill_schedule,
    split_backward_runs_once,
    split_backward_reduces_last,
    batch_is_split_evenly,
]
