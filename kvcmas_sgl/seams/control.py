"""Seam: SGLang's HTTP server. Two routes of our own, under SGLang's rules for keys.

``GET /kvcmas/stats``      the cache's totals, as in ``/server_info``, without the newest reports. Needs what
                           ``/server_info`` needs: the API key, where the server has one.
``POST /kvcmas/settings``  changes `kvcmas_sgl.switches`. Needs what SGLang's own control routes need: the admin key,
                           where the server has one, else the API key.

Both answer ``{"ranks": [...]}`` with one entry for each data-parallel rank. SGLang's control messages carry them.
"""

from __future__ import annotations

import json
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from sglang.srt.managers.io_struct import SetInternalStateReq
from sglang.srt.utils.auth import AuthLevel, auth_level

from kvcmas_sgl.config import ConfigError
from kvcmas_sgl.seams.scheduler import STATE_KEY
from kvcmas_sgl.switches import check, to_numbers

STATS, SETTINGS = "/kvcmas/stats", "/kvcmas/settings"


def add_routes() -> None:
    """Add the routes to SGLang's application; does nothing twice."""
    from sglang.srt.entrypoints.http_server import app

    if all(getattr(route, "path", None) != STATS for route in app.routes):
        app.add_api_route(STATS, stats, methods=["GET"])
        app.add_api_route(SETTINGS, settings, methods=["POST"])


async def stats() -> JSONResponse:
    """Totals and the edge table of every rank."""
    states = await _states()
    if not all(states):
        return _error(500, "the totals could not be read: the server's log says why.")
    return JSONResponse({"ranks": [{name: state[name] for name in state if name != "recent"} for state in states]})


@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def settings(request: Request) -> JSONResponse:
    """Change what can be changed; answers what holds now."""
    try:
        values = check(json.loads(await request.body()))
    except ConfigError as error:
        return _error(400, str(error))
    except (ValueError, RecursionError):
        return _error(400, "the body is no JSON, but must be an object with mode, max_kl or both.")
    updated = await _manager().set_internal_state(SetInternalStateReq(server_args=to_numbers(values)))
    if not all(updated):
        return _error(500, f"the settings were refused by {updated.count(False)} of {len(updated)} schedulers.")
    return JSONResponse({"ranks": [state.get("settings") for state in await _states()]})


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message}}, status_code=status)


def _manager() -> Any:
    from sglang.srt.entrypoints.http_server import get_global_state

    return get_global_state().tokenizer_manager


async def _states() -> list[dict[str, Any]]:
    return [state.get(STATE_KEY, {}) for state in await _manager().get_internal_state()]
