"""What the tests of policies share: policies by name, requests as the scheduler leaves them, orders of starting."""

from scheduler import Request, Scheduler, SchedulerConfig
from scheduler.policies import make_policy
from scheduler.policies.base import Policy
from scheduler.queues import WaitingQueue
from tests.scheduler.driver import Driver, make_request


def policy(name: str, config: SchedulerConfig | None = None, **options: object) -> Policy:
    fields = {} if config is None else {"preempt_running": config.preempt_running}
    return make_policy(SchedulerConfig(waiting_queue_policy=name, policy_options=options, **fields))


def request(sequence: int, length: int = 4, max_new_tokens: int = 8, **fields: object) -> Request:
    """A request that waits, as the scheduler would have left it."""
    made = make_request(f"r{sequence}", length, max_new_tokens)
    made.sequence = sequence
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def order_of(queue: WaitingQueue, now: float = 0.0) -> list[int]:
    order = []
    while (head := queue.peek(now)) is not None:
        order.append(head.sequence)
        assert queue.remove(head.request_id)
        queue.check()
    return order


def queued(chosen: Policy, *requests: Request, now: float = 0.0) -> list[int]:
    queue = chosen.order.make_queue()
    for waiting in requests:
        if chosen.charge is not None:
            chosen.charge.on_arrival(waiting, now)
        queue.push(waiting)
    return order_of(queue, now)


def started(name: str, *requests: Request, options: dict[str, object] | None = None, **fields: object) -> list[str]:
    """The order in which one slot serves requests that come at once."""
    config = SchedulerConfig(
        waiting_queue_policy=name,
        policy_options=options or {},
        max_num_seqs=1,
        page_size=4,
        max_model_len=256,
        **fields,  # type: ignore[arg-type]
    )
    driver = Driver(Scheduler(config))
    driver.add(*requests)
    driver.finish()
    driver.check_outputs()
    return [row.request_id for plan in driver.plans for row in plan.rows if row.starts]
