"""Rows of a table of runs (the columns of published_runs.csv) as workload, layout, cluster and framework.

An empty cell gets a default, which the `assumed` column lists. A cell that is malformed, or required and
empty, gives its row an error; the other rows are still read.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from meshwright.errors import SpecError
from meshwright.hardware.catalogue import Cluster, Device, Link, find_device, generic_cluster
from meshwright.plan.framework import Framework
from meshwright.plan.workload.layouts import Layouts, layouts
from meshwright.plan.workload.schedules import SCHEDULES
from meshwright.plan.workload.workload import Adapters, Workload, count_parameters
from meshwright.published.conventions import CONVENTIONS
from meshwright.published.frameworks import RECIPES, Recipe, find_framework
from meshwright.published.known_shapes import routed_shape
from meshwright.published.table_text import parse_network, parse_precision, parse_recompute
from meshwright.spec.model import AttentionSpec, MlpSpec, ModelSpec, RopeSpec

# The release or the date of a run: `(26.06)`, `(2026-07-25)`.
_RELEASE = re.compile(r"(?:\((?=\d\d\.)|20)(\d\d)[.-](\d\d)")
_OVERLAP = re.compile(r"\boverlap (on|off)\b", re.IGNORECASE)
# Megatron's routed layers take this share of their earlier time from the release of June 2026 on.
FASTER_ROUTED, FASTER_ROUTED_SLOWDOWN = (26, 6), 0.8
_FLOP = re.compile(r"flop=([a-z0-9]+)", re.IGNORECASE)


@dataclass(frozen=True)
class TableRun:
    """One row of a table as the inputs of a prediction."""

    workload: Workload
    at: Layouts
    cluster: Cluster
    framework: Framework
    convention: str
    num_devices: int
    batch_sequences: int
    assumed: tuple[str, ...]

    @property
    def batch_tokens(self) -> int:
        """Tokens per optimizer step."""
        return self.batch_sequences * self.workload.sequence_length

    @property
    def flops_per_token(self) -> float:
        """FLOPs per token by the convention that the row's own figure uses."""
        return CONVENTIONS[self.convention](self.workload.model, self.workload.sequence_length)


def measured_seconds(row: Mapping[str, str | None], run: TableRun) -> float | None:
    """The published step time of a row, given directly or as tokens/s or TFLOP/s; None without one."""

    def given(column: str) -> float | None:
        text = (row.get(column) or "").strip()
        return float(text) if text else None

    step, tokens, tflops = given("step_time_s"), given("tokens_s_gpu"), given("tflops_per_gpu")
    if step is not None:
        return step
    if tokens is not None:
        return run.batch_tokens / (tokens * run.num_devices)
    if tflops is not None:
        return run.batch_tokens * run.flops_per_token / (tflops * 1e12 * run.num_devices)
    return None


class _Cells:
    """The cells of one row; every error names the column."""

    def __init__(self, row: Mapping[str, str | None], where: str) -> None:
        self.row = row
        self.where = where
        self.assumed: list[str] = []

    def text(self, column: str) -> str:
        return (self.row.get(column) or "").strip()

    def number(self, column: str) -> int | None:
        text = self.text(column)
        if not text:
            return None
        try:
            value = float(text)
        except ValueError as error:
            raise SpecError(f"{column} = {text!r} is not a number", where=self.where) from error
        if not math.isfinite(value) or value != int(value) or not 0 <= value <= 1e12:
            raise SpecError(f"{column} = {text} is not a sensible whole number", where=self.where)
        return int(value)

    def positive(self, column: str) -> int:
        value = self.number(column)
        if value is None:
            raise SpecError(f"{column} is not stated", where=self.where)
        if value < 1:
            raise SpecError(f"{column} = {value} is not positive", where=self.where)
        return value

    def filled(self, column: str, default: int) -> int:
        value = self.number(column)
        if value is not None and (value > 0 or column == "zero"):
            return value
        if value is not None:
            raise SpecError(f"{column} = {value} is not positive", where=self.where)
        self.assumed.append(f"{column}={default}")
        return default


def read_row(row: Mapping[str, str | None], *, where: str) -> TableRun:
    """One row as a run to price; raises a SpecError that names the column."""
    cells = _Cells(row, where)
    framework = find_framework(cells.text("framework") or "meshwright")
    device = find_device(_required_text(cells, "gpu"))
    num_devices = cells.positive("gpus")
    workload = _workload(cells, framework)
    framework = _release(framework, workload, cells)
    cluster = _cluster(cells, device, num_devices)
    at = _layout(cells, workload, framework, num_devices)
    return TableRun(
        workload=workload,
        at=at,
        cluster=cluster,
        framework=framework,
        convention=_convention(cells),
        num_devices=num_devices,
        batch_sequences=int(at.batch_sequences[0]),
        assumed=tuple(cells.assumed),
    )


def _required_text(cells: _Cells, column: str) -> str:
    if not cells.text(column):
        raise SpecError(f"{column} is not stated", where=cells.where)
    return cells.text(column)


def _recipe(framework: Framework) -> Recipe:
    return RECIPES.get(framework.name, Recipe())


def _convention(cells: _Cells) -> str:
    found = _FLOP.search(cells.text("notes"))
    name = found.group(1).lower() if found else "strict"
    return name if name in CONVENTIONS else "strict"


def _cluster(cells: _Cells, device: Device, num_devices: int) -> Cluster:
    per_node = cells.filled("gpus_per_node", device.devices_per_node)
    cluster = generic_cluster(device)
    rate = parse_network(cells.text("network"), per_node)
    if rate is None and num_devices > per_node:
        cells.assumed.append(f"network={cluster.network.bytes_per_second / 1e9:g}GB/s per GPU")
    network = Link("network", rate or cluster.network.bytes_per_second, cluster.network.latency_seconds)
    return replace(cluster, devices_per_node=per_node, num_nodes=-(-num_devices // per_node), network=network)


def _workload(cells: _Cells, framework: Framework) -> Workload:
    precision_text = cells.text("precision")
    if not precision_text:
        cells.assumed.append("precision=bf16")
    try:
        precision = parse_precision(precision_text or "bf16")
    except SpecError as error:
        raise SpecError(error.fact, where=cells.where, hint=error.hint) from error
    is_first_release = precision == "fp16" and framework.name in ("megatron", "megatron-deepspeed")
    notes = cells.text("notes").lower()
    adapters = Adapters() if re.search(r"\bq?lora\b", notes) else None
    if adapters and "qlora" in notes:
        adapters = Adapters(base_bits=4)
    model = _model(cells)
    # The published recipes for latent attention keep gradients and both moments in bf16.
    latent = framework.name == "megatron" and model.attention.latent is not None
    if latent:
        cells.assumed.append("optimizer states and gradients in bf16")
    if is_first_release:
        model = model.with_(dropout=0.1)
        cells.assumed.append("attention=unfused, dropout on (fp16 release)")
    return Workload(
        model=model,
        sequence_length=cells.positive("seq"),
        precision=precision,
        optimizer="adamw_bf16" if latent else "adamw",
        attention_kernel="unfused" if is_first_release else "flash",
        adapters=adapters,
        compiled=_recipe(framework).compiled,
        low_precision_experts=_recipe(framework).low_precision_experts,
    )


def _model(cells: _Cells) -> ModelSpec:
    names = ("layers", "hidden", "ffn", "heads", "vocab")
    layers, hidden, ffn, heads, vocab = (cells.positive(name) for name in names)
    kv_heads = cells.filled("kv_heads", heads)
    routed = routed_shape(layers, hidden, ffn, heads, vocab)
    if routed is not None:
        return routed
    if (cells.number("ep") or 1) > 1:
        raise SpecError(
            "experts and chosen experts are not columns, and no known routed model has this shape",
            where=cells.where,
        )
    if hidden % heads or heads % kv_heads:
        raise SpecError(f"heads = {heads} does not divide hidden = {hidden}", where=cells.where)
    return _nearest_size(cells, _dense_models(layers, hidden, ffn, heads, kv_heads, vocab))


def _dense_models(
    layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int
) -> list[ModelSpec]:
    """The models that have these columns: gated or not, tied head or not; GPT style first when ffn = 4h."""

    def build(*, gated: bool, tied: bool) -> ModelSpec:
        return ModelSpec(
            vocab_size=vocab,
            num_layers=layers,
            width=hidden,
            max_positions=1 << 20 if gated else 2048,
            attention=AttentionSpec(
                num_heads=heads, num_kv_heads=kv_heads, head_width=hidden // heads, qkv_bias=not gated
            ),
            mlp=MlpSpec(kind="swiglu" if gated else "gelu", width=ffn),
            norm="rms" if gated else "layer",
            rope=RopeSpec(),
            tied_head=tied,
        )

    gpt_first = ffn == 4 * hidden
    order = [
        (not gpt_first, gpt_first),
        (not gpt_first, not gpt_first),
        (gpt_first, False),
        (gpt_first, True),
    ]
    return [build(gated=gated, tied=tied) for gated, tied in order]


def _nearest_size(cells: _Cells, candidates: list[ModelSpec]) -> ModelSpec:
    """The candidate whose parameter count is nearest to params_b; the first one where that is empty."""
    text = cells.text("params_b")
    try:
        stated = float(text) * 1e9 if text else None
    except ValueError as error:
        raise SpecError(f"params_b = {text!r} is not a number", where=cells.where) from error
    if stated is None or not math.isfinite(stated):
        return candidates[0]
    return min(candidates, key=lambda model: abs(count_parameters(model).total - stated))


def _release(framework: Framework, workload: Workload, cells: _Cells) -> Framework:
    """Megatron as it was at the time of the run: fp16 releases had no overlap, and sequence parallel late."""
    if framework.name != "megatron":
        return framework
    if workload.model.moe is not None:
        framework = _routed_release(framework, cells)
    if workload.optimizer == "adamw_bf16":
        return replace(framework, state=replace(framework.state, gradient=2))
    if workload.precision != "fp16":
        return framework if cells.text("zero") != "0" else without_overlap(framework, cells.assumed)
    sequence_parallel = "sequence parallel" in cells.text("recompute").lower()
    if not sequence_parallel:
        cells.assumed.append("no sequence parallel (fp16 release)")
    return replace(
        framework,
        sequence_parallel=sequence_parallel,
        tp_overlap=0.0,
        pp_overlap=0.0,
        dp_overlap=0.0,
        fsdp_overlap=0.0,
        adapters_per_group=1.0,
    )


def _routed_release(framework: Framework, cells: _Cells) -> Framework:
    """Routed layers are faster from FASTER_ROUTED on; a row may say that all-to-alls overlap, or not."""
    release, overlap = (
        _RELEASE.search(cells.text("source") + cells.text("notes")),
        _OVERLAP.search(cells.text("notes")),
    )
    if overlap is not None:
        share = framework.ep_overlap if overlap[1].lower() == "on" else 0.0
        framework = replace(framework, ep_overlap=share, overlaps_ep_in_stages=False)
    if release is None or (int(release[1]), int(release[2])) < FASTER_ROUTED:
        return framework
    cells.assumed.append(f"routed layers of release {release[1]}.{release[2]}")
    return replace(framework, routed_slowdown=FASTER_ROUTED_SLOWDOWN)


def without_overlap(framework: Framework, assumed: list[str]) -> Framework:
    """Megatron with default flags (no distributed optimizer): no overlap, fp32 all-reduce of gradients."""
    assumed.append("no overlap, gradients reduced in fp32 (zero=0)")
    state = replace(framework.state, reduce=4)
    return replace(framework, state=state, tp_overlap=0.0, dp_overlap=0.0, pp_overlap=0.0)


def _layout(cells: _Cells, workload: Workload, framework: Framework, num_devices: int) -> Layouts:
    tp, pp, cp = (cells.filled(name, 1) for name in ("tp", "pp", "cp"))
    if not cells.text("tp") or not cells.text("pp"):
        raise SpecError("tp and pp are not stated", where=cells.where)
    if num_devices % (tp * pp * cp):
        raise SpecError(
            f"tp x pp x cp = {tp * pp * cp} does not divide gpus = {num_devices}", where=cells.where
        )
    dp = num_devices // (tp * pp * cp)
    routed = workload.model.moe
    ep = cells.filled("ep", math.gcd(routed.num_experts, dp * cp) if routed else 1)
    stated = cells.number("dp")
    if stated not in (None, dp):
        raise SpecError(f"dp = {stated}, but gpus / (tp x pp x cp) = {dp}", where=cells.where)
    batch, microbatch = cells.positive("gbs"), cells.filled("mbs", 1)
    if batch % (dp * microbatch):
        raise SpecError(f"dp x mbs = {dp * microbatch} does not divide gbs = {batch}", where=cells.where)
    micro = batch // (dp * microbatch)
    virtual = _virtual_stages(cells, workload, framework, pp)
    schedule = _recipe(framework).schedule or ("interleaved_1f1b" if virtual > 1 else "1f1b")
    recompute = _recompute(cells, "none" if routed else _recipe(framework).recompute)
    zero_default = 0 if workload.precision == "fp16" else 1
    return layouts(
        dp_shard=dp,
        zero=cells.filled("zero", zero_default),
        cp=cp,
        tp=tp,
        pp=pp,
        ep=ep,
        virtual_stages=virtual,
        schedule=SCHEDULES.index(schedule),
        microbatch_sequences=microbatch,
        num_microbatches=micro,
        recompute=recompute,
    )


def _recompute(cells: _Cells, default: str) -> int:
    """Bits of the recomputed parts, as stated or by default."""
    text = cells.text("recompute")
    if not text:
        cells.assumed.append(f"recompute={default}")
    try:
        return parse_recompute(text or default)
    except SpecError as error:
        raise SpecError(error.fact, where=cells.where, hint=error.hint) from error


def _virtual_stages(cells: _Cells, workload: Workload, framework: Framework, pp: int) -> int:
    """The stated number, or for interleaved recipes the smallest one that divides a rank's layers."""
    if pp == 1:
        return 1
    per_rank, rest = divmod(workload.model.num_layers, pp)
    divisors = [count for count in range(2, per_rank + 1) if per_rank % count == 0]
    default = divisors[0] if _recipe(framework).interleaved and rest == 0 and divisors else 1
    return min(cells.filled("vpp", default), max(per_rank, 1))
