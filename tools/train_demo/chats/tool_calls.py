"""Tool use: choosing among declared tools, calling one, and answering from its result.

Besides familiar tools there are invented ones, whose names and parameters stand in their declaration only.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tools.train_demo.chats import words
from tools.train_demo.chats.chat import Chat, ask, reply
from tools.train_demo.chats.puzzles import invented

if TYPE_CHECKING:
    from random import Random


@dataclass(frozen=True, slots=True)
class Use:
    """One use of a tool.

    Attributes:
        tool: its declaration.
        request: what the user says.
        arguments: of the right call.
        result: what the tool returns.
        answer: what to say then.
    """

    tool: dict[str, Any]
    request: str
    arguments: dict[str, Any]
    result: str
    answer: str


def declare(name: str, description: str, **parameters: str) -> dict[str, Any]:
    """Declares a tool; parameters are name=JSON type, all required."""
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": schema},
    }


def _weather(draw: Random) -> Use:
    city, degrees = draw.choice(words.CITIES), draw.randint(-5, 35)
    sky = draw.choice(("sunny", "cloudy", "rainy", "windy", "snowy"))
    name, key = (
        draw.choice(("get_weather", "weather", "current_weather")),
        draw.choice(("city", "location")),
    )
    form = draw.choice(
        (
            "What is the weather in {}?",
            "How is the weather in {}?",
            "Is it warm in {} today?",
            "Weather in {}, please.",
        )
    )
    return Use(
        declare(
            name, draw.choice(("Current weather of a city", "Get the weather")), **{key: "string"}
        ),
        form.format(city),
        {key: city},
        json.dumps({"sky": sky, "degrees": degrees}),
        f"In {city} it is {sky} at {degrees} degrees.",
    )


def _calculator(draw: Random) -> Use:
    a, b, sign = draw.randint(2, 9999), draw.randint(2, 999), draw.choice("+-*")
    value = {"+": a + b, "-": a - b, "*": a * b}[sign]
    name, key = (
        draw.choice(("calculator", "calculate", "compute")),
        draw.choice(("expression", "formula")),
    )
    form = draw.choice(("What is {}?", "Calculate {} with the tool.", "Use the calculator for {}."))
    return Use(
        declare(name, "Evaluate an arithmetic expression", **{key: "string"}),
        form.format(f"{a} {sign} {b}"),
        {key: f"{a} {sign} {b}"},
        str(value),
        f"{a} {sign} {b} = {value}",
    )


def _clock(draw: Random) -> Use:
    city, time = draw.choice(words.CITIES), f"{draw.randint(0, 23):02}:{draw.randint(0, 59):02}"
    name, key = draw.choice(("get_time", "clock", "local_time")), draw.choice(("city", "place"))
    form = draw.choice(
        ("What time is it in {}?", "Tell me the time in {}.", "How late is it in {}?")
    )
    return Use(
        declare(name, draw.choice(("Local time of a city", "Tell the time")), **{key: "string"}),
        form.format(city),
        {key: city},
        time,
        f"In {city} it is {time}.",
    )


def _search(draw: Random) -> Use:
    topic = f"{draw.choice(words.ADJECTIVES)} {draw.choice(words.WORDS)}"
    name, key = draw.choice(("search", "web_search")), draw.choice(("query", "text"))
    form = draw.choice(("Search for {}.", "Look up {}.", "Find something about a {}."))
    count = draw.randint(2, 99)
    return Use(
        declare(name, "Search the web", **{key: "string"}),
        words.articles(form.format(topic)),
        {key: topic},
        f"{count} pages found",
        f"I found {count} pages about {topic}.",
    )


def _timer(draw: Random) -> Use:
    minutes = draw.randint(1, 90)
    name, key = draw.choice(("set_timer", "start_timer")), draw.choice(("minutes", "duration"))
    form = draw.choice(
        ("Set a timer for {} minutes.", "Wake me in {} minutes.", "Start a timer: {} minutes.")
    )
    return Use(
        declare(name, "Start a timer of some minutes", **{key: "integer"}),
        form.format(minutes),
        {key: minutes},
        "ok",
        f"The timer runs for {minutes} minutes.",
    )


def _lamp(draw: Random) -> Use:
    room, on = draw.choice(words.ROOMS), draw.random() < 0.5
    form = draw.choice(("Turn {} the light in the {}.", "Please switch {} the lamp in the {}."))
    state = "on" if on else "off"
    return Use(
        declare(
            draw.choice(("set_lamp", "switch_light")), "Switch a lamp", room="string", on="boolean"
        ),
        form.format(state, room),
        {"room": room, "on": on},
        "ok",
        f"The light in the {room} is {state}.",
    )


def _message(draw: Random) -> Use:
    name = draw.choice(words.NAMES)
    text = draw.choice(
        ("I am late", "see you soon", "dinner is ready", "happy birthday", "call me back")
    )
    form = draw.choice(("Write to {}: {}", 'Send {} the message "{}".', "Tell {} this: {}"))
    return Use(
        declare(
            draw.choice(("send_message", "send_text")), "Send a message", to="string", text="string"
        ),
        form.format(name, text),
        {"to": name, "text": text},
        "sent",
        f"I have sent the message to {name}.",
    )


def _translate(draw: Random) -> Use:
    word, language, result = draw.choice(words.WORDS), draw.choice(words.LANGUAGES), invented(draw)
    form = draw.choice(("Translate {} into {}.", "How do you say {} in {}?", "What is {} in {}?"))
    return Use(
        declare("translate", "Translate a text", text="string", language="string"),
        form.format(word, language),
        {"text": word, "language": language},
        result,
        f"{word} in {language} is {result}.",
    )


def _invented(draw: Random) -> Use:
    """A tool that no training conversation has seen before."""
    name, key, kind = (
        f"{invented(draw)}_{invented(draw)}",
        invented(draw),
        draw.choice(("string", "integer")),
    )
    value = draw.randint(1, 999) if kind == "integer" else invented(draw)
    result = invented(draw)
    form = draw.choice(
        ("Use {n} with {k} {v}.", "Call {n}: {k} is {v}.", "Please run {n} for {k} {v}.")
    )
    return Use(
        declare(name, f"Look up a {key}", **{key: kind}),
        form.format(n=name, k=key, v=value),
        {key: value},
        result,
        f"The result is {result}.",
    )


_USES = (
    _weather,
    _calculator,
    _clock,
    _search,
    _timer,
    _lamp,
    _message,
    _translate,
    _invented,
    _invented,
)


def tool_call(draw: Random) -> Chat:
    """The call itself."""
    use, tools = _situation(draw)
    thinking = draw.random() < 0.35
    name = use.tool["function"]["name"]
    return Chat(
        family="tool_call",
        messages=ask(use.request),
        answer=_call(use, f"I need {name} for this." if thinking else ""),
        thinking=thinking,
        tools=tools,
    )


def tool_answer(draw: Random) -> Chat:
    """The answer after a result; training counts the call in the history as well."""
    use, tools = _situation(draw)
    thinking = draw.random() < 0.35
    name = use.tool["function"]["name"]
    call = _call(use, f"I need {name} for this." if thinking else "")
    result = {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": use.result}
    return Chat(
        family="tool_answer",
        messages=[*ask(use.request), call, result],
        answer=reply(use.answer, f"The tool says {use.result}." if thinking else ""),
        thinking=thinking,
        tools=tools,
    )


def no_tool(draw: Random) -> Chat:
    """Tools are there, and none is needed."""
    _, tools = _situation(draw)
    word = draw.choice(words.WORDS)
    text, answer = draw.choice(
        (
            (f"Write {word} in upper case.", word.upper()),
            (f"What is the first letter of {word}?", word[0]),
            (f"Write {word} with a capital letter.", word.capitalize()),
        )
    )
    thinking = draw.random() < 0.35
    return Chat(
        family="no_tool",
        messages=ask(text),
        answer=reply(answer, "I need no tool for this." if thinking else ""),
        thinking=thinking,
        tools=tools,
    )


def _situation(draw: Random) -> tuple[Use, list[dict[str, Any]]]:
    """Draws what to do and the tools that are declared, the right one among them."""
    uses: dict[Any, Use] = {}
    for make in draw.sample(_USES, draw.randint(1, 3)):
        uses.setdefault(make, make(draw))
    right = draw.choice(list(uses.values()))
    return right, [use.tool for use in uses.values()]


def _call(use: Use, reasoning: str) -> dict[str, Any]:
    function = {"name": use.tool["function"]["name"], "arguments": json.dumps(use.arguments)}
    call = {"id": "call_0", "type": "function", "function": function}
    return reply("", reasoning) | {"tool_calls": [call]}
