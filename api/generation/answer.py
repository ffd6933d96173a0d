"""A running call to an HTTP answer, streamed or whole. Called by the two completion routes.

Until the first token nothing is sent, so whatever goes wrong before it is an ordinary error answer. Whatever ends the
answer (the last token, an error, a client that has gone in any state) ends its engine requests: besides the handler and
the generator, the task that serves the request closes the call when it is done, as it may be cancelled between both.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

from quart import Response

from api.generation.call import Choice, GenerationCall
from api.generation.choice import ChoiceRules
from api.generation.chunks import DONE, ChunkWriter, error_event
from api.generation.service import GenerationService
from api.generation.shapes import AnswerShape, Deltas, Heading
from api.generation.wire import PromptTokensDetails, Usage
from api.protocol.common import SamplingFields
from api.request_context import RequestContext
from api.translate import GenerationTask
from scheduler import FinishReason

STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

# A stream whose client does not read is cut off so long after its last token was due.
UNREAD_STREAM_SECS = 30.0

# A token's logprobs take some 50 µs to encode, with 20 alternatives.
MAX_TOKENS_ON_LOOP = 200

# A call of more choices is logged with the reasons that occur, each once.
MAX_LOGGED_REASONS = 16


async def answer(
    service: GenerationService,
    tasks: Sequence[GenerationTask],
    rules: Sequence[ChoiceRules],
    body: SamplingFields,
    shape: AnswerShape,
    context: RequestContext,
) -> Response:
    """Run a call and return its answer, or the beginning of it if it is streamed. Raises ApiError.

    Args:
        tasks, rules: of the same choices. body: for what concerns the answer as a whole.
        context: filled in for the log.
    """
    serving_task = asyncio.current_task()
    assert serving_task is not None
    if context.tenant is not None:  # a key cannot be forged, the field `user` can
        for task in tasks:
            task.request.tenant = context.tenant
    call = service.start_call(tasks, rules, body.stream_interval if body.stream else None)
    serving_task.add_done_callback(lambda _: _close(call, context))
    context.admitted = True
    context.stream = body.stream
    context.num_choices = len(tasks)
    context.priority = tasks[0].request.priority
    heading = Heading(shape.id_prefix + secrets.token_hex(12), int(time.time()), body.model)
    service.state.calls.note((context.request_id, heading.answer_id), [task.request.request_id for task in tasks])
    try:
        if not body.stream:
            await call.wait_until_over()
            deltas = _take(call.choices)
            whole = await _off_loop_if_long(deltas, lambda: shape.whole(heading, deltas, usage_of(call)))
            _close(call, context)
            return Response(whole, content_type="application/json")
        await call.wait()
        if call.failure is not None:
            raise call.failure
    except BaseException:
        _close(call, context)
        raise
    include_usage = body.stream_options is not None and body.stream_options.include_usage
    events = _events(call, shape.chunks(heading), include_usage, context)
    response = Response(events, content_type="text/event-stream; charset=utf-8", headers=STREAM_HEADERS)
    response.timeout = service.state.limits.request_timeout_secs + UNREAD_STREAM_SECS
    return response


def usage_of(call: GenerationCall) -> Usage:
    """Token counts so far. A prompt counts once; its cached tokens are those that its first choice found."""
    firsts = {choice.prompt_index: choice for choice in reversed(call.choices)}.values()
    prompt_tokens = sum(choice.num_prompt_tokens for choice in firsts)
    completion_tokens = sum(choice.stream.num_tokens for choice in call.choices)
    cached_tokens = sum(choice.stream.num_cached_tokens for choice in firsts)
    total = prompt_tokens + completion_tokens
    return Usage(prompt_tokens, completion_tokens, total, PromptTokensDetails(cached_tokens))


async def _events(
    call: GenerationCall, writer: ChunkWriter, include_usage: bool, context: RequestContext
) -> AsyncIterator[bytes]:
    """The server-sent events; everything that is there at a time in one piece."""
    try:
        while True:
            is_over = call.is_over
            deltas = _take(call.take_due())
            text = await _off_loop_if_long(deltas, partial(_chunks, writer, deltas))
            if is_over:
                yield (text + _ending(call, writer, include_usage, context)).encode()
                return
            if text:
                yield text.encode()
            await call.wait()
    finally:
        _close(call, context)


def _take(choices: Sequence[Choice]) -> Deltas:
    return [(choice.index, choice.stream.take()) for choice in choices]


def _chunks(writer: ChunkWriter, deltas: Deltas) -> str:
    return "".join([writer.chunk(index, delta) for index, delta in deltas])


async def _off_loop_if_long[Result](deltas: Deltas, encode: Callable[[], Result]) -> Result:
    """Logprobs of many tokens take long to encode: in a thread then, so that the streams of others go on meanwhile."""
    num_tokens = sum([len(delta.tokens) for _, delta in deltas])
    return await asyncio.to_thread(encode) if num_tokens > MAX_TOKENS_ON_LOOP else encode()


def _ending(call: GenerationCall, writer: ChunkWriter, include_usage: bool, context: RequestContext) -> str:
    if call.failure is not None:
        context.error_code = call.failure.code
        return error_event(call.failure)
    return (writer.frame.usage(usage_of(call)) if include_usage else "") + DONE


def _close(call: GenerationCall, context: RequestContext) -> None:
    """End the call's requests and note for the log what it came to. Idempotent."""
    if call.is_closed:
        return
    call.close()
    usage = usage_of(call)
    context.prompt_tokens = usage.prompt_tokens
    context.completion_tokens = usage.completion_tokens
    context.cached_tokens = usage.prompt_tokens_details.cached_tokens
    context.first_token_at = call.first_token_at
    reasons = [(choice.stream.finish_reason or FinishReason.ABORT).value for choice in call.choices]
    context.finish_reasons = tuple(reasons if len(reasons) <= MAX_LOGGED_REASONS else sorted(set(reasons)))
