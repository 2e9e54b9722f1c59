"""Logs and metrics: JSON lines on stderr that carry the request id across hops, and a Prometheus endpoint.

Prompts, outputs and secrets never appear in a log line; ids, counts, lengths and times do.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import prometheus_client

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

request_id: ContextVar[str] = ContextVar("request_id", default="")

_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)

RPCS = prometheus_client.Counter(
    "flashmesh_rpcs_total", "Finished calls by method and status.", ["method", "status"]
)
RPC_SECONDS = prometheus_client.Histogram(
    "flashmesh_rpc_seconds",
    "Time of a call from first byte to last.",
    ["method"],
    buckets=_BUCKETS_S,
)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, service, request id, message, then the call's `extra`."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service
        self._standard = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

    def format(self, record: logging.LogRecord) -> str:
        """Formats a record."""
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname,
            "service": self._service,
            "message": record.getMessage(),
        }
        if current := request_id.get():
            line["request_id"] = current
        line |= {key: value for key, value in vars(record).items() if key not in self._standard}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def setup_logging(service: str, level: str) -> None:
    """Sends this process's logs to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("asyncio").setLevel(logging.WARNING)


def start_metrics(host: str, port: int) -> tuple[WSGIServer, int]:
    """Serves this process's metrics over HTTP on a thread; returns the server and its port."""
    server, _ = prometheus_client.start_http_server(port, addr=host)
    return server, server.server_port
