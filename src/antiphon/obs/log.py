"""Log lines: JSON for machines, colours for a terminal.

Owns how structlog is set up; whoever logs takes a logger by constructor. An event name says what
happened, fields say to whom; prompt and answer text never stands in a line. Libraries that log
through the standard library (uvicorn, websockets) are heard from WARNING on, in the same form.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO, TypeAlias

import structlog

Logger: TypeAlias = structlog.stdlib.BoundLogger


def configure_logging(*, level: str = "info", stream: TextIO | None = None) -> Logger:
    """Set up this process's logging and return its root logger. Called once, by a process's main."""
    out = stream if stream is not None else sys.stderr
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    renderer: structlog.typing.Processor
    if out.isatty():
        renderer = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        shared.remove(structlog.processors.format_exc_info)
    else:
        renderer = structlog.processors.JSONRenderer()
    _route_standard_library(shared, renderer, out)
    logger: Logger = structlog.wrap_logger(
        structlog.WriteLogger(out),
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(_number(level)),
        cache_logger_on_first_use=True,
    )
    return logger


def _route_standard_library(
    shared: list[structlog.typing.Processor], renderer: structlog.typing.Processor, out: TextIO
) -> None:
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)


def _number(level: str) -> int:
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        known = ", ".join(name.lower() for name in ("DEBUG", "INFO", "WARNING", "ERROR"))
        raise ValueError(f"unknown log level {level!r}: use one of {known}")
    return number
