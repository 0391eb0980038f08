"""`python -m rankbook_vllm.proxy`. NOT for production."""

from __future__ import annotations

import sys

__all__ = ["main"]

_OURS = ("rankbook", "rankbook_vllm")


def main() -> None:
    """Runs the proxy; exits with 1 where what it needs is not installed."""
    try:
        from rankbook_vllm.proxy.command import cli
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if not missing or missing in _OURS:
            raise
        sys.exit(
            f"rankbook_vllm.proxy: {missing} is missing in this environment: "
            "pip install 'rankbook[vllm]'"
        )
    cli.main(prog_name="python -m rankbook_vllm.proxy")


if __name__ == "__main__":
    main()
