"""Stubs generated from protos/flashmesh/v1 by `make protos`; never edited by hand."""
