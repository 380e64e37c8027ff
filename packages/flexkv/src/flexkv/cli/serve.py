# SPDX-License-Identifier: Apache-2.0
"""Run one cache for all engines of a node that run the same model. Engines find it by the setting
`service=DIR`, and share its host memory and its lower tiers. It runs until SIGTERM or Ctrl-C.

The settings of the cache (`cpu_cache_gb`, `eviction_policy`, `ssd_cache_gb`, ...) come from the
environment or the file that FLEXKV_CONFIG_PATH names, as in an engine. Each model gets host memory
of `cpu_cache_gb` and disk space of `ssd_cache_gb`, or what a file with --pools names for it.

Only this user's engines are served. `flexkv stat DIR`, `top DIR` and `clear service` ask it;
with --http it also serves /metrics and /health. Exit code 2 if another service runs in DIR.
"""

from __future__ import annotations

import argparse
import signal
import socket
from dataclasses import replace

from flexkv.cli.common import Command, read_settings
from flexkv.operators.door import listen_at
from flexkv.preflight.checks import check_start
from flexkv.preflight.host import refuse_memory
from flexkv.service.pool_sizes import read_pools
from flexkv.service.server import NodeServer
from flexkv.settings import configure_logging
from flexkv.settings.without_effect import engines_settings, report_without_effect
from flexkv.tiers.disk.files import reason_of
from flexkv.types.errors import ConfigError

_LOCAL = "127.0.0.1"
_MOST_PORT = 65535

FLUSH_SECONDS = 10.0
"""Seconds for which lower tiers may write waiting blocks at the end. Service managers wait longer
before they kill."""

_IGNORED = engines_settings("a service runs no engine: set it for the engines")
"""The settings that have no effect in a service, with the reason."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory",
        metavar="DIR",
        nargs="?",
        help="directory for the service's socket, of mode 0700, created if missing; default: the "
        "setting `service`",
    )
    parser.add_argument(
        "--http",
        metavar="[HOST:]PORT",
        help="serve /metrics and /health by HTTP at this address, to anyone who reaches it; "
        "default host: 127.0.0.1; port 0 for any free port; default: no address",
    )
    parser.add_argument(
        "--pools",
        metavar="FILE",
        help="YAML or JSON file with the memory and the disk space of each model; default: the "
        "settings' sizes for each. Changes take effect when the service starts again",
    )


def _run(args: argparse.Namespace) -> int:
    config = read_settings()
    root = args.directory or config.service
    if not root:
        raise ConfigError("serve needs DIR, or the setting service; allowed: a directory")
    configure_logging(config)
    config = replace(config, service=None)
    report_without_effect(config, _IGNORED)
    check_start(config, meets=False)
    pools = None if args.pools is None else read_pools(args.pools, config)
    for size in () if pools is None else (pools.total, pools.other, *pools.named.values()):
        refuse_memory(size.applied(config))
    figures = None if args.http is None else _listen(args.http)
    address = ""
    if figures is not None:
        host, port, *_ = figures.getsockname()
        host = f"[{host}]" if ":" in host else host
        address = f", and at http://{host}:{port} for /metrics and /health"
    server = NodeServer(root, config, figures, pools)
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda *_: server.stop())
    try:
        print(f"the service of FlexKV listens in {root}{address}", flush=True)
        server.run()
    finally:
        server.close(FLUSH_SECONDS)
    return 0


def _listen(text: str) -> socket.socket:
    """Listen at the address of --http."""
    host, _, port = text.rpartition(":")
    try:
        if not port.isascii() or not port.isdigit() or not int(port) <= _MOST_PORT:
            raise OSError(f"it has no port from 0 to {_MOST_PORT}")
        return listen_at(host.strip("[]") or _LOCAL, int(port))
    except OSError as error:
        raise ConfigError(
            f"--http is {text!r} on the command line, which cannot be used: {reason_of(error)}; "
            f"allowed: [HOST:]PORT of an address of this machine that no other process uses"
        ) from None


COMMAND = Command("serve", "run one cache for all engines of a node", __doc__, _add_arguments, _run)
