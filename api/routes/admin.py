"""Routes for operators who hold an admin key: `GET /admin/scheduler/requests/{id}`. Registered by `api/app.py`."""

from dataclasses import asdict
from typing import Any

from quart import Quart, Response, jsonify

from api.protocol.errors import NotFoundError
from api.server_state import ServerState
from scheduler.decisions import Explanation


def register(app: Quart, server: ServerState) -> None:
    """Add the routes to `app`."""

    @app.get("/admin/scheduler/requests/<request_id>")
    async def explain(request_id: str) -> Response:
        """Why the choices of a request wait or were put back; by `X-Request-Id`, or by the id in the answer."""
        engine = server.engine
        engine_ids = server.calls.find(request_id)
        explanations = [found for found in map(engine.explain, engine_ids) if found is not None]
        if not explanations:
            raise NotFoundError(
                "No such request is known; those that ended are forgotten after a while.", code="unknown_request"
            )
        stats = engine.stats().scheduler
        return jsonify(
            {
                "id": request_id,
                "policy": server.config.scheduler_config.waiting_queue_policy,
                "num_running": stats.num_running,
                "num_waiting": stats.num_waiting,
                "pages_in_use": stats.pages_in_use,
                "num_pages": stats.num_pages,
                "choices": [_as_json(index, found) for index, found in enumerate(explanations)],
            }
        )


def _as_json(index: int, explanation: Explanation) -> dict[str, Any]:
    values = asdict(explanation)
    del values["request_id"]
    # Engine ids mean nothing to anybody outside; how many go before it is what counts.
    values["num_ahead"] = None if explanation.position is None else explanation.position - 1
    del values["ahead"]
    started = explanation.decisions[0].time if explanation.decisions else 0.0
    values["decisions"] = [
        {"seconds": round(decision.time - started, 6), "decision": decision.kind.value, "reason": decision.reason}
        for decision in explanation.decisions
    ]
    return {"index": index} | values
