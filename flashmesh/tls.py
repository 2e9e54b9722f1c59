"""Mutual TLS between the processes of a mesh: one certificate each, or one for all, from one authority."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc

from flashmesh.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Tls:
    """What a process shows and whom it trusts, PEM each.

    Attributes:
        ca: certificates of the authorities whose certificates are accepted, from servers and from clients.
        cert: this process's certificate, with the chain up to an authority.
        key: its private key.
        server_name: expected in every server's certificate; empty expects the host that is called.
    """

    ca: bytes
    cert: bytes
    key: bytes = field(repr=False)
    server_name: str = ""

    @classmethod
    def load(cls, ca: Path, cert: Path, key: Path, server_name: str) -> Tls:
        """Reads the files.

        Raises:
            ConfigError: names the file that cannot be read, or is not PEM.
        """
        return cls(_read_pem(ca), _read_pem(cert), _read_pem(key), server_name)

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a server that takes calls only from clients with a certificate."""
        return grpc.ssl_server_credentials(
            [(self.key, self.cert)], root_certificates=self.ca, require_client_auth=True
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a client that shows its certificate and checks the server's."""
        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)

    def channel_options(self) -> list[tuple[str, str]]:
        """Options that go with the credentials."""
        return [("grpc.ssl_target_name_override", self.server_name)] if self.server_name else []


def _read_pem(path: Path) -> bytes:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"mesh.tls: {path}: {error.strerror}") from error
    if b"-----BEGIN " not in text:
        raise ConfigError(f"mesh.tls: {path} is not a PEM file")
    return text
