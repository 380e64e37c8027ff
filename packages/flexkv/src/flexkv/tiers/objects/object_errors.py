# SPDX-License-Identifier: Apache-2.0
"""The errors of an object store, without what may be secret in their texts.

An error of obstore repeats the request's address and the server's whole answer. An address may hold
a signature, and so may an answer. What is kept is the status, the error's code and its message.
"""

from __future__ import annotations

import re

NOT_IMPLEMENTED = 501

_TEXT = 200
"""The most characters of an error's text."""

_STATUS = re.compile(r"status code: (\d{3})([ \w]*)")
_CODE = re.compile(r"<Code>\s*([\w.-]{1,100})\s*</Code>")
_MESSAGE = re.compile(r"<Message>\s*([^<\n]*)")
_CAUSE = re.compile(r"\b(?:message|error|source): ")
_KIND = re.compile(r"\b[A-Z]\w+")
_OUTER = {"Error", "Custom", "Connect", "SendRequest", "None", "Some"}
"""Kinds of errors that only wrap others."""
_AUTHORITY = "UnknownIssuer"
_ADDRESS = re.compile(r"\S*://\S*")


class StoreError(OSError):
    """A request to an object store failed. `status`: the HTTP status of the answer; 0 if there was
    none."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


class AbsentError(StoreError):
    """The store has no such object, or no such bucket."""


class ExistsError(StoreError):
    """The store did not write an object, because of another object or write of that name."""


def _cause(details: str) -> str:
    """The text of an error within another, or its kinds; empty if it only wraps others."""
    kinds, _, text = details.partition('"')
    if not kinds:
        return text.partition('"')[0]
    found = [each for each in _KIND.findall(kinds) if each not in _OUTER][:2]
    if _AUTHORITY in found:
        found.append("(SSL_CERT_FILE can name the certificate of a private authority)")
    return " ".join(found)


def describe(error: Exception) -> tuple[str, int]:
    """What an error of obstore says, and the HTTP status; 0 if there is none. Errors with the same
    cause have the same text."""
    text, _, details = str(error).partition("\n\nDebug source:")
    status = _STATUS.search(text)
    if status is not None:
        said = [each[1] for pattern in (_CODE, _MESSAGE) if (each := pattern.search(text))]
        what = "".join(status.groups()).strip()
        number = int(status[1])
    else:
        # Behind the request's address and times, which differ from request to request.
        what = text.rpartition(" - ")[2]
        said = [each for each in map(_cause, _CAUSE.split(details)[1:]) if each][-1:]
        number = 0
    what = ", ".join(dict.fromkeys(each.strip() for each in (what, *said) if each.strip()))
    what = "".join(each for each in _ADDRESS.sub("...", what) if each.isprintable())
    return f"{type(error).__name__}: {what[:_TEXT]}", number
