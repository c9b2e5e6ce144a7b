"""Two families of chat prompts: `code`, which the shipped draft was trained on, and `chat`, which it was not.

Each family is built from templates and subjects, put in a fixed order and dealt alternately into two halves:
`train` for making drafts, `traffic` for what the demo sends.
"""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from itertools import product
from typing import Literal

Kind = Literal["code", "chat"]
Split = Literal["train", "traffic"]

_CODE_ASKS = (
    "Write a Python function that {}.",
    "Please write a short Python function which {}.",
    "I need a small Python function that {}. Show me the code.",
    "Can you give me a Python function that {}?",
    "Show me how to write a Python function that {}.",
    "Implement a Python function that {} and add a docstring.",
)

_CODE_STATISTICS = (
    "the sum of",
    "the average of",
    "the largest value in",
    "the smallest value in",
    "the median of",
    "the product of",
    "the second largest value in",
    "the difference between the largest and the smallest value in",
    "the number of even values in",
    "the running total of",
    "the values above the average of",
    "the distinct values in",
    "the most common value in",
)
_CODE_NUMBERS = (
    "a list of integers",
    "a list of floats",
    "a tuple of numbers",
    "a nested list of numbers",
    "the values of a dictionary",
    "a column of a CSV file",
    "a string of comma-separated numbers",
)

_CODE_STRING_ACTIONS = (
    "counts the vowels in",
    "reverses the words of",
    "removes the duplicate letters from",
    "removes all punctuation from",
    "capitalizes every word of",
    "counts how often each word occurs in",
    "finds the longest word in",
    "replaces every space with an underscore in",
    "counts the digits in",
    "extracts all email addresses from",
)
_CODE_TEXTS = (
    "a string",
    "a sentence",
    "a text file",
    "a list of strings",
    "each line of a file",
)

_CODE_TASKS = (
    "checks whether a string is a palindrome",
    "checks whether two words are anagrams",
    "checks whether a number is prime",
    "checks whether a number is a perfect square",
    "checks whether a year is a leap year",
    "checks whether the brackets in a string are balanced",
    "checks whether a list is sorted",
    "checks whether a password is strong enough",
    "checks whether a key exists in a nested dictionary",
    "computes the factorial of a number",
    "computes the n-th Fibonacci number",
    "computes the greatest common divisor of two numbers",
    "computes the least common multiple of two numbers",
    "computes the area of a circle",
    "computes the area of a triangle from its three sides",
    "computes the distance between two points",
    "computes the number of days between two dates",
    "computes the power of a number without the built-in operator",
    "computes the sum of the digits of a number",
    "computes the dot product of two vectors",
    "computes the Hamming distance of two strings",
    "computes compound interest for a number of years",
    "converts Celsius to Fahrenheit",
    "converts miles to kilometers",
    "converts a decimal number to binary",
    "converts a binary string to an integer",
    "converts a Roman numeral to an integer",
    "converts a list of tuples into a dictionary",
    "converts seconds into hours, minutes and seconds",
    "converts snake case to camel case",
    "sorts a list of numbers with bubble sort",
    "sorts a list of numbers with quicksort",
    "sorts a list of dictionaries by a key",
    "sorts a list of words by length",
    "sorts a dictionary by its values",
    "merges two sorted lists",
    "merges two dictionaries",
    "flattens a nested list",
    "splits a list into chunks of a given size",
    "rotates a list by k places",
    "removes duplicates from a list and keeps the order",
    "finds the common elements of two lists",
    "finds the missing number in a list from 1 to n",
    "finds the index of an item with binary search",
    "finds all pairs in a list that add up to a target",
    "finds all divisors of a number",
    "finds all prime numbers below a limit",
    "finds the longest common prefix of a list of strings",
    "returns all permutations of a list",
    "returns all subsets of a set",
    "returns the transpose of a matrix",
    "multiplies two matrices",
    "rolls two dice and returns their sum",
    "generates a random password",
    "shuffles a list in place",
    "encrypts a message with a Caesar cipher",
    "counts the lines in a file",
    "reads a JSON file and returns a dictionary",
    "writes a list of rows to a CSV file",
    "lists all files with a given extension in a folder",
    "measures how long another function takes to run",
    "retries another function up to three times",
    "validates an email address with a regular expression",
    "inserts a node into a linked list",
    "reverses a linked list",
    "computes the height of a binary tree",
    "implements a stack with push and pop",
    "prints a multiplication table",
    "prints a pyramid of stars",
    "plays a round of rock, paper, scissors",
)

_CHAT_GROUPS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (
        (
            "What caused {}?",
            "Tell me about the people who lived through {}.",
            "Why does {} still matter today?",
            "Explain {} to a ten-year-old.",
            "What are common myths about {}?",
        ),
        (
            "the fall of the Roman Empire",
            "the French Revolution",
            "the First World War",
            "the Black Death",
            "the Great Depression",
            "the Industrial Revolution",
            "the fall of the Berlin Wall",
            "the Cold War",
            "the Gold Rush in California",
            "the sinking of the Titanic",
            "the Irish famine",
            "the Viking raids",
            "the race to the Moon",
        ),
    ),
    (
        (
            "How do I cook {}?",
            "My {} turned out too dry. What went wrong?",
            "Which side dishes go well with {}?",
            "Where does {} come from?",
            "Suggest a vegetarian twist on {}.",
        ),
        (
            "mushroom risotto",
            "roast chicken",
            "a lentil curry",
            "lasagne",
            "an apple pie",
            "fish tacos",
            "banana bread",
            "beef stew",
            "pancakes",
            "a potato gratin",
            "paella",
            "shepherd's pie",
        ),
    ),
    (
        (
            "What should I see during two days in {}?",
            "When is the best season to visit {}?",
            "Is {} a good choice for a holiday with small children?",
            "What should I pack for a week in {}?",
            "Describe a quiet morning in {}.",
        ),
        (
            "Lisbon",
            "Kyoto",
            "the Scottish Highlands",
            "Iceland",
            "Morocco",
            "Vienna",
            "New Zealand",
            "Mexico City",
            "the Alps",
            "Istanbul",
            "Cape Town",
            "Venice",
        ),
    ),
    (
        (
            "What helps against {}?",
            "When should I see a doctor because of {}?",
            "My father suffers from {}. How can I support him?",
            "What are the usual causes of {}?",
        ),
        (
            "back pain",
            "a sore throat",
            "trouble falling asleep",
            "migraine",
            "hay fever",
            "high blood pressure",
            "a sprained ankle",
            "dry skin",
            "constant tiredness",
            "heartburn",
            "stiff shoulders",
        ),
    ),
    (
        (
            "I feel {} lately. What can I do?",
            "My sister is {} and I don't know what to say to her.",
            "Why do people get {}?",
            "Write a few kind words for somebody who is {}.",
        ),
        (
            "lonely",
            "nervous before exams",
            "homesick",
            "jealous of a friend",
            "angry at work",
            "overwhelmed by a new baby",
            "bored with everything",
            "sad after a breakup",
            "afraid of flying",
            "proud but exhausted",
            "disappointed in a colleague",
        ),
    ),
    (
        (
            "Why {}?",
            "Explain in simple words why {}.",
            "My daughter wants to know why {}. What do I tell her?",
            "Who first found out why {}?",
        ),
        (
            "the sky is blue",
            "the sea is salty",
            "leaves change color in autumn",
            "the Moon has phases",
            "volcanoes erupt",
            "cats purr",
            "birds fly south in winter",
            "ice floats on water",
            "we dream at night",
            "thunder follows lightning",
            "bread rises in the oven",
            "magnets attract iron",
        ),
    ),
    (
        (
            "Write a polite letter to {}.",
            "Write a short, angry complaint to {}.",
            "Help me thank {} with three warm sentences.",
            "How should I begin an email to {}?",
        ),
        (
            "my landlord about a broken heater",
            "a neighbor whose dog barks at night",
            "the school principal about a trip",
            "an airline about lost luggage",
            "my grandmother for her birthday present",
            "a former boss about a reference",
            "the city council about a dangerous crossing",
            "a hotel about a noisy room",
            "my piano teacher before I move away",
            "a charity that I would like to volunteer for",
        ),
    ),
    (
        (
            "Tell me a short story about {}.",
            "Write a poem of four lines about {}.",
            "Invent a bedtime tale in which {} learns a lesson.",
            "Give me a funny title for a novel about {}.",
        ),
        (
            "a fox who is afraid of the dark",
            "an old lighthouse keeper",
            "two brothers and a stolen boat",
            "a dragon who bakes bread",
            "a girl who talks to the wind",
            "a clockmaker in a silent town",
            "a lost letter from the war",
            "a tired wizard on vacation",
            "a cat that runs a hotel",
            "the last tree in the city",
            "a shy astronaut",
        ),
    ),
    (
        (
            "Is it better to {} or to leave things as they are?",
            "I want to {}. Where do I start?",
            "What are three good reasons to {}?",
            "My friends say I should not {}. Are they right?",
        ),
        (
            "move to the countryside",
            "adopt an older dog",
            "learn the violin as an adult",
            "give up coffee",
            "go back to college at forty",
            "run a marathon",
            "start a vegetable garden",
            "buy a used car",
            "become a nurse",
            "quit social media",
            "save money every month",
            "paint the kitchen yellow",
        ),
    ),
    (
        (
            "Who was {}?",
            "What was {} like as a person?",
            "What would {} say about the world of today?",
            "Which mistakes did {} make?",
        ),
        (
            "Marie Curie",
            "Napoleon Bonaparte",
            "Cleopatra",
            "Mahatma Gandhi",
            "Leonardo da Vinci",
            "Queen Victoria",
            "Abraham Lincoln",
            "Wolfgang Amadeus Mozart",
            "Joan of Arc",
            "Charles Darwin",
            "Frida Kahlo",
        ),
    ),
    (
        (
            "What are the rules of {}?",
            "How can a beginner get better at {}?",
            "Why do so many people love {}?",
            "What equipment do I need for {}?",
        ),
        (
            "chess",
            "tennis",
            "badminton",
            "rock climbing",
            "cricket",
            "sailing",
            "ballroom dancing",
            "poker",
            "ice hockey",
            "archery",
        ),
    ),
    (
        (
            "What is the difference between {}?",
            "Explain with an example how to tell apart {}.",
            "How do I remember the difference between {}?",
        ),
        (
            "a frog and a toad",
            "weather and climate",
            "a violin and a viola",
            "a comet and an asteroid",
            "a novel and a short story",
            "a crocodile and an alligator",
            "jam and marmalade",
            "a republic and a monarchy",
            "butter and margarine",
            "a lake and a pond",
            "an opera and a musical",
        ),
    ),
    (
        (
            "What does a typical day look like for {}?",
            "How do I become {}?",
            "What should I ask {} over dinner?",
            "Would {} still be needed in fifty years?",
        ),
        (
            "a veterinarian",
            "a train driver",
            "a cheese maker",
            "a court judge",
            "a deep-sea diver",
            "a kindergarten teacher",
            "an orchestra conductor",
            "a firefighter",
            "a beekeeper",
            "a museum guide",
        ),
    ),
    (
        (
            "How do I get rid of {}?",
            "Is it safe to ignore {}?",
            "My roommate does not care about {}. How do I bring it up?",
        ),
        (
            "ants in the kitchen",
            "mold in the bathroom",
            "a squeaky door",
            "red wine stains on the carpet",
            "moss on the roof",
            "a smelly fridge",
            "a dripping tap",
            "weeds between the paving stones",
            "dust under the beds",
        ),
    ),
)


def _code() -> list[str]:
    tasks = [f"returns {what} {numbers}" for what, numbers in product(_CODE_STATISTICS, _CODE_NUMBERS)]
    tasks += [f"{action} {text}" for action, text in product(_CODE_STRING_ACTIONS, _CODE_TEXTS)]
    tasks += _CODE_TASKS
    return [ask.format(task) for ask, task in product(_CODE_ASKS, tasks)]


def _chat() -> list[str]:
    return [ask.format(subject) for asks, subjects in _CHAT_GROUPS for ask, subject in product(asks, subjects)]


@cache
def _ordered(kind: Kind) -> tuple[str, ...]:
    family = _code() if kind == "code" else _chat()
    return tuple(sorted(set(family), key=lambda text: sha256(text.encode()).digest()))


def prompts(kind: Kind, split: Split) -> list[str]:
    """The prompts of one kind in a fixed mixed order; `train` and `traffic` share none."""
    return list(_ordered(kind)[0 if split == "train" else 1 :: 2])
