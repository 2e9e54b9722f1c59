"""`flashmesh chat`: a conversation in the terminal with a running mesh.

Answers stream, thinking dimmed. Lines that begin with a slash are commands. Without a terminal every line of stdin is a
message, so `echo hello | flashmesh chat` works; then nothing but the answers goes to stdout.
"""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Mapping

    from rich.console import Console

    from flashmesh.chat_client import ChatClient

HELP = """\
/model [NAME]         show the served models, or choose one
/temperature [T]      show or set the temperature (thinking mode always uses 1)
/think on|off         think before answering
/stats                figures of this conversation
/reset                forget the conversation
/quit                 leave; so does Ctrl-D"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    add = parser.add_argument
    add("--address", metavar="HOST:PORT", help="the router's HTTP; default: the mesh started here")
    add("--config", type=Path, metavar="FILE", help="for [mesh] token_file")
    add("--api-key-file", type=Path, metavar="FILE", help="a file with an API key")
    add("--model", metavar="NAME", help="default: the first that is served")
    add("--system", metavar="TEXT", help="a system message")
    add("--temperature", type=float, default=1.0, metavar="T")
    add("--no-think", action="store_true", help="answer without thinking")
    add("--max-tokens", type=int, metavar="N", help="longest answer, thinking included")


def run(args: argparse.Namespace) -> int:
    """Talks until the input ends; 1 where a piped message had no answer."""
    from rich.console import Console

    from flashmesh import mesh_file
    from flashmesh.chat_client import ChatClient
    from flashmesh.errors import InvalidRequest

    address, key = mesh_file.find_http(args.address, args.config)
    if args.api_key_file:
        key = read_key(args.api_key_file)
    client = ChatClient(address, key)
    served = client.models()
    model = args.model or (served[0] if served else "")
    if model not in served:
        names = ", ".join(served) or "nothing"
        raise InvalidRequest(f"{address} does not serve {model or 'a model'}; served: {names}")
    chat = Chat(
        client,
        Console(highlight=False, soft_wrap=True),
        model=model,
        thinking=not args.no_think,
        temperature=args.temperature,
        max_tokens=args.max_tokens,
        system=args.system,
    )
    if sys.stdin.isatty():
        chat.tell(f"{model} at {address}; /help lists commands")
        return talk(chat, typed_lines(chat))
    return talk(chat, (line.rstrip("\n") for line in sys.stdin))


def read_key(path: Path) -> str:
    """Reads an API key.

    Raises:
        ConfigError: it cannot be read.
    """
    from flashmesh.errors import ConfigError

    try:
        return path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


def typed_lines(chat: Chat) -> Iterator[str]:
    """Yields what is typed until Ctrl-D; Ctrl-C drops a line."""
    import readline  # noqa: F401  # gives input() editing and history

    while True:
        try:
            yield input("> ")
        except EOFError:
            chat.tell("")
            return
        except KeyboardInterrupt:
            chat.tell("")


def talk(chat: Chat, lines: Iterator[str]) -> int:
    """Handles lines until they end or one says so; returns the exit status."""
    from flashmesh.errors import FlashmeshError

    failed = False
    for line in lines:
        try:
            if not chat.handle(line):
                break
        except FlashmeshError as error:
            failed = True
            print(f"flashmesh: {error}", file=sys.stderr, flush=True)
    return int(failed and not sys.stdin.isatty())


@dataclass(slots=True)
class Stats:
    """What the conversation took so far."""

    num_answers: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_token_s: float = 0.0
    total_s: float = 0.0

    def add(self, usage: Mapping[str, Any], first_token_s: float, total_s: float) -> None:
        """Counts an answer."""
        self.num_answers += 1
        self.prompt_tokens += usage["prompt_tokens"]
        self.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
        self.completion_tokens += usage["completion_tokens"]
        self.first_token_s += first_token_s
        self.total_s += total_s

    def __str__(self) -> str:
        if not self.num_answers:
            return "no answer yet"
        writing_s = max(self.total_s - self.first_token_s, 1e-9)
        return (
            f"{self.num_answers} answers; prompt tokens {self.prompt_tokens}, of them cached "
            f"{self.cached_tokens}; {self.completion_tokens} tokens written, "
            f"{self.completion_tokens / writing_s:.0f} a second; first token after "
            f"{self.first_token_s / self.num_answers * 1000:.0f} ms on average"
        )


@dataclass(slots=True)
class Chat:
    """One conversation.

    Attributes:
        client: to the mesh.
        console: where answers go.
        messages: what was said, in the form of Chat Completions.
    """

    client: ChatClient
    console: Console
    model: str
    thinking: bool
    temperature: float
    max_tokens: int | None = None
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)

    def handle(self, line: str) -> bool:
        """Handles a line; False where it ends the conversation.

        Raises:
            FlashmeshError: there is no answer; the message is forgotten.
        """
        if not line.strip():
            return True
        if not line.startswith("/"):
            self.say(line)
            return True
        name, _, rest = line[1:].strip().partition(" ")
        if name == "quit":
            return False
        commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: self.tell(HELP),
            "model": self._choose_model,
            "temperature": self._set_temperature,
            "think": self._set_thinking,
            "stats": lambda _: self.tell(str(self.stats)),
            "reset": self._reset,
        }
        if name in commands:
            commands[name](rest.strip())
        else:
            self.tell(f"/{name} is not a command; /help lists them")
        return True

    def say(self, text: str) -> None:
        """Sends a message and prints the answer as it comes; Ctrl-C ends the answer and forgets both."""
        self.messages.append({"role": "user", "content": text})
        answer = None
        try:
            answer = self._answer()
        except KeyboardInterrupt:
            self.tell("\n(stopped)")
        finally:
            if answer is None:
                self.messages.pop()
            else:
                self.messages.append({"role": "assistant", "content": answer})

    def tell(self, text: str) -> None:
        """Prints a line that is not part of an answer: to stderr where stdout is piped."""
        if self.console.is_terminal:
            self.console.print(text, style="cyan", markup=False)
        else:
            print(text, file=sys.stderr)

    def _answer(self) -> str:
        started = time.perf_counter()
        first_s: float | None = None
        content: list[str] = []
        with contextlib.closing(self.client.stream(self._request())) as deltas:
            for delta in deltas:
                if first_s is None and (delta.thinking or delta.content):
                    first_s = time.perf_counter() - started
                if delta.thinking and self.console.is_terminal:
                    self.console.print(delta.thinking, style="dim", end="", markup=False)
                if delta.content:
                    if not content and self.thinking and self.console.is_terminal:
                        self.console.print("\n")
                    self.console.print(delta.content, end="", markup=False)
                    content.append(delta.content)
                if delta.usage:
                    total_s = time.perf_counter() - started
                    self.stats.add(delta.usage, first_s or total_s, total_s)
        self.console.print()
        return "".join(content)

    def _request(self) -> dict[str, Any]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        request: dict[str, Any] = {
            "model": self.model,
            "messages": [*system, *self.messages],
            "thinking": {"type": "enabled" if self.thinking else "disabled"},
            "temperature": self.temperature,
        }
        if self.max_tokens is not None:
            request["max_tokens"] = self.max_tokens
        return request

    def _choose_model(self, name: str) -> None:
        served = self.client.models()
        if name in served:
            self.model = name
        elif name:
            self.tell(f"{name} is not served")
        for other in served:
            self.tell(f"{'*' if other == self.model else ' '} {other}")

    def _set_temperature(self, text: str) -> None:
        if text:
            try:
                self.temperature = float(text)
            except ValueError:
                self.tell(f"{text} is not a number")
        self.tell(f"temperature {self.temperature:g}")

    def _set_thinking(self, text: str) -> None:
        if text in ("on", "off"):
            self.thinking = text == "on"
        self.tell(f"thinking {'on' if self.thinking else 'off'}")

    def _reset(self, _: str) -> None:
        self.messages.clear()
        self.tell("forgotten")
