"""The page pool: conservation, sharing, eviction order, quarantine and the hash chain."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler import InvariantError, PagePool
from scheduler.pages import chain_digest, root_digest


def chain(*pages: Sequence[int], salt: str | None = None) -> list[bytes]:
    digests: list[bytes] = []
    for tokens in pages:
        digests.append(chain_digest(digests[-1] if digests else root_digest(salt), tokens))
    return digests


def held_chain(pool: PagePool, *pages: Sequence[int]) -> tuple[list[int], list[bytes]]:
    digests = chain(*pages)
    held = pool.allocate(len(pages))
    for page, digest in zip(held, digests, strict=True):
        pool.register(page, digest)
    return held, digests


def test_ids_are_one_to_num_pages_and_the_sink_is_never_handed_out():
    pool = PagePool(5, 4)
    assert sorted(pool.allocate(5)) == [1, 2, 3, 4, 5]
    with pytest.raises(InvariantError):
        pool.allocate(1)
    pool.check()


def test_releasing_more_often_than_held_is_an_error():
    pool = PagePool(2, 4)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(InvariantError, match="more often"):
        pool.release(pages)


def test_a_released_chain_is_found_again_and_shared():
    pool = PagePool(6, 2)
    pages, digests = held_chain(pool, (1, 2), (3, 4))
    pool.release(pages)
    assert pool.num_available == 6
    assert pool.find(digests) == pages
    assert pool.num_cached(pages) == 2
    pool.share(pages)
    pool.share(pages)
    assert pool.num_available == 4
    assert [pool.num_references(page) for page in pages] == [2, 2]
    pool.release(pages)
    pool.release(pages)
    pool.check()
    assert pool.num_in_use == 0


def test_least_recently_used_goes_first_and_of_one_chain_the_deepest():
    pool = PagePool(4, 2)
    old, old_digests = held_chain(pool, (1, 2), (3, 4))
    young, young_digests = held_chain(pool, (5, 6), (7, 8))
    pool.release(old)
    pool.release(young)
    pool.allocate(1)
    assert pool.find(old_digests) == old[:1]
    pool.allocate(1)
    assert pool.find(old_digests) == []
    assert pool.find(young_digests) == young
    pool.share(young)
    pool.release(young)
    pool.allocate(1)
    assert pool.find(young_digests) == young[:1]
    pool.check()


def test_free_pages_are_used_before_cached_ones():
    pool = PagePool(3, 2)
    pages, digests = held_chain(pool, (1, 2))
    pool.release(pages)
    pool.allocate(2)
    assert pool.find(digests) == pages


def test_the_first_page_of_equal_content_stays_in_the_index():
    pool = PagePool(4, 2)
    first, digests = held_chain(pool, (1, 2))
    second, _ = held_chain(pool, (1, 2))
    assert pool.find(digests) == first
    pool.release(second)
    assert pool.free_pages()[-1] == second[0]
    pool.release(first)
    assert pool.find(digests) == first
    pool.check()


def test_without_reuse_nothing_is_indexed():
    pool = PagePool(4, 2, enable_prefix_reuse=False)
    pages, digests = held_chain(pool, (1, 2))
    pool.release(pages)
    assert pool.find(digests) == []
    assert len(pool.free_pages()) == 4


def test_quarantine_lasts_until_the_step_is_committed():
    pool = PagePool(3, 2)
    pages = pool.allocate(3)
    pool.release(pages[:2], 7)
    assert (pool.num_available, pool.num_quarantined, pool.num_in_use) == (0, 2, 3)
    pool.end_quarantine(6)
    assert pool.num_available == 0
    pool.end_quarantine(7)
    assert (pool.num_available, pool.num_quarantined) == (2, 0)
    pool.release(pages[2:], 7)
    assert pool.num_available == 3, "a step that is committed touches nothing any more"
    pool.check()


def test_a_page_in_quarantine_can_be_shared_but_goes_back_there():
    pool = PagePool(2, 2)
    pages, digests = held_chain(pool, (1, 2))
    pool.release(pages, 7)
    assert pool.find(digests) == pages
    pool.share(pages)
    assert pool.num_quarantined == 0
    pool.release(pages)
    assert pool.num_quarantined == 1, "step 7 still reads it"
    pool.check()
    pool.end_quarantine(7)
    assert pool.num_available == 2
    pool.check()


def test_a_shared_page_waits_for_the_holder_that_left_first():
    pool = PagePool(1, 2)
    pages, _ = held_chain(pool, (1, 2))
    pool.share(pages)
    pool.release(pages, 7)
    pool.release(pages)
    assert (pool.num_quarantined, pool.num_available) == (1, 0)
    pool.end_quarantine(7)
    assert pool.num_available == 1


def test_chains_differ_by_salt_parent_and_token_boundaries():
    everything = [
        chain((1, 2)), chain((1, 2), salt="a"), chain((1, 2), salt=""), chain((1, 2), salt="b"), chain((2, 1)),
        chain((12,)), chain((1, 2, 0)), chain((1 + 2**32, 2)), chain((0, 0), (1, 2)),
    ]  # fmt: skip
    assert len({digests[-1] for digests in everything}) == len(everything)
    assert chain((1, 2))[0] == chain([1, 2])[0]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ahrsec"), st.integers(0, 9), st.integers(0, 9)), max_size=60))
def test_against_a_model_of_sets(script):
    """Holders, a step counter and an index, all kept the plain way."""
    pool = PagePool(8, 2)
    holders: list[list[int]] = []
    touched: dict[int, int] = {}
    committed, step = 0, 1
    contents = {number: chain((number, number))[0] for number in range(10)}
    for action, first, second in script:
        held = [page for pages in holders for page in pages]
        if action == "a" and 1 + first % 3 <= pool.num_available:
            pages = pool.allocate(1 + first % 3)
            assert not set(pages) & set(held), "a held page was handed out"
            assert all(touched.get(page, 0) <= committed for page in pages), "a page in quarantine was handed out"
            holders.append(pages)
        elif action == "h" and (pages := pool.find([contents[first]])):
            pool.share(pages)
            holders.append(pages)
        elif action in "rs" and holders:
            pages = holders.pop(first % len(holders))
            last_step = step if action == "s" else 0
            pool.release(pages, last_step)
            for page in pages:
                touched[page] = max(touched.get(page, 0), last_step)
        elif action == "e" and holders:
            pool.register(holders[first % len(holders)][0], contents[second])
        elif action == "c":
            committed, step = step, step + 1
            pool.end_quarantine(committed)
        held = [page for pages in holders for page in pages]
        assert pool.reference_counts() == {page: held.count(page) for page in set(held)}
        quarantined = {page for page, last in touched.items() if last > committed and page not in held}
        assert pool.num_quarantined == len(quarantined)
        assert pool.num_available == 8 - len(set(held)) - len(quarantined)
        pool.check()
