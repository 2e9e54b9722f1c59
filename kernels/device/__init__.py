"""The model as a graph of device ops: bf16 between ops, caches in their stored bytes, nothing that waits for the host.

It computes what `kernels.model` computes, through an op table: `weights` prepares a checkpoint, `caches` holds rows,
`inputs` says where a pass's rows stand, `model` runs the layers, `draft` proposes tokens, `runner` steps sequences and
records decode steps as CUDA graphs; `build` puts them together.
"""
