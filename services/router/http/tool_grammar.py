"""The grammar of tool calls, as a structural tag in the markup of V4.1.

Only strict tools and a required choice are enforced. The tag frees the text around the calls, fixes the markup, and
hands the arguments of every strict tool to the JSON Schema in its `parameters`; those of other tools may be any JSON.
The layout follows the markup that deepseek-recipe renders and parses; the names of the formats are those of
xgrammar's structural tags.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from flashmesh.types import GrammarKind, GrammarSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

DSML = "<｜DSML｜"
CLOSE = "</｜DSML｜"
BEGIN = f"{DSML} calls>\n"
END = f"{CLOSE} calls>"
ARGUMENTS_STYLE = "deepseek_v4_1_xml"
MAX_BLANKS = 16
"""White space between two elements of JSON: without a bound, an output may go on with blanks for ever."""


def tool_grammar(
    tools: Sequence[dict[str, Any]], *, required: bool, start_after: int | None
) -> GrammarSpec | None:
    """Returns what the output must obey.

    Args:
        tools: function tools in the shape of Chat Completions.
        required: the prompt has opened the block of calls, and the output must go on inside it.
        start_after: see `GrammarSpec`.

    Returns:
        None where nothing is to be enforced.
    """
    functions = [tool["function"] for tool in tools]
    if not required and not any(function.get("strict") for function in functions):
        return None
    calls = {
        "type": "tags_with_separator",
        "tags": [_call(function) for function in functions],
        "separator": "",
        "at_least_one": True,
        "stop_after_first": False,
    }
    if required:
        rest = {"type": "const_string", "value": END}
        layout: dict[str, Any] = {"type": "sequence", "elements": [calls, rest]}
    else:
        layout = {
            "type": "triggered_tags",
            "triggers": [BEGIN.rstrip()],
            "tags": [{"type": "tag", "begin": BEGIN, "content": calls, "end": END}],
            "at_least_one": False,
            "stop_after_first": False,
        }
    text = json.dumps({"type": "structural_tag", "format": layout}, ensure_ascii=False)
    return GrammarSpec(kind=GrammarKind.STRUCTURAL_TAG, text=text, start_after=start_after)


def _call(function: dict[str, Any]) -> dict[str, Any]:
    schema = function.get("parameters") if function.get("strict") else None
    return {
        "type": "tag",
        "begin": f'{DSML} invoke name="{function["name"]}">\n',
        "content": {
            "type": "json_schema",
            "json_schema": {"type": "object"} if schema is None else schema,
            "style": ARGUMENTS_STYLE,
            "max_whitespace_cnt": MAX_BLANKS,
        },
        "end": f"{CLOSE} invoke>\n",
    }
