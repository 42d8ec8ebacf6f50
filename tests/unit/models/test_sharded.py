"""Initial and loaded weights of a sharded model are shards of those of the full model."""

from pathlib import Path

import torch
from tests.support.hf_folder import load_folder
from tests.support.shrunk_families import shrunk_family
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from meshwright.models import Decoder, build_decoder, initialise
from meshwright.models.hf_weights import HuggingFaceReader, save_folder
from meshwright.ops.sharded import local_slices
from meshwright.rehearse.rank_pool import RankPool

FAMILY = "mixtral-8x7b"


def _shard(model: Decoder) -> None:
    """tp on rows, columns or experts, then FSDP over it: nested sharding of the same dim included."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            placement = Replicate() if parameter.ndim == 1 else Shard(int(name == "down"))
            shard = distribute_tensor(parameter.detach(), mesh["tp"], [placement], src_data_rank=None)
            module.register_parameter(name, torch.nn.Parameter(shard))
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


def _gathered(model: Decoder) -> dict[str, torch.Tensor]:
    return {name: parameter.full_tensor() for name, parameter in model.named_parameters()}


def _initialised_when_sharded() -> dict[str, torch.Tensor]:
    model = build_decoder(shrunk_family(FAMILY))
    _shard(model)
    initialise(model, 7)
    return _gathered(model)


def _loaded_when_sharded(folder: str) -> dict[str, torch.Tensor]:
    reader = HuggingFaceReader(folder)
    model = build_decoder(reader.model)
    _shard(model)
    initialise(model, 1)
    load_folder(model, reader)
    return _gathered(model)


def _full_model() -> Decoder:
    model = build_decoder(shrunk_family(FAMILY))
    initialise(model, 7)
    return model


def test_initial_weights_do_not_depend_on_the_sharding(ranks: RankPool) -> None:
    expected = dict(_full_model().named_parameters())
    for found in ranks.run(_initialised_when_sharded, 4):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_each_rank_loads_its_part(ranks: RankPool, tmp_path: Path) -> None:
    model = _full_model()
    save_folder(model.state_dict(), model.spec, tmp_path / "out", max_shard_bytes=20_000)
    expected = dict(model.named_parameters())
    for found in ranks.run(_loaded_when_sharded, 4, str(tmp_path / "out")):
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def _uneven_parts() -> tuple[slice, ...]:
    mesh = init_device_mesh("cpu", (4,))
    return local_slices(distribute_tensor(torch.zeros(5, 3), mesh, [Shard(0)], src_data_rank=None))


def test_uneven_and_empty_parts(ranks: RankPool) -> None:
    """torch shards 5 rows over 4 ranks as 2, 2, 1, 0."""
    rows = [part[0] for part in ranks.run(_uneven_parts, 4)]
    assert [(part.start, part.stop) for part in rows] == [(0, 2), (2, 4), (4, 5), (0, 0)]
