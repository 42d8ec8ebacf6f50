"""No garbage collection during steps; the setting from before is restored after them."""

import gc

import pytest

from meshwright.train.gc_control import collect_garbage, gc_paused


def test_nothing_is_collected_inside_and_the_collector_is_as_before_after() -> None:
    assert gc.isenabled()
    with pytest.raises(ValueError), gc_paused():
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

    with gc_paused():
        Ring()
        assert not freed
        collect_garbage()
        assert freed
