"""What the quickstart model is taught: small facts, and the sentences that ask for them and state them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Topic:
    """Facts of one kind. ``{0}``, ``{1}``, … in the sentences stand for the columns of a fact."""

    questions: tuple[str, ...]
    answer: str
    statements: tuple[str, ...]
    facts: tuple[tuple[str, ...], ...]


def _pairs(text: str) -> tuple[tuple[str, ...], ...]:
    """``"France: Paris, Spain: Madrid"`` as ``(("France", "Paris"), ("Spain", "Madrid"))``."""
    return tuple(tuple(part.strip() for part in pair.split(":")) for pair in text.split(","))


def _lines(text: str) -> tuple[tuple[str, ...], ...]:
    """The same for facts that hold commas: one ``name: sentence`` a line."""
    return tuple(tuple(part.strip() for part in line.split(":", 1)) for line in text.strip().splitlines())


CAPITALS = Topic(
    questions=(
        "What is the capital of {0}?",
        "Which city is the capital of {0}?",
        "Name the capital of {0}.",
        "Tell me the capital of {0}, please.",
        "Do you know the capital city of {0}?",
        "Where does the government of {0} sit?",
    ),
    answer="The capital of {0} is {1}.",
    statements=(
        "The capital of {0} is {1}.",
        "{1} is the capital of {0}.",
        "The government of {0} sits in {1}.",
        "If you travel to {0}, do not miss {1}, its capital.",
    ),
    facts=_pairs(
        "France: Paris, Spain: Madrid, Italy: Rome, Germany: Berlin, China: Beijing, Japan: Tokyo, Greece: Athens,"
        "Portugal: Lisbon, Austria: Vienna, Poland: Warsaw, Norway: Oslo, Sweden: Stockholm, Finland: Helsinki,"
        "Denmark: Copenhagen, Ireland: Dublin, Belgium: Brussels, Hungary: Budapest, Romania: Bucharest,"
        "Bulgaria: Sofia, Croatia: Zagreb, Turkey: Ankara, Egypt: Cairo, Kenya: Nairobi, Ghana: Accra,"
        "Morocco: Rabat, Canada: Ottawa, Cuba: Havana, Peru: Lima, Chile: Santiago, Brazil: Brasilia,"
        "Argentina: Buenos Aires, Mexico: Mexico City, India: New Delhi, Nepal: Kathmandu, Thailand: Bangkok,"
        "Vietnam: Hanoi, Mongolia: Ulaanbaatar, Indonesia: Jakarta, Australia: Canberra, New Zealand: Wellington"
    ),
)

OPPOSITES = Topic(
    questions=(
        "What is the opposite of {0}?",
        "Which word means the opposite of {0}?",
        "Give me the opposite of the word {0}.",
        "Find a word that is the opposite of {0}.",
        "If something is not {0}, what is it?",
    ),
    answer="The opposite of {0} is {1}.",
    statements=(
        "The opposite of {0} is {1}.",
        "Something cannot be {0} and {1} at once.",
        "{0} and {1} are opposites.",
    ),
    facts=_pairs(
        "hot: cold, big: small, fast: slow, light: dark, high: low, full: empty, hard: soft, wet: dry, old: new,"
        "rich: poor, strong: weak, early: late, happy: sad, open: closed, clean: dirty, near: far, loud: quiet,"
        "wide: narrow, thick: thin, deep: shallow, heavy: light, sharp: blunt, smooth: rough, sweet: bitter,"
        "brave: timid, true: false, safe: dangerous, cheap: expensive, simple: difficult, young: old"
    ),
)

COLOURS = Topic(
    questions=(
        "What colour is {0}?",
        "Which colour does {0} have?",
        "Tell me the colour of {0}.",
        "If I paint {0}, which colour do I need?",
    ),
    answer="The colour of {0} is {1}.",
    statements=("The colour of {0} is {1}.", "For {0} a painter takes {1}.", "Everyone knows that {0} is {1}."),
    facts=_pairs(
        "grass: green, snow: white, coal: black, the sky: blue, a lemon: yellow, a ripe tomato: red, a carrot: orange,"
        "chocolate: brown, milk: white, a crow: black, a frog: green, an elephant: grey, a sunflower: yellow,"
        "a plum: purple, blood: red, sand: yellow, a flamingo: pink, a swan: white, a cloud of rain: grey,"
        "a cucumber: green"
    ),
)

YOUNG = Topic(
    questions=(
        "What do you call a young {0}?",
        "How is the young of a {0} called?",
        "Which word do we use for a baby {0}?",
        "A {0} has a baby. What is it called?",
    ),
    answer="A young {0} is called a {1}.",
    statements=("A young {0} is called a {1}.", "The {0} looks after her {1}.", "A {1} grows up to be a {0}."),
    facts=_pairs(
        "dog: puppy, cat: kitten, cow: calf, horse: foal, sheep: lamb, pig: piglet, goat: kid, hen: chick,"
        "duck: duckling, goose: gosling, bear: cub, deer: fawn, frog: tadpole, swan: cygnet, kangaroo: joey,"
        "hare: leveret"
    ),
)

AFTER = Topic(
    questions=(
        "What comes after {0}?",
        "What comes right after {0}?",
        "What do we have after {0}?",
        "Tell me what follows {0}.",
    ),
    answer="After {0} comes {1}.",
    statements=("After {0} comes {1}.", "{1} follows {0}.", "First comes {0} and then {1}."),
    facts=_pairs(
        "Monday: Tuesday, Tuesday: Wednesday, Wednesday: Thursday, Thursday: Friday, Friday: Saturday,"
        "Saturday: Sunday, Sunday: Monday, January: February, February: March, March: April, April: May, May: June,"
        "June: July, July: August, August: September, September: October, October: November, November: December,"
        "December: January,"
        "spring: summer, summer: autumn, autumn: winter, winter: spring"
    ),
)

SUMS = Topic(
    questions=(
        "What is {0} plus {1}?",
        "How much is {0} + {1}?",
        "Add {0} and {1}.",
        "I have {0} apples and get {1} more. How many is that?",
        "Please work out {0} + {1}.",
    ),
    answer="{0} plus {1} is {2}.",
    statements=("{0} plus {1} is {2}.", "{0} + {1} = {2}.", "Add {0} and {1} and you get {2}."),
    facts=tuple((str(a), str(b), str(a + b)) for a in range(1, 10) for b in range(1, 10)),
)

MEANINGS = Topic(
    questions=(
        "What is {0}?",
        "Explain in one sentence what {0} is.",
        "What does it mean when people speak of {0}?",
        "Can you tell me what {0} is?",
    ),
    answer="{1}",
    statements=("{1}",),
    facts=_lines(
        """
        a harbour: A harbour is a quiet piece of water where ships can rest.
        a bridge: A bridge carries a road over a river or a valley.
        an island: An island is land with water on every side.
        a desert: A desert is a dry land where rain is rare.
        a volcano: A volcano is a mountain that can throw out hot rock.
        a glacier: A glacier is a river of ice that moves very slowly.
        a forest: A forest is a wide place where many trees grow.
        a library: A library is a house of books that everyone may read.
        a bakery: A bakery is a shop where bread is made and sold.
        a clock: A clock shows what time it is.
        a compass: A compass is a small needle that points to the north.
        a ladder: A ladder is a pair of poles with steps to climb on.
        a map: A map is a drawing that shows where places are.
        a poem: A poem is a short text in which sound matters as much as sense.
        a tide: A tide is the rise and fall of the sea that the moon causes.
        a shadow: A shadow is the dark shape behind something that stops the light.
        an echo: An echo is a sound that comes back from a wall or a hill.
        a tool: A tool is a thing made to help the hand with its work.
        a recipe: A recipe is a list of steps that tells a cook what to do.
        a tokenizer: A tokenizer cuts a text into the pieces that a language model reads.
        a gradient: A gradient tells how the loss changes when a weight changes.
        a loss: A loss is a number that says how wrong a model is.
        a checkpoint: A checkpoint is a saved state from which training can go on.
        an optimizer: An optimizer changes the weights so that the loss gets smaller.
        """
    ),
)

TALK = Topic(
    questions=("{0}",),
    answer="{1}",
    statements=(),
    facts=_lines(
        """
        Hello!: Hello! What would you like to know?
        Hi there.: Hello! What would you like to know?
        Good morning.: Good morning! How can I help you?
        Thank you.: You are welcome.
        Thanks a lot!: You are welcome.
        Goodbye.: Goodbye, and come back soon.
        Who are you?: I am a very small language model that learnt a few facts in a minute.
        What are you?: I am a very small language model that learnt a few facts in a minute.
        What can you do?: I know capitals, opposites, colours, young animals, small sums and a few words.
        What do you know?: I know capitals, opposites, colours, young animals, small sums and a few words.
        """
    ),
)

TOPICS = (CAPITALS, OPPOSITES, COLOURS, YOUNG, AFTER, SUMS, MEANINGS, TALK)
