"""Runs a vLLM node that only lends its workers to another node's engine.

What `vllm serve --headless` does, for a vLLM that was installed under another
name: its command line asks for the version of a distribution named "vllm".
"""

from vllm.entrypoints.cli.serve import run_headless
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args()
    arguments.api_server_count = 0  # as serve does it with --headless
    run_headless(arguments)
