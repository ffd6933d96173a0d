"""`POST /v1/completions`: text in, text out; several prompts, several choices each. Registered by `api/app.py`."""

from quart import Quart, Response, request

from api.generation.answer import answer
from api.generation.choice import ChoiceRules
from api.generation.service import off_loop_if_large, read_body, shared_service
from api.generation.shapes import CompletionShape
from api.protocol.completions import CompletionRequest
from api.protocol.json_body import decode_object
from api.request_context import request_context
from api.server_state import ServerState
from api.translate import GenerationTask


def register(app: Quart, state: ServerState) -> None:
    """Add the route to `app`."""
    service = shared_service(app, state)

    @app.post("/v1/completions")
    async def completions() -> Response:
        """Continue each prompt `n` times."""
        data = await read_body()
        translator = service.translator

        def translate() -> tuple[CompletionRequest, list[GenerationTask]]:
            parsed = CompletionRequest.parse(decode_object(data))
            return parsed, translator.completion_tasks(parsed)

        body, tasks = await off_loop_if_large(len(data), translate)
        rules = [_rules(body, task) for task in tasks]
        shape = CompletionShape(service.names if body.logprobs is not None else None)
        return await answer(service, tasks, rules, body, shape, request_context(request.scope))


def _rules(body: CompletionRequest, task: GenerationTask) -> ChoiceRules:
    given = body.prompt[task.prompt_index]
    return ChoiceRules(
        index=task.index,
        prompt_index=task.prompt_index,
        prompt_token_ids=task.prompt_token_ids,
        echo_text=given if body.echo and isinstance(given, str) else None,
        echo_token_ids=task.prompt_token_ids if body.echo else (),
        wants_logprobs=task.logprobs is not None,
        stop_strings=task.stop,
        min_tokens=task.min_tokens,
        starts_text=body.echo,
    )
