"""Mesh and batch of a run from facts that several keys of a config file say together."""

from typing import Any

from meshwright.configs.rules import Settings, Translation
from meshwright.errors import SpecError
from meshwright.spec.run import RunSpec


def complete_settings(found: Translation, base: RunSpec | None) -> Settings:
    """The settings of a file with the mesh and the batch that follow from its facts.

    Facts: `ranks`, `nodes`, `dp_shard`, `dp_replicate`, `is_hybrid` (shard inside a node, replicate across),
    `accumulation`. What the file does not say is taken from the base run.
    """
    settings = dict(found.settings)
    dp = _dp(found.facts, settings, base)
    if dp is not None:
        settings.update(_data_axes(found.facts, settings, base, dp))
    batch = _batch_sequences(found.facts, settings, base, dp)
    if batch is not None:
        settings["data.batch_sequences"] = batch
    if base is not None and base.precision.loss_scale and settings.get("precision.compute", "fp16") != "fp16":
        settings["precision.loss_scale"] = None
    return settings


def _value(key: str, settings: Settings, base: RunSpec | None, default: Any) -> Any:
    """A value of the file, else of the base run, else the default."""
    if key in settings or base is None:
        return settings.get(key, default)
    section, _, name = key.partition(".")
    return getattr(getattr(base, section), name)


def _dp(facts: Settings, settings: Settings, base: RunSpec | None) -> int | None:
    """Data-parallel ranks; None where neither the file nor the base run says how many ranks there are."""
    split = 1
    for axis in ("tp", "pp", "cp"):
        split *= int(_value(f"parallel.{axis}", settings, base, 1))
    ranks = facts.get("ranks") or (base.parallel.num_ranks if base else None)
    if ranks is None:
        return _dp_of_batch(facts, settings)
    if ranks % split:
        raise SpecError(
            f"{ranks} ranks cannot be divided by tp x pp x cp = {split}",
            where="ranks",
            hint="name the number of ranks with --ranks, or set parallel.tp, pp or cp",
        )
    return ranks // split


def _dp_of_batch(facts: Settings, settings: Settings) -> int | None:
    """Global batch / (micro-batch x accumulation), where a file has all three."""
    batch, micro = settings.get("data.batch_sequences"), settings.get("data.microbatch_sequences")
    accumulation = facts.get("accumulation")
    if batch is None or micro is None or accumulation is None or batch % (micro * accumulation):
        return None
    return batch // (micro * accumulation)


def _data_axes(facts: Settings, settings: Settings, base: RunSpec | None, dp: int) -> Settings:
    """dp_replicate and dp_shard; without ZeRO all data-parallel ranks are replicas."""
    zero = int(_value("parallel.zero", settings, base, 0))
    shard = facts.get("dp_shard")
    if shard is None and facts.get("dp_replicate") is not None:
        shard = dp // facts["dp_replicate"]
    if shard is None and facts.get("is_hybrid"):
        shard = min(dp, max(1, facts["ranks"] // facts.get("nodes", 1)))
    if shard is None:
        shard = dp if zero else 1
    if shard < 1 or dp % shard:
        raise SpecError(
            f"{dp} data-parallel ranks cannot be divided into shards of {shard}",
            where="parallel.dp_shard",
            hint="name the number of ranks with --ranks and of nodes with --nodes",
        )
    return {"parallel.dp_shard": shard, "parallel.dp_replicate": dp // shard}


def _batch_sequences(facts: Settings, settings: Settings, base: RunSpec | None, dp: int | None) -> int | None:
    accumulation = facts.get("accumulation")
    if "data.batch_sequences" in settings or accumulation is None or dp is None:
        return settings.get("data.batch_sequences")
    return int(_value("data.microbatch_sequences", settings, base, 1)) * accumulation * dp
