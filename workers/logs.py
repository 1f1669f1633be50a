"""Logs: one JSON object per line, with the process's name, so that a run's log can be read by people and programs.

Owns: the format. Secrets never reach it: what is logged is named field by field. Called once at the start of a process.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone

_STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime"}


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON; `extra` fields become fields."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON."""
        values = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "pid": record.process,
            "event": record.getMessage(),
            **{name: value for name, value in vars(record).items() if name not in _STANDARD},
        }
        if record.exc_info:
            values["traceback"] = self.formatException(record.exc_info)
        return json.dumps(values, default=str)


def setup_logging(process: str, level: str = "info") -> None:
    """Send this process's logs to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
