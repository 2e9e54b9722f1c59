"""The error tree of flashmesh and the gRPC status of every leaf.

Services raise these; one interceptor (`flashmesh.rpc`) turns them into a status, and one function here
turns a status back into the error, so that code on both sides of a hop handles the same classes.

    FlashmeshError
    ├── InvalidRequest          INVALID_ARGUMENT     the caller's fault: report it
    │   ├── PromptTooLong       INVALID_ARGUMENT
    │   └── UnknownModel        INVALID_ARGUMENT
    ├── Overloaded              RESOURCE_EXHAUSTED   another replica, then report with a retry delay
    │   ├── NoFreeBlocks        RESOURCE_EXHAUSTED
    │   └── QuotaExceeded       RESOURCE_EXHAUSTED   says when to come again
    ├── BlockNotFound           NOT_FOUND            recompute from the last held block
    ├── StaleEpoch              ABORTED              look the worker up again
    ├── Incompatible            FAILED_PRECONDITION  model, layout or block size differ: an operator's job
    ├── Unauthenticated         UNAUTHENTICATED      mesh credentials missing or wrong
    ├── Draining                UNAVAILABLE          another replica
    ├── WorkerLost              UNAVAILABLE          another replica
    ├── WorkerFailed            INTERNAL             another replica, then report: a bug, or the request's own
    ├── DeadlineExceeded        DEADLINE_EXCEEDED    release everything
    ├── CorruptBlock            DATA_LOSS            quarantine and recompute
    ├── CheckpointError         FAILED_PRECONDITION  names the file and the tensor
    └── ConfigError             FAILED_PRECONDITION  lists every problem of a configuration file
"""

from __future__ import annotations

import grpc


class FlashmeshError(Exception):
    """Root of all errors that flashmesh raises on purpose."""

    status = grpc.StatusCode.INTERNAL


class InvalidRequest(FlashmeshError):
    """The request cannot be served as it is written."""

    status = grpc.StatusCode.INVALID_ARGUMENT


class PromptTooLong(InvalidRequest):
    """Prompt and requested output do not fit the context."""


class UnknownModel(InvalidRequest):
    """No worker serves a model of this name."""


class Overloaded(FlashmeshError):
    """A bounded queue is full; nothing was started."""

    status = grpc.StatusCode.RESOURCE_EXHAUSTED


class NoFreeBlocks(Overloaded):
    """No pages, window slots or store bytes are free."""


class QuotaExceeded(Overloaded):
    """A tenant has used up what it may for now; `retry_after_s` says for how long."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(f"the key's quota is used up; try again in {retry_after_s:.1f} s")
        self.retry_after_s = retry_after_s


class BlockNotFound(FlashmeshError):
    """A named block is not (or no longer) in the store."""

    status = grpc.StatusCode.NOT_FOUND


class StaleEpoch(FlashmeshError):
    """The worker restarted since the caller learned of it."""

    status = grpc.StatusCode.ABORTED


class Incompatible(FlashmeshError):
    """Model, layout, block size or scheme of two parties differ."""

    status = grpc.StatusCode.FAILED_PRECONDITION


class Unauthenticated(FlashmeshError):
    """Mesh credentials are missing or wrong."""

    status = grpc.StatusCode.UNAUTHENTICATED


class Draining(FlashmeshError):
    """The replica is shutting down and takes no new work."""

    status = grpc.StatusCode.UNAVAILABLE


class WorkerLost(FlashmeshError):
    """The replica died, hung, or none is registered."""

    status = grpc.StatusCode.UNAVAILABLE


class WorkerFailed(FlashmeshError):
    """The replica failed at this request in a way that nobody foresaw."""

    status = grpc.StatusCode.INTERNAL


class DeadlineExceeded(FlashmeshError):
    """The request's deadline has passed."""

    status = grpc.StatusCode.DEADLINE_EXCEEDED


class CorruptBlock(FlashmeshError):
    """Bytes failed their checksum, or are not the block that was asked for."""

    status = grpc.StatusCode.DATA_LOSS


class CheckpointError(FlashmeshError):
    """A checkpoint is missing, incomplete or damaged."""

    status = grpc.StatusCode.FAILED_PRECONDITION


class ConfigError(FlashmeshError):
    """A configuration cannot be used; the text lists every problem."""

    status = grpc.StatusCode.FAILED_PRECONDITION


_FROM_STATUS: dict[grpc.StatusCode, type[FlashmeshError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.NOT_FOUND: BlockNotFound,
    grpc.StatusCode.ABORTED: StaleEpoch,
    grpc.StatusCode.FAILED_PRECONDITION: Incompatible,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.UNAVAILABLE: WorkerLost,
    # Our own cancellation never comes back as an error: this is a worker that stopped under the call.
    grpc.StatusCode.CANCELLED: WorkerLost,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.DATA_LOSS: CorruptBlock,
    grpc.StatusCode.INTERNAL: WorkerFailed,
    grpc.StatusCode.UNKNOWN: WorkerFailed,
}


def from_rpc_error(error: grpc.RpcError, who: str) -> FlashmeshError:
    """Turns a failed call to `who` into the error that the other side raised.

    Args:
        error: what grpc raised.
        who: the callee as it should read in a message, such as "prefill prefill-1".
    """
    kind = _FROM_STATUS.get(error.code(), FlashmeshError)
    return kind(f"{who}: {error.details()}")


class KernelsUnavailable(FlashmeshError):
    """This machine lacks what the kernels need: TileLang, or a Hopper GPU."""
