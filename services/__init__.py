"""The four services, each a process of its own; they never import each other."""
