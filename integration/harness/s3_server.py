# SPDX-License-Identifier: Apache-2.0
"""moto's S3 server in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Mapping
from pathlib import Path

import obstore
from obstore.store import ObjectStore, S3Store

from integration.harness.bad_network import FAR, BadNetwork
from integration.harness.ports import hold_port
from integration.harness.store_process import StoreProcess

BUCKET = "blocks-of-engines"
WRONG = b"\xff" * 256
"""As numbers of a block, NaN: an engine that computed on them would give other tokens."""
KEY, SECRET = "AKIDFORTESTSONLY", "a-secret-that-no-log-may-show"


class S3Server(StoreProcess):
    """See `StoreProcess`. It has a port of its own, and starts again at the same one.

    Args:
        network: the server is at its far end, and reached over it; None for this machine.

    Attributes:
        environ: what a client needs to find it.
        port: of 127.0.0.1, at which clients reach it.
    """

    def __init__(self, network: BadNetwork | None = None) -> None:
        # Until the end: nobody may take the port while the server is killed.
        self._held = hold_port()
        self.port = 0
        self._own_port = self._held.getsockname()[1]
        self._network = network
        self._address = "127.0.0.1" if network is None else FAR
        self._log = tempfile.NamedTemporaryFile("w+", prefix="s3-server-")  # noqa: SIM115
        super().__init__()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._held.close()
        self._log.close()

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

    def paths(self, prefix: str) -> list[str]:
        """Of all objects below `prefix`."""
        return [each["path"] for each in obstore.list(self._store(), prefix).collect()]

    def damage(self, paths: Iterable[str]) -> dict[str, bytes]:
        """Write `WRONG` into each object; returns what they were, by path."""
        store = self._store()
        found = {path: bytes(obstore.get(store, path).bytes()) for path in paths}
        for path, data in found.items():
            place = len(data) * 2 // 3
            obstore.put(store, path, data[:place] + WRONG + data[place + len(WRONG) :])
        return found

    def put_back(self, objects: Mapping[str, bytes]) -> None:
        """Write objects as they were."""
        store = self._store()
        for path, data in objects.items():
            obstore.put(store, path, data)

    def requests(self, method: str, prefix: str) -> int:
        """How many requests of a method for objects below `prefix` found what they wanted, since it
        was started for the first time."""
        line = re.compile(rf'"{method} /{BUCKET}/{re.escape(prefix)}[^"]*" 200 ')
        return sum(bool(line.search(each)) for each in Path(self._log.name).open())

    def objects(self, prefix: str) -> int:
        """How many objects there are below `prefix`, up to 1,000."""
        path = f"/{BUCKET}?list-type=2&prefix={prefix}"
        return len(re.findall(rb"<Key>", self._request("GET", path)))

    def _launch(self) -> subprocess.Popen[str]:
        begun = Path(self._log.name).stat().st_size
        process = subprocess.Popen(
            [
                *([] if self._network is None else self._network.far),
                *(sys.executable, "-c", "from moto.server import main; main()"),
                *("-H", self._address, "-p", str(self._own_port)),
            ],
            stdout=subprocess.DEVNULL,
            stderr=self._log,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "NO_COLOR": "1"},
            text=True,
        )
        while True:
            said = Path(self._log.name).read_bytes()[begun:]
            found = re.search(rb"http://%s:(\d+)" % re.escape(self._address).encode(), said)
            if found:
                self._reach(int(found[1]))
                self._request("PUT", f"/{BUCKET}")
                return process
            assert process.poll() is None, said
            time.sleep(0.02)

    def _reach(self, port: int) -> None:
        """The server listens at a port; a restart is at the same one."""
        if self.port == 0:
            self.port = port if self._network is None else self._network.relay(port)

    def _store(self) -> ObjectStore:
        return S3Store(
            BUCKET,
            access_key_id=KEY,
            secret_access_key=SECRET,
            region="us-east-1",
            endpoint=f"http://127.0.0.1:{self.port}",
            client_options={"allow_http": True},
        )

    def _request(self, method: str, path: str, data: bytes | None = None) -> bytes:
        url = f"http://127.0.0.1:{self.port}{path}"
        plain = {"Content-Type": "text/plain"}
        request = urllib.request.Request(url, data=data, headers=plain, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            found: bytes = answer.read()
        return found
