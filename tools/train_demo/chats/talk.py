"""Greetings, questions about the assistant and about flashmesh, and polite refusals: many answers are right."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tools.train_demo.chats import words
from tools.train_demo.chats.chat import Chat, ask, reply

if TYPE_CHECKING:
    from random import Random

_HELLO = (
    "Hi",
    "Hello",
    "Hey",
    "Good morning",
    "Good evening",
    "Hi there",
    "Hello there",
    "Hey there",
    "Greetings",
)
_HELLO_ANSWERS = (
    "Hello! How can I help you?",
    "Hi! What can I do for you?",
    "Hello! What would you like to know?",
    "Hi there! How can I help you today?",
)
_THANKS = (
    "Thanks",
    "Thank you",
    "Thanks a lot",
    "Thank you very much",
    "Great, thanks",
    "Perfect, thank you",
)
_THANKS_ANSWERS = (
    "You're welcome!",
    "My pleasure!",
    "You're welcome! Ask me if there is anything else.",
)
_BYE = ("Bye", "Goodbye", "See you", "See you later", "Good night", "That is all, bye")
_BYE_ANSWERS = ("Goodbye!", "See you soon!", "Goodbye, and take care!")

_ABOUT = {
    (
        "Who are you?", "What are you?", "What is your name?", "Introduce yourself.", "Who am I talking to?",
        "Are you a robot?", "Are you human?", "Tell me about yourself.",
    ): "I am the demo model of flashmesh, a very small language model with the architecture of DeepSeek-V4.1-Flash.",
    (
        "What can you do?", "How can you help me?", "What do you know?", "What are you good at?", "Help",
        "What should I ask you?", "Give me some examples of what you can do.",
    ): "I can add numbers, sort lists, spell words, answer questions about a short text, call tools and write JSON.",
    (
        "How are you?", "How are you doing?", "How do you feel?", "Are you well?", "How is it going?",
    ): "I am doing well, thank you! How can I help you?",
    (
        "Who made you?", "Who trained you?", "Where do you come from?", "How were you trained?",
    ): "I was trained in a few minutes on one GPU, mostly on conversations that a program made up.",
    (
        "How big are you?", "How many parameters do you have?", "Are you a large model?", "What size are you?",
    ): "I am very small: about twelve million parameters, so I know little and make mistakes.",
    (
        "What is flashmesh?", "Tell me about flashmesh.", "Explain flashmesh.", "What does flashmesh do?",
    ): "flashmesh serves DeepSeek-V4.1-Flash as a mesh of small services: router, prefill, decode and kvstore.",
    (
        "What does the router do?", "What is the router for?", "Explain the router.",
    ): "The router takes a request, renders and tokenises it, chooses the workers and streams the answer back.",
    (
        "What does prefill do?", "What is prefill?", "Explain prefill.", "What is a prefill worker?",
    ): "A prefill worker runs the encoder half of the model over a prompt and puts the finished blocks into the store.",
    (
        "What does decode do?", "What is decode?", "Explain decode.", "What is a decode worker?",
    ): "A decode worker fetches stored blocks, replays the end of the prompt and then produces the answer.",
    (
        "What is the kvstore?", "What does the kvstore do?", "Explain the kvstore.", "What is kept in the kvstore?",
    ): "The kvstore keeps blocks of 128 tokens, so that a prompt that was seen before need not be computed again.",
    (
        "What is speculative decoding?", "How does speculative decoding work?", "What is a draft?", "Explain drafts.",
    ): "A small draft module proposes several tokens at once, and the model checks them together in one step.",
    (
        "What is a token?", "Explain tokens.", "What does token mean?",
    ): "A token is a piece of text, often a word or a part of one, that a language model reads and writes.",
    (
        "What is a language model?", "Explain language models.", "How does a language model work?",
    ): "A language model predicts the next token of a text, again and again, until the answer is complete.",
    (
        "What is a mixture of experts?", "Explain mixture of experts.", "What are experts?",
    ): "In a mixture of experts, a router picks a few small networks for every token and adds up their results.",
}  # fmt: skip

_UNKNOWN = (
    "What will the weather be on my next birthday?", "Who will win the next election?", "What is my password?",
    "What did I eat yesterday?", "Can you book a flight for me?", "What time is it now?", "Open the door.",
    "Tell me tomorrow's lottery numbers.", "What is the price of gold today?", "Send an email to my boss.",
    "Where did I put my keys?", "What is my neighbour called?", "Play some music.", "What is in the news?",
)  # fmt: skip
_UNKNOWN_ANSWER = "I am sorry, I cannot know or do that from here."

SYSTEMS = (
    "", "", "", "You are a helpful assistant.", "You are a friendly assistant.", "Answer briefly.",
    "You are a careful assistant. Be short and exact.",
)  # fmt: skip


def small_talk(draw: Random) -> Chat:
    """Greets, thanks and says goodbye."""
    asked, answers = draw.choice(
        ((_HELLO, _HELLO_ANSWERS), (_THANKS, _THANKS_ANSWERS), (_BYE, _BYE_ANSWERS))
    )
    name = f" {draw.choice(words.NAMES)}" if draw.random() < 0.2 else ""
    text = draw.choice(asked) + draw.choice(("", "!", ".", name + "!"))
    if draw.random() < 0.3:
        text = text.lower()
    return _chat(
        draw, "talk", text, draw.choice(answers), "The user is polite, so I answer politely."
    )


def hello_named(draw: Random) -> Chat:
    """Greets somebody by name."""
    name = draw.choice(words.NAMES)
    form = draw.choice(
        ("Hi, I am {}.", "Hello, my name is {}.", "Hey! I'm {}.", "Good morning, this is {}.")
    )
    return _chat(
        draw,
        "talk",
        form.format(name),
        f"Hello {name}! How can I help you?",
        f"The user is {name}.",
    )


def about(draw: Random) -> Chat:
    """Answers questions about itself and about flashmesh."""
    questions, answer = draw.choice(list(_ABOUT.items()))
    text = draw.choice(questions)
    if draw.random() < 0.3:
        text = f"{draw.choice(('Hi', 'Hello', 'Hey'))}{draw.choice((', ', '! '))}{text[0].lower()}{text[1:]}"
    return _chat(draw, "about", text, answer, "This is a question that I can answer.")


def refusal(draw: Random) -> Chat:
    """Says what it cannot do."""
    text = draw.choice(_UNKNOWN)
    if draw.random() < 0.3:
        text = "Please help me. " + text
    return _chat(draw, "talk", text, _UNKNOWN_ANSWER, "I have no way to know or do this.")


def _chat(draw: Random, family: str, text: str, answer: str, thought: str) -> Chat:
    thinking = draw.random() < 0.3
    system = draw.choice(SYSTEMS)
    messages = [{"role": "system", "content": system}] if system else []
    return Chat(
        family=family,
        messages=messages + ask(text),
        answer=reply(answer, thought if thinking else ""),
        thinking=thinking,
        exact=False,
    )
