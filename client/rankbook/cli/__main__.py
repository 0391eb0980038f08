"""`python -m rankbook.cli`, for where the script is not on the path."""

from rankbook.cli.main import main

main()
