"""Questions with one right answer: arithmetic, lists, words and small facts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tools.train_demo.chats import words
from tools.train_demo.chats.chat import Chat, ask, reply

if TYPE_CHECKING:
    from random import Random

_SUM = (
    "What is {}?",
    "Calculate {}.",
    "Please compute {}.",
    "How much is {}?",
    "{} = ?",
    "Can you work out {}?",
)


def arithmetic(draw: Random) -> Chat:
    """Sums, differences and products: small ones at once, large ones thought through digit by digit."""
    thinking = draw.random() < 0.5
    sign = draw.choice("++--*")
    if sign == "*":
        a, b = draw.randint(0, 12), draw.randint(0, 12)
        result, thoughts = a * b, _product_thoughts(a, b)
    else:
        top = 999 if thinking else 99
        a, b = draw.randint(0, top), draw.randint(0, top)
        if sign == "-" and a < b:
            a, b = b, a
        result = a + b if sign == "+" else a - b
        thoughts = _column_thoughts(a, b, sign)
    effort = draw.choice(("low", "high"))
    if effort == "low" and a < 100 and b < 100:
        thoughts = f"{a} {sign} {b} = {result}."
    text = draw.choice(_SUM).format(f"{a} {sign} {b}")
    answer = f"{a} {sign} {b} = {result}"
    return Chat(
        family="arithmetic",
        messages=ask(text),
        answer=reply(answer, thoughts if thinking else ""),
        thinking=thinking,
        effort=effort,
    )


def _product_thoughts(a: int, b: int) -> str:
    if min(a, b) < 2:
        return f"A product with {min(a, b)} is easy. {a} * {b} = {a * b}."
    half = a * (b - 1)
    return f"{a} * {b - 1} = {half}, and {half} + {a} = {a * b}."


def _column_thoughts(a: int, b: int, sign: str) -> str:
    """Works through the digits from the right, with carries or borrows."""
    steps = []
    carry = 0
    for place, name in enumerate(("ones", "tens", "hundreds")):
        if place and max(a, b) < 10**place and not carry:
            break
        x, y = a // 10**place % 10, b // 10**place % 10
        term = f"{x} {sign} {y}" + (f" {sign} {carry}" if carry else "")
        value = x + y + carry if sign == "+" else x - y - carry
        steps.append(f"{name}: {term} = {value}")
        carry = int(value > 9) if sign == "+" else int(value < 0)
        digit = value % 10
        if value != digit:
            steps[-1] += f", write {digit}, {'carry' if sign == '+' else 'borrow'} 1"
    if carry:
        steps.append("the carry 1 comes first")
    result = a + b if sign == "+" else a - b
    return "; ".join(steps) + f". Together {result}."


def compare(draw: Random) -> Chat:
    """Which of two numbers is larger or smaller."""
    a, b = draw.sample(range(1000), 2)
    larger = draw.random() < 0.5
    word = "larger" if larger else "smaller"
    form = draw.choice(
        ("Which is {w}, {a} or {b}?", "Which number is {w}: {a} or {b}?", "Is {a} or {b} {w}?")
    )
    result = max(a, b) if larger else min(a, b)
    return _thought(
        draw,
        "compare",
        form.format(w=word, a=a, b=b),
        str(result),
        f"Of {a} and {b}, {result} is {word}.",
    )


def counting(draw: Random) -> Chat:
    """Counts up or down."""
    low = draw.randint(0, 40)
    numbers = list(range(low, low + draw.randint(3, 9)))
    if draw.random() < 0.4:
        numbers.reverse()
    form = draw.choice(
        ("Count from {} to {}.", "Please count from {} to {}.", "Write the numbers from {} to {}.")
    )
    text = form.format(numbers[0], numbers[-1])
    direction = "up" if numbers[0] < numbers[-1] else "down"
    return _thought(
        draw, "counting", text, ", ".join(map(str, numbers)), f"I count {direction} one by one."
    )


def lists(draw: Random) -> Chat:
    """Sorts, reverses, counts and picks from a list of words or numbers."""
    numeric = draw.random() < 0.4
    count = draw.randint(3, 6)
    items = (
        [str(n) for n in draw.sample(range(1, 100), count)]
        if numeric
        else draw.sample(words.WORDS, count)
    )
    shown = ", ".join(items)
    ordinals = ("first", "second", "third", "fourth", "fifth", "sixth")
    task = draw.choice(
        ("sort", "reverse", "count", "pick", "last", "extreme", "remove", "contains", "join")
    )
    if task == "sort":
        ordered = sorted(items, key=int) if numeric else sorted(items)
        how = "from small to large" if numeric else "alphabetically"
        text, result = f"Sort {how}: {shown}", ", ".join(ordered)
        thought = f"The {'smallest' if numeric else 'first in the alphabet'} is {ordered[0]}."
    elif task == "reverse":
        result = ", ".join(reversed(items))
        text = draw.choice(("Reverse this list: {}", "Write this list backwards: {}")).format(shown)
        thought = f"I start with the last item, {items[-1]}."
    elif task == "count":
        text = draw.choice(("How many items are in this list: {}?", "Count the items: {}")).format(
            shown
        )
        result = str(count)
        thought = ", ".join(f"{place} {item}" for place, item in enumerate(items, 1)) + "."
    elif task in ("pick", "last"):
        place = count - 1 if task == "last" else draw.randrange(count)
        name = "last" if task == "last" else ordinals[place]
        text, result = f"What is the {name} item of this list: {shown}?", items[place]
        thought = f"The items are {shown}. The {name} is {items[place]}."
    elif task == "extreme":
        numbers = draw.sample(range(1, 100), count)
        shown, top = ", ".join(map(str, numbers)), draw.random() < 0.5
        text = f"What is the {'largest' if top else 'smallest'} of these numbers: {shown}?"
        result = str(max(numbers) if top else min(numbers))
        thought = f"I compare {shown}."
    elif task == "remove":
        gone = draw.choice(items)
        text = f"Remove {gone} from this list: {shown}"
        result = ", ".join(item for item in items if item != gone)
        thought = f"I keep everything but {gone}."
    elif task == "contains":
        there = draw.random() < 0.5
        others = [w for w in words.WORDS if w not in items]
        wanted = draw.choice(items) if there else draw.choice(others)
        text, result = f"Is {wanted} in this list: {shown}?", "Yes" if there else "No"
        thought = f"The items are {shown}."
    else:
        text, result = f"Join these with hyphens: {shown}", "-".join(items)
        thought = "I put a hyphen between the items."
    return _thought(draw, "lists", text, result, thought)


def word_play(draw: Random) -> Chat:
    """Spells, changes case, repeats, and tells first letters and lengths."""
    word = draw.choice(words.WORDS)
    task = draw.choice(("spell", "upper", "first", "last", "repeat", "length", "capital", "say"))
    quoted = draw.choice((word, f'"{word}"'))
    if task == "spell":
        text, result = f"Spell the word {quoted}.", "-".join(word)
    elif task == "upper":
        text, result = f"Write {quoted} in upper case.", word.upper()
    elif task == "first":
        text, result = f"What is the first letter of {quoted}?", word[0]
    elif task == "last":
        text, result = f"What is the last letter of {quoted}?", word[-1]
    elif task == "repeat":
        times = draw.randint(2, 5)
        text, result = f"Repeat {quoted} {words.NUMBERS[times]} times.", " ".join([word] * times)
    elif task == "length":
        text, result = f"How many letters does {quoted} have?", str(len(word))
    elif task == "capital":
        text, result = f"Write {quoted} with a capital letter.", word.capitalize()
    else:
        made = invented(draw)
        text = draw.choice(
            ("Say {}.", "Please repeat after me: {}", "Write exactly this: {}")
        ).format(made)
        return _thought(draw, "words", text, made, f"I repeat {made}.")
    return _thought(draw, "words", text, result, f"{word} is spelled {'-'.join(word)}.")


def facts(draw: Random) -> Chat:
    """Capitals, opposites, young animals, days and months."""
    kind = draw.choice(("capital", "capital", "country", "opposite", "young", "day", "month"))
    if kind == "capital":
        country, capital = draw.choice(list(words.CAPITALS.items()))
        form = draw.choice(
            (
                "What is the capital of {}?",
                "Which city is the capital of {}?",
                "Name the capital of {}.",
            )
        )
        text, result = form.format(country), f"The capital of {country} is {capital}."
    elif kind == "country":
        country, capital = draw.choice(list(words.CAPITALS.items()))
        text, result = (
            f"Which country has the capital {capital}?",
            f"{capital} is the capital of {country}.",
        )
    elif kind == "opposite":
        pair = draw.choice(list(words.OPPOSITES.items()))
        a, b = pair if draw.random() < 0.5 else pair[::-1]
        form = draw.choice(("What is the opposite of {}?", "Give me the opposite of {}."))
        text, result = form.format(a), f"The opposite of {a} is {b}."
    elif kind == "young":
        animal, young = draw.choice(list(words.YOUNG.items()))
        form = draw.choice(("What is a young {} called?", "What do you call a baby {}?"))
        text, result = form.format(animal), f"A young {animal} is called a {young}."
    else:
        names = words.DAYS if kind == "day" else words.MONTHS
        place, after = draw.randrange(len(names)), draw.random() < 0.5
        near = names[(place + (1 if after else -1)) % len(names)]
        side = "after" if after else "before"
        form = draw.choice(("Which {k} comes {s} {n}?", "What {k} is {s} {n}?"))
        text = form.format(k=kind, s=side, n=names[place])
        result = f"The {kind} {side} {names[place]} is {near}."
    return _thought(draw, "facts", text, result, "I know this.")


def invented(draw: Random) -> str:
    """Makes up a word, so that only copying can repeat it."""
    return "".join(draw.choices(words.SYLLABLES, k=draw.randint(2, 4)))


def _thought(draw: Random, family: str, text: str, result: str, thought: str) -> Chat:
    thinking = draw.random() < 0.3
    return Chat(
        family=family,
        messages=ask(text),
        answer=reply(result, thought if thinking else ""),
        thinking=thinking,
    )
