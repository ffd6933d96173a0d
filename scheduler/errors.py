"""The scheduler's error tree. Raised by `Scheduler`, `PagePool` and the queues; mapped to HTTP in `api/errors.py`.

SchedulerError
├── ConfigError            a SchedulerConfig that cannot work, or an unknown policy name
├── DuplicateRequestError  the request id is already live
├── QueueFullError         more waiting requests than `max_queue_size` (HTTP 429)
├── NeverFitsError         the request could not fit the pool or the context even alone (HTTP 400)
└── InvariantError         `check()` found broken bookkeeping, or a plan was committed out of order: a bug
"""


class SchedulerError(Exception):
    """Root of every error that the scheduler raises on purpose."""


class ConfigError(SchedulerError, ValueError):
    """A configuration that cannot work; the message names the key and the value."""


class DuplicateRequestError(SchedulerError):
    """A request with this id is already live."""


class QueueFullError(SchedulerError):
    """Admitting this would leave more than `max_queue_size` requests waiting."""


class NeverFitsError(SchedulerError):
    """The request needs more tokens or pages than exist; the message holds both numbers."""


class InvariantError(SchedulerError):
    """Bookkeeping that should be impossible. Always a bug in the scheduler or in its caller."""
