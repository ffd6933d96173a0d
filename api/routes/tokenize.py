"""`POST /tokenize` and `POST /detokenize`. Registered by `api/app.py`."""

from quart import Quart, Response, jsonify

from api.generation.service import off_loop_if_large, read_body, shared_service
from api.protocol.json_body import decode_object
from api.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from api.server_state import ServerState


def register(app: Quart, state: ServerState) -> None:
    """Add the routes to `app`."""
    service = shared_service(app, state)

    @app.post("/tokenize")
    async def tokenize() -> Response:
        """Ids of a text or a conversation, as the completion routes would make them."""
        body = await read_body()
        translator = service.translator

        def encode() -> list[int]:
            return translator.tokenize(TokenizeRequest.parse(decode_object(body)))

        tokens = await off_loop_if_large(len(body), encode)
        return jsonify({"tokens": tokens, "count": len(tokens), "max_model_len": state.engine.max_model_len})

    @app.post("/detokenize")
    async def detokenize() -> Response:
        """Text of ids, special tokens spelled out."""
        body = await read_body()
        translator = service.translator

        def decode() -> str:
            parsed = DetokenizeRequest.parse(decode_object(body))
            if parsed.model is not None:
                translator.check_model(parsed.model)
            return translator.detokenize(parsed.tokens)

        return jsonify({"prompt": await off_loop_if_large(len(body), decode)})
