"""x"""


def doctor() -> None:
    """x"""
