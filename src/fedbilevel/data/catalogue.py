"""Which data sets there are; nothing is imported that reads them."""

CLASSES = {"breast-cancer": 2, "cifar10": 10, "covertype": 7, "digits": 10, "mnist": 10}
CHARACTERS = ("digits", "omniglot")


def names() -> list[str]:
    """Return the names of the data sets that `load` or `characters` know."""
    return sorted(CLASSES.keys() | CHARACTERS)
