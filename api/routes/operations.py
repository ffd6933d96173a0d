"""Routes for operators and monitors: /health, /ready, /metrics, /version, /server_info, /openapi.json.

Registered by `api/app.py`. None of them needs a model, so that they answer while it is being loaded.
"""

import asyncio
import time
from functools import cache

from quart import Quart, Response, jsonify, request

from api import refusals
from api.config import REDACTED, ServerConfig
from api.server_state import ServerState
from api.version import VERSION, package_versions

RETRY_AFTER_SECS = 2


def register(app: Quart, server: ServerState) -> None:
    """Add the routes to `app`."""
    scraping = asyncio.Lock()

    @app.get("/health")
    async def health() -> Response:
        """Whether the process answers at all."""
        return jsonify({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        """Whether a generation request would be answered soon."""
        reason = server.not_ready_reason()
        if reason is not None:
            raise refusals.not_ready(reason, RETRY_AFTER_SECS)
        return jsonify({"status": "ready"})

    @app.get("/metrics")
    async def metrics() -> Response:
        """A Prometheus scrape; one at a time, in a thread, so that scraping does not hold up streams."""
        async with scraping:
            body, content_type = await asyncio.to_thread(server.metrics.render, request.headers.get("Accept", ""))
        return Response(body, content_type=content_type)

    @app.get("/version")
    async def version() -> Response:
        """The server's version."""
        return jsonify({"version": VERSION})

    @app.get("/server_info")
    async def server_info() -> Response:
        """What runs here, and how it is configured; no keys."""
        return jsonify(_server_info(server))

    @app.get("/openapi.json")
    async def openapi() -> Response:
        """The OpenAPI description."""
        return jsonify(_openapi())


@cache
def _openapi() -> dict[str, object]:
    from api.openapi import build

    return dict(build())


def _shown_config(config: ServerConfig) -> dict[str, object]:
    """The configuration without what is nobody's business: keys, and where a recording lies."""
    shown = config.redacted()
    if config.recording.path is not None:
        shown["recording"]["path"] = REDACTED
    return shown


def _server_info(server: ServerState) -> dict[str, object]:
    info: dict[str, object] = {
        "versions": package_versions(),
        "model": server.model_name or None,
        "device": server.facts.device or None,
        "ready": server.is_ready(),
        "not_ready_reason": server.not_ready_reason(),
        "uptime_seconds": round(time.monotonic() - server.started_at, 3),
        "open_requests": server.num_open_requests,
        "recording": server.recording is not None and server.recording.is_on,
        "shadow": None if server.shadow is None else {"policy": server.shadow.policy, "is_on": server.shadow.is_on},
        "config": _shown_config(server.config),
    }
    info |= {section: dict(values) for section, values in server.facts.details.items()}
    if server.is_attached:
        stats = server.engine.stats()
        info["engine"] = {
            "state": stats.state.value,
            "steps": stats.steps,
            "compilations": stats.compilations,
            "warm_up_is_complete": stats.warm_up_is_complete,
            "requests_running": stats.scheduler.num_running,
            "requests_waiting": stats.scheduler.num_waiting,
            "kv_pages_in_use": stats.scheduler.pages_in_use,
            "kv_pages": stats.scheduler.num_pages,
        }
    return info
