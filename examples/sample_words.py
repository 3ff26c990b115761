"""Word pools shared by the generated task and by the base model's pre-training text."""

from __future__ import annotations

NAMES = (
    "Anna", "Ben", "Carla", "David", "Elena", "Felix", "Grace", "Hugo", "Irene", "Jonas",
    "Karin", "Liam", "Maria", "Nina", "Oscar", "Paula", "Robin", "Sara", "Tom", "Vera",
)  # fmt: skip

ADJECTIVES = (
    "red", "blue", "green", "black", "white", "grey", "small", "large", "round", "wooden",
    "steel", "glass", "leather", "cotton", "folding", "electric",
)  # fmt: skip

NOUNS = (
    "lamp", "chair", "table", "kettle", "jacket", "backpack", "bottle", "clock", "mirror",
    "blanket", "printer", "keyboard", "suitcase", "tent", "bicycle", "helmet", "camera",
    "radio", "heater", "toaster", "pillow", "carpet", "shelf", "wallet",
)  # fmt: skip

CITIES = (
    "Berlin", "Oslo", "Madrid", "Vienna", "Dublin", "Prague", "Lisbon", "Athens", "Zurich",
    "Warsaw", "Paris", "Rome",
)  # fmt: skip

ANIMALS = ("cat", "dog", "horse", "bird", "fish", "mouse", "goat", "duck", "bear", "fox")

PLACES = ("garden", "kitchen", "office", "station", "school", "market", "library", "hotel")

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


TOPICS: dict[str, tuple[str, ...]] = {
    "animal": ANIMALS,
    "city": CITIES,
    "day": DAYS,
    "place": PLACES,
    "food": ("bread", "soup", "apple", "rice", "cheese", "egg", "cake", "butter"),
    "weather": ("rain", "snow", "wind", "storm", "cloud", "ice", "fog", "sun"),
    "music": ("song", "piano", "guitar", "drum", "choir", "flute", "concert", "violin"),
    "sport": ("football", "tennis", "swimming", "race", "goal", "team", "ski", "ball"),
}
"""Words by what they are about."""

MOODS: dict[str, tuple[str, ...]] = {
    "happy": ("I am so glad.", "What a lovely day!", "This made me smile.", "It is wonderful."),
    "sad": ("I could cry.", "I miss it so much.", "It is such a pity.", "I feel alone."),
    "angry": ("I am furious!", "How dare they!", "That makes me mad.", "I hate it!"),
    "tired": ("I want to sleep.", "I can hardly stand.", "It was a long night.", "I need rest."),
}
"""Sentences by the mood of the customer."""


def items() -> list[str]:
    """Every "adjective noun" pair, in a fixed order."""
    return [f"{adjective} {noun}" for noun in NOUNS for adjective in ADJECTIVES]
