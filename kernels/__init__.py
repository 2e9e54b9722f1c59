"""The MoE runtime: an immutable `Engine` and mutable `Session`s, stepped in batches.

No gRPC, no asyncio, no services. Everything outside this package sees token ids, block payloads and `ModelInfo`,
never a tensor.
"""
