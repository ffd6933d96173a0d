"""The lattice of step shapes: what a server starts with holds every step that it may then plan."""

import pytest

from model.buckets import BucketLattice


@pytest.mark.parametrize("max_num_seqs", [1, 4, 8, 32, 100, 256])
@pytest.mark.parametrize("max_num_batched_tokens", [1, 16, 64, 100, 512])
def test_the_first_layout_holds_every_step_within_its_limit(max_num_seqs, max_num_batched_tokens):
    lattice = BucketLattice(max_num_seqs, max_num_batched_tokens, 8)
    first = lattice.by_need()[0]
    limit = min(lattice.limit_of((first,)), max_num_batched_tokens)
    most_rows = min(max_num_seqs, max_num_batched_tokens)
    assert limit >= most_rows
    assert set(lattice.by_need()) == set(lattice.layouts())
    assert len(lattice.by_need()) == len(lattice.layouts())
    for rows in range(1, most_rows + 1):
        for tokens in range(rows, limit + 1):
            assert first.holds(tokens, rows, False)
        assert first.holds(rows, rows, True)


def test_all_layouts_together_hold_the_largest_step():
    lattice = BucketLattice(32, 512, 8)
    assert lattice.limit_of(lattice.layouts()) == 512
    assert lattice.limit_of(lattice.by_need()[:1]) == 64
    assert lattice.limit_of(()) == 0
