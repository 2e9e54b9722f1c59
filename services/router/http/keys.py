"""API keys: who a client is, and which cached blocks it may share.

The file holds no key, only SHA-256 hashes: keys are random, so there is nothing to guess from a hash, and a key is
found by its hash without comparing secrets. Each has a random salt that goes into every block hash of its requests.
"""

from __future__ import annotations

import binascii
import hashlib
import hmac
import secrets
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashmesh.config import is_loopback
from flashmesh.errors import ConfigError, Unauthenticated

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashmesh.services.router.config import RouterConfig

KEY_PREFIX = "fm-"
SALT_BYTES = 32


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who asks.

    Attributes:
        name: for logs; empty for a client that needs no key.
        salt: part of the hash of every block; empty shares blocks with all who have none.
    """

    name: str = ""
    salt: bytes = b""


class ApiKeys:
    """Decides who may call.

    Args:
        tenants: by the hex SHA-256 of the key.
        mesh_token: admitted like a key, for a tenant without a salt, as at the gRPC door; empty for none.
    """

    def __init__(self, tenants: Mapping[str, Tenant], mesh_token: str = "") -> None:
        self._tenants = tenants
        self._mesh_token = mesh_token

    @property
    def needed(self) -> bool:
        """Nobody is admitted without a key."""
        return bool(self._tenants or self._mesh_token)

    def authenticate(self, headers: Mapping[str, str]) -> Tenant:
        """Returns who asks, by `authorization: Bearer KEY` or `x-api-key: KEY`.

        Raises:
            Unauthenticated: a key is needed, and it is missing or wrong.
        """
        if not self.needed:
            return Tenant()
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if not given:
            raise Unauthenticated("no API key was given: send authorization: Bearer KEY")
        if self._mesh_token and hmac.compare_digest(given.encode(), self._mesh_token.encode()):
            return Tenant()
        tenant = self._tenants.get(hash_key(given))
        if tenant is None:
            raise Unauthenticated("the API key is wrong")
        return tenant


def load_keys(config: RouterConfig, mesh_token: str) -> ApiKeys:
    """Returns who may call a router.

    Raises:
        ConfigError: the file of keys is not usable, or without any key HTTP would be open to other hosts.
    """
    tenants = load_tenants(Path(config.api_keys_file)) if config.api_keys_file else {}
    keys = ApiKeys(tenants, mesh_token)
    if not keys.needed and not is_loopback(config.http_bind.rpartition(":")[0]):
        raise ConfigError(
            f"router.http_bind = {config.http_bind}: off loopback HTTP needs router.api_keys_file "
            "or a mesh token"
        )
    return keys


def hash_key(key: str) -> str:
    """Returns what the file has of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


def draw_key(name: str) -> tuple[str, str]:
    """Draws a key for a tenant.

    Args:
        name: letters, digits, - and _.

    Returns:
        The key, and the table to append to the file.
    """
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    salt = secrets.token_hex(SALT_BYTES)
    return key, f'[[key]]\nname = "{name}"\nsha256 = "{hash_key(key)}"\nsalt = "{salt}"\n'


def load_tenants(path: Path) -> dict[str, Tenant]:
    """Reads a file of API keys.

    Raises:
        ConfigError: lists every problem.
    """
    try:
        tables: Any = tomllib.loads(path.read_text()).get("key", [])
    except OSError as error:
        raise ConfigError(f"router.api_keys_file = {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    tenants: dict[str, Tenant] = {}
    problems = []
    for number, table in enumerate(tables if isinstance(tables, list) else [tables], 1):
        try:
            digest, tenant = _tenant(table)
        except ValueError as error:
            problems.append(f"key {number}: {error}")
            continue
        if digest in tenants or tenant.name in {known.name for known in tenants.values()}:
            problems.append(f"key {number}: the name or the hash is there already")
        tenants[digest] = tenant
    if not tenants and not problems:
        problems.append("there is no [[key]]")
    if problems:
        raise ConfigError(f"{path}:\n  " + "\n  ".join(problems))
    return tenants


def _tenant(table: Any) -> tuple[str, Tenant]:
    names = {"name", "sha256", "salt"}
    if not isinstance(table, dict) or set(table) != names:
        raise ValueError("expected name, sha256 and salt")
    if not all(isinstance(value, str) for value in table.values()) or not table["name"]:
        raise ValueError("name, sha256 and salt must be strings")
    try:
        digest, salt = binascii.unhexlify(table["sha256"]), binascii.unhexlify(table["salt"])
    except binascii.Error as error:
        raise ValueError(f"sha256 and salt must be hex: {error}") from error
    if len(digest) != hashlib.sha256().digest_size or len(salt) < SALT_BYTES:
        raise ValueError(f"sha256 must have 32 bytes, and salt at least {SALT_BYTES}")
    return digest.hex(), Tenant(table["name"], salt)
