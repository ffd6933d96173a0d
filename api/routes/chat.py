"""`POST /v1/chat/completions`: a conversation in, the assistant's next turn out. Registered by `api/app.py`."""

from quart import Quart, Response, request

from api.generation.answer import answer
from api.generation.choice import ChoiceRules
from api.generation.service import off_loop_if_large, read_body, shared_service
from api.generation.shapes import ChatShape
from api.protocol.chat import ChatRequest
from api.protocol.json_body import decode_object
from api.request_context import request_context
from api.server_state import ServerState
from api.translate import GenerationTask


def register(app: Quart, state: ServerState) -> None:
    """Add the route to `app`."""
    service = shared_service(app, state)

    @app.post("/v1/chat/completions")
    async def chat_completions() -> Response:
        """Answer a conversation, `n` times."""
        data = await read_body()
        translator = service.translator

        def translate() -> tuple[ChatRequest, list[GenerationTask]]:
            parsed = ChatRequest.parse(decode_object(data))
            return parsed, translator.chat_tasks(parsed)

        body, tasks = await off_loop_if_large(len(data), translate)
        rules = [_rules(body, task) for task in tasks]
        shape = ChatShape(service.names if body.logprobs else None)
        return await answer(service, tasks, rules, body, shape, request_context(request.scope))


def _rules(body: ChatRequest, task: GenerationTask) -> ChoiceRules:
    return ChoiceRules(
        index=task.index,
        prompt_index=task.prompt_index,
        prompt_token_ids=task.prompt_token_ids,
        echo_text=task.prompt_text,
        wants_logprobs=task.logprobs is not None,
        stop_strings=task.stop,
        min_tokens=task.min_tokens,
        starts_text=not body.continue_final_message,
    )
