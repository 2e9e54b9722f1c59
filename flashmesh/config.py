"""Configuration: one TOML file, one table for each service, parsed into frozen dataclasses.

Order of precedence: the dataclass's defaults, the file, then FLASHMESH_SECTION__KEY from the environment. Unknown
keys fail, required keys have no default, and every problem is reported at once. Nothing else reads the environment.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import tomllib
import types
import typing
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

from flashmesh.errors import ConfigError
from flashmesh.tls import Tls

if typing.TYPE_CHECKING:
    from collections.abc import Mapping

SECTIONS = ("mesh", "model", "router", "prefill", "decode", "kvstore")
ENV_PREFIX = "FLASHMESH_"
T = TypeVar("T")


def limits(default: Any, low: float, high: float) -> Any:
    """A numeric field with a default and an allowed range, both ends included."""
    return field(default=default, metadata={"low": low, "high": high})


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshConfig:
    """What all services of one mesh share.

    Attributes:
        name: meshes with different names may share a Redis.
        redis_url: redis://, rediss:// or unix://; off this host it needs a password.
        redis_password_file: read into the URL where the URL has none.
        token: secret that every call inside the mesh and every client carries.
        token_file: where to read `token` from.
        tls_ca_file: PEM file of the authority; with the next two, every gRPC hop is mutual TLS, clients' too.
        tls_cert_file: PEM file of this process's certificate.
        tls_key_file: PEM file of its private key.
        tls_server_name: name that every server's certificate has; empty expects the host that is called.
        log_level: DEBUG, INFO, WARNING or ERROR.
        heartbeat_interval_s: how often a process renews its registry record.
        heartbeat_ttl_s: how long a record outlives its last renewal; a worker that died gets new work until then.
        drain_grace_s: how long running calls may take to end after SIGTERM.
    """

    name: str = "local"
    redis_url: str = ""
    redis_password_file: str = ""
    token: str = field(default="", repr=False)
    token_file: str = ""
    tls_ca_file: str = ""
    tls_cert_file: str = ""
    tls_key_file: str = ""
    tls_server_name: str = ""
    log_level: str = "INFO"
    heartbeat_interval_s: float = limits(1.0, 0.05, 60)
    heartbeat_ttl_s: float = limits(10.0, 0.2, 600)
    drain_grace_s: float = limits(20.0, 0, 3600)

    def secret(self) -> str:
        """Returns the mesh token, or an empty string where none is configured."""
        return self.token or _read_secret(self.token_file, "mesh.token_file")

    def tls(self) -> Tls | None:
        """Returns the mesh's certificates, None where none are configured.

        Raises:
            ConfigError: some of the files are named and others not, or one cannot be read.
        """
        files = (self.tls_ca_file, self.tls_cert_file, self.tls_key_file)
        if not any(files):
            return None
        if not all(files):
            raise ConfigError("mesh.tls_ca_file, tls_cert_file and tls_key_file go together")
        ca, cert, key = (Path(name).expanduser() for name in files)
        return Tls.load(ca, cert, key, self.tls_server_name)

    def redis(self) -> str:
        """Returns the Redis URL with its password.

        Raises:
            ConfigError: there is no URL, or it leaves this host without a password.
        """
        if not self.redis_url:
            raise ConfigError("mesh.redis_url is required")
        url = urlsplit(self.redis_url)
        if url.scheme == "unix":
            return self.redis_url
        password = _read_secret(self.redis_password_file, "mesh.redis_password_file")
        if password and not url.password and url.hostname:
            host = url.netloc.rpartition("@")[2]
            url = url._replace(netloc=f"{url.username or ''}:{quote(password, safe='')}@{host}")
        if not is_loopback(url.hostname or "") and not url.password:
            raise ConfigError(
                f"mesh.redis_url: {url.hostname} is off this host, so a password is needed"
            )
        return url.geturl()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    """Which model to serve, and on what.

    Attributes:
        path: checkpoint folder or hub id; "demo" is the small trained one that is built in, "demo-random" one of random
            weights.
        revision: of a hub id, which needs one: a commit, a tag or a branch; only a commit never moves.
        name: name that clients ask for.
        engine: "reference" computes; "simulated" plays the protocol without tensors (tests, scale runs).
        cache_dir: where the random one is made.
        threads: CPU threads of a worker's engine; part of its numerics id.
        expand_below_mb: a worker whose weights take less than this as fp32 expands them once; others stay in their
            stored format and are expanded at every use.
        gemm_quantized: round the inputs of products with F8 and F4 weights to FP8, as the released kernels do. Part
            of every block's hash: the mesh's workers must agree.
        sim_step_ms: time of a step of the simulated engine.
        sim_row_ms: time of each of its rows.
    """

    path: str = "demo"
    revision: str = ""
    name: str = "DeepSeek-V4.1-Flash-demo"
    engine: str = field(default="reference", metadata={"choices": ("reference", "simulated")})
    cache_dir: str = "~/.cache/flashmesh"
    threads: int = field(default=1, metadata={"choices": (1, 2, 4, 8)})
    expand_below_mb: int = limits(2048, 0, 10_000_000)
    gemm_quantized: bool = False
    sim_step_ms: float = limits(0.0, 0, 60_000)
    sim_row_ms: float = limits(0.0, 0, 1_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """What every service has.

    Attributes:
        bind: host:port of the gRPC server; port 0 takes a free one.
        advertise: address that others reach it by; empty means the bound one, or this host's name where it is bound
            to every interface.
        metrics_port: Prometheus HTTP port on the bind host; 0 takes a free one, -1 turns it off.
        id: name in the registry; empty draws one.
        port_file: where to write the bound ports as JSON (launchers and tests).
    """

    bind: str = "127.0.0.1:0"
    advertise: str = ""
    metrics_port: int = limits(0, -1, 65535)
    id: str = ""
    port_file: str = ""


def is_loopback(host: str) -> bool:
    """Says whether an address reaches this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def load(path: Path | None, sections: Mapping[str, type[Any]]) -> dict[str, Any]:
    """Reads the named tables.

    Args:
        path: the TOML file; None uses defaults and environment only.
        sections: table name to dataclass.

    Raises:
        ConfigError: lists every problem with key, value and what is allowed.
    """
    raw = _read_toml(path)
    problems = [f"[{name}] is not a section" for name in raw if name not in SECTIONS]
    parsed: dict[str, Any] = {}
    for name, kind in sections.items():
        values = dict(raw.get(name, {})) | _from_environment(name)
        result = _parse_section(name, kind, values, problems)
        if result is not None:
            parsed[name] = result
    if problems:
        where = path or "environment"
        raise ConfigError(f"{where}:\n  " + "\n  ".join(problems))
    return parsed


def _read_toml(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from error


def _from_environment(section: str) -> dict[str, str]:
    prefix = f"{ENV_PREFIX}{section.upper()}__"
    return {
        key.removeprefix(prefix).lower(): value
        for key, value in os.environ.items()
        if key.startswith(prefix)
    }


def _parse_section(
    section: str, kind: type[T], values: dict[str, Any], problems: list[str]
) -> T | None:
    hints = typing.get_type_hints(kind)
    known = {item.name: item for item in dataclasses.fields(kind)}  # type: ignore[arg-type]
    before = len(problems)
    problems += [f"{section}.{key}: unknown key" for key in values if key not in known]
    ready: dict[str, Any] = {}
    for name, item in known.items():
        if name in values:
            try:
                ready[name] = _convert(values[name], hints[name], item.metadata)
            except ValueError as error:
                problems.append(f"{section}.{name} = {values[name]!r}: {error}")
        elif item.default is MISSING and item.default_factory is MISSING:
            problems.append(f"{section}.{name}: required")
    return kind(**ready) if len(problems) == before else None


def _convert(value: Any, hint: Any, metadata: Mapping[str, Any]) -> Any:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        hint = next(arm for arm in typing.get_args(hint) if arm is not type(None))
    if typing.get_origin(hint) is tuple:
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, list):
            raise ValueError("expected a list")
        return tuple(_convert(part, typing.get_args(hint)[0], {}) for part in parts if part != "")
    result = _scalar(value, hint)
    if "choices" in metadata and result not in metadata["choices"]:
        raise ValueError(f"allowed: {', '.join(map(str, metadata['choices']))}")
    if "low" in metadata and not metadata["low"] <= result <= metadata["high"]:
        raise ValueError(f"allowed: {metadata['low']} to {metadata['high']}")
    return result


def _scalar(value: Any, hint: type) -> Any:
    if hint is bool and isinstance(value, str):
        if value.lower() in ("true", "1"):
            return True
        if value.lower() in ("false", "0"):
            return False
        raise ValueError("expected true or false")
    if isinstance(value, str) and hint in (int, float):
        return hint(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not hint:
        raise ValueError(f"expected {hint.__name__}, not {type(value).__name__}")
    return value


def _read_secret(path: str, key: str) -> str:
    if not path:
        return ""
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        raise ConfigError(f"{key} = {path}: {error.strerror}") from error
