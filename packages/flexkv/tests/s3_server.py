# SPDX-License-Identifier: Apache-2.0
"""moto's S3 server in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request

BUCKET = "blocks-of-engines"
KEY, SECRET = "AKIDFORTESTSONLY", "a-secret-that-no-log-may-show"


class S3Server:
    """Started by `start`, on a port of its own.

    Attributes:
        environ: what a client needs to find it.
    """

    def __init__(self) -> None:
        self.port = 0
        self._process = self._launch()
        self._request("PUT", f"/{BUCKET}")

    @property
    def environ(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ALLOW_HTTP": "true",
        }

    def check_credentials(self, check: bool) -> None:
        """From now on nobody's credentials are right, or everybody's."""
        self._request("POST", "/moto-api/reset-auth", b"0" if check else b"1000000000")

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def restart(self) -> None:
        """At the same address, without what it held."""
        self._process = self._launch()
        self._request("PUT", f"/{BUCKET}")

    def _launch(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [
                *(sys.executable, "-c", "from moto.server import main; main()"),
                *("-H", "127.0.0.1", "-p", str(self.port)),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "NO_COLOR": "1"},
            text=True,
        )
        assert process.stderr is not None
        for line in process.stderr:
            found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
            if found:
                self.port = int(found[1])
                return process
        raise AssertionError("moto's server has ended")

    def _request(self, method: str, path: str, data: bytes | None = None) -> None:
        url = f"http://127.0.0.1:{self.port}{path}"
        plain = {"Content-Type": "text/plain"}
        request = urllib.request.Request(url, data=data, headers=plain, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()
