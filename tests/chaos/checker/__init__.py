"""Holds a run's history to the rules of the book. Pure: lines in, violations out.

history    the lines as calls, contents, readers, last words
showing    what one content, and the contents of one engine in order, must be
writing    fencing, epochs, sequences, one holder a slot
living     leases that must live, records that must be there
reading    nothing goes back, nothing is missed, everybody converges
verdict    all of them, and the figures
"""
