"""Grammars: what may come next in an output that must obey a regex, a JSON Schema, EBNF rules or a structural tag.

A `Vocabulary` says how a model's tokens are spelled, `compile_grammar` turns a specification into a `Grammar` for it,
and a `Matcher` follows one output through that grammar. All the work is xgrammar's; this module decides which tokens
take part, keeps the thinking section before a grammar free, and stops a grammar whose steps grow too slow to share a
device thread with others. Compiling can take any time and memory, so services do it in a process of its own.
"""

from __future__ import annotations

import copy
import functools
import json
import random
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import xgrammar
from tokenizers import Tokenizer

from flashmesh.errors import InvalidRequest
from flashmesh.types import GrammarKind, GrammarSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

MAX_STEP_S = 0.05
"""Processor time of one token in a grammar; ambiguous ones grow without bound as the output gets longer."""

MAX_BLANKS = 16
"""White space between two elements of JSON: without a bound, an output may go on with blanks for ever."""

TRIAL_TOKENS = 256

MAX_TRIAL_S = 0.5
"""Processor time of so many tokens; an ordinary grammar takes hundredths of it."""

_MASK_EVERY = 32

_NUM_SPELLINGS = 8
"""Tables of spelled tokens that a process keeps, each for another set of special tokens."""

_MAX_REASON = 300
"""Characters of xgrammar's reason that are passed on: some of them quote the whole grammar."""

_LOCATION = re.compile(r"^\[[\d:]+\] \S+:\d+: (?:Check failed: \(.*?\) is false: )?")
"""Where in its sources xgrammar raised an error."""


class Vocabulary:
    """How a model's tokens are spelled.

    Args:
        tokenizer_json: text of the checkpoint's tokenizer.json, of a byte-level tokenizer.
        vocab_size: of the model; ids that the tokenizer lacks are never allowed.
        eos_token_id: the only token that ends an output.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_id: int) -> None:
        self.tokenizer_json = tokenizer_json
        self.vocab_size = vocab_size
        self.eos_token_id = eos_token_id
        tokenizer = Tokenizer.from_str(tokenizer_json)
        self._special = {
            added.content: token for token, added in tokenizer.get_added_tokens_decoder().items()
        }
        self._pieces = [""] * vocab_size
        for piece, token in tokenizer.get_vocab(with_added_tokens=False).items():
            self._pieces[token] = piece
        self._spelled = functools.lru_cache(_NUM_SPELLINGS)(self._spell)

    def spelled(self, spec: GrammarSpec) -> xgrammar.TokenizerInfo:
        """Returns the tokens that may take part in a grammar.

        Special tokens do not: the text of "</think>" inside a JSON string is spelled with ordinary ones. A structural
        tag is made of special tokens, so those whose text it names take part in it.
        """
        named: frozenset[str] = frozenset()
        if spec.kind is GrammarKind.STRUCTURAL_TAG:
            text = _plain_json(spec.text)
            named = frozenset(content for content in self._special if content in text)
        return self._spelled(named)

    def _spell(self, named: frozenset[str]) -> xgrammar.TokenizerInfo:
        pieces = self._pieces.copy()
        for content, token in self._special.items():
            pieces[token] = content if content in named else ""
        return xgrammar.TokenizerInfo(
            pieces,
            xgrammar.VocabType.BYTE_LEVEL,
            vocab_size=self.vocab_size,
            stop_token_ids=[self.eos_token_id],
        )


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled grammar; any number of outputs follow it at once."""

    compiled: xgrammar.CompiledGrammar

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        return self.compiled.memory_size_bytes

    def start(self, start_after: int | None = None) -> Matcher:
        """Begins an output.

        Args:
            start_after: see `GrammarSpec.start_after`.
        """
        matcher = xgrammar.GrammarMatcher(self.compiled)
        return Matcher(matcher, self.compiled.tokenizer_info.vocab_size, start_after)

    def pack(self) -> str:
        """Returns a text from which `unpack` makes the grammar in another process."""
        return self.compiled.serialize_json()

    @classmethod
    def unpack(cls, text: str, spec: GrammarSpec, vocabulary: Vocabulary) -> Grammar:
        """Makes a grammar from what `pack` gave for the same specification and vocabulary."""
        return cls(xgrammar.CompiledGrammar.deserialize_json(text, vocabulary.spelled(spec)))


def compile_grammar(spec: GrammarSpec, vocabulary: Vocabulary) -> Grammar:
    """Compiles a grammar and tries it out; may take any time and memory.

    Raises:
        InvalidRequest: it cannot be read, says something unsupported, or its steps are too slow.
        MemoryError: memory is limited, and it needs more.
    """
    compiler = xgrammar.GrammarCompiler(
        vocabulary.spelled(spec), max_threads=1, cache_enabled=False
    )
    text = spec.text
    compile_kind: dict[GrammarKind, Callable[[], xgrammar.CompiledGrammar]] = {
        GrammarKind.REGEX: lambda: compiler.compile_regex(text),
        GrammarKind.JSON_SCHEMA: lambda: compiler.compile_json_schema(
            text, strict_mode=True, max_whitespace_cnt=MAX_BLANKS
        ),
        GrammarKind.EBNF: lambda: compiler.compile_grammar(text),
        GrammarKind.JSON_OBJECT: lambda: compiler.compile_json_schema(
            '{"type": "object"}', strict_mode=False, max_whitespace_cnt=MAX_BLANKS
        ),
        GrammarKind.STRUCTURAL_TAG: lambda: compiler.compile_structural_tag(text),
    }
    try:
        grammar = Grammar(compile_kind[spec.kind]())
    except RuntimeError as error:
        if "bad_alloc" in str(error):
            raise MemoryError from error
        reason = _LOCATION.sub("", str(error)).strip()[:_MAX_REASON]
        raise InvalidRequest(f"the {spec.kind.value} grammar is not usable: {reason}") from error
    _try_out(grammar)
    return grammar


def _try_out(grammar: Grammar) -> None:
    """Follows one output that repeats each token as long as it may, which is what ambiguous grammars suffer from."""
    matcher, choice, token = grammar.start(), random.Random(0), None
    start = time.thread_time()
    for step in range(TRIAL_TOKENS):
        if time.thread_time() - start > MAX_TRIAL_S:
            raise _too_slow(f"{step} tokens take the grammar more than {MAX_TRIAL_S:g} s")
        if step % _MASK_EVERY and token is not None and matcher.accept(token):
            continue
        mask = matcher.mask()
        if mask is None or not mask.any():
            raise InvalidRequest("the grammar admits no text, or leads to where none can follow")
        mask[grammar.compiled.tokenizer_info.stop_token_ids] = False
        if token is None or not mask[token]:
            allowed = np.flatnonzero(mask)
            if not len(allowed):
                return
            token = int(choice.choice(allowed))
        matcher.accept(token)


class Matcher:
    """Where one output stands in its grammar; see `sampler.GrammarState`.

    Args:
        matcher: at its start.
        vocab_size: length of a mask.
        start_after: the output is free up to and including this token.

    `accept` and `mask` raise InvalidRequest, and change nothing, where the grammar has become too slow to go on with.
    """

    def __init__(
        self, matcher: xgrammar.GrammarMatcher, vocab_size: int, start_after: int | None
    ) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._start_after = start_after
        self._free = start_after is not None
        self._num_governed = 0

    @property
    def may_end(self) -> bool:
        """The end token is the grammar's affair; before it governs, the output cannot end."""
        return not self._free

    def accept(self, token: int) -> bool:
        """Moves on by a token; False, and no change, where the grammar does not admit it."""
        if self._free:
            self._free = token != self._start_after
            return True
        start = time.thread_time()
        accepted = self._matcher.accept_token(token)
        if accepted and _is_slow(start):
            self._matcher.rollback(1)
            raise _too_slow()
        self._num_governed += accepted
        return accepted

    def rollback(self, count: int) -> None:
        """Takes back the last `count` accepted tokens."""
        governed = min(count, self._num_governed)
        self._matcher.rollback(governed)
        self._num_governed -= governed
        self._free = self._free or governed < count

    def mask(self) -> NDArray[np.bool_] | None:
        """Returns `[vocab]` which tokens may come next, None while the output is free."""
        if self._free:
            return None
        bits = xgrammar.allocate_token_bitmask(1, self._vocab_size)
        start = time.thread_time()
        self._matcher.fill_next_token_bitmask(bits)
        if _is_slow(start):
            raise _too_slow()
        allowed = np.unpackbits(bits.numpy().view(np.uint8), bitorder="little")
        return allowed[: self._vocab_size].view(np.bool_)

    def fork(self) -> Matcher:
        """Returns an independent copy."""
        twin = copy.copy(self)
        twin._matcher = self._matcher.fork()
        return twin


def _is_slow(start: float) -> bool:
    """Compares processor time, not the clock's: a busy machine is not the grammar's fault."""
    return time.thread_time() - start > MAX_STEP_S


def _too_slow(
    what: str = f"one token takes the grammar more than {MAX_STEP_S:g} s",
) -> InvalidRequest:
    return InvalidRequest(
        f"{what}: it is too ambiguous (such as a repetition inside a repetition) or too large"
    )


def _plain_json(text: str) -> str:
    """Returns a JSON text without escapes of characters beyond ASCII."""
    try:
        return json.dumps(json.loads(text), ensure_ascii=False)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the structural_tag grammar is not JSON: {error}") from error
