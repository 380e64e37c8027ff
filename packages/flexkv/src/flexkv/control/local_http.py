# SPDX-License-Identifier: Apache-2.0
"""The port of an engine's door on this machine, for those who know a token."""

from __future__ import annotations

import os
import re
import stat
from typing import NamedTuple

from flexkv.settings import CacheConfig
from flexkv.types.errors import ConfigError

HOST = "127.0.0.1"
_MOST_BYTES = 4096
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{16,512}")


class LocalHttp(NamedTuple):
    """Where to answer by HTTP, and the token that a peer must send."""

    port: int
    token: str


def local_http(config: CacheConfig) -> LocalHttp | None:
    """What the settings say; None if no port is wanted.

    Raises:
        ConfigError: the file has no token, or others could read it.
    """
    port, path = config.control_port, config.control_token_file
    if port is None or path is None:
        return None  # settings that are read have both or none
    try:
        token = _read(path)
    except OSError as error:
        raise _refused(path, f"cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise _refused(path, "is no text") from None
    if not _TOKEN.fullmatch(token):
        raise _refused(path, "has no such token")
    return LocalHttp(port, token)


def _read(path: str) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise _refused(path, "is no file of this user")
        if status.st_mode & 0o077:
            raise _refused(path, f"has mode {status.st_mode & 0o777:o}, and others may read it")
        return os.read(fd, _MOST_BYTES).decode("ascii").strip()
    finally:
        os.close(fd)


def _refused(path: str, problem: str) -> ConfigError:
    return ConfigError(
        f"control_token_file {path!r} {problem}; allowed: a file of this user with mode 0600 that "
        "has a token of 16 to 512 letters, digits and ._~+/=-, as of `openssl rand -hex 32`"
    )
