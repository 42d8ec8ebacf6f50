"""Merged layers, and where a value was set."""

from meshwright.spec.origin import Layer, Origin, layer_of

FILE = Origin("file", "run.yaml:3")
COMMAND = Origin("command line")


def test_mappings_merge_and_anything_else_replaces():
    lower = layer_of({"a": {"b": 1, "c": 2}, "d": {"e": 3}}, FILE)
    both = lower.overridden_by(layer_of({"a": {"c": 5}, "d": None}, COMMAND))
    assert both.tree == {"a": {"b": 1, "c": 5}, "d": None}
    assert both.origin_of(("a", "b")) == FILE
    assert both.origin_of(("a", "c")) == COMMAND
    assert both.origin_of(("d", "e")) == COMMAND


def test_the_lower_layer_is_left_as_it_was():
    lower = layer_of({"a": {"b": 1}}, FILE)
    lower.overridden_by(layer_of({"a": {"b": 2}}, COMMAND))
    assert lower.tree == {"a": {"b": 1}}


def test_has_only_what_was_set():
    layer = layer_of({"a": {"b": None, "c": {}}}, FILE)
    assert layer.has(("a", "b")) and layer.has(("a", "c"))
    assert not layer.has(("a", "d")) and not layer.has(("a", "b", "x")) and not layer.has(("a", "c", "x"))


def test_without_forgets_a_value_and_its_origin():
    layer = layer_of({"a": {"b": 1, "c": 2}}, FILE).without(("a", "b"))
    assert layer.tree == {"a": {"c": 2}}
    assert layer.origin_of(("a", "b")) == Origin("default")
    assert layer.without(("a",)).tree == {}


def test_an_origin_in_words():
    assert (str(FILE), FILE.where) == ("file run.yaml:3", "run.yaml:3")
    assert (str(COMMAND), COMMAND.where) == ("command line", "command line")
    assert (str(Origin("default")), Layer().origin_of(("x",))) == ("default", Origin("default"))
