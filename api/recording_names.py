"""Names that a recording uses in place of what clients sent: integers for the pages of prompts, labels for tenants.

Owned by the writer of `api/recording.py`. Everything is hashed with a random key that lives as long as the recording
and is written nowhere, so that nobody can test guesses of a prompt or a name against a recording.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from secrets import token_bytes

from scheduler.pages import DIGEST_BYTES, chain_digest, root_digest

# Pages that are known again at least. One takes about 250 bytes.
MIN_KNOWN_PAGES = 1 << 18


class RecordingNames:
    """Both methods are for one thread; neither blocks.

    Args:
        page_size: tokens of a page. max_known_pages: pages beyond which the least recently used is forgotten; one that
            comes again later has a new id.
        give_way: called for every page, so that a long prompt does not keep other threads from running.
    """

    def __init__(
        self, page_size: int, max_known_pages: int = MIN_KNOWN_PAGES, give_way: Callable[[], None] = lambda: None
    ):
        self.page_size = page_size
        self._max_known_pages = max_known_pages
        self._give_way = give_way
        self._key = token_bytes(DIGEST_BYTES)
        self._known: OrderedDict[bytes, int] = OrderedDict()
        self._num_ids = 0

    def pages(self, prompt_token_ids: Sequence[int], salt: str | None) -> list[int]:
        """An id for each page of a prompt, in order; mutates.

        Ids are equal exactly where the scheduler's prefix cache could share the page: where salt and tokens agree from
        the start to the end of a full page. A last page that is not full has an id of its own.
        """
        digests = self._digests(prompt_token_ids, salt)
        ids = [self._id_of(digest) for digest in digests]
        # The head of a chain is used last, so that it is not forgotten before its tail.
        for digest in reversed(digests):
            self._known.move_to_end(digest)
        while len(self._known) > self._max_known_pages:
            self._known.popitem(last=False)
        if len(digests) * self.page_size < len(prompt_token_ids):
            ids.append(self._new_id())
        return ids

    def tenant(self, tenant: str) -> str:
        """A label that is equal for equal tenants."""
        data = tenant.encode("utf-8", "surrogatepass")
        return "tenant-" + blake2b(data, digest_size=6, key=self._key, person=b"tenant").hexdigest()

    def _digests(self, prompt_token_ids: Sequence[int], salt: str | None) -> list[bytes]:
        """The scheduler's chain of digests, begun with the key."""
        size = self.page_size
        parent = blake2b(root_digest(salt), digest_size=DIGEST_BYTES, key=self._key, person=b"recording").digest()
        digests = []
        for end in range(size, len(prompt_token_ids) + 1, size):
            parent = chain_digest(parent, prompt_token_ids[end - size : end])
            digests.append(parent)
            self._give_way()
        return digests

    def _id_of(self, digest: bytes) -> int:
        known = self._known.get(digest)
        if known is None:
            known = self._known[digest] = self._new_id()
        return known

    def _new_id(self) -> int:
        self._num_ids += 1
        return self._num_ids - 1
