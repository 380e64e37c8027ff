# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from flexkv import CacheConfig, ConfigError, load_config
from flexkv.settings import configure_logging


def test_defaults_need_no_source() -> None:
    assert load_config(environ={}) == CacheConfig()


def test_precedence_is_extra_then_file_then_environment(tmp_path: Path) -> None:
    path = tmp_path / "flexkv.yaml"
    path.write_text("cpu_cache_gb: 2\nblock_tokens: 64\n")
    environ = {
        "FLEXKV_CONFIG_PATH": str(path),
        "FLEXKV_CPU_CACHE_GB": "1",
        "FLEXKV_BLOCK_TOKENS": "32",
        "FLEXKV_COPY_THREADS": "3",
    }
    config = load_config({"cpu_cache_gb": 4}, environ=environ)
    assert (config.cpu_cache_gb, config.block_tokens, config.copy_threads) == (4, 64, 3)


@pytest.mark.parametrize("name", ["flexkv.json", "flexkv.yaml", "flexkv.yml"])
def test_files_may_be_json_or_yaml(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(json.dumps({"cpu_cache_gb": 0.25, "eviction_policy": "LRU"}))
    config = load_config(environ={"FLEXKV_CONFIG_PATH": str(path)})
    assert (config.cpu_cache_gb, config.eviction_policy) == (0.25, "lru")


def test_empty_file_sets_nothing(tmp_path: Path) -> None:
    path = tmp_path / "flexkv.yaml"
    path.write_text("# nothing yet\n")
    assert load_config(environ={"FLEXKV_CONFIG_PATH": str(path)}) == CacheConfig()


@pytest.mark.parametrize(("text", "expected"), [("0", False), ("off", False), ("TRUE", True)])
def test_enable_flexkv(text: str, expected: bool) -> None:
    assert load_config(environ={"ENABLE_FLEXKV": text}).enable is expected


@pytest.mark.parametrize(
    ("extra", "parts"),
    [
        ({"cpu_cach_gb": 1}, ["cpu_cach_gb", "load_config", "'cpu_cache_gb'"]),
        ({"cpu_cache_gb": -1}, ["-1", "load_config", "a number from"]),
        ({"cpu_cache_gb": "lots"}, ["'lots'", "load_config", "a number from"]),
        ({"cpu_cache_gb": float("nan")}, ["nan", "a number from"]),
        ({"cpu_cache_gb": float("inf")}, ["inf", "a number from"]),
        ({"cpu_cache_gb": True}, ["True", "a number from"]),
        ({"cpu_cache_gb": 10**400}, ["1000", "cpu_cache_gb", "to 1048576"]),
        ({"cpu_cache_gb": 10**5000}, ["too large to print", "cpu_cache_gb", "to 1048576"]),
        ({"cpu_cache_gb": 2**70}, ["1180591620717411303424", "to 1048576"]),
        ({"ssd_cache_gb": 1e300}, ["1e+300", "to 1048576"]),
        ({"ssd_write_gb_per_day": 1e-300}, ["1e-300", "from 1e-06"]),
        ({"ssd_timeout_seconds": 1e-9}, ["1e-09", "from 0.001"]),
        ({"mooncake_master": "h:65536"}, ["'h:65536'", "mooncake_master", "HOST:PORT"]),
        ({"mooncake_metadata": "http://h:65536/m"}, ["65536", "mooncake_metadata", "HOST:PORT"]),
        ({"mooncake_master": "a..b:1"}, ["'a..b:1'", "mooncake_master", "HOST:PORT"]),
        ({"mooncake_metadata": f"http://{'a' * 64}/m"}, ["'http://aaa", "mooncake_metadata"]),
        ({"mooncake_metadata": "http://h:0/m"}, ["'http://h:0/m'", "mooncake_metadata"]),
        ({"objects_url": "ftp://bucket"}, ["'ftp://bucket'", "objects_url", "s3://"]),
        ({"objects_url": "s3://"}, ["'s3://'", "objects_url"]),
        ({"objects_url": "s3://bucket/../x"}, ["objects_url"]),
        ({"objects_url": "file://host/x"}, ["'file://host/x'", "objects_url", "file:///PATH"]),
        ({"objects_url": "file:///a/../b"}, ["objects_url"]),
        ({"objects_url": "file:///"}, ["objects_url"]),
        ({"objects_url": "file:x"}, ["objects_url"]),
        ({"objects_timeout_seconds": 0}, ["0", "objects_timeout_seconds", "from 0.001"]),
        ({"block_tokens": 2**70}, ["block_tokens", "to 1048576"]),
        ({"min_load_tokens": -1}, ["-1", "min_load_tokens", "from 0"]),
        ({"copy_threads": 1000000000}, ["1000000000", "copy_threads", "to 1024"]),
        ({"ssd_cache_dir": "/a,/b"}, ["'/a,/b'", "ssd_cache_dir", "`;`"]),
        ({"ssd_cache_dir": "/a:/b"}, ["'/a:/b'", "ssd_cache_dir", "`;`"]),
        ({"ssd_cache_dir": "/a\0"}, ["ssd_cache_dir", "`;`"]),
        ({"log_level": "x" * 100_000}, ["'xxx", "100002 characters", "log_level"]),
        ({"x" * 100_000: 1}, ["unknown key 'xxx", "100002 characters"]),
        ({"CPU_CACHE_GB": 1}, ["'CPU_CACHE_GB'", "did you mean 'cpu_cache_gb'"]),
        ({"FLEXKV_CPU_CACHE_GB": 1}, ["did you mean 'cpu_cache_gb'"]),
        ({"cpu_cache_gb": "1_6"}, ["'1_6'", "cpu_cache_gb", "a number"]),
        ({"copy_threads": "1_6"}, ["'1_6'", "copy_threads", "whole number"]),
        ({"block_tokens": 1.5}, ["1.5", "block_tokens", "whole number"]),
        ({"block_tokens": True}, ["True", "block_tokens", "whole number"]),
        ({"ssd_cache_dir": "/a;/b/../a"}, ["/b/../a", "ssd_cache_dir", "none twice"]),
        ({"copy_threads": 0}, ["0", "copy_threads", "whole number"]),
        ({"eviction_policy": "lfu"}, ["'lfu'", "eviction_policy", "lru"]),
        ({"log_level": "loud"}, ["'loud'", "log_level", "INFO"]),
        ({"runtime_dir": "/a\0"}, ["runtime_dir", "absolute"]),
        ({"service": "/\udcff"}, ["/\\udcff", "service", "UTF-8"]),
        ({"runtime_dir": "relative"}, ["'relative'", "runtime_dir", "absolute"]),
        ({"enable": "maybe"}, ["'maybe'", "enable", "true"]),
    ],
)
def test_bad_values_name_value_source_and_what_is_allowed(
    extra: dict[str, object], parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(extra, environ={})
    message = str(caught.value)
    assert "allowed" in message
    assert "\n" not in message
    assert len(message) < 1000
    for part in parts:
        assert part in message


def test_all_names_are_listed_only_without_a_near_one() -> None:
    with pytest.raises(ConfigError) as near:
        load_config({"cpu_cach_gb": 1}, environ={})
    assert str(near.value) == (
        "unknown key 'cpu_cach_gb' in load_config (did you mean 'cpu_cache_gb'?); allowed: names "
        "of settings"
    )
    for given in ({"zzz": 1}, {}):
        with pytest.raises(ConfigError) as far:
            load_config(given, environ={} if given else {"FLEXKV_QQQQQQ": "1"})
        assert "did you mean" not in str(far.value)
        assert ("cpu_cache_gb" if given else "FLEXKV_CPU_CACHE_GB") in str(far.value)


def test_misspelt_environment_variable_is_an_error() -> None:
    with pytest.raises(
        ConfigError, match=r"FLEXKV_CPU_CACH_GB.*did you mean 'FLEXKV_CPU_CACHE_GB'"
    ):
        load_config(environ={"FLEXKV_CPU_CACH_GB": "1"})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("FLEXKV_ENABLE", "ENABLE_FLEXKV"),
        ("FLEXKV_cpu_cache_gb", "FLEXKV_CPU_CACHE_GB"),
        ("flexkv_ssd_cache_gb", "FLEXKV_SSD_CACHE_GB"),
    ],
)
def test_a_variable_in_another_spelling_is_an_error_with_a_hint(name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}.*did you mean '{meant}'"):
        load_config(environ={name: "1"})


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """The root of FlexKV's loggers, which is as it was afterwards."""
    logger = logging.getLogger("flexkv")
    before = logger.level, list(logger.handlers), logger.propagate
    logger.handlers.clear()
    yield logger
    logger.level, logger.handlers, logger.propagate = before


def test_log_levels_and_one_handler(logger: logging.Logger) -> None:
    configure_logging(CacheConfig())
    configure_logging(CacheConfig(log_level="WARNING"))
    assert len(logger.handlers) == 1
    assert not logger.propagate
    assert logger.isEnabledFor(logging.WARNING)
    assert not logger.isEnabledFor(logging.INFO)
    configure_logging(CacheConfig(log_level="OFF"))
    assert not logger.isEnabledFor(logging.CRITICAL)


# What a pod has beside a Service `flexkv` with the ports 80 and `metrics`, and one `flexkv-vllm`.
INJECTED = (
    "FLEXKV_SERVICE_HOST",
    "FLEXKV_SERVICE_PORT",
    "FLEXKV_SERVICE_PORT_METRICS",
    "FLEXKV_PORT",
    "FLEXKV_PORT_80_TCP",
    "FLEXKV_PORT_80_TCP_PROTO",
    "FLEXKV_PORT_80_TCP_PORT",
    "FLEXKV_PORT_80_TCP_ADDR",
    "FLEXKV_PORT_53_UDP",
    "FLEXKV_VLLM_SERVICE_HOST",
    "FLEXKV_VLLM_PORT_8000_TCP_ADDR",
)


def test_what_kubernetes_injects_is_no_setting(
    caplog: pytest.LogCaptureFixture, logger: logging.Logger
) -> None:
    environ = dict.fromkeys(INJECTED, "tcp://10.0.0.1:80") | {"FLEXKV_COPY_THREADS": "3"}
    assert load_config(environ=environ) == CacheConfig(copy_threads=3)
    logger.addHandler(logging.NullHandler())
    configure_logging(CacheConfig(), environ)
    (record,) = caplog.records
    assert "11 environment variables" in record.getMessage()
    caplog.clear()
    configure_logging(CacheConfig(), {"FLEXKV_COPY_THREADS": "3"})
    assert not caplog.records


def test_a_setting_that_kubernetes_may_inject_is_told_by_its_value(
    caplog: pytest.LogCaptureFixture, logger: logging.Logger
) -> None:
    """FLEXKV_CONTROL_PORT is also what a Service `flexkv-control` sets."""
    logger.addHandler(logging.NullHandler())
    theirs = {"FLEXKV_CONTROL_PORT": "tcp://10.0.0.1:80"}
    own = {"FLEXKV_CONTROL_PORT": "8100", "FLEXKV_CONTROL_TOKEN_FILE": "/etc/flexkv/token"}
    assert load_config(environ=theirs) == CacheConfig()
    config = load_config(environ=own)
    assert config.control_port == 8100
    configure_logging(config, own)
    assert not caplog.records
    configure_logging(CacheConfig(), theirs)
    assert "ignored: FLEXKV_CONTROL_PORT" in caplog.text


@pytest.mark.parametrize("name", ["FLEXKV_PORTS", "FLEXKV_SERVICE", "FLEXKV_PORT_80"])
def test_what_kubernetes_never_injects_is_an_error(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        load_config(environ={name: "1"})


def test_environment_errors_name_the_variable() -> None:
    with pytest.raises(ConfigError, match="'much' from environment variable FLEXKV_CPU_CACHE_GB"):
        load_config(environ={"FLEXKV_CPU_CACHE_GB": "much"})


@pytest.mark.parametrize("name", ["flexkv.yaml", "flexkv.json"])
@pytest.mark.parametrize(
    "content",
    [
        b"[1, 2]",
        b"a: b: c",
        b'"text"',
        b"[" * 100_000,
        b'{"cpu_cache_gb": 1, "cpu_cache_gb": 2}',
        b"\xff\xfe",
        b"? [1]\n: 2",
        b"cpu_cache_gb: " + b"9" * 2_000_000,
        b'cpu_cache_gb: !!int ""',
        b"enable: !!bool maybe",
        b"trace: !!timestamp soon",
        b"trace_gb: 1" + b":00" * 250 + b".0",
        b"? 0x" + b"f" * 6000 + b"\n: 1",
        b"trace_gb:\n- &a [1]\n- [*a, *a]",
        b"cpu_cache_gb: &a [*a]",
    ],
)
def test_malformed_file_is_one_clear_error(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(environ={"FLEXKV_CONFIG_PATH": str(path)})
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_scalar_may_have_an_alias(tmp_path: Path) -> None:
    path = tmp_path / "flexkv.yaml"
    path.write_text("cpu_cache_gb: &size 2\nssd_cache_gb: *size\nssd_cache_dir: [/a, /b]\n")
    config = load_config(environ={"FLEXKV_CONFIG_PATH": str(path)})
    assert (config.cpu_cache_gb, config.ssd_cache_gb) == (2, 2)


def test_aliases_that_multiply_are_refused(tmp_path: Path) -> None:
    """Each line has nine times as much as the one before."""
    path = tmp_path / "flexkv.yaml"
    lines = ["cpu_cache_gb:", "- &a0 [1]"]
    lines += [f"- &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 5)]
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="an alias stands for a list, a mapping or a long text"):
        load_config(environ={"FLEXKV_CONFIG_PATH": str(path)})


def test_aliases_of_a_long_text_are_refused(tmp_path: Path) -> None:
    """As a value that an error prints, 100,000 of them would take 26 MB."""
    path = tmp_path / "flexkv.yaml"
    for length, says in ((256, "780 characters"), (257, "an alias stands for")):
        path.write_text(f"cpu_cache_gb: [&a {'x' * length}, *a, *a]\n")
        with pytest.raises(ConfigError, match=says):
            load_config(environ={"FLEXKV_CONFIG_PATH": str(path)})


def test_a_key_that_is_there_twice_is_named(tmp_path: Path) -> None:
    path = tmp_path / "flexkv.yaml"
    path.write_text("cpu_cache_gb: 1\ncopy_threads: 2\ncpu_cache_gb: 3\n")
    with pytest.raises(ConfigError, match="duplicate key 'cpu_cache_gb'"):
        load_config(environ={"FLEXKV_CONFIG_PATH": str(path)})


def test_a_file_that_never_ends_is_not_read(tmp_path: Path) -> None:
    fifo = tmp_path / "flexkv.yaml"
    os.mkfifo(fifo)
    sparse = tmp_path / "sparse.yaml"
    with sparse.open("wb") as file:
        file.truncate(1 << 42)
    for path in (fifo, sparse, Path("/dev/zero"), tmp_path):
        with pytest.raises(
            ConfigError, match=f"cannot read {path} from FLEXKV_CONFIG_PATH"
        ) as told:
            load_config(environ={"FLEXKV_CONFIG_PATH": str(path)})
        assert "Errno" not in str(told.value)


def test_missing_file_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"/no/such/file\.yaml from FLEXKV_CONFIG_PATH"):
        load_config(environ={"FLEXKV_CONFIG_PATH": "/no/such/file.yaml"})


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKID:hidden@bucket/x",
        "s3://hidden@bucket",
        "az://container/x?sv=1&sig=hidden",
        "https://account.blob.core.windows.net/c?sig=hidden#hidden",
        "s3://AKID:hidden@bucket/x?sig=hidden",
    ],
)
def test_no_error_repeats_the_credentials_of_a_url(url: str) -> None:
    with pytest.raises(ConfigError, match=r"\*\*\*.*objects_url.*without credentials") as raised:
        load_config({"objects_url": url}, environ={})
    assert "hidden" not in str(raised.value)


def test_addresses_of_a_mooncake_store() -> None:
    etcd = "etcd://h:1;[::1]:2379;10.0.0.1:2379"
    for master in ("h:1", "10.0.0.1:1", "[fe80::1]:50051", "etcd://h:1", etcd, "etcd://h:1,i:2"):
        for metadata in ("https://h/metadata", "http://[::1]:8080/metadata", "P2PHANDSHAKE", etcd):
            extra = {"mooncake_master": master, "mooncake_metadata": metadata}
            config = load_config(extra, environ={})
            assert (config.mooncake_master, config.mooncake_metadata) == (master, metadata)
    for master in ("::1:5", "[h]:1", "[::1]", "etcd://", "etcd://h", "etcd://h:0", "etcd://h:1;"):
        with pytest.raises(ConfigError, match=r"HOST:PORT, \[IPv6\]:PORT, or etcd://"):
            load_config({"mooncake_master": master}, environ={})
    for metadata in ("etcd://h:65536", "redis://h:1", "https://u:p@h/m", "http://::1/m", "P2P"):
        with pytest.raises(ConfigError, match=r"P2PHANDSHAKE, http://.* or etcd://"):
            load_config({"mooncake_metadata": metadata}, environ={})


def test_peers_without_a_metadata_server_are_written_as_mooncake_writes_them() -> None:
    extra = {"mooncake_master": "h:1", "mooncake_metadata": " p2phandshake "}
    assert load_config(extra, environ={}).mooncake_metadata == "P2PHANDSHAKE"


def test_the_url_of_a_bucket() -> None:
    for url in (
        "s3://bucket",
        "gs://b/a/b.c",
        "file:///mnt/kv",
        "abfss://c@account.dfs.core.windows.net/x",
    ):
        assert load_config({"objects_url": f"{url}/"}, environ={}).objects_url == url
