"""Logs of a daemon: one event a line, `event key=value ...`, as text or JSON, and never a flood.

An event that repeats (the same message template of the same logger) is written at most a few times in a while; what
was held back is counted in the next line of that event.
"""

import json
import logging
import logging.handlers
import os
import re
import time
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path

from tierfs.blocks.errors import ConfigError

_BURST = 10
_WINDOW_S = 10.0
_FILE_BYTES = 16 << 20
_FILES = 3
_EVENTS_MAX = 1000


class FloodFilter(logging.Filter):
    """Lets ``_BURST`` records of one event through in ``_WINDOW_S`` seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._events: dict[tuple[str, str], list[float]] = {}  # [start of the window, let through, held back]

    def filter(self, record: logging.LogRecord) -> bool:
        now = self._clock()
        if len(self._events) > _EVENTS_MAX:
            self._events.clear()
        event = self._events.setdefault((record.name, str(record.msg)), [now, 0, 0])
        if now - event[0] >= _WINDOW_S:
            if event[2]:
                record.msg = f"{record.msg} held_back={int(event[2])}"
            event[:] = [now, 0, 0]
        if event[1] >= _BURST:
            event[2] += 1
            return False
        event[1] += 1
        return True


class _LogFile(logging.handlers.RotatingFileHandler):
    """Whose new files have mode 0640: lines name models, also those in directories that others may not enter."""

    def _open(self) -> TextIOWrapper:
        def private(path: str, flags: int) -> int:
            return os.open(path, flags | os.O_CLOEXEC, 0o640)

        return open(self.baseFilename, self.mode, encoding=self.encoding, errors=self.errors, opener=private)  # type: ignore[return-value]


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """The event and its keys, from the template: ``event key=%s ...`` with its arguments in order."""
    template = str(record.msg)
    names = re.findall(r"(?:(\w+)=)?%(?!%)[-#0 +.\d]*[a-zA-Z]", template)
    arguments = record.args if isinstance(record.args, tuple) else ()
    fields: dict[str, object] = {}
    for name, value in zip(names, arguments, strict=False):
        if name and name not in ("time", "level", "logger", "message"):
            plain = value if isinstance(value, int | float | str | None) else str(value)
            fields[name] = value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else plain
    return {"event": template.split(" ", 1)[0], **fields}


def start(*, level: str, file: str | None, style: str) -> None:
    """Send all logs to a file that is rotated by size, or to stderr. Called once, before any thread starts.

    Raises ConfigError.
    """
    handler: logging.Handler
    if file:
        try:
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            handler = _LogFile(file, maxBytes=_FILE_BYTES, backupCount=_FILES)
        except OSError as error:
            raise ConfigError(f"cannot log to {file}: {error.strerror}; see log.file and state_dir") from error
    else:
        handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s")
    handler.setFormatter(JsonFormatter() if style == "json" else text)
    handler.addFilter(FloodFilter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
