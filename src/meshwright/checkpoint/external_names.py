"""Weights of other programs under our names: those of Hugging Face, torchtitan and Megatron core."""

import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from meshwright.checkpoint.megatron_names import MEGATRON_EMBEDDING, MegatronTensors
from meshwright.checkpoint.titan_names import TITAN_EMBEDDING, TitanTensors
from meshwright.errors import CheckpointError
from meshwright.spec import ModelSpec
from meshwright.spec.huggingface.names import Source, sources, state_shapes

_RUN_STATE = re.compile(
    r"(optim|optimizer|lr_scheduler|dataloader|train_state|step)\b|.*(inv_freq|freqs_cis|_extra_state|tokens_per_expert)$"
)
_PREFIXES = ("", "model.", "module.", "_orig_mod.")


def under_our_names(tensors: Mapping[str, Tensor], model: ModelSpec) -> Mapping[str, Tensor]:
    """The tensors under our names, whichever of the known names they have; ours are returned as they are.

    Optimizer states and other state of a run are left out. CheckpointError for other tensors that have no
    place in the model. The caller compares what is there with the model.
    """
    if next(iter(state_shapes(model))) in tensors:
        return tensors
    for prefix in _PREFIXES:
        if f"{prefix}{TITAN_EMBEDDING}" in tensors:
            titan = TitanTensors(tensors, prefix, model)
            _require_known(set(tensors) - titan.used_names(), model)
            return _Renamed(titan, model)
        if f"{prefix}{MEGATRON_EMBEDDING}" in tensors:
            megatron = MegatronTensors(tensors, prefix, model)
            _require_known(set(tensors) - megatron.used_names(), model)
            return _Renamed(megatron, model)
    renamed = _Renamed(tensors, model)
    _require_known(set(tensors) - renamed.used_names(), model)
    return renamed


def _require_known(unused: set[str], model: ModelSpec) -> None:
    """Refuse tensors that the model has no place for: leaving out a bias would be another model."""
    heads = {
        f"{prefix}{name}"
        for prefix in _PREFIXES
        for name in ("lm_head.weight", "output.weight", "output_layer.weight")
    }
    ignored = heads if model.tied_head else set()
    unknown = sorted(name for name in unused - ignored if not _RUN_STATE.match(name))
    if unknown:
        raise CheckpointError(
            f"{len(unknown)} tensor(s) have no place in the model, first {unknown[0]}",
            where="the names of the weights",
            hint="is --model right? known are names of torchtitan, Megatron core, Hugging Face and ourselves",
        )


class _Renamed(Mapping[str, Tensor]):
    """Tensors with Hugging Face's names, under ours."""

    def __init__(self, tensors: Mapping[str, Tensor], model: ModelSpec) -> None:
        self._tensors, self._shapes = tensors, state_shapes(model)
        self._sources = {
            name: source
            for name, source in sources(model).items()
            if all(each in tensors for each in source.names)
        }

    def __getitem__(self, name: str) -> Tensor:
        source = self._sources[name]
        parts = [self._part(each, source) for each in source.names]
        return torch.stack(parts) if source.stacked else parts[0]

    def _part(self, hf_name: str, source: Source) -> Tensor:
        tensor = self._tensors[hf_name]
        tensor = tensor.t() if source.transposed else tensor
        if source.third is not None:
            tensor = tensor.chunk(3, dim=0)[source.third]
        return tensor.contiguous()

    def used_names(self) -> set[str]:
        """Names on disk that one of our tensors consists of."""
        return {each for source in self._sources.values() for each in source.names}

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)
