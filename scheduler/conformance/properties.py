"""The properties that every policy must have, each by name. Called by `check_policy` with drawn scripts.

Each takes a way to build the policy, a configuration and a script (or a stream), plays it, and raises Violation, whose
message says in words what the policy did wrong. Anything else that comes out of a run was raised by the policy, or by
the scheduler because of it.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from scheduler.config import SchedulerConfig
from scheduler.conformance.player import Player, tokens_alone
from scheduler.conformance.scripts import Script, Stream
from scheduler.conformance.watch import Violation
from scheduler.errors import InvariantError
from scheduler.plan import StepPlan
from scheduler.policies.base import Policy, final_length
from scheduler.request import Request

Build = Callable[[], Policy]
"""Makes a new policy object: one object belongs to one run."""


@dataclass(frozen=True, slots=True)
class Property:
    """One property.

    Attributes:
        promise: what a policy that has it does, in words.
        check_script, check_stream: one of them is given. Raises Violation.
        aborts: whether the scripts that are drawn for it abort requests.
    """

    promise: str
    check_script: Callable[[Build, SchedulerConfig, Script], None] | None = None
    check_stream: Callable[[Build, SchedulerConfig, Stream], None] | None = None
    aborts: bool = True


def _limit(player: Player) -> int:
    """Steps in which everything that is live must end: twenty times its tokens, computed one at a time."""
    return 100 + 20 * sum(map(final_length, player.live))


# -- conservation -----------------------------------------------------------------------------------------------------


def conservation(build: Build, config: SchedulerConfig, script: Script) -> None:
    """`Scheduler.check` holds after every operation, and every plan keeps the limits."""
    player = Player(script, config, build(), after_plan=_plan_keeps_limits, after_operation=_bookkeeping_holds)
    player.play()
    if player.finish(_limit(player)) and player.scheduler.pages.num_in_use:
        raise Violation(f"everything has ended, and {player.scheduler.pages.num_in_use} pages are still in use")


def _bookkeeping_holds(player: Player) -> None:
    queue = player.watch.queue
    for request in player.waiting:
        if queue is not None and request.request_id not in queue:
            raise Violation(f"{request.request_id} was given to the policy's queue, and is not in it")
    try:
        player.scheduler.check()
    except InvariantError as error:
        raise Violation(f"the bookkeeping is broken: {error}") from error


def _plan_keeps_limits(player: Player, plan: StepPlan) -> None:
    config = player.scheduler.config
    names = [row.request_id for row in plan.rows]
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise Violation(f"{twice[0]} is planned twice in step {plan.step_id}")
    slots = [row.slot for row in plan.rows]
    if len(set(slots)) < len(slots) or not all(0 <= slot < config.max_num_seqs for slot in slots):
        raise Violation(
            f"step {plan.step_id} uses slots {slots}; there are {config.max_num_seqs}, one for each request"
        )
    if plan.num_tokens > config.max_num_batched_tokens:
        raise Violation(f"step {plan.step_id} has {plan.num_tokens} tokens of {config.max_num_batched_tokens}")


# -- work conservation ------------------------------------------------------------------------------------------------


def work_conservation(build: Build, config: SchedulerConfig, script: Script) -> None:
    """Nobody waits while there is room for whoever waits, and no step is empty while somebody could run."""
    player = Player(script, config, build(), after_plan=_nothing_lies_idle)
    player.play()
    player.finish(_limit(player))


def _nothing_lies_idle(player: Player, plan: StepPlan) -> None:
    if plan.preempted:
        return  # what that makes free goes to newcomers in the next plan
    waiting = ", ".join(request.request_id for request in player.waiting)
    if not plan.rows and not player.num_in_flight and player.live:
        who = f"{waiting} wait" if waiting else "somebody runs"
        raise Violation(f"{player.now:g} s: nothing is planned and nothing is in flight, although {who}")
    if waiting and _everybody_fits(player, plan):
        raise Violation(
            f"{player.now:g} s: a slot, tokens and pages are left for each of those that wait ({waiting}), "
            "and the policy let nobody start"
        )


def _everybody_fits(player: Player, plan: StepPlan) -> bool:
    """Whether each of the waiting could start after this plan, with nothing taken from the prefix cache."""
    config, running = player.scheduler.config, player.running
    free_slots = min(config.max_num_seqs, config.max_num_batched_tokens) - len(running)
    # One that runs without a row waits for a page that comes back when the step in flight ends.
    spare_tokens = config.max_num_batched_tokens - plan.num_tokens - (len(running) - len(plan.rows))
    return free_slots > 0 and spare_tokens > 0 and all(_fits(player, head, running) for head in player.waiting)


def _fits(player: Player, head: Request, running: list[Request]) -> bool:
    eviction, page_size = player.policy.eviction, player.scheduler.config.page_size
    others = [request for request in running if not (eviction.evicts and eviction.may_evict(head, request))]
    spare = player.scheduler.pages.num_available - -(-head.num_known_tokens // page_size)
    return spare >= 0 and player.policy.capacity.fits(spare, head, others, page_size)


# -- completion and starvation ----------------------------------------------------------------------------------------


def completion(build: Build, config: SchedulerConfig, script: Script) -> None:
    """Once nothing arrives any more, every request ends within a bounded number of steps."""
    player = Player(script, config, build())
    player.play()
    limit = _limit(player)
    if not player.finish(limit):
        names = ", ".join(request.request_id for request in player.live)
        raise Violation(f"nothing arrives any more, and {names} did not end within {limit} steps")


def starvation(build: Build, config: SchedulerConfig, stream: Stream) -> None:
    """Nobody waits for ever while others keep coming, at slightly less than what can be served."""

    def nobody_waits_long(player: Player, plan: StepPlan) -> None:
        for request in player.waiting:
            waited = round((player.now - request.queued_at) / script.seconds_per_step)
            if waited > longest:
                raise Violation(
                    f"{request.request_id} has waited {waited} steps under a load of less than what can be served; "
                    f"at most {longest} are allowed (a policy that starves by design skips `starvation`)"
                )

    script, longest = stream.script(), stream.longest_wait
    Player(script, config, build(), quick=True, after_plan=nobody_waits_long).play()


# -- determinism ------------------------------------------------------------------------------------------------------


def determinism(build: Build, config: SchedulerConfig, script: Script) -> None:
    """The same script gives the same plans, with two policy objects that were built apart."""
    players = [Player(script, config, build()) for _ in range(2)]
    for player in players:
        player.play()
        player.finish(_limit(player))
    first, second = (player.plans for player in players)
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            raise Violation(
                f"the same script was planned in two ways: in plan {index + 1} first {_in_words(one)}, "
                f"then {_in_words(other)}; a policy must not draw from global generators, nor keep state outside itself"
            )
    if len(first) != len(second):
        raise Violation(f"the same script took {len(first)} plans once, and {len(second)} the second time")


def _in_words(plan: StepPlan) -> str:
    rows = ", ".join(f"{row.request_id} ({row.num_tokens} tokens)" for row in plan.rows) or "nothing"
    return rows + (f" with {', '.join(plan.preempted)} put back" if plan.preempted else "")


# -- preemption -------------------------------------------------------------------------------------------------------


def preemption(build: Build, config: SchedulerConfig, script: Script) -> None:
    """Nobody may put back itself, nobody starts only to be put back at once, and nobody takes turns with another."""
    by_newcomer: Counter[tuple[str, str]] = Counter()
    for_pages: Counter[str] = Counter()

    def count(player: Player, plan: StepPlan) -> None:
        _nobody_evicts_itself(player)
        for entry in player.watch.put_back:
            name, newcomer = entry.request_id, entry.newcomer
            if name in player.watch.started:
                raise Violation(f"{name} started and was put back for {newcomer} in the same plan")
            if newcomer is None:
                for_pages[name] += 1
                continue
            by_newcomer[name, newcomer] += 1
            if by_newcomer[name, newcomer] > 1 and by_newcomer[newcomer, name] > 1:
                raise Violation(f"{name} and {newcomer} put each other back again and again")
        _few_are_put_back(player, by_newcomer, for_pages)

    player = Player(script, config, build(), after_plan=count)
    player.play()
    player.finish(_limit(player))


def _nobody_evicts_itself(player: Player) -> None:
    eviction = player.policy.eviction
    for request in player.running if eviction.evicts else ():
        if eviction.may_evict(request, request):
            raise Violation(f"`may_evict` lets {request.request_id} put itself back")


def _few_are_put_back(player: Player, by_newcomer: Counter[tuple[str, str]], for_pages: Counter[str]) -> None:
    """Newcomers: twice for each request there is. Pages: a request asks for one only when it has drawn a page full."""
    count, page_size = len(player.requests), player.scheduler.config.page_size
    most_for_pages = 4 * sum(1 + -(-request.max_new_tokens // page_size) for request in player.requests)
    if for_pages.total() > most_for_pages:
        raise Violation(
            f"{count} requests were put back {for_pages.total()} times for want of pages; {most_for_pages} are enough"
        )
    most = 2 + 2 * count + for_pages.total()
    for name in {victim for victim, _ in by_newcomer}:
        times = sum(number for (victim, _), number in by_newcomer.items() if victim == name)
        if times > most:
            raise Violation(f"{name} was put back {times} times by newcomers, although only {count} requests ever came")


# -- requests and their tokens ----------------------------------------------------------------------------------------


def purity(build: Build, config: SchedulerConfig, script: Script) -> None:
    """No call of the policy changes a request."""
    player = Player(script, config, build(), compares=True)
    player.play()
    player.finish(_limit(player))


def tokens(build: Build, config: SchedulerConfig, script: Script) -> None:
    """Every request draws the tokens that it would draw alone; an aborted one a beginning of them."""
    player = Player(script, config, build())
    player.play()
    player.finish(_limit(player))
    for index, request in enumerate(player.requests):
        name, outputs = request.request_id, player.outputs[request.request_id]
        wanted = tokens_alone(player.specifications[index].request(index))
        if outputs != wanted[: len(outputs)]:
            raise Violation(f"{name} drew {outputs}; alone it draws {wanted}")
        event = player.last_events.get(name)
        if event is not None and event.finish_reason in ("stop", "length") and outputs != wanted:
            raise Violation(f"{name} ended after {outputs}; alone it draws {wanted}")


PROPERTIES: dict[str, Property] = {
    "conservation": Property("loses no request and no page, and keeps slots and budget", conservation),
    "work_conservation": Property("lets somebody start while there is room for whoever waits", work_conservation),
    "completion": Property("lets everything end once nothing arrives any more", completion),
    "starvation": Property("lets nobody wait for ever under a load that can be served", check_stream=starvation),
    "determinism": Property("plans the same script in the same way every time", determinism),
    "preemption": Property("puts nobody back for itself, in turns, or without bound", preemption, aborts=False),
    "purity": Property("does not change requests", purity),
    "tokens": Property("makes every request draw the tokens that it draws alone", tokens),
}
