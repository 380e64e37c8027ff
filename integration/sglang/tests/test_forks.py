# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from integration.sglang.environment import CORES
from integration.sglang.forks import check_environment

READ = "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION"


@pytest.mark.parametrize(
    ("env", "imported_with"),
    [({READ: "1"}, {}), ({READ: "1"}, {READ: "2"}), ({}, {READ: "2"})],
    ids=["added", "changed", "missing"],
)
def test_a_variable_that_would_be_ignored_is_named(
    env: dict[str, str], imported_with: dict[str, str]
) -> None:
    with pytest.raises(
        ValueError, match=f"{READ}={env.get(READ)} .* {READ}={imported_with.get(READ)}"
    ):
        check_environment(env, imported_with)


def test_other_variables_may_differ() -> None:
    check_environment({CORES: "0|1", "FLEXKV_TRACE": "a", READ: "1"}, {READ: "1"})
