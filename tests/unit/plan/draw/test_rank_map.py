"""The rank map: places, groups and the decks' affinity figure."""

import json
import math
import xml.etree.ElementTree as ElementTree

import pytest

from meshwright.cli.main import run as run_command
from meshwright.plan.draw.rank_map import RankMap, coordinates, draw_svg, draw_text, group_of, nodes_spanned
from meshwright.spec import MESH_ORDER, ParallelSpec

# Two nodes of eight with tp 2, pp 4 and dp 2.
AFFINITY = ParallelSpec(tp=2, pp=4, dp_replicate=2)
MIXED = ParallelSpec(pp=2, dp_replicate=2, dp_shard=2, zero=3, cp=2, tp=2, ep=4)


def test_the_affinity_figure():
    drawn = RankMap(AFFINITY, ranks_per_node=8)
    assert [coordinates(AFFINITY, rank)["pp"] for rank in drawn.ranks_of_node(0)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [coordinates(AFFINITY, rank)["tp"] for rank in drawn.ranks_of_node(1)] == [0, 1] * 4
    assert group_of(AFFINITY, 0, "tp") == [0, 1]
    assert group_of(AFFINITY, 5, "dp_replicate") == [5, 7]
    assert group_of(AFFINITY, 1, "pp") == [1, 5, 9, 13]
    assert nodes_spanned(drawn, "tp") == 1
    assert nodes_spanned(drawn, "pp") == 2


@pytest.mark.parametrize("axis", [*MESH_ORDER, "ep"])
def test_groups_of_an_axis_part_the_world(axis):
    degree = getattr(MIXED, axis)
    groups = {tuple(group_of(MIXED, rank, axis)) for rank in range(MIXED.num_ranks)}
    assert all(len(group) == degree for group in groups)
    assert sorted(rank for group in groups for rank in group) == list(range(MIXED.num_ranks))
    for group in groups:
        assert [coordinates(MIXED, rank)[axis] for rank in group] == list(range(degree))


def test_every_place_is_taken_once():
    places = {tuple(coordinates(MIXED, rank)[axis] for axis in MESH_ORDER) for rank in range(MIXED.num_ranks)}
    assert len(places) == math.prod(getattr(MIXED, axis) for axis in MESH_ORDER)


def test_the_text_names_nodes_and_spans():
    text = draw_text(RankMap(AFFINITY, ranks_per_node=8))
    assert "16 ranks on 2 x 8: pp 4 x dp_replicate 2 x tp 2" in text
    assert "inside a node" in text and "across 2 nodes" in text
    assert "more nodes" in draw_text(RankMap(ParallelSpec(dp_replicate=128), ranks_per_node=8))


def test_the_picture_has_a_box_for_every_rank():
    picture = ElementTree.fromstring(draw_svg(RankMap(AFFINITY, ranks_per_node=8)))
    texts = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert [text for text in texts if text and text.startswith("rank ")] == [f"rank {i}" for i in range(16)]


def test_the_verb_gives_json(tmp_path, capsys):
    run_file = tmp_path / "run.yaml"
    run_file.write_text(
        "model: llama-3.2-1b\nparallel: {tp: 2, dp_replicate: 2}\nschedule: {num_steps: 1}\n"
        "data: {synthetic: {}, sequence_length: 128, batch_sequences: 2}\n"
    )
    assert run_command(["show", "mesh", str(run_file), "--per-node", "2", "--json"]) == 0
    ranks = json.loads(capsys.readouterr().out)["ranks"]
    assert [(place["node"], place["dp_replicate"], place["tp"]) for place in ranks] == [
        (0, 0, 0),
        (0, 0, 1),
        (1, 1, 0),
        (1, 1, 1),
    ]
