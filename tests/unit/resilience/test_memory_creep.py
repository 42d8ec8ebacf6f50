"""Memory that only grows is warned of, once; memory that goes up and down is not."""

from meshwright.resilience.memory_creep import MemoryCreep

GIB = 2**30


def test_steady_growth_is_warned_of_once():
    creep = MemoryCreep()
    found = [creep.look(4 * GIB + step * GIB // 8) for step in range(12)]
    assert [index for index, text in enumerate(found) if text] == [7]
    assert found[7] is not None and "from 4.0 GiB to 4.9 GiB" in found[7]


def test_small_growth_and_memory_that_is_freed_are_usual():
    small, uneven = MemoryCreep(), MemoryCreep()
    assert not any(small.look(4 * GIB + step * GIB // 100) for step in range(20))
    assert not any(uneven.look(4 * GIB + (step % 3) * GIB) for step in range(20))
    assert MemoryCreep().look() is None
