"""Rope settings in a config: `rope_theta` + `rope_scaling`, or `rope_parameters` with both."""

from collections.abc import Mapping
from typing import Any

from meshwright.errors import SpecError
from meshwright.spec.model import RopeScalingSpec, RopeSpec

# Our field for each key of the scaling dict, by kind.
_FIELDS = {
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "original_max_position_embeddings": "original_positions",
        "low_freq_factor": "low_frequency_factor",
        "high_freq_factor": "high_frequency_factor",
    },
    "yarn": {
        "factor": "factor",
        "original_max_position_embeddings": "original_positions",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dims",
    },
}
# Keys that have no effect at these values.
_NEUTRAL = {"partial_rotary_factor": 1.0, "truncate": True, "attention_factor": None}


def read_rope(config: Mapping[str, Any], *, where: str, latent: bool, theta: float) -> RopeSpec:
    """The rope settings of a config; `latent` is True for DeepSeek, `theta` is the family's default."""
    given = dict(config.get("rope_scaling") or {})
    given.update(config.get("rope_parameters") or {})
    bases = (given.pop("rope_theta", None), config.get("rope_theta"), theta)
    base = next(base for base in bases if base is not None)
    kind = given.pop("rope_type", None) or given.pop("type", None) or "default"
    given.pop("type", None)
    if kind == "default":
        return RopeSpec(theta=base, interleaved=latent)
    scaling = _read_scaling(kind, given, config, where)
    if scaling.mscale_all_dims and not latent:
        fact = f"mscale_all_dim={scaling.mscale_all_dims} also scales the softmax of latent attention only"
        raise SpecError(fact, where=where, hint="remove mscale and mscale_all_dim from the rope scaling")
    return RopeSpec(theta=base, interleaved=latent, scaling=scaling)


def _read_scaling(kind: str, given: dict[str, Any], config: Mapping[str, Any], where: str) -> RopeScalingSpec:
    if kind not in _FIELDS:
        hint = f"supported are default, {', '.join(_FIELDS)}"
        raise SpecError(f"rope scaling of type {kind!r} is not supported", where=where, hint=hint)
    names = _FIELDS[kind]
    for key, value in given.items():
        if value is not None and key not in names and value != _NEUTRAL.get(key, object()):
            if key == "original_max_position_embeddings":
                continue  # linear scaling has it without using it
            fact = f"rope scaling of type {kind} with {key}={value!r} is not supported"
            raise SpecError(fact, where=where, hint=f"supported keys are {', '.join(names)}")
    fields: dict[str, Any] = {
        names[key]: value for key, value in given.items() if value is not None and key in names
    }
    if kind != "linear":
        fallback = config.get("original_max_position_embeddings") or config.get("max_position_embeddings")
        fields.setdefault("original_positions", fallback)
    return RopeScalingSpec(kind=kind, **fields)  # pyright: ignore[reportArgumentType]


def write_rope(rope: RopeSpec) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, the form that every version of transformers reads."""
    written: dict[str, Any] = {"rope_theta": rope.theta, "rope_scaling": None}
    scaling = rope.scaling
    if scaling is not None:
        values = {key: getattr(scaling, field) for key, field in _FIELDS[scaling.kind].items()}
        shown = {key: value for key, value in values.items() if not (key.startswith("mscale") and not value)}
        written["rope_scaling"] = {"rope_type": scaling.kind, "type": scaling.kind, **shown}
    return written
