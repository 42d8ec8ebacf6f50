"""The layouts that are proved equal to one device: generated, so that none is forgotten."""

import random
from collections.abc import Iterator
from itertools import combinations, product
from typing import NamedTuple

from tests.support.runs import MODELS, few_microbatches, tiny_run

from meshwright.spec import ParallelSpec, RunSpec
from meshwright.spec.check import check
from meshwright.spec.rules_parallel import SPLIT_BACKWARD

DENSE = ("gqa", "tied", "gpt", "mla", "window")
ROUTED = ("moe", "moe_shared", "moe_capacity")
CP_KINDS = ("gather", "ring", "ulysses")
# schedule -> chunks of the model on each pipeline rank
SCHEDULES = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved_1f1b": 2,
    "looped_bfs": 2,
    "interleaved_zero_bubble": 2,
    "zbv": 2,
    "dualpipev": 2,
}
# Every axis at degree 2, in each of its variants.
AXES: dict[str, list[dict[str, object]]] = {
    "dp": [{"dp_replicate": 2}],
    "zero": [{"dp_shard": 2, "zero": stage} for stage in (1, 2, 3)],
    "cp": [{"cp": 2, "cp_kind": kind} for kind in CP_KINDS],
    "tp": [{"tp": 2}],
    "pp": [{"pp": 2, "schedule": kind, "virtual_stages": n} for kind, n in SCHEDULES.items()],
    "ep": [{"ep": 2}],
}


class Layout(NamedTuple):
    """One kind of model and how it is sharded."""

    parallel: ParallelSpec
    model: str
    microbatch_sequences: int | None = None
    """None: as many as leave enough micro-batches."""

    @property
    def name(self) -> str:
        """Every setting that differs from one device, and the model: `dp_replicate2-tp2-gqa`."""
        default = ParallelSpec().model_dump()
        settings = {key: value for key, value in self.parallel.model_dump().items() if value != default[key]}
        return (
            "-".join(
                [f"{key}{value}" if isinstance(value, int) else str(value) for key, value in settings.items()]
            )
            + f"-{self.model}"
        )

    def run(self) -> RunSpec:
        """The run of this layout. It has one layer more than stages, so that stages are uneven."""
        model = MODELS[self.model]
        stages = self.parallel.num_stages
        rows = -(-model.vocab_size // self.parallel.tp) * self.parallel.tp
        model = model.with_(num_layers=max(model.num_layers, stages + (stages > 1)), vocab_size=rows)
        sequences = self.microbatch_sequences or few_microbatches(self.parallel)
        return tiny_run(model, parallel=self.parallel, microbatch_sequences=sequences)


def _merged(parts: tuple[dict[str, object], ...]) -> ParallelSpec:
    settings: dict[str, object] = {}
    for part in parts:
        settings |= part
    if settings.get("ep") and "dp_shard" not in settings and "cp" not in settings:
        settings |= {"dp_shard": 2, "zero": 1}  # ep borrows its ranks
    if settings.get("schedule") in SPLIT_BACKWARD and settings.get("zero", 0) in (2, 3):
        settings |= {"grad_reduce": "last_microbatch"}
    return ParallelSpec.model_validate(settings)


def _model_for(parallel: ParallelSpec, index: int) -> str:
    kinds = ROUTED if parallel.ep > 1 else (*DENSE, *ROUTED)
    return kinds[index % len(kinds)]


def _combined(count: int) -> Iterator[tuple[str, ...]]:
    yield from combinations(AXES, count)


def all_singles() -> list[Layout]:
    """Each axis alone with every kind of model, and every schedule."""
    found = []
    for axis in AXES:
        parallel = _merged((AXES[axis][0],)) if axis != "pp" else ParallelSpec(pp=2)
        kinds = ROUTED if axis == "ep" else (*DENSE, *ROUTED)
        found += [Layout(parallel, kind) for kind in kinds]
    found += [Layout(_merged((one,)), kind) for one in AXES["cp"] for kind in ("tied", "moe")]
    found += [Layout(_merged((one,)), kind) for one in AXES["pp"] for kind in ("tied", "moe_shared")]
    found += [
        Layout(ParallelSpec(tp=4), "gpt"),
        Layout(ParallelSpec(tp=4), "mla"),
        Layout(ParallelSpec(tp=2, etp=2), "moe"),
        Layout(ParallelSpec(cp=2, cp_stripes=2), "gqa"),
        Layout(ParallelSpec(cp=2, cp_stripes=2), "moe_capacity"),
        Layout(ParallelSpec(cp=4, cp_kind="ring"), "gqa"),
        Layout(ParallelSpec(cp=4, cp_kind="hierarchical", cp_inner=2), "gqa"),
        Layout(ParallelSpec(pp=4), "tied"),
        Layout(ParallelSpec(pp=4, schedule="gpipe"), "moe"),
        Layout(ParallelSpec(dp_shard=4, zero=2, ep=4), "moe"),
        Layout(ParallelSpec(dp_shard=4, zero=1, ep=2), "moe_shared"),
        Layout(ParallelSpec(dp_shard=4, zero=2, ep=2), "moe_capacity"),
        Layout(ParallelSpec(dp_shard=4, zero=3, ep=2), "moe"),
        Layout(ParallelSpec(cp=2, ep=2), "moe_shared"),
        Layout(ParallelSpec(cp=4, cp_kind="ring", ep=2), "moe"),
    ]
    return _unique(found)


def quick_singles() -> list[Layout]:
    """The single axes for `make test`.

    dp alone holds full models, and a pipeline of two stages only distributes layers: of the kinds of models,
    those stand for all whose stages differ (tied, with a shared weight at both ends, and a dense layer before
    routed ones), and schedules alternate between these two. tp, cp and ep change the layers, so every kind is
    tried with each of them.
    """
    return [layout for layout in all_singles() if _is_quick(layout)]


def _is_quick(layout: Layout) -> bool:
    parallel, model = layout.parallel, layout.model
    if layout in _second_variants():
        return False
    if parallel.pp > 1:
        return model == ("tied" if list(SCHEDULES).index(parallel.schedule) % 2 else "moe_shared")
    return _is_inside_layers(parallel) or model in ("tied", "moe_shared")


def _second_variants() -> list[Layout]:
    """What a smaller or another layout of `make test` proves as well."""
    return [
        Layout(ParallelSpec(tp=4), "mla"),
        Layout(ParallelSpec(cp=2, cp_stripes=2), "moe_capacity"),
        Layout(ParallelSpec(dp_shard=4, zero=1, ep=2), "moe_shared"),
        Layout(ParallelSpec(dp_shard=4, zero=2, ep=2), "moe_capacity"),
        Layout(ParallelSpec(cp=4, cp_kind="ring", ep=2), "moe"),
    ]


def _is_inside_layers(parallel: ParallelSpec) -> bool:
    return parallel.tp > 1 or parallel.cp > 1 or parallel.ep > 1


def all_pairs() -> list[Layout]:
    """Every two axes with every variant of each; the kinds of models alternate."""
    found = []
    for axes in _combined(2):
        for parts in product(*(AXES[axis] for axis in axes)):
            parallel = _merged(parts)
            found.append(Layout(parallel, _model_for(parallel, len(found))))
    found += [Layout(ParallelSpec(tp=2, dp_shard=2, zero=stage, ep=2, etp=2), "moe") for stage in (1, 2, 3)]
    return _unique(found)


def quick_pairs() -> list[Layout]:
    """The pairs for `make test`: every two axes once, and a pipeline with each axis in two schedules.

    The variants of an axis take turns, so that each is paired with another axis at least.
    """
    wanted: set[ParallelSpec] = {ParallelSpec(tp=2, dp_shard=2, zero=3, ep=2, etp=2)}
    num_pairs = dict.fromkeys(AXES, 0)
    for axes in _combined(2):
        for _ in range(2 if "pp" in axes else 1):
            parts = tuple(AXES[axis][num_pairs[axis] % len(AXES[axis])] for axis in axes)
            wanted.add(_merged(parts))
            for axis in axes:
                num_pairs[axis] += 1
    return [layout for layout in all_pairs() if layout.parallel in wanted]


def named_mixes() -> list[Layout]:
    """The mixes that large runs use."""
    return [
        Layout(ParallelSpec(dp_replicate=2, tp=2, pp=2), "tied"),
        Layout(ParallelSpec(dp_shard=2, zero=1, tp=2, pp=2), "gpt"),
        Layout(
            ParallelSpec(
                dp_shard=2,
                zero=3,
                grad_reduce="last_microbatch",
                tp=2,
                pp=2,
                schedule="zbv",
                virtual_stages=2,
            ),
            "tied",
        ),
        Layout(ParallelSpec(cp=2, tp=2, pp=2), "gqa"),
        Layout(ParallelSpec(cp=2, cp_kind="ring", tp=2, pp=2, zero=3), "mla"),
        Layout(ParallelSpec(dp_shard=2, zero=1, ep=2, pp=2), "moe_shared"),
        Layout(ParallelSpec(dp_shard=2, dp_replicate=2, zero=2, ep=2, pp=2), "moe"),
        Layout(ParallelSpec(dp_shard=2, zero=3, ep=2, pp=2), "moe_capacity"),
    ]


def quick_mixes() -> list[Layout]:
    """The mixes for `make test`: ZeRO 3 with a split backward, ring attention, experts."""
    return [
        layout
        for layout in named_mixes()
        if layout.model in ("mla", "moe") or layout.parallel.schedule == "zbv"
    ]


def all_triples() -> list[Layout]:
    """Every three axes, in three combinations of their variants."""
    found = []
    for index, axes in enumerate(_combined(3)):
        for turn in range(3):
            parts = tuple(AXES[axis][(index + turn) % len(AXES[axis])] for axis in axes)
            parallel = _merged(parts)
            found.append(Layout(parallel, _model_for(parallel, index + turn)))
    return [layout for layout in _unique(found) if layout.parallel.num_ranks <= 8]


def all_axes_on_16() -> list[Layout]:
    """Sixteen ranks: four axes and ep on top, or five with a replica axis."""
    return [
        Layout(ParallelSpec(dp_shard=2, zero=1, cp=2, tp=2, pp=2, ep=2), "moe_shared"),
        Layout(ParallelSpec(dp_shard=2, zero=3, cp=2, cp_kind="ring", tp=2, pp=2, ep=4), "moe"),
        Layout(ParallelSpec(dp_replicate=2, dp_shard=2, zero=2, tp=2, pp=2), "gpt"),
        Layout(
            ParallelSpec(
                dp_shard=2,
                zero=3,
                grad_reduce="last_microbatch",
                cp=2,
                cp_kind="ulysses",
                tp=2,
                pp=2,
                schedule="zbv",
                virtual_stages=2,
            ),
            "tied",
        ),
    ]


def random_layouts(seed: int, count: int, *, max_ranks: int = 8) -> list[Layout]:
    """Layouts that the rules accept, drawn from a seed."""
    generator = random.Random(seed)
    found: list[Layout] = []
    while len(found) < count:
        layout = drawn_layout(generator)
        if 1 < layout.parallel.num_ranks <= max_ranks and not check(layout.run()):
            found.append(layout)
    return found


def drawn_layout(generator: random.Random) -> Layout:
    """A layout of any number of ranks that the rules may refuse."""
    degree = (1, 1, 2, 2, 4)
    schedule = generator.choice(list(SCHEDULES))
    pp = generator.choice(degree)
    cp = generator.choice(degree)
    parallel = ParallelSpec(
        dp_replicate=generator.choice(degree),
        dp_shard=generator.choice(degree),
        zero=generator.randrange(4),
        grad_reduce=generator.choice(("each_microbatch", "last_microbatch")),
        cp=cp,
        cp_kind=generator.choice(CP_KINDS) if cp > 1 else "gather",
        tp=generator.choice(degree),
        pp=pp,
        schedule=schedule if pp > 1 else "1f1b",
        virtual_stages=SCHEDULES[schedule] if pp > 1 else 1,
        ep=generator.choice(degree),
        etp=generator.choice((1, 2)),
    )
    return Layout(parallel, generator.choice(list(MODELS)), generator.choice((1, 2)))


def _unique(layouts: list[Layout]) -> list[Layout]:
    return list({layout.name: layout for layout in layouts}.values())
