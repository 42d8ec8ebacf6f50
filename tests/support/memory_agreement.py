"""The planner's memory against the trace on layouts drawn at random: errors by kind.

    python -m tests.support.memory_agreement --seed 7 --count 60 [--adapters] [--cache FOLDER]

Prints one line for each kind of run: how many were drawn, the mean error, the worst above and below.
"""

import argparse
import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from meshwright.errors import MeshwrightError
from meshwright.hardware import parse_cluster
from meshwright.plan.memory.rank_bytes import memory
from meshwright.plan.workload.formats import runtime_of, workload_of
from meshwright.plan.workload.layouts import Layouts, one_layout
from meshwright.rehearse.categories import step_peak
from meshwright.rehearse.trace import trace_rank
from meshwright.spec import (
    AdapterSpec,
    AttentionSpec,
    DataSpec,
    Fp8Spec,
    MemorySpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    OptimSpec,
    ParallelSpec,
    PrecisionSpec,
    RopeSpec,
    RunSpec,
    ScheduleSpec,
    SyntheticSpec,
)
from meshwright.spec.check import check
from meshwright.spec.model import LatentSpec
from meshwright.spec.rules_parallel import SPLIT_BACKWARD
from meshwright.spec.stages import stage_layers

PRECISIONS = (
    PrecisionSpec(compute="bf16"),
    PrecisionSpec(compute="bf16"),
    PrecisionSpec(compute="bf16", weights="bf16_exact"),
    PrecisionSpec(compute="bf16", weights="bf16_exact", gradients="bf16"),
)
SCHEDULES = (
    *("1f1b", "1f1b", "gpipe", "interleaved_1f1b", "looped_bfs"),
    *("interleaved_zero_bubble", "zbv", "dualpipev"),
)
RECIPES = ("current", "current", "blockwise", "mxfp8")


def draw_run(draw: random.Random, *, compiled: bool | None = None) -> RunSpec:
    """Any run; the rules may not accept it."""
    is_compiled = draw.random() < 0.4 if compiled is None else compiled
    pp = draw.choice((1, 1, 1, 2, 2, 4))
    cp = draw.choice((1, 1, 1, 2, 4))
    dp = draw.choice((1, 2, 8))
    schedule = draw.choice(SCHEDULES) if pp > 1 else "1f1b"
    is_routed = draw.random() < 0.3
    zero = draw.choice((0, 1, 2, 3)) if dp * cp > 1 else 0
    is_split = schedule in SPLIT_BACKWARD and not is_compiled
    cp_kinds = ("gather", "ring", "ulysses", *(("hierarchical",) if cp == 4 else ()))
    cp_kind = draw.choice(cp_kinds) if cp > 1 else "gather"
    parallel = ParallelSpec(
        dp_shard=dp,
        zero=zero,
        grad_reduce="last_microbatch" if is_split and zero >= 2 else "each_microbatch",
        cp=cp,
        cp_kind=cp_kind,
        cp_inner=2 if cp_kind == "hierarchical" else 1,
        tp=draw.choice((1, 1, 2, 4)),
        pp=pp,
        ep=draw.choice((1, 2)) if is_routed else 1,
        schedule=schedule,
        virtual_stages=1 if schedule in ("1f1b", "gpipe") else 2,
    )
    per_stage = draw.choice((2, 3) if parallel.num_stages < 4 else (1, 2))
    microbatches = draw.choice((1, 2, 3)) if pp == 1 else pp * draw.choice((1, 2, 3))
    sequences = draw.choice((1, 1, 2))
    precision = draw.choice(PRECISIONS)
    if draw.random() < 0.15:
        precision = PrecisionSpec(
            compute="bf16", fp8=Fp8Spec(recipe=draw.choice(RECIPES), bf16_layers_each_end=0)
        )
    recompute = draw.choice(("none", "selective", "full"))
    return RunSpec(
        device="cpu",
        model=_draw_model(draw, parallel.num_stages * per_stage, is_routed=is_routed),
        parallel=parallel,
        precision=precision,
        memory=MemorySpec(recompute="none" if is_split else recompute),
        optim=OptimSpec(kind="adamw"),
        schedule=ScheduleSpec(num_steps=4),
        compile=is_compiled,
        data=DataSpec(
            synthetic=SyntheticSpec(),
            sequence_length=draw.choice((2048, 4096)),
            batch_sequences=sequences * microbatches * dp,
            microbatch_sequences=sequences,
            documents=draw.choice(("joined", "joined", "separate")),
        ),
    )


def _draw_model(draw: random.Random, num_layers: int, *, is_routed: bool) -> ModelSpec:
    width = draw.choice((512, 1024, 2048))
    heads = width // 64
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=heads // draw.choice((1, 2)),
        head_width=64,
        qk_norm=draw.choice((False, False, True)),
        window=draw.choice((None, None, None, 512)),
    )
    if draw.random() < 0.12:
        latent = LatentSpec(
            query_rank=width // 2, kv_rank=width // 4, nope_width=64, rope_width=32, value_width=64
        )
        attention = AttentionSpec(num_heads=heads, num_kv_heads=heads, head_width=96, latent=latent)
    moe = MoeSpec(
        num_experts=8,
        top_k=2,
        width=draw.choice((256, 512, 1024)),
        shared_width=draw.choice((0, 512)),
    )
    return ModelSpec(
        vocab_size=draw.choice((4096, 16384, 32768)),
        num_layers=num_layers,
        width=width,
        max_positions=8192,
        attention=attention,
        mlp=MlpSpec(width=draw.choice((3, 4)) * width, kind=draw.choice(("swiglu", "swiglu", "gelu"))),
        moe=moe if is_routed else None,
        rope=RopeSpec(),
        tied_head=draw.choice((False, False, True)),
    )


def with_adapters(run: RunSpec, draw: random.Random) -> RunSpec:
    """The run with adapters of any kind on a frozen base of any format."""
    precision = run.precision if run.precision.fp8 else PrecisionSpec(compute="bf16")
    adapter = AdapterSpec(
        rank=draw.choice((8, 16, 64)),
        alpha=16,
        kind=draw.choice(("lora", "lora", "rslora", "dora")),
        base=draw.choice(("bf16", "bf16", "nf4", "fp8", "nf4_nested")),
        dropout=draw.choice((0.0, 0.0, 0.1)),
    )
    return run.with_(adapter=adapter, precision=precision)


def drawn(
    seed: int, count: int, *, compiled: bool | None = None, adapters: bool = False
) -> Iterator[tuple[RunSpec, bool]]:
    """Runs that the rules accept, and which end of the pipeline is looked at (True: the last)."""
    draw, found = random.Random(seed), 0
    while found < count:
        run = draw_run(draw, compiled=compiled)
        at_last = draw.random() < 0.5
        run = with_adapters(run, draw) if adapters else run
        if not check(run) and is_sharded_evenly(run):
            found += 1
            yield run, at_last


def is_sharded_evenly(run: RunSpec) -> bool:
    """Whether stages hold as many layers, but for the last one."""
    return len({len(held) for held in stage_layers(run.model, run.parallel.num_stages)[:-1]}) <= 1


def kind_of(run: RunSpec) -> str:
    """The kind that an error counts for."""
    model = run.model
    words = ["compiled" if run.compile else "eager"]
    words.append("latent" if model.attention.latent else "routed" if model.moe else "dense")
    if run.precision.fp8:
        words.append("fp8")
    if run.adapter is not None:
        words.append(run.adapter.kind)
    if run.parallel.pp > 1:
        is_split = run.parallel.schedule in SPLIT_BACKWARD
        words.append(
            "split" if is_split else "interleaved" if run.parallel.virtual_stages > 1 else "pipeline"
        )
    return " ".join(words)


def layout_of(run: RunSpec) -> Layouts:
    """The single layout of a run."""
    return one_layout(
        run.parallel,
        run.memory,
        microbatch_sequences=run.data.microbatch_sequences,
        num_microbatches=run.accumulation,
    )


class Compared(NamedTuple):
    """One rank, both ways."""

    run: RunSpec
    predicted: dict[str, float]
    traced: dict[str, float]
    phase: str

    @property
    def error(self) -> float:
        """Predicted over traced, minus 1."""
        return sum(self.predicted.values()) / sum(self.traced.values()) - 1.0


def traced_peak(run: RunSpec, rank: int, cache: Path | None = None) -> tuple[dict[str, float], str] | None:
    """Items at the peak of a rank, and its phase; None where the compiler cannot follow the run here."""
    path = None
    if cache is not None:
        name = hashlib.sha256(f"{run.model_dump_json()} {rank}".encode()).hexdigest()[:24]
        path = cache / f"{name}.json"
        if path.exists():
            return json.loads(path.read_text())
    try:
        trace = trace_rank(run, rank, num_steps=1)
    except MeshwrightError:
        found = None
    else:
        peak = step_peak(trace)
        items = {name: float(value) for name, value in peak.items.items()}
        found = None if run.compile and not trace.num_graphs else (items, str(peak.phase))
    if path is not None:
        path.write_text(json.dumps(found))
    return found


def compare(run: RunSpec, *, at_last: bool, cache: Path | None = None) -> Compared | None:
    """The prediction and the trace of the first or the last pipeline rank."""
    # The last of cp calls the attention kernel most often; the first of dp_shard has no fewer experts.
    parallel = run.parallel
    first = parallel.num_ranks // parallel.pp * (parallel.pp - 1) if at_last else 0
    found = traced_peak(run, first + parallel.cp * parallel.tp - 1, cache)
    if found is None:
        return None
    predicted = memory(workload_of(run), layout_of(run), parse_cluster("h200:1"), runtime_of(run)).items
    column = 2 if at_last else 0
    items = {name: float(values[0, column]) for name, values in predicted.items() if name != "workspace"}
    return Compared(run, items, *found)


def table(results: list[Compared]) -> str:
    """Errors by kind."""
    by_kind: dict[str, list[float]] = {}
    for one in results:
        by_kind.setdefault(kind_of(one.run), []).append(one.error)
    by_kind["all"] = [one.error for one in results]
    lines = [f"{'kind':32} {'n':>4} {'mean':>7} {'worst over':>11} {'worst under':>12}"]
    for kind, errors in sorted(by_kind.items()):
        mean = sum(map(abs, errors)) / len(errors)
        over, under = max(0.0, *errors, 0.0), min(0.0, *errors, 0.0)
        lines.append(f"{kind:32} {len(errors):4} {mean:7.2%} {over:11.2%} {under:12.2%}")
    return "\n".join(lines)


def main() -> None:
    """Draw, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--compiled", choices=("yes", "no"))
    parser.add_argument("--adapters", action="store_true")
    parser.add_argument("--worst", type=int, default=0, help="print so many of the worst layouts")
    args = parser.parse_args()
    compiled = None if args.compiled is None else args.compiled == "yes"
    runs = drawn(args.seed, args.count, compiled=compiled, adapters=args.adapters)
    found = [compare(run, at_last=at_last, cache=args.cache) for run, at_last in runs]
    results = [one for one in found if one is not None]
    print(table(results))
    for one in sorted(results, key=lambda one: -abs(one.error))[: args.worst]:
        print(f"\n{one.error:+.2%} {kind_of(one.run)}; peak in the {one.phase}")
        parts = (one.run.parallel, one.run.memory, one.run.precision, one.run.model, one.run.data)
        print([part.model_dump(exclude_defaults=True) for part in parts])
        names = dict.fromkeys([*one.predicted, *one.traced])
        print(
            {
                n: (round(one.predicted.get(n, 0) / 2**20, 1), round(one.traced.get(n, 0) / 2**20, 1))
                for n in names
            }
        )


if __name__ == "__main__":
    main()
