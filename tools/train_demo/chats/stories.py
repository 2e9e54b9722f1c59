"""Plain texts without a conversation: little tales, so that a raw prompt goes on readably."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tools.train_demo.chats import words

if TYPE_CHECKING:
    from random import Random

_OPENINGS = (
    "Once upon a time there was a {adj} {animal} called {name}.",
    "Once upon a time, in {city}, lived a {adj} {job} called {name}.",
    "There was once a {adj} {animal} that lived in a {room}.",
    "Long ago, a {adj} {job} found a {colour} {thing}.",
    "One {day} in {month}, {name} the {job} woke up early.",
    "A {adj} {animal} and a {adj2} {animal2} were good friends.",
)
_MIDDLES = (
    "Every day {name} looked for {food}.",
    "{name} had a {colour} {thing} and took it everywhere.",
    "One day the {thing} was gone.",
    "{name} asked the {animal2} for help.",
    "\"Have you seen my {thing}?\" asked {name}.",
    "\"Try the {room}\", said the {animal2}.",
    "They walked all the way to {city}.",
    "It was {adj2} there, and nobody spoke.",
    "In the {room} stood a {colour} {thing}.",
    "The {animal2} was {adj2} and did not want to go on.",
    "They ate {food} and talked until it was dark.",
    "On {day} they came to a {colour} house.",
    "An old {job} opened the door and laughed.",
    "{name} was not afraid.",
)  # fmt: skip
_ENDINGS = (
    "In the end {name} found the {thing} under a {colour} {thing2}.",
    "So {name} went home and was {adj2} again.",
    "From that {day} on, they were friends.",
    "And they lived happily ever after.",
    "Then everybody went to sleep.",
)


def story(draw: Random) -> str:
    """Tells a tale of five to nine sentences about one hero."""
    animal, animal2 = draw.sample(words.ANIMALS, 2)
    adj, adj2 = draw.sample(words.ADJECTIVES, 2)
    thing, thing2 = draw.sample(words.THINGS, 2)
    scene = {
        "name": draw.choice(words.NAMES), "city": draw.choice(words.CITIES), "job": draw.choice(words.JOBS),
        "room": draw.choice(words.ROOMS), "colour": draw.choice(words.COLOURS), "food": draw.choice(words.FOODS),
        "day": draw.choice(words.DAYS), "month": draw.choice(words.MONTHS), "animal": animal, "animal2": animal2,
        "adj": adj, "adj2": adj2, "thing": thing, "thing2": thing2,
    }  # fmt: skip
    middles = sorted(draw.sample(range(len(_MIDDLES)), draw.randint(3, 6)))
    sentences = [
        draw.choice(_OPENINGS),
        *(_MIDDLES[place] for place in middles),
        draw.choice(_ENDINGS),
    ]
    return words.articles(" ".join(sentences).format(**scene))
