"""The allocator's rules on sequences whose outcome is known."""

import random

from meshwright.rehearse.allocator import MIB, CachingAllocator, Request, replay


def test_requests_are_rounded_to_512_bytes():
    allocator = CachingAllocator()
    allocator.malloc(1)
    allocator.malloc(513)
    assert allocator.allocated_bytes == 512 + 1024
    assert allocator.reserved_bytes == 2 * MIB  # one small segment serves both


def test_segments_by_size():
    for request, reserved in [(MIB, 2), (MIB + 1, 20), (9 * MIB, 20), (10 * MIB, 10), (33 * MIB, 34)]:
        allocator = CachingAllocator()
        allocator.malloc(request)
        assert allocator.reserved_bytes == reserved * MIB


def test_a_freed_block_is_used_again_and_neighbours_join():
    allocator = CachingAllocator()
    first, second = allocator.malloc(8 * MIB), allocator.malloc(8 * MIB)
    allocator.free(first)
    allocator.free(second)
    allocator.malloc(18 * MIB)
    assert allocator.reserved_bytes == 20 * MIB


def test_the_smallest_block_that_is_large_enough_is_taken():
    allocator = CachingAllocator()
    large, small = allocator.malloc(60 * MIB), allocator.malloc(30 * MIB)
    allocator.free(large)
    allocator.free(small)
    allocator.malloc(30 * MIB)
    allocator.malloc(60 * MIB)
    assert allocator.reserved_bytes == 90 * MIB


def test_a_remainder_of_up_to_one_mebibyte_is_not_split_off():
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(30 * MIB))
    allocator.malloc(29 * MIB)
    assert allocator.allocated_bytes == 30 * MIB


def test_streams_do_not_share():
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(64 * MIB, stream=0))
    allocator.malloc(64 * MIB, stream=1)
    assert allocator.reserved_bytes == 128 * MIB


def test_fixed_segments_do_not_grow_and_expandable_ones_do():
    requests = [
        Request(0, 40 * MIB),
        Request(0, -40 * MIB),
        Request(1, 60 * MIB),
    ]
    assert replay(requests, is_expandable=False).reserved_bytes == 100 * MIB
    assert replay(requests, is_expandable=True).reserved_bytes == 60 * MIB


def test_the_free_end_of_an_expandable_segment_is_taken_last():
    """40 MiB fit into the 60 of the end and into the 80 before it: torch takes the 80, then all fit."""
    come = [Request(1, 80 * MIB), Request(2, 20 * MIB), Request(3, 60 * MIB)]
    gone = [Request(1, -1), Request(3, -1)]
    again = [Request(4, 40 * MIB), Request(5, 60 * MIB), Request(6, 40 * MIB)]
    assert replay(come + gone + again, is_expandable=True).reserved_bytes == 160 * MIB


def test_an_expandable_segment_finds_free_bytes_between():
    requests = [Request(0, 40 * MIB), Request(1, 40 * MIB), Request(0, -40 * MIB), Request(2, 30 * MIB)]
    allocator = replay(requests, is_expandable=True)
    assert allocator.reserved_bytes == 80 * MIB
    assert allocator.allocated_bytes == 70 * MIB


def test_nothing_is_lost_over_many_requests():
    for is_expandable in (False, True):
        allocator, held, expected = CachingAllocator(is_expandable=is_expandable), [], 0
        generator = random.Random(5)
        for _ in range(3000):
            if held and generator.random() < 0.5:
                size, handle = held.pop(generator.randrange(len(held)))
                allocator.free(handle)
                expected -= size
            else:
                size = generator.randrange(1, 64 * MIB)
                held.append((size, allocator.malloc(size)))
                expected += size
            assert expected <= allocator.allocated_bytes <= allocator.reserved_bytes
        for _, handle in held:
            allocator.free(handle)
        assert allocator.allocated_bytes == 0
