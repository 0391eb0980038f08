"""Moving a book between stores: a file of everything in it, and back.

Theory of operation. An export is one snapshot of a store, as it lies there
(`export_file`). An import checks the whole file, puts the revisions right for
the book that takes it in (`rebase`), and writes it in as many transactions as it
takes, with a mark that stands from the first to the last (`book`). Who finds the
mark finds a book that is not whole: a server does not read it, and the next
import says how to go on (`mark`).
"""
