# SPDX-License-Identifier: Apache-2.0
"""Each block of commands on the site is in commands.toml, with the tests that run what it shows, or
why none does.
What a program's own parser can refuse is refused here: options, settings, paths, sessions."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from docs.tests import read_options
from docs.tests.deployed import ENGINES
from docs.tests.page_commands import (
    PAGES,
    ROOT,
    Statement,
    all_blocks,
    all_statements,
    blocks_of,
    exists,
    listed,
    sessions,
)
from flexkv import cli
from flexkv.settings import SETTINGS, load_config
from integration.harness import vllm_forks
from integration.harness.fork_server import ForkServer
from integration.sglang import environment, forks

VLLM_SERVERS = ("vllm serve ", "python -m vllm.entrypoints.openai.api_server")
SGLANG_SERVERS = ("sglang serve ", "python -m sglang.launch_server ")
OTHERS = {"apt-get", "curl", "export", "gh", "grep", "mooncake_master", "vllm-router"}
"""Programs whose options no test reads; commands.toml names who runs them."""


def statements() -> list[Statement]:
    return [each for block in all_blocks() for each in block.statements]


def served(beginnings: tuple[str, ...], words: int) -> list[list[str]]:
    """The arguments of the servers that the pages start; "..." is what the reader has already."""
    found = [each for each in statements() if f"{each.text} ".startswith(beginnings)]
    return [[word for word in each.words[words:] if word != "..."] for each in found]


def test_each_block_is_listed_once() -> None:
    shown = [(block.page, block.begins) for block in all_blocks()]
    known = [(each.page, each.begins) for each in listed()]
    assert sorted(set(shown) - set(known)) == [], "add them to docs/tests/commands.toml"
    assert sorted(set(known) - set(shown)) == [], "these are on no page any more"
    assert len(known) == len(set(known))


def test_the_tests_that_are_listed_exist() -> None:
    named = {test for each in listed() for test in each.tests}
    assert sorted(test for test in named if not exists(test)) == []
    undecided = [each for each in listed() if bool(each.tests) == bool(each.unrun)]
    assert undecided == [], "an entry has tests, or says why none runs it"


def test_each_program_is_known() -> None:
    checked = {"pip", "nox", "flexkv", "vllm", "sglang", "python", "docker", "kubectl"}
    assert {each.program for each in statements()} - checked - OTHERS == set()


def test_local_packages_and_extras_exist() -> None:
    installs = [each for each in all_statements("pip") if each.words[1] in {"install", "wheel"}]
    assert installs
    for word in {word for each in installs for word in each.words if word.startswith("./")}:
        match = re.fullmatch(r"(\./[\w/-]+)(?:\[([\w,]+)\])?", word)
        assert match, word
        project = tomllib.loads((ROOT / match[1] / "pyproject.toml").read_text())["project"]
        extras = set(match[2].split(",")) if match[2] else set()
        assert extras <= set(project.get("optional-dependencies", {})), word


def test_settings_in_front_of_commands_are_allowed() -> None:
    known = {setting.variable: setting for setting in SETTINGS.values()}
    given: dict[str, set[str]] = {}
    for each in statements():
        for name, value in each.environment.items():
            if name.startswith("FLEXKV_") or name in known:
                given.setdefault(name, set()).add(value)
    assert set(given) <= set(known)
    for name, values in given.items():
        for value in values:
            known[name].kind.parse(value)


def test_sessions_of_nox_exist_and_take_their_options(monkeypatch: pytest.MonkeyPatch) -> None:
    from integration.bench import __main__ as bench
    from integration.campaign import __main__ as campaign
    from integration.demo import options as demo
    from integration.gpu import __main__ as gpu

    def by_argv(parse: Callable[[], object]) -> Callable[[list[str]], object]:
        def take(arguments: list[str]) -> object:
            monkeypatch.setattr(sys, "argv", ["it", *arguments])
            return parse()

        return take

    takes: dict[str, Callable[[list[str]], object]] = {
        "bench": by_argv(bench._parse),
        "campaign": by_argv(campaign._parse),
        "demo": demo.parse,
        "gpu": gpu._parse,
    }
    found = all_statements("nox")
    assert found
    for each in found:
        assert each.words[1] == "-s"
        assert each.words[2] in sessions(), each.text
        if each.words[3:]:
            assert each.words[3] == "--", each.text
            takes[each.words[2]](each.words[4:])
    for each in all_statements("python"):
        if each.words[1:3] == ["-m", "integration.gpu"]:
            gpu._parse(each.words[3:])


def test_flexkv_knows_its_options() -> None:
    found = all_statements("flexkv")
    assert len(found) > 8
    for each in found:
        if not {"--help", "--version"} & set(each.words):
            cli._parser().parse_args(each.words[1:])


def test_vllm_knows_the_options(tmp_path: Path) -> None:
    commands = served(VLLM_SERVERS[:1], 2) + served(VLLM_SERVERS[1:], 3)
    commands += [command[2:] for command in ENGINES.values()]
    assert len(commands) > 10
    read("vllm", vllm_forks.fork_server(), commands, tmp_path)


def test_sglang_knows_the_options(tmp_path: Path) -> None:
    commands = served(SGLANG_SERVERS[:1], 2) + served(SGLANG_SERVERS[1:], 3)
    page = (PAGES / "guides" / "kubernetes.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    commands.append(yaml.safe_load(block)["args"])
    assert len(commands) > 4
    try:
        server = forks.fork_server()
    except environment.EnvironmentMissingError as error:
        if not environment.may_be_missing():
            raise
        pytest.skip(str(error))
    read("sglang", server, commands, tmp_path)


def read(engine: str, server: ForkServer, commands: list[list[str]], folder: Path) -> None:
    """Have a process that has imported an engine read the options of its servers."""
    lines = folder / "commands"
    lines.write_text("".join(json.dumps(each) + "\n" for each in commands), encoding="utf-8")
    with (folder / "log").open("w+b") as log:
        arguments = [engine, str(lines)]
        server.run(read_options.__name__, server.environment, log.fileno(), arguments).wait()
        log.seek(0)
        said = log.read().decode()
    assert read_options.said(len(commands)) in said.splitlines(), said[-2000:]


@pytest.mark.parametrize(
    "option", ["--kv-transfer-config", "--unified-cache-external-linker-config"]
)
def test_settings_in_configurations_are_allowed(option: str) -> None:
    configs = [
        json.loads(each.words[each.words.index(option) + 1])
        for each in statements()
        if option in each.words
    ]
    assert configs
    for config in configs:
        extra = config.get("kv_connector_extra_config", config.get("linker_extra_config", {}))
        load_config({name: value for name, value in extra.items() if name in SETTINGS}, environ={})


def test_compose_files_have_the_profiles_and_get_their_variables() -> None:
    found = [each for each in all_statements("docker") if each.words[1] == "compose"]
    assert found
    for each in found:
        text = (ROOT / each.words[each.words.index("-f") + 1]).read_text()
        profile = each.words[each.words.index("--profile") + 1]
        services = yaml.safe_load(text)["services"].values()
        started = [service for service in services if profile in service["profiles"]]
        assert started, each.text
        needed = set(re.findall(r"\$\{(\w+):\?", json.dumps(started)))
        assert needed <= set(each.environment), each.text


def test_files_of_deploy_are_there() -> None:
    found = [each for name in ("docker", "kubectl") for each in all_statements(name)]
    named = {word for each in found for word in each.words if word.startswith("deploy/")}
    assert len(named) > 3
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_a_block_is_read_as_a_shell_reads_it() -> None:
    text = """```bash
# a comment
A=1 B='x y' run one \\
    --two '{"three":
  4}' && next   # and why
```
```text
$ show me
what it prints
```
```python
print()
```
"""
    first, second = blocks_of("page.md", text)
    assert first.begins == "A=1 B='x y' run one"
    assert first.statements == [
        Statement({"A": "1", "B": "x y"}, ["run", "one", "--two", '{"three":\n  4}']),
        Statement({}, ["next"]),
    ]
    assert second.begins == "show me"


def test_a_test_that_is_gone_is_noticed() -> None:
    assert exists("docs/tests/test_page_commands.py::test_a_test_that_is_gone_is_noticed")
    assert exists("docs/tests/test_page_commands.py::all_blocks")  # imported
    assert not exists("docs/tests/test_page_commands.py::test_nothing")
    assert not exists("docs/tests/nothing.py::test_nothing")
