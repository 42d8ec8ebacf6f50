"""Pipeline stages: the layers of the model that each stage holds."""

from typing import NamedTuple

import torch

from meshwright.models.decoder import Decoder, build_decoder
from meshwright.spec import ModelSpec, ParallelSpec
from meshwright.spec.stages import stage_layers, stages_of_rank


class StageModule(NamedTuple):
    """One stage: its number in the pipeline, and the decoder with its layers."""

    index: int
    module: Decoder


def build_stages(
    model: ModelSpec, parallel: ParallelSpec, pp_rank: int, *, dtype: torch.dtype, left_out_layers: int = 0
) -> list[StageModule]:
    """The stages of one pipeline rank on the meta device; without a pipeline there is one, the full model.

    A rehearsal leaves the last `left_out_layers` of every stage out.
    """
    layers = stage_layers(model, parallel.num_stages)
    last = parallel.num_stages - 1
    return [
        StageModule(
            index,
            build_decoder(
                model,
                layers=layers[index][: len(layers[index]) - left_out_layers],
                has_embedding=index == 0,
                has_head=index == last,
                dtype=dtype,
            ),
        )
        for index in stages_of_rank(parallel, pp_rank)
    ]
