"""Blocks of modules that are not ours: found where lists of alike modules are, or named by a pattern."""

import pytest
from torch import nn

from meshwright.errors import SpecError
from meshwright.modules.blocks import find_blocks


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)


class Stage(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(Block(width), Block(width))


def _model(**children: nn.Module) -> nn.Module:
    model = nn.Module()
    for name, child in children.items():
        model.add_module(name, child)
    return model


def test_one_list():
    model = _model(embed=nn.Embedding(3, 4), layers=nn.ModuleList([Block(), Block(), Block()]))
    assert list(find_blocks(model)) == ["layers.0", "layers.1", "layers.2"]


def test_alike_members_between_others():
    model = nn.Sequential(nn.Embedding(3, 4), Block(), Block(), nn.Linear(4, 3))
    assert list(find_blocks(model)) == ["1", "2"]


def test_several_lists():
    model = _model(
        encoder=_model(block=nn.ModuleList([Block(), Block()])), decoder=nn.Sequential(Block(), Block())
    )
    assert list(find_blocks(model)) == ["encoder.block.0", "encoder.block.1", "decoder.0", "decoder.1"]


def test_stages_of_other_widths_are_looked_into():
    model = _model(stages=nn.ModuleList([Stage(4), Stage(8)]))
    assert list(find_blocks(model)) == [
        f"stages.{stage}.layers.{layer}" for stage in (0, 1) for layer in (0, 1)
    ]


def test_one_level_is_looked_into():
    """Layers inside stages are the blocks, whatever lists of convolutions they hold."""
    deep = [_model(layers=nn.Sequential(Stage(width), Stage(2 * width))) for width in (4, 8)]
    found = find_blocks(_model(stages=nn.ModuleList(deep)))
    assert list(found) == [f"stages.{stage}.layers.{layer}" for stage in (0, 1) for layer in (0, 1)]


def test_equal_modules_with_lists_inside_are_blocks_themselves():
    """Such as transformer blocks that hold a list of experts."""
    model = _model(layers=nn.ModuleList([Stage(4), Stage(4)]))
    assert list(find_blocks(model)) == ["layers.0", "layers.1"]


def test_bare_layers_are_no_blocks():
    assert find_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == {}
    assert find_blocks(nn.Linear(2, 2)) == {}


def test_a_module_used_twice_stands_once():
    block = Block()
    assert len(find_blocks(_model(layers=nn.ModuleList([block, block, Block()])))) == 2


def test_a_pattern_stays_within_one_part_of_a_name():
    model = _model(stages=nn.ModuleList([Stage(4), Stage(8)]))
    assert list(find_blocks(model, "stages.*")) == ["stages.0", "stages.1"]
    assert list(find_blocks(model, "stages.1.layers.*")) == ["stages.1.layers.0", "stages.1.layers.1"]


def test_a_pattern_that_matches_nothing_is_an_error():
    model = _model(layers=nn.ModuleList([Block(), Block()]))
    with pytest.raises(SpecError) as caught:
        find_blocks(model, "layer.*")
    assert "'layer.*' matches none of the" in caught.value.fact
    assert caught.value.where == "blocks"
    assert "layers.*" in caught.value.hint
