"""The pure core: decides what a book becomes, and does no I/O.

Theory of operation. A `Book` is the fold of what a store keeps for one
namespace. A decision reads the book and returns the operations that would
change it, with the reply to give once they are committed; it changes nothing
itself. The registry folds the operations back in with `Book.apply`, which is
also how a snapshot is loaded. So what is decided, what is stored and what is
shown cannot drift apart.

Time, ids and the client's words come in by argument. Only lease deadlines
live in memory alone: a renewal writes nothing.
"""
