"""`onefold serve`: serve an exported detector over HTTP, without torch."""

import importlib.util
import os
import socket
import sys

from onefold.cli.console import print_lines
from onefold.cli.jobs import Serve
from onefold.core.arguments import check_integer
from onefold.errors import MissingExtraError

MOST_CONNECTIONS = 256
LOCAL = ("127.0.0.1", "::1", "localhost")


def run(job: Serve) -> int:
    """Serve until the process is stopped."""
    from onefold.serve.app import Limits, make_app
    from onefold.serve.model import ExportedModel

    if importlib.util.find_spec("uvicorn") is None:
        raise MissingExtraError('uvicorn is not installed. Run pip install "onefold[serve]".')
    import uvicorn

    check_integer(job.port, "port", 0, 65535)
    body = check_integer(job.max_body, "max_body") * 2**20
    rows, workers = check_integer(job.max_rows, "max_rows"), os.cpu_count() or 1
    model = ExportedModel(job.model, threads=1)  # one request per thread uses the cores better
    app = make_app(model, Limits(body=body, rows=rows, workers=workers), alpha=job.alpha, state=job.state)
    family = socket.AF_INET6 if ":" in job.host else socket.AF_INET
    # With this protocol number, asyncio turns Nagle's algorithm off; socket.create_server would cost 40 ms a request.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((job.host, job.port))
        listener.listen(MOST_CONNECTIONS)
        port = listener.getsockname()[1]
        host = f"[{job.host}]" if family == socket.AF_INET6 else job.host
        print_lines(f"Serving {job.model} on http://{host}:{port} (/score, /metrics, /health). Stop with Ctrl-C.")
        if job.host not in LOCAL:
            print_lines("Other machines can reach this server, and it asks for no password.")
        sys.stdout.flush()
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, server_header=False, limit_concurrency=MOST_CONNECTIONS,
            timeout_graceful_shutdown=10,
        )  # fmt: skip
        try:
            uvicorn.Server(config).run(sockets=[listener])
        except KeyboardInterrupt:  # uvicorn has finished the open requests, and repeats the signal
            return 0
    return 0
