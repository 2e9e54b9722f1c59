"""`flashmesh chat` as a user runs it: piped, and in a terminal of its own."""

import os
import select
import subprocess
import sys

import pytest
from support.mesh import start_mesh
from support.waiting import wait_until

END_LIMIT_S = 120.0


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    settings = {"model": {"sim_step_ms": 1.0}}
    with start_mesh(tmp_path_factory.mktemp("mesh"), overrides=settings) as mesh:
        yield mesh


def command(mesh, *args):
    return [
        *(sys.executable, "-P", "-m", "flashmesh.cli", "chat"),
        *("--address", mesh.http_address, "--max-tokens", "8", *args),
    ]


def piped(mesh, text, *args):
    return subprocess.run(
        command(mesh, *args), input=text, capture_output=True, text=True, timeout=END_LIMIT_S
    )


def test_piped_lines_are_messages_and_only_answers_go_to_stdout(mesh):
    result = piped(mesh, "hello\n/stats\n\nagain\n/stats\n", "--no-think")
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.strip().splitlines()) >= 2
    assert "\x1b" not in result.stdout
    first, second = (line for line in result.stderr.splitlines() if "answers; " in line)
    assert first.startswith("1 answers; ")
    assert second.startswith("2 answers; ")
    assert "; 16 tokens written" in second
    prompts = [int(line.split("prompt tokens ")[1].split(",")[0]) for line in (first, second)]
    assert prompts[1] > 2 * prompts[0]  # the second message came with the first and its answer


def test_reset_forgets_and_commands_answer(mesh):
    text = "hello\n/reset\n/think off\n/temperature 0.5\n/temperature x\n/model\n/nope\n/help\n/quit\nno\n"
    result = piped(mesh, text)
    assert result.returncode == 0
    for expected in (
        "forgotten",
        "thinking off",
        "temperature 0.5",
        "x is not a number",
        "* DeepSeek-V4.1-Flash-demo",
        "/nope is not a command",
        "/reset ",
    ):
        assert expected in result.stderr


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--temperature", "9"], "temperature"),
        (["--model", "other"], "does not serve other"),
        (["--address", "127.0.0.1:1"], "no router answers at http://127.0.0.1:1"),
    ],
)
def test_what_goes_wrong_is_a_line_and_a_status(mesh, args, text):
    result = piped(mesh, "hello\n", *args)
    assert result.returncode == 1
    assert text in result.stderr
    assert "Traceback" not in result.stderr


SPAWN = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"


class Terminal:
    """A terminal with the command inside; the fork happens in a process without threads."""

    def __init__(self, argv):
        self.process = subprocess.Popen(
            [sys.executable, "-c", SPAWN, *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "TERM": "xterm-256color"},
        )
        self.unread = ""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()

    def type(self, text):
        self.process.stdin.write(text.encode())
        self.process.stdin.flush()

    def wait_for(self, text):
        """Reads up to and including a text, and returns what came."""
        while text not in self.unread:
            out = self.process.stdout.fileno()
            assert select.select([out], [], [], END_LIMIT_S)[0], f"no {text!r} came"
            self.unread += os.read(out, 4096).decode(errors="replace")
        before, _, self.unread = self.unread.partition(text)
        return before + text


def test_in_a_terminal_thinking_is_dim_and_ctrl_c_ends_an_answer(mesh):
    with Terminal(command(mesh, "--max-tokens", "60000")) as terminal:
        terminal.wait_for("> ")
        terminal.type("hello\r")
        wait_until(lambda: bool(mesh.held()), "the answer runs")
        terminal.wait_for("\x1b[2m")
        terminal.type("\x03")
        terminal.wait_for("(stopped)")
        wait_until(lambda: not mesh.held(), "nothing is held")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.process.wait(END_LIMIT_S) == 0
