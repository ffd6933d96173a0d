"""The closed lattice of step shapes. `model/runner.py` compiles exactly these and picks the least that fits."""

from collections.abc import Iterable
from dataclasses import dataclass

from model.staging import StepLayout

# A product with one row takes a naive path on the CPU, 10 times slower than two; below four nothing more is saved.
LEAST_SINGLE_ROWS = 4
LEAST_ROWS = 8
SMALL_PREFILL = 64


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

    Rows are padded to powers of two up to the slots. Steps of one-token rows have as many tokens as rows; other steps
    pad tokens to powers of two and halves between them.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_pages: int

    def layouts(self) -> tuple[StepLayout, ...]:
        """Every layout: one-token rows first, and in both kinds those that cost least first."""
        single = [StepLayout(rows, rows, self.max_pages, True) for rows in self._row_sizes()]
        mixed = [
            StepLayout(tokens, rows, self.max_pages, False)
            for tokens in self._token_sizes()
            for rows in self._mixed_row_sizes(tokens)
        ]
        return (*single, *mixed)

    def by_need(self) -> tuple[StepLayout, ...]:
        """Every layout in the order in which a starting server should have them; compiling one takes seconds.

        The first is small and holds every step whose tokens `limit_of` bounds: a server can start with it alone. Then a
        lone request's decode, the largest step, a full batch's decode; the rest only saves padding.
        """
        layouts = self.layouts()
        single = [layout for layout in layouts if layout.single_token_rows]
        mixed = [layout for layout in layouts if not layout.single_token_rows]
        first = next((x for x in mixed if x.num_rows >= self.max_num_seqs and x.num_tokens >= SMALL_PREFILL), mixed[-1])
        return tuple(dict.fromkeys((first, single[0], mixed[-1], single[-1], *layouts)))

    def limit_of(self, layouts: Iterable[StepLayout]) -> int:
        """The most tokens of a step that one of `layouts` holds whatever its rows are; 0 if there is none."""
        most = min(self.max_num_seqs, self.max_num_batched_tokens)
        return max((x.num_tokens for x in layouts if not x.single_token_rows and x.num_rows >= most), default=0)

    def _row_sizes(self) -> tuple[int, ...]:
        return _doubling(LEAST_SINGLE_ROWS, self.max_num_seqs)

    def _token_sizes(self) -> tuple[int, ...]:
        largest = max(self.max_num_batched_tokens, LEAST_ROWS)
        sizes = {s for s in _doubling(2 * LEAST_ROWS, largest) if s <= largest} | {largest}
        sizes |= {s + s // 2 for s in sizes if s >= SMALL_PREFILL and s + s // 2 < largest}
        return tuple(sorted(sizes))

    def _mixed_row_sizes(self, num_tokens: int) -> tuple[int, ...]:
        most = min(max(self.max_num_seqs, LEAST_ROWS), num_tokens)
        return (LEAST_ROWS, most) if most > LEAST_ROWS and num_tokens <= SMALL_PREFILL else (most,)
