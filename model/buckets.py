"""The closed lattice of step shapes. `model/runner.py` compiles exactly these and picks the least that fits."""

from dataclasses import dataclass

from model.staging import StepLayout

LEAST_ROWS = 8


def _doubling(least: int, largest: int) -> tuple[int, ...]:
    """least, 2·least, … below `largest`, then `largest` itself (or `least` where that is greater)."""
    sizes = []
    size = least
    while size < largest:
        sizes.append(size)
        size *= 2
    return (*sizes, max(least, largest))


@dataclass(frozen=True, slots=True)
class BucketLattice:
    """Layouts for steps of at most `max_num_seqs` rows and `max_num_batched_tokens` tokens.

    Rows are padded to 8, 16, 32 … up to the slots (a product with one row takes a naive path on the CPU). Steps of
    one-token rows have as many tokens as rows; other steps pad tokens to powers of two and halves between them.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_pages: int

    def layouts(self) -> tuple[StepLayout, ...]:
        """Every layout, the smallest first."""
        return (
            *(StepLayout(r, r, self.max_pages, True) for r in self._row_sizes()),
            *(StepLayout(t, r, self.max_pages, False) for t in self._token_sizes() for r in self._mixed_row_sizes(t)),
        )

    def fit(self, num_tokens: int, num_rows: int, single_token_rows: bool) -> StepLayout:
        """The smallest layout that holds a step. ValueError when the step is larger than the lattice."""
        if single_token_rows:
            rows = _least(self._row_sizes(), num_rows)
            return StepLayout(rows, rows, self.max_pages, True)
        tokens = _least(self._token_sizes(), num_tokens)
        return StepLayout(tokens, _least(self._mixed_row_sizes(tokens), num_rows), self.max_pages, False)

    def _row_sizes(self) -> tuple[int, ...]:
        return _doubling(LEAST_ROWS, self.max_num_seqs)

    def _token_sizes(self) -> tuple[int, ...]:
        largest = max(self.max_num_batched_tokens, LEAST_ROWS)
        sizes = {s for s in _doubling(2 * LEAST_ROWS, largest) if s <= largest} | {largest}
        sizes |= {s + s // 2 for s in sizes if s >= 64 and s + s // 2 < largest}
        return tuple(sorted(sizes))

    def _mixed_row_sizes(self, num_tokens: int) -> tuple[int, ...]:
        rows = max(self.max_num_seqs, LEAST_ROWS)
        return tuple(sorted({LEAST_ROWS, min(rows, num_tokens)}))


def _least(sizes: tuple[int, ...], wanted: int) -> int:
    for size in sizes:
        if size >= wanted:
            return size
    raise ValueError(f"a step of {wanted} is larger than the largest bucket, {sizes[-1]}")
