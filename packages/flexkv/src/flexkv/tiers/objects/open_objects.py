# SPDX-License-Identifier: Apache-2.0
"""Opens a bucket, or a folder in its place."""

from __future__ import annotations

import datetime
import logging
import os

from obstore.exceptions import BaseError
from obstore.store import ObjectStore, from_url

from flexkv.tiers.objects.shared_folder import SCHEME, open_shared_folder
from flexkv.types.errors import StoreSettingError

logger = logging.getLogger(__name__)

_TRUE = {"1", "true", "yes", "on"}
_PLAIN_HTTP = ("AWS_ALLOW_HTTP", "AZURE_ALLOW_HTTP", "GOOGLE_ALLOW_HTTP")
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_CREDENTIALS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY give credentials, or the machine's role"
_UNREAD = {
    "AWS_CA_BUNDLE": "SSL_CERT_FILE names the certificates of private authorities",
    "AWS_PROFILE": _CREDENTIALS,
    "AWS_DEFAULT_PROFILE": _CREDENTIALS,
    "AWS_CONFIG_FILE": _CREDENTIALS,
    "AWS_SHARED_CREDENTIALS_FILE": _CREDENTIALS,
}
"""Variables by which AWS's own tools reach a bucket, and what obstore reads in their place."""
_RETRIES = 2
"""Retries of a request that fails with a transient error, within the time of its call. Not
tuned."""


def report_unread(url: str) -> None:
    """Log the sentences of `unread_variables`."""
    for each in unread_variables(url):
        logger.warning("%s; %s", *each)


def unread_variables(url: str) -> list[tuple[str, str]]:
    """The variables for a bucket that are set and that obstore does not read: a sentence on each,
    and what to use in its place."""
    names = _UNREAD if url.startswith("s3:") else {}
    return [
        (f"{name}: set, but without effect on objects_url", instead)
        for name, instead in names.items()
        if os.environ.get(name)
    ]


def connect(url: str, timeout_seconds: float) -> ObjectStore:
    """The store of the setting `objects_url`. Sends nothing to a bucket; checks a folder. A request
    takes at most `timeout_seconds`, its retries included. Raises StoreSettingError if the URL or an
    environment variable of its store cannot be used."""
    if url.startswith(SCHEME):
        return open_shared_folder(url)
    allow_http = any(os.environ.get(name, "").lower() in _TRUE for name in _PLAIN_HTTP)
    for name in _ENDPOINTS:
        if os.environ.get(name, "").lower().startswith("http://") and not allow_http:
            raise StoreSettingError(
                f"the endpoint from environment variable {name} is plain http, which everyone on "
                "the network can read; allowed: an https:// endpoint, or AWS_ALLOW_HTTP=true"
            )
    timeout = datetime.timedelta(seconds=timeout_seconds)
    try:
        return from_url(
            url,
            client_options={
                "timeout": timeout,
                "connect_timeout": timeout,
                "allow_http": allow_http,
            },
            retry_config={"max_retries": _RETRIES, "retry_timeout": timeout},
        )
    except (BaseError, ValueError) as error:
        # The error's own text may repeat credentials of the environment.
        raise StoreSettingError(
            f"objects_url {url!r} cannot be used ({type(error).__name__}); allowed: a bucket that "
            "the environment names account, region and endpoint of"
        ) from None
