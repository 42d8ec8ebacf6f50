"""No collection inside the steps, the old order after them."""

import gc

import pytest

from meshwright.train.gc_control import collect_young, collector_off


def test_nothing_is_collected_inside_and_the_collector_is_as_before_after() -> None:
    assert gc.isenabled()
    with pytest.raises(ValueError), collector_off():
        assert not gc.isenabled() and gc.get_freeze_count() > 0
        raise ValueError
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_cycles_made_inside_are_freed_when_asked() -> None:
    freed = []

    class Ring:
        def __init__(self) -> None:
            self.own = self

        def __del__(self) -> None:
            freed.append(True)

    with collector_off():
        Ring()
        assert not freed
        collect_young()
        assert freed
