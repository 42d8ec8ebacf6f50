"""Every measurement gives rows that say what was measured; sizes are a CPU's."""

import itertools
from pathlib import Path

import pytest
import torch
from tests.support.equivalence import this_world

from meshwright.bench import attention, comm, copy, gemm, storage
from meshwright.bench.random_tokens import write_random_tokens
from meshwright.data.sources import TokenFile
from meshwright.mesh import build_mesh
from meshwright.rehearse.rank_pool import RankPool
from meshwright.spec import ParallelSpec
from meshwright.spec.families import family

CPU = torch.device("cpu")


def test_a_matmul_is_that_of_a_linear_layer() -> None:
    torch.manual_seed(0)
    call = gemm.matmul_call(3, 5, 7, "fp32", CPU)
    torch.manual_seed(0)
    a, b = torch.randn(3, 7), torch.randn(5, 7)
    assert torch.equal(call(), a @ b.t())


def test_a_rate_is_two_m_n_k_over_the_time() -> None:
    row = gemm.time_matmul(16, 32, 64, "bf16", CPU, seconds=1e-4)
    assert row["teraflops"] == pytest.approx(2 * 16 * 32 * 64 / row["seconds"] / 1e12)


def test_a_tf32_measurement_leaves_the_switch_as_it_was() -> None:
    before = torch.get_float32_matmul_precision()
    gemm.time_matmul(8, 8, 8, "tf32", CPU, seconds=1e-4)
    assert torch.get_float32_matmul_precision() == before


def test_shapes_of_a_layer_are_those_of_the_model() -> None:
    assert gemm.layer_shapes(family("llama-3.1-8b")) == {
        "query, key, value": (6144, 4096),
        "attention output": (4096, 4096),
        "mlp up": (14336, 4096),
        "mlp down": (4096, 14336),
        "head": (128256, 4096),
    }


def test_a_sweep_grows_in_equal_steps() -> None:
    widths = [row["n"] for row in gemm.width_sweep(CPU, seconds=1e-4)]
    assert {b - a for a, b in itertools.pairwise(widths)} == {32}


def test_attention_by_kernel_names_the_chosen_one() -> None:
    rows = list(attention.attention_rows(CPU, seconds=1e-4, widths=(32,)))
    assert {row["backend"] for row in rows} == {"flash", "math"}
    assert {row["backend"] for row in rows if row["is_chosen"]} == {"flash"}
    row = rows[0]
    work = 2 * row["batch"] * row["heads"] * row["sequence"] ** 2 * row["head_width"]
    assert row["forward_teraflops"] == pytest.approx(work / row["forward_seconds"] / 1e12)
    assert row["backward_teraflops"] == pytest.approx(2.5 * work / row["backward_seconds"] / 1e12)


def test_a_kernel_that_does_not_exist_here_is_an_error_row() -> None:
    row = attention.time_attention("cudnn", CPU, 64, 32, seconds=1e-4)
    assert row["error"] == "not available for this case"


def test_copies_count_what_is_read_and_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(copy.MEMORY_BYTES, "cpu", 1 << 16)
    rows = {row["what"]: row for row in copy.copy_rows(CPU, seconds=1e-4)}
    assert {what: row["bytes"] for what, row in rows.items()} == {
        "copy": 2 << 16,
        "write": 1 << 16,
        "read": 1 << 16,
    }
    assert rows["copy"]["gigabytes_per_second"] == pytest.approx(131072 / rows["copy"]["seconds"] / 1e9)


def test_random_tokens_are_a_dataset_with_frequent_and_rare_ones(tmp_path: Path) -> None:
    write_random_tokens(tmp_path / "tokens", vocab_size=1000, num_tokens=30_000)
    tokens = TokenFile.open(tmp_path / "tokens").tokens
    assert 30_000 <= len(tokens) < 30_100 and int(tokens.max()) < 1000
    # In proportion to 1 / (rank + 10), ranks below 100 are half of all: ln(110 / 10) / ln(1010 / 10) = 0.52.
    assert 0.49 < float((tokens < 100).mean()) < 0.55


def test_the_loader_is_timed(tmp_path: Path) -> None:
    write_random_tokens(tmp_path / "tokens", vocab_size=1000, num_tokens=30_000)
    rows = list(storage.data_rows(CPU, seconds=1e-3, path=tmp_path / "tokens", sequences=(64,)))
    assert [(row["documents"], row["batch_tokens"]) for row in rows] == [("joined", 512), ("separate", 512)]
    assert all(row["tokens_per_second"] == pytest.approx(512 / row["seconds"]) for row in rows)


def comm_here() -> list[dict]:
    return list(comm.comm_rows(this_world(), seconds=1e-4, sizes=(4096,)))


def test_every_collective_is_timed_on_two_ranks(ranks: RankPool) -> None:
    first, second = ranks.run(comm_here, 2)
    assert [row["kind"] for row in first] == list(comm.KINDS) == [row["kind"] for row in second]
    assert all("error" not in row and row["seconds"] > 0 for row in first)
    # The slowest rank's time is everyone's.
    assert [row["seconds"] for row in first] == [row["seconds"] for row in second]
    reduced = first[0]
    assert reduced["bus_gigabytes_per_second"] == pytest.approx(4096 / reduced["seconds"] / 1e9)


def axes_here() -> list[dict]:
    world = this_world()
    mesh = build_mesh(ParallelSpec(dp_shard=2, tp=2, zero=3), world)
    return list(comm.axis_rows(mesh, world, seconds=1e-4, sizes=(4096,), ranks_per_node=2))


def test_the_axes_of_a_mesh_are_timed_at_once(ranks: RankPool) -> None:
    first, *_ = ranks.run(axes_here, 4)
    assert [(row["axis"], row["ranks"], row["nodes"]) for row in first[:: len(comm.KINDS)]] == [
        ("dp_shard", 2, 2),  # ranks 0 and 2: another node
        ("tp", 2, 1),
    ]
    assert all("error" not in row for row in first)


def checkpoint_here(folder: Path) -> list[dict]:
    return list(storage.checkpoint_rows(CPU, folder=folder, sizes=(1 << 16,)))


def test_checkpoints_are_saved_verified_loaded_and_removed(ranks: RankPool, tmp_path: Path) -> None:
    (rows,) = ranks.run(checkpoint_here, 1, tmp_path)
    assert [row["what"] for row in rows] == ["save", "verify", "load"]
    assert all(row["megabytes_per_second"] == pytest.approx(65536 / row["seconds"] / 1e6) for row in rows)
    assert list(tmp_path.iterdir()) == []


def test_groups_double_up_to_all_ranks() -> None:
    assert comm.group_sizes(2, 2) == [2]
    assert comm.group_sizes(6, 6) == [2, 4, 6]
    assert comm.group_sizes(12, 3) == [2, 3, 4, 6, 8, 12]  # all ranks of 1, 2 and 4 nodes
