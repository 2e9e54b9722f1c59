"""flashmesh: a serving mesh for DeepSeek-V4.1-Flash.

This package is the shared vocabulary: types, errors, hashing, configuration and the gRPC plumbing.
It imports neither `flashmesh.services` nor `flashmesh.kernels`, which both build on it.
"""

__version__ = "0.1.0"
