"""`GET /v1/models` and `GET /v1/models/{id}`. Registered by `api/app.py`."""

from quart import Quart, Response, jsonify

from api.protocol.errors import NotFoundError
from api.server_state import ServerState


def register(app: Quart, state: ServerState) -> None:
    """Add the routes to `app`."""

    @app.get("/v1/models")
    async def list_models() -> Response:
        """The models that requests may name."""
        return jsonify({"object": "list", "data": [_card(state, name) for name in state.model_names]})

    # A Hugging Face id holds a slash, hence a path.
    @app.get("/v1/models/<path:model_id>")
    async def get_model(model_id: str) -> Response:
        """One of them."""
        if model_id not in state.model_names:
            raise NotFoundError("There is no such model here.", param="model", code="model_not_found")
        return jsonify(_card(state, model_id))


def _card(state: ServerState, name: str) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "twinmesh",
        "max_model_len": state.engine.max_model_len,
    }
