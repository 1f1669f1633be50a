"""/health, /ready and /metrics: what a watchman asks.

Owns: the meaning of healthy (P35). /health asks the engine, not the web process: a step must have ended lately, or,
where there was nothing to do, a probe of one token must succeed now. Called by app.py's routes.
"""

from __future__ import annotations

from starlette.responses import JSONResponse, Response

from ...ipc.errors import InvariantError, UnisonError
from ...ipc.types import SamplingParams
from .metrics import CONTENT_TYPE
from .policy import as_json, live_of
from .replies import unless_disconnected
from .routing import Call, Network

PROBE_IDS = (0,)
PROBE_PARAMS = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, seed=0)


async def health(network: Network, call: Call) -> Response:
    """GET /health: 200 while the engine makes progress, else 503 with the reason."""
    settings, backend = network.settings, network.backend
    if not backend.is_connected:
        return _bad("worker_lost", "the engine isn't there")
    try:
        status = await backend.status(settings.status_deadline_s)
        facts = {"step": status.step, "step_age_s": status.step_age_s, "loop_age_s": status.loop_age_s}
        if status.is_paused:
            return JSONResponse({"status": "paused", "is_probed": False} | facts)
        if status.step_age_s <= settings.progress_age_s and status.step > 0:
            return JSONResponse({"status": "ok", "is_probed": False} | facts)
        probe = backend.generate(PROBE_IDS, PROBE_PARAMS, deadline_s=settings.status_deadline_s)
        await unless_disconnected(call.request.receive, probe)
        return JSONResponse({"status": "ok", "is_probed": True} | facts)
    except InvariantError:
        raise
    except UnisonError as error:
        return _bad("stalled", str(error))


async def ready(network: Network, _call: Call) -> Response:
    """GET /ready: 200 once requests can be served."""
    if not network.backend.is_connected:
        return _bad("worker_lost", "the engine isn't there")
    try:
        status = await network.backend.status(network.settings.status_deadline_s)
    except InvariantError:
        raise
    except UnisonError as error:
        return _bad("not_ready", str(error))
    if status.is_paused:
        return _bad("paused", "the engine is paused; POST /v1/policy/resume")
    return JSONResponse(
        {"status": "ready", "model": network.model_name, "live": as_json(live_of(network, status))}
    )


async def metrics(network: Network, _call: Call) -> Response:
    """GET /metrics: Prometheus text; without the engine's numbers while it doesn't answer."""
    status = None
    if network.backend.is_connected:
        try:
            status = await network.backend.status(network.settings.status_deadline_s)
        except InvariantError:
            raise
        except UnisonError:
            pass
    network.metrics.on_status(status, live_of(network, status).ordinal if status else None)
    return Response(network.metrics.text(), media_type=CONTENT_TYPE)


def _bad(status: str, reason: str) -> Response:
    return JSONResponse({"status": status, "reason": reason}, 503, headers={"retry-after": "1"})
