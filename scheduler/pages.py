"""Pages of KV: who holds them, which hold a known prefix, which may be taken. Owned by `Scheduler`.

A page is in exactly one place: free (nothing worth keeping), cached (nobody holds it, but its content is indexed and
may be shared again; least recently used goes first), held (reference count > 0), or in quarantine (nobody holds it, but
a step in flight can still touch it). A page in quarantine may be shared again if its content is indexed; it may not be
handed out for new content before the step is committed.

A full page is found again by a chained hash: BLAKE2b over the page's tokens, keyed with the digest of the page before
it; the chain starts at a digest of the salt. 256 bits, so that nobody can make two prefixes meet on purpose.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from scheduler.errors import InvariantError

DIGEST_BYTES = 32


def root_digest(salt: str | None) -> bytes:
    """The start of a chain: requests share prefixes only if this is equal. No salt differs from every salt."""
    if salt is None:
        return bytes(DIGEST_BYTES)
    return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES, person=b"salt").digest()


def chain_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The digest of a full page whose predecessor has digest `parent`."""
    return blake2b(array("q", token_ids).tobytes(), digest_size=DIGEST_BYTES, key=parent, person=b"page").digest()


class PagePool:
    """`num_pages` pages with ids 1 … num_pages; page 0 is the device's sink and never handed out.

    Every method but `check` and the properties mutates; none blocks.
    """

    def __init__(self, num_pages: int, page_size: int, enable_prefix_reuse: bool = True):
        self.num_pages = num_pages
        self.page_size = page_size
        self.enable_prefix_reuse = enable_prefix_reuse
        self._references = [0] * (num_pages + 1)
        self._free = list(range(num_pages, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._last_touch: dict[int, int] = {}
        self._touched_by: dict[int, list[int]] = {}
        self._num_quarantined = 0
        self._committed_step = 0

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can hand out now, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_in_use(self) -> int:
        """Pages that requests hold, or that a step in flight may still touch."""
        return self.num_pages - self.num_available

    @property
    def num_quarantined(self) -> int:
        """Pages that wait for a step in flight."""
        return self._num_quarantined

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` pages with one reference each; cached pages are evicted if need be.

        Raises:
            InvariantError: fewer are available; the caller must ask `num_available` first.
        """
        if count > self.num_available:
            raise InvariantError(f"{count} pages wanted, {self.num_available} available")
        pages = []
        for _ in range(count):
            page = self._free.pop() if self._free else self._evict()
            self._references[page] = 1
            pages.append(page)
        return pages

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """The pages of the longest indexed chain. Takes no reference."""
        pages = []
        for digest in digests:
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def num_cached(self, pages: Iterable[int]) -> int:
        """How many of these pages count as available now, and would not after `share`."""
        return sum(page in self._cached for page in pages)

    def num_unheld(self, pages: Iterable[int]) -> int:
        """How many of these pages nobody holds, whether cached or in quarantine."""
        return sum(self._references[page] == 0 for page in pages)

    def share(self, pages: Iterable[int]) -> None:
        """Take one more reference to indexed pages, held, cached or quarantined."""
        for page in pages:
            if self._references[page] == 0:
                if page in self._cached:
                    del self._cached[page]
                else:
                    self._num_quarantined -= 1
            self._references[page] += 1

    def register(self, page: int, digest: bytes) -> None:
        """Index a held page that is full and computed. The first page with a given content stays the indexed one."""
        if self.enable_prefix_reuse and digest not in self._page_of and page not in self._digest_of:
            self._page_of[digest] = page
            self._digest_of[page] = digest

    def release(self, pages: Sequence[int], last_step: int = 0) -> None:
        """Drop one reference to each page, given in order of position; `last_step` is the last step that had them.

        Pages without a reference become cached or free, once every step that had them is committed.
        """
        in_flight = last_step > self._committed_step
        # Deepest page first, so that of one chain the tail is evicted before the head that it needs.
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page] < 0:
                raise InvariantError(f"page {page} was released more often than held")
            # Noted for pages that others hold too: they may let go before the step ends.
            if in_flight and self._last_touch.get(page, 0) < last_step:
                self._last_touch[page] = last_step
                self._touched_by.setdefault(last_step, []).append(page)
            if self._references[page] == 0:
                if page in self._last_touch:
                    self._num_quarantined += 1
                else:
                    self._rest(page)

    def end_quarantine(self, step: int) -> None:
        """A step has been committed, and so have all before it: pages that waited for it can be used again."""
        self._committed_step = step
        for page in self._touched_by.pop(step, ()):
            if self._last_touch[page] == step:
                del self._last_touch[page]
                if self._references[page] == 0:
                    self._num_quarantined -= 1
                    self._rest(page)

    def _rest(self, page: int) -> None:
        if page in self._digest_of:
            self._cached[page] = None
        else:
            self._free.append(page)

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        del self._page_of[self._digest_of.pop(page)]
        return page

    def check(self) -> None:
        """Raise InvariantError unless every page is in exactly one place and the index is consistent."""
        held = [page for page in range(1, self.num_pages + 1) if self._references[page] > 0]
        quarantined = [page for page in self._last_touch if self._references[page] == 0]
        everywhere = sorted([*self._free, *self._cached, *held, *quarantined])
        if everywhere != list(range(1, self.num_pages + 1)):
            raise InvariantError("a page is lost, or in two places")
        if self._num_quarantined != len(quarantined):
            raise InvariantError("the number of quarantined pages is off")
        if any(step <= self._committed_step for step in self._touched_by):
            raise InvariantError("pages wait for a step that is committed already")
        if any(page not in self._digest_of for page in self._cached) or any(p in self._digest_of for p in self._free):
            raise InvariantError("cached pages must be indexed, free ones must not")
        if {page: digest for digest, page in self._page_of.items()} != self._digest_of:
            raise InvariantError("the prefix index disagrees with itself")

    def num_references(self, page: int) -> int:
        """How many requests hold the page."""
        return self._references[page]

    def free_pages(self) -> tuple[int, ...]:
        """Pages whose content is worth nothing: neither held, nor cached, nor in quarantine. For tests."""
        return tuple(self._free)

    def reference_counts(self) -> dict[int, int]:
        """Page → references, for pages that have any. For `Scheduler.check`."""
        return {page: count for page, count in enumerate(self._references) if count}
