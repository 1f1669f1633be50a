"""NetworkSettings: every constant of the HTTP server, with its unit and default.

Owns: the dataclass and its bounds. Built by whoever starts the server; read by every module of this package.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...ipc.errors import ConfigError

TOOL_FORMATS = ("auto", "hermes", "llama3")


@dataclass(frozen=True)
class NetworkSettings:
    """How the server behaves towards its clients."""

    model_name: str | None = None
    """Name under which the model is served; None takes the backend's."""
    api_keys: tuple[str, ...] = ()
    """Keys that clients have to show; with none, everybody may ask."""
    admin_key: str | None = None
    """Key for changes under /v1/policy; None forbids them."""
    max_concurrent: int = 256
    """Most generating requests at once; one more gets 429."""
    max_body_bytes: int = 8 * 2**20
    """Longest request body, in bytes; a longer one gets 413."""
    max_prompts: int = 256
    """Most prompts in one request to /v1/completions."""
    request_timeout_s: float | None = None
    """Longest time for one request, in seconds; then 408. None lets requests take their time."""
    retry_after_s: int = 1
    """What `Retry-After` says with 429 and 503, in seconds."""
    progress_age_s: float = 30.0
    """/health is bad when neither a step nor a probe has succeeded for so many seconds."""
    status_deadline_s: float = 5.0
    """Longest wait for the backend's status or probe, in seconds."""
    tool_format: str = "auto"
    """How tool calls are written: `hermes`, `llama3`, or `auto`, which reads it off the chat template."""

    def __post_init__(self) -> None:
        for name in ("max_concurrent", "max_body_bytes", "max_prompts", "retry_after_s"):
            if getattr(self, name) < 1:
                raise ConfigError(name, f"is {getattr(self, name)}; must be at least 1")
        for name in ("progress_age_s", "status_deadline_s", "request_timeout_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(name, f"is {value}; must be above 0")
        if self.tool_format not in TOOL_FORMATS:
            raise ConfigError("tool_format", f"is {self.tool_format!r}; must be one of {', '.join(TOOL_FORMATS)}")
        if any(not key for key in (*self.api_keys, *([] if self.admin_key is None else [self.admin_key]))):
            raise ConfigError("api_keys", "holds an empty key, which everybody would know; leave keys out instead")
