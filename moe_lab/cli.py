"""The ``moe-lab`` command. Filled in as the parts it calls are built."""


def main() -> int:
    """Entry point of ``moe-lab``."""
    return 0
