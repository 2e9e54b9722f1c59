"""The words that conversations are made of."""

# ruff: noqa: SIM905 - words read better without quotes around each

from __future__ import annotations

import re

NAMES = (
    "Anna Ben Clara David Emma Felix Greta Hugo Ida Jonas Karla Leo Mia Noah Olga Paul Rosa Simon Tara Uma Victor "
    "Wanda Yara Zoe Adam Bella Carlos Diana Erik Fatima George Hana Ivan Julia Kofi Lena Marco Nina Omar Priya "
    "Quinn Rafael Sara Tom Ursula Vera Walter Xenia Yusuf Zara Alice Bruno Chloe Daniel Elena Frank Grace Henry "
    "Irene Jack Kate Liam Maria Nora Oscar Petra Ravi Sofia Theo Lucy Max Ella Sam Ruth Peter Mary John Jane Bob"
).split()

CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin", "Portugal": "Lisbon",
    "Austria": "Vienna", "Greece": "Athens", "Norway": "Oslo", "Sweden": "Stockholm", "Denmark": "Copenhagen",
    "Finland": "Helsinki", "Poland": "Warsaw", "Hungary": "Budapest", "Ireland": "Dublin", "Belgium": "Brussels",
    "Japan": "Tokyo", "China": "Beijing", "India": "New Delhi", "Egypt": "Cairo", "Kenya": "Nairobi",
    "Canada": "Ottawa", "Mexico": "Mexico City", "Brazil": "Brasilia", "Peru": "Lima", "Chile": "Santiago",
    "Cuba": "Havana", "Turkey": "Ankara", "Russia": "Moscow", "Ukraine": "Kyiv", "Iceland": "Reykjavik",
    "Thailand": "Bangkok", "Vietnam": "Hanoi", "South Korea": "Seoul", "Australia": "Canberra",
    "New Zealand": "Wellington", "Argentina": "Buenos Aires", "Morocco": "Rabat", "Ghana": "Accra",
    "the Netherlands": "Amsterdam", "the United Kingdom": "London", "Croatia": "Zagreb", "Serbia": "Belgrade",
}  # fmt: skip

CITIES = [
    *CAPITALS.values(),
    *"Hamburg Lyon Milan Porto Kyoto Boston Chicago Toronto Sydney Mumbai Geneva Turin".split(),
]

ANIMALS = (
    "cat dog horse cow pig sheep goat duck goose hen rabbit mouse fox wolf bear deer owl eagle crow swan frog snake "
    "lion tiger zebra camel monkey parrot turtle whale shark seal otter beaver hedgehog squirrel bee ant spider"
).split()

FRUITS = (
    "apple pear plum cherry grape lemon orange banana mango melon peach fig lime kiwi apricot"
).split()

THINGS = (
    "lamp chair table book pen cup plate spoon knife clock mirror window door key box bag coin ring rope stone "
    "basket bottle candle hammer ladder letter map piano radio shoe hat coat glove scarf umbrella bicycle boat train "
    "kite drum flute violin pillow blanket carpet bucket broom needle button ribbon"
).split()

COLOURS = "red blue green yellow black white brown grey purple orange pink".split()
ADJECTIVES = (
    "small big old new quiet happy clever brave tired kind funny strong gentle curious".split()
)
FOODS = "bread cheese soup rice pasta salad pizza cake honey pancakes noodles potatoes".split()
JOBS = "baker teacher doctor painter farmer driver pilot singer gardener nurse writer carpenter".split()
HOBBIES = "chess football swimming dancing painting reading cooking fishing hiking singing cycling knitting".split()
ROOMS = "kitchen bedroom garden office garage cellar attic hall bathroom library".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = (
    "January February March April May June July August September October November December"
).split()
NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve".split()
LANGUAGES = "French German Spanish Italian Japanese Portuguese Greek Polish".split()

OPPOSITES = {
    "hot": "cold", "big": "small", "fast": "slow", "high": "low", "old": "young", "happy": "sad", "light": "dark",
    "open": "closed", "full": "empty", "early": "late", "hard": "soft", "wet": "dry", "strong": "weak",
    "rich": "poor", "long": "short", "loud": "quiet", "clean": "dirty", "true": "false", "left": "right",
    "up": "down", "day": "night", "first": "last", "good": "bad", "near": "far", "thick": "thin", "wide": "narrow",
}  # fmt: skip

YOUNG = {
    "cat": "kitten", "dog": "puppy", "cow": "calf", "horse": "foal", "sheep": "lamb", "pig": "piglet",
    "hen": "chick", "duck": "duckling", "goose": "gosling", "bear": "cub", "deer": "fawn", "goat": "kid",
    "frog": "tadpole", "swan": "cygnet",
}  # fmt: skip

WORDS = [*ANIMALS, *FRUITS, *THINGS]

SYLLABLES = (
    "ba be bo da de du fa fi ga go ka ki lo lu ma mi mo na no pa po ra ri ro sa se ta ti to va vi zo zu"
).split()


def articles(text: str) -> str:
    """Writes "an" before a vowel."""
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)
