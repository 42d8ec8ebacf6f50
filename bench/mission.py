"""Predictions for the tables of the course decks: published figures, assumptions, predicted figures.

The accuracy page and the tests both use them, so they compare the same numbers.
"""

from dataclasses import dataclass

from meshwright.hardware import parse_cluster
from meshwright.plan.memory.rank_bytes import memory
from meshwright.plan.predict import predict_layout
from meshwright.plan.time.step_time import step_cost
from meshwright.plan.workload.layouts import FULL, Layouts, layouts
from meshwright.plan.workload.schedules import SCHEDULES
from meshwright.plan.workload.workload import Adapters, Workload
from meshwright.published.conventions import training_days
from meshwright.published.frameworks import find_framework
from meshwright.published.predict import predict_table_run
from meshwright.published.table import read_row, without_overlap
from meshwright.spec.families import family
from meshwright.units import show_count

DAYS_PER_WEEK, DAYS_PER_YEAR = 7.0, 365.25


@dataclass(frozen=True)
class Compared:
    """One published figure and its prediction."""

    label: str
    published: float
    predicted: float

    @property
    def ratio(self) -> float:
        """Predicted over published."""
        return self.predicted / self.published


# family, model-parallel size, GPUs, micro-batch, batch, TFLOP/s per GPU with recompute counted
MEGATRON = (
    ("megatron-1.7b", 1, 32, 16, 512, 137),
    ("megatron-3.6b", 2, 64, 16, 512, 138),
    ("megatron-7.5b", 4, 128, 16, 512, 142),
    ("megatron-18b", 8, 256, 8, 1024, 135),
    ("megatron-39b", 16, 512, 4, 1536, 138),
    ("megatron-76b", 32, 1024, 2, 1792, 140),
    ("megatron-145b", 64, 1536, 2, 2304, 148),
    ("megatron-310b", 128, 1920, 1, 2160, 155),
    ("megatron-530b", 280, 2520, 1, 2520, 163),
    ("megatron-1t", 512, 3072, 1, 3072, 163),
)


def megatron_table() -> list[Compared]:
    """Weak scaling on A100-80GB: tp inside the node, then pp; fp16, full recompute, 2048 tokens."""
    found: list[Compared] = []
    for name, parallel, gpus, microbatch, batch, tflops in MEGATRON:
        model = family(name)
        tp = min(8, parallel)
        row = {
            "framework": "megatron",
            "layers": model.num_layers,
            "hidden": model.width,
            "ffn": model.mlp.width,
            "heads": model.attention.num_heads,
            "vocab": model.vocab_size,
            "seq": 2048,
            "gpu": "A100 SXM 80GB",
            "gpus": gpus,
            "network": "NVLink3 + 8x200Gb/s HDR IB per node",
            "tp": tp,
            "pp": parallel // tp,
            "mbs": microbatch,
            "gbs": batch,
            "zero": 0,
            "recompute": "full",
            "precision": "fp16",
            "notes": "flop=hw4x",
        }
        run = read_row({key: str(value) for key, value in row.items()}, where=name)
        found.append(Compared(name, tflops, predict_table_run(run).tflops_per_device))
    return found


# size, GPUs, TP, PP, global batch, micro-batch, average TFLOP/s per GPU
LEONARDO = (
    ("8B", 8, 4, 2, 512, 1, 160),
    ("8B", 16, 4, 2, 512, 1, 155),
    ("8B", 16, 4, 2, 512, 2, 160),
    ("8B", 32, 4, 2, 512, 1, 144),
    ("8B", 32, 4, 2, 512, 2, 149),
    ("8B", 64, 4, 2, 512, 2, 121),
    ("8B", 128, 4, 2, 512, 2, 109),
    ("8B", 256, 4, 2, 512, 1, 79),
    ("8B", 256, 4, 2, 1024, 1, 100),
    ("32B", 64, 4, 16, 512, 1, 110),
    ("32B", 64, 4, 16, 1024, 1, 114),
    ("32B", 128, 4, 16, 1024, 1, 110),
    ("70B", 128, 4, 16, 1024, 1, 96),
)
LEONARDO_SEQUENCE = 2048
LEONARDO_FAMILY = {"8B": "llama-3.1-8b", "32B": "qwen2.5-32b", "70B": "llama-3.1-70b"}
LEONARDO_ASSUMED = (
    "sequence 2048, strict FLOPs, bf16, Megatron with its default flags (all-reduce of fp32 gradients, no "
    "overlap, no virtual stages); the 8B rows without recompute, the 32B and 70B rows with full recompute "
    "and micro-batch 1"
)


def leonardo_table() -> list[Compared]:
    """TFLOP/s per GPU relative to the first row, published and predicted."""
    rates = [_leonardo_tflops(row) for row in LEONARDO]
    return [
        Compared(_leonardo_label(row), row[-1] / LEONARDO[0][-1], rate / rates[0])
        for row, rate in zip(LEONARDO, rates, strict=True)
    ]


def _leonardo_label(row: tuple[str, int, int, int, int, int, int]) -> str:
    size, gpus, _, _, batch, microbatch, _ = row
    return f"{size}, {gpus} GPUs, batch {batch}, micro-batch {microbatch}"


def _leonardo_tflops(row: tuple[str, int, int, int, int, int, int], *, virtual_stages: int = 1) -> float:
    size, gpus, tp, pp, batch, microbatch, _ = row
    dp = gpus // (tp * pp)
    megatron = without_overlap(find_framework("megatron"), [])
    at = layouts(
        tp=tp,
        pp=pp,
        dp_replicate=dp,
        microbatch_sequences=microbatch,
        num_microbatches=batch // (dp * microbatch),
        recompute=0 if size == "8B" else FULL,
        virtual_stages=virtual_stages,
        schedule=SCHEDULES.index("interleaved_1f1b" if virtual_stages > 1 else "1f1b"),
    )
    workload = Workload(family(LEONARDO_FAMILY[size]), LEONARDO_SEQUENCE)
    return predict_layout(workload, at, parse_cluster(f"leonardo:{gpus // 4}"), megatron).tflops_per_device


def leonardo_what_if() -> list[Compared]:
    """The 70B row with other micro-batches and virtual stages: published and predicted over the first row."""
    first, row = _leonardo_tflops(LEONARDO[0]), LEONARDO[-1]
    found: list[Compared] = []
    for microbatch in (1, 2, 4, 8, 16):
        for virtual in (1, 5):
            changed = (*row[:5], microbatch, row[6])
            rate = _leonardo_tflops(changed, virtual_stages=virtual) / first
            found.append(
                Compared(
                    f"micro-batch {microbatch}, {virtual} stage(s) per rank", row[-1] / LEONARDO[0][-1], rate
                )
            )
    return found


FINE_TUNING_ASSUMED = (
    "LoRA with a frozen bf16 base under FSDP, full recompute, sequences of 2048, micro-batches of 2 (8B) "
    "and 4 (70B)"
)


def _fine_tuning_rate(name: str, num_devices: int, microbatch: int) -> float:
    """Sequences per second over all devices."""
    workload = Workload(family(name), 2048, adapters=Adapters())
    cluster = parse_cluster(f"leonardo:{max(1, num_devices // 4)}").with_devices(num_devices)
    at = _fine_tuning_layout(num_devices, microbatch)
    seconds = step_cost(workload, at, cluster, find_framework("accelerate-fsdp")).step_seconds[0]
    return float(at.batch_sequences[0] / seconds)


def _fine_tuning_layout(num_devices: int, microbatch: int) -> Layouts:
    return layouts(
        dp_shard=num_devices, zero=3, microbatch_sequences=microbatch, num_microbatches=8, recompute=FULL
    )


def fine_tuning_table() -> list[Compared]:
    """Speed-up over the smallest number of GPUs that ran."""
    small = {n: _fine_tuning_rate("llama-3.1-8b", n, 2) for n in (1, 2, 4, 8)}
    large = {n: _fine_tuning_rate("llama-2-70b", n, 4) for n in (4, 8)}
    published = {2: 3884 / 1925, 4: 3884 / 954, 8: 3884 / 602}
    found = [Compared(f"8B, {n} GPUs over 1", published[n], small[n] / small[1]) for n in published]
    return [*found, Compared("70B, 8 GPUs over 4", 246.2 / 136, large[8] / large[4])]


def fine_tuning_fits(num_devices: int) -> bool:
    """Whether the 70B fine-tuning fits on this many A100-64GB; published: out of memory on 3."""
    workload = Workload(family("llama-2-70b"), 2048, adapters=Adapters())
    cluster = parse_cluster(f"leonardo:{max(1, num_devices // 4)}").with_devices(num_devices)
    at = _fine_tuning_layout(num_devices, 4)
    return bool(memory(workload, at, cluster, find_framework("accelerate-fsdp")).fits(cluster)[0])


# parameters in billions, TFLOP/s per GPU, days; 300 B tokens on 480 GPUs
GPT3 = ((2.7, 127, 1.2), (6.7, 130, 3.0), (13, 135, 5.6), (175, 140, 72.3))


def gpt3_table() -> list[Compared]:
    """Days at the published rate: tokens x parameters x 8 over the devices' FLOP/s."""
    return [
        Compared(f"{size:g}B", days, training_days(size * 1e9, 300e9, 480, flops_per_second=rate * 1e12))
        for size, rate, days in GPT3
    ]


# parameters, unit, days per unit, durations on one and on four DGX A100; 300 B tokens at 140 TFLOP/s per GPU
DURATIONS = (
    (1.7e9, "weeks", DAYS_PER_WEEK, 6.0, 1.5),
    (18e9, "weeks", DAYS_PER_WEEK, 65.0, 16.0),
    (76e9, "years", DAYS_PER_YEAR, 5.2, 1.3),
    (1e12, "years", DAYS_PER_YEAR, 68.5, 17.1),
)


def duration_table() -> list[Compared]:
    """Weeks and years on one and four DGX A100: 300 B tokens with full recompute."""
    found: list[Compared] = []
    for size, unit, unit_days, one, four in DURATIONS:
        for nodes, published in ((1, one), (4, four)):
            days = training_days(size, 300e9, 8 * nodes, flops_per_second=140e12)
            label = f"{show_count(size)}, {nodes} DGX, {unit}"
            found.append(Compared(label, published, days / unit_days))
    alone = training_days(175e9, 300e9, 1, flops_per_second=312e12, passes=6.0)
    return [*found, Compared("GPT-3 175B, one A100 at peak, years", 31, alone / DAYS_PER_YEAR)]


def deepseek_table() -> list[Compared]:
    """DeepSeek-V3 on 2,048 H800: 2.664 M GPU-hours for 14.8 T tokens, layout and batch as in its report."""
    model = family("deepseek-v3")
    assert model.moe is not None
    row = {
        "framework": "hai-llm",
        "layers": model.num_layers,
        "hidden": model.width,
        "ffn": model.moe.width,
        "heads": model.attention.num_heads,
        "vocab": model.vocab_size,
        "seq": 4096,
        "gpu": "h800",
        "gpus": 2048,
        "network": "NVLink4 + 8x400Gb/s IB per node",
        "tp": 1,
        "pp": 16,
        "ep": 64,
        "mbs": 1,
        "gbs": 15360,
        "zero": 1,
        "recompute": "selective: layernorm, mla_up_proj",
        "precision": "fp8",
    }
    published = 14.8e12 / (2.664e6 * 3600)
    found: list[Compared] = []
    for label, change in (("as published", {}), ("linears and experts in bf16", {"precision": "bf16"})):
        cells = {key: str(value) for key, value in {**row, **change}.items()}
        rate = predict_table_run(read_row(cells, where=label)).tokens_per_second_per_device
        found.append(Compared(f"tokens/s per GPU, {label}", published, rate))
    return found
