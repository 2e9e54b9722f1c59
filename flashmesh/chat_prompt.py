"""One question as the prompt text of a conversation, for the command line; HTTP requests render whole ones."""

from __future__ import annotations

import deepseek_recipe as recipe


def chat_prompt(question: str) -> str:
    """Renders a question with thinking off; the text's special tokens must be parsed when it is encoded."""
    body = {
        "model": "DeepSeek-V4.1-Flash",
        "messages": [{"role": "user", "content": question}],
        "thinking": {"type": "disabled"},
    }
    request = recipe.ChatCompletionRequest(body).convert(recipe.ConversionOptions())
    rendered = recipe.DeepseekV41Encoding().render_conversation(request.conversation)
    text: str = rendered.prompt
    return text
