"""Keeps blocks: payload bytes, leases, eviction, and its share of the index in Redis."""
