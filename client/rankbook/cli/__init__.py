"""The `rankbook` command: what an operator sees of the book.

    main        the group, the one boundary that turns errors into exit codes
    settings    flag > RANKBOOK_* > default, each value with its origin
    output      data on stdout, words on stderr; terminal, pipe and JSON forms
    picture     an engine drawn: facts, grid, problems in words (pure)
    grid        the grid of it: stages by ranks (pure)
    findings    what `doctor` looks for (pure)
    records     reading record files (pure but for the file)
    synthetic   made-up engines for `simulate` (pure)

The other modules hold one group of commands each. Exit codes: 0 done, 1 failed
(a timeout too), 2 usage, 3 not found, 4 unreachable, 5 refused by state or
rule, 6 not permitted, 130 interrupted.
"""
