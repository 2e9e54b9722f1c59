"""The name of a node that was given none: it stays with the node's blocks, which are placed by it."""

from __future__ import annotations

import dataclasses
import logging
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashmesh.services.kvstore.config import KvstoreConfig

log = logging.getLogger(__name__)

FILE_NAME = "node_id"


def with_kept_id(config: KvstoreConfig) -> KvstoreConfig:
    """Returns the configuration with the id that lies in the disk tier's folder, drawn on first use.

    A node without a disk tier gets none: what it held is gone at a restart. Nor does one that cannot
    write its name down, and its blocks are found by nobody after the next restart.
    """
    if config.id or not config.disk_path:
        return config
    path = Path(config.disk_path).expanduser() / FILE_NAME
    try:
        if not path.exists():
            temporary = path.with_suffix(".tmp")
            temporary.write_text(f"kvstore-{secrets.token_hex(4)}\n")
            temporary.replace(path)
        return dataclasses.replace(config, id=path.read_text().strip())
    except OSError as error:
        log.warning("the node's id cannot be kept", extra={"error": str(error)})
        return config
