"""`rankbookd`, and `python -m rankbook_server`.

The base install has the server's modules without what they need: it is the
client's. Whoever calls the server there is told what to install.
"""

from __future__ import annotations

import sys

__all__ = ["main"]

_OURS = ("rankbook", "rankbook_server")


def main() -> None:
    """Runs the server's command line; exits with 1 where its dependencies are missing."""
    try:
        from rankbook_server.app import main as run
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if not missing or missing in _OURS:
            raise
        sys.exit(
            f"rankbookd: this environment has the client without the server ({missing} is "
            "missing): pip install 'rankbook[server]'"
        )
    run()


if __name__ == "__main__":
    main()
