"""The subcommands of `flashmesh`, a module each: `add_arguments(parser)`, `run(args) -> status`.

Their module level imports the standard library only, so that `flashmesh --help` answers at once.
"""
