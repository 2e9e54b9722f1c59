"""A process that compiles grammars and may be killed: `python -m flashmesh.services.decode.grammar_worker`.

It reads a message with the vocabulary and the limits, answers with an empty one when it is ready, and then answers
every message that names a grammar, until its parent closes the pipe. Memory is limited here; time by the parent's
clock, and by processor time here, for a parent that died. `compile_process.py` is the other side.
"""

from __future__ import annotations

import math
import os
import resource
import sys
import time
from pathlib import Path
from typing import IO

from flashmesh.errors import InvalidRequest
from flashmesh.kernels.grammar import Vocabulary, compile_grammar
from flashmesh.services.decode.compile_process import OUT_OF_MEMORY, encode, read
from flashmesh.types import GrammarKind, GrammarSpec


def main() -> None:
    """Serves until the parent closes the pipe."""
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a stray print must not break a frame
    setup = read(source)
    if setup is None:
        return
    vocabulary = Vocabulary(setup["tokenizer"], setup["vocab_size"], setup["eos_token_id"])
    compile_grammar(GrammarSpec(kind=GrammarKind.REGEX, text="a"), vocabulary)
    if sys.platform == "linux":  # elsewhere there is no such limit, or no way to count
        _limit(resource.RLIMIT_AS, _address_space() + setup["memory_bytes"])
    _write(sink, {})
    while (request := read(source)) is not None:
        _limit(resource.RLIMIT_CPU, math.ceil(time.process_time() + setup["timeout_s"]) + 1)
        _write(sink, _answer(request, vocabulary))


def _answer(request: dict[str, str], vocabulary: Vocabulary) -> dict[str, str]:
    spec = GrammarSpec(kind=GrammarKind(request["kind"]), text=request["text"])
    try:
        return {"grammar": compile_grammar(spec, vocabulary).pack()}
    except InvalidRequest as error:
        return {"error": str(error)}
    except MemoryError:
        return {"error": OUT_OF_MEMORY}


def _limit(kind: int, amount: int) -> None:
    """Sets a limit that can be raised again."""
    resource.setrlimit(kind, (amount, resource.getrlimit(kind)[1]))


def _address_space() -> int:
    """Bytes that this process has mapped."""
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    return num_pages * resource.getpagesize()


def _write(sink: IO[bytes], message: dict[str, str]) -> None:
    sink.write(encode(message))
    sink.flush()


if __name__ == "__main__":
    main()
