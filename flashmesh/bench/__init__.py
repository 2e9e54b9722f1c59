"""The benchmarks behind `flashmesh bench`."""
