# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI description of an engine's door."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from flexkv.control.prompts import (
    AllPlaces,
    ClearEffect,
    ClearQuestion,
    PinQuestion,
    PromptEffect,
    PromptQuestion,
    SessionEffect,
    SessionQuestion,
    Unpinned,
    UnpinQuestion,
)
from flexkv.version import __version__

CALLS: Mapping[str, tuple[str, Any, Any]] = {
    "/lookup": ("Which tiers have the blocks of a prompt", PromptQuestion, AllPlaces),
    "/warm": ("Bring a prompt from lower tiers into host memory", PromptQuestion, PromptEffect),
    "/demote": ("Move a prompt from host memory to lower tiers", PromptQuestion, PromptEffect),
    "/pin": ("Keep a prompt in host memory", PinQuestion, PromptEffect),
    "/unpin": ("End the pins of a name", UnpinQuestion, Unpinned),
    "/remove": ("Remove a prompt from host memory and disk", PromptQuestion, PromptEffect),
    "/release": ("Evict the blocks of a conversation first", SessionQuestion, SessionEffect),
    "/remove_session": (
        "Remove the blocks that only one conversation has from host memory and disk",
        SessionQuestion,
        SessionEffect,
    ),
    "/clear": (
        "Remove all blocks of the engine from host memory and disk",
        ClearQuestion,
        ClearEffect,
    ),
}
"""By path what a call does, its question and its answer."""


def describe(paths: frozenset[str]) -> dict[str, Any]:
    """The description of the calls at these paths."""
    kinds = [kind for _, *each in CALLS.values() for kind in each]
    schemas, parts = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
    by_path = dict(zip(CALLS, zip(schemas[::2], schemas[1::2], strict=True), strict=True))
    errors = {
        "400": "the question is refused",
        "401": "the token is missing or wrong",
        "503": "the engine has not let the call in",
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "FlexKV: the cache of one engine", "version": __version__},
        "security": [{"token": []}],
        "paths": {
            path: {
                "post": {
                    "summary": CALLS[path][0],
                    "requestBody": {"required": True, "content": _json(question)},
                    "responses": {"200": {"description": "the answer", "content": _json(answer)}}
                    | {code: {"description": text} for code, text in errors.items()},
                }
            }
            for path, (question, answer) in by_path.items()
            if path in paths
        },
        "components": {
            "schemas": parts,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
