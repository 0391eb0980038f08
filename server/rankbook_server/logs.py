"""Structured logs on standard error: JSON for machines, words for a terminal.

Nothing that a client sent as payload or token is ever logged.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, Literal, TextIO

import structlog

__all__ = ["LogFormat", "LogLevel", "setup_logs"]

LogFormat = Literal["auto", "json", "console"]
LogLevel = Literal["debug", "info", "warning", "error"]


def setup_logs(log_format: LogFormat, level: LogLevel, stream: TextIO | None = None) -> None:
    """Sets the whole process's logging up.

    Args:
        log_format: "auto" takes "console" on a terminal and "json" elsewhere.
        level: The least severe events that are written.
        stream: Where they go; standard error by default.
    """
    stream = stream or sys.stderr
    console = log_format == "console" or (log_format == "auto" and stream.isatty())
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if console:
        render: list[Any] = [structlog.dev.ConsoleRenderer(colors=stream.isatty())]
    else:
        render = [
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ]
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[*shared, *render],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(file=stream),
        cache_logger_on_first_use=True,
    )
    # What the libraries below us say goes the same way.
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(number, logging.WARNING))
