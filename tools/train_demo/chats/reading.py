"""Questions whose answer stands in the conversation: short texts, codes in longer ones, things said before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tools.train_demo.chats import words
from tools.train_demo.chats.chat import Chat, ask, reply
from tools.train_demo.chats.puzzles import invented

if TYPE_CHECKING:
    from random import Random

_INTRODUCTIONS = (
    "Read this text and answer the question.\n\n{text}\n\n{question}",
    "{text}\n\nQuestion: {question}",
    "{text} {question}",
    "Text: {text}\n\n{question}",
)


def person(draw: Random) -> dict[str, str]:
    """Makes somebody up."""
    name = draw.choice(words.NAMES) if draw.random() < 0.7 else invented(draw).capitalize()
    return {
        "name": name,
        "city": draw.choice(words.CITIES) if draw.random() < 0.7 else invented(draw).capitalize(),
        "age": str(draw.randint(5, 90)),
        "job": draw.choice(words.JOBS),
        "hobby": draw.choice(words.HOBBIES),
        "pet": draw.choice(words.ANIMALS),
        "food": draw.choice(words.FOODS),
        "colour": draw.choice(words.COLOURS),
        "pet_name": draw.choice(words.NAMES)
        if draw.random() < 0.5
        else invented(draw).capitalize(),
    }


_STATEMENTS = {
    "city": (
        "{name} lives in {city}.",
        "{name} comes from {city}.",
        "The home of {name} is {city}.",
    ),
    "age": ("{name} is {age} years old.", "{name} turned {age} this year."),
    "job": ("{name} works as a {job}.", "{name} is a {job}."),
    "hobby": ("{name} likes {hobby}.", "In the evening {name} enjoys {hobby}."),
    "pet": ("{name} has a {pet} called {pet_name}.", "The {pet} of {name} is called {pet_name}."),
    "food": ("{name} often eats {food}.", "The favourite food of {name} is {food}."),
    "colour": (
        "The favourite colour of {name} is {colour}.",
        "{name} likes {colour} more than any other colour.",
    ),
}
_QUESTIONS = {
    "city": (
        ("Where does {name} live?", "{city}"),
        ("Where is {name} from?", "{city}"),
        ("Who is from {city}?", "{name}"),
    ),
    "age": (("How old is {name}?", "{age}"), ("What is the age of {name}?", "{age}")),
    "job": (("What is the job of {name}?", "{job}"), ("Who works as a {job}?", "{name}")),
    "hobby": (("What does {name} like to do?", "{hobby}"), ("Who likes {hobby}?", "{name}")),
    "pet": (
        ("What is the {pet} called?", "{pet_name}"),
        ("What animal does {name} have?", "{pet}"),
        ("Who has a {pet}?", "{name}"),
    ),
    "food": (("What does {name} eat?", "{food}"), ("Who eats {food}?", "{name}")),
    "colour": (
        ("What is the favourite colour of {name}?", "{colour}"),
        ("Whose favourite colour is {colour}?", "{name}"),
    ),
}


def people(draw: Random, count: int) -> list[dict[str, str]]:
    """Makes people up who share no trait, so that every question has one answer."""
    found: list[dict[str, str]] = []
    while len(found) < count:
        new = person(draw)
        if not any(set(new.values()) & set(old.values()) for old in found):
            found.append(new)
    return found


def reading(draw: Random) -> Chat:
    """A question about a text of a few sentences on one to three people."""
    folk = people(draw, draw.randint(1, 3))
    sentences = []
    known = []
    for who in folk:
        traits = draw.sample(sorted(_STATEMENTS), draw.randint(2, 4))
        known += [(who, trait) for trait in traits]
        sentences += [
            words.articles(draw.choice(_STATEMENTS[trait]).format(**who)) for trait in traits
        ]
    who, trait = draw.choice(known)
    question, answer = (
        words.articles(part.format(**who)) for part in draw.choice(_QUESTIONS[trait])
    )
    source = next(s for (w, t), s in zip(known, sentences, strict=True) if (w, t) == (who, trait))
    if draw.random() < 0.3 and len(folk) > 1:
        draw.shuffle(sentences)
    text = draw.choice(_INTRODUCTIONS).format(text=" ".join(sentences), question=question)
    thinking = draw.random() < 0.35
    thought = f'The text says: "{source}" So the answer is {answer}.'
    return Chat(
        family="reading",
        messages=ask(text),
        answer=reply(answer, thought if thinking else ""),
        thinking=thinking,
    )


def recall(draw: Random) -> Chat:
    """A code among many others, up to several hundred tokens back."""
    count = draw.randint(3, 40)
    things = draw.sample([f"{c} {t}" for c in words.COLOURS for t in words.THINGS], count)
    codes = [str(code) for code in draw.sample(range(100, 1000), count)]
    form = draw.choice(("The code of the {} is {}.", "The {} has the number {}.", "{}: {}"))
    separator = "\n" if form == "{}: {}" else " "
    text = separator.join(form.format(t, c) for t, c in zip(things, codes, strict=True))
    place = draw.randrange(count)
    question = draw.choice(
        ("What is the code of the {}?", "Which number has the {}?", "Tell me the number of the {}.")
    )
    asked = draw.choice(("Here is a list.\n{}\n\n{}", "{}\n\n{}", "Remember this: {}\n{}"))
    return Chat(
        family="recall",
        messages=ask(asked.format(text, question.format(things[place]))),
        answer=reply(codes[place]),
    )


def memory(draw: Random) -> Chat:
    """Something that the user said some turns before."""
    who = person(draw)
    kind = draw.choice(("name", "food", "colour", "age", "pet", "city"))
    said, question, answer = {
        "name": ("My name is {name}.", "What is my name?", "Your name is {name}."),
        "food": ("I like {food}.", "What do I like?", "You like {food}."),
        "colour": ("I like the colour {colour}.", "Which colour do I like?", "You like {colour}."),
        "age": ("I am {age} years old.", "How old am I?", "You are {age} years old."),
        "pet": ("I have a {pet}.", "Which animal do I have?", "You have a {pet}."),
        "city": ("I live in {city}.", "Where do I live?", "You live in {city}."),
    }[kind]  # fmt: skip
    said, answer = (words.articles(text.format(**who)) for text in (said, answer))
    messages = [*ask(said), reply("Thank you, I will remember that.")]
    for _ in range(draw.randint(0, 3)):
        a, b = draw.randint(1, 20), draw.randint(1, 20)
        word = draw.choice(words.WORDS)
        turn = draw.choice(
            (
                (f"What is {a} + {b}?", f"{a} + {b} = {a + b}"),
                (f"Write {word} in upper case.", word.upper()),
                ("Thanks", "You're welcome!"),
            )
        )
        messages += [*ask(turn[0]), reply(turn[1])]
    thinking = draw.random() < 0.3
    thought = f'Earlier the user said: "{said}"'
    return Chat(
        family="memory",
        messages=messages + ask(question),
        answer=reply(answer, thought if thinking else ""),
        thinking=thinking,
    )
