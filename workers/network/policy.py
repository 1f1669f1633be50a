"""/v1/policy: which policy versions there are, and, with the admin key, which one is live.

Called by app.py's routes. Versions are installed by the trainer, never over HTTP.
"""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse, Response

from ...ipc.messages import WorkerStatus
from ...ipc.types import PolicyVersion
from .routing import Call, Network


async def get_policy(network: Network, _call: Call) -> Response:
    """GET /v1/policy."""
    return JSONResponse(await _policy(network))


async def roll_back(network: Network, call: Call) -> Response:
    """POST /v1/policy/rollback."""
    live = await network.backend.rollback(call.fields["version"])
    return JSONResponse({"live": as_json(live)})


async def pin(network: Network, call: Call) -> Response:
    """POST /v1/policy/pin."""
    await network.backend.pin(call.fields["version"])
    return JSONResponse(await _policy(network))


async def unpin(network: Network, call: Call) -> Response:
    """POST /v1/policy/unpin."""
    await network.backend.unpin(call.fields["version"])
    return JSONResponse(await _policy(network))


async def pause(network: Network, _call: Call) -> Response:
    """POST /v1/policy/pause."""
    await network.backend.pause()
    return JSONResponse(await _policy(network))


async def resume(network: Network, _call: Call) -> Response:
    """POST /v1/policy/resume."""
    await network.backend.resume()
    return JSONResponse(await _policy(network))


def as_json(version: PolicyVersion) -> dict[str, Any]:
    """A version as HTTP tells it."""
    return {"version": version.ordinal, "digest": version.digest}


def live_of(network: Network, status: WorkerStatus) -> PolicyVersion:
    """The live version, by the worker's own account where it names one."""
    live = (entry.version for entry in status.versions if entry.state == "live")
    return next(live, network.backend.worker.live)


async def _policy(network: Network) -> dict[str, Any]:
    status = await network.backend.status(network.settings.status_deadline_s)
    return {
        "live": as_json(live_of(network, status)),
        "installed": [
            as_json(entry.version) | {"state": entry.state, "num_pins": entry.num_pins} for entry in status.versions
        ],
        "is_paused": status.is_paused,
    }
