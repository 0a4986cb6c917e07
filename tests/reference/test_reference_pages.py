"""The page allocator: every page is free or held by exactly one, whatever the order of calls."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdtransfer.engines.reference.pages import OutOfPages, PageAllocator, pages_for


@settings(max_examples=100, deadline=None)
@given(total=st.integers(1, 20), steps=st.lists(st.tuples(st.booleans(), st.integers(0, 8)), max_size=40))
def test_pages_are_never_lost_or_given_twice(total: int, steps: list[tuple[bool, int]]) -> None:
    allocator = PageAllocator(total)
    held: list[tuple[int, ...]] = []
    for take, n in steps:
        if take:
            if n > total - sum(map(len, held)):
                with pytest.raises(OutOfPages):
                    allocator.allocate(n)
            else:
                held.append(allocator.allocate(n))
        elif held:
            allocator.free(held.pop(n % len(held)))
        everywhere = [p for pages in held for p in pages]
        assert len(everywhere) == len(set(everywhere)) and set(everywhere) <= set(range(total))
        assert allocator.available == total - len(everywhere)
    for pages in held:
        allocator.free(pages)
    assert sorted(allocator.allocate(total)) == list(range(total))


def test_a_page_freed_twice_is_refused_and_changes_nothing() -> None:
    allocator = PageAllocator(4)
    pages = allocator.allocate(2)
    allocator.free(pages)
    with pytest.raises(ValueError, match="freed twice"):
        allocator.free(pages)
    with pytest.raises(ValueError, match="freed twice"):
        PageAllocator(4).free([0])
    assert allocator.available == 4


def test_a_freed_page_rests_before_it_is_used_again() -> None:
    allocator = PageAllocator(4)
    first = allocator.allocate(1)
    allocator.free(first)
    assert first[0] not in allocator.allocate(3)


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_pages_for_rounds_up(tokens: int, pages: int) -> None:
    assert pages_for(tokens, 16) == pages
